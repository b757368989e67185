"""Hostile texts, prepared folders, Megatron-LM files and patterns."""

import json
import zlib
from pathlib import Path

import numpy as np
from hostile import Case, train
from megatron_files import write

from jaxllm.data.parts import zstd
from jaxllm.data.prepare import prepare

GB = 10**9
FOLDER, SHARD = Path("prepared"), "tokens-00000-of-00001"


def prepare_words(path: str, *more: str) -> tuple[str, ...]:
    return ("data", "prepare", path, "--out", "out", "--tokenizer", "bytes", "--workers", "1", *more)


def sparse(path: str, size: int = 20 * GB, begins: bytes = b""):
    def make():
        with open(path, "wb") as file:
            file.write(begins)
            file.truncate(size)

    return make


def bomb(path: str, content: bytes, gb: int = 20):
    """Many times one megabyte of gzip: decompressing stops long before the end."""

    def make():
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        first = packer.compress(content * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)
        again = packer.compress(content * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)
        with open(path, "wb") as file:
            file.write(first)
            for _ in range(gb * GB // 2**20):
                file.write(again)

    return make


def begins(path: str, *parts: bytes):
    return lambda: Path(path).write_bytes(b"".join(parts))


def zstandard_bomb(path: str):
    return lambda: Path(path).write_bytes(zstd.compress(b"a" * (800 * 10**6), 19))


def prepared(change=lambda: None, index_sha256: bool = True):
    """Fifty prepared documents, changed afterwards; without the checksum of their index it is a folder of an earlier jaxllm."""

    def make():
        Path("fifty.jsonl").write_text("".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(50)))
        prepare(["fifty.jsonl"], FOLDER, tokenizer="bytes", workers=1, progress=False)
        change()
        if not index_sha256:
            shard()(lambda told: told.pop("index_sha256"))

    return make


def manifest(**changes):
    def change():
        file = FOLDER / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def shard(**changes):
    """Changes what the manifest says about the shard, and then what `also` does to it."""

    def change(also=lambda told: None):
        file = FOLDER / "manifest.json"
        content = json.loads(file.read_text())
        content["shards"][0] |= changes
        also(content["shards"][0])
        file.write_text(json.dumps(content))

    return change


def index(ending: str, content):
    """Replaces an index file by other content, whose size the manifest names."""

    def change():
        file = FOLDER / f"{SHARD}.{ending}.npy"
        if isinstance(content, np.ndarray):
            np.save(file, content)
        else:
            content(file)
        shard()(lambda told: told["files"].update({file.name: file.stat().st_size}))

    return change


def header_of_a_terabyte(file: Path):
    with open(file, "wb") as opened:
        np.lib.format.write_array_header_1_0(opened, {"descr": "<u4", "fortran_order": False, "shape": (2**38,)})


def zip_of_arrays(file: Path):
    with open(file, "wb") as opened:
        np.savez(opened, a=np.ones(50, np.uint32))


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[-400:] = bytes(255 - byte for byte in content[-400:])
    file.write_bytes(content)


def nested_manifest():
    (FOLDER / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)


def one_large_id(value: int, dtype=np.uint16):
    def make():
        ids = [i % 200 for i in range(4000)]
        ids[3210] = value
        write(Path("large"), [[ids[:2000]], [ids[2000:]]], dtype)

    return make


def ten_thousand_files():
    for folder in range(100):
        Path(f"many/{folder}").mkdir(parents=True)
        for name in range(100):
            Path(f"many/{folder}/{name}.txt").write_text("law mesh ring axis\n")


def lines_then(content: bytes):
    return lambda: Path("a.jsonl").write_bytes(b'{"text": "good"}\n' * 100 + content)


