"""Copies tensors from one set of files to another, one at a time, and verifies a checksum of each result.

Memory: the largest tensor that is transposed (a matrix is read completely, because its columns are not contiguous), plus
blocks of BLOCK_BYTES. Direct copies need only blocks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import BLOCK_BYTES
from jaxllm.machine.host import versions
from jaxllm.terminal import bytes_bar
from jaxllm.weights.folder import FORMAT
from jaxllm.weights.safetensors import Described, Elements, Tensor, new_file

TILE = 64
LARGEST_FILE = 5 * 10**9
"""Limit in bytes. A larger tensor gets its own file."""

Create = Callable[[Path, Described], Mapping[str, Tensor]]
"""Makes a file of some format for these tensors; safetensors.new_file is one."""
Layout = Mapping[str, Described]
"""A set of files to write: file names and the tensors of each."""


@dataclass(frozen=True)
class Move:
    """The copy of one tensor."""

    name: str
    """Hugging Face's name, or jaxllm's if only that is known."""
    source: Elements
    matrix: tuple[int, int] | None
    """Rows and columns of the source if the target is its transpose, else None."""
    dtype: np.dtype
    """The narrower dtype of both sides. Values are cast through it."""
    target: str
    """Tensor in the target file that receives the values."""
    first: int = 0
    """First element of the target tensor to write."""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion."""

    source: str
    destination: str
    tensors: int
    """Number of Hugging Face's tensors. Each was read once and compared once."""
    nbytes: int
    """Bytes of weights written."""
    dtypes: set[str]
    files: int
    dropped: tuple[str, ...] = ()
    agreement: Agreement | None = None

    def lines(self) -> list[str]:
        """Text lines for the terminal."""
        files = f"{self.files} files" if self.files > 1 else "1 file"
        lines = [
            f"converted {self.source} to {self.destination}: {self.tensors:,} tensors, {self.nbytes:,} bytes of "
            f"{' and '.join(sorted(self.dtypes))} in {files}",
            "every tensor was read back, and its checksum is the source's",
        ]
        if self.dropped:
            lines.append(f"dropped {len(self.dropped)} tensors such as {self.dropped[0]}: the network does not need them")
        return lines + ([] if self.agreement is None else [self.agreement.line])


@dataclass(frozen=True)
class Agreement:
    """Comparison of the logits of transformers and jaxllm for the same tokens, in float32."""

    largest_difference: float
    mean_kl: float
    """KL divergence of jaxllm's distribution from that of transformers, in nats per position."""
    tokens: int

    @property
    def line(self) -> str:
        return (
            f"logits of {self.tokens} tokens against transformers, in float32: largest difference "
            f"{self.largest_difference:.2e}, mean KL {self.mean_kl:.2e} nats"
        )


def nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def total_bytes(layout: Layout) -> int:
    return sum(nbytes(*tensor) for tensors in layout.values() for tensor in tensors.values())


