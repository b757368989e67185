"""Current phase and step of this process, for the watchdog, the peer monitor and the straggler log.

    with progress.phase("compile"): ...
    progress.at_step(12)
    progress.now()  # Snapshot(phase="step", step=12, seconds=0.3)
    progress.last_steps()  # durations of the last 50 steps
    progress.totals()["save"]  # seconds spent saving since the process started

Only the main thread sets the phase; any thread may read it. The first phase is "start".
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Phase = Literal["start", "meet", "compile", "data", "step", "evaluate", "save", "finish"]
"""meet: waits for the other processes to start, which has its own time limit."""
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Snapshot:
    phase: str
    step: int
    """Steps begun over the complete run; 0 before the first."""
    seconds: float
    """Time since the phase began. It restarts at each step, and on the return from an inner to an outer phase."""

    def __str__(self) -> str:
        """Text such as "step 12" or "save after step 12", which fits after "during"."""
        if self.phase == "step":
            return f"step {self.step}" if self.step else "start"
        return f"{self.phase} after step {self.step}" if self.step else self.phase


class StepTime(NamedTuple):
    """Durations of one step in this process, in seconds. They exclude saving, evaluation and compilation between two steps."""

    step_s: float
    """Duration without the wait for data."""
    data_s: float
    """Time spent waiting for its batch."""
    wait_s: float
    """Part of step_s spent waiting for devices."""


KEPT_STEPS = 50
_lock = threading.Lock()
_phase, _step, _since_s = "start", 0, time.monotonic()
_spent_s = {"step": 0.0, "data": 0.0, "wait": 0.0}
"""Seconds since the last at_step. The wait for a step's batch comes before the step begins."""
_total_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
_data_s = 0.0
_in_a_row = 0
_steps: deque[StepTime] = deque(maxlen=KEPT_STEPS)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Sets the phase within the block. Phases nest; afterwards the outer phase continues, with its seconds from 0.

    Raises:
      ValueError: `name` is not one of PHASES.
    """
    if name not in PHASES:
        raise ValueError(f"{name!r} is not one of the phases {', '.join(PHASES)}")
    outer = _enter(name)
    try:
        yield
    finally:
        _enter(outer)


@contextmanager
def waiting() -> Iterator[None]:
    """Counts the time in the block as waiting for the devices within a step."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _spent_s["wait"] += time.monotonic() - began_s


def at_step(step: int) -> None:
    """Records that a step begins: `step` steps have begun, including this one, in this phase or in the phase around it."""
    global _step, _data_s, _in_a_row
    with _lock:
        _pass()
        _in_a_row = _in_a_row + 1 if step == _step + 1 else 1
        if _in_a_row == 1:
            _steps.clear()
        elif _in_a_row > 2:
            _steps.append(StepTime(_spent_s["step"], _data_s, _spent_s["wait"]))
        _step, _data_s = step, _spent_s["data"]
        _spent_s.update(step=0.0, data=0.0, wait=0.0)


def forget_steps() -> None:
    """Drops the recorded step durations, because the following steps have another size."""
    global _in_a_row
    with _lock:
        _in_a_row = 0
        _steps.clear()


def now() -> Snapshot:
    with _lock:
        return Snapshot(_phase, _step, time.monotonic() - _since_s)


def last_steps() -> list[StepTime]:
    """The last KEPT_STEPS completed steps, oldest first. The first step after a start is left out, as it is not typical."""
    with _lock:
        return list(_steps)


def totals() -> dict[str, float]:
    """Seconds that this process has spent in each phase, including the current one. Nested time counts for the inner phase."""
    with _lock:
        # Not _pass: the time since the phase began belongs to the watchdog.
        found = dict(_total_s)
        found[_phase] += time.monotonic() - _since_s
        return found


def show_stacks() -> None:
    """Prints the stack of each Python thread to the process's real standard error, which notebooks and tests replace."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


def _enter(name: str) -> str:
    """Enters a phase and returns the previous one."""
    global _phase
    with _lock:
        _pass()
        before, _phase = _phase, name
    return before


def _pass() -> None:
    """Adds the time since the last change to the current phase."""
    global _since_s
    now_s = time.monotonic()
    if _phase in _spent_s:
        _spent_s[_phase] += now_s - _since_s
    _total_s[_phase] += now_s - _since_s
    _since_s = now_s
