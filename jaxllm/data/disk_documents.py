"""Documents that stay on the disk, with random access: of files of token ids that other programs write, Megatron-LM's pairs and
plain ones as nanoGPT's and llm.c's; and of the folder that `jaxllm data prepare` writes:

  manifest.json                            the contents; written last, when every shard is complete
  tokenizer/                               the tokenizer's files; absent for bytes
  tokens-00003-of-00012.array_record       ids of all documents, concatenated, little-endian; records of record_tokens ids
  tokens-00003-of-00012.lengths.npy        uint32 [documents]
  tokens-00003-of-00012.keys.npy           uint64 [documents], the first 8 bytes of BLAKE2b of the text's UTF-8
  tokens-00003-of-00012.json               the shard's part of the manifest; the last of the four files to be written

The contents do not depend on the location, so a folder may be moved or copied.
"""

import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.cached import CachedFolder
from jaxllm.data.documents import Documents, cut, gather
from jaxllm.data.manifest import (
    DATA_ENDINGS,
    TOKENIZER,
    StoredShard,
    check_sizes,
    damaged,
    fingerprint,
    index_sha256,
    read_manifest,
    read_npy,
)
from jaxllm.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from jaxllm.untrusted import RefusedInput, reason_of

OPEN_FILES = 256
"""Files of one folder that are open at once. A process may often open only 1,024 files in total."""
RECORD_TOKENS = 8192
"""Ids per record, independent of document boundaries. Reading a piece of a document costs one or two records, and a file has
few enough records to open quickly (one record per document took 17 ms with 300,000 documents)."""
# No read-ahead and no threads: reads are random, one record at a time.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class PreparedDocuments(Documents):
    """The documents of one prepared folder, by the Documents protocol. Reading is thread-safe."""

    def __init__(self, folder: str | Path | CachedFolder):
        """
        Raises:
          ConfigError: nothing is prepared there, shards are missing, the version differs, or a file is missing or truncated.
        """
        cached = folder if isinstance(folder, CachedFolder) else None
        self._folder = cached.folder if cached else Path(str(folder))
        manifest = cached.manifest if cached else read_manifest(self._folder)
        for shard in () if cached else manifest.shards:
            check_sizes(self._folder, shard.files)
        if not manifest.documents:
            raise ConfigError(f"{cached.address if cached else folder} holds no documents: prepare text into another folder.")

        self._record_tokens = manifest.record_tokens
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # A file closes when its last user releases it.
        readers = lru_cache(OPEN_FILES)(_open)
        if cached:
            cached.cache.closers.append(readers.cache_clear)
        self._shards = [_Shard(self._folder, shard, readers, cached) for shard in manifest.shards]
        self._first_documents = np.cumsum([0, *(len(shard.lengths) for shard in self._shards)])
        self.lengths = np.concatenate([shard.lengths for shard in self._shards])
        self.keys = np.concatenate([shard.keys for shard in self._shards])
        told, files = manifest.tokenizer, self._folder / TOKENIZER
        self.tokenizer: Tokenizer = load_tokenizer(BYTES if told.kind == BYTES else files, told.name)
        if self.tokenizer.sha256 != told.sha256:
            raise ConfigError(
                f"{files} is not the tokenizer that {self._folder} was prepared with: "
                f"restore its files, or prepare the text again into another folder."
            )
        self.fingerprint = fingerprint(manifest)
        self.description = f"{cached.name if cached else self._folder.name} (tokenizer {manifest.tokenizer.name})"

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Reads token ids, as unsigned integers of the folder's type. Raises ConfigError if a shard is damaged."""
        documents, starts, stops = (np.asarray(numbers, np.int64) for numbers in (documents, starts, stops))
        return gather(self._first_documents, documents, starts, stops, self._read_shard)

    def _read_shard(self, place: int, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Iterator[np.ndarray]:
        shard, size = self._shards[place], self._record_tokens
        begins = shard.first_tokens[documents]
        begins, ends = begins + starts, begins + stops
        # An empty range needs no record, even if it starts at the start of a record.
        spans = [
            (a, b, range(a // size, -(-b // size) if b > a else a // size))
            for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
        wanted = sorted({record for *_, records in spans for record in records})
        found = {}
        for number, record in zip(wanted, shard.read(wanted), strict=True):
            expected = min(size, shard.tokens - number * size) * self._dtype.itemsize
            if len(record) != expected:
                raise shard.damaged(shard.file, f"a record has {len(record)} bytes and should have {expected}")
            found[number] = np.frombuffer(record, self._dtype)
        for a, b, records in spans:
            parts = [found[number] for number in records]
            ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts])
            skipped = records.start * size
            yield ids[a - skipped : b - skipped]


class _Shard:
    """One file of records, with the start of each document in it."""

    def __init__(self, folder: Path, told: StoredShard, readers: Any, cached: CachedFolder | None):
        self.damaged = cached.damaged if cached else damaged
        self.file, lengths, keys = (folder / (told.name + ending) for ending in DATA_ENDINGS)
        self.lengths, self.keys = self._load(lengths, np.uint32), self._load(keys, np.uint64)
        for file, numbers in ((lengths, self.lengths), (keys, self.keys)):
            if len(numbers) != told.documents:
                raise self.damaged(file, f"it is of {len(numbers):,} documents, and the manifest says {told.documents:,}")
        if told.index_sha256 not in (None, index_sha256(self.lengths, self.keys)):
            raise self.damaged(keys, "it or lengths.npy beside it has changed")
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.first_tokens = ends - self.lengths
        """Start of each document, in ids from the start of the shard."""
        self.tokens = int(ends[-1]) if len(ends) else 0
        if self.tokens != told.tokens or self.lengths.min(initial=1) < 1:
            raise self.damaged(lengths, f"it does not list documents of {told.tokens:,} tokens in all, as the manifest says")
        # A reader has a position, so two threads cannot share it.
        self._lock = threading.Lock()
        self._readers, self._cached = readers, cached

    def read(self, records: list[int]) -> list[bytes]:
        if not records:
            return []
        while True:
            with self._lock:
                if self._cached:
                    self._cached.fetch(self.file)
                try:
                    return self._readers(self.file).read(records)
                except (RuntimeError, IndexError, ValueError) as error:
                    # A reader that failed once keeps failing.
                    self._readers.cache_clear()
                    # Another thread or process of this host may remove a copy before it is open here.
                    if not self._cached or self.file.exists():
                        raise self.damaged(self.file, str(error).split(";")[0]) from None

    def _load(self, file: Path, dtype: type[np.generic]) -> np.ndarray:
        try:
            # Not memory-mapped: a mapping keeps its file open, and there may be thousands.
            return read_npy(file, dtype)
        except (OSError, RefusedInput) as error:
            raise self.damaged(file, reason_of(error)) from None


def _open(file: Path) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(str(file), _READER_OPTIONS)


class _MappedDocuments(Documents):
    """Documents that follow each other in one memory-mapped file of ids. See Documents."""

    def _map(self, file: Path, tokens: np.ndarray, bounds: np.ndarray, said: bytes, first_key: int = 0) -> None:
        """Sets what is read: documents that begin at `bounds`, whose last entry is the number of ids. Keys are hashes of the
        numbers from first_key on. `said`: what else decides what is read, for the fingerprint."""
        self._file, self._tokens, self._starts, self.lengths = file, tokens, bounds[:-1], np.diff(bounds)
        # The output function of SplitMix64 (Steele, Lea and Flood, 2014).
        z = np.arange(len(self.lengths), dtype=np.uint64) + np.uint64((first_key + 0x9E3779B97F4A7C15) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        self.keys = z ^ (z >> np.uint64(31))
        self.fingerprint = _fingerprint(said, file, file.stat().st_size, self.tokenizer)

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return cut(self._tokens, self._starts[documents], starts, stops)

    def where(self, document: int, token: int) -> str:
        return f"id {int(self._starts[document]) + token:,} of {self._file}"


# ------------------------------------------------------------------------------------------------------------------ Megatron-LM
# NAME.bin holds the ids of all sequences, NAME.idx their lengths. Layout of NAME.idx (Megatron-LM,
# core/datasets/indexed_dataset.py), little-endian: the nine bytes MMIDIDX 00 00, the version (u64, 1), a code for the type of
# ids (u8), the number of sequences (u64) and of document bounds (u64), then each sequence's length (i32) and the byte at which
# it starts (i64), and the document bounds as sequence numbers (i64), from 0 to the end.

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# The fingerprint reads the beginning, the end and this many blocks between of a large file of ids; hashing a terabyte
# would take an hour.
_BLOCK, _BLOCKS_BETWEEN = 4096, 64
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class MegatronDocuments(_MappedDocuments):
    """The documents of one memory-mapped pair NAME.bin and NAME.idx. See Documents.

    The files record neither their tokenizer nor the source text. Keys are therefore hashes of document numbers, and
    documents end with an EOS token only if the files were made with --append-eod.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer | None = None):
        """
        Args:
          prefix: path of the files without .bin and .idx. Either suffix is accepted.

        Raises ConfigError if a file is missing, truncated, or in another format.
        """
        name = str(prefix).removesuffix(".bin").removesuffix(".idx")
        index, tokens = Path(f"{name}.idx"), Path(f"{name}.bin")
        for path in (index, tokens):
            if not path.is_file():
                raise ConfigError(f"There is no file {path}: data.paths names Megatron-LM files without their .bin or .idx.")
        raw, dtype, num_sequences, num_bounds = _read_index(index)
        lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        starts = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        bounds = np.frombuffer(raw, "<i8", num_bounds, HEADER.size + 12 * num_sequences)
        in_order = num_bounds > 0 and bounds[0] == 0 and bounds[-1] == num_sequences and (bounds[1:] >= bounds[:-1]).all()
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if not in_order or (lengths < 0).any() or (starts != ends[:-1] * dtype.itemsize).any():
            raise ConfigError(f"{index} does not list contiguous sequences: make it again with Megatron-LM's tools.")
        size = tokens.stat().st_size
        if size != ends[-1] * dtype.itemsize:
            raise ConfigError(
                f"{tokens} has {size:,} bytes and {index.name} lists {ends[-1] * dtype.itemsize:,}: "
                f"the file is truncated or belongs to another index; copy both again."
            )
        if num_bounds < 2 or not size:
            raise ConfigError(f"{index} lists no documents: name files that contain documents.")
        self.tokenizer, self.description = tokenizer, f"Megatron-LM files {name}"
        self._map(tokens, np.memmap(tokens, dtype, mode="r"), ends[bounds], raw)


def _fingerprint(index: bytes, tokens: Path, size: int, tokenizer: Tokenizer | None) -> str:
    """SHA-256 of the index, the tokenizer and the ids. Of a large file it covers the size and the blocks described above."""
    last = size - _BLOCK
    if size <= _BLOCK * (_BLOCKS_BETWEEN + 2):
        blocks = [(0, size)]
    else:
        blocks = [(last * number // (_BLOCKS_BETWEEN + 1), _BLOCK) for number in range(_BLOCKS_BETWEEN + 2)]
    # Lengths come first, so that the parts cannot be confused with each other.
    digest = hashlib.sha256(struct.pack("<QQ", len(index), size) + index)
    with open(tokens, "rb") as file:
        for start, length in blocks:
            file.seek(start)
            digest.update(file.read(length))
    digest.update((tokenizer.sha256 if tokenizer else "").encode())
    return digest.hexdigest()


def _read_index(index: Path) -> tuple[bytes, np.dtype, int, int]:
    """The bytes of an index, the type of ids, and the numbers of sequences and of document bounds."""
    size = index.stat().st_size
    if size < HEADER.size:
        raise ConfigError(f"{index} has {size} bytes, fewer than an index header: the file is truncated; copy it again.")
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if magic != MAGIC or version != 1:
        raise ConfigError(f"{index} is not an index in Megatron-LM's current format: make it again with its tools.")
    if code not in DTYPES:
        raise ConfigError(
            f"{index} holds ids of type {code}, which is not an integer type: make it again with Megatron-LM's tools."
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size != expected:
        raise ConfigError(f"{index} has {size:,} bytes and should have {expected:,}: the file is truncated; copy it again.")
    return index.read_bytes(), np.dtype(DTYPES[code]).newbyteorder("<"), num_sequences, num_bounds


# --------------------------------------------------------------------------------------------------------- plain files of ids
# nanoGPT's have ids alone, uint16. Those of llm.c begin with 256 int32: a magic number, the version, and the number of ids. A
# document begins there with GPT-2's end-of-text token, or with Llama 3's token of the beginning.

_LLM_C_BYTES = 4 * 256
_LLM_C, _LLAMA_3 = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}, 20240801
"""llm.c's magic number of GPT-2's and Llama 3's ids -> their type."""
_NO_IDS = b"\x93NUMPY", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_SCANNED = 1 << 24
"""Ids that are searched for ends of documents at a time."""


class TokenFile(_MappedDocuments):
    """One memory-mapped file of ids, uint16 or uint32. See Documents.

    It says neither its tokenizer nor where documents end. With a tokenizer that has an end-of-text token (EOS), a document ends
    with each; or it begins with each, if the file does or is llm.c's. Without one the file is one document.
    """

    def __init__(self, path: str, vocab_size: int, tokenizer: Tokenizer | None = None):
        """vocab_size: of the model; above 65,536 ids without a header are uint32. Raises ConfigError if the file is empty,
        truncated or in another format."""
        try:
            with open(path, "rb") as opened:
                head, size = opened.read(_LLM_C_BYTES), os.path.getsize(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({reason_of(error)}): fix it or leave it out of data.paths.") from None
        magic, _, count = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
        offset = _LLM_C_BYTES if magic in _LLM_C else 0
        size -= offset
        # uint16 whose every second id is 0 is uint32; and of that, int64.
        halves, words = (np.frombuffer(head[: len(head) // 8 * 8], kind) for kind in ("<u2", "<u4"))
        if head.startswith(_NO_IDS) or (not offset and words[::2].any() and not words[1::2].any()):
            what = "is compressed, a NumPy file or has ids of 8 bytes"
            raise ConfigError(f"{path} {what}: unpack it, or write the ids alone, as uint16 or uint32 (ndarray.tofile).")
        wide = vocab_size > 2**16 or (halves[::2].any() and not halves[1::2].any())
        dtype = _LLM_C.get(magic, np.dtype("<u4" if wide else "<u2"))
        if size <= 0 or size % dtype.itemsize or (offset and size != count * dtype.itemsize):
            whole = f"its header counts {count:,} of {dtype.itemsize} bytes" if offset else f"an id has {dtype.itemsize}"
            has = f"{path} has {max(size, 0):,} bytes of ids"
            raise ConfigError(f"{has}, and {whole}: the file is truncated or no file of ids.")
        tokens = np.memmap(path, dtype, mode="r", offset=offset)
        mark = None if tokenizer is None else tokenizer.bos_id if magic == _LLAMA_3 else tokenizer.eos_id
        count, ends = len(tokens), not offset and tokens[0] != mark
        scanned = range(0, count if mark is not None else 0, _SCANNED)
        found = [np.flatnonzero(tokens[at : at + _SCANNED] == mark) + at + ends for at in scanned]
        # Files of one document each must not have one key.
        key = int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:8], "big")
        self.tokenizer, self.description = tokenizer, f"{path} ({dtype.name})"
        bounds = np.unique(np.concatenate([[0], *found, [count]]))
        self._map(Path(path), tokens, bounds, f"{dtype} {offset} {key}".encode(), key)
