"""Reads the state from the files of a memory checkpoint, on this host and on others, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint.arrays import as_saved, names_of, restacked
from jaxllm.checkpoint.files import Meta, why
from jaxllm.checkpoint.manager import State, as_dict, as_state
from jaxllm.checkpoint.memory_files import Generation, Header, Part, PartFile, Piece
from jaxllm.checkpoint.memory_transfer import Address, get_pieces
from jaxllm.config import ConfigError
from jaxllm.runtime import distributed, exit_codes

CONNECTIONS = 8
"""Files that a process reads from other hosts at a time."""


class LostPieces(ConfigError):
    """Pieces that were there at the search could not be read."""

    exit_code = exit_codes.LOST


@dataclass(frozen=True)
class Source:
    """One file of a checkpoint."""

    part: Part
    header: Header
    at: PartFile | Address
    """Here, or the process that has it."""


class MemoryCheckpoint:
    """A complete checkpoint, to be restored; it is read like the newest of manager.Checkpoints.

    Args:
      hosts: names of those that have pieces of it.
    """

    def __init__(self, generation: Generation, sources: Sequence[Source], secret: bytes | None, hosts: tuple[str, ...]):
        self.generation = generation
        self.folder = f"the memory of {', '.join(hosts)}"
        self._sources, self._secret = sources, secret
        self._pieces: dict[tuple[str, ...], list[tuple[Source, int]]] = {}
        for source in sources:
            for place, piece in enumerate(source.header.pieces):
                self._pieces.setdefault(piece.names, []).append((source, place))

    def meta(self) -> Meta:
        return self._sources[0].header.meta

    def restore(self, like: Any, table: Any) -> State:
        """Reads the state; arguments as for Checkpoints.restore.

        Raises:
          LostPieces: on all processes, if one could not read its pieces.
          ConfigError: an array is missing or has another shape.
        """
        wanted = like(self.meta()) if callable(like) else like
        saved = {names: _piece(held[0]).shape for names, held in self._pieces.items()}
        to_read = as_saved(self.folder, saved, as_dict(wanted), table)
        reason, arrays = "", None
        try:
            arrays = jax.tree_util.tree_map_with_path(lambda path, x: self._array(names_of(path), x), to_read)
        except (OSError, ValueError) as error:
            reason = why(error)
        if reason := distributed.first_nonempty(reason):
            raise LostPieces(f"The checkpoint of step {self.generation.step} in {self.folder} could not be read ({reason}).")
        # A collective: all have read.
        return as_state(restacked(arrays, as_dict(wanted)), wanted)

    def _array(self, names: tuple[str, ...], x: jax.ShapeDtypeStruct) -> jax.Array:
        """An array in the sharding of `x`. Beyond the saved shape there are zeros."""
        assert x.sharding is not None, "the layout has them"
        indices = x.sharding.addressable_devices_indices_map(x.shape).values()
        blocks = {_bounds(index, x.shape) for index in indices if index is not None}
        held = [one for one in self._pieces[names] if any(_overlap(_piece(one).index, block) is not None for block in blocks)]
        contents = self._contents(held)
        read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        for block in blocks:
            read[block] = array = np.zeros([stop - start for start, stop in block], x.dtype)
            for piece, content in contents:
                if (common := _overlap(piece.index, block)) is not None:
                    here, there = (
                        tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, whole, strict=True))
                        for whole in (block, piece.index)
                    )
                    array[here] = piece.view(content)[there]
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: read[_bounds(index or (), x.shape)])

    def _contents(self, held: Iterable[tuple[Source, int]]) -> list[tuple[Piece, np.ndarray]]:
        """The bytes of pieces: mapped, or fetched with one request for each file."""
        found, remote = [], {}
        for source, place in held:
            piece = source.header.pieces[place]
            if isinstance(source.at, PartFile):
                found.append((piece, source.at.content(piece)))
            else:
                remote.setdefault(source.part, (source.at, {}))[1][place] = piece
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            fetched = pool.map(lambda item: get_pieces(item[1][0], self._secret, item[0], item[1][1]), remote.items())
            for (_, pieces), contents in zip(remote.values(), fetched, strict=True):
                found += [(piece, contents[place]) for place, piece in pieces.items()]
        return found


def _piece(held: tuple[Source, int]) -> Piece:
    return held[0].header.pieces[held[1]]


def _bounds(index: Sequence[slice], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _overlap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """What two blocks have in common; None if that is nothing. () of two scalars counts as all."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None
