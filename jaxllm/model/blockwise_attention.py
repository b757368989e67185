"""Attention in blocks: some queries with some keys, merged with other blocks of the same queries.

    o_BSNH, lse_BSN = kernel.forward(q_BSNH, k_BTKH, v_BTKH, mask)
    o_BSNH, lse_BSN = merge(o_BSNH, lse_BSN, *kernel.forward(q_BSNH, other_k_BTKH, other_v_BTKH, other_mask))
    dq, dk, dv      = kernel.backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask)      once per block, then summed

`lse` is the logarithm of the sum of exp(score) over the keys that a query sees. The backward pass gets `o` and `lse` of *all*
keys. Then exp(score - lse) is the probability among all keys, and the blocks' gradients add up to the full gradient (Dao et
al., 2022, sec. 3). Letters as in layers.py; T counts keys, G = N / K query heads that share a key-value head, R rows of a tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxllm.config import ATTENTION_RESULTS
from jaxllm.cost_model.activations import XLA_ROWS, tile_rows

OUTPUT, LSE = ATTENTION_RESULTS
"""Names of a blockwise attention's results. A remat policy that saves them avoids the recomputation, transfers included."""

NOTHING = -1e30
"""lse of a query that sees no key. It is finite, so that merging two of them is not inf - inf. Beside any real lse its weight
is exp(-1e30) = 0 exactly."""


@dataclass(frozen=True)
class Mask:
    """The keys of a block that each query sees.

    Causal: queries and keys are the same positions, and query i sees keys j <= i. Not causal: every query comes after every key
    and sees it. With segments a query sees only keys of its own document. A document is one contiguous run with its own id.
    With a window a query sees only the keys of that many positions, its own included.
    """

    causal: bool = False
    q_segments_BS: Int[Array, "B S"] | None = None
    k_segments_BT: Int[Array, "B T"] | None = None
    window: int | None = None
    distance: int = 0
    """Positions from the first key to the first query. Only a window needs it."""

    @property
    def documents(self) -> tuple[Int[Array, "B S"], Int[Array, "B T"]]:
        """Segments of queries and keys."""
        assert self.q_segments_BS is not None, "the mask has no segments"
        assert self.k_segments_BT is not None, "the mask has segments of queries alone"
        return self.q_segments_BS, self.k_segments_BT


class Partial(NamedTuple):
    """The result of queries over the keys so far, float32. Rows that saw no key have 0 and NOTHING."""

    o_BSNH: Float32[Array, "B S N H"]
    lse_BSN: Float32[Array, "B S N"]


Gradients = tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block. Key-value heads are never repeated in memory."""

    forward: Callable[..., Partial]
    """(q_BSNH, k_BTKH, v_BTKH, mask) -> Partial"""
    backward: Callable[..., Gradients]
    """(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask) -> (dq_BSNH, dk_BTKH, dv_BTKH), float32 or the inputs' dtype"""


def merge(a: Partial, b: Partial) -> Partial:
    """The result over two disjoint sets of keys. Each output is weighted by its share of the sum of exponentials."""
    top_BSN = jnp.maximum(a.lse_BSN, b.lse_BSN)
    a_BSN, b_BSN = jnp.exp(a.lse_BSN - top_BSN), jnp.exp(b.lse_BSN - top_BSN)
    sum_BSN = a_BSN + b_BSN
    o_BSNH = (a_BSN / sum_BSN)[..., None] * a.o_BSNH + (b_BSN / sum_BSN)[..., None] * b.o_BSNH
    return Partial(o_BSNH, top_BSN + jnp.log(sum_BSN))


# ------------------------------------------------------------------------------------------------------------- plain XLA


def xla_kernel(max_rows: int = XLA_ROWS) -> Kernel:
    """Einsums over tiles of query rows, scores and softmax in float32. Only one tile of scores exists at a time.

    A causal block is computed as a full square and masked, so half of its work is wasted. With a window a tile reads only the
    keys that one of its rows may see.

    Args:
      max_rows: rows of a tile at most (cost_model/activations.tile_rows).
    """
    return Kernel(partial(_xla_forward, max_rows=max_rows), partial(_xla_backward, max_rows=max_rows))


