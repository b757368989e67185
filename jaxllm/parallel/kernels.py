"""The functions for attention, matmuls and the embedding over tensor ranks, chosen from the config and the kind of device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.config import Config, ModelConfig
from jaxllm.config.attention import effective_windows, packed_documents, why_no_experts
from jaxllm.cost_model.activations import context_method
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.mesh.axes import CONTEXT, PIPE, TENSOR
from jaxllm.mesh.sharding import split_spec, tensor_shard_map
from jaxllm.model.attention import Attend, choose_kernel, xla_attention
from jaxllm.model.blockwise_attention import within_window, xla_kernel
from jaxllm.model.cudnn_attention import cudnn_kernel
from jaxllm.model.experts import GroupedMatmul, grouped_matmul
from jaxllm.model.fp8 import fp8_matmul, gradients, letters, product
from jaxllm.model.grouped_matmul import hopper_grouped_matmul
from jaxllm.model.layers import Matmul, look_up
from jaxllm.parallel.ring_attention import BlockwiseAttention, all_gather_attention, by_kind, ring_attention
from jaxllm.parallel.window_attention import window_attention

# -------------------------------------------------------------------------------------------------- FP8 over tensor ranks
# FP8 matmuls (model/fp8.py) on a mesh: each tensor rank rounds and multiplies its own parts.
#
# Left to XLA, a matmul over split heads would be summed over ranks before its scales are taken off. The multiplication between
# the all-reduce and the slice behind it then keeps XLA from making one reduce-scatter of both. The largest magnitude of every
# array would be a collective too. So each rank takes its scales off first, and partial sums leave the region with a leading
# rank dim: outside, XLA sees a sum of parts, as without FP8.


def fp8_per_tensor_rank(split: str) -> Matmul:
    """fp8_matmul for arrays with dims that are split over tensor.

    Args:
      split: the letters of these dims, in every spec that has them.
    """

    spec_of = partial(split_spec, split=split)

    def run(function: Callable[..., Sequence[jax.Array]], inputs: Sequence[str], results: Sequence[str], *arrays: Any):
        """Runs `function` on each rank's part. A result that lacks a split letter of the inputs is a partial sum."""
        multiplied = {letter for letters in inputs for letter in letters if letter in split}
        is_part = [not multiplied <= set(letters) for letters in results]

        def local(*arrays):
            return tuple(x[None] if part else x for x, part in zip(function(*arrays), is_part, strict=True))

        out_specs = tuple(P(TENSOR, *spec_of(x)) if part else spec_of(x) for x, part in zip(results, is_part, strict=True))
        found = tensor_shard_map(local, in_specs=tuple(map(spec_of, inputs)), out_specs=out_specs)(*arrays)
        # Summed in the parts' own dtype: with jnp.sum float32 would be sent.
        return tuple(jax.lax.reduce_sum(x, (0,)) if part else x for x, part in zip(found, is_part, strict=True))

    def forward(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
        of_x, of_w, result = letters(spec)
        return run(lambda x, w: (product(spec, x, w),), (of_x, of_w), (result,), x, w)[0]

    def backward(spec: str, kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_x, of_w, result = letters(spec)
        # One region for both, so that dy is gathered and rounded once.
        dx, dw = run(lambda *arrays: gradients(spec, *arrays), (of_x, of_w, result), (of_x, of_w), *kept, dy)
        return dx, dw

    matmul = jax.custom_vjp(forward, nondiff_argnums=(0,))
    matmul.defvjp(lambda spec, x, w: (forward(spec, x, w), (x, w)), backward)
    return matmul


# -------------------------------------------------------------------------------------------------------------- embedding
# With its rows split over `pipe` and `tensor` by hand. Left to XLA, the full table may be gathered.


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


# ---------------------------------------------------------------------------------------------------------------- kernels


def choose_attention(config: Config, device: jax.Device) -> tuple[str, Attend]:
    """(name, function) of the attention that model.attention and parallel.context_method ask for on this kind of device."""
    name, c = choose_kernel(config.model, device), config.parallel.context
    windows = effective_windows(config.model.kinds, config.train.sequence_length)
    if (name, c, set(windows)) == ("xla", 1, {None}):
        return name, lambda *arrays, kind=None: xla_attention(*arrays)
    most = packed_documents(config, compute_capability(device))
    kernel = cudnn_kernel(most) if name == "cudnn" else xla_kernel()
    masked = ""
    if name == "cudnn" and config.data.mask_documents:
        masked = f", up to {most} documents packed" if most else ", documents by halves"
    # A ring of one rank computes its local block alone. jax.nn's attention would do it too, but a remat policy cannot keep its
    # log-sum-exp, and the backward pass would run the kernel again.
    how = method = context_method(config) if c > 1 else ""
    make = all_gather_attention if method == "all_gather" else ring_attention
    found: dict[int | None, BlockwiseAttention] = {None: make(kernel, CONTEXT, c)}
    if window := next(filter(None, windows), None):
        found[window] = window_attention(within_window(kernel), CONTEXT, c, window)
        how = f"in windows of {window:,}" + (f" and {method or 'over all'}" if None in windows else "")
    return f"{name} {how}".strip() + masked, by_kind([found[window] for window in windows])


def choose_matmul(model: ModelConfig, tensor: int) -> Matmul:
    """The matmul of a block for model.matmul_dtype. A CPU rounds in the same way and multiplies in float32, for tests."""
    if not model.multiplies_fp8:
        return jnp.einsum
    return fp8_matmul if tensor == 1 else fp8_per_tensor_rank(split_letters(model, tensor))


def split_letters(model: ModelConfig, tensor: int) -> str:
    """The letters (layers.py) of dims that are split over tensor: heads, feed-forward width, key-value heads if they divide."""
    return "NFK" if model.num_kv_heads % tensor == 0 else "NF"


def choose_grouped_matmul(config: Config, device: jax.Device) -> GroupedMatmul:
    """The grouped matmul of experts: the kernels that a step needs on a GPU (attention.require_trains), else XLA's."""
    capability = compute_capability(device)
    lacks_kernels = capability is None or why_no_experts(config.model, config.parallel.tensor, capability, "")
    return grouped_matmul if lacks_kernels else hopper_grouped_matmul


def experts_per_tensor_rank(
    function: Callable[..., jax.Array], x_BSD: jax.Array, routes: Any, *weights: jax.Array
) -> jax.Array:
    """The experts, with the feed-forward width of each split over `tensor` by hand: each rank sends its part of the sequence to
    its part of every expert. Left to XLA, a grouped matmul would gather the matrices."""
    sequence, wide = P(None, TENSOR), P(None, None, TENSOR)

    def local(x_BSD, routes, *weights):
        gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, TENSOR, axis=1, tiled=True), (x_BSD, routes))
        return jax.lax.psum_scatter(function(*gathered, *weights), TENSOR, scatter_dimension=1, tiled=True)

    specs = (sequence, sequence, wide, wide, P(None, TENSOR))
    return tensor_shard_map(local, in_specs=specs, out_specs=sequence)(x_BSD, routes, *weights)


