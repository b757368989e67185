"""Blocks of attention by cuDNN's fused kernel, through JAX's private binding.

    kernel = cudnn_kernel(most_documents)      # blockwise_attention.py describes kernels; why_not() says whether it can run

The public `jax.nn.dot_product_attention(..., return_residual=True)` is not precise enough: it rounds the log-sum-exp to the
output's dtype (JAX 0.10 to 0.12). A bfloat16 near 10 is off by up to 0.03, and so is the weight of every merged block. No
public backward pass takes the output and log-sum-exp of all blocks. Both come from JAX's private binding (private_jax.py).

cuDNN has no segments. A block that is not causal needs none: documents leave a rectangle of it, which cuDNN masks as padding
once the keys are reversed. Nor does it need a window, which leaves a triangle at its end: with queries and keys reversed it is
causal. For documents in a causal block there are two ways:

    packed    Hopper and newer: each document is a sequence of its own (packed_documents), up to a number that is compiled in
    halves    any GPU, any number of documents: blocks that are not causal, in log2(S / 128) calls (`documents_by_halves`)
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.config.attention import BACKWARD_SLOTS, FORWARD_SLOTS, SHORTER_DOCUMENTS, documents_by_length
from jaxllm.model.blockwise_attention import (
    NOTHING,
    Gradients,
    Kernel,
    Mask,
    Partial,
    documents_by_halves,
    rectangle,
    within_window,
    xla_kernel,
)
from jaxllm.private_jax import cudnn_binding

log = logging.getLogger(__name__)

KNOWN = ((0, 10), (0, 13))
"""(first, first not supported): versions of JAX with the binding that is called here."""

_FORWARD = {"query", "q_seqlen", "q_offsets", "page_table_v", "scale", "seed", "variadic_args", "mask_type", "layout"}
_BACKWARD = _FORWARD | {"activation", "fwd_output", "grad_output"}


def why_not() -> str | None:
    """The reason this JAX cannot run cuDNN's attention, or None. Device, dtype, head size: attention.why_not_cudnn."""
    lowest, above = KNOWN
    if not lowest <= jax.__version_info__[:2] < above:
        return f"jaxllm knows JAX's cuDNN binding up to 0.12 and this is JAX {jax.__version__}"
    try:
        binding = cudnn_binding()
        forward = inspect.signature(binding._dot_product_attention_fwd_abstract).parameters.keys()
        backward = inspect.signature(binding._dot_product_attention_bwd_abstract).parameters.keys()
        has_both = hasattr(binding, "_dot_product_attention_fwd_p") and hasattr(binding, "_dot_product_attention_bwd_p")
        known = has_both and forward >= _FORWARD and backward >= _BACKWARD
    except (ImportError, AttributeError):
        known = False
    return None if known else f"JAX {jax.__version__} has another cuDNN binding than jaxllm knows"


def cudnn_kernel(most_documents: int | None = None) -> Kernel:
    """The kernel for bfloat16 or float16, on NVIDIA Ampere or newer, and only where every mesh axis is manual.

    Args:
      most_documents: documents of a sequence at most: `packed`, for Hopper and newer. None: `halves`.
    """
    plain = Kernel(_forward, _backward)
    if most_documents is None:
        # 128 rows: the squares' scores are then B x N x S x 128, and a smaller call to cuDNN would be all start-up (not
        # measured).
        documents = documents_by_halves(off_diagonal=within_window(plain), diagonal=xla_kernel(), smallest=128)
    else:
        documents = packed_documents(_call_forward, _call_backward, most_documents)

    def choose(mask: Mask) -> Kernel:
        return documents if mask.causal and mask.q_segments_BS is not None else plain

    return Kernel(
        lambda q, k, v, mask: choose(mask).forward(q, k, v, mask),
        lambda q, k, v, o, lse, do, mask: choose(mask).backward(q, k, v, o, lse, do, mask),
    )


