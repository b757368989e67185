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
from jaxllm.data.documents import Documents
from jaxllm.data.tokenizer import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Of a file of ids that the fingerprint reads: its beginning, its end and so many blocks between, as a terabyte takes an hour.
_BLOCK, _BLOCKS_BETWEEN = 4096, 64
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class MegatronDocuments(Documents):
    """The documents of one NAME.bin and NAME.idx, memory-mapped. See Documents.

    The files do not say which tokenizer made them nor which texts: keys are hashes of the documents' numbers, and documents
    end with a mark only if the files were made with --append-eod.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer | None = None):
        """
        Args:
          prefix: path of the files without .bin and .idx; either suffix may be there.

        Raises:
          ConfigError: a file is missing, cut short, or of another format.
        """
        name = str(prefix).removesuffix(".bin").removesuffix(".idx")
        index, tokens = Path(f"{name}.idx"), Path(f"{name}.bin")
        for path in (index, tokens):
            if not path.is_file():
                raise ConfigError(f"There is no file {path}: data.paths names Megatron-LM files without their .bin or .idx.")
        raw = index.read_bytes()
        dtype, num_sequences, num_bounds = _read_header(index, raw)
        expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
        if len(raw) != expected:
            raise ConfigError(f"{index} has {len(raw):,} bytes and should have {expected:,}: it was cut short; copy it again.")
        lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        starts = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        bounds = np.frombuffer(raw, "<i8", num_bounds, HEADER.size + 12 * num_sequences)
        in_order = num_bounds > 0 and bounds[0] == 0 and bounds[-1] == num_sequences and (np.diff(bounds) >= 0).all()
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if not in_order or (lengths < 0).any() or (starts != ends[:-1] * dtype.itemsize).any():
            raise ConfigError(f"{index} does not list sequences one after another: make it again with Megatron-LM's tools.")
        size = tokens.stat().st_size
        if size != ends[-1] * dtype.itemsize:
            raise ConfigError(
                f"{tokens} has {size:,} bytes and {index.name} lists {ends[-1] * dtype.itemsize:,}: "
                f"it was cut short or belongs to another index; copy both again."
            )
        if num_bounds < 2 or not size:
            raise ConfigError(f"{index} lists no documents: name files that hold some.")
        self._starts = ends[bounds[:-1]]
        self.lengths = np.diff(ends[bounds])
        self.keys = _scattered(np.arange(len(self.lengths), dtype=np.uint64))
        self._tokens = np.memmap(tokens, dtype, mode="r")
        self.tokenizer = tokenizer
        self.fingerprint = _fingerprint(raw, tokens, size, tokenizer)
        self.description = f"Megatron-LM files {name}"

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        begins = self._starts[documents]
        spans = zip((begins + starts).tolist(), (begins + stops).tolist(), strict=True)
        return [self._tokens[start:stop] for start, stop in spans]


def _fingerprint(index: bytes, tokens: Path, size: int, tokenizer: Tokenizer | None) -> str:
    """SHA-256 of the index, the tokenizer and the ids: all of a small file, of a large one its size and the blocks above."""
    last = size - _BLOCK
    if size <= _BLOCK * (_BLOCKS_BETWEEN + 2):
        blocks = [(0, size)]
    else:
        blocks = [(last * number // (_BLOCKS_BETWEEN + 1), _BLOCK) for number in range(_BLOCKS_BETWEEN + 2)]
    # Lengths first, so that no two of the parts run into each other.
    digest = hashlib.sha256(struct.pack("<QQ", len(index), size) + index)
    with open(tokens, "rb") as file:
        for start, length in blocks:
            file.seek(start)
            digest.update(file.read(length))
    digest.update((tokenizer.sha256 if tokenizer else "").encode())
    return digest.hexdigest()


def _read_header(index: Path, raw: bytes) -> tuple[np.dtype, int, int]:
    if len(raw) < HEADER.size:
        raise ConfigError(f"{index} has {len(raw)} bytes, less than the header of an index: it was cut short; copy it again.")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack_from(raw)
    if magic != MAGIC or version != 1:
        raise ConfigError(f"{index} is no index of Megatron-LM's present format: make it again with its tools.")
    if code not in DTYPES:
        raise ConfigError(
            f"{index} holds ids of type {code}, which is no integer type: make it again with Megatron-LM's tools."
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), num_sequences, num_bounds


def _scattered(numbers: np.ndarray) -> np.ndarray:
    """A hash of each number (SplitMix64's output function; Steele, Lea and Flood, 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
