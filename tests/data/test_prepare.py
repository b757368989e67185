import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outside import wait_until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxllm import untrusted
from jaxllm.config import ConfigError
from jaxllm.data import disk_documents, parts, records, shards
from jaxllm.data.disk_documents import PreparedDocuments
from jaxllm.data.parts import zstd
from jaxllm.data.prepare import parse_shard, prepare
from jaxllm.data.sources import read_texts
from jaxllm.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]


def made_up(count, seed=0):
    """Short texts, some with line ends, quotes and characters of several bytes."""
    words = ["law", "mesh", "ring", "axis\n", "shärd", '"gather"', "日本", "🜁", "tick", "\u2028"]
    draw = random.Random(seed)
    return [f"{i} " + " ".join(draw.choices(words, k=draw.randrange(1, 30))) for i in range(count)]


def lines(texts, key="text"):
    """JSON with and without ASCII escapes, alternating."""
    return "".join(json.dumps({"id": i, key: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts)).encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Folder of a byte-level BPE tokenizer with 400 ids."""
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    folder.mkdir()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(made_up(100), trainer)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return str(folder)


def here(inputs, out, tokenizer="bytes", **options):
    """Runs prepare() in this process without output."""
    return prepare(
        [str(path) for path in inputs], out, tokenizer=str(tokenizer), **{"workers": 1, "progress": False, **options}
    )


def contents(folder):
    """All documents as lists of ids."""
    documents = PreparedDocuments(folder)
    lengths = np.asarray(documents.lengths)
    found = documents.read(np.arange(len(lengths)), np.zeros(len(lengths), int), lengths)
    return [ids.tolist() for ids in found]


def encoded(tokenizer, texts):
    return [ids.tolist() for ids in load_tokenizer(tokenizer).encode_documents(texts)]


def files_of(folder):
    """Content of each file in a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stamps(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}


def run(*arguments, **options):
    command = [sys.executable, "-m", "jaxllm.cli", "data", "prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, **options)


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "ndjson", "txt", "md", "txt.gz", "txt.zst"])
@pytest.mark.parametrize("shard_bytes", [1 << 28, 400])
def test_texts_come_back_as_their_ids(tmp_path, tokenizer, ending, shard_bytes):
    texts = made_up(60)
    data = tmp_path / "data"
    data.mkdir()
    compress = {"gz": gzip.compress, "zst": zstd.compress}.get(ending.rpartition(".")[2], lambda content: content)
    if ending == "parquet":
        pq.write_table(pa.table({"id": range(60), "text": texts}), data / "a.parquet", row_group_size=7)
    elif ending.partition(".")[0] in ("txt", "md"):
        for i, text in enumerate(texts):
            (data / f"{i:03d}.{ending}").write_bytes(compress(text.encode()))
    else:
        (data / f"a.{ending}").write_bytes(compress(lines(texts[:25])))
        (data / f"b.{ending}").write_bytes(compress(lines(texts[25:])))
    summary = here([data / "*"], tmp_path / "out", tokenizer, shard_bytes=shard_bytes)
    expected = encoded(tokenizer, texts)
    assert contents(tmp_path / "out") == expected
    assert summary.complete
    assert (summary.documents, summary.tokens) == (60, sum(map(len, expected)))
    assert summary.text_bytes == sum(len(text.encode()) for text in texts)
    assert (summary.broken, summary.empty) == (0, 0)
    assert (summary.shards > 1) == (shard_bytes == 400)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_documents_come_back_exactly(tmp_path_factory, tokenizer, data):
    characters = st.characters(exclude_categories=["Cs"])
    texts = data.draw(st.lists(st.text(characters, min_size=1, max_size=60), min_size=1, max_size=12))
    kind = data.draw(st.sampled_from(["bytes", tokenizer]))
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.jsonl").write_bytes(lines(texts))
    size, cut = data.draw(st.integers(1, 9)), data.draw(st.integers(20, 2000))
    here([folder / "a.jsonl"], folder / "out", kind, record_tokens=size, shard_bytes=cut)
    documents, expected = PreparedDocuments(folder / "out"), encoded(kind, texts)
    assert documents.lengths.tolist() == [len(ids) for ids in expected]
    picks = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=20))
    starts = [data.draw(st.integers(0, len(expected[pick]))) for pick in picks]
    stops = [data.draw(st.integers(start, len(expected[pick]))) for pick, start in zip(picks, starts, strict=True)]
    found = documents.read(np.array(picks), np.array(starts), np.array(stops))
    wanted = [expected[pick][start:stop] for pick, start, stop in zip(picks, starts, stops, strict=True)]
    assert [ids.tolist() for ids in found] == wanted


def test_keys_are_the_hash_of_the_text_alone(tmp_path, tokenizer):
    texts = made_up(5)
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    expected = [int.from_bytes(hashlib.blake2b(text.encode()).digest()[:8], "little") for text in texts]
    for kind in ("bytes", tokenizer):
        here([tmp_path / "a.jsonl"], tmp_path / Path(kind).name, kind)
        assert PreparedDocuments(tmp_path / Path(kind).name).keys.tolist() == expected


