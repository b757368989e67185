"""Fragments of the weights, of which DiLoCo synchronises one at a time (train.diloco_fragments).

As in Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512) fragment f of F has the layers f, f + F, f + 2 F, ... Here it
also has those rows of the embedding and the head, and those numbers of the last norm, so each fragment has a share of 1 / F of
everything. The outer optimizer works on each number by itself, so any cut is allowed. The number of the fragment is an argument
of the compiled program, so one program serves all fragments.

Each device cuts the part that it holds, by the place in that part, so a cut sends nothing. A pipeline's chunk, and the rows of
a tensor rank and of a ZeRO rank, then belong to the same fragments as on one device if F divides their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec


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

    def cut(self, tree: Any, number: jax.Array) -> Any:
        """Fragment `number` of `tree`: arrays with a share of the rows, sharded as before. Where F does not divide the rows of
        a device, rows of zeros fill the last group of F."""

        def own(number: jax.Array, x: jax.Array, dim: int) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(self._in_groups(x, dim), number, dim + 1, keepdims=False)

        return self._on_each_device(own, number, tree)

    def put(self, tree: Any, fragment: Any, number: jax.Array) -> Any:
        """`tree` with fragment `number` in its place: the inverse of `cut`."""

        def own(number: jax.Array, x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
            groups = jax.lax.dynamic_update_index_in_dim(self._in_groups(x, dim), part, number, dim + 1)
            rows = groups.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
            return jax.lax.slice_in_dim(rows, 0, x.shape[dim], axis=dim)

        return self._on_each_device(own, number, tree, fragment)

    def _in_groups(self, x: jax.Array, dim: int) -> jax.Array:
        """[..., rows, ...] -> [..., rows / F, F, ...]"""
        gaps = [(0, 0)] * x.ndim
        gaps[dim] = (0, -x.shape[dim] % self.count)
        return jnp.pad(x, gaps).reshape(*x.shape[:dim], -1, self.count, *x.shape[dim + 1 :])

    def _on_each_device(self, function: Callable, number: jax.Array, *trees: Any) -> Any:
        def run(number: jax.Array, *parts: Any) -> Any:
            return jax.tree.map(lambda dim, *arrays: function(number, *arrays, dim), self.dims, *parts)

        specs = (PartitionSpec(), *(self.specs,) * len(trees))
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=self.specs, check_vma=False)(number, *trees)


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
