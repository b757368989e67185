"""Causal attention as a function, chosen by name.

`attend(q_BSNH, k_BTKH, v_BTKH, segments_BS) -> o_BSNH`: query head n reads key-value head n // (N / K); position i sees
positions j <= i of its own segment (segments None: one document). Letters as in layers.py; T counts key positions.
"""

import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.config import attention as capabilities
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.model import cudnn_attention

Attend = Callable[..., Float[Array, "B S N H"]]
"""(q_BSNH, k_BTKH, v_BTKH, segments_BS or None) -> o_BSNH; where layers are of several kinds also kind=number."""

log = logging.getLogger(__name__)


def xla_attention(
    q_BSNH: Float[Array, "B S N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BS: Int[Array, "B S"] | None = None,
    *,
    window: int | jax.Array | None = None,
) -> Float[Array, "B S N H"]:
    """Attention by plain einsums, scores and softmax in float32. It stores S x S scores: for CPU, tests and short sequences.

    Args:
      window: positions that a query sees, its own included. The others are computed and masked.
    """
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    G = N // K
    # Groups of G query heads share a key-value head, so that keys are never repeated in memory. A group's queries are the rows
    # R = G S of one matrix: with G and S as two dims XLA's matmuls on CPU take twice as long (SmolLM2, 1,024 tokens).
    q_BKRH = q_BSNH.reshape(B, S, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * S, H)
    scores_BKRT = jnp.einsum("BKRH,BTKH->BKRT", q_BKRH, k_BTKH, preferred_element_type=jnp.float32) / math.sqrt(H)
    visible_BST = jnp.tril(jnp.ones((S, S), bool))[None]
    if window is not None:
        visible_BST = visible_BST & (jnp.arange(S)[:, None] - jnp.arange(S)[None] < window)[None]
    if segments_BS is not None:
        visible_BST = visible_BST & (segments_BS[:, :, None] == segments_BS[:, None, :])
    scores_BKGST = scores_BKRT.reshape(B, K, G, S, S)
    scores_BKGST = jnp.where(visible_BST[:, None, None], scores_BKGST, jnp.finfo(jnp.float32).min)
    weights_BKGST = jax.nn.softmax(scores_BKGST, axis=-1).astype(v_BTKH.dtype)
    out_BKRH = jnp.einsum("BKRT,BTKH->BKRH", weights_BKGST.reshape(B, K, G * S, S), v_BTKH)
    return out_BKRH.reshape(B, K, G, S, H).transpose(0, 3, 1, 2, 4).reshape(B, S, N, H)


def plain_attention(model: ModelConfig) -> Attend:
    """xla_attention with the windows of a model."""
    if model.sliding_window is None:
        return lambda *arrays, kind=0: xla_attention(*arrays)
    everything = jnp.iinfo(jnp.int32).max
    windows = jnp.array([everything if window is None else window for window in model.kinds], jnp.int32)
    return lambda *arrays, kind=0: xla_attention(*arrays, window=windows[kind])


def why_not_cudnn(model: ModelConfig, device: jax.Device) -> str | None:
    """The reason cuDNN attention cannot run this model on this device, or None."""
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU and this is {device.platform}"
    return capabilities.why_not_cudnn(model, compute_capability(device), device.device_kind) or cudnn_attention.why_not()


def choose_kernel(model: ModelConfig, device: jax.Device) -> str:
    """The kernel, xla or cudnn, that `model.attention` selects on this kind of device.

    Raises:
      ConfigError: the config names cudnn, and it cannot run here. Only `auto` falls back, with a warning.
    """
    reason = why_not_cudnn(model, device)
    if model.attention.startswith("cudnn") and reason:
        raise capabilities.no_cudnn(model, reason)
    if model.attention == "xla" or reason:
        if model.attention == "auto" and device.platform != "cpu":
            log.warning("model.attention=auto takes xla, not cudnn: %s.", reason)
        return "xla"
    return "cudnn"
