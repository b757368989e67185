"""Prepared documents: the folder of token ids that `jaxllm data prepare` writes. It has random access.

  manifest.json                            the contents; written last, when every shard is complete
  tokenizer/                               the tokenizer's files; absent for bytes
  tokens-00003-of-00012.array_record       ids of all documents, concatenated, little-endian; records of record_tokens ids
  tokens-00003-of-00012.lengths.npy        uint32 [documents]
  tokens-00003-of-00012.keys.npy           uint64 [documents], the first 8 bytes of BLAKE2b of the text's UTF-8
  tokens-00003-of-00012.json               the shard's part of the manifest; the last of the four files to be written

The contents do not depend on the location, so a folder may be moved or copied.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.cached import CachedFolder
from jaxllm.data.documents import Documents, gather
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
