"""The functions for attention and matmuls, chosen from the config and the kind of device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.config import Config, ModelConfig
from jaxllm.config.attention import packed_documents
from jaxllm.cost_model.activations import context_method
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.mesh import CONTEXT, TENSOR
from jaxllm.model.attention import Attend, choose_kernel, xla_attention
from jaxllm.model.blockwise_attention import xla_kernel
from jaxllm.model.cudnn_attention import cudnn_kernel
from jaxllm.model.fp8 import FP8, matmul_of, require_fp8
from jaxllm.model.layers import Matmul
from jaxllm.model.mxfp8 import mxfp8
from jaxllm.parallel.fp8_tensor import fp8_per_tensor_rank
from jaxllm.parallel.ring_attention import all_gather_attention, ring_attention
from jaxllm.sharding import tensor_shard_map


def choose_attention(config: Config, device: jax.Device) -> tuple[str, Attend]:
    """(name, function) of the attention that model.attention and parallel.context_method ask for on this kind of device."""
    name, c = choose_kernel(config.model, device), config.parallel.context
    if (name, c) == ("xla", 1):
        return name, xla_attention
    most = packed_documents(config, compute_capability(device))
    kernel = cudnn_kernel(most) if name == "cudnn" else xla_kernel()
    # A ring of one rank computes its local block alone. jax.nn's attention would do it too, but a remat policy cannot keep its
    # log-sum-exp, and the backward pass would run the kernel again.
    make, method = ring_attention, ""
    if c > 1:
        method = context_method(config)
        make = {"ring": ring_attention, "all_gather": all_gather_attention}[method]
    masked = ""
    if name == "cudnn" and config.data.mask_documents:
        masked = f", up to {most} documents packed" if most else ", documents by halves"
    return f"{name} {method}".strip() + masked, make(kernel, CONTEXT, c)


def choose_matmul(model: ModelConfig, tensor: int, device: jax.Device) -> Matmul:
    """The matmul of a block for model.matmul_dtype. Raises ConfigError if this kind of device cannot run it."""
    if not model.multiplies_fp8:
        return jnp.einsum
    require_fp8(device, model.matmul_dtype)
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

    def local(q_BSNH, k_BTKH, v_BTKH, segments_BS):
        if not split_kv:
            # The rank has the keys of all heads. Its query heads all belong to one of them.
            head = jax.lax.axis_index(TENSOR) * num_kv_heads // tensor
            k_BTKH, v_BTKH = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k_BTKH, v_BTKH))
        return attend(q_BSNH, k_BTKH, v_BTKH, segments_BS)

    kv = heads if split_kv else P()
    return tensor_shard_map(local, in_specs=(heads, kv, kv, P()), out_specs=heads)