def attend_per_tensor_rank(attend: Attend, num_kv_heads: int, tensor: int) -> Attend:
    """Attention with the heads split over `tensor` by hand. Fused kernels compile only where every axis is manual, even an axis
    of size 1."""
    heads = P(None, None, TENSOR, None)
    split_kv = num_kv_heads % tensor == 0

    def local(q_BSNH, k_BTKH, v_BTKH, segments_BS, kind):
        if not split_kv:
            # The rank has the keys of all heads. Its query heads all belong to one of them.
            head = jax.lax.axis_index(TENSOR) * num_kv_heads // tensor
            k_BTKH, v_BTKH = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k_BTKH, v_BTKH))
        return attend(q_BSNH, k_BTKH, v_BTKH, segments_BS, kind=kind)

    def per_rank(q_BSNH, k_BTKH, v_BTKH, segments_BS, kind=None):
        specs, arrays = (heads, kv, kv, P()), (q_BSNH, k_BTKH, v_BTKH, segments_BS)
        if kind is None or isinstance(kind, int):
            return tensor_shard_map(partial(local, kind=kind), in_specs=specs, out_specs=heads)(*arrays)
        return tensor_shard_map(local, in_specs=(*specs, P()), out_specs=heads)(*arrays, kind)

    kv = heads if split_kv else P()
    return per_rank