def test_inputs_are_sorted_and_counted_once(tmp_path):
    for name in ("b/2.txt", "a/1.txt", "b/[c].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    inputs = [tmp_path / "b" / "[c].txt", tmp_path / "**" / "*.txt", tmp_path / "a" / "1.txt"]
    here(inputs, tmp_path / "out")
    assert contents(tmp_path / "out") == encoded("bytes", ["a/1.txt", "b/2.txt", "b/[c].txt"])


def test_the_folder_itself_is_no_input(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    here([tmp_path / "**" / "*"], tmp_path / "out")
    assert not here([tmp_path / "**" / "*"], tmp_path / "out").shards_written


def test_a_moved_folder_keeps_its_fingerprint_and_tokenizer(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(5)))
    here([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer)
    before = PreparedDocuments(tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "elsewhere" / "moved")
    after = PreparedDocuments(tmp_path / "elsewhere" / "moved")
    assert after.fingerprint == before.fingerprint
    assert after.tokenizer.sha256 == load_tokenizer(tokenizer).sha256
    assert after.tokenizer.name == "small"


def test_another_text_order_or_tokenizer_has_another_fingerprint(tmp_path, tokenizer):
    texts = made_up(5)
    found = set()
    for i, (kind, given_texts) in enumerate(
        [("bytes", texts), (tokenizer, texts), ("bytes", texts[::-1]), ("bytes", texts[1:])]
    ):
        (tmp_path / f"{i}.jsonl").write_bytes(lines(given_texts))
        here([tmp_path / f"{i}.jsonl"], tmp_path / str(i), kind)
        found.add(PreparedDocuments(tmp_path / str(i)).fingerprint)
    assert len(found) == 4


def test_many_threads_read_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(200)))
    here([tmp_path / "a.jsonl"], tmp_path / "out", record_tokens=16, shard_bytes=4000)
    documents, expected = PreparedDocuments(tmp_path / "out"), contents(tmp_path / "out")
    wrong = []

    def reads(seed):
        picks = np.random.default_rng(seed).integers(0, 200, 40)
        found = documents.read(picks, np.zeros(40, int), documents.lengths[picks])
        wrong.extend(pick for pick, ids in zip(picks, found, strict=True) if ids.tolist() != expected[pick])

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------------------------- sharing the work and going on


