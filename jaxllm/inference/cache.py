"""Runs the Llama with a key-value cache: prefill of a complete prompt, then decoding one token at a time.

The model is unchanged. Its layers call `Ops.attend`, and here that function also stores the layer's keys and values, or attends
to the stored ones. Letters as in layers.py; T is the number of positions in a cache, G = N / K the number of query heads per
key-value head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.model.blockwise_attention import Mask, xla_kernel
from jaxllm.model.layers import Ops
from jaxllm.model.llama import Llama


class Cache(NamedTuple):
    """Rotated keys, and values, of each layer and position, in the compute dtype. Entries beyond a row's length are undefined,
    and are written before they are read.
    """

    k_LBTKH: Float[Array, "L B T K H"]
    v_LBTKH: Float[Array, "L B T K H"]


def prefill(
    model: Llama, ids_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], room: int
) -> tuple[Float[Array, "B V"], Cache]:
    """Runs the model on complete prompts.

    Args:
      ids_BS: prompts, padded on the right with any ids, because a later position does not affect earlier ones.
      lengths_B: length of each prompt, 1 .. S.
      room: number of positions in the cache, at least S.

    Returns:
      (float32 logits after each row's last id, the cache).
    """
    causal = xla_kernel().forward
    kept = []

    def attend(q_BSNH, k_BSKH, v_BSKH, _):
        kept.append((k_BSKH, v_BSKH))
        return causal(q_BSNH, k_BSKH, v_BSKH, Mask(causal=True)).o_BSNH.astype(q_BSNH.dtype)

    def run_layers(block, layers, h_BSD, block_context):
        def layer(h_BSD, weights):
            return block(weights, h_BSD, block_context), kept.pop()

        h_BSD, of_all_layers = jax.lax.scan(layer, h_BSD, layers)
        kept.append(of_all_layers)
        return h_BSD

    h_BSD = model.hidden(ids_BS, ops=Ops(attend=attend, look_up=look_up), run_layers=run_layers)
    unwritten = room - ids_BS.shape[1]
    cache = Cache(*(jnp.pad(x, [(0, 0), (0, 0), (0, unwritten), (0, 0), (0, 0)]) for x in kept.pop()))
    last_BD = jnp.take_along_axis(h_BSD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    return logits(model, last_BD), cache


def decode(
    model: Llama, ids_B: Int[Array, " B"], positions_B: Int[Array, " B"], cache: Cache, window: int | None = None
) -> tuple[Float[Array, "B V"], Cache]:
    """Runs the model on one more id per row.

    Args:
      positions_B: position of each id in its row. The cache holds all earlier positions.
      window: a position attends to this many positions, including itself. None: to all.

    Returns:
      (float32 logits after the ids, the cache including the ids).
    """
    rows_B, at = jnp.arange(ids_B.shape[0]), {}
    places_T = jnp.arange(cache.k_LBTKH.shape[2])
    visible_BT = places_T[None] <= positions_B[:, None]
    if window is not None:
        visible_BT &= places_T[None] > positions_B[:, None] - window

    def attend(q_B1NH, k_B1KH, v_B1KH, _):
        layer, (k_LBTKH, v_LBTKH) = at["layer"], at["cache"]
        k_LBTKH = k_LBTKH.at[layer, rows_B, positions_B].set(k_B1KH[:, 0])
        v_LBTKH = v_LBTKH.at[layer, rows_B, positions_B].set(v_B1KH[:, 0])
        at["cache"] = Cache(k_LBTKH, v_LBTKH)
        return attend_to_cache(q_B1NH, k_LBTKH[layer], v_LBTKH[layer], visible_BT)

    def run_layers(block, layers, h_B1D, block_context):
        # The cache is a carry, not a scanned input: it is updated in place, while a scan output would be a second copy.
        def layer(carry, numbered):
            h_B1D, at["cache"] = carry
            at["layer"], weights = numbered
            h_B1D = block(weights, h_B1D, block_context)
            return (h_B1D, at["cache"]), None

        numbers = jnp.arange(cache.k_LBTKH.shape[0])
        (h_B1D, at["cache"]), _ = jax.lax.scan(layer, (h_B1D, cache), (numbers, layers))
        return h_B1D

    ops = Ops(attend=attend, look_up=look_up)
    h_B1D = model.hidden(ids_B[:, None], positions_B[:, None], ops=ops, run_layers=run_layers)
    return logits(model, h_B1D[:, 0]), at["cache"]


def attend_to_cache(q_B1NH, k_BTKH, v_BTKH, visible_BT) -> Float[Array, "B 1 N H"]:
    """Attends from one query per row to the visible keys. Scores and softmax are float32, as in training."""
    B, _, N, H = q_B1NH.shape
    K = k_BTKH.shape[2]
    q_BKGH = q_B1NH.reshape(B, K, N // K, H)
    scores_BKGT = jnp.einsum("BKGH,BTKH->BKGT", q_BKGH, k_BTKH, preferred_element_type=jnp.float32) / math.sqrt(H)
    scores_BKGT = jnp.where(visible_BT[:, None, None], scores_BKGT, jnp.finfo(jnp.float32).min)
    weights_BKGT = jax.nn.softmax(scores_BKGT, axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("BKGT,BTKH->BKGH", weights_BKGT, v_BTKH).reshape(B, 1, N, H)


def logits(model: Llama, h_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Float32 logits, one per row of the head. Rows that pad the vocabulary get -inf and are never chosen."""
    head_VD = model.head_matrix()
    logits_BV = jnp.einsum("BD,VD->BV", h_BD, head_VD, preferred_element_type=jnp.float32)
    is_id_V = jnp.arange(head_VD.shape[0]) < model.config.vocab_size
    return jnp.where(is_id_V[None], logits_BV, -jnp.inf)


def look_up(table_VD: Float[Array, "V D"], ids_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of the embedding in its own dtype. Without gradients there is no reason to cast the table to float32 each step."""
    return table_VD[ids_BS]