def largest_error(queries_per_key: int, head_dim: int, packs: bool | None, has_windows: bool = False) -> float:
    """The largest relative error of this machine's output and gradients against plain XLA's, in the Euclidean norm, for a small
    batch: without documents, without a mask, and with documents of all lengths, short ones, and one a sequence. bfloat16 rounds
    to about 0.005; a wrong mask or layout gives 0.1 and more. Infinite if cuDNN has no such kernel.

    Args:
      packs: how documents are masked: packed or by halves. None: not at all.
      has_windows: whether windows are compared too.
    """
    S, starts = 512, ((70, 300, 301, 318, 350), range(20, 512, 20), ())
    heads = (2 * queries_per_key, 2, 2, 2 * queries_per_key)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(k, (2, S, n, head_dim), jnp.bfloat16) for k, n in zip(keys, heads, strict=True)]
    documents = (jnp.cumsum(jnp.isin(jnp.arange(S), jnp.array(at, int)), dtype=jnp.int32)[None].repeat(2, 0) for at in starts)
    masks = [Mask(True), Mask(False)]
    if packs is not None:
        masks += [Mask(True, segments_BS, segments_BS) for segments_BS in documents]
    if has_windows:
        # In the causal block, and cutting one of earlier keys.
        masks += [replace(mask, window=100) for mask in masks if mask.causal]
        masks += [replace(masks[-1], causal=False, window=window, distance=S) for window in (600, 400)]

    def answers(kernel: Kernel):
        def run(q, k, v, do):
            found = []
            for mask in masks:
                o, lse = within_window(kernel).forward(q, k, v, mask)
                found += [o, *within_window(kernel).backward(q, k, v, o, lse, do, mask)]
            return found

        return [x.astype(jnp.float32) for x in jax.jit(run)(*arrays)]

    expected = answers(xla_kernel())
    try:
        found = answers(cudnn_kernel(64 if packs else None))
    except jax.errors.JaxRuntimeError as error:
        log.warning("cuDNN's attention failed: %s", error)
        return math.inf
    return max(
        float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) for ours, theirs in zip(found, expected, strict=True)
    )


def _forward(q_BSNH, k_BTKH, v_BTKH, mask: Mask) -> Partial:
    if mask.window is not None and not mask.causal:
        return _forward_at_the_end(q_BSNH, k_BTKH, v_BTKH, mask)
    if mask.q_segments_BS is None:
        kind = "CAUSAL" if mask.causal else "NO_MASK"
        o_BSNH, lse_BNS = _call_forward(q_BSNH, k_BTKH, v_BTKH, kind, window=mask.window)
        return Partial(o_BSNH.astype(jnp.float32), lse_BNS.swapaxes(1, 2))
    lengths, (q_seen_BS, _) = _padding(mask)
    o_BSNH, lse_BNS = _call_forward(q_BSNH, k_BTKH[:, ::-1], v_BTKH[:, ::-1], "PADDING", lengths)
    return _where_seen(q_seen_BS, o_BSNH, lse_BNS.swapaxes(1, 2))


def _backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask) -> Gradients:
    if mask.window is not None and not mask.causal:
        return _backward_at_the_end(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask)
    lse_BNS = lse_BSN.swapaxes(1, 2)
    if mask.q_segments_BS is None:
        kind = "CAUSAL" if mask.causal else "NO_MASK"
        return _call_backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BNS, do_BSNH, kind, window=mask.window)
    lengths, (q_seen_BS, k_seen_BT) = _padding(mask)
    gradients = _call_backward(q_BSNH, k_BTKH[:, ::-1], v_BTKH[:, ::-1], o_BSNH, lse_BNS, do_BSNH, "PADDING", lengths)
    dq_BSNH, dk_BTKH, dv_BTKH = gradients[0], gradients[1][:, ::-1], gradients[2][:, ::-1]
    # cuDNN may write anything past the lengths. Here it is set to 0.
    dq_BSNH = jnp.where(q_seen_BS[..., None, None], dq_BSNH, 0)
    dk_BTKH, dv_BTKH = (jnp.where(k_seen_BT[..., None, None], x, 0) for x in (dk_BTKH, dv_BTKH))
    return dq_BSNH, dk_BTKH, dv_BTKH


def _where_seen(q_seen_BS, o_BSNH, lse_BSN) -> Partial:
    """The results of the queries that see a key, in a block with documents."""
    o_BSNH = jnp.where(q_seen_BS[..., None, None], o_BSNH, 0).astype(jnp.float32)
    return Partial(o_BSNH, jnp.where(q_seen_BS[..., None], lse_BSN, NOTHING))


