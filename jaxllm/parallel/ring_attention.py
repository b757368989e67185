"""Attention over a sequence that is sharded over the context axis in zigzag (zigzag.py: which rank has which chunks).

    attend = ring_attention(kernel, axis_name, c)         keys travel from rank to rank, a hop behind each block
    attend = all_gather_attention(kernel, axis_name, c)   keys are gathered once; their gradients are reduce-scattered

    attend(q_BSNH, k_BSKH, v_BSKH, segments_BS | None) -> o_BSNH

Local arrays are [low chunk; high chunk], in a region where every axis is manual. Positions in the sequence are not used: the
numbers of the chunks tell which block is causal, full or absent. Both functions compute their own gradients from the
log-sum-exp over all keys, so only q, k, v, the output and the log-sum-exp are kept. Liu et al., 2023 (ring attention); Llama 3,
2024 (gathering).

The *visitor* is the keys and values of another rank that are at this rank in a ring step. A ring step is two full chunk
products on every rank, in one kernel call of twice the batch. The rank's high queries always meet the visitor's low keys. The
other product is *either* low with low (the visitor is from a lower rank) or high with high (from a higher rank):

    4 ranks, rank 1    step 1: visitor 0 (lower)     step 2: visitor 3 (higher)    step 3: visitor 2 (higher)
    first product      high x its low                high x its low                high x its low
    either             low x its low                 high x its high               high x its high
    keys sent          on to rank 2                  on to rank 2                  -

`where` selects it, because a conditional on a GPU waits for the host. `either` in a name below is this choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxllm.model.attention import Attend
from jaxllm.model.blockwise_attention import LSE, OUTPUT, Kernel, Mask, Partial, merge

Keys = tuple[jax.Array, jax.Array | None]
"""The arrays that travel: keys and values as one array [2, B, S, K, H], and the keys' segments if there are documents."""
Halves = tuple[Partial, Partial]
"""Results for the low and for the high queries."""


def ring_attention(kernel: Kernel, axis_name: str, c: int) -> BlockwiseAttention:
    """The forward pass has c - 1 hops of the keys. The backward pass has as many, and c - 1 hops of their float32 gradients,
    each behind a block."""
    send = partial(jax.lax.ppermute, axis_name=axis_name, perm=[(rank, (rank + 1) % c) for rank in range(c)])
    hop = partial(jax.tree.map, send)
    barrier = jax.lax.optimization_barrier

    def is_lower(step) -> jax.Array:
        """Whether the visitor at this step, from rank (r - step) mod c, is from a lower rank than ours."""
        return jax.lax.axis_index(axis_name) >= step

    def forward(q_BSNH, k_BSKH, v_BSKH, segments_BS) -> Partial:
        def meet(found: Halves, visitor: Keys, step) -> Halves:
            lower = is_lower(step)
            q, k, v, mask = _two_products(q_BSNH, visitor, segments_BS, lower)
            first, second = _split(kernel.forward(q, k, v, mask), axis=0)
            low, high = found
            return _merge_either((low, merge(high, first)), second, lower)

        def turn(carry, step):
            found, visitor = carry
            following = hop(visitor)
            return (meet(found, visitor, step), following), None

        own = (q_BSNH, k_BSKH, v_BSKH, Mask(True, segments_BS, segments_BS))
        if c == 1:
            return kernel.forward(*own)
        visitor = hop((jnp.stack([k_BSKH, v_BSKH]), segments_BS))
        found = _split(kernel.forward(*own))
        if c > 2:
            (found, visitor), _ = jax.lax.scan(turn, (found, visitor), jnp.arange(1, c - 1))
        return _join(*meet(found, visitor, c - 1))

    def backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, segments_BS):
        if c == 1:
            return kernel.backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, Mask(True, segments_BS, segments_BS))

        def meet(visitor: Keys, step):
            """The step's float32 gradients of our queries [B, S, N, H] and of the visitor [2, B, S, K, H]."""
            lower = is_lower(step)
            q, k, v, mask = _two_products(q_BSNH, visitor, segments_BS, lower)
            of_queries = (_high_and_either(x, lower) for x in (o_BSNH, lse_BSN, do_BSNH))
            dq, dk, dv = kernel.backward(q, k, v, *of_queries, mask)
            return _from_high_and_either(dq, lower), jnp.stack([_from_low_and_either(x, lower) for x in (dk, dv)])

        def turn(carry, step):
            dq_BSNH, dkv_2BSKH, visitor = carry
            # XLA inlines a loop of one turn, and would compute both steps before it sends the gradients of the first.
            dkv_2BSKH, visitor = barrier((dkv_2BSKH, visitor))
            # The visitor's gradients so far arrive from the rank before, while this step's are computed.
            dkv_2BSKH, following = send(dkv_2BSKH), hop(visitor)
            dq_step, dkv_step = meet(visitor, step)
            return (dq_BSNH + dq_step, dkv_2BSKH + dkv_step, following), None

        # The local block is computed in two parts: behind the first hop of the keys, and behind the last of their gradients.
        visitor = hop((jnp.stack([k_BSKH, v_BSKH]), segments_BS))
        inputs = (q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH)
        # Without a barrier XLA lets the second hop span this part and that step's block, and nothing hides the first hop.
        visitor, (dq_BSNH, *own) = barrier((visitor, _each_half_backward(kernel, *inputs, segments_BS)))
        following = hop(visitor) if c > 2 else None
        dq_step, dkv_2BSKH = meet(visitor, 1)
        dq_BSNH = dq_BSNH + dq_step
        if c > 3:
            (dq_BSNH, dkv_2BSKH, following), _ = jax.lax.scan(turn, (dq_BSNH, dkv_2BSKH, following), jnp.arange(2, c - 1))
        if c > 2:
            dkv_2BSKH, following = barrier((dkv_2BSKH, following))
            dkv_2BSKH = send(dkv_2BSKH)
            dq_step, dkv_step = meet(following, c - 1)
            dq_BSNH, dkv_2BSKH = dq_BSNH + dq_step, dkv_2BSKH + dkv_step
        dkv_2BSKH, inputs = barrier((dkv_2BSKH, inputs))
        home_2BSKH = send(dkv_2BSKH)
        dq_last, *last = _high_on_low_backward(kernel, *inputs, segments_BS=segments_BS)
        dk_BSKH, dv_BSKH = (a + b + x for a, b, x in zip(own, last, home_2BSKH, strict=True))
        return dq_BSNH + dq_last, dk_BSKH, dv_BSKH

    return BlockwiseAttention(forward, backward)


