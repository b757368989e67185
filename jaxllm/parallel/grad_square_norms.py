"""Squared norms of the gradients of a step's parts: what the gradient noise scale (train/noise_scale.py) is measured with.

A *part* is what one data rank computes in one microbatch: train.microbatch_sequences sequences, in every parallel mode, so that
the figures do not depend on the mesh. Nowhere is a part's gradient left once it has been added to others, so its square is
taken before:

    ZeRO 0 and 1   as soon as the microbatch has its gradients, before they are added to the rank's own
    ZeRO 2 and 3   a layer at a time, before it is reduced and scattered; the squares leave autodiff through a sink (zero.py)
    pipeline       in the tick that makes them: each stage its layers and its slices of embedding and head, filed under the
                   tick's microbatch, and summed over stages once, at the end
    tensor         what is split over it adds up, what is replicated counts once; summed at the end too
    context        ranks have summands of one gradient, to be added before they are squared: a reduce-scatter inside the host,
                   and of a tied head in a pipeline an all-reduce, the only transfers here that are not a handful of numbers

Everything runs in the region that is manual over pipe, data and context. Squares are float32 [tensor]: each tensor rank's
share, so that no loop waits for a sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm.mesh import CONTEXT, PIPE, TENSOR
from jaxllm.model.layers import Ops
from jaxllm.parallel.types import NoiseParts, Tree
from jaxllm.pipeline_schedule import Schedule
from jaxllm.sharding import over_tensor, tensor_specs, unstack_layout

SQUARES, TIED, NUMBER = "squares", "tied", "number"
"""Entries beside those of the parameters: of sinks and sums, of sums, and of a microbatch's rows."""


class SquaredNorms:
    """Squares of gradients as they lie on a rank, float32 [tensor]. Summed over `tensor` and `context` they are the squared
    norm of the gradients' sum over `context`.

    Args:
      layouts: nested dict of Layout, of the parameters as they are stored.
      stack_dims: leading dims of those under "layers".
      context, tensor: sizes of these axes.
    """

    def __init__(self, layouts: Tree, stack_dims: int, context: int, tensor: int):
        self._layouts, self.context, self.tensor = layouts, context, tensor
        self._layer = jax.tree.map(partial(unstack_layout, stack_dims=stack_dims), layouts["layers"])

    def of(self, gradients: dict[str, Tree]) -> jax.Array:
        """Of some or all top-level entries."""
        return self._squares(gradients, {name: self._layouts[name] for name in gradients})

    def of_layer(self, gradients: Tree) -> jax.Array:
        """Of one layer."""
        return self._squares(gradients, self._layer)

    def of_scalar(self, square: jax.Array) -> jax.Array:
        """A sum over all tensor ranks, shared out among them."""
        return jnp.full((self.tensor,), square / self.tensor)

    def zeros(self, *shape: int) -> jax.Array:
        return jnp.zeros((*shape, self.tensor), jnp.float32)

    def _squares(self, gradients: Tree, layouts: Tree) -> jax.Array:
        specs = tensor_specs(layouts)

        def local(gradients: Tree) -> jax.Array:
            def one(g: jax.Array, spec: P) -> jax.Array:
                g = g.astype(jnp.float32)
                if self.context > 1:
                    flat = jnp.pad(g.reshape(-1), (0, -g.size % self.context))
                    g = jax.lax.psum_scatter(flat, CONTEXT, scatter_dimension=0, tiled=True)
                return jnp.sum(jnp.square(g)) / (1 if TENSOR in spec else self.tensor)

            total: Any = sum(jax.tree.leaves(jax.tree.map(one, gradients, specs)))
            return total[None]

        if self.context == self.tensor == 1:
            return local(gradients)
        return over_tensor(local, in_specs=(specs,), out_specs=P(TENSOR))(gradients)


