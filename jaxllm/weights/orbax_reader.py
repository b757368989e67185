"""Reads the weights of a run one parameter at a time as NumPy arrays, for convert and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxllm.checkpoint.files import why
from jaxllm.config.errors import ConfigError
from jaxllm.weights.folder import Folder, Index, LayerElements
from jaxllm.weights.names import Entry
from jaxllm.weights.safetensors import CODES


@dataclass
class OrbaxFolder(Folder):
    """A checkpoint, or an export of format 1. It removes what pads the arrays for a mesh.

    Reading loads a parameter with all its layers, because an Orbax chunk may hold all of them: reading layer by layer would
    load the chunk again for each. The last parameter read is cached.
    """

    arrays: Path = Path()
    """The Orbax folder, {"params": ...}."""
    _kept: tuple[tuple[str, ...], np.ndarray] | None = field(default=None, repr=False)
    _flat: tuple[tuple[str, ...], int, np.ndarray] | None = field(default=None, repr=False)

    def __post_init__(self):
        super().__post_init__()
        self._handler = ocp.PyTreeCheckpointHandler()
        with in_one_sentence(self.arrays):
            found = self._handler.metadata(self.arrays)  # pyright: ignore[reportArgumentType]  # a pathlib path works
        self._described = getattr(found, "tree", found)["params"]

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        dtype = np.dtype(self._described_at(path).dtype)
        if dtype not in CODES:
            raise ConfigError(f"{'.'.join(path)} in {self.arrays} has dtype {dtype}: it is not a checkpoint of jaxllm.")
        return dtype

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        box = self.box(path, index)
        return self._whole(path)[tuple(slice(begin, end) for begin, end in box)]

    def slab(self, entry: Entry, layer: int) -> LayerElements:
        return LayerElements(self, entry, layer)

    def _described_at(self, path: tuple[str, ...]) -> Any:
        place = self._described
        for name in path:
            if name not in place:
                raise ConfigError(f"{self.arrays} has no parameter {'.'.join(path)}: it was saved by another model.")
            place = place[name]
        return place

    def _whole(self, path: tuple[str, ...]) -> np.ndarray:
        """Reads one parameter in the shape of the model."""
        if self._kept is not None and self._kept[0] == path:
            return self._kept[1]
        self._kept = None
        entry, described = self.entries[path], self._described_at(path)
        item: Any = described
        arguments: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for name in reversed(("params", *path)):
            item, arguments = {name: item}, {name: arguments}
        with in_one_sentence(self.arrays):
            restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
            found: Any = self._handler.restore(self.arrays, args=restore)  # pyright: ignore[reportArgumentType]  # as above
        for name in ("params", *path):
            found = found[name]
        array = np.asarray(found)
        if entry.layers is not None:
            # Chunks of virtual pipeline stages, in execution order (parallel/parameters.py).
            leading = array.ndim - len(entry.dims)
            array = array.reshape(-1, *array.shape[leading:])
        if any(have < want for have, want in zip(array.shape, entry.shape, strict=True)):
            raise ConfigError(
                f"{entry.name} has shape {array.shape} in {self.arrays}, not {entry.shape}: it was saved by another model."
            )
        # Zeros pad layers for a pipeline, vocabulary rows for a mesh, and the dim that ZeRO shards.
        self._kept = (path, array[tuple(slice(size) for size in entry.shape)])
        return self._kept[1]

    def flat_layer(self, entry: Entry, layer: int) -> np.ndarray:
        """One layer's elements in order, which is a copy where zeros pad a dim. The last one is cached."""
        if self._flat is None or self._flat[:2] != (entry.path, layer):
            self._flat, whole = None, self._whole(entry.path)
            self._flat = (entry.path, layer, (whole if entry.layers is None else whole[layer]).reshape(-1))
        return self._flat[2]


@contextmanager
def in_one_sentence(arrays: Path) -> Iterator[None]:
    """Turns errors of Orbax, of any type, into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The weights in {arrays} cannot be read ({why(error)}): use others.") from None
