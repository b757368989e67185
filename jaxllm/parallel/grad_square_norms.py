"""Squared norms of gradients, part by part: the gradient noise scale (run/noise_scale.py) is measured with them.

A *part* is what one data rank computes in one microbatch: train.microbatch_sequences sequences, in every parallel mode, so that
the figures do not depend on the mesh. A part's gradient is nowhere stored once it has been added to others, so its square is
taken before:

    ZeRO 0 and 1   as soon as the microbatch has its gradients, before they are added to the rank's own
    ZeRO 2 and 3   a layer at a time, before it is reduced and scattered; the squares leave autodiff as a cotangent
    pipeline       in the tick that makes them: each stage takes those of its layers and of its slices of embedding and head,
                   adds them to the squares of the tick's microbatch, and sums over stages once, at the end
    tensor         squares of sharded gradients add up, those of replicated gradients count once; summed at the end too
    context        ranks have summands of one gradient, which are added before they are squared: a reduce-scatter inside the
                   host, and for a tied head in a pipeline an all-reduce. No other transfer here is more than a few numbers.

All of it runs in the region that is manual over pipe, data and context. Squares are float32 [tensor], each tensor rank's share,
so that no loop waits for a sum.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllm.mesh.axes import CONTEXT, PIPE, TENSOR
from jaxllm.mesh.sharding import tensor_shard_map, tensor_specs
from jaxllm.model.layers import SHARDED_SEQUENCE, Ops
from jaxllm.parallel.types import NoiseParts, Tree
from jaxllm.pipeline_schedule import Schedule


class GradSquareNorms:
    """Takes the squares of gradients before they are added to others or reduced. The forward and backward pass get such a tap
    if the step measures the gradient noise scale; without it they do nothing for it.

    Squares are float32 [tensor]. Their sum over `tensor` and `context` is the squared norm of the gradients' sum over
    `context`.

    Args:
      layouts: of the gradients that `on_microbatch` gets.
      layer: of one layer's gradients.
      sizes: of the mesh axes.
    """

    def __init__(self, layouts: Tree, layer: Tree, sizes: Mapping[str, int]):
        self._layouts, self._layer, self.context, self.tensor = layouts, layer, sizes[CONTEXT], sizes[TENSOR]

    def on_layer(self, gradients: Tree) -> jax.Array:
        """Squares of one layer's gradients, to be added up over layers."""
        return self._squares(gradients, self._layer)

    def on_microbatch(self, gradients: dict[str, Tree]) -> jax.Array:
        """Squares of the gradients of some or all top-level entries."""
        return self._squares(gradients, {name: self._layouts[name] for name in gradients})

    def from_scalar(self, square: jax.Array) -> jax.Array:
        """A square that all tensor ranks have in full, as shares that add up to it."""
        return jnp.full((self.tensor,), square / self.tensor)

    def zeros(self, *shape: int) -> jax.Array:
        return jnp.zeros((*shape, self.tensor), jnp.float32)

    def parts(self, squares_MT: jax.Array, mask_MBS: jax.Array, loss_axes: tuple[str, ...]) -> NoiseParts:
        """The sums over the parts of a step, equal on every rank.

        Args:
          squares_MT: the rank's squares in each microbatch, of gradients of the sum of token losses over N.
          mask_MBS: which of the rank's targets count.
          loss_axes: mesh axes whose ranks compute the step; ranks along `context` share parts.
        """
        data_axes = tuple(axis for axis in loss_axes if axis != CONTEXT)
        squares_M = jax.lax.psum(squares_MT.sum(axis=1), (PIPE, CONTEXT))
        targets_M = jax.lax.psum(mask_MBS.sum(axis=(1, 2)), CONTEXT).astype(jnp.float32)
        # A part adds n/N G, so its square over n/N is n/N |G|^2.
        weighted_M = jnp.where(targets_M > 0, squares_M / jnp.maximum(targets_M, 1.0), 0.0)
        sums = targets_M.sum(), weighted_M.sum(), (targets_M > 0).sum().astype(jnp.float32)
        targets, weighted, count = jax.lax.psum(sums, data_axes)
        return NoiseParts(targets * weighted, count, jax.lax.psum(jnp.float32(mask_MBS.size), loss_axes))

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
        return tensor_shard_map(local, in_specs=(specs,), out_specs=P(TENSOR))(gradients)