def _xla_forward(q_BSNH, k_BTKH, v_BTKH, mask: Mask, *, max_rows: int) -> Partial:
    B, _, N, H = q_BSNH.shape
    rows = _tile_rows(q_BSNH.shape, k_BTKH.shape[1], mask.window, max_rows)
    q_BSNH, mask = _tied(q_BSNH, mask)
    keys = (k_BTKH, v_BTKH, mask.k_segments_BT)

    def tile(_, inputs):
        start, q_BRNH, q_segments_BR = inputs
        first, (k_BTKH, v_BTKH, k_segments_BT) = _in_reach(keys, mask, start, rows)
        segments = None if q_segments_BR is None else (q_segments_BR, k_segments_BT)
        scores_BKGRT, visible_B11RT = _scores(q_BRNH, k_BTKH, mask, start - first, segments)
        top_BKGR = scores_BKGRT.max(axis=-1)
        # The second `where` is for rows that see no key: exp(NOTHING - NOTHING) = 1 becomes 0.
        p_BKGRT = _where(visible_B11RT, jnp.exp(scores_BKGRT - top_BKGR[..., None]), 0.0)
        sum_BKGR = p_BKGRT.sum(axis=-1)
        o_BRKGH = jnp.einsum("BKGRT,BTKH->BRKGH", p_BKGRT.astype(v_BTKH.dtype), v_BTKH, preferred_element_type=jnp.float32)
        safe_BKGR = jnp.where(sum_BKGR > 0, sum_BKGR, 1.0)
        o_BRKGH = o_BRKGH / jnp.moveaxis(safe_BKGR, -1, 1)[..., None]
        lse_BKGR = jnp.where(sum_BKGR > 0, top_BKGR + jnp.log(safe_BKGR), NOTHING)
        return None, (o_BRKGH.reshape(B, rows, N, H), jnp.moveaxis(lse_BKGR, -1, 1).reshape(B, rows, N))

    _, (o_tiles, lse_tiles) = jax.lax.scan(tile, None, _tiles(rows, q_BSNH, mask.q_segments_BS))
    return Partial(_untile(o_tiles), _untile(lse_tiles))


