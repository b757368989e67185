"""Loads a model folder into sharded arrays. Each process reads only the bytes that its devices hold."""

import itertools
import math
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint.arrays import names_of
from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import AT_ONCE_BYTES
from jaxllm.weights.folder import Folder, box_of
from jaxllm.weights.safetensors import Box


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
    wanted = {names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)}
    if missing := sorted(wanted ^ folder.entries.keys()):
        name, known = ".".join(missing[0]), missing[0] in folder.entries
        raise ConfigError(f"{folder.description} has {'a' if known else 'no'} parameter {name}, unlike this config's model.")
    return jax.tree_util.tree_map_with_path(lambda path, x, p: _load(folder, names_of(path), x, p.shape), like, table)


def _load(folder: Folder, path: tuple[str, ...], like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.Array:
    plain = folder.entries[path].shape
    extra = len(shape) - len(plain)
    if extra not in (0, 2) or shape[extra + 1 :] != plain[1:] or math.prod(shape[: extra + 1]) < plain[0]:
        raise ConfigError(
            f"{'.'.join(path)} has shape {plain} in {folder.description} and {shape} in this config: use the same model."
        )
    read = partial(_read_padded, folder, path, like.shape, extra)
    places = like.sharding.addressable_devices_indices_map(like.shape)
    # JAX's annotation allows None in indices, but it never occurs.
    boxes = {device: box_of(index, like.shape) for device, index in places.items()}  # pyright: ignore[reportArgumentType]
    hull = tuple((min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*boxes.values(), strict=True))
    nbytes = _size(hull) * folder.dtype(path).itemsize
    # If the boxes tile their hull, reading the hull reads no unneeded bytes.
    if sum(map(_size, set(boxes.values()))) == _size(hull) and nbytes <= AT_ONCE_BYTES:
        whole = read(hull)

        def read(box: Box) -> np.ndarray:
            return whole[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, hull, strict=True))]

    shards, values = [], {}
    for device, box in sorted(boxes.items(), key=lambda item: item[1]):
        if box not in values:
            values = {box: read(box).astype(like.dtype)}
        spot = jax.sharding.SingleDeviceSharding(device, memory_kind=like.sharding.memory_kind)
        shards.append(jax.device_put(values[box], spot))
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _read_padded(folder: Folder, path: tuple[str, ...], shape: tuple[int, ...], extra: int, box: Box) -> np.ndarray:
    """A box of a parameter in the layout of a mesh: padded with zeros, and with `extra` its first dim split in three for
    virtual stages. shape: of the whole parameter in that layout.
    """
    out, outer, inner = np.zeros([b - a for a, b in box], folder.dtype(path)), box[:extra], box[extra:]
    # For each [virtual stage, stage], the first layer of its chunk; once if layers are one dim.
    for where in itertools.product(*(range(a, b) for a, b in outer)):
        first = 0
        for i, size in zip((*where, 0), shape[: extra + 1], strict=True):
            first = first * size + i
        spans = ((first + inner[0][0], first + inner[0][1]), *inner[1:])
        index = [slice(a, min(b, size)) for (a, b), size in zip(spans, folder.entries[path].shape, strict=True)]
        if all(part.start < part.stop for part in index):
            there = tuple(slice(0, part.stop - part.start) for part in index)
            out[tuple(i - a for i, (a, _) in zip(where, outer, strict=True))][there] = folder.read(path, index)
    return out


def _size(box: Box) -> int:
    return math.prod(b - a for a, b in box)