@pytest.fixture
def corpus(tmp_path):
    """A folder with a large file that is split, one that cannot be split, and small ones; 14 shards of 2000 bytes."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "large.jsonl").write_bytes(lines(made_up(150)))
    (data / "packed.jsonl.gz").write_bytes(gzip.compress(lines(made_up(40, seed=1))))
    pq.write_table(pa.table({"text": made_up(60, seed=2)}), data / "rows.parquet", row_group_size=11)
    for i, text in enumerate(made_up(9, seed=3)):
        (data / f"s{i}.txt").write_text(text)
    return data / "*"


def test_any_workers_and_any_sharing_make_the_same_bytes(tmp_path, tokenizer, corpus):
    options = {"shard_bytes": 2000, "record_tokens": 64}
    summary = here([corpus], tmp_path / "one", tokenizer, **options)
    assert summary.shards > 6
    here([corpus], tmp_path / "two", tokenizer, workers=2, **options)
    parts = [here([corpus], tmp_path / "three", tokenizer, shard=(i, 3), **options) for i in (2, 0, 1)]
    assert [part.complete for part in parts] == [False, False, True]
    assert sum(part.shards_written for part in parts) == summary.shards
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "three")


def test_shards_of_any_size_hold_the_same_documents(tmp_path, corpus):
    expected = made_up(150) + made_up(40, seed=1) + made_up(60, seed=2) + made_up(9, seed=3)
    for size in (300, 5000, 1 << 28):
        here([corpus], tmp_path / str(size), shard_bytes=size)
        assert contents(tmp_path / str(size)) == encoded("bytes", expected)


def test_a_second_run_changes_nothing_and_says_so(tmp_path, tokenizer, corpus):
    here([corpus], tmp_path / "out", tokenizer, shard_bytes=5000)
    before = stamps(tmp_path / "out")
    again = here([corpus], tmp_path / "out", tokenizer, shard_bytes=5000)
    assert stamps(tmp_path / "out") == before
    assert again.shards_written == 0
    assert f"all {again.shards} shards were prepared already; nothing was changed" in again.lines()


@pytest.mark.parametrize("lost", [".json", ".array_record", ".keys.npy"])
def test_a_lost_or_short_shard_is_made_again_and_no_other(tmp_path, corpus, lost):
    out = tmp_path / "out"
    shards = here([corpus], out, shard_bytes=5000).shards
    before, times = files_of(out), stamps(out)
    file = out / f"tokens-00001-of-{shards:05d}{lost}"
    if lost == ".array_record":
        os.truncate(file, 1000)
    else:
        file.unlink()
    assert here([corpus], out, shard_bytes=5000).shards_written == 1
    assert files_of(out) == before
    assert {path for path, stamp in stamps(out).items() if times[path] != stamp} == set(out.glob("tokens-00001-*"))


def test_killed_runs_go_on(tmp_path, corpus):
    """The process is killed again and again, each time after one more shard."""
    out = tmp_path / "out"
    code = (
        "import sys, time; from jaxllm.data import prepare, shards, tokenizer\n"
        "class Slow(tokenizer.ByteTokenizer):\n"
        "    def encode_documents(self, texts):\n"
        "        time.sleep(0.3); return super().encode_documents(texts)\n"
        "prepare.load_tokenizer = lambda path: Slow()\n"
        "print('ready', flush=True)\n"
        "prepare.prepare([sys.argv[1]], sys.argv[2], tokenizer='bytes', workers=1, shard_bytes=2000, progress=False)\n"
    )
    done = lambda: len(list(out.glob("tokens-*.json")))  # noqa: E731
    there = [0]
    for _ in range(3):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", code, corpus, out], cwd=ROOT, **pipes)
        assert process.stdout.readline() == b"ready\n"
        wait_until(lambda: done() > there[-1], process, 30)
        process.kill()
        process.communicate()
        there.append(done())
    with pytest.raises(ConfigError, match=rf"{there[-1]} of \d+ shards are prepared: run jaxllm data prepare again"):
        PreparedDocuments(out)
    summary = here([corpus], out, shard_bytes=2000)
    assert summary.shards_written == summary.shards - there[-1]
    here([corpus], tmp_path / "whole", shard_bytes=2000)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_killed_command_with_workers_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(40_000) * 3))
    arguments = [
        tmp_path / "a.jsonl",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--shard-megabytes",
        "1",
        "--workers",
        "2",
    ]
    command = [sys.executable, "-m", "jaxllm.cli", "data", "prepare", *map(str, arguments)]
    for how, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        deadline = time.monotonic() + 30
        while process.poll() is None and not list((tmp_path / "out").glob(".tokens-*")) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        # Workers notice that their parent is gone, and delete their unfinished files.
        while list((tmp_path / "out").glob(".tokens-*")) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert list((tmp_path / "out").glob(".*")) == []
    assert errors.count("\n") == 1
    assert "shards are prepared: run the same command again to resume." in errors
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["documents"] == 120_000
    assert list((tmp_path / "out").glob(".*")) == []


def test_two_commands_at_once_make_one_folder(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(3000)))
    code = (
        "import sys; from jaxllm.data.prepare import prepare\n"
        "prepare([sys.argv[1]], sys.argv[2], tokenizer='bytes', workers=1, shard_bytes=20000, progress=False)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "a.jsonl", tmp_path / "out"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    here([tmp_path / "a.jsonl"], tmp_path / "alone", shard_bytes=20000)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")


def test_of_two_commands_at_once_with_other_inputs_the_first_finished_shard_decides(tmp_path, monkeypatch):
    for name, count in (("first", 60), ("second", 90)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(made_up(count, seed=count)))
    write = shards._write

    def while_another_command_ends(*arguments):
        monkeypatch.setattr(shards, "_write", write)
        written = write(*arguments)
        here([tmp_path / "second.jsonl"], tmp_path / "out", shard_bytes=2000)
        return written

    monkeypatch.setattr(shards, "_write", while_another_command_ends)
    with pytest.raises(ConfigError, match=r"out holds shards of other inputs \(.* bytes in 1 file, not .*: choose another"):
        here([tmp_path / "first.jsonl"], tmp_path / "out", shard_bytes=2000)
    here([tmp_path / "second.jsonl"], tmp_path / "alone", shard_bytes=2000)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")


def test_a_share_of_the_work_does_not_take_another_commands_shards_for_its_own(tmp_path, monkeypatch):
    """Which has made the same share since this command looked at the folder; the names are the same."""
    text = lines(made_up(60, seed=60))
    (tmp_path / "first.jsonl").write_bytes(text)
    (tmp_path / "second.jsonl").write_bytes(text.replace(b"a", b"b"))
    module = sys.modules[prepare.__module__]
    not_done = module._not_done

    def after_another_command(*arguments):
        monkeypatch.setattr(module, "_not_done", not_done)
        here([tmp_path / "second.jsonl"], tmp_path / "out", shard_bytes=2000, shard=(0, 2))
        return not_done(*arguments)

    monkeypatch.setattr(module, "_not_done", after_another_command)
    with pytest.raises(ConfigError, match="out holds shards of other inputs"):
        here([tmp_path / "first.jsonl"], tmp_path / "out", shard_bytes=2000, shard=(0, 2))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokenizer": True}, "holds shards made with the tokenizer bytes, not small: choose another --out"),
        ({"text_key": "id"}, "holds shards made with --text-key text, not id: choose another --out"),
        ({"shard_bytes": 1 << 20}, "holds shards made with --shard-megabytes 4, not 1: choose another --out"),
        ({"record_tokens": 5}, "holds shards made with record_tokens 8192, not 5: choose another --out"),
        ({"more": True}, "holds shards of other inputs (50 bytes in 1 file, not 54 bytes in 2 files): choose another --out"),
        ({"touch": True}, "holds shards of other inputs (their names or dates differ): choose another --out"),
    ],
)
def test_another_origin_is_refused_and_overwrites_nothing(tmp_path, tokenizer, change, sentence):
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]))
    here([tmp_path / "*.*"], tmp_path / "out")
    before = files_of(tmp_path / "out")
    options = {key: value for key, value in change.items() if key not in ("more", "touch", "tokenizer")}
    if "more" in change:
        (tmp_path / "b.txt").write_text("more")
    if "touch" in change:
        os.utime(tmp_path / "a.jsonl", (1, 1))
    if "tokenizer" in change:
        options["tokenizer"] = tokenizer
    with pytest.raises(ConfigError) as error:
        here([tmp_path / "*.*"], tmp_path / "out", **options)
    assert sentence in str(error.value)
    assert files_of(tmp_path / "out") == before


# ---------------------------------------------------------------------------------------------------- broken records


BROKEN = {
    3: (b'{"text": "cut off\n', "not JSON (Unterminated string starting at column 10)"),
    8: (b'["a", "list"]\n', "not a JSON object"),
    20: (b'{"txet": "x"}\n', "no field 'text'"),
    21: (b'{"text": 5}\n', "field 'text' is not a string"),
    33: (b'{"text": "\xff"}\n', "not UTF-8 (byte 10 of the line)"),
    34: (b'{"text": "\\ud800"}\n', "field 'text' holds half a surrogate pair"),
    41: (b'{"text": null}\n', "field 'text' is not a string"),
}
EMPTY, BLANK = 25, 30


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """50 lines: those in BROKEN are broken, one text is empty, one line is blank. Also returns the good texts."""
    monkeypatch.chdir(tmp_path)
    texts = made_up(50)
    content = lines(texts).splitlines(keepends=True)
    for number, (line, _) in BROKEN.items():
        content[number - 1] = line
    content[EMPTY - 1], content[BLANK - 1] = b'{"text": ""}\n', b"  \n"
    Path("a.jsonl").write_bytes(b"".join(content))
    return [text for i, text in enumerate(texts, 1) if i not in (*BROKEN, EMPTY, BLANK)]


@pytest.mark.parametrize("shard_bytes", [1 << 28, 400, 37])
def test_broken_lines_are_named_also_in_split_files(broken, shard_bytes):
    summary = here(["a.jsonl"], "out", shard_bytes=shard_bytes)
    assert summary.broken_records == tuple(f"a.jsonl:{number}: {reason}" for number, (_, reason) in BROKEN.items())
    assert (summary.broken, summary.empty) == (len(BROKEN), 1)
    assert contents("out") == encoded("bytes", broken)
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert (manifest["broken"], manifest["empty"]) == (len(BROKEN), 1)
    records = [r for file in sorted(Path("out").glob("tokens-*.json")) for r in json.loads(file.read_text())["broken_records"]]
    assert [(r["line"], r["reason"]) for r in records] == [(number, reason) for number, (_, reason) in BROKEN.items()]


def test_only_the_first_broken_records_are_shown_and_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(b"x\n" * 1500 + lines(["good"]))
    summary = here(["a.jsonl"], "out", max_broken_share=1)
    assert summary.broken == 1500
    assert summary.broken_records == tuple(f"a.jsonl:{i}: not JSON (Expecting value at column 1)" for i in range(1, 11))
    assert "broken: 1,490 more; the shards' .json files name them" in summary.lines()
    assert len(json.loads(next(Path("out").glob("tokens-*.json")).read_text())["broken_records"]) == 1000


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("shard_bytes", [1 << 28, 150, 37])
def test_a_line_that_is_too_long_is_passed_over_and_no_other(tmp_path, monkeypatch, ending, shard_bytes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "LINE_BYTES", 100)
    monkeypatch.setattr(records, "LINE_BYTES_SKIPPED", 400)
    monkeypatch.setattr(records, "_CHUNK", 7)
    fits, long = b'{"text": "%s"}\n' % (b"y" * 88), b'{"text": "%s"}\n' % (b"x" * 89)
    assert len(fits) == 101
    assert len(long) == 102
    compress = {"gz": gzip.compress, "zst": zstd.compress}.get(ending.rpartition(".")[2], lambda content: content)
    content = lines(["one"]) + long + fits + lines(["two"]) + b"z" * 300 + b"\n" + lines(["three"]) + b"z" * 200
    Path(f"a.{ending}").write_bytes(compress(content))
    summary = here([f"a.{ending}"], "out", shard_bytes=shard_bytes)
    assert contents("out") == encoded("bytes", ["one", "y" * 88, "two", "three"])
    assert summary.broken_records == tuple(f"a.{ending}:{number}: longer than 0 MiB" for number in (2, 5, 7))

    Path(f"b.{ending}").write_bytes(compress(lines(["one"]) + b"z" * 500))
    with pytest.raises(
        ConfigError, match=r"b\.jsonl.* has a line longer than 0 MiB \(from byte 2\d on\), so it hardly holds one"
    ):
        here([f"b.{ending}"], "new", shard_bytes=shard_bytes)


def test_a_line_has_so_many_values_outside_of_its_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(untrusted, "JSON_VALUES", 5)
    texts = ["[,{" * 9, '",[' * 9, '\\",' * 9]
    many = [b'{"text": [[],[],[],[]]}\n', b'{"a": 1, "b": 2, "c": 3, "d": 4, "text": "x"}\n']
    cut_off = [b'{"text": "' + b'\\",' * 9 + b"\n", b'{"text": "' + b"," * 9 + b"\\\n"]
    Path("a.jsonl").write_bytes(lines(texts) + b"".join(many) + b"".join(cut_off))
    found = list(records.read_objects("a.jsonl"))
    assert [value and value["text"] for _, value, *_ in found] == [*texts, None, "x", None, None]
    assert [reason.partition(" (")[0] for _, _, reason, _ in found[3:]] == [
        "it has more than 5 values",
        "",
        "not JSON",
        "not JSON",
    ]


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "txt.zst"])
@pytest.mark.parametrize("chunk", [3, 7, 64, 1 << 20])
def test_a_long_text_in_blocks_gives_the_same_bytes(tmp_path, monkeypatch, ending, chunk):
    monkeypatch.chdir(tmp_path)
    compress = {"gz": gzip.compress, "zst": zstd.compress}.get(ending.rpartition(".")[2], lambda content: content)
    texts = [text + "\0é日🜁" for text in made_up(6)]
    for number, text in enumerate([*texts[:3], "a", *texts[3:]]):
        Path(f"{number}.{ending}").write_bytes(compress(text.encode()))
    here([f"*.{ending}"], "whole", record_tokens=16)
    monkeypatch.setattr(records, "BLOCKS_FROM", 2)
    monkeypatch.setattr(records, "_CHUNK", chunk)
    here([f"*.{ending}"], "blocks", record_tokens=16)
    assert files_of(Path("blocks")) == files_of(Path("whole"))


def test_what_is_no_text_is_broken_whatever_its_length(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "BLOCKS_FROM", 10)
    monkeypatch.setattr(records, "TEXT_BYTES", 50)
    monkeypatch.setattr(records, "_CHUNK", 8)
    for name, content in {
        "a.txt": b"0123456789abcde\xffg",
        "b.txt": b"0123456789abcd\xe6\x97",
        "c.txt": b"01234567" + bytes(16),
        "d.txt.gz": gzip.compress(b"a" * 100_000),
        "e.txt.gz": gzip.compress(b"0123456789abcde")[:-9],
        "f.txt": b"z" * 51,
    }.items():
        Path(name).write_bytes(content)
    damage = "damaged gzip (Compressed file ended before the end-of-stream marker was reached)"
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_EXPANDS_FREELY", 50)
        summary = here(["*.*"], "out", max_broken_share=1)
    assert summary.broken_records == (
        "a.txt: not UTF-8 text (byte 15)",
        "b.txt: not UTF-8 text (byte 14)",
        "c.txt: not text (only zero bytes from byte 8 on)",
        "d.txt.gz: it expands to more than 100 times its size",
        f"e.txt.gz: {damage}",
    )
    assert contents("out") == encoded("bytes", ["z" * 51])
    Path("g.txt").write_bytes(b"good")
    summary = here(["*.*"], "tokens", tokenizer, max_broken_share=1)
    assert summary.broken_records[2:] == (
        "d.txt.gz: longer than 0 MiB: split it",
        f"e.txt.gz: {damage}",
        "f.txt: longer than 0 MiB: split it",
    )


def test_a_text_that_changes_between_its_two_readings_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCKS_FROM", 2)
    (tmp_path / "a.txt").write_bytes(b"text")
    read_text = records._read_text

    def changes(*given):
        record = read_text(*given)
        (tmp_path / "a.txt").write_bytes(b"te\xff")
        return record

    monkeypatch.setattr(records, "_read_text", changes)
    with pytest.raises(ConfigError, match=r"a\.txt has changed while it was being read: run the command again when it is"):
        here([tmp_path / "a.txt"], tmp_path / "out")


def test_strict_stops_at_the_first_also_when_an_earlier_run_passed_it(broken):
    sentence = r"^a\.jsonl:3: not JSON \(.*\); fix it, or skip such records: without --strict or --max-broken-share 0\.$"
    with pytest.raises(ConfigError, match=sentence):
        here(["a.jsonl"], "out", max_broken_share=0)
    assert list(Path("out").iterdir()) == []
    here(["a.jsonl"], "out")
    with pytest.raises(ConfigError, match=sentence):
        here(["a.jsonl"], "out", max_broken_share=0)


def test_strict_in_workers_ends_with_the_one_sentence(broken):
    with pytest.raises(ConfigError, match=r"^a\.jsonl:\d+: .*; fix it, or skip such records"):
        here(["a.jsonl"], "out", max_broken_share=0, workers=2, shard_bytes=1000)
    assert list(Path("out").glob(".*")) == []


def test_broken_files_count_as_one_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(b"\x89PNG\r\n")
    Path("b.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:-12])
    Path("c.jsonl.zst").write_bytes(zstd.compress(lines(made_up(100)))[:-20])
    Path("d.txt").write_text("good")
    Path("e.txt").write_text("")
    Path("f.jsonl.gz").write_bytes(b"not gzip")
    summary = here(["*.*"], "out", max_broken_share=1)
    assert summary.broken_records == (
        "a.png: not UTF-8 text (byte 0)",
        "b.txt.gz: damaged gzip (Compressed file ended before the end-of-stream marker was reached)",
        "c.jsonl.zst:1: damaged Zstandard (Compressed file ended before the end-of-stream marker was reached)",
        "f.jsonl.gz:1: damaged gzip (Not a gzipped file (b'no'))",
    )
    assert (summary.documents, summary.empty) == (1, 1)


@pytest.mark.parametrize("by_bytes", [True, False])
def test_archives_and_json_lines_under_other_names_are_no_texts(tmp_path, tokenizer, by_bytes):
    content = lines(made_up(200))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.jsonl", content)
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"))
    named = {
        "a.jsonl.xz": ("xz", lzma.compress(content)),
        "a.jsonl.bz2": ("bzip2", bz2.compress(content)),
        "a.zip": ("zip", packed.getvalue()),
        "a.tar.gz": ("tar", gzip.compress(archived.getvalue())),
        "a.txt": ("gzip", gzip.compress(content)),
        "a.zstd": ("Zstandard", zstd.compress(content)),
        "a.jsonl.1": ("JSON lines", content),
        "a.ldjson": ("JSON lines", content),
    }
    (tmp_path / "good.jsonl").write_bytes(content)
    for name, (what, bytes_of_it) in named.items():
        (tmp_path / name).write_bytes(bytes_of_it)
        with pytest.raises(ConfigError, match=rf"{name} is {what}, and would be read as one text: end its name"):
            here([tmp_path / "good.jsonl", tmp_path / name], tmp_path / "out", tokenizer="bytes" if by_bytes else tokenizer)
        if what == "JSON lines":
            with pytest.raises(ConfigError, match=rf"{name} is JSON lines, and would be read as one text: tokenize it"):
                read_texts([str(tmp_path / name)])


def test_zstandard_with_a_long_window_is_read(tmp_path):
    """As zstd --long=31 writes it; the library's own limit is 128 MiB."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    texts = made_up(40)
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(lines(texts)) + compressor.flush())
    with pytest.raises(zstd.ZstdError, match="requires too much memory"):
        zstd.open(tmp_path / "a.jsonl.zst").read()
    here([tmp_path / "a.jsonl.zst"], tmp_path / "out")
    assert contents(tmp_path / "out") == encoded("bytes", texts)


