"""Blocks of attention by cuDNN's fused kernel, through JAX's private binding.

    kernel = cudnn_kernel()      # ConfigError if it cannot run; blockwise_attention.py describes kernels

The public `jax.nn.dot_product_attention(..., return_residual=True)` is not precise enough: it rounds the log-sum-exp to the
output's dtype (JAX 0.10 to 0.12). A bfloat16 near 10 is off by up to 0.03, and so is the weight of every merged block. No
public backward pass takes the output and log-sum-exp of all blocks. Both come from JAX's private binding (private_jax.py).

cuDNN has no segments. A block that is not causal needs none: documents leave a rectangle of it, which cuDNN masks as padding
once the keys are reversed. A causal block is cut into such blocks (`documents_by_halves`). cuDNN's packed layout would do that
in one call. But JAX 0.10 gives it wrong offsets for grouped heads (jax-ml/jax#39521), it needs Hopper and a number of documents
fixed in advance, and its log-sum-exp is ordered by document.
"""

from __future__ import annotations

import inspect
import math
from types import ModuleType

import jax
import jax.numpy as jnp

from jaxllm.config import ConfigError
from jaxllm.model.blockwise_attention import (
    NOTHING,
    Gradients,
    Kernel,
    Mask,
    Partial,
    documents_by_halves,
    rectangle,
    xla_kernel,
)
from jaxllm.private_jax import cudnn_binding

KNOWN = ((0, 10), (0, 13))
"""(first, first not supported): versions of JAX with the binding that is called here."""

_FORWARD = {"query", "key", "value", "q_seqlen", "kv_seqlen", "scale", "mask_type", "qkv_layout", "return_residual"}
_BACKWARD = {"scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "res"}


def why_not() -> str | None:
    """The reason this JAX cannot run cuDNN's attention, or None. Device, dtype, head size: attention.why_not_cudnn."""
    lowest, above = KNOWN
    if not lowest <= jax.__version_info__[:2] < above:
        return f"jaxllm knows JAX's cuDNN binding up to 0.12 and this is JAX {jax.__version__}"
    try:
        binding = cudnn_binding()
        forward = inspect.signature(binding.dot_product_attention).parameters.keys()
        backward = inspect.signature(binding._dot_product_attention_bwd_rule).parameters.keys()
        known = forward >= _FORWARD and backward >= _BACKWARD and hasattr(binding, "_dot_product_attention_bwd_p_wrapper")
    except (ImportError, AttributeError):
        known = False
    return None if known else f"JAX {jax.__version__} has another cuDNN binding than jaxllm knows"


def cudnn_kernel() -> Kernel:
    """The kernel for bfloat16 or float16, on NVIDIA Ampere or newer, and only where every mesh axis is manual.

    Raises:
      ConfigError: this JAX has another binding.
    """
    if reason := why_not():
        raise ConfigError(f"Attention by cuDNN cannot run, because {reason}: install JAX 0.10 to 0.12, or take xla.")
    plain = Kernel("cudnn", _forward, _backward)
    # 128 rows: the squares' scores are then B x N x S x 128, and a smaller call to cuDNN would be all start-up (not measured).
    packed = documents_by_halves(off_diagonal=plain, diagonal=xla_kernel(), smallest=128)

    def choose(mask: Mask) -> Kernel:
        return packed if mask.causal and mask.q_segments_BS is not None else plain

    return Kernel(
        "cudnn",
        lambda q, k, v, mask: choose(mask).forward(q, k, v, mask),
        lambda q, k, v, o, lse, do, mask: choose(mask).backward(q, k, v, o, lse, do, mask),
    )


def largest_error(num_heads: int, num_kv_heads: int, head_dim: int) -> float:
    """The largest relative error of this machine's output and gradients against plain XLA's, in the Euclidean norm, for a small
    batch: packed, of one document, without a mask. bfloat16 rounds to about 0.005; a wrong mask or layout gives 0.1 and more.
    """
    S = 512
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    arrays = [jax.random.normal(k, (2, S, n, head_dim), jnp.bfloat16) for k, n in zip(keys, heads, strict=True)]
    segments_BS = jnp.cumsum(jnp.isin(jnp.arange(S), jnp.array([70, 300, 301])), dtype=jnp.int32)[None].repeat(2, 0)

    def answers(kernel: Kernel):
        def run(q, k, v, do):
            found = []
            for mask in (Mask(True, segments_BS, segments_BS), Mask(True), Mask(False)):
                o, lse = kernel.forward(q, k, v, mask)
                found += [o, *kernel.backward(q, k, v, o, lse, do, mask)]
            return found

        return [x.astype(jnp.float32) for x in jax.jit(run)(*arrays)]

    pairs = zip(answers(cudnn_kernel()), answers(xla_kernel()), strict=True)
    return max(float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) for ours, theirs in pairs)