def all_gather_attention(kernel: Kernel, axis_name: str, c: int) -> BlockwiseAttention:
    """Keys are gathered once forward and once backward. Their gradients, float32 for the full sequence, are reduce-scattered.

    Rank r's low chunk sees the r chunks before it, its high chunk the 2c-1-r before it: 2c - 1 products on every rank.
    """

    def gather(k_BSKH, v_BSKH, segments_BS) -> Keys:
        """Chunks in the order of the sequence: [2c, 2, B, Lc, K, H] and [2c, B, Lc]."""
        keys = jax.lax.all_gather(jnp.stack(_split(jnp.stack([k_BSKH, v_BSKH]), axis=2)), axis_name)
        segments = None if segments_BS is None else jax.lax.all_gather(jnp.stack(_split(segments_BS)), axis_name)
        return jax.tree.map(lambda x: jnp.concatenate([x[:, 0], x[::-1, 1]]), (keys, segments))

    def product(chunks: Keys, turn):
        """(whether this turn is for our low queries, number of the chunk of keys, that chunk)"""
        rank = jax.lax.axis_index(axis_name)
        is_low = turn < rank
        chunk = jnp.where(is_low, turn, turn - rank)
        return is_low, chunk, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False), chunks)

    def forward(q_BSNH, k_BSKH, v_BSKH, segments_BS) -> Partial:
        chunks = gather(k_BSKH, v_BSKH, segments_BS)

        def turn(found, number):
            is_low, _, ((k, v), k_segments) = product(chunks, number)
            q, q_segments = _either(q_BSNH, is_low), _either(segments_BS, is_low)
            return _merge_either(found, kernel.forward(q, k, v, Mask(False, q_segments, k_segments)), is_low), None

        found = _split(_each_half_forward(kernel, q_BSNH, k_BSKH, v_BSKH, segments_BS))
        return _join(*jax.lax.scan(turn, found, jnp.arange(2 * c - 1))[0])

    def backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, segments_BS):
        inputs = (q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH)
        chunks = gather(k_BSKH, v_BSKH, segments_BS)

        def turn(sums, number):
            dq_BSNH, dkv_chunks = sums
            is_low, chunk, ((k, v), k_segments) = product(chunks, number)
            q, o, lse, do, q_segments = (_either(x, is_low) for x in (q_BSNH, o_BSNH, lse_BSN, do_BSNH, segments_BS))
            dq, dk, dv = kernel.backward(q, k, v, o, lse, do, Mask(False, q_segments, k_segments))
            dq_BSNH = dq_BSNH + _from_either(dq, is_low)
            return (dq_BSNH, dkv_chunks.at[chunk].add(jnp.stack([dk, dv]).astype(jnp.float32))), None

        dq_BSNH, *own = _each_half_backward(kernel, *inputs, segments_BS)
        sums = (dq_BSNH, jnp.zeros(chunks[0].shape, jnp.float32))
        (dq_BSNH, dkv_chunks), _ = jax.lax.scan(turn, sums, jnp.arange(2 * c - 1))
        by_rank = jnp.stack([dkv_chunks[:c], dkv_chunks[c:][::-1]], axis=1)
        low, high = jax.lax.psum_scatter(by_rank, axis_name)
        dk_BSKH, dv_BSKH = (a + x for a, x in zip(own, jnp.concatenate([low, high], axis=2), strict=True))
        return dq_BSNH, dk_BSKH, dv_BSKH

    return BlockwiseAttention(forward, backward)


