"""Reads and writes safetensors files in pieces: any box of a tensor, in any order. The layout of a file is fixed before its
values are known.

A file has 8 bytes (header length, little-endian), the header (JSON: name -> dtype, shape, [begin, end) after the header) and
the values. This module uses plain reads and writes, because the pages of a memory map count as the process's own memory. The
library reads rows only through NumPy, which does not support bfloat16, and its writer needs all tensors in memory.

Source of the format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import RefusedInput, Text, Whole, checked, checked_map, parse_json

DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2")}
"""Supported dtypes of weights, by their names in a header."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
FOR_TORCH = {"format": "pt"}
"""What transformers requires in a header."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the library's reader."""


@dataclass(frozen=True)
class _Described:
    """What a header says of one tensor."""

    dtype: Text
    shape: tuple[Whole, ...]
    data_offsets: tuple[Whole, Whole]


Box = tuple[tuple[int, int], ...]
"""[begin, end) of each dim."""
Described = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of a file."""


@dataclass(frozen=True)
class Elements:
    """Consecutive elements that can be read in pieces: a part of a tensor in a file, or what is made of one."""

    size: int
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]
    """Reads elements [begin, end) as a flat array."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    name: str
    code: str
    """Name of the dtype in the header. It may be missing in DTYPES."""
    shape: tuple[int, ...]
    file: ValuesFile
    begin: int
    """Position of its first byte in the file."""
    end: int

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    def read(self, box: Box | None = None, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Reads a box of the tensor (default: all of it), and no other bytes. The tensor has at least one dim.

        Args:
          shape: a shape of the same size that `box` refers to; default: the tensor's shape.
        """
        shape = self.shape if shape is None else shape
        box = tuple((0, size) for size in shape) if box is None else box
        lengths = [end - begin for begin, end in box]
        out = np.empty(lengths, self.dtype)
        if out.size == 0:
            return out
        # The box covers the dims after `last` completely, so a run of bytes spans them and the box's part of `last`.
        last = max((d for d, size in enumerate(shape) if lengths[d] != size), default=0)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        rows = out.reshape(math.prod(lengths[:last]), -1).view(np.uint8)
        outer = itertools.product(*(range(begin, end) for begin, end in box[:last]))
        for row, where in zip(rows, outer, strict=True):
            first = sum(i * stride for i, stride in zip((*where, box[last][0]), strides, strict=False))
            self.file.read_into(row, self.begin + first * self.dtype.itemsize)
        return out

    def elements(self, first: int = 0, size: int | None = None) -> Elements:
        """`size` elements from `first` on, in the file's order; default: all."""
        count = (self.end - self.begin) // self.dtype.itemsize
        size = count if size is None else size
        return Elements(size, self.dtype, lambda begin, end: self.read(((first + begin, first + end),), (count,)))

    def write(self, values: np.ndarray, first: int = 0) -> None:
        """Writes `values` from element `first` on, in C order. Raises OSError."""
        view = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self.file.write(view, self.begin + first * values.dtype.itemsize)


class ValuesFile:
    """An open file that is read, and with os.O_RDWR written, in pieces. ConfigError if it cannot be read."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY):
        self.path = path
        try:
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): get the file again.") from None
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, row: np.ndarray, offset: int) -> None:
        """Fills a byte array from the file. ConfigError if it ends too early or cannot be read."""
        view, done = row.data, 0
        while done < len(view):
            try:
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be read ({error.strerror}): check the disk.") from None
            if not got:
                raise self._damaged("it ends before its last tensor")
            done += got

    def write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], offset + done)

    def sync(self) -> None:
        """Returns when all is on the disk. Some file systems report a full disk only at this point."""
        os.fsync(self._descriptor)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def _damaged(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path} is damaged ({reason}): get the file again.")


class TensorFile(ValuesFile):
    """An open safetensors file. Opening checks the header: each tensor is within the file, has as many bytes as its shape and
    dtype need, and follows the previous one without a gap. A ConfigError names file and reason.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY):
        super().__init__(path, flags)
        self.tensors = {tensor.name: tensor for tensor in self._header()}

    def _header(self) -> Iterator[Tensor]:
        if self.size < 8:
            raise self._damaged(f"it has {self.size} bytes, too few for a header")
        length = np.zeros(8, np.uint8)
        self.read_into(length, 0)
        header_bytes = int(length.view("<u8")[0])
        if header_bytes > min(LONGEST_HEADER, self.size - 8):
            raise self._damaged(f"its header claims {header_bytes:,} bytes of {self.size:,}")
        header = np.zeros(header_bytes, np.uint8)
        self.read_into(header, 8)
        try:
            found = parse_json(header.tobytes(), LONGEST_HEADER)
            found = checked(found, dict[str, Any])
            described = checked_map({name: line for name, line in found.items() if name != "__metadata__"}, _Described)
        except RefusedInput as error:
            raise self._damaged(f"its header is not the JSON of a safetensors file: {error}") from None
        lines = [(name, line.dtype, line.shape, *line.data_offsets) for name, line in described.items()]
        start = reached = 8 + header_bytes
        for name, code, shape, begin, end in sorted(lines, key=lambda line: line[3:]):
            if start + begin != reached or end < begin:
                raise self._damaged(f"{name} does not begin where the tensor before it ends")
            reached = start + end
            if reached > self.size:
                raise self._damaged(f"it has {self.size:,} bytes, and {name} ends at {reached:,}; it is truncated")
            if code in DTYPES and end - begin != math.prod(shape) * DTYPES[code].itemsize:
                raise self._damaged(f"{name} has {end - begin:,} bytes, which does not match {code} of shape {list(shape)}")
            yield Tensor(name, code, shape, self, start + begin, start + end)
        if reached != self.size:
            raise self._damaged(f"it has {self.size:,} bytes, and its tensors end at {reached:,}")


def new_file(path: Path, tensors: Described, metadata: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Creates a file of full length for these tensors, whose values are still to be written. Larger dtypes come first, so each
    tensor is aligned to its item size.

    Args:
      metadata: strings for the header, such as FOR_TORCH.

    Raises:
      OSError: the file exists or cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return TensorFile(path, os.O_RDWR).tensors
