"""Runs any pipeline schedule: a table (pipeline_schedule.py) turned into scans over ticks, in one SPMD program.

All stages run the same tick, each on the microbatch and chunk that its column of the table names; what a stage has nothing to
do for is computed on whatever lies there and not used. The forward's residuals wait in a ring of slots that the table assigns,
so memory is what the schedule needs and not what autodiff through a scan would keep: all microbatches.

No stage is special. Embedding and head are split over stages by vocabulary: all look up the microbatch that enters, all work
on the loss of the one that leaves. Gradients are computed here, by hand; the vocabulary's come from `Stage`.

A tick's messages overlap with its compute: the output is sent as soon as it is made and travels during the backward; the
gradient is sent at the top of the next tick and travels during its forward; the loss of an output is taken one tick later, so
forward and backward of a tick do not wait for each other. Where they are computed at once, layer by layer, both are sent at the
top of the next tick, behind the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxllm.mesh import PIPE, TENSOR
from jaxllm.parallel.types import Rows, Tree
from jaxllm.pipeline_schedule import Run, Schedule, Units
from jaxllm.sharding import over_tensor


@dataclass(frozen=True)
class Stage:
    """What a rank does in a tick. Called where `pipe` is manual; hidden states are [B, S, D]. `sums` are float32 gradients,
    added to and handed back."""

    look_up: Callable[[Rows], jax.Array]
    """All ranks: the embedding of a microbatch, on every rank."""
    look_up_backward: Callable[[jax.Array, Rows, Tree], Tree]
    """(gradient of the embedding on the first stage, zero elsewhere; rows; sums) -> sums"""
    forward: Callable[..., tuple[jax.Array, Tree, Tree]]
    """(chunk, h, rows, ring or None, slot, chunk of the backward that follows or None) -> (h, ring, what that backward may
    use)"""
    backward: Callable[..., tuple[jax.Array, Tree]]
    """(chunk, dh, rows, ring, slot, sums, what the forward left or None, valid) -> (dh, sums)"""
    both: Callable[..., tuple[tuple[jax.Array, Tree], tuple[jax.Array, Tree]]] | None
    """((chunk, h, rows, slot), (chunk, dh, rows, slot), ring, sums, valid) -> ((h, ring), (dh, sums)), a layer of each in turn;
    None: one after the other"""
    head: Callable[..., tuple[jax.Array, jax.Array, Tree]]
    """(h, rows, sums, valid) -> (loss, dh, sums), all ranks: of a microbatch that has left the last stage"""
    head_loss: Callable[[jax.Array, Rows], jax.Array]
    """(h, rows) -> loss"""
    new_ring: Callable[[int, jax.Array, Rows], Tree]
    """(slots, h, rows of any microbatch) -> ring; of h and rows shapes alone matter"""


def run_schedule(schedule: Schedule, stage: Stage, batch: Rows, h_BSD: jax.Array, sums: Tree) -> tuple[jax.Array, Tree]:
    """(loss summed over microbatches, sums with all gradients added). The loss is the same on every stage.

    Args:
      batch: arrays [microbatch, sequence, position].
      h_BSD: zeros of a hidden state's shape and layout.
      sums: None for a schedule without backward, which gives the loss alone.
    """
    P, V = schedule.stages, schedule.virtual_stages
    rank = jax.lax.axis_index(PIPE)
    is_first, is_last = rank == 0, rank == P - 1

    def rows_of(microbatch) -> Rows:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False), batch)

    def tick(run: Run, carry, line):
        h_BSD, dh_BSD, finished, ring, sums, loss = carry
        ahead, back = (jax.tree.map(lambda column: column[rank], line[way]) for way in ("forward", "backward"))
        if run.forward and stage.both:
            h_BSD = send(h_BSD, 1, P)
        if run.backward:
            returning, dh_BSD = dh_BSD, send(dh_BSD, -1, P)
            if run.embed:
                sums = embedding_backward(returning, line["returned"], sums)
        if run.head:
            leaving = line["leaving"]
            out_BSD = jax.lax.dynamic_index_in_dim(finished, line["taken"], keepdims=False)
            out_BSD = sum_over_stages(jnp.where(is_last, out_BSD, 0))
            if run.backward:
                part, of_head_BSD, sums = stage.head(out_BSD, rows_of(leaving["microbatch"]), sums, leaving["valid"])
                dh_BSD = jnp.where(is_last & (back["chunk"] == V - 1), of_head_BSD, dh_BSD)
            else:
                part = stage.head_loss(out_BSD, rows_of(leaving["microbatch"]))
            loss = loss + jnp.where(leaving["valid"], part, 0)
        if run.forward and run.embed:
            x_BSD = stage.look_up(rows_of(line["entering"]["microbatch"]))
            h_BSD = jnp.where(is_first & (ahead["chunk"] == 0), x_BSD, h_BSD)
        if run.forward and run.backward and stage.both:
            one, other = (
                (unit["chunk"], x_BSD, rows_of(unit["microbatch"]), unit["slot"])
                for unit, x_BSD in ((ahead, h_BSD), (back, dh_BSD))
            )
            (h_BSD, ring), (dh_BSD, sums) = stage.both(one, other, ring, sums, back["valid"])
        else:
            left = None
            if run.forward:
                following = back["chunk"] if run.backward else None
                h_BSD, ring, left = stage.forward(
                    ahead["chunk"], h_BSD, rows_of(ahead["microbatch"]), ring, ahead["slot"], following
                )
            if run.backward:
                unit = (back["slot"], sums, left, back["valid"])
                dh_BSD, sums = stage.backward(back["chunk"], dh_BSD, rows_of(back["microbatch"]), ring, *unit)
        if run.forward:
            finished = jax.lax.dynamic_update_index_in_dim(finished, h_BSD, line["finished"], 0)
            h_BSD = h_BSD if stage.both else send(h_BSD, 1, P)
        return (h_BSD, dh_BSD, finished, ring, sums, loss), None

    def embedding_backward(returning, unit, sums):
        return stage.look_up_backward(jnp.where(is_first & unit["valid"], returning, 0), rows_of(unit["microbatch"]), sums)

    ring = None if sums is None else stage.new_ring(schedule.slots, h_BSD, rows_of(0))
    finished = jnp.zeros((schedule.finished_slots, *h_BSD.shape), h_BSD.dtype)
    carry = (h_BSD, h_BSD if sums is not None else None, finished, ring, sums, jnp.zeros((), jnp.float32))
    lines = table_lines(schedule)
    for group in schedule.runs:
        carry = _scan_group(tick, group, lines, carry)
    _, returning, _, _, sums, loss = carry
    if sums is not None:
        sums = embedding_backward(returning, jax.tree.map(lambda x: x[-1], lines["returned"]), sums)
    return loss, sums


# Each tensor rank sends its part of the sequence. Every axis is manual there: where only some are, the CPU compiler aborts on a
# bfloat16 sum.


def send(h_BSD: jax.Array, direction: int, stages: int) -> jax.Array:
    """Hidden states of the stage before (direction 1) or after (-1), in a ring of `stages`."""
    pairs = [(stage, (stage + direction) % stages) for stage in range(stages)]
    return _per_tensor_rank(lambda x: jax.lax.ppermute(x, PIPE, pairs), h_BSD)


def sum_over_stages(h_BSD: jax.Array) -> jax.Array:
    """The sum over stages of hidden states, on every stage."""
    return _per_tensor_rank(lambda x: jax.lax.psum(x, PIPE), h_BSD)


def _per_tensor_rank(function: Callable[[jax.Array], jax.Array], h_BSD: jax.Array) -> jax.Array:
    return over_tensor(function, in_specs=(PartitionSpec(None, TENSOR),), out_specs=PartitionSpec(None, TENSOR))(h_BSD)


def _scan_group(tick, group, lines: dict[str, Any], carry):
    """The group's runs one after another, all of it `repeat` times."""

    def once(carry, parts):
        for run, part in zip(group.runs, parts, strict=True):
            carry, _ = jax.lax.scan(partial(tick, run), carry, part)
        return carry, None

    def part_of(run: Run) -> dict[str, Any]:
        at = run.start + group.length * np.arange(group.repeat)[:, None] + np.arange(run.length)
        return jax.tree.map(lambda column: column[at], lines)

    parts = [part_of(run) for run in group.runs]
    if group.repeat == 1:
        return once(carry, jax.tree.map(lambda x: x[0], parts))[0]
    return jax.lax.scan(once, carry, parts)[0]


def table_lines(schedule: Schedule) -> dict[str, Any]:
    """The table as arrays with a leading tick dim: what each stage does, and which microbatches all stages look up (entering),
    take the loss of (leaving) and add to the embedding's gradient (returned: it came out of the first stage a tick ago).
    """

    def units(table: Units) -> dict[str, np.ndarray]:
        return {"chunk": table.chunk, "microbatch": table.microbatch, "slot": table.slot, "valid": table.valid}

    def unit(microbatch: np.ndarray) -> dict[str, np.ndarray]:
        return {"microbatch": np.maximum(microbatch, 0), "valid": microbatch >= 0}

    return {
        "forward": units(schedule.forward),
        "backward": units(schedule.backward),
        "entering": unit(schedule.entering),
        "leaving": unit(schedule.heads),
        "returned": unit(schedule.returned),
        "finished": schedule.finished,
        "taken": schedule.taken,
    }
