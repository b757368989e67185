"""A loss that the caller gives in the place of cross-entropy (parallel/types.py: Loss).

The count of the whole batch divides after the backward pass, when all ranks and microbatches have added theirs: so a loss is
called once for a microbatch, and its count may depend on anything. Cross-entropy, whose count is known before, weights tokens
first (model/loss.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.config import ConfigError
from jaxllm.mesh.axes import PIPE, TENSOR
from jaxllm.mesh.sharding import tensor_shard_map
from jaxllm.parallel.types import Loss, Params, Rows


def loss_sums(loss: Loss, vocab_size: int, h_BSD: jax.Array, head_VD: jax.Array, rows: Rows) -> jax.Array:
    """float32 [2]: sum and count of one microbatch.

    Args:
      head_VD: rows from vocab_size on are padding, which `loss` does not see.

    Raises:
      ConfigError: the loss returned something else than two scalars.
    """
    found: Any = loss(h_BSD, head_VD[:vocab_size], rows)
    if not (isinstance(found, tuple) and [jnp.shape(x) for x in found] == [(), ()]):
        shapes = jax.tree.map(jnp.shape, found)
        raise ConfigError(f"loss= must return (sum, count), two scalars of a microbatch, and returned shapes {shapes}.")
    total, count = found
    return jnp.stack([jnp.asarray(total, jnp.float32), jax.lax.stop_gradient(jnp.asarray(count, jnp.float32))])


def mean(sums: jax.Array, gradients: Params) -> tuple[jax.Array, Params]:
    """(loss, gradients of it), from sums over the whole batch [..., 2] and the gradients of the first of them; 0 if nothing was
    counted. Leading dims, of replicas, are those of the gradients too."""
    total, count = sums[..., 0], sums[..., 1]
    share = jnp.where(count == 0, 0.0, 1.0 / jnp.where(count == 0, 1.0, count))
    return total * share, jax.tree.map(lambda g: g * jnp.expand_dims(share, range(share.ndim, g.ndim)), gradients)


def gather_over_stages(head_VD: jax.Array) -> jax.Array:
    """[stage, rows of a stage, width] on every stage, from the rows of each. Call it where `pipe` is manual."""
    gather = lambda x: jax.lax.all_gather(x, PIPE)  # noqa: E731
    return tensor_shard_map(gather, in_specs=(P(TENSOR),), out_specs=P(None, TENSOR))(head_VD)


def stage_gradients(
    loss: Loss, vocab_size: int, h_BSD: jax.Array, head_PVD: jax.Array, rows: Rows, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums, dh_BSD, dhead_VD) of a microbatch in a pipeline: dh is this stage's part of a sum over stages, and dhead has this
    stage's rows. All stages compute the same, as none has other work then. If not `valid`, gradients are 0.

    Args:
      head_PVD: of gather_over_stages.
    """

    def of(h_BSD: jax.Array, head_PVD: jax.Array) -> jax.Array:
        return loss_sums(loss, vocab_size, h_BSD, head_PVD.reshape(-1, head_PVD.shape[-1]), rows)

    sums, backward = jax.vjp(of, h_BSD, head_PVD)
    dh_BSD, dhead_PVD = backward(jnp.array([1.0, 0.0], jnp.float32))
    stage = jax.lax.axis_index(PIPE)
    dhead_VD = jax.lax.dynamic_index_in_dim(dhead_PVD, stage, keepdims=False)
    return sums, jnp.where(valid & (stage == 0), dh_BSD, 0), jnp.where(valid, dhead_VD, 0)