# A block that is not causal and that a window cuts: query i sees key j if i + distance - j < window. Counted from the ends of S
# queries and T keys these are the keys j' <= i' + more, with more = window - distance - S + T - 1, which is 0 or above where
# each query sees a key (within_window). As many queries are added in front, and the block is causal.


def _forward_at_the_end(q_BSNH, k_BTKH, v_BTKH, mask: Mask) -> Partial:
    more, kind, lengths, seen = _triangle(q_BSNH.shape[1], k_BTKH.shape[1], mask)
    o_BSNH, lse_BNS = _call_forward(_turned(q_BSNH, more), k_BTKH[:, ::-1], v_BTKH[:, ::-1], kind, lengths)
    o_BSNH, lse_BSN = o_BSNH[:, more:][:, ::-1], lse_BNS[..., more:][..., ::-1].swapaxes(1, 2)
    return Partial(o_BSNH.astype(jnp.float32), lse_BSN) if seen is None else _where_seen(seen[0], o_BSNH, lse_BSN)


def _backward_at_the_end(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask) -> Gradients:
    more, kind, lengths, seen = _triangle(q_BSNH.shape[1], k_BTKH.shape[1], mask)
    if seen is not None:
        # Queries of other documents meet keys here that their log-sum-exp does not count.
        lse_BSN = jnp.where(seen[0][..., None], lse_BSN, -NOTHING)
    lse_BNS = _turned(lse_BSN, more, -NOTHING).swapaxes(1, 2)
    results = (_turned(o_BSNH, more), lse_BNS, _turned(do_BSNH, more))
    dq, dk, dv = _call_backward(_turned(q_BSNH, more), k_BTKH[:, ::-1], v_BTKH[:, ::-1], *results, kind, lengths)
    dq, dk, dv = dq[:, more:][:, ::-1], dk[:, ::-1], dv[:, ::-1]
    if seen is None:
        return dq, dk, dv
    q_seen, k_seen = (x[..., None, None] for x in seen)
    return jnp.where(q_seen, dq, 0), jnp.where(k_seen, dk, 0), jnp.where(k_seen, dv, 0)


def _triangle(S: int, T: int, mask: Mask):
    """(queries to add in front, kind of mask, lengths or None, (whether each query sees a key, whether each key is seen) or
    None)"""
    assert mask.window is not None, "a window cuts the block"
    more = mask.window - mask.distance - S + T - 1
    assert more >= 0, "each query sees a key but for documents"
    if mask.q_segments_BS is None:
        return more, "CAUSAL", None, None
    (_, keys_B), seen = _padding(mask)
    return more, "PADDING_CAUSAL", (jnp.full_like(keys_B, S + more), keys_B), seen


def _turned(x_BS, more: int, value: float = 0):
    """Positions in reverse, with `more` of them added in front."""
    return jnp.pad(x_BS[:, ::-1], [(0, 0), (more, 0)] + [(0, 0)] * (x_BS.ndim - 2), constant_values=value)


def _padding(mask: Mask):
    """((lengths of queries, of keys) for cuDNN, at least 1; (whether each query sees a key, whether each key is seen))"""
    queries_B, keys_B = rectangle(mask)
    S, T = (segments.shape[1] for segments in mask.documents)
    q_seen_BS = jnp.arange(S)[None] < queries_B[:, None]
    k_seen_BT = jnp.arange(T)[None] >= T - keys_B[:, None]
    return (jnp.maximum(queries_B, 1), jnp.maximum(keys_B, 1)), (q_seen_BS, k_seen_BT)


# -------------------------------------------------------------------------------------------------------- packed documents
# A call takes the tokens of a whole batch, and where each document starts and how long it is. Its number of documents is fixed,
# and each has the log-sum-exp of the longest, so that many documents in one call cost memory. The documents of a batch are
# therefore shared out to a few calls by their lengths.


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
        documents = segments_BS.shape[0] + jnp.sum(segments_BS[:, 1:] != segments_BS[:, :-1])
        fits = documents <= len(segments_BS) * most
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

    return Kernel(run_forward, run_backward)