def in_files(tensors: Described, stem: str, largest: int = LARGEST_FILE) -> Layout:
    """Distributes tensors, in order, over files of at most `largest` bytes. A single file is named STEM.safetensors."""
    groups: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + nbytes(*tensor) > largest:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += nbytes(*tensor)
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    names = [f"{stem}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    return dict(zip(names, groups, strict=True))


def stream(moves: Sequence[Move], layout: Layout, folder: Path, bar: str, create: Create = new_file) -> None:
    """Writes the files of `layout` into `folder`, reads them again and compares.

    Args:
      bar: what it does, for a bar, where each tensor counts once when it is written and once when it is compared.

    Raises:
      ConfigError: a value is not finite, does not fit into its dtype, or reads back differently. The message names the
        tensor.
      OSError: the files cannot be written.
    """
    targets: dict[str, Tensor] = {}
    for name, tensors in layout.items():
        targets |= create(folder / name, tensors)
    sizes, sums = [move.source.size * move.source.dtype.itemsize for move in moves], []
    with bytes_bar(bar, 2 * sum(sizes)) as advance:
        for move, size in zip(moves, sizes, strict=True):
            sums.append(_move(move, targets[move.target]))
            advance(size)
        for file in {tensor.file for tensor in targets.values()}:
            file.sync()
        for move, size, expected in zip(moves, sizes, sums, strict=True):
            matrix = None if move.matrix is None else (move.matrix[1], move.matrix[0])
            if checksum(targets[move.target].elements(move.first, move.source.size), matrix, move.dtype) != expected:
                raise ConfigError(f"{move.name} reads back differently from {folder}: check the disk and the memory.")
            advance(size)


def _move(move: Move, target: Tensor) -> int:
    """Writes one tensor and returns the checksum of its values in the source's order."""
    crc, whole = 0, _whole(move.source, move.matrix)
    for begin, values in _blocks(move.source, whole):
        _require_finite(values, move.name, "holds values that are not finite (NaN or infinite): get intact weights")
        passed = _cast(values, move.dtype)
        if passed is not values:
            _require_finite(passed, move.name, f"holds values too large for {move.dtype.name}: choose another --dtype")
        crc = zlib.crc32(passed.view(np.uint8).data, crc)
        if whole is None:
            target.write(_cast(passed, target.dtype), move.first + begin)
    if whole is not None:
        for begin, values in _transposed(whole):
            target.write(_cast(_cast(values, move.dtype), target.dtype), move.first + begin)
    return crc


def checksum(source: Elements, matrix: tuple[int, int] | None, dtype: np.dtype) -> int:
    """CRC32 of the elements as `dtype`, or of their transpose if `matrix` is given."""
    crc, whole = 0, _whole(source, matrix)
    for _, values in _blocks(source, None) if whole is None else _transposed(whole):
        crc = zlib.crc32(_cast(values, dtype).view(np.uint8).data, crc)
    return crc


def _whole(source: Elements, matrix: tuple[int, int] | None) -> np.ndarray | None:
    return None if matrix is None else source.read(0, source.size).reshape(matrix)


def _blocks(source: Elements, whole: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first element, values) of each block, in the source's order."""
    step = BLOCK_BYTES // source.dtype.itemsize
    flat = None if whole is None else whole.reshape(-1)
    for begin in range(0, source.size, step):
        end = min(source.size, begin + step)
        yield begin, source.read(begin, end) if flat is None else flat[begin:end]


def _transposed(whole: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first element, values) of each block of the transpose, in its order."""
    rows, columns = whole.shape
    step = max(1, BLOCK_BYTES // (rows * whole.dtype.itemsize))
    for begin in range(0, columns, step):
        yield begin * rows, transpose(whole[:, begin : begin + step]).reshape(-1)


def transpose(matrix: np.ndarray) -> np.ndarray:
    """Transposes into C order, tile by tile. Row by row, NumPy would load a cache line for each element and, for bfloat16,
    call a function for each element.
    """
    unsigned = matrix.view(f"u{matrix.dtype.itemsize}")
    rows, columns = matrix.shape
    out = np.empty((columns, rows), unsigned.dtype)
    for i in range(0, rows, TILE):
        for j in range(0, columns, TILE):
            out[j : j + TILE, i : i + TILE] = unsigned[i : i + TILE, j : j + TILE].T
    return out.view(matrix.dtype)


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if values.dtype == dtype:
        return values
    # Overflow gives infinity, which is refused later.
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _require_finite(values: np.ndarray, name: str, what: str) -> None:
    if not np.isfinite(values).all():
        raise ConfigError(f"{name} {what}.")


def describe_model(
    model: Mapping[str, Any], source: str, dtype: np.dtype, layout: Layout, more: Mapping[str, Any] | None = None
) -> str:
    """Returns the text of model.json for the files of `layout`."""
    said = {"format": FORMAT, "model": dict(model), "source": source, "dtype": dtype.name, "files": list(layout)}
    return json.dumps({**said, **(more or {}), "versions": versions()}, indent=2) + "\n"
