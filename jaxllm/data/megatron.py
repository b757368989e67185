"""Token files of Megatron-LM: NAME.bin holds the ids of all sequences, NAME.idx their lengths.

Layout of NAME.idx (Megatron-LM, core/datasets/indexed_dataset.py), little-endian: the nine bytes MMIDIDX 00 00, the version
(u64, 1), a code for the type of ids (u8), the number of sequences (u64) and of document bounds (u64), then each sequence's
length (i32) and the byte at which it starts (i64), and the document bounds as sequence numbers (i64), from 0 to the end.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.data.documents import Documents, cut
from jaxllm.data.tokenizer import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# The fingerprint reads the beginning, the end and this many blocks between of a large file of ids; hashing a terabyte
# would take an hour.
_BLOCK, _BLOCKS_BETWEEN = 4096, 64
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class MegatronDocuments(Documents):
    """The documents of one memory-mapped pair NAME.bin and NAME.idx. See Documents.

    The files record neither their tokenizer nor the source text. Keys are therefore hashes of document numbers, and
    documents end with an EOS token only if the files were made with --append-eod.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer | None = None):
        """
        Args:
          prefix: path of the files without .bin and .idx. Either suffix is accepted.

        Raises:
          ConfigError: a file is missing, truncated, or in another format.
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
        self._file, self._starts = tokens, ends[bounds[:-1]]
        self.lengths = np.diff(ends[bounds])
        self.keys = _hashes(np.arange(len(self.lengths), dtype=np.uint64))
        self._tokens = np.memmap(tokens, dtype, mode="r")
        self.tokenizer = tokenizer
        self.fingerprint = _fingerprint(raw, tokens, size, tokenizer)
        self.description = f"Megatron-LM files {name}"

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return cut(self._tokens, self._starts[documents], starts, stops)

    def where(self, document: int, token: int) -> str:
        return f"id {int(self._starts[document]) + token:,} of {self._file}"


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


def _hashes(numbers: np.ndarray) -> np.ndarray:
    """Hashes each number with SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
