"""Runs any pipeline schedule: a table (pipeline_schedule.py) becomes scans over ticks, in one SPMD program.

All stages run the same tick, each on the microbatch and chunk in its column of the table. A stage without work computes on what
is in its buffers, and its result is not used, or is zero. 1F1B is three scans (the drain is cut in two: with and without the
head). With 3 stages and 4 microbatches:

    tick         0    1    2  |   3      4      5   |  6    7    8
    stage 0     F0   F1   F2  |  F3      .     B0   | B1   B2   B3
    stage 1      .   F0   F1  |  F2    F3 B0   B1   | B2   B3    .
    stage 2      .    .   F0  | F1 B0  F2 B1  F3 B2 | B3    .    .
    head         .    .    .  |   0      1      2   |  3    .    .      a tick after the last stage's forward pass
                   warm-up    |       steady        |    drain
                   F alone    |    F and B a tick   |   B alone

The residuals of a forward pass wait in a ring of slots that the table assigns. So memory is what the schedule needs; autodiff
through a scan would keep the residuals of all microbatches.

No stage is special. Embedding and head are sharded over stages by vocabulary: all stages look up the microbatch that enters,
and all work on the loss of the one that leaves. Gradients are computed here, by hand; those of the vocabulary come from
the stage.

A tick's messages overlap with its compute. The output is sent as soon as it is made and travels during the backward pass. The
gradient is sent at the top of the next tick and travels during its forward pass. The loss of an output is taken one tick later,
so that forward and backward of a tick do not wait for each other.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxllm.mesh.axes import PIPE, TENSOR
from jaxllm.mesh.sharding import tensor_shard_map
from jaxllm.parallel.types import Batch, Rows, Tree
from jaxllm.pipeline_schedule import Group, Run, Schedule


class Microbatch(NamedTuple):
    """One microbatch of the batch."""

    number: jax.Array
    rows: Rows


class Unit(NamedTuple):
    """One stage's pass in a tick, forward or backward: a microbatch through a chunk of layers."""

    chunk: jax.Array
    microbatch: Microbatch
    slot: jax.Array
    """Slot of the ring that holds its residuals."""


class Carry(NamedTuple):
    """The values that one tick hands to the next."""

    h_BSD: jax.Array
    """The forward message: the output of the stage before."""
    dh_BSD: Any
    """The backward message, not sent yet. None without a backward pass."""
    finished: jax.Array
    """Outputs of the last stage that wait for the head, [slot, B, S, D]."""
    ring: Tree
    sums: Tree
    loss: jax.Array


def run_schedule(schedule: Schedule, stage: Any, batch: Batch, h_BSD: jax.Array, sums: Tree) -> tuple[jax.Array, Tree]:
    """(loss summed over microbatches, sums with all gradients added). The loss is the same on every stage.

    Args:
      stage: a rank's work in a tick (llama_pipeline.LlamaStage).
      batch: arrays [microbatch, sequence, position].
      h_BSD: zeros of a hidden state's shape and layout.
      sums: None for a schedule without backward, which gives the loss alone.
    """
    P, V = schedule.stages, schedule.virtual_stages
    rank = jax.lax.axis_index(PIPE)
    is_first, is_last = rank == 0, rank == P - 1

    def microbatch_of(number) -> Microbatch:
        return Microbatch(number, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), batch))

    def unit_of(columns: dict[str, jax.Array]) -> Unit:
        return Unit(columns["chunk"], microbatch_of(columns["microbatch"]), columns["slot"])

    def embed_backward(returning, entry, sums):
        dh_BSD = jnp.where(is_first & entry["valid"], returning, 0)
        return stage.look_up_backward(dh_BSD, microbatch_of(entry["microbatch"]), sums)

    def tick(run: Run, carry: Carry, row: dict[str, Any]) -> tuple[Carry, None]:
        h_BSD, dh_BSD, finished, ring, sums, loss = carry
        ahead, back = (jax.tree.map(lambda column: column[rank], row[way]) for way in ("forward", "backward"))
        if run.backward:
            returning, dh_BSD = dh_BSD, send(dh_BSD, -1, P)
            if run.embed:
                sums = embed_backward(returning, row["embed_backward_mb"], sums)
        if run.head:
            head_mb = row["head_mb"]
            out_BSD = jax.lax.dynamic_index_in_dim(finished, row["head_slot"], keepdims=False)
            out_BSD = sum_over_stages(jnp.where(is_last, out_BSD, 0))
            if run.backward:
                part, dout_BSD, sums = stage.head(out_BSD, microbatch_of(head_mb["microbatch"]), sums, head_mb["valid"])
                dh_BSD = jnp.where(is_last & (back["chunk"] == V - 1), dout_BSD, dh_BSD)
            else:
                part = stage.head_loss(out_BSD, microbatch_of(head_mb["microbatch"]))
            loss = loss + jnp.where(head_mb["valid"], part, 0)
        if run.forward and run.embed:
            x_BSD = stage.look_up(microbatch_of(row["embed_mb"]["microbatch"]))
            h_BSD = jnp.where(is_first & (ahead["chunk"] == 0), x_BSD, h_BSD)
        handed_over = None
        if run.forward:
            following = back["chunk"] if run.backward else None
            h_BSD, ring, handed_over = stage.forward(unit_of(ahead), h_BSD, ring, following)
        if run.backward:
            dh_BSD, sums = stage.backward(unit_of(back), dh_BSD, ring, sums, handed_over, back["valid"])
        if run.forward:
            finished = jax.lax.dynamic_update_index_in_dim(finished, h_BSD, row["finished"], 0)
            h_BSD = send(h_BSD, 1, P)
        return Carry(h_BSD, dh_BSD, finished, ring, sums, loss), None

    trains = sums is not None
    ring = stage.new_ring(schedule.slots, h_BSD, microbatch_of(0)) if trains else None
    finished = jnp.zeros((schedule.finished_slots, *h_BSD.shape), h_BSD.dtype)
    carry = Carry(h_BSD, h_BSD if trains else None, finished, ring, sums, jnp.zeros(stage.sums_shape, jnp.float32))
    rows = table_rows(schedule)
    for group in schedule.runs:
        carry = _scan_group(tick, group, rows, carry)
    if not trains:
        return carry.loss, None
    return carry.loss, embed_backward(carry.dh_BSD, jax.tree.map(lambda x: x[-1], rows["embed_backward_mb"]), carry.sums)


