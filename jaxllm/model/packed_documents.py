"""A causal block with documents, from calls in which each document is a sequence of its own: cuDNN's packed layout.

    kernel = packed_documents(forward, backward, most)

A call takes the tokens of a whole batch, and where each document starts and how long it is. Its number of documents is fixed,
and each has the log-sum-exp of the longest, so that many documents in one call cost memory. The documents of a batch are
therefore shared out to a few calls by their lengths. Letters as in layers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.config.attention import BACKWARD_SLOTS, FORWARD_SLOTS, SHORTER_DOCUMENTS, documents_by_length
from jaxllm.model.blockwise_attention import Gradients, Kernel, Mask, Partial


class Call(NamedTuple):
    """The documents that one call takes: C = C' M of them in B sequences, which it sees as C' pieces of `longest` tokens."""

    longest: int
    starts: Int[Array, "C' M"]
    """First token of each, counted through the batch. Those that do not exist come last and have B S."""
    lengths: Int[Array, "C' M"]
    """Tokens; 0 for those that do not exist."""
    is_here_BS: Bool[Array, "B S"]
    """Whether a token's document is one of them."""
    place_BS: Int[Array, "B S"]
    """Which of them, where it is."""
    row_BS: Int[Array, "B S"]
    """A token's position in its document."""


def packed_calls(segments_BS: Int[Array, "B S"], most: int, slots: int) -> Iterator[Call]:
    """Calls that take all documents: contiguous runs of one id, B x `most` of them or fewer (documents_by_length)."""
    B, S = segments_BS.shape
    begins_BS = jnp.concatenate([jnp.ones((B, 1), bool), segments_BS[:, 1:] != segments_BS[:, :-1]], axis=1)
    number_BS = (jnp.cumsum(begins_BS.reshape(-1), dtype=jnp.int32) - 1).reshape(B, S)
    starts_D = jnp.nonzero(begins_BS.reshape(-1), size=B * most, fill_value=B * S)[0].astype(jnp.int32)
    lengths_D = jnp.diff(starts_D, append=jnp.int32(B * S))
    row_BS = jnp.arange(B * S, dtype=jnp.int32).reshape(B, S) - starts_D[number_BS]
    plan = documents_by_length(most, S, slots)
    for (longest, M), shorter in zip(plan, [longest for longest, _ in plan[1:]] + [0], strict=True):
        is_here_D = (lengths_D > shorter) & (lengths_D <= longest)
        (chosen_C,) = jnp.nonzero(is_here_D, size=B * (S // longest) * M, fill_value=len(is_here_D))
        starts_C = starts_D.at[chosen_C].get(mode="fill", fill_value=B * S)
        lengths_C = lengths_D.at[chosen_C].get(mode="fill", fill_value=0)
        place_BS = (jnp.cumsum(is_here_D, dtype=jnp.int32) - 1)[number_BS]
        yield Call(longest, starts_C.reshape(-1, M), lengths_C.reshape(-1, M), is_here_D[number_BS], place_BS, row_BS)


def packed_documents(forward: Callable, backward: Callable, most: int) -> Kernel:
    """The kernel of a causal block whose sequences have at most `most` documents; with more the results are nan.

    Args:
      forward: (q, k, v, "PADDING_CAUSAL", call=Call, window=number or None) -> (o in pieces, lse_CNT), with anything outside
        the documents.
      backward: (q, k, v, o, lse_CNT, do, the same) -> gradients in pieces, likewise. Arrays are in pieces.
    """

    def run_forward(q_BSNH, k_BSKH, v_BSKH, mask: Mask) -> Partial:
        segments_BS, heads_1N1 = mask.documents[0], jnp.arange(q_BSNH.shape[2])[None, :, None]
        fits = _count_documents(segments_BS) <= len(segments_BS) * most
        # The values are the smallest operand that makes all of the output nan.
        v_BSKH, found = jnp.where(fits, v_BSKH, jnp.nan), None
        for call in packed_calls(segments_BS, most, FORWARD_SLOTS):
            with jax.named_scope("documents" if found is None else SHORTER_DOCUMENTS):
                o, lse_CNT = forward(*_in_pieces(call, q_BSNH, k_BSKH, v_BSKH), "PADDING_CAUSAL", call=call, window=mask.window)
                lse_BNS = lse_CNT[call.place_BS[:, None], heads_1N1, call.row_BS[:, None]]
                found = _chosen(call, (o.reshape(q_BSNH.shape), lse_BNS.swapaxes(1, 2)), found)
        assert found is not None, "there is a last call"
        o_BSNH, lse_BSN = _with_lse(*found)
        return Partial(o_BSNH.astype(jnp.float32), jnp.where(fits, lse_BSN, jnp.nan))

    def run_backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask) -> Gradients:
        B, S, N = lse_BSN.shape
        # Past the end of a document, which the call ignores, its rows go on with the tokens that follow.
        lse_NR = jnp.pad(lse_BSN.reshape(B * S, N).T, ((0, 0), (0, S)))
        found = None
        for call in packed_calls(mask.documents[0], most, BACKWARD_SLOTS):
            with jax.named_scope("documents" if found is None else SHORTER_DOCUMENTS):
                rows = jax.vmap(lambda start, T=call.longest: jax.lax.dynamic_slice(lse_NR, (0, start), (N, T)))
                q, k, v, o, do = _in_pieces(call, q_BSNH, k_BSKH, v_BSKH, o_BSNH, do_BSNH)
                gradients = backward(
                    q, k, v, o, rows(call.starts.reshape(-1)), do, "PADDING_CAUSAL", call=call, window=mask.window
                )
                whole = [g.reshape(x.shape) for g, x in zip(gradients, (q_BSNH, k_BSKH, v_BSKH), strict=True)]
                found = _chosen(call, whole, found)
        assert found is not None, "there is a last call"
        return found[0], found[1], found[2]

    return Kernel("packed", run_forward, run_backward)


def _with_lse(o_BSNH: jax.Array, lse_BSN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same arrays, the output once all of the log-sum-exp is there. Otherwise XLA's scheduler gathers its rows only when
    the backward pass reads them, and until then keeps the calls' lse_CNT, with 16 documents a call 16 times as large: 4 of the
    41 GiB of Llama 3.2 1B on 8 H100s at ZeRO 1.
    """
    # The barrier goes before XLA schedules, but keeps it from gathering this one element apart.
    lse_BSN = jax.lax.optimization_barrier(lse_BSN)
    bits = jax.lax.bitcast_convert_type(lse_BSN[0, 0, 0], jnp.uint32)
    return o_BSNH + (bits >> 31 >> 1).astype(o_BSNH.dtype), lse_BSN


def _count_documents(segments_BS):
    return segments_BS.shape[0] + jnp.sum(segments_BS[:, 1:] != segments_BS[:, :-1])


def _in_pieces(call: Call, *arrays):
    """[B, S, ...] -> [C', longest, ...]"""
    return [x.reshape(-1, call.longest, *x.shape[2:]) for x in arrays]


def _chosen(call: Call, new, old):
    """This call's tokens of `new`, and the others of `old`, of arrays [B, S, ...]."""
    if old is None:
        return new
    here = lambda x: call.is_here_BS.reshape(*call.is_here_BS.shape, *[1] * (x.ndim - 2))  # noqa: E731
    return [jnp.where(here(x), x, other) for x, other in zip(new, old, strict=True)]
