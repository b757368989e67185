"""The embedding with its rows split over `pipe` and `tensor` by hand. Left to XLA, the full table may be gathered."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.mesh.axes import PIPE, TENSOR
from jaxllm.mesh.sharding import tensor_shard_map
from jaxllm.model.layers import look_up


def look_up_over_ranks(pipe: int, tensor: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(table_VD, ids_BS) -> h_BSD. Each rank looks up the ids whose rows it has. The sum over ranks is scattered along the
    sequence, the layout between blocks.
    """
    if pipe == tensor == 1:
        return look_up

    def local(rows_VD, ids_BS):
        is_mine, own = _own(rows_VD, ids_BS, tensor)
        found_BSD = jnp.where(is_mine[..., None], look_up(rows_VD, jnp.where(is_mine, own, 0)), 0)
        # All ranks but one add zero, so the sum is exact in any dtype.
        found_BSD = jax.lax.psum_scatter(found_BSD, TENSOR, scatter_dimension=1, tiled=True)
        return jax.lax.psum(found_BSD, PIPE) if pipe > 1 else found_BSD

    return tensor_shard_map(local, in_specs=(P(TENSOR), P()), out_specs=P(None, TENSOR))


def add_over_ranks(sums_VD: jax.Array, ids_BS: jax.Array, dh_BSD: jax.Array, pipe: int, tensor: int) -> jax.Array:
    """The backward pass of look_up_over_ranks: float32 sums_VD with the gradient of each id's row added, if the rank has that
    row. It works in place. Autodiff's gradient of the look-up makes a table of zeros for each use.

    Args:
      dh_BSD: zero except on one stage.
    """
    if pipe == tensor == 1:
        return sums_VD.at[ids_BS].add(dh_BSD.astype(sums_VD.dtype))

    def local(sums_VD, ids_BS, dh_BSD):
        dh_BSD = jax.lax.psum(dh_BSD, PIPE) if pipe > 1 else dh_BSD
        dh_BSD = jax.lax.all_gather(dh_BSD, TENSOR, axis=1, tiled=True)
        is_mine, own = _own(sums_VD, ids_BS, tensor)
        # mode="drop" ignores ids whose row another rank has.
        return sums_VD.at[jnp.where(is_mine, own, sums_VD.shape[0])].add(dh_BSD.astype(sums_VD.dtype), mode="drop")

    return tensor_shard_map(local, in_specs=(P(TENSOR), P(), P(None, TENSOR)), out_specs=P(TENSOR))(sums_VD, ids_BS, dh_BSD)


def _own(rows_VD: jax.Array, ids_BS: jax.Array, tensor: int) -> tuple[jax.Array, jax.Array]:
    """(whether the rank has each id's row, the row's index in the rank's part)"""
    rank = jax.lax.axis_index(PIPE) * tensor + jax.lax.axis_index(TENSOR)
    own_BS = ids_BS - rank * rows_VD.shape[0]
    return (own_BS >= 0) & (own_BS < rows_VD.shape[0]), own_BS