def _xla_backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask, *, max_rows: int) -> Gradients:
    B, _, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    rows = _tile_rows(q_BSNH.shape, k_BTKH.shape[1], mask.window, max_rows)
    q_BSNH, mask = _tied(q_BSNH, mask)
    keys = (k_BTKH, v_BTKH, mask.k_segments_BT)
    # Sum of dP P over all keys, from o and do (FlashAttention's D).
    delta_BSN = jnp.einsum("BSNH,BSNH->BSN", o_BSNH, do_BSNH, preferred_element_type=jnp.float32)
    add = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def tile(sums, inputs):
        start, q_BRNH, q_segments_BR, lse_BRN, do_BRNH, delta_BRN = inputs
        first, (k_BTKH, v_BTKH, k_segments_BT) = _in_reach(keys, mask, start, rows)
        _, (dk_BTKH, dv_BTKH) = _in_reach(sums, mask, start, rows)
        segments = None if q_segments_BR is None else (q_segments_BR, k_segments_BT)
        scores_BKGRT, visible_B11RT = _scores(q_BRNH, k_BTKH, mask, start - first, segments)
        lse_BKGR, delta_BKGR = (jnp.moveaxis(x.reshape(B, rows, K, N // K), 1, -1) for x in (lse_BRN, delta_BRN))
        p_BKGRT = _where(visible_B11RT, jnp.exp(scores_BKGRT - lse_BKGR[..., None]), 0.0)
        q_BRKGH, do_BRKGH = (x.reshape(B, rows, K, N // K, H) for x in (q_BRNH, do_BRNH))
        dv_BTKH = dv_BTKH + add("BKGRT,BRKGH->BTKH", p_BKGRT.astype(do_BRNH.dtype), do_BRKGH)
        dp_BKGRT = add("BRKGH,BTKH->BKGRT", do_BRKGH, v_BTKH)
        ds_BKGRT = (p_BKGRT * (dp_BKGRT - delta_BKGR[..., None]) / math.sqrt(H)).astype(q_BRNH.dtype)
        dk_BTKH = dk_BTKH + add("BKGRT,BRKGH->BTKH", ds_BKGRT, q_BRKGH)
        dq_BRNH = add("BKGRT,BTKH->BRKGH", ds_BKGRT, k_BTKH).reshape(B, rows, N, H)
        if dk_BTKH.shape == sums[0].shape:
            return (dk_BTKH, dv_BTKH), dq_BRNH
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        return tuple(put(total, part) for total, part in zip(sums, (dk_BTKH, dv_BTKH), strict=True)), dq_BRNH

    zeros = jnp.zeros(k_BTKH.shape, jnp.float32)
    inputs = _tiles(rows, q_BSNH, mask.q_segments_BS, lse_BSN, do_BSNH, delta_BSN)
    (dk_BTKH, dv_BTKH), dq_tiles = jax.lax.scan(tile, (zeros, zeros), inputs)
    return _untile(dq_tiles), dk_BTKH, dv_BTKH


def _tied(q_BSNH, mask: Mask):
    """The arguments, with the segments made to depend on the queries. Segments are the same in every layer, so XLA would
    otherwise compute the masks of all tiles and ring steps before the layer loop and keep them: S x S / c.
    """
    if mask.q_segments_BS is None:
        return q_BSNH, mask
    q_BSNH, q_segments_BS, k_segments_BT = jax.lax.optimization_barrier((q_BSNH, mask.q_segments_BS, mask.k_segments_BT))
    return q_BSNH, replace(mask, q_segments_BS=q_segments_BS, k_segments_BT=k_segments_BT)


def _in_reach(keys: Any, mask: Mask, start: Any, rows: int) -> tuple[Any, Any]:
    """(first, arrays of keys [B, T, ...] from there on): all that the query rows from `start` may see. None stays None."""
    T = keys[0].shape[1]
    if mask.window is None or rows + mask.window - 1 >= T:
        return 0, keys
    count = rows + mask.window - 1
    first = jnp.clip(start + mask.distance + rows - count, 0, T - count)
    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1)
    return first, tuple(None if x is None else cut(x) for x in keys)


def _scores(q_BRNH, k_BTKH, mask: Mask, start, segments):
    """(scores, mask or None if all is visible) of query rows that begin `start` positions after the keys, or with a distance
    that much later. Scores outside the mask are NOTHING.

    Args:
      segments: of the queries and of the keys, or None.
    """
    B, R, N, H = q_BRNH.shape
    T, K = k_BTKH.shape[1:3]
    q_BRKGH = q_BRNH.reshape(B, R, K, N // K, H)
    scores_BKGRT = jnp.einsum("BRKGH,BTKH->BKGRT", q_BRKGH, k_BTKH, preferred_element_type=jnp.float32) / math.sqrt(H)
    visible_BRT = None
    before_RT = (start + mask.distance + jnp.arange(R))[:, None] - jnp.arange(T)[None, :]
    if mask.causal:
        visible_BRT = (before_RT >= 0)[None]
    if mask.window is not None:
        near_BRT = (before_RT < mask.window)[None]
        visible_BRT = near_BRT if visible_BRT is None else near_BRT & visible_BRT
    if segments is not None:
        q_segments_BR, k_segments_BT = segments
        same_BRT = q_segments_BR[:, :, None] == k_segments_BT[:, None, :]
        visible_BRT = same_BRT if visible_BRT is None else same_BRT & visible_BRT
    visible_B11RT = None if visible_BRT is None else visible_BRT[:, None, None]
    return _where(visible_B11RT, scores_BKGRT, NOTHING), visible_B11RT


def _where(condition, x, other: float):
    return x if condition is None else jnp.where(condition, x, other)


def _tile_rows(q_shape, T: int, window: int | None, max_rows: int) -> int:
    B, rows, N, _ = q_shape
    keys = T if window is None else min(T, max_rows + window - 1)
    return tile_rows(rows, B * N * keys, max_rows)


def _tiles(rows: int, *arrays):
    """The first row of each tile, and each array [B, S, ...] as [tile, B, rows, ...]. None stays None."""
    S = arrays[0].shape[1]
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], S // rows, rows, *x.shape[2:]), 1, 0)  # noqa: E731
    return (jnp.arange(0, S, rows), *(None if x is None else cut(x) for x in arrays))


def _untile(x_tiles):
    """[tile, B, rows, ...] -> [B, S, ...]"""
    x = jnp.moveaxis(x_tiles, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# ---------------------------------------------------------------------------------------------------------------- windows


def within_window(kernel: Kernel) -> Kernel:
    """The kernel, where a block that is not causal may be cut by a window: only the queries from the front that see a key, and
    the keys from the back that are seen, are computed."""

    def forward(q_BSNH, k_BTKH, v_BTKH, mask: Mask) -> Partial:
        S, (queries, first, mask) = q_BSNH.shape[1], _seen(q_BSNH.shape[1], k_BTKH.shape[1], mask)
        if queries <= 0:
            return Partial(jnp.zeros(q_BSNH.shape, jnp.float32), jnp.full(q_BSNH.shape[:3], NOTHING, jnp.float32))
        found = kernel.forward(q_BSNH[:, :queries], k_BTKH[:, first:], v_BTKH[:, first:], mask)
        return Partial(_pad(found.o_BSNH, 0, S - queries), _pad(found.lse_BSN, 0, S - queries, NOTHING))

    def backward(q_BSNH, k_BTKH, v_BTKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask) -> Gradients:
        S, (queries, first, mask) = q_BSNH.shape[1], _seen(q_BSNH.shape[1], k_BTKH.shape[1], mask)
        if queries <= 0:
            return jnp.zeros_like(q_BSNH), jnp.zeros_like(k_BTKH), jnp.zeros_like(v_BTKH)
        of_queries = (x[:, :queries] for x in (o_BSNH, lse_BSN, do_BSNH))
        dq, dk, dv = kernel.backward(q_BSNH[:, :queries], k_BTKH[:, first:], v_BTKH[:, first:], *of_queries, mask)
        return _pad(dq, 0, S - queries), _pad(dk, first, 0), _pad(dv, first, 0)

    return Kernel(forward, backward)


def _seen(S: int, T: int, mask: Mask) -> tuple[int, int, Mask]:
    """(queries from the front that see a key, first key that is seen, mask of these)"""
    if mask.causal or mask.window is None:
        return S, 0, mask
    reach = mask.window - mask.distance
    if reach >= S:
        return S, 0, replace(mask, window=None, distance=0)
    queries, first = min(S, T - 1 + reach), max(0, 1 - reach)
    cut = lambda x, part: None if x is None else x[:, part]  # noqa: E731
    q_segments, k_segments = cut(mask.q_segments_BS, slice(queries)), cut(mask.k_segments_BT, slice(first, None))
    return queries, first, Mask(False, q_segments, k_segments, mask.window, mask.distance - first)


def _pad(x, before: int, behind: int, value: float = 0):
    return jnp.pad(x, [(0, 0), (before, behind)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


# ---------------------------------------------------------------------------------------------------- documents by halves


def documents_by_halves(off_diagonal: Kernel, diagonal: Kernel, smallest: int = 128) -> Kernel:
    """A causal block with documents, from a kernel that masks documents only in blocks that are not causal.

    The block is cut in two. The later half's queries with the earlier half's keys are a block that is not causal, of which
    documents leave a rectangle (`rectangle`). Each half with itself is a causal block again, and the two are computed as one
    batch. It takes any number of documents in log2(S / smallest) calls, without work above the diagonal.

    Args:
      off_diagonal: computes the blocks that are not causal, cut by the window if there is one.
      diagonal: computes the causal blocks, once they have `smallest` rows or an odd length.
    """

    def forward(q_BSNH, k_BSKH, v_BSKH, mask: Mask) -> Partial:
        inputs, shape = (q_BSNH, k_BSKH, v_BSKH, mask.q_segments_BS), q_BSNH.shape[:2]
        *sizes, size = _halvings(shape[1], smallest)
        q, k, v, segments = (_cut(x, size) for x in inputs)
        found = [_uncut(x, shape) for x in diagonal.forward(q, k, v, Mask(True, segments, segments, mask.window))]
        for size in reversed(sizes):
            q, k, v, segments, *found = (_cut(x, size) for x in (*inputs, *found))
            early, late = slice(0, size // 2), slice(size // 2, size)
            block_mask = Mask(False, segments[:, late], segments[:, early], mask.window, size // 2)
            block = off_diagonal.forward(q[:, late], k[:, early], v[:, early], block_mask)
            merged = merge(Partial(*(x[:, late] for x in found)), block)
            both = (jnp.concatenate([x[:, early], y], axis=1) for x, y in zip(found, merged, strict=True))
            found = [_uncut(x, shape) for x in both]
        return Partial(*found)

    def backward(q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, mask: Mask) -> Gradients:
        inputs, shape = (q_BSNH, k_BSKH, v_BSKH, o_BSNH, lse_BSN, do_BSNH, mask.q_segments_BS), q_BSNH.shape[:2]
        *sizes, size = _halvings(shape[1], smallest)
        *arrays, segments = (_cut(x, size) for x in inputs)
        parts = diagonal.backward(*arrays, Mask(True, segments, segments, mask.window))
        sums = [_uncut(x, shape).astype(jnp.float32) for x in parts]
        for size in sizes:
            q, k, v, o, lse, do, segments = (_cut(x, size) for x in inputs)
            early, late = slice(0, size // 2), slice(size // 2, size)
            of_queries = (x[:, late] for x in (o, lse, do))
            ends = Mask(False, segments[:, late], segments[:, early], mask.window, size // 2)
            dq, dk, dv = off_diagonal.backward(q[:, late], k[:, early], v[:, early], *of_queries, ends)
            nothing = [jnp.zeros_like(x) for x in (dq, dk, dv)]
            halves = ((nothing[0], dq), (dk, nothing[1]), (dv, nothing[2]))
            parts = [_uncut(jnp.concatenate(pair, axis=1), shape) for pair in halves]
            sums = [total + part.astype(jnp.float32) for total, part in zip(sums, parts, strict=True)]
        return sums[0], sums[1], sums[2]

    return Kernel(forward, backward)


def rectangle(mask: Mask) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """(queries from the front, keys from the back) that see each other in a block that is not causal. Both are 0 if none do.

    Only one document can reach from the keys into the queries: the one with the last key and the first query.
    """
    q_segments_BS, k_segments_BT = mask.documents
    queries_B = jnp.sum(q_segments_BS == k_segments_BT[:, -1:], axis=1, dtype=jnp.int32)
    keys_B = jnp.sum(k_segments_BT == q_segments_BS[:, :1], axis=1, dtype=jnp.int32)
    return queries_B, keys_B


def _halvings(S: int, smallest: int) -> list[int]:
    """S, S / 2, ... down to `smallest` or the first odd length."""
    sizes = [S]
    while sizes[-1] > smallest and sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes


def _cut(x, size: int):
    """[B, S, ...] -> [B S / size, size, ...]"""
    return x.reshape(-1, size, *x.shape[2:])


def _uncut(x, shape: tuple[int, int]):
    """[B S / size, size, ...] -> [B, S, ...]"""
    return x.reshape(*shape, *x.shape[2:])
