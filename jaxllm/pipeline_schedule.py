"""Pipeline schedules as tables: the work of each stage in each tick, computed before compilation.

    schedule = make_schedule("1f1b", stages=4, microbatches=8)
    schedule.forward.microbatch[t, i]      microbatch of stage i's forward in tick t, where schedule.forward.valid[t, i]
    schedule.slots                         number of chunks' residuals that every stage must hold; schedule.live gives the times
    schedule.runs                          ticks of equal work, in order: an executor scans over them

P stages, V virtual stages (chunks of layers) on each, M microbatches. Chunk c of stage i is virtual stage c P + i. All stages
tick together. The order within tick t is

    the backward message of tick t-1 is sent one stage down, and the embedding's gradient of that tick is computed
    the head turns the output in slot head_slot[t] into loss and gradient, if the last virtual stage runs backward in t
    each stage runs forward on the output of the virtual stage before it in t-1 (the first: on embeddings), writes its residuals
        to forward.slot[t, i], and the last stage its output to finished[t]; invalid ticks write garbage to these slots too
    each stage runs backward on the gradient from the virtual stage after it in t-1 (the last: on the head's gradient) and
        on the residuals in backward.slot[t, i]

so the loss of a microbatch is computed one tick after its last forward. Forward and backward of a tick can then overlap.
Interleaving follows Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM"), all stages in lockstep. Plain Python and numpy, no JAX. tests/schedule_check.py proves tables.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.config.types import GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES

# -------------------------------------------------------------------------------------------------------------- the table
# The table of a pipeline schedule: what each stage does in each tick, and the runs of ticks that an executor loops over.


@dataclass(frozen=True, eq=False)
class Units:
    """Work of one direction: every array is [ticks, stages]. Where not valid, chunk has no meaning."""

    chunk: np.ndarray
    """int32, below V."""
    microbatch: np.ndarray
    """int32, below M. Where a backward pass is not valid, the one whose residuals are in its slot."""
    slot: np.ndarray
    """int32, below Schedule.slots: the slot written (forward) or read (backward), also where not valid."""
    valid: np.ndarray
    """bool."""


@dataclass(frozen=True)
class Run:
    """Consecutive ticks with the same kinds of work."""

    start: int
    """First tick; in a repeated group, that of the first repetition."""
    length: int
    forward: bool
    backward: bool
    embed: bool
    """Embeddings are looked up (if forward), and the previous tick's gradients go into the embedding (if backward)."""
    head: bool

    @property
    def work(self) -> tuple[bool, bool, bool, bool]:
        return self.forward, self.backward, self.embed, self.head


@dataclass(frozen=True)
class Group:
    """Runs executed one after another, `repeat` times."""

    repeat: int
    runs: tuple[Run, ...]

    @property
    def length(self) -> int:
        """Ticks of one repetition."""
        return sum(run.length for run in self.runs)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A complete step: the result of make_schedule() and forward_only()."""

    name: str
    stages: int
    virtual_stages: int
    microbatches: int
    forward: Units
    backward: Units
    slots: int
    """Residual slots that every stage needs, each for one chunk and microbatch; 0 without a backward pass."""
    finished: np.ndarray
    """int32 [ticks]: slot for the last stage's output, in every tick in which any stage runs forward."""
    head_slot: np.ndarray
    """int32 [ticks]: slot from which the head reads, before `finished` is written."""
    finished_slots: int

    @property
    def ticks(self) -> int:
        return len(self.finished)

    @property
    def has_backward(self) -> bool:
        """False for forward_only()."""
        return self.slots > 0

    @property
    def forward_units(self) -> int:
        """Ticks in which any stage runs forward."""
        return int(self.forward.valid.any(axis=1).sum())

    @property
    def backward_units(self) -> int:
        """Ticks in which any stage runs backward."""
        return int(self.backward.valid.any(axis=1).sum())

    @property
    def head_mb(self) -> np.ndarray:
        """int32 [ticks]: the microbatch whose loss is computed, -1 for none."""
        if self.has_backward:
            return microbatch_on_last(self.backward, self.virtual_stages)
        return one_tick_later(microbatch_on_last(self.forward, self.virtual_stages))

    @property
    def embed_mb(self) -> np.ndarray:
        """int32 [ticks]: the microbatch whose embeddings are looked up for the first stage, -1 for none."""
        return microbatch_on_first(self.forward)

    @property
    def embed_backward_mb(self) -> np.ndarray:
        """int32 [ticks + 1]: the microbatch that left the first stage's backward in the previous tick and whose gradient goes
        into the embedding, -1 for none. The last entry belongs to the time after the last tick."""
        made = microbatch_on_first(self.backward)
        return np.concatenate([np.full_like(made[:1], -1), made])

    @property
    def live(self) -> np.ndarray:
        """int [ticks, stages]: slots in use, from the tick that writes them to the tick that reads them, inclusive."""
        if not self.has_backward:
            return np.zeros(self.forward.valid.shape, int)
        read_before = self.backward.valid.cumsum(axis=0) - self.backward.valid
        return self.forward.valid.cumsum(axis=0) - read_before

    @cached_property
    def runs(self) -> tuple[Group, ...]:
        return tuple(_fold(list(_runs(self))))


