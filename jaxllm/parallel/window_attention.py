"""Attention with a sliding window, over a sequence that is sharded over the context axis in zigzag (zigzag.py).

    attend = window_attention(kernel, axis_name, c, window)
    attend(q_BSNH, k_BSKH, v_BSKH, segments_BS | None) -> o_BSNH

A query sees the keys of `window` positions, its own included. So a chunk of queries needs its own keys and those of the few
chunks before it. These come straight from the ranks that have them, without the part that no query sees:

    c = 2, distance 1    rank 0 has chunks 0 and 3        rank 1 has chunks 1 and 2
    low queries          0 <- nothing                     1 <- 0 of rank 0
    high queries         3 <- 2 of rank 1                 2 <- 1, its own low chunk

At each distance all ranks compute blocks of one shape and one mask, so a kernel knows the mask when it is compiled. The chunks
at the start of the sequence have nothing before them: their ranks compute a block that does not count, while the others work.
What ring_attention.py says about local arrays and gradients holds here too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config.attention import chunks_in_reach, first_seen
from jaxllm.model.blockwise_attention import NOTHING, Kernel, Mask, Partial, merge
from jaxllm.parallel.ring_attention import BlockwiseAttention, as_batch, as_sequences


def window_attention(kernel: Kernel, axis_name: str, c: int, window: int) -> BlockwiseAttention:
    """Attention on one of `c` ranks.

    Args:
      kernel: takes blocks that the window cuts (blockwise_attention.within_window).
    """

    def forward(q_BSNH, k_BSKH, v_BSKH, segments_BS) -> Partial:
        if c == 1:
            return kernel.forward(q_BSNH, k_BSKH, v_BSKH, Mask(True, segments_BS, segments_BS, window))
        q, k, v, segments = (as_batch(x) for x in (q_BSNH, k_BSKH, v_BSKH, segments_BS))
        exchange = Exchange(axis_name, c, window, q_BSNH.shape[1] // 2)
        keys = (jnp.concatenate([k_BSKH, v_BSKH], axis=2), segments_BS)
        arrived = exchange.fetch(1, keys) if exchange.reach else None
        found = kernel.forward(q, k, v, Mask(True, segments, segments, window))
        for distance in range(1, exchange.reach + 1):
            (found, keys), following = exchange.fetch_after(found, distance, keys)
            q_here, q_segments, old = (exchange.queries(distance, x) for x in (q, segments, found))
            k_here, v_here, mask, is_there = exchange.block(distance, arrived, q_segments)
            o, lse = kernel.forward(q_here, k_here, v_here, mask)
            new = merge(old, Partial(o, jnp.where(is_there[:, None, None], lse, NOTHING)))
            found, arrived = exchange.put(distance, found, new), following
        return Partial(*(as_sequences(x) for x in found))

    def backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, segments_BS):
        if c == 1:
            mask = Mask(True, segments_BS, segments_BS, window)
            return kernel.backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, mask)
        of_queries = [as_batch(x) for x in (q_BSNH, o_BSNH, lse_BSN, do_BSNH, segments_BS)]
        (q, *results, segments), k, v = of_queries, as_batch(k_BSKH), as_batch(v_BSKH)
        exchange = Exchange(axis_name, c, window, q_BSNH.shape[1] // 2)
        keys = (jnp.concatenate([k_BSKH, v_BSKH], axis=2), segments_BS)
        arrived = exchange.fetch(1, keys) if exchange.reach else None
        dq, *own = kernel.backward(q, k, v, *results, Mask(True, segments, segments, window))
        dq, dkv_BSKH = dq.astype(jnp.float32), as_sequences(jnp.concatenate(own, axis=2).astype(jnp.float32))
        for distance in range(1, exchange.reach + 1):
            (dq, keys), following = exchange.fetch_after(dq, distance, keys)
            q_here, *results_here, q_segments = (exchange.queries(distance, x) for x in of_queries)
            k_here, v_here, mask, is_there = exchange.block(distance, arrived, q_segments)
            gradients = kernel.backward(q_here, k_here, v_here, *results_here, mask)
            dq_here, *dkv = (jnp.where(is_there[:, None, None, None], x.astype(jnp.float32), 0) for x in gradients)
            dq = exchange.put(distance, dq, exchange.queries(distance, dq) + dq_here)
            dkv_BSKH = dkv_BSKH + exchange.bring_home(distance, jnp.concatenate(dkv, axis=2))
            arrived = following
        return as_sequences(dq), *jnp.split(dkv_BSKH, 2, axis=2)

    return BlockwiseAttention(forward, backward)


class Exchange:
    """Keys from the chunks before ours, and their gradients back.

    Chunks are [2B, L, ...], the low one of each sequence before its high one. From distance c on no low chunk has one so far
    before it: then they are the high ones, [B, L, ...].
    """

    def __init__(self, axis_name: str, c: int, window: int, length: int):
        self._axis_name, self._c, self._window, self._length = axis_name, c, window, length
        self.reach = chunks_in_reach(window, length, c)

    def queries(self, distance: int, tree: Any) -> Any:
        """The chunks of `tree` that have one at this distance on some rank."""
        return tree if distance < self._c else jax.tree.map(lambda x: x[1::2], tree)

    def put(self, distance: int, tree: Any, new: Any) -> Any:
        """`tree` with the chunks of `queries` replaced."""
        return new if distance < self._c else jax.tree.map(lambda x, part: x.at[1::2].set(part), tree, new)

    def fetch_after(self, done: Any, distance: int, keys: Any) -> tuple[tuple[Any, Any], Any]:
        """((done, keys), keys of the next distance), of which the transfer begins after `done`: XLA could otherwise send the
        keys of all distances at once, and keep them."""
        if distance == self.reach:
            return (done, keys), None
        done, keys = jax.lax.optimization_barrier((done, keys))
        return (done, keys), self.fetch(distance + 1, keys)

    def fetch(self, distance: int, keys: Any) -> Any:
        """What is seen of the chunks at this distance before ours; where there is none, anything finite.

        Args:
          keys: ours: arrays [B, S, ...], or None.
        """
        return jax.tree.map(lambda x: self._move(distance, self._seen(distance, x)), keys)

    def block(self, distance: int, arrived: Any, q_segments) -> tuple[jax.Array, jax.Array, Mask, jax.Array]:
        """(keys, values, their mask, whether each chunk has one at this distance)"""
        kv, k_segments = arrived
        k, v = jnp.split(kv, 2, axis=2)
        rank = jax.lax.axis_index(self._axis_name)
        is_there = jnp.stack([rank >= distance, 2 * self._c - 1 - rank >= distance])
        in_batch = jnp.tile(self.queries(distance, is_there), len(k) // (2 if distance < self._c else 1))
        first = first_seen(self._window, self._length, distance)
        return k, v, Mask(False, q_segments, k_segments, self._window, distance * self._length - first), in_batch

    def bring_home(self, distance: int, gradients: jax.Array) -> jax.Array:
        """Gradients of the keys that were fetched, at the rank that has the keys: [B, S, ...]."""
        sequences = len(gradients) // (2 if distance < self._c else 1)
        shape = (sequences, 2 * self._length, *gradients.shape[2:])
        fetch = lambda keys: self._move(distance, self._seen(distance, keys))  # noqa: E731
        return jax.linear_transpose(fetch, jax.ShapeDtypeStruct(shape, gradients.dtype))(gradients)[0]

    def _seen(self, distance: int, keys: jax.Array) -> jax.Array:
        """[B, S, ...] -> [B, 2, ..., ...]: the keys of both chunks that are seen from so far behind."""
        chunks = keys.reshape(len(keys), 2, self._length, *keys.shape[2:])
        return chunks[:, :, first_seen(self._window, self._length, distance) :]

    def _move(self, distance: int, chunks: jax.Array) -> jax.Array:
        """The chunks at a distance before ours, in the layout of queries. Chunks are numbered along the sequence: rank r has
        number r, low, and number 2 c - 1 - r, high."""
        c, rank = self._c, jax.lax.axis_index(self._axis_name)
        low, high = chunks[:, 0], chunks[:, 1]
        crossing = [(source, 2 * c - 1 - distance - source) for source in range(max(0, c - distance), c)]
        before_high = self._send(low, [(source, to) for source, to in crossing if to >= 0])
        if distance >= c:
            return before_high
        from_high = self._send(high, [(source, source - distance) for source in range(distance, c)])
        before_high = jnp.where(rank < c - distance, from_high, before_high)
        before_low = self._send(low, [(source, source + distance) for source in range(c - distance)])
        return jnp.stack([before_low, before_high], axis=1).reshape(-1, *low.shape[1:])

    def _send(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        if all(source == to for source, to in pairs):
            return x
        return jax.lax.ppermute(x, self._axis_name, pairs)