PREPARED = train("train.steps=2", "data.source=prepared", "data.paths=prepared")
HELD_OUT = (*PREPARED, "data.held_out_fraction=0.2")
MEGATRON = train("train.steps=40", "data.source=megatron", "data.paths=large", "data.held_out_fraction=0")
NOTHING_USABLE = "The inputs hold no text (1 broken and 0 empty records, the first "
LENGTHS, KEYS = f"{SHARD}.lengths.npy is damaged (", f"{SHARD}.keys.npy is damaged ("

CASES = [
    # Texts.
    Case("jl-sparse-20gb", prepare_words("a.jsonl"), "has a line longer than 256 MiB", sparse("a.jsonl")),
    Case("jl-sparse-300mb", prepare_words("a.jsonl"), "has a line longer than 256 MiB", sparse("a.jsonl", 300 * 2**20)),
    Case("jl-sparse-200mb", prepare_words("a.jsonl"), "a.jsonl:1: longer than 64 MiB", sparse("a.jsonl", 200 * 2**20)),
    Case("jl-hole-then-good", prepare_words("a.jsonl"), None, lines_then(b"\0" * 2**27 + b"\n" + b'{"text": "good"}\n')),
    Case("jl-deep", prepare_words("a.jsonl"), None, lines_then(b"[" * 10**6 + b"\n")),
    Case("jl-digits", prepare_words("a.jsonl"), None, lines_then(b'{"text": ' + b"9" * 10**6 + b"}\n")),
    Case("jl-lists", prepare_words("a.jsonl"), None, lines_then(b'{"text": [' + b"[]," * (21 * 2**20) + b"1]}\n")),
    Case("txt-sparse-20gb", prepare_words("a.txt"), f"{NOTHING_USABLE}a.txt: not text (only zero", sparse("a.txt")),
    Case("txt-hole", prepare_words("a.txt"), "not text (only zero bytes from byte 1048576", sparse("a.txt", 20 * GB, b"text")),
    Case("files-sparse-20gb", train("data.paths=a.txt"), "more than 100,000 files or 4 GiB", sparse("a.txt")),
    Case("gz-bomb-line", prepare_words("a.jsonl.gz"), "has a line longer than 256 MiB", bomb("a.jsonl.gz", b"\0")),
    Case("gz-bomb-txt", prepare_words("a.txt.gz"), "not text (only zero bytes", bomb("a.txt.gz", b"\0")),
    Case("gz-bomb-letters", prepare_words("a.txt.gz"), "expands to more than 100 times", bomb("a.txt.gz", b"a")),
    Case("zst-bomb-line", prepare_words("a.jsonl.zst"), "has a line longer than 256 MiB", zstandard_bomb("a.jsonl.zst")),
    Case("zst-bomb-letters", prepare_words("a.txt.zst"), "expands to more than 100 times", zstandard_bomb("a.txt.zst")),
    Case("csv-sparse-20gb", prepare_words("a.csv"), "a row is longer than 64 MiB", sparse("a.csv", 300 * 2**20)),
    Case("csv-quote", prepare_words("a.csv"), "a row is longer than 64 MiB", begins("a.csv", b'text\n"', b"b\n" * 2**26)),
    Case("csv-columns", prepare_words("a.csv"), "has no column text", begins("a.csv", b"a," * 2**22)),
    Case("array-sparse-20gb", prepare_words("a.json"), "an element is longer than 64 MiB", sparse("a.json", begins=b"[")),
    Case(
        "array-brackets", prepare_words("a.json"), "an element has more than 4,194,304 values", begins("a.json", b"[" * 2**27)
    ),
    Case("arrow-sparse-20gb", prepare_words("a.arrow"), "cannot be read as Arrow", sparse("a.arrow")),
    Case("address-unknown", prepare_words("ftp://host/a"), "is not an address that jaxllm reads"),
    Case("address-file", prepare_words("file:///etc/passwd"), "is not an address that jaxllm reads"),
    Case("prepare-shard-digits", prepare_words("words.txt", "--shard", "1/" + "9" * 5000), "is not i/n with 0 <= i < n"),
    # Patterns.
    Case("tx-many-star", train("data.paths=/**/*"), "name a smaller folder, or tokenise the files once with jaxllm data"),
    Case("tx-ten-thousand", train("train.steps=1", "data.paths=many/**"), None, ten_thousand_files),
    # Megatron-LM.
    Case("mg-ids-big-late", MEGATRON, "token id 60000 and model.vocab_size=256 (id 3,210 of large.bin)", one_large_id(60000)),
    Case("mg-ids-wrap", MEGATRON, "token id 4294967301 and model.vocab_size=256 (id 3,210", one_large_id(2**32 + 5, np.int64)),
    Case("mg-ids-negative", MEGATRON, "token id -7 and model.vocab_size=256 (id 3,210", one_large_id(-7, np.int32)),
    Case(
        "mg-index-sparse",
        MEGATRON,
        "is not an index in Megatron-LM's current format",
        lambda: [one_large_id(1)(), sparse("large.idx")()],
    ),
    # Prepared folders.
    Case("pp-good", HELD_OUT, None, prepared()),
    Case("pp-before-checksums", HELD_OUT, None, prepared(index_sha256=False)),
    Case("pp-npy-npz", PREPARED, f"{LENGTHS}it is not a .npy file", prepared(index("lengths", zip_of_arrays))),
    Case(
        "pp-npy-zip",
        PREPARED,
        f"{LENGTHS}it is not a .npy file",
        prepared(index("lengths", lambda f: f.write_bytes(b"PK\3\4" * 80))),
    ),
    Case("pp-npy-1tb", PREPARED, f"{LENGTHS}it says 274,877,906,944 numbers", prepared(index("lengths", header_of_a_terabyte))),
    Case("pp-npy-float", PREPARED, f"{LENGTHS}it holds float64", prepared(index("lengths", np.ones(50)))),
    Case(
        "pp-npy-2d",
        PREPARED,
        f"{LENGTHS}it holds uint32 of shape [50, 2]",
        prepared(index("lengths", np.ones((50, 2), np.uint32))),
    ),
    Case("pp-npy-str", PREPARED, f"{LENGTHS}it holds <U1", prepared(index("lengths", np.array(["a"] * 50)))),
    Case("pp-npy-object", PREPARED, f"{LENGTHS}it holds object", prepared(index("lengths", np.array([{}] * 50)))),
    Case("pp-lengths-zero", PREPARED, "does not list documents of", prepared(index("lengths", np.zeros(50, np.uint32)), False)),
    Case("pp-files-null", PREPARED, "files.x is null: it should be a valid integer", prepared(shard(files={"x": None}))),
    Case("pp-files-elsewhere", PREPARED, "does not name the 3 files of", prepared(shard(files={"/etc/passwd": 5}))),
    Case("pp-name-elsewhere", PREPARED, "shards.0.name is ../../x", prepared(shard(name="../../x"))),
    Case("pp-documents-huge", PREPARED, "shards.0.documents is 1000000000000", prepared(shard(documents=10**12))),
    Case("pp-record-huge", PREPARED, "record_tokens is 1000000000000000000", prepared(manifest(record_tokens=10**18))),
    Case("pp-version-long", PREPARED, "is of version 9999", prepared(manifest(version="9" * 10**6))),
    Case("pp-deep", PREPARED, "it nests deeper than 64 levels", prepared(nested_manifest)),
    Case("keys-flip", HELD_OUT, f"{KEYS}it or lengths.npy beside it has changed", prepared(index("keys", flip))),
    Case("keys-str", HELD_OUT, f"{KEYS}it holds <U1", prepared(index("keys", np.array(["a"] * 50)))),
    Case(
        "keys-long", HELD_OUT, f"{KEYS}it is of 500 documents", prepared(index("keys", np.arange(500, dtype=np.uint64)), False)
    ),
]