def _with_lse(o_BSNH: jax.Array, lse_BSN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same arrays, the output once all of the log-sum-exp is there. Otherwise XLA's scheduler gathers its rows only when
    the backward pass reads them, and until then keeps the calls' lse_CNT, with 16 documents a call 16 times as large: 4 of the
    41 GiB of Llama 3.2 1B on 8 H100s at ZeRO 1.
    """
    # The barrier goes before XLA schedules, but keeps it from gathering this one element apart.
    lse_BSN = jax.lax.optimization_barrier(lse_BSN)
    bits = jax.lax.bitcast_convert_type(lse_BSN[0, 0, 0], jnp.uint32)
    return o_BSNH + (bits >> 31 >> 1).astype(o_BSNH.dtype), lse_BSN


def _in_pieces(call: Call, *arrays):
    """[B, S, ...] -> [C', longest, ...]"""
    return [x.reshape(-1, call.longest, *x.shape[2:]) for x in arrays]


def _chosen(call: Call, new, old):
    """This call's tokens of `new`, and the others of `old`, of arrays [B, S, ...]."""
    if old is None:
        return new
    here = lambda x: call.is_here_BS.reshape(*call.is_here_BS.shape, *[1] * (x.ndim - 2))  # noqa: E731
    return [jnp.where(here(x), x, other) for x, other in zip(new, old, strict=True)]


# ------------------------------------------------------------------------------------------------------- the private binding


def _call_forward(q_BSNH, k_BTKH, v_BTKH, kind: str, lengths=None, call: Call | None = None, window: int | None = None):
    """(output in the inputs' dtype, float32 log-sum-exp [B, N, S]; of packed documents [C, N, longest])

    Args:
      kind: a name of JAX's MaskType.
      lengths: with PADDING and PADDING_CAUSAL, of queries and keys, int32 [B].
      call: with PADDING_CAUSAL, the documents.
      window: keys that a query sees, its own position's included.
    """
    operands, parameters = _arguments(q_BSNH, k_BTKH, v_BTKH, kind, lengths, call, window)
    return cudnn_binding()._dot_product_attention_fwd_p.bind(*operands, is_training=True, **parameters)


def _call_backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse, do_BSNH, kind, lengths=None, call=None, window=None) -> Gradients:
    """The gradients in the inputs' dtype."""
    operands, parameters = _arguments(q_BSNH, k_BTKH, v_BTKH, kind, lengths, call, window)
    results = (lse, o_BSNH.astype(q_BSNH.dtype), do_BSNH.astype(q_BSNH.dtype))
    return tuple(cudnn_binding()._dot_product_attention_bwd_p.bind(*operands, *results, **parameters))


def _arguments(q_BSNH, k_BTKH, v_BTKH, kind: str, lengths, call: Call | None, window: int | None):
    """(operands, parameters) of the primitives behind JAX's own, which divide a call over devices, ask the devices present
    what they can, and count packed keys wrongly for grouped heads before JAX 0.11.2 (jax-ml/jax#39521)."""
    binding = cudnn_binding()
    unused = jnp.zeros(0, q_BSNH.dtype)
    offsets = (unused, unused)
    if call is not None:
        assert q_BSNH.size < 2**31, "cuDNN is told with 32 bits where a document starts"
        lengths = (call.lengths, call.lengths)
        # One more than there are documents: the end, behind the last start. cuDNN does not read the others.
        end = jnp.full(len(call.starts), q_BSNH.shape[0] * q_BSNH.shape[1], jnp.int32)
        starts = jnp.concatenate([call.starts.reshape(-1), end]).reshape(len(call.starts), -1)
        offsets = tuple(starts * math.prod(x.shape[2:]) for x in (q_BSNH, k_BTKH))
    parameters = {
        "scale": 1 / math.sqrt(q_BSNH.shape[-1]),
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": binding.MaskType[kind],
        "layout": binding.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    if "score_mod_name" in inspect.signature(binding._dot_product_attention_fwd_cuda_lowering).parameters:
        # Flex attention, from JAX 0.12 on.
        parameters |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return (q_BSNH, k_BTKH, v_BTKH, unused, *(lengths or (unused, unused)), *offsets, unused, unused), parameters
