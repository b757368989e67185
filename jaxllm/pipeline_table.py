"""The table of a pipeline schedule: what each stage does in each tick, and the runs of ticks that an executor loops over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, eq=False)
class Units:
    """Work of one direction: every array is [ticks, stages]. Where not valid, chunk and microbatch have no meaning."""

    chunk: np.ndarray
    """int32, below V."""
    microbatch: np.ndarray
    """int32, below M."""
    slot: np.ndarray
    """int32, below Schedule.slots: the slot written (forward) or read (backward). Forward writes also where not valid."""
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
