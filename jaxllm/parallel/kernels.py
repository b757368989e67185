"""The functions for attention and matmuls, chosen from the config and the kind of device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.config import Config, ModelConfig
from jaxllm.config.attention import effective_windows, packed_documents
from jaxllm.cost_model.activations import context_method
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.mesh import CONTEXT, TENSOR
from jaxllm.model.attention import Attend, choose_kernel, xla_attention
from jaxllm.model.blockwise_attention import within_window, xla_kernel
from jaxllm.model.cudnn_attention import cudnn_kernel
from jaxllm.model.fp8 import FP8, matmul_of
from jaxllm.model.layers import Matmul
from jaxllm.model.mxfp8 import mxfp8
from jaxllm.parallel.fp8_tensor import fp8_per_tensor_rank
from jaxllm.parallel.ring_attention import BlockwiseAttention, all_gather_attention, by_kind, ring_attention
from jaxllm.parallel.window_attention import window_attention
from jaxllm.sharding import tensor_shard_map


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


def choose_matmul(model: ModelConfig, tensor: int, device: jax.Device) -> Matmul:
    """The matmul of a block for model.matmul_dtype. A CPU rounds in the same way and multiplies in float32, for tests."""
    if not model.multiplies_fp8:
        return jnp.einsum
    formula = FP8 if model.matmul_dtype == "fp8" else mxfp8(on_gpu=device.platform != "cpu")
    if tensor == 1 and model.matmul_dtype == "fp8":
        return matmul_of(formula)
    # MXFP8's kernel, like attention's, compiles only where every axis is manual, even an axis of size 1.
    return fp8_per_tensor_rank(formula, split_letters(model, tensor))


def split_letters(model: ModelConfig, tensor: int) -> str:
    """The letters (layers.py) of dims that are split over tensor: heads, feed-forward width, key-value heads if they divide."""
    return "NFK" if model.num_kv_heads % tensor == 0 else "NF"


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
