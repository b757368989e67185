"""Prepared documents: the folder of token ids that `jaxllm data prepare` writes. It has random access.

  manifest.json                            the contents; written last, when every shard is complete
  tokenizer/                               the tokenizer's files; absent for bytes
  tokens-00003-of-00012.array_record       ids of all documents, concatenated, little-endian; records of record_tokens ids
  tokens-00003-of-00012.lengths.npy        uint32 [documents]
  tokens-00003-of-00012.keys.npy           uint64 [documents], the first 8 bytes of BLAKE2b of the text's UTF-8
  tokens-00003-of-00012.json               the shard's part of the manifest; the last of the four files to be written

The contents do not depend on the location, so a folder may be moved or copied.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.documents import Documents, gather
from jaxllm.data.tokenizer import BYTES, Tokenizer, load_tokenizer

FORMAT, VERSION = "jaxllm-tokens", 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
OPEN_FILES = 256
"""Files of one folder that are open at once. A process may often open only 1,024 files in total."""
RECORD_TOKENS = 8192
"""Ids per record, independent of document boundaries. Reading a piece of a document costs one or two records, and a file has
few enough records to open quickly (one record per document took 17 ms with 300,000 documents)."""
SHARD_KEYS = {"name": str, "documents": int, "tokens": int, "sha256": str, "files": dict}
"""Keys that reading needs from a shard's part of the manifest."""
INDEX_SHA256 = "index_sha256"
"""Key of a shard for the checksum of its document lengths and keys, which decide what is held out. Folders that were prepared
before it existed have none."""
_MANIFEST_KEYS = {
    "documents": int,
    "record_tokens": int,
    "dtype": str,
    "tokenizer": {"kind": str, "name": str, "sha256": str},
    "shards": list,
}
_DTYPES = ("uint8", "uint16", "uint32")
# No read-ahead and no threads: reads are random, one record at a time.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def shard_name(shard: int, shards: int) -> str:
    """Prefix of the names of a shard's files."""
    return f"tokens-{shard:05d}-of-{shards:05d}"


class PreparedDocuments(Documents):
    """The documents of one prepared folder, by the Documents protocol. Reading is thread-safe."""

    def __init__(self, folder: str | Path):
        """
        Raises:
          ConfigError: nothing is prepared there, shards are missing, the version differs, or a file is missing or truncated.
        """
        self._folder = Path(folder)
        manifest = read_manifest(self._folder)
        shards = manifest["shards"]
        for shard in shards:
            check_sizes(self._folder, shard)
        if not manifest["documents"]:
            raise ConfigError(f"{folder} holds no documents: prepare text into another folder.")

        self._record_tokens = int(manifest["record_tokens"])
        self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        readers = _Readers()
        self._shards = [_Shard(self._folder / shard["name"], readers) for shard in shards]
        for shard, opened in zip(shards, self._shards, strict=True):
            if len(opened.lengths) != shard["documents"]:
                raise damaged(opened.path.with_name(opened.path.name + ".lengths.npy"), "it has another number of documents")
        self._first_documents = np.cumsum([0, *(len(shard.lengths) for shard in self._shards)])
        self.lengths = np.concatenate([shard.lengths for shard in self._shards])
        keys = [_load(self._folder / f"{shard['name']}.keys.npy") for shard in shards]
        for shard, opened, own in zip(shards, self._shards, keys, strict=True):
            if shard.get(INDEX_SHA256) not in (None, index_sha256(opened.lengths, own)):
                raise damaged(opened.path.with_name(opened.path.name + ".keys.npy"), "it or lengths.npy beside it has changed")
        self.keys = np.concatenate(keys)
        self.tokenizer: Tokenizer = _load_tokenizer(self._folder, manifest["tokenizer"])
        self.fingerprint = fingerprint(manifest)
        self.description = f"{self._folder.name} (tokenizer {manifest['tokenizer']['name']})"

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Reads the token ids [start, stop) of each given document, as unsigned integers of the folder's type.

        Raises:
          ValueError: a document or a range does not exist.
          ConfigError: a shard is damaged.
        """
        documents, starts, stops = (np.asarray(numbers, np.int64) for numbers in (documents, starts, stops))
        if not len(documents):
            return []
        if documents.min() < 0 or documents.max() >= len(self.lengths):
            raise ValueError(f"Documents are numbered 0 to {len(self.lengths) - 1}.")
        lengths = self.lengths[documents].astype(np.int64)
        if not np.all((starts >= 0) & (starts <= stops) & (stops <= lengths)):
            raise ValueError("Ranges must be within their documents: 0 <= start <= stop <= length.")
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
                raise damaged(shard.file, f"a record has {len(record)} bytes and should have {expected}")
            found[number] = np.frombuffer(record, self._dtype)
        for a, b, records in spans:
            parts = [found[number] for number in records]
            ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts])
            skipped = records.start * size
            yield ids[a - skipped : b - skipped]


class _Shard:
    """One file of records, with the start of each document in it."""

    def __init__(self, path: Path, readers: _Readers):
        self.path = path
        self.file = path.with_name(path.name + ".array_record")
        self.lengths = _load(path.with_name(path.name + ".lengths.npy"))
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.first_tokens = ends - self.lengths
        """Start of each document, in ids from the start of the shard."""
        self.tokens = int(ends[-1]) if len(ends) else 0
        # A reader has a position, so two threads cannot share it.
        self._lock = threading.Lock()
        self._readers = readers

    def read(self, records: list[int]) -> list[bytes]:
        if not records:
            return []
        from array_record.python.array_record_module import ArrayRecordReader

        with self._lock:
            try:
                reader = self._readers.get(self.file, lambda: ArrayRecordReader(str(self.file), _READER_OPTIONS))
                return reader.read(records)
            except (RuntimeError, IndexError, ValueError) as error:
                # A reader that failed once keeps failing.
                self._readers.drop(self.file)
                raise damaged(self.file, str(error).split(";")[0]) from None


class _Readers:
    """Cache of open files by path. It closes the least recently used one when there are many. Thread-safe."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: Path, open_file: Callable[[], Any]) -> Any:
        with self._lock:
            reader = self._open.pop(file, None) or open_file()
            self._open[file] = reader
            if len(self._open) > OPEN_FILES:
                # The file closes when its last user releases it.
                self._open.popitem(last=False)
            return reader

    def drop(self, file: Path) -> None:
        with self._lock:
            self._open.pop(file, None)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads manifest.json of a prepared folder.

    Raises:
      ConfigError: there is no manifest because preparation has not finished, or the manifest has another version.
    """
    file = folder / MANIFEST
    if not file.is_file():
        names = [path.stem for path in folder.glob("tokens-*-of-*.json")] if folder.is_dir() else []
        if names:
            wanted = int(names[0].rpartition("-")[2])
            raise ConfigError(
                f"{folder} is not complete, {len(names)} of {wanted} shards are prepared: "
                f"run jaxllm data prepare again to finish it."
            )
        raise ConfigError(
            f"{folder} is not a prepared folder (it has no {MANIFEST}): run jaxllm data prepare, or name another folder."
        )
    manifest: Any = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{file} was not written by jaxllm data prepare: name another folder.")
    if manifest.get("version") != VERSION:
        raise ConfigError(
            f"{file} is of version {manifest.get('version')} and this jaxllm reads version {VERSION}: prepare it again."
        )
    missing = missing_key(manifest, _MANIFEST_KEYS)
    if missing is None:
        missing = next((f"shards: {key}" for shard in manifest["shards"] if (key := missing_key(shard, SHARD_KEYS))), None)
    if missing is None and (manifest["dtype"] not in _DTYPES or manifest["record_tokens"] < 1 or not manifest["shards"]):
        missing = "how ids are stored"
    if missing:
        raise damaged(file, f"it does not say {missing}")
    return manifest


def read_json(file: Path) -> dict[str, Any] | None:
    """Reads the content of a JSON file; None if there is no file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise damaged(file, " ".join(str(error).split())) from None