def test_zstandard_in_several_frames_is_read_to_the_end(tmp_path):
    texts = made_up(30)
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(lines(texts[:20])) + zstd.compress(lines(texts[20:])))
    here([tmp_path / "a.jsonl.zst"], tmp_path / "out")
    assert contents(tmp_path / "out") == encoded("bytes", texts)


def test_broken_rows_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = pa.array([b"one", b"\xff\xfe", b"three"]).cast(pa.binary())
    bad = pa.StringArray.from_buffers(len(bad), bad.buffers()[1], bad.buffers()[2])
    texts = pa.chunked_array([pa.array(["a", "", "b", None, "c"]), bad])
    pq.write_table(pa.table({"text": texts, "n": range(8)}), "a.parquet", row_group_size=3)
    summary = here(["a.parquet"], "out", shard_bytes=1)
    assert summary.shards == 3
    assert summary.broken_records == ("a.parquet row 4: field 'text' is not a string", "a.parquet row 7: not UTF-8")
    assert contents("out") == encoded("bytes", ["a", "b", "c", "one", "three"])
    with pytest.raises(ConfigError, match=r"a\.parquet has no column body: set --text-key to one of text, n\.$"):
        here(["a.parquet"], "new", text_key="body")


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(["one", "two"]))
    here([tmp_path / "a.jsonl"], tmp_path / "out")
    assert contents(tmp_path / "out") == encoded("bytes", ["one", "two"])


