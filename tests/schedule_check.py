"""Proof of a pipeline's table (jaxllm/pipeline_schedule.py): every microbatch goes once through every virtual stage, and no
value is lost. It follows the values tick by tick, and does not depend on how the table was built.
"""

from typing import Any

import numpy as np

from jaxllm.pipeline_schedule import Run, Schedule, Units, microbatch_on_last


class WrongTable(ValueError):
    """A table that would compute wrong results."""


def check(schedule: Schedule) -> None:
    """Raises WrongTable, whose message names tick, stage, chunk and microbatch."""
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
        raise WrongTable(f"Tick {t}, stage {i}: backward, in a schedule without slots for residuals.")
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
        raise WrongTable(f"{name} has the shape {table.shape} instead of {shape}.")
    for place in np.argwhere((table < 0) | (table >= limit))[:1]:
        where = ", ".join(f"{word} {number}" for word, number in zip(("Tick", "stage"), place, strict=False))
        raise WrongTable(f"{where}: {name} is {table[tuple(place)]}, not from 0 to {limit - 1}.")


def _ticks_of(schedule: Schedule, units: Units, way: str) -> np.ndarray:
    """int [PV, M]: the tick in which each virtual stage runs each microbatch, exactly once."""
    P = schedule.stages
    ticks = np.full((P * schedule.virtual_stages, schedule.microbatches), -1)
    for t, i in np.argwhere(units.valid):
        c, m = units.chunk[t, i], units.microbatch[t, i]
        if ticks[c * P + i, m] >= 0:
            raise WrongTable(f"{_place(t, i, c, m)}: {way} again, after tick {ticks[c * P + i, m]}.")
        ticks[c * P + i, m] = t
    for k, m in np.argwhere(ticks < 0)[:1]:
        raise WrongTable(f"Stage {k % P}, chunk {k // P}, microbatch {m}: {way} in no tick.")
    return ticks


def _check_handed_on(schedule: Schedule, ticks: np.ndarray, way: str, source: int) -> None:
    """Each unit runs one tick after the same microbatch on virtual stage k + source, because a message is kept for one tick."""
    P, end = schedule.stages, 0 if source < 0 else -1
    made = np.roll(ticks, -source, axis=0)
    made[end] = ticks[end] - 1
    for k, m in np.argwhere(ticks != made + 1)[:1]:
        where = _place(ticks[k, m], k % P, k // P, m)
        raise WrongTable(f"{where}: {way} takes what stage {(k + source) % P} made in tick {made[k, m]}, not one tick before.")


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
                raise WrongTable(f"{where}: residuals in slot {fresh} are overwritten before their backward.")
            if forward.valid[t, stage]:
                held[fresh] = int(forward.chunk[t, stage]), int(forward.microbatch[t, stage])
        if backward.valid[t, stage]:
            slot, unit = int(backward.slot[t, stage]), (int(backward.chunk[t, stage]), int(backward.microbatch[t, stage]))
            if held.pop(slot, None) != unit or (writes[t] and slot == fresh):
                raise WrongTable(f"{_place(t, stage, *unit)}: backward finds no residuals of an earlier tick in slot {slot}.")


def _check_outputs(schedule: Schedule) -> None:
    """Each head finds its microbatch's last output, written in an earlier tick and not overwritten since."""
    last, stored = schedule.virtual_stages - 1, microbatch_on_last(schedule.forward, schedule.virtual_stages)
    writes: Any = schedule.forward.valid.any(axis=1)
    held: dict[int, int] = {}
    for t, head in enumerate(schedule.head_mb.tolist()):
        taken, finished = int(schedule.head_slot[t]), int(schedule.finished[t])
        if head >= 0 and held.pop(taken, None) != head:
            where = _place(t, schedule.stages - 1, last, head)
            raise WrongTable(f"{where}: the head finds no output of an earlier tick in finished slot {taken}.")
        if writes[t]:
            if finished in held:
                where = _place(t, schedule.stages - 1, last, held[finished])
                raise WrongTable(f"{where}: the output in finished slot {finished} is overwritten before its head.")
            if stored[t] >= 0:
                held[finished] = int(stored[t])
    for slot, m in held.items():
        raise WrongTable(f"Stage {schedule.stages - 1}, chunk {last}, microbatch {m}: no head takes finished slot {slot}.")


def _check_runs(schedule: Schedule) -> None:
    """The runs cover every tick once, in order, and no run omits work of its ticks."""
    of_tick: list[Run] = []
    for group in schedule.runs:
        for repetition in range(group.repeat):
            for run in group.runs:
                if run.start + repetition * group.length != len(of_tick) or run.length < 1:
                    raise WrongTable(f"Tick {len(of_tick)}: no run starts there, but one of {run.length} from {run.start}.")
                of_tick += [run] * run.length
    if len(of_tick) != schedule.ticks:
        raise WrongTable(f"Tick {min(len(of_tick), schedule.ticks)}: runs cover {len(of_tick)} ticks of {schedule.ticks}.")
    forward, backward, embed, head = np.array([run.work for run in of_tick]).T
    for way, flag, units in (("forward", forward, schedule.forward), ("backward", backward, schedule.backward)):
        for t in np.flatnonzero(flag != units.valid.any(axis=1))[:1]:
            raise WrongTable(f"Tick {t}: the table and the run from tick {of_tick[t].start} disagree on {way}.")
    for what, microbatch, done, stage, chunk in (
        ("look-up", schedule.embed_mb, forward & embed, 0, 0),
        ("gradient of the embedding", schedule.embed_backward_mb[:-1], backward & embed, 0, 0),
        ("head", schedule.head_mb, head, schedule.stages - 1, schedule.virtual_stages - 1),
    ):
        for t in np.flatnonzero((microbatch >= 0) & ~done)[:1]:
            where = _place(t, stage, chunk, microbatch[t])
            raise WrongTable(f"{where}: the run from tick {of_tick[t].start} leaves out the {what}.")