class StageSquares:
    """Where a pipeline's ticks file their squares: entries that `new` adds to the sums which the ticks carry.

    With tied embeddings one matrix has two gradients, made some ticks apart: |a + b|^2 = |a|^2 + |b|^2 + 2 <a, b>. The
    look-up's has rows for the microbatch's tokens alone, so the head's rows for these tokens are kept until then: a hidden
    state in float32 for each microbatch in between.
    """

    def __init__(self, norms: SquaredNorms, ops: Ops, schedule: Schedule, tied: bool):
        self._norms, self._ops, self._stages, self._tied = norms, ops, schedule.stages, tied
        self._microbatches, self._slots = schedule.microbatches, microbatches_between(schedule)

    def new(self, shape: tuple[int, int, int]) -> Tree:
        """Zeros; `shape`: of a hidden state."""
        entries = {SQUARES: self._norms.zeros(self._microbatches)}
        if self._tied:
            kept = jnp.zeros((self._slots, *shape), jnp.float32)
            entries[TIED] = self._ops.constrain(kept, ("batch", "batch", "sequence_shard", "embed"))
        return entries

    def file(self, sums: Tree, rows: Tree, squares: jax.Array) -> Tree:
        """Adds squares to those of the rows' microbatch."""
        is_it = jnp.arange(self._microbatches) == rows[NUMBER]
        return sums | {SQUARES: sums[SQUARES] + jnp.where(is_it[:, None], squares[None], 0.0)}

    def embedding(self, sums: Tree, rows: Tree, table_VD: jax.Array, dh_BSD: jax.Array) -> Tree:
        """table_VD: the look-up's gradient, the rank's rows; dh_BSD: that of what was looked up, zero but on one stage."""
        squares = self._norms.of({"embedding": table_VD})
        if self._tied:
            of_head_BSD = jax.lax.dynamic_index_in_dim(sums[TIED], rows[NUMBER] % self._slots, keepdims=False)
            squares += self._norms.of_scalar(2 * jnp.sum(of_head_BSD * dh_BSD.astype(jnp.float32)))
        return self.file(sums, rows, squares)

    def head(self, sums: Tree, rows: Tree, head_VD: jax.Array, norm: Tree, valid: jax.Array) -> Tree:
        """head_VD: the head's gradient, the rank's rows; norm: the final norm's, this stage's summand."""
        squares = self._norms.of({"embedding" if self._tied else "head": head_VD})
        copies = self._stages * self._norms.context
        whole = [jax.lax.psum(g.astype(jnp.float32), (PIPE, CONTEXT)) for g in jax.tree.leaves(norm)]
        total: Any = sum(jnp.sum(jnp.square(g)) for g in whole)
        squares += self._norms.of_scalar(total / copies)
        if self._tied:
            if self._norms.context > 1:
                total = over_tensor(lambda x: jax.lax.psum(x, CONTEXT), in_specs=(P(TENSOR),), out_specs=P(TENSOR))
                head_VD = total(head_VD)
            slot = rows[NUMBER] % self._slots
            before = jax.lax.dynamic_index_in_dim(sums[TIED], slot, keepdims=False)
            # A tick that takes no loss must not touch what others kept.
            kept = jnp.where(valid, self._ops.look_up(head_VD, rows["tokens"]), before)
            sums = sums | {TIED: jax.lax.dynamic_update_index_in_dim(sums[TIED], kept, slot, 0)}
        return self.file(sums, rows, jnp.where(valid, squares, 0.0))


def microbatches_between(schedule: Schedule) -> int:
    """How many microbatches at most have had their loss taken and their embedding's gradient not made yet. They do both in
    order, so number m modulo this is a place of its own."""
    taken, returned = (np.flatnonzero(column >= 0) for column in (schedule.heads, schedule.returned))
    # In a tick the gradient of an embedding comes before a loss (pipeline.py).
    return int(max(np.searchsorted(taken, returned) - np.arange(schedule.microbatches)))


def parts_of(squares_MT: jax.Array, mask_MBS: jax.Array, together: tuple[str, ...]) -> NoiseParts:
    """The parts of a step, the same on every rank.

    Args:
      squares_MT: this rank's, of gradients of the sum of token losses over N: for each microbatch [tensor].
      mask_MBS: which targets count, this rank's.
      together: mesh axes whose ranks make the step; those along `context` share parts.
    """
    data_axes = tuple(axis for axis in together if axis != CONTEXT)
    squares_M = jax.lax.psum(squares_MT.sum(axis=1), (PIPE, CONTEXT))
    targets_M = jax.lax.psum(mask_MBS.sum(axis=(1, 2)), CONTEXT).astype(jnp.float32)
    # What a part adds is n/N G, so its square over n/N is n/N |G|^2.
    weighted_M = jnp.where(targets_M > 0, squares_M / jnp.maximum(targets_M, 1.0), 0.0)
    found = targets_M.sum(), weighted_M.sum(), (targets_M > 0).sum().astype(jnp.float32)
    targets, weighted, count = jax.lax.psum(found, data_axes)
    return NoiseParts(targets * weighted, count, jax.lax.psum(jnp.float32(mask_MBS.size), together))
