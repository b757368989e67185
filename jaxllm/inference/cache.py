"""Runs the Llama with a key-value cache: prefill of a complete prompt, then decoding one token at a time.

The model is unchanged. Its layers call `Ops.attend`, and here that function also stores the layer's keys and values, or attends
to the stored ones. Letters as in layers.py; T is the number of positions in a cache, G = N / K the number of query heads per
key-value head.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.model.attention import Attend
from jaxllm.model.blockwise_attention import Mask, xla_kernel
from jaxllm.model.layers import Ops
from jaxllm.model.llama import Llama


class Cache(NamedTuple):
    """Rotated keys, and values, of the L layers of one kind and the last T positions of a row, in the compute dtype: position p
    at index p mod T. Entries of positions that do not exist yet are undefined, and are written before they are read.
    """

    k_LBTKH: Float[Array, "L B T K H"]
    v_LBTKH: Float[Array, "L B T K H"]


Caches = tuple[Cache, ...]
"""One for each kind of layers (ModelConfig.kinds)."""


def attention_of(rooms: tuple[int, ...], S: int) -> Attend:
    """Causal attention over S positions in tiles, without gradients.

    Args:
      rooms: for each kind of layers, to how many positions one attends, its own included.
    """
    masks = [Mask(causal=True, window=room if room < S else None) for room in rooms]

    def attend(q_BSNH, k_BSKH, v_BSKH, _, kind=0):
        branches = [
            lambda *arrays, mask=mask: xla_kernel().forward(*arrays, mask).o_BSNH.astype(q_BSNH.dtype) for mask in masks
        ]
        return _of_kind(kind, branches, q_BSNH, k_BSKH, v_BSKH)

    return attend


def prefill(
    model: Llama, ids_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], rooms: tuple[int, ...], images: Any = None
) -> tuple[Float[Array, "B V"], Caches]:
    """Runs the model on complete prompts.

    Args:
      ids_BS: prompts, padded on the right with any ids, because a later position does not affect earlier ones.
      lengths_B: length of each prompt, 1 .. S.
      rooms: number of positions in each cache. A position attends to this many, its own included.
      images: as Llama.hidden takes them.

    Returns:
      (float32 logits after each row's last id, the caches).
    """
    S, kept = ids_BS.shape[1], []
    attend_within = attention_of(rooms, S)

    def attend(q_BSNH, k_BSKH, v_BSKH, _, kind=0):
        kept.append((k_BSKH, v_BSKH))
        return attend_within(q_BSNH, k_BSKH, v_BSKH, None, kind)

    def run_layers(block, layers, h_BSD, block_context):
        def layer(h_BSD, numbered):
            weights, kind = numbered
            return block(weights, h_BSD, block_context.of_kind(kind))[0], kept.pop()

        h_BSD, of_all_layers = jax.lax.scan(layer, h_BSD, (layers, block_context.kinds_L))
        kept.append(of_all_layers)
        return h_BSD

    def stored(x_LBSKH, room: int):
        if room >= S:
            return jnp.pad(x_LBSKH, [(0, 0), (0, 0), (0, room - S), (0, 0), (0, 0)])
        last_B1 = lengths_B[:, None] - 1
        position_BT = jnp.maximum(last_B1 - (last_B1 - jnp.arange(room)[None]) % room, 0)
        return jnp.take_along_axis(x_LBSKH, position_BT[None, :, :, None, None], axis=2)

    h_BSD = model.hidden(ids_BS, images=images, ops=Ops(attend=attend, look_up=look_up), run_layers=run_layers)
    layers, kinds = kept.pop(), np.array(model.config.layer_kinds)
    caches = tuple(Cache(*(stored(x[kinds == kind], room) for x in layers)) for kind, room in enumerate(rooms))
    last_BD = jnp.take_along_axis(h_BSD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    return logits(model, last_BD), caches


def decode(
    model: Llama, ids_B: Int[Array, " B"], positions_B: Int[Array, " B"], caches: Caches
) -> tuple[Float[Array, "B V"], Caches]:
    """Runs the model on one more id per row.

    Args:
      positions_B: position of each id in its row. A cache holds the T positions before it, or all if they are fewer.

    Returns:
      (float32 logits after the ids, the caches including the ids).
    """
    rows_B, at = jnp.arange(ids_B.shape[0]), {}

    def read(q_B1NH, cache: Cache, layer):
        T = cache.k_LBTKH.shape[2]
        # How many positions ago each entry was written. A row may be shorter than that.
        visible_BT = (positions_B[:, None] - jnp.arange(T)[None]) % T <= positions_B[:, None]
        return attend_to_cache(q_B1NH, cache.k_LBTKH[layer], cache.v_LBTKH[layer], visible_BT)

    def write(cache: Cache, layer, is_here, k_B1KH, v_B1KH) -> Cache:
        L, _, T, *_ = cache.k_LBTKH.shape
        # What is written past the last layer is dropped.
        place = (jnp.where(is_here, layer, L), rows_B, positions_B % T)
        return Cache(*(x.at[place].set(new[:, 0]) for x, new in zip(cache, (k_B1KH, v_B1KH), strict=True)))

    def attend(q_B1NH, k_B1KH, v_B1KH, _, kind=0):
        layer = at["layer"]
        at["caches"] = tuple(write(x, layer, kind == number, k_B1KH, v_B1KH) for number, x in enumerate(at["caches"]))
        branches = [lambda q, caches, number=number: read(q, caches[number], layer) for number in range(len(caches))]
        return _of_kind(kind, branches, q_B1NH, at["caches"])

    def run_layers(block, layers, h_B1D, block_context):
        # The caches are a carry, not a scanned input: they are updated in place, while a scan output would be a second copy.
        def layer(carry, numbered):
            h_B1D, at["caches"] = carry
            at["layer"], weights, kind = numbered
            h_B1D, _ = block(weights, h_B1D, block_context.of_kind(kind))
            return (h_B1D, at["caches"]), None

        kinds = model.config.layer_kinds
        among_its_kind = jnp.array([kinds[:number].count(kind) for number, kind in enumerate(kinds)])
        numbered = (among_its_kind, layers, block_context.kinds_L)
        (h_B1D, at["caches"]), _ = jax.lax.scan(layer, (h_B1D, caches), numbered)
        return h_B1D

    ops = Ops(attend=attend, look_up=look_up)
    h_B1D = model.hidden(ids_B[:, None], positions_B[:, None], ops=ops, run_layers=run_layers)
    return logits(model, h_B1D[:, 0]), at["caches"]


def _of_kind(kind, branches, *operands):
    """The result of the branch of a layer's kind."""
    return branches[0](*operands) if len(branches) == 1 else jax.lax.switch(kind, branches, *operands)


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