# Each tensor rank sends its part of the sequence. Every axis is manual there: where only some are, the CPU compiler aborts on a
# bfloat16 sum.


@jax.named_scope("send")
def send(h_BSD: jax.Array, direction: int, stages: int) -> jax.Array:
    """Hidden states of the stage before (direction 1) or after (-1), in a ring of `stages`."""
    pairs = [(stage, (stage + direction) % stages) for stage in range(stages)]
    return _per_tensor_rank(lambda x: jax.lax.ppermute(x, PIPE, pairs), h_BSD)


@jax.named_scope("sum_over_stages")
def sum_over_stages(h_BSD: jax.Array) -> jax.Array:
    """The sum over stages of hidden states, on every stage."""
    return _per_tensor_rank(lambda x: jax.lax.psum(x, PIPE), h_BSD)


def _per_tensor_rank(function: Callable[[jax.Array], jax.Array], h_BSD: jax.Array) -> jax.Array:
    return tensor_shard_map(function, in_specs=(PartitionSpec(None, TENSOR),), out_specs=PartitionSpec(None, TENSOR))(h_BSD)


def _scan_group(tick: Callable, group: Group, rows: dict[str, Any], carry: Carry) -> Carry:
    """The group's runs one after another, all of it `repeat` times."""

    def once(carry, parts):
        for run, part in zip(group.runs, parts, strict=True):
            carry, _ = jax.lax.scan(partial(tick, run), carry, part)
        return carry, None

    def part_of(run: Run) -> dict[str, Any]:
        at = run.start + group.length * np.arange(group.repeat)[:, None] + np.arange(run.length)
        return jax.tree.map(lambda column: column[at], rows)

    parts = [part_of(run) for run in group.runs]
    if group.repeat == 1:
        return once(carry, jax.tree.map(lambda x: x[0], parts))[0]
    return jax.lax.scan(once, carry, parts)[0]


def table_rows(schedule: Schedule) -> dict[str, Any]:
    """The table as arrays with a leading tick dim: what each stage does, and the microbatch that all stages look up (embed_mb),
    take the loss of (head_mb) and add to the embedding's gradient (embed_backward_mb: it left the first stage's backward pass a
    tick ago).
    """

    def entry(microbatch: np.ndarray) -> dict[str, np.ndarray]:
        return {"microbatch": np.maximum(microbatch, 0), "valid": microbatch >= 0}

    return {
        "forward": asdict(schedule.forward),
        "backward": asdict(schedule.backward),
        "embed_mb": entry(schedule.embed_mb),
        "head_mb": entry(schedule.head_mb),
        "embed_backward_mb": entry(schedule.embed_backward_mb),
        "finished": schedule.finished,
        "head_slot": schedule.head_slot,
    }