# ------------------------------------------------------------------------------------------------ damage and mistakes


def test_a_damaged_folder_is_refused_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(50)))
    out = tmp_path / "out"
    here([tmp_path / "a.jsonl"], out)
    record = out / "tokens-00000-of-00001.array_record"
    content = record.read_bytes()
    record.write_bytes(content[:-1])
    with pytest.raises(ConfigError) as error:
        PreparedDocuments(out)
    size = f"{len(content):,}"
    assert f"{record} has {len(content) - 1:,} bytes and should have {size}: prepare it again" in str(error.value)

    record.write_bytes(content[:200] + bytes([content[200] ^ 255]) + content[201:])
    documents = PreparedDocuments(out)
    with pytest.raises(ConfigError) as error:
        documents.read(np.arange(50), np.zeros(50, int), documents.lengths)
    assert str(error.value).startswith(f"{record} is damaged (")
    assert str(error.value).endswith("): delete it and run the same jaxllm data prepare again.")

    record.unlink()
    with pytest.raises(ConfigError, match=r"\.array_record is missing: prepare it again, or copy the complete folder\.$"):
        PreparedDocuments(out)
    here([tmp_path / "a.jsonl"], out)
    assert contents(out) == encoded("bytes", made_up(50))


@pytest.mark.parametrize("ending", ["keys", "lengths"])
def test_a_flipped_bit_in_what_decides_the_held_out_split_is_found(tmp_path, ending):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(50)))
    here([tmp_path / "a.jsonl"], tmp_path / "out")
    fingerprint = PreparedDocuments(tmp_path / "out").fingerprint
    file = tmp_path / "out" / f"tokens-00000-of-00001.{ending}.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(ConfigError, match=r"\.keys\.npy is damaged \(it or lengths\.npy beside it has changed\): delete it"):
        PreparedDocuments(tmp_path / "out")
    file.write_bytes(content)
    # A folder from before this checksum is read, with the same fingerprint.
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    del manifest["shards"][0]["index_sha256"]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert PreparedDocuments(tmp_path / "out").fingerprint == fingerprint


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"shards": None}, "shards is null: it should be a valid list"),
        ({"tokenizer": {"name": "bytes"}}, "it has no tokenizer.sha256"),
        ({"shards": [{"name": "tokens-00000-of-00001"}]}, "it has no shards.0.documents"),
        ({"shards": []}, "shards is []: List should have at least 1 item after validation, not 0"),
        ({"dtype": "words"}, "dtype is words: it should be 'uint8', 'uint16' or 'uint32'"),
        ({"record_tokens": 10**18}, "record_tokens is 1000000000000000000: it should be less than or equal to 2147483647"),
        ({"record_tokens": 3}, "tokens-00000-of-00001 has 1 records, which record_tokens and tokens do not give"),
        ({"documents": 6}, "documents is 6, and its shards have 5"),
    ],
)
def test_a_manifest_that_lacks_something_is_damaged(tmp_path, change, what):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(5)))
    here([tmp_path / "a.jsonl"], tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_text(json.dumps(json.loads(whole) | change))
    with pytest.raises(ConfigError) as error:
        PreparedDocuments(tmp_path / "out")
    assert str(error.value) == (f"{manifest} is damaged ({what}): delete it and run the same jaxllm data prepare again.")
    manifest.unlink()
    here([tmp_path / "a.jsonl"], tmp_path / "out")
    assert manifest.read_bytes() == whole


@pytest.mark.parametrize("content", ["{}", "[]", '{"files": {}}', "null"])
def test_a_shard_that_says_nothing_is_made_again(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(5)))
    here([tmp_path / "a.jsonl"], tmp_path / "out")
    before = files_of(tmp_path / "out")
    (tmp_path / "out" / "tokens-00000-of-00001.json").write_text(content)
    assert here([tmp_path / "a.jsonl"], tmp_path / "out").shards_written == 1
    assert files_of(tmp_path / "out") == before


