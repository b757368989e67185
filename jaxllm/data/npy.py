"""Reads arrays of .npy files that may hold anything."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.lib import format as array_format

from jaxllm.untrusted import RefusedInput, opened, shown


def read_npy(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """Reads an array of one dim from a .npy file, without pickles. Its size is compared with the file's first.

    Args:
      dtype: what its numbers are, such as np.integer.

    Raises:
      OSError: it cannot be read.
      RefusedInput: the file is something else, has other numbers or more dims, or is shorter or longer than it says.
    """
    with opened(path) as file:
        try:
            version = array_format.read_magic(file)
            read_header = {(1, 0): array_format.read_array_header_1_0, (2, 0): array_format.read_array_header_2_0}[version]
            shape, fortran, found = read_header(file, max_header_size=10_000)
        except Exception:
            # NumPy reads the header as Python: a tokenizer's error may come, or anything else.
            raise RefusedInput("it is not a .npy file") from None
        if not np.issubdtype(found, dtype) or found.hasobject or len(shape) != 1 or type(shape[0]) is not int or fortran:
            raise RefusedInput(f"it holds {shown(str(found))} of shape {shown(list(shape))}, not {dtype.__name__} in 1 dims")
        size = os.fstat(file.fileno()).st_size - file.tell()
        if shape[0] * found.itemsize != size:
            raise RefusedInput(f"it says {shape[0]:,} numbers and has {size:,} bytes")
        return np.fromfile(file, found)