@dataclass(frozen=True)
class BlockwiseAttention:
    """Attend from passes that compute their own gradients. The kind of the layer changes nothing."""

    forward: Callable[..., Partial]
    """(q, k, v, segments)"""
    backward: Callable[..., Any]
    """(q, k, v, o, lse, do, segments) -> (dq, dk, dv)"""

    def __call__(self, q_BSNH, k_BSKH, v_BSKH, segments_BS=None, kind=None) -> jax.Array:
        return _differentiable(self.forward, self.backward)(q_BSNH, k_BSKH, v_BSKH, segments_BS)


def by_kind(attends: Sequence[BlockwiseAttention]) -> Attend:
    """The attention of layers of several kinds, by the number of the kind. A number that is traced makes a conditional: both
    passes then have one for each layer, for which a GPU waits for the host."""
    # Stages of a pipeline run layers of several kinds at a time: of the same attention these take one branch, or ranks of two
    # stages would meet in the transfers of different ones.
    apart = list(dict.fromkeys(attends))
    if len(apart) == 1:
        return apart[0]

    def branch(kind):
        return kind if len(apart) == len(attends) else jnp.array([apart.index(attend) for attend in attends])[kind]

    def forward(*arrays) -> Partial:
        *arrays, kind = arrays
        return jax.lax.switch(branch(kind), [attend.forward for attend in apart], *arrays)

    def backward(*arrays):
        *arrays, kind = arrays
        cast = lambda attend: lambda *x: tuple(g.astype(x.dtype) for g, x in zip(attend.backward(*x), x, strict=False))  # noqa: E731
        return jax.lax.switch(branch(kind), [cast(attend) for attend in apart], *arrays)

    def attend(q_BSNH, k_BSKH, v_BSKH, segments_BS=None, *, kind) -> jax.Array:
        if isinstance(kind, int):
            return attends[kind](q_BSNH, k_BSKH, v_BSKH, segments_BS)
        return _differentiable(forward, backward)(q_BSNH, k_BSKH, v_BSKH, segments_BS, kind)

    return attend


def _differentiable(forward: Callable[..., Partial], backward: Callable[..., Any]) -> Callable[..., jax.Array]:
    """forward(q, k, v, segments, ...) and backward(q, k, v, o, lse, do, segments, ...) as one function."""

    def run(q_BSNH, *others):
        o_BSNH, lse_BSN = forward(q_BSNH, *others)
        # The names are here, where jax.checkpoint's policies look: if both are kept, nothing above is recomputed or sent again.
        return checkpoint_name(o_BSNH.astype(q_BSNH.dtype), OUTPUT), checkpoint_name(lse_BSN, LSE)

    @jax.custom_vjp
    def attend(*arrays):
        return run(*arrays)[0]

    def attend_forward(q_BSNH, k_BSKH, v_BSKH, *others):
        o_BSNH, lse_BSN = run(q_BSNH, k_BSKH, v_BSKH, *others)
        return o_BSNH, (q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, others)

    def attend_backward(residuals, do_BSNH):
        *arrays, others = residuals
        gradients = backward(*arrays, do_BSNH, *others)
        return *(g.astype(x.dtype) for g, x in zip(gradients, arrays[:3], strict=True)), *[None] * len(others)

    attend.defvjp(attend_forward, attend_backward)
    return attend