def test_names_that_are_no_utf8_are_kept_and_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9.jsonl")
    try:
        Path(name).write_bytes(lines(["one"]) + b"{\n")
    except OSError:
        pytest.skip("this file system accepts only UTF-8 names")
    for written in (1, 0):
        summary = here([name], "out")
        assert (summary.documents, summary.shards_written) == (1, written)
        (record,) = summary.broken_records
        assert record.startswith("caf\\xe9.jsonl:2: ")
    shard = json.loads(Path("out/tokens-00000-of-00001.json").read_text())
    assert shard["broken_records"][0]["file"] == str(tmp_path / name)


@pytest.mark.parametrize("workers", [1, 2])
def test_texts_the_tokenizer_cannot_encode_end_with_the_one_sentence(tmp_path, workers):
    words = Tokenizer(models.WordLevel({"law": 0, "<end>": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("law mesh")
    command = [tmp_path / "*.txt", "--out", tmp_path / "out", "--tokenizer", tmp_path / "words", "--workers", workers]
    done = run(*command)
    assert done.returncode == 2
    reason = "WordLevel error: Missing [UNK] token from the vocabulary"
    sentence = f"The tokenizer words cannot encode a text ({reason}): fix its tokenizer.json or choose another."
    assert done.stderr.strip().endswith(sentence)
    assert "Traceback" not in done.stderr


def test_more_shards_than_open_files_are_read_alike(tmp_path, monkeypatch):
    texts = made_up(60)
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    here([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=2000, record_tokens=16)
    monkeypatch.setattr(disk_documents, "OPEN_FILES", 2)
    documents = PreparedDocuments(tmp_path / "out")
    assert len(documents._shards) == 4
    order = np.random.default_rng(0).permutation(np.arange(60).repeat(3))
    found = [documents.read(*(np.array([x]) for x in (d, 0, documents.lengths[d])))[0].tobytes() for d in order]
    assert found == [texts[d].encode() + b"\0" for d in order]


def test_another_shards_records_are_noticed(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.jsonl").write_bytes(lines([text + "x" * i for text in made_up(20)]))
        here([tmp_path / f"{i}.jsonl"], tmp_path / f"out{i}")
    name = "tokens-00000-of-00001.array_record"
    shutil.copy(tmp_path / "out1" / name, tmp_path / "out0" / name)
    with pytest.raises(ConfigError, match=rf"{name} is damaged \(a record has \d+ bytes and should have \d+\): delete it"):
        contents(tmp_path / "out0")


def test_folders_that_are_not_whole_or_not_ours_are_refused(tmp_path, tokenizer, corpus):
    here([corpus], tmp_path / "out", tokenizer, shard=(0, 2), shard_bytes=5000)
    with pytest.raises(ConfigError, match=r"is not complete, \d of \d shards are prepared: run jaxllm data prepare again to"):
        PreparedDocuments(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is not a prepared folder \(it has no manifest\.json\): run jaxllm data prepare"):
        PreparedDocuments(tmp_path)
    here([corpus], tmp_path / "out", tokenizer, shard_bytes=5000)
    shutil.copy(Path(tokenizer) / "tokenizer.json", tmp_path / "out" / "tokenizer" / "tokenizer.json")
    config = tmp_path / "out" / "tokenizer" / "tokenizer_config.json"
    config.write_text('{"eos_token": "t"}')
    with pytest.raises(ConfigError, match=r"is not the tokenizer that .* was prepared with"):
        PreparedDocuments(tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    with pytest.raises(ConfigError, match="is of version 2 and this jaxllm reads version 1: prepare it again"):
        PreparedDocuments(tmp_path / "out")
    manifest.write_text("{}")
    with pytest.raises(ConfigError, match="was not written by jaxllm data prepare: name another folder"):
        PreparedDocuments(tmp_path / "out")


def test_no_text_at_all_is_refused_and_stands_in_nobodys_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(b'{"text": ""}\n' + lines(["one"], key="body"))
    sentence = r"^The inputs hold no text \(1 broken and 1 empty records, the first a\.jsonl:2: no field 'text'\): check them"
    with pytest.raises(ConfigError, match=sentence):
        here(["a.jsonl"], "out")
    assert list(Path("out").iterdir()) == []
    assert here(["a.jsonl"], "out", text_key="body").documents == 1


def test_what_cannot_be_written_or_found_is_one_sentence(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("text")
    for out in (text / "out", Path("/proc/out")):
        with pytest.raises(ConfigError, match=r"cannot be written \(.*\): fix that and run the command again, or choose anot"):
            here([text], out)
    with pytest.raises(ConfigError, match=r"^No file matches '.*nothing\*': check the path"):
        here([text, tmp_path / "nothing*"], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is a folder: name the files in it, such as '.*/\*\*/\*\.jsonl'"):
        here([tmp_path], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--workers=0 is not valid: it should be at least 1"):
        here([text], tmp_path / "out", workers=0)
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"b\.parquet cannot be read as Parquet \(.*\): fix it or leave it out"):
        here([tmp_path / "b.parquet"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_pyarrow_parquet_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"a\.parquet needs pyarrow: pip install 'jaxllm\[parquet\]'\.$"):
        here([tmp_path / "a.parquet"], tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_damages_nothing(tmp_path):
    """A limit on the file size stands in for a full disk: the first shard fits, the second does not."""
    draw = random.Random(0)
    noise = "".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(100_000))
    (tmp_path / "a.txt").write_text("small")
    (tmp_path / "b.txt").write_text(noise)
    code = (
        "import resource, sys; from jaxllm.data.prepare import prepare\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
        "try: prepare([sys.argv[1]], sys.argv[2], tokenizer='bytes', workers=1, shard_bytes=5, progress=False)\n"
        "except ValueError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "*.txt", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.stdout == (
        f"{tmp_path / 'out'} cannot be written (File too large): fix that and run the command again, or choose another --out.\n"
    ), result.stderr
    assert list((tmp_path / "out").glob(".*")) == []
    assert here([tmp_path / "*.txt"], tmp_path / "out", shard_bytes=5).shards_written == 1
    assert contents(tmp_path / "out") == encoded("bytes", ["small", noise])


def test_a_file_that_grows_meanwhile_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines(made_up(5)))
    from jaxllm.data import prepare as module

    def grows(*arguments):
        with open(tmp_path / "a.jsonl", "ab") as file:
            file.write(b"\n")
        return cut(*arguments)

    cut = module.cut
    monkeypatch.setattr(module, "cut", grows)
    with pytest.raises(ConfigError, match=r"a\.jsonl has changed while it was being read"):
        here([tmp_path / "a.jsonl"], tmp_path / "out")


@pytest.mark.parametrize("text", ["3/3", "1", "a/2", "-1/2", "0/0", "1/2/3"])
def test_shards_are_counted_from_zero(text):
    with pytest.raises(ConfigError, match=rf"^--shard {text} is not i/n with 0 <= i < n: use 0/4 to 3/4"):
        parse_shard(text)
    assert parse_shard("2/3") == (2, 3)


# ---------------------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 10**9}, "--workers=1000000000 is not valid: it should be at most 4,096."),
        ({"record_tokens": 10**18}, "record_tokens=1000000000000000000 is not valid: it should be at most 2,147,483,647."),
        ({"shard_bytes": 2**60}, "--shard-megabytes=1099511627776 is not valid: it should be at most 2,147,483,647."),
    ],
)
def test_numbers_have_a_top(tmp_path, options, sentence):
    with pytest.raises(ConfigError) as error:
        here([tmp_path / "a.txt"], tmp_path / "out", **options)
    assert str(error.value) == sentence


def test_the_command_reports_what_it_did(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]) + b"x\n")
    arguments = [tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", tokenizer]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    assert said[0] == f"broken: {tmp_path / 'a.jsonl'}:3: not JSON (Expecting value at column 1)"
    assert said[1].startswith("2 documents, ")
    assert "tokens of 6 bytes" in said[1]
    assert "1 broken and 0 empty records skipped" in said[1]
    assert said[2:] == ["to train on it:", "data:", "  source: prepared", f'  paths: ["{tmp_path / "out"}"]']
    result = run(*arguments, "--json")
    report = json.loads(result.stdout)
    assert (report["documents"], report["broken"], report["shards_written"], report["complete"]) == (2, 1, 0, True)
    result = run(*arguments, "--strict")
    assert result.returncode == 2
    assert result.stderr.startswith(f"jaxllm: {tmp_path / 'a.jsonl'}:3: not JSON")
    assert result.stderr.count("\n") == 1


def test_the_benchmarks_figures_agree():
    command = [sys.executable, ROOT / "benchmarks" / "data.py", "--quick", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    one, two = report["prepare"]
    assert (one["workers"], two["workers"], one["tokens"]) == (1, 2, two["tokens"])
    for row in (one, two):
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(row["tokens"])
        assert row["text_mb_per_s"] * row["seconds"] * 1e6 == pytest.approx(report["text_bytes"])
    rows = report["samples"]
    assert [row["packing"] for row in rows] == ["concat", "best_fit"] * 2
    for row in rows:
        sequences = row["tokens_per_s"] * row["seconds"] / 2048
        assert sequences == pytest.approx(16 * round(sequences / 16))
        assert 0.5 < row["filled"] <= 1
    assert rows[0]["tokens_a_document"] > 10 * rows[2]["tokens_a_document"]