def _forward(q_BSNH, k_BTKH, v_BTKH, mask: Mask) -> Partial:
    if mask.q_segments_BS is None:
        o_BSNH, lse_BNS = _call_forward(q_BSNH, k_BTKH, v_BTKH, mask.causal, None)
        return Partial(o_BSNH.astype(jnp.float32), lse_BNS.swapaxes(1, 2))
    lengths, (q_seen_BS, _) = _padding(mask)
    o_BSNH, lse_BNS = _call_forward(q_BSNH, k_BTKH[:, ::-1], v_BTKH[:, ::-1], False, lengths)
    o_BSNH = jnp.where(q_seen_BS[..., None, None], o_BSNH, 0).astype(jnp.float32)
    return Partial(o_BSNH, jnp.where(q_seen_BS[..., None], lse_BNS.swapaxes(1, 2), NOTHING))


def _backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask) -> Gradients:
    if mask.q_segments_BS is None:
        return _call_backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN.swapaxes(1, 2), do_BSNH, mask.causal, None)
    lengths, (q_seen_BS, k_seen_BT) = _padding(mask)
    lse_BNS = lse_BSN.swapaxes(1, 2)
    gradients = _call_backward(q_BSNH, k_BTKH[:, ::-1], v_BTKH[:, ::-1], o_BSNH, lse_BNS, do_BSNH, False, lengths)
    dq_BSNH, dk_BTKH, dv_BTKH = gradients[0], gradients[1][:, ::-1], gradients[2][:, ::-1]
    # cuDNN may write anything past the lengths. Here it is set to 0.
    dq_BSNH = jnp.where(q_seen_BS[..., None, None], dq_BSNH, 0)
    dk_BTKH, dv_BTKH = (jnp.where(k_seen_BT[..., None, None], x, 0) for x in (dk_BTKH, dv_BTKH))
    return dq_BSNH, dk_BTKH, dv_BTKH


def _padding(mask: Mask):
    """((lengths of queries, of keys) for cuDNN, at least 1; (whether each query sees a key, whether each key is seen))"""
    queries_B, keys_B = rectangle(mask)
    S, T = (segments.shape[1] for segments in mask.documents)
    q_seen_BS = jnp.arange(S)[None] < queries_B[:, None]
    k_seen_BT = jnp.arange(T)[None] >= T - keys_B[:, None]
    return (jnp.maximum(queries_B, 1), jnp.maximum(keys_B, 1)), (q_seen_BS, k_seen_BT)


# ------------------------------------------------------------------------------------------------------- the private binding


def _call_forward(q_BSNH, k_BTKH, v_BTKH, causal: bool, lengths):
    """(output in the inputs' dtype, float32 log-sum-exp [B, N, S])"""
    binding = cudnn_binding()
    mask_type, lengths = _mask_type(binding, causal, lengths)
    return binding.dot_product_attention(
        q_BSNH,
        k_BTKH,
        v_BTKH,
        q_seqlen=lengths[0],
        kv_seqlen=lengths[1],
        scale=1 / math.sqrt(q_BSNH.shape[-1]),
        mask_type=mask_type,
        qkv_layout="BTNH",
        return_residual=True,
    )


def _call_backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BNS, do_BSNH, causal: bool, lengths) -> Gradients:
    """The gradients in the inputs' dtype."""
    binding = cudnn_binding()
    mask_type, lengths = _mask_type(binding, causal, lengths)
    unused = jnp.zeros(0, q_BSNH.dtype)
    lengths = [unused if length is None else length for length in lengths]
    # Flex attention, from JAX 0.12 on.
    extra = {"score_mod": None} if "score_mod" in inspect.signature(binding._dot_product_attention_bwd_rule).parameters else {}
    return tuple(
        binding._dot_product_attention_bwd_p_wrapper.bind(
            *(q_BSNH, k_BTKH, v_BTKH, unused, *lengths, unused, unused, unused, unused),
            *(lse_BNS, o_BSNH.astype(q_BSNH.dtype), do_BSNH.astype(q_BSNH.dtype)),
            scale=1 / math.sqrt(q_BSNH.shape[-1]),
            seed=42,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=mask_type,
            layout=binding.AttentionLayout.BTNH.value,
            sliding_window_length=None,
            **extra,
        )
    )


def _mask_type(binding: ModuleType, causal: bool, lengths):
    if lengths is not None:
        return binding.MaskType.PADDING, lengths
    return (binding.MaskType.CAUSAL if causal else binding.MaskType.NO_MASK), (None, None)
