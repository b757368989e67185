"""Loads a model folder into sharded arrays. Each process reads only the bytes that its devices hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import AT_ONCE_BYTES
from jaxllm.weights.folder import Folder

Box = tuple[tuple[int, int], ...]
"""[begin, end) of each dim."""


def load_params(folder: Folder, like: Any, table: Any) -> Any:
    """Loads the parameters of a folder with the shardings and dtypes of `like`. What the mesh adds as padding is zero: rows of
    embedding and head, layers, and the end of the dim that ZeRO shards.

    Args:
      like: nested dict of ShapeDtypeStructs with shardings, such as Parallelized.master. Layer stacks may be split for the
        virtual stages of a pipeline.
      table: Parallelized.table.

    Raises:
      ConfigError: a parameter is missing in the folder or has another shape. The message names it.
    """
    wanted = {_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)}
    if missing := sorted(wanted ^ folder.entries.keys()):
        name, known = ".".join(missing[0]), missing[0] in folder.entries
        raise ConfigError(f"{folder.description} has {'a' if known else 'no'} parameter {name}, unlike this config's model.")
    return jax.tree_util.tree_map_with_path(lambda path, x, p: _load(folder, _names(path), x, p.shape), like, table)


def _load(folder: Folder, path: tuple[str, ...], like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.Array:
    plain = folder.entries[path].shape
    extra = len(shape) - len(plain)
    if extra not in (0, 2) or shape[extra + 1 :] != plain[1:] or math.prod(shape[: extra + 1]) < plain[0]:
        raise ConfigError(
            f"{'.'.join(path)} has shape {plain} in {folder.description} and {shape} in this config: use the same model."
        )
    source = _PaddedParameter(folder, path, like.shape, extra)
    places = like.sharding.addressable_devices_indices_map(like.shape)
    # JAX's annotation allows None in indices, but it never occurs.
    boxes = {device: _box(index, like.shape) for device, index in places.items()}  # pyright: ignore[reportArgumentType]
    read = source.read
    hull = tuple((min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*boxes.values(), strict=True))
    nbytes = _size(hull) * folder.dtype(path).itemsize
    # If the boxes tile their hull, reading the hull reads no unneeded bytes.
    if sum(map(_size, set(boxes.values()))) == _size(hull) and nbytes <= AT_ONCE_BYTES:
        whole = source.read(hull)

        def read(box: Box) -> np.ndarray:
            return whole[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, hull, strict=True))]

    shards, values = [], {}
    for device, box in sorted(boxes.items(), key=lambda item: item[1]):
        if box not in values:
            values = {box: read(box).astype(like.dtype)}
        spot = jax.sharding.SingleDeviceSharding(device, memory_kind=like.sharding.memory_kind)
        shards.append(jax.device_put(values[box], spot))
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


class _PaddedParameter:
    """A parameter in the layout of a mesh: padded with zeros, and its first dim split in three for virtual stages."""

    def __init__(self, folder: Folder, path: tuple[str, ...], shape: tuple[int, ...], extra: int):
        self._folder, self._path, self._shape, self._extra = folder, path, shape, extra
        self._plain = folder.entries[path].shape

    def read(self, box: Box) -> np.ndarray:
        out = np.zeros([b - a for a, b in box], self._folder.dtype(self._path))
        inner = box[self._extra :]
        for where, first in self._runs(box):
            spans = ((first + inner[0][0], first + inner[0][1]), *inner[1:])
            index = [slice(a, min(b, size)) for (a, b), size in zip(spans, self._plain, strict=True)]
            if all(part.start < part.stop for part in index):
                there = tuple(slice(0, part.stop - part.start) for part in index)
                out[where][there] = self._folder.read(self._path, index)
        return out

    def _runs(self, box: Box) -> Iterator[tuple[tuple[int, ...], int]]:
        """(position in the box, first layer of its chunk) of each [virtual stage, stage]. One run if layers are one dim."""
        outer = box[: self._extra]
        for where in itertools.product(*(range(a, b) for a, b in outer)):
            place = tuple(i - a for i, (a, _) in zip(where, outer, strict=True))
            first = 0
            for i, size in zip((*where, 0), self._shape[: self._extra + 1], strict=True):
                first = first * size + i
            yield place, first


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _size(box: Box) -> int:
    return math.prod(b - a for a, b in box)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", key)) for key in path)