# ---------------------------------------------------------------------------------------------------------- the local block


def _each_half_forward(kernel: Kernel, q_BSNH, k_BSKH, v_BSKH, segments_BS) -> Partial:
    """Attention of each chunk with itself: one causal call of twice the batch."""
    q, k, v, segments = (as_batch(x) for x in (q_BSNH, k_BSKH, v_BSKH, segments_BS))
    return Partial(*(as_sequences(x) for x in kernel.forward(q, k, v, Mask(True, segments, segments))))


def _each_half_backward(kernel: Kernel, q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, segments_BS):
    *arrays, segments = (as_batch(x) for x in (q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, segments_BS))
    gradients = kernel.backward(*arrays, Mask(True, segments, segments))
    return [as_sequences(g).astype(jnp.float32) for g in gradients]


def _high_on_low_backward(kernel: Kernel, q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, segments_BS):
    """Float32 gradients of our high queries with our own low keys."""
    q, o, lse, do, q_segments = (_split(x)[1] for x in (q_BSNH, o_BSNH, lse_BSN, do_BSNH, segments_BS))
    k, v, k_segments = (_split(x)[0] for x in (k_BSKH, v_BSKH, segments_BS))
    gradients = kernel.backward(q, k, v, o, lse, do, Mask(False, q_segments, k_segments))
    dq, dk, dv = (g.astype(jnp.float32) for g in gradients)
    return _join(jnp.zeros_like(dq), dq), *(_join(x, jnp.zeros_like(x)) for x in (dk, dv))


# --------------------------------------------------------------- halves, and choices among them; None (no segments) stays None


def _split(tree: Any, axis: int = 1) -> tuple[Any, Any]:
    """(low, high) of the arrays in `tree`."""
    half = lambda x, part: jax.lax.slice_in_dim(x, part * x.shape[axis] // 2, (part + 1) * x.shape[axis] // 2, axis=axis)  # noqa: E731
    return tuple(jax.tree.map(partial(half, part=part), tree) for part in (0, 1))


def _join(low: Any, high: Any, axis: int = 1) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis), low, high)


def as_batch(x):
    """[B, S, ...] -> [2B, S / 2, ...]"""
    return None if x is None else x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def as_sequences(x):
    """[2B, S / 2, ...] -> [B, S, ...]"""
    return x.reshape(x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:])


def _choose(is_first, first: Any, second: Any) -> Any:
    return jax.tree.map(partial(jnp.where, is_first), first, second)


def _either(x, is_low):
    return _choose(is_low, *_split(x))


def _from_either(x, is_low):
    """A gradient of _either's result, as float32 one of all rows."""
    x = x.astype(jnp.float32)
    return _join(jnp.where(is_low, x, 0), jnp.where(is_low, 0, x))


def _merge_either(found: Halves, block: Partial, is_low) -> Halves:
    low, high = found
    merged = merge(_choose(is_low, low, high), block)
    return _choose(is_low, merged, low), _choose(is_low, high, merged)


def _two_products(q_BSNH, visitor: Keys, segments_BS, lower):
    """(q, k, v, mask) of batch 2B: high queries with low keys, then either low with low or high with high."""
    (k, v), k_segments = visitor
    q, q_segments = (_high_and_either(x, lower) for x in (q_BSNH, segments_BS))
    k, v, k_segments = (_low_and_either(x, lower) for x in (k, v, k_segments))
    return q, k, v, Mask(False, q_segments, k_segments)


def _high_and_either(x, is_low):
    return _join(_split(x)[1], _either(x, is_low), axis=0)


def _low_and_either(x, is_low):
    return _join(_split(x)[0], _either(x, is_low), axis=0)


def _from_high_and_either(x, is_low):
    high, either = _split(x.astype(jnp.float32), axis=0)
    return _join(jnp.zeros_like(high), high) + _from_either(either, is_low)


def _from_low_and_either(x, is_low):
    low, either = _split(x.astype(jnp.float32), axis=0)
    return _join(low, jnp.zeros_like(low)) + _from_either(either, is_low)