def microbatch_on_last(units: Units, V: int) -> np.ndarray:
    """int32 [ticks]: the microbatch on the last virtual stage, -1 for none."""
    return np.where(units.valid & (units.chunk == V - 1), units.microbatch, np.int32(-1))[:, -1]


def microbatch_on_first(units: Units) -> np.ndarray:
    """int32 [ticks]: the microbatch on the first virtual stage, -1 for none."""
    return np.where(units.valid & (units.chunk == 0), units.microbatch, np.int32(-1))[:, 0]


def one_tick_later(microbatches: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full_like(microbatches[:1], -1), microbatches[:-1]])


def _runs(schedule: Schedule) -> Iterator[Run]:
    """The longest ranges of ticks with equal work.

    From the first loss to the last forward, lookups, losses and the embedding's gradient occur only in the first P of every PV
    ticks: those ticks do all three, the others none. Outside that range, lookups and the embedding's gradient run in every
    tick: a few more all-reduces, but fewer bodies to compile.
    """
    due = schedule.head_mb >= 0
    forward, backward = (units.valid.any(axis=1) for units in (schedule.forward, schedule.backward))
    t = np.arange(schedule.ticks)
    steady = forward & (t >= due.argmax())
    vocabulary = t % (schedule.stages * schedule.virtual_stages) < schedule.stages
    embed, head = np.where(steady, vocabulary, forward | backward), np.where(steady, vocabulary, due)
    work = np.stack([forward, backward, embed, head], axis=1)
    changes = np.flatnonzero((work[1:] != work[:-1]).any(axis=1)) + 1
    for start, end in pairwise([0, *changes.tolist(), schedule.ticks]):
        yield Run(start, end - start, *work[start].tolist())


def _fold(runs: list[Run]) -> Iterator[Group]:
    """Groups pairs of runs that repeat consecutively; every other run is a group of its own."""
    shapes = [(run.length, run.work) for run in runs]
    j = 0
    while j < len(runs):
        pair, repeat = shapes[j : j + 2], 1
        while len(pair) == 2 and shapes[j + 2 * repeat : j + 2 * repeat + 2] == pair:
            repeat += 1
        size = 1 if repeat == 1 else 2
        yield Group(repeat, tuple(runs[j : j + size]))
        j += size * repeat


# ------------------------------------------------------------------------------------------------------------- idle stages


class ScheduleError(ConfigError):
    """A pipeline that cannot be scheduled as requested."""


USUAL_IDLE = 0.1
"""An idle share that is usually acceptable; reports give the number of microbatches that it needs."""


def idle_share(stages: int, microbatches: int, virtual_stages: int = 1) -> float:
    """Share of a step in which a stage is idle: (P-1) / (MV + P-1), for every schedule."""
    return (stages - 1) / (microbatches * virtual_stages + stages - 1)


def microbatches_for(idle: float, stages: int, virtual_stages: int = 1) -> int:
    """The smallest M whose idle share is below `idle`; a multiple of P where virtual stages need one.

    Raises:
      ScheduleError: no number of microbatches is enough.
    """
    if not idle > 0:
        raise ScheduleError(f"No number of microbatches brings the idle share of a pipeline below {idle}: ask for more than 0.")
    multiple = stages if virtual_stages > 1 else 1
    # Solve for M and round down, then increase M until the public formula holds.
    M = multiple * max(1, math.floor((stages - 1) * (1 / idle - 1) / virtual_stages / multiple))
    while idle_share(stages, M, virtual_stages) >= idle:
        M += multiple
    return M


# ---------------------------------------------------------------------------------------------------------------- making


