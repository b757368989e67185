"""Pipeline schedules as tables: the work of each stage in each tick, computed and verified before compilation.

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
Megatron-LM"), all stages in lockstep. Plain Python and numpy, no JAX.
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
    """Work of one direction: every array is [ticks, stages]. Where not valid, chunk and microbatch have no meaning."""

    chunk: np.ndarray
    """int32, below V."""
    microbatch: np.ndarray
    """int32, below M."""
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
    """A pipeline that cannot be scheduled as requested, or a table that would compute wrong results."""


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
    """The table of a training step, verified.

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
    outputs = _allot(microbatch_on_last(forward, V), microbatch_on_last(backward, V), writes, read_first=True)
    slots = _count(forward.slot, backward.slot)
    schedule = Schedule(name, P, V, M, forward, backward, slots, *outputs, _count(*outputs))
    check(schedule)
    return schedule


def forward_only(stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The table of an evaluation, verified: forward as in 1f1b or interleaved, each loss a tick later, no backward, no slots.

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
    schedule = Schedule(name, P, V, M, forward, backward, 0, *outputs, _count(*outputs))
    check(schedule)
    return schedule


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


def _count(written: np.ndarray, read: np.ndarray) -> int:
    return 1 + int(max(written.max(), read.max()))


# -------------------------------------------------------------------------------------------------------------- checking


def check(schedule: Schedule) -> None:
    """Proves that the table takes every microbatch once through every virtual stage and loses no value.

    It follows the values tick by tick and does not depend on how the table was built.

    Raises:
      ScheduleError: the table is wrong; the message names tick, stage, chunk and microbatch.
    """
    _check_ranges(schedule)
    forward = _ticks_of(schedule, schedule.forward, "forward")
    _check_handed_on(schedule, forward, "forward", source=-1)
    if schedule.has_backward:
        backward = _ticks_of(schedule, schedule.backward, "backward")
        _check_handed_on(schedule, backward, "backward", source=1)
        for i in range(schedule.stages):
            _check_residuals(schedule, i)
    elif schedule.backward.valid.any():
        t, i = np.argwhere(schedule.backward.valid)[0]
        raise ScheduleError(f"Tick {t}, stage {i}: backward, in a schedule without slots for residuals.")
    _check_outputs(schedule)
    _check_runs(schedule)


def _place(tick: Any, stage: Any, chunk: Any, microbatch: Any) -> str:
    return f"Tick {tick}, stage {stage}, chunk {chunk}, microbatch {microbatch}"


def _check_ranges(schedule: Schedule) -> None:
    ticks, P = schedule.ticks, schedule.stages
    for way, units in (("forward", schedule.forward), ("backward", schedule.backward)):
        limits = (schedule.virtual_stages, schedule.microbatches, max(schedule.slots, 1), 2)
        for (name, table), limit in zip(vars(units).items(), limits, strict=True):
            _check_range(f"{way}.{name}", table, (ticks, P), limit)
    for name in ("finished", "head_slot"):
        _check_range(name, getattr(schedule, name), (ticks,), schedule.finished_slots)


def _check_range(name: str, table: np.ndarray, shape: tuple[int, ...], limit: int) -> None:
    if table.shape != shape:
        raise ScheduleError(f"{name} has the shape {table.shape} instead of {shape}.")
    for place in np.argwhere((table < 0) | (table >= limit))[:1]:
        where = ", ".join(f"{word} {number}" for word, number in zip(("Tick", "stage"), place, strict=False))
        raise ScheduleError(f"{where}: {name} is {table[tuple(place)]}, not from 0 to {limit - 1}.")


def _ticks_of(schedule: Schedule, units: Units, way: str) -> np.ndarray:
    """int [PV, M]: the tick in which each virtual stage runs each microbatch, exactly once."""
    P = schedule.stages
    ticks = np.full((P * schedule.virtual_stages, schedule.microbatches), -1)
    for t, i in np.argwhere(units.valid):
        c, m = units.chunk[t, i], units.microbatch[t, i]
        if ticks[c * P + i, m] >= 0:
            raise ScheduleError(f"{_place(t, i, c, m)}: {way} again, after tick {ticks[c * P + i, m]}.")
        ticks[c * P + i, m] = t
    for k, m in np.argwhere(ticks < 0)[:1]:
        raise ScheduleError(f"Stage {k % P}, chunk {k // P}, microbatch {m}: {way} in no tick.")
    return ticks


def _check_handed_on(schedule: Schedule, ticks: np.ndarray, way: str, source: int) -> None:
    """Each unit runs one tick after the same microbatch on virtual stage k + source, because a message is kept for one tick."""
    P, end = schedule.stages, 0 if source < 0 else -1
    made = np.roll(ticks, -source, axis=0)
    made[end] = ticks[end] - 1
    for k, m in np.argwhere(ticks != made + 1)[:1]:
        where = _place(ticks[k, m], k % P, k // P, m)
        raise ScheduleError(
            f"{where}: {way} takes what stage {(k + source) % P} made in tick {made[k, m]}, not one tick before."
        )


def _check_residuals(schedule: Schedule, stage: int) -> None:
    """Each backward finds its forward's residuals, written in an earlier tick and not overwritten since."""
    forward, backward = schedule.forward, schedule.backward
    writes: Any = forward.valid.any(axis=1)
    held: dict[int, tuple[int, int]] = {}
    fresh = None
    for t in range(schedule.ticks):
        if writes[t]:
            fresh = int(forward.slot[t, stage])
            if fresh in held:
                where = _place(t, stage, *held[fresh])
                raise ScheduleError(f"{where}: residuals in slot {fresh} are overwritten before their backward.")
            if forward.valid[t, stage]:
                held[fresh] = int(forward.chunk[t, stage]), int(forward.microbatch[t, stage])
        if backward.valid[t, stage]:
            slot, unit = int(backward.slot[t, stage]), (int(backward.chunk[t, stage]), int(backward.microbatch[t, stage]))
            if held.pop(slot, None) != unit or (writes[t] and slot == fresh):
                raise ScheduleError(
                    f"{_place(t, stage, *unit)}: backward finds no residuals of an earlier tick in slot {slot}."
                )


def _check_outputs(schedule: Schedule) -> None:
    """Each head finds its microbatch's last output, written in an earlier tick and not overwritten since."""
    last, stored = schedule.virtual_stages - 1, microbatch_on_last(schedule.forward, schedule.virtual_stages)
    writes: Any = schedule.forward.valid.any(axis=1)
    held: dict[int, int] = {}
    for t, head in enumerate(schedule.head_mb.tolist()):
        taken, finished = int(schedule.head_slot[t]), int(schedule.finished[t])
        if head >= 0 and held.pop(taken, None) != head:
            where = _place(t, schedule.stages - 1, last, head)
            raise ScheduleError(f"{where}: the head finds no output of an earlier tick in finished slot {taken}.")
        if writes[t]:
            if finished in held:
                where = _place(t, schedule.stages - 1, last, held[finished])
                raise ScheduleError(f"{where}: the output in finished slot {finished} is overwritten before its head.")
            if stored[t] >= 0:
                held[finished] = int(stored[t])
    for slot, m in held.items():
        raise ScheduleError(f"Stage {schedule.stages - 1}, chunk {last}, microbatch {m}: no head takes finished slot {slot}.")


def _check_runs(schedule: Schedule) -> None:
    """The runs cover every tick once, in order, and no run omits work of its ticks."""
    of_tick: list[Run] = []
    for group in schedule.runs:
        for repetition in range(group.repeat):
            for run in group.runs:
                if run.start + repetition * group.length != len(of_tick) or run.length < 1:
                    raise ScheduleError(f"Tick {len(of_tick)}: no run starts there, but one of {run.length} from {run.start}.")
                of_tick += [run] * run.length
    if len(of_tick) != schedule.ticks:
        raise ScheduleError(f"Tick {min(len(of_tick), schedule.ticks)}: runs cover {len(of_tick)} ticks of {schedule.ticks}.")
    forward, backward, embed, head = np.array([run.work for run in of_tick]).T
    for way, flag, units in (("forward", forward, schedule.forward), ("backward", backward, schedule.backward)):
        for t in np.flatnonzero(flag != units.valid.any(axis=1))[:1]:
            raise ScheduleError(f"Tick {t}: the table and the run from tick {of_tick[t].start} disagree on {way}.")
    for what, microbatch, done, stage, chunk in (
        ("look-up", schedule.embed_mb, forward & embed, 0, 0),
        ("gradient of the embedding", schedule.embed_backward_mb[:-1], backward & embed, 0, 0),
        ("head", schedule.head_mb, head, schedule.stages - 1, schedule.virtual_stages - 1),
    ):
        for t in np.flatnonzero((microbatch >= 0) & ~done)[:1]:
            where = _place(t, stage, chunk, microbatch[t])
            raise ScheduleError(f"{where}: the run from tick {of_tick[t].start} leaves out the {what}.")
