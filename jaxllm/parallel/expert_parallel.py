"""Expert parallelism: some data ranks share the experts of a layer, and tokens travel to them.

    data rank          0       1       2       3           parallel.data=4, expert=2, 8 experts
    stored (ZeRO)      0 1     2 3     4 5     6 7
    in the step        0 1 4 5 2 3 6 7 0 1 4 5 2 3 6 7     gathered from ranks 0 and 2, and 1 and 3
    tokens travel      <----->         <----->

ZeRO 3 shards the experts over all data ranks. A rank gathers those of the ranks that have its place among their `expert` ranks;
with expert=data it gathers nothing. These are neighbours, in one host if expert x tensor divides its GPUs. Gradients are
reduced along the same ranks.

Each rank has a buffer of fixed size for each of the others. With parallel.expert_buffer=null it holds all rows, and nothing is
lost. Else rows that do not fit are dropped: their token does without that expert.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.config import Config
from jaxllm.config.types import EXPERT_CHOICE
from jaxllm.mesh.axes import DATA
from jaxllm.model.experts import ComputeRows, Deliver, ExpertOrder, combine, deliver_here, dispatch, sort_by_expert
from jaxllm.model.grouped_matmul import ALIGNED


def neighbours(data: int, expert: int) -> list[list[int]]:
    """The data ranks among which tokens travel."""
    return [list(range(first, first + expert)) for first in range(0, data, expert)]


def alike(data: int, expert: int) -> list[list[int]]:
    """The data ranks that have the same experts in the step."""
    return [list(range(place, data, expert)) for place in range(expert)]


def choose_deliver(config: Config) -> Deliver:
    p = config.parallel
    if p.expert == 1:
        return deliver_here
    return DeliverToRanks(config.model.num_experts or 1, int(p.data), p.expert, p.expert_buffer)


class Parcels(NamedTuple):
    """The rows that a rank sends, sorted by the rank and the expert they go to."""

    slots: ExpertOrder
    """In the place of sorted rows there are slots, of equal number for each rank; some are empty. Rows without a slot, and
    slots without a row, have numbers out of range."""
    counts: Int[Array, "ranks experts"]
    """Rows for each expert of each rank, without those that are dropped."""


@dataclass(frozen=True)
class DeliverToRanks:
    """A Deliver to the data ranks that share the experts of a layer."""

    experts: int
    data: int
    ranks: int
    """parallel.expert"""
    buffer: float | None

    def __call__(
        self,
        compute: ComputeRows,
        experts: int,
        x_TD: Float[Array, "T D"],
        ids_TK: Int[Array, "T K"],
        weights_TK: Float[Array, "T K"],
    ) -> Float[Array, "T D"]:
        slots, counts = self.parcels(ids_TK)
        x_RD = self._exchange(dispatch(x_TD, slots, True))
        weights_R1 = self._exchange(dispatch(weights_TK.reshape(-1, 1), slots.of_copies(), True))
        # The rows of each rank come sorted, and its empty slots last.
        ends, slot = jnp.cumsum(self._exchange(counts), axis=1), jnp.arange(len(x_RD) // self.ranks)
        ids_R1 = jnp.sum(slot[None, :, None] >= ends[:, None], axis=2, dtype=jnp.int32).reshape(-1, 1)
        order = sort_by_expert(ids_R1, experts)
        # What a matmul makes of empty slots is undefined, and may be nan: nothing reads it.
        of_sorted, sorted_R1, sizes = order
        rows, end = len(of_sorted), sizes.sum()
        order = ExpertOrder(
            jnp.where(jnp.arange(rows) < end, of_sorted, rows), jnp.where(sorted_R1 < end, sorted_R1, rows), sizes
        )
        y_RD = compute(dispatch(x_RD, order, True), dispatch(weights_R1, order, True), sizes)
        return combine(self._exchange(combine(y_RD, order, True)), slots, True)

    def rows_dropped(self, ids_BSK: Int[Array, "B S K"]) -> Float[Array, ""]:
        return jnp.float32(ids_BSK.size - self.parcels(ids_BSK.reshape(-1, ids_BSK.shape[-1])).counts.sum())

    def capacity(self, rows: int) -> int:
        """Slots for one rank, of so many rows for all."""
        wanted = rows if self.buffer is None else min(rows, math.ceil(self.buffer * rows / self.ranks))
        return -(-wanted // ALIGNED) * ALIGNED

    def parcels(self, ids_TK: Int[Array, "T K"]) -> Parcels:
        order, C, rows = sort_by_expert(self._places(ids_TK), self.experts), self.capacity(ids_TK.size), ids_TK.size
        ends = jnp.cumsum(order.sizes_E.reshape(self.ranks, -1), axis=1)
        starts, sent = jnp.cumsum(ends[:, -1]) - ends[:, -1], jnp.minimum(ends, C)
        slot = jnp.arange(C)[None]
        sorted_row = jnp.where(slot < sent[:, -1:], starts[:, None] + slot, rows).reshape(-1)
        row_of_slot = order.of_sorted_R.at[sorted_row].get(mode="fill", fill_value=rows)
        rank = jnp.sum(jnp.arange(rows)[:, None] >= starts[None, 1:], axis=1)
        place = jnp.arange(rows) - starts[rank]
        slot_of_row = jnp.where(place < C, rank * C + place, self.ranks * C)[order.sorted_TK]
        slots = ExpertOrder(row_of_slot, slot_of_row, order.sizes_E)
        return jax.tree.map(lambda x: checkpoint_name(x, EXPERT_CHOICE), Parcels(slots, jnp.diff(sent, axis=1, prepend=0)))

    def _exchange(self, x: jax.Array) -> jax.Array:
        """Blocks of equal size along the first dim, one for each rank -> one from each rank. It is its own transpose."""
        groups = neighbours(self.data, self.ranks)
        return jax.lax.all_to_all(x, DATA, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)

    def _places(self, ids: Int[Array, "T K"]) -> Int[Array, "T K"]:
        """The experts in the order of the ranks that have them in the step, and there in that of their stack."""
        piece = self.experts // self.data
        stored, within = ids // piece, ids % piece
        return stored % self.ranks * (self.experts // self.ranks) + stored // self.ranks * piece + within