class StageSquares(NamedTuple):
    """The squares that the ticks of a pipeline carry."""

    by_microbatch: jax.Array
    """[microbatch, tensor]"""
    tied: jax.Array | None
    """[slot, sequence, position, width] float32, with tied embeddings: the rows of the head's gradient for a microbatch's
    tokens, until the look-up's gradient is there."""


class StageTap:
    """Adds the squares that a pipeline's tick makes to those of the tick's microbatch.

    With tied embeddings one matrix has two gradients, made some ticks apart: |a + b|^2 = |a|^2 + |b|^2 + 2 <a, b>. The
    look-up's has rows for the microbatch's tokens alone, so the head's rows for these tokens are kept until then: a hidden
    state in float32 for each microbatch in between.
    """

    def __init__(self, tap: GradSquareNorms, ops: Ops, schedule: Schedule, tied: bool):
        self._tap, self._ops, self._stages, self._tied = tap, ops, schedule.stages, tied
        self._microbatches, self._slots = schedule.microbatches, microbatches_between(schedule)

    def new(self, shape: tuple[int, ...]) -> StageSquares:
        """Zeros. `shape` is that of a hidden state."""
        tied = None
        if self._tied:
            tied = self._ops.constrain(jnp.zeros((self._slots, *shape), jnp.float32), ("batch", *SHARDED_SEQUENCE))
        return StageSquares(self._tap.zeros(self._microbatches), tied)

    def add(self, squares: StageSquares, number: jax.Array, new: jax.Array) -> StageSquares:
        """Adds squares to those of microbatch `number`."""
        is_it = jnp.arange(self._microbatches) == number
        return squares._replace(by_microbatch=squares.by_microbatch + jnp.where(is_it[:, None], new[None], 0.0))

    def on_embedding(self, squares: StageSquares, number: jax.Array, table_VD: jax.Array, dh_BSD: jax.Array) -> StageSquares:
        """Adds the squares of the look-up's gradient.

        Args:
          table_VD: the rank's rows of it.
          dh_BSD: the gradient of the embeddings looked up, zero but on one stage.
        """
        new = self._tap.on_microbatch({"embedding": table_VD})
        if squares.tied is not None:
            head_BSD = jax.lax.dynamic_index_in_dim(squares.tied, number % self._slots, keepdims=False)
            new += self._tap.from_scalar(2 * jnp.sum(head_BSD * dh_BSD.astype(jnp.float32)))
        return self.add(squares, number, new)

    def on_head(
        self, squares: StageSquares, number: jax.Array, tokens_BS: jax.Array, head_VD: jax.Array, norm: Tree, valid: jax.Array
    ) -> StageSquares:
        """Adds the squares of the gradients of the head and the final norm.

        Args:
          head_VD: the rank's rows of the head's gradient.
          norm: this stage's summand of the final norm's gradient.
        """
        new = self._tap.on_microbatch({"embedding" if self._tied else "head": head_VD})
        copies = self._stages * self._tap.context
        norms = [jax.lax.psum(g.astype(jnp.float32), (PIPE, CONTEXT)) for g in jax.tree.leaves(norm)]
        total: Any = sum(jnp.sum(jnp.square(g)) for g in norms)
        new += self._tap.from_scalar(total / copies)
        if squares.tied is not None:
            if self._tap.context > 1:
                total = tensor_shard_map(lambda x: jax.lax.psum(x, CONTEXT), in_specs=(P(TENSOR),), out_specs=P(TENSOR))
                head_VD = total(head_VD)
            slot = number % self._slots
            before = jax.lax.dynamic_index_in_dim(squares.tied, slot, keepdims=False)
            # A tick that takes no loss must not overwrite what other ticks kept.
            kept = jnp.where(valid, self._ops.look_up(head_VD, tokens_BS), before)
            squares = squares._replace(tied=jax.lax.dynamic_update_index_in_dim(squares.tied, kept, slot, 0))
        return self.add(squares, number, jnp.where(valid, new, 0.0))


def microbatches_between(schedule: Schedule) -> int:
    """The largest number of microbatches whose loss has been taken and whose embedding's gradient has not been made. Both
    happen in the order of microbatches, so a microbatch's number modulo this is a slot of its own."""
    heads, returned = (np.flatnonzero(column >= 0) for column in (schedule.head_mb, schedule.embed_backward_mb))
    # In a tick the gradient of an embedding comes before a loss (pipeline_executor.py).
    return int(max(np.searchsorted(heads, returned) - np.arange(schedule.microbatches)))
