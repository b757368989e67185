"""Writes Megatron-LM's .bin and .idx by the definition of the format."""

import struct

import numpy as np

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write(prefix, documents, dtype=np.uint16):
    """`documents`: lists of sequences, which are lists of ids."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    bounds = np.cumsum([0, *map(len, documents)])
    starts = np.cumsum([0, *(s.nbytes for s in sequences)])[:-1]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(sequences), len(bounds))
    lengths = np.array([len(s) for s in sequences], "<i4")
    index = header + lengths.tobytes() + starts.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()
    (prefix.parent / f"{prefix.name}.idx").write_bytes(index)
    (prefix.parent / f"{prefix.name}.bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    return prefix