def missing_key(content: Any, keys: dict[str, Any]) -> str | None:
    """Finds the first of `keys` that a JSON object lacks or has with another type, as key or key.key. None if it has all.

    Args:
      keys: the type of each key, or a dict of keys if the value should be an object.
    """
    for key, wanted in keys.items():
        found = content.get(key) if isinstance(content, dict) else None
        if isinstance(wanted, dict):
            if inner := missing_key(found, wanted):
                return f"{key}.{inner}"
        elif not isinstance(found, wanted):
            return key
    return None


def check_sizes(folder: Path, shard: dict[str, Any]) -> None:
    """Raises ConfigError unless each file of a shard exists with its recorded size."""
    for name, size in shard["files"].items():
        file = folder / name
        if not file.is_file():
            raise ConfigError(f"{file} is missing: prepare it again, or copy the complete folder.")
        if file.stat().st_size != size:
            raise ConfigError(
                f"{file} has {file.stat().st_size:,} bytes and should have {size:,}: prepare it again, or copy it again."
            )


def index_sha256(lengths: np.ndarray, keys: np.ndarray) -> str:
    """SHA-256 of a shard's document lengths and keys."""
    return hashlib.sha256(lengths.tobytes() + keys.tobytes()).hexdigest()


def fingerprint(manifest: dict[str, Any]) -> str:
    """SHA-256 of the folder's ids, document ends and tokenizer. Names, locations and dates do not change it."""
    shards = [[shard["documents"], shard["tokens"], shard["sha256"]] for shard in manifest["shards"]]
    content = [manifest["format"], manifest["version"], manifest["tokenizer"]["sha256"], shards]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def damaged(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is damaged ({reason}): delete it and run the same jaxllm data prepare again.")


def _load(file: Path) -> np.ndarray:
    try:
        # Not memory-mapped: a mapping keeps its file open, and there may be thousands.
        return np.load(file)
    except (OSError, ValueError) as error:
        raise damaged(file, " ".join(str(error).split())) from None


def _load_tokenizer(folder: Path, recorded: dict[str, Any]) -> Tokenizer:
    as_bytes = recorded["kind"] == BYTES
    tokenizer = load_tokenizer(BYTES if as_bytes else folder / TOKENIZER, recorded["name"])
    if tokenizer.sha256 != recorded["sha256"]:
        raise ConfigError(
            f"{folder / TOKENIZER} is not the tokenizer that {folder} was prepared with: "
            f"restore its files, or prepare the text again into another folder."
        )
    return tokenizer