def make_schedule(name: str, stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The table of a training step.

    gpipe: all forward, then all backward. 1f1b and interleaved: stage i runs its forward unit t - i and its backward unit
    t - PV - (P-1-i) in tick t. A stage's units are rounds of P microbatches through chunk 0, 1, ..., backward V-1, V-2, ...

    Slots: P V + P for 1f1b and interleaved. With few microbatches, and always for gpipe, at most M V + 1: all that a stage can
    hold, plus one that takes the writes of a waiting stage (the only stage of P = 1 never waits).

    Raises:
      ScheduleError: an unknown name, virtual stages that the schedule does not support, or microbatches that do not divide.
    """
    P, V, M = stages, virtual_stages, microbatches
    _check_sizes(name, P, V, M)
    first_backward = M + P - 1 if name == GPIPE else P * V
    t = np.arange(first_backward + M * V + P - 1)[:, None]
    forward = _dealt(t - np.arange(P), P, V, M)
    backward = _dealt(t - first_backward - np.arange(P)[::-1], P, V, M, backward=True)
    writes: Any = forward.valid.any(axis=1)
    for i in range(P):
        stored, read = (np.where(units.valid, units.chunk * M + units.microbatch, -1)[:, i] for units in (forward, backward))
        forward.slot[:, i], backward.slot[:, i] = _allot(stored, read, writes)
        _complete(forward, backward, writes, i)
    outputs = _allot(microbatch_on_last(forward, V), microbatch_on_last(backward, V), writes, read_first=True)
    slots = _count(forward.slot, backward.slot)
    return Schedule(name, P, V, M, forward, backward, slots, *outputs, _count(*outputs))


def forward_only(stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The table of an evaluation: forward as in 1f1b or interleaved, each loss a tick later, no backward, no slots.

    Raises:
      ScheduleError: see make_schedule().
    """
    P, V, M = stages, virtual_stages, microbatches
    name = INTERLEAVED if V > 1 else ONE_F_ONE_B
    _check_sizes(name, P, V, M)
    forward = _dealt(np.arange(M * V + P)[:, None] - np.arange(P), P, V, M)
    backward = Units(*(np.zeros_like(array) for array in vars(forward).values()))
    stored = microbatch_on_last(forward, V)
    writes: Any = forward.valid.any(axis=1)
    outputs = _allot(stored, one_tick_later(stored), writes, read_first=True)
    return Schedule(name, P, V, M, forward, backward, 0, *outputs, _count(*outputs))


def _check_sizes(name: str, P: int, V: int, M: int) -> None:
    if name not in SCHEDULES:
        raise ScheduleError(f"There is no pipeline schedule {name}: use {', '.join(SCHEDULES)}.")
    if min(P, V, M) < 1:
        raise ScheduleError(f"stages={P}, virtual_stages={V}, microbatches={M} is not a pipeline: each must be at least 1.")
    if name == INTERLEAVED and V == 1:
        raise ScheduleError("schedule=interleaved needs virtual_stages of at least 2: set that, or schedule=1f1b.")
    if name != INTERLEAVED and V > 1:
        raise ScheduleError(f"virtual_stages={V} belongs to schedule=interleaved, not {name}: change one of them.")
    if V > 1 and M % P:
        nearest = " or ".join(str(near) for near in (M // P * P, (M // P + 1) * P) if near)
        raise ScheduleError(
            f"schedule=interleaved takes microbatches in rounds of one per stage, and {M} is not a multiple of {P} stages: "
            f"make it {nearest} (global_batch_sequences / (data ranks x microbatch_sequences))."
        )


def _dealt(place: np.ndarray, P: int, V: int, M: int, backward: bool = False) -> Units:
    """Units by their index `place` [ticks, stages] in the stage's order; valid where 0 <= place < MV."""
    valid = (place >= 0) & (place < M * V)
    place = np.where(valid, place, 0)
    chunk = place % (P * V) // P
    microbatch = place // (P * V) * P + place % P
    if backward:
        chunk = V - 1 - chunk
    return Units(chunk.astype(np.int32), microbatch.astype(np.int32), np.zeros(place.shape, np.int32), valid)


def _allot(stored: np.ndarray, read: np.ndarray, writes: np.ndarray, read_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(slot written, slot read), int32 [ticks]: every write goes into the smallest free slot, garbage too.

    Args:
      stored: [ticks], an id for each value to keep, -1 for none.
      read: [ticks], the id that is read, for the only time; -1 for none.
      writes: bool [ticks], whether anything is written, kept or not.
      read_first: whether a tick reads before it writes, so that one slot can be read and written in the same tick.
    """
    slots = np.zeros((2, len(stored)), np.int32)
    free, used, held = [], 0, {}
    for t, (new, old) in enumerate(zip(stored.tolist(), read.tolist(), strict=True)):
        if old >= 0:
            slots[1, t] = held.pop(old)
        if old >= 0 and read_first:
            heapq.heappush(free, int(slots[1, t]))
        if writes[t]:
            if not free:
                free, used = [used], used + 1
            slots[0, t] = free[0]
            if new >= 0:
                held[new] = heapq.heappop(free)
        if old >= 0 and not read_first:
            heapq.heappush(free, int(slots[1, t]))
    return slots[0], slots[1]


def _complete(forward: Units, backward: Units, writes: np.ndarray, stage: int) -> None:
    """Ticks whose backward pass is not valid get the microbatch that was written last to their slot, be it garbage. With the
    documents of another one, scores beyond its log-sum-exp overflow, and zero times infinity is no zero."""
    held, reads = {}, np.asarray(backward.valid.any(axis=1))
    for t in range(len(writes)):
        if writes[t]:
            held[int(forward.slot[t, stage])] = forward.microbatch[t, stage]
        if reads[t] and not backward.valid[t, stage]:
            backward.microbatch[t, stage] = held[int(backward.slot[t, stage])]


def _count(written: np.ndarray, read: np.ndarray) -> int:
    return 1 + int(max(written.max(), read.max()))
