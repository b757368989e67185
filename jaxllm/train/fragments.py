"""Fragments of the weights, of which DiLoCo synchronises one at a time (train.diloco_fragments).

As in Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512) fragment f of F has the layers f, f + F, f + 2 F, ... Here it
also has those rows of the embedding and the head, and those numbers of the last norm, so each fragment has a share of 1 / F of
everything. The outer optimizer works on each number by itself, so any cut is allowed.

Each device cuts the part that it holds, by the place in that part, so a cut sends nothing. A pipeline's chunk, and the rows of
a tensor rank and of a ZeRO rank, then belong to the same fragments as on one device if F divides their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


@dataclass(frozen=True)
class Fragments:
    """How trees of weights are cut.

    Attributes:
      count: F.
      specs: the tree's PartitionSpecs.
      dims: for each array the dim that is cut.
    """

    count: int
    mesh: Mesh
    specs: Any
    dims: Any

    def cut(self, tree: Any, number: int) -> Any:
        """Fragment `number` of `tree`: arrays with fewer rows, possibly none, sharded as before."""

        def own(x: jax.Array, dim: int) -> jax.Array:
            first = min(number, x.shape[dim])
            return jax.lax.slice_in_dim(x, first, None, stride=self.count, axis=dim)

        return self._on_each_device(own, tree)

    def put(self, tree: Any, fragment: Any, number: int) -> Any:
        """`tree` with fragment `number` in its place: the inverse of `cut`."""

        def own(x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
            rows, there = x.shape[dim], part.shape[dim]
            if not there:
                return x
            # A scatter would touch fewer bytes, but GPUs and CPUs write its rows one after the other.
            gaps = [(0, 0, 0)] * x.ndim
            gaps[dim] = (number, rows - 1 - number - (there - 1) * self.count, self.count - 1)
            spread = jax.lax.pad(part, jnp.zeros((), x.dtype), gaps)
            row = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
            return jnp.where(row % self.count == number, spread, x)

        return self._on_each_device(own, tree, fragment)

    def _on_each_device(self, function: Callable, *trees: Any) -> Any:
        def run(*parts: Any) -> Any:
            return jax.tree.map(lambda dim, *arrays: function(*arrays, dim), self.dims, *parts)

        specs = (self.specs,) * len(trees)
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=self.specs, check_vma=False)(*trees)


def dims_to_cut(weights: Any, stack_dims: int, leading: int) -> Any:
    """For each array of a tree of weights its last dim that counts layers, or the first dim of what is outside the layers.

    Args:
      stack_dims: number of dims that count layers.
      leading: number of dims before all of them, such as that of replicas.
    """
    return {
        name: jax.tree.map(lambda _, dim=stack_dims - 1 if name == "layers" else 0: leading + dim, part)
        for name, part in weights.items()
    }
