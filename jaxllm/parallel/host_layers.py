"""The layers' weights and gradient sums in the host's pinned memory (parallel.offload_state=all).

A layer is one row of each stack on the host. The layer loop moves weights a turn before they are needed, and adds gradients a
turn after they are made:

    turn, backward   3     2     1     0    end
    weights in       L2    L1    L0    L0             with ZeRO 3 a rank's shard, which is then gathered
    compute          L3    L2    L1    L0
    sums in, out     L3    L3    L2    L1    L0       in the first turn zeros are added

So the device holds a few rows, however many layers there are. A turn reads sums behind recomputation and the gradients of
activations; then it writes sums, and reads weights, behind the gradients of weights (compiled for an H100, JAX 0.10.2).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.parallel.ordering import weights_token
from jaxllm.parallel.types import Tree, WeightAccess
from jaxllm.private_jax import empty_on_host

Space = jax.memory.Space


def to_device(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, Space.Device), tree)


def from_host(access: WeightAccess, layouts: Tree) -> WeightAccess:
    """`access` to layers that are on the host: a rank's weights of a layer are fetched, and then gathered by `access`.

    Args:
      layouts: of one layer.
    """
    token, gather = partial(weights_token, layouts=layouts), access.gather
    if gather is None:
        return dataclasses.replace(access, gather=to_device, token=token)
    return dataclasses.replace(access, gather=lambda row: gather(to_device(row)), token=token)


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "begun"], meta_fields=[])
@dataclass(frozen=True)
class HostSums:
    """Sums of a rank's gradients, an array [layer, ...] on the host for each weight."""

    rows: Tree
    begun: jax.Array | None
    """Float32: 1 once the sums of all layers are written, until then 0 and `rows` are undefined. None: there is a single
    microbatch, so that nothing is read."""

    @classmethod
    def empty(cls, shapes: Tree, microbatches: int) -> HostSums:
        rows = jax.tree.map(lambda x: empty_on_host(x.shape, x.dtype), shapes)
        return cls(rows, jnp.zeros((), jnp.float32) if microbatches > 1 else None)

    def read(self, number: Any) -> Tree:
        """A layer's sums, on the device; None if nothing is read."""
        if self.begun is None:
            return None
        return to_device(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), self.rows))

    @jax.named_scope("gradient_sums")
    def add(self, number: Any, row: Tree, gradients: Tree) -> HostSums:
        """With the gradients of a layer added to its sums, which `read` returned as `row`."""

        def one(stack: jax.Array, gradient: jax.Array, before: jax.Array | None = None) -> jax.Array:
            new = gradient.astype(stack.dtype)
            if before is not None and self.begun is not None:
                new = new + jnp.where(self.begun > 0, before, 0)
            return jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(new, Space.Host), number, 0)

        rows = jax.tree.map(one, self.rows, gradients, *([] if row is None else [row]))
        return dataclasses.replace(self, rows=rows)

    def complete(self) -> HostSums:
        """After the gradients of all layers of a microbatch are added."""
        return self if self.begun is None else dataclasses.replace(self, begun=jnp.ones((), jnp.float32))
