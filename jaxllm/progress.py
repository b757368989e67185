"""What this process is doing, for those who watch it: the watchdog, the line to the other processes, the log of stragglers.

    with progress.phase("compile"): ...
    progress.at_step(12)
    progress.now()  # Snapshot(phase="step", step=12, seconds=0.3)
    progress.last_steps()  # what the last 50 steps took
    progress.totals()["save"]  # seconds spent saving since the process began

One thread, the main one, says what it does; any thread may look. Before the first phase it is "start".
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
"""meet: waits for the other processes to start, which has a time limit of its own."""
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Snapshot:
    phase: str
    step: int
    """Steps begun, over the whole run; 0 before the first."""
    seconds: float
    """How long the phase has gone on; a step that follows a step begins it anew, and so does coming back to an outer phase."""

    def __str__(self) -> str:
        """Such as "step 12" or "save after step 12": fits behind "during"."""
        if self.phase == "step":
            return f"step {self.step}" if self.step else "start"
        return f"{self.phase} after step {self.step}" if self.step else self.phase


class StepTime(NamedTuple):
    """What one step took this process, in seconds. Saving, evaluation and compilation between two steps are not in it."""

    step_s: float
    """Without the wait for data."""
    data_s: float
    """Waiting for its batch."""
    wait_s: float
    """Of step_s, waiting for devices."""


KEPT_STEPS = 50
_lock = threading.Lock()
_phase, _step, _since_s = "start", 0, time.monotonic()
_spent_s = {"step": 0.0, "data": 0.0, "wait": 0.0}
"""Since the last at_step. The batch of a step is waited for before it begins."""
_total_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
_data_s = 0.0
_in_a_row = 0
_steps: deque[StepTime] = deque(maxlen=KEPT_STEPS)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """What is done within; nests, and at the end the outer phase goes on, its seconds from 0.

    Raises:
      ValueError: `name` is none of PHASES.
    """
    if name not in PHASES:
        raise ValueError(f"{name!r} is none of the phases {', '.join(PHASES)}")
    outer = _enter(name)
    try:
        yield
    finally:
        _enter(outer)


@contextmanager
def waiting() -> Iterator[None]:
    """Round what waits for the devices within a step."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _spent_s["wait"] += time.monotonic() - began_s


def at_step(step: int) -> None:
    """A step begins: `step` were begun, this one included, in this phase or in the one that goes on round it."""
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
    """The steps that follow are of another kind: those before say nothing of how long they take."""
    global _in_a_row
    with _lock:
        _in_a_row = 0
        _steps.clear()


def now() -> Snapshot:
    with _lock:
        return Snapshot(_phase, _step, time.monotonic() - _since_s)


def last_steps() -> list[StepTime]:
    """The last KEPT_STEPS steps that have ended, oldest first; without the first of a start, which is no usual one."""
    with _lock:
        return list(_steps)


def totals() -> dict[str, float]:
    """Seconds that this process has spent in each phase, the present one up to now; of a phase within another, the inner."""
    with _lock:
        # Not _pass: how long the phase has gone on is the watchdog's.
        found = dict(_total_s)
        found[_phase] += time.monotonic() - _since_s
        return found


def show_stacks() -> None:
    """What each Python thread is doing, on the process's own standard error: notebooks and tests put another in its place."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


def _enter(name: str) -> str:
    """Returns the phase before."""
    global _phase
    with _lock:
        _pass()
        before, _phase = _phase, name
    return before


def _pass() -> None:
    """Books the time since the last change."""
    global _since_s
    now_s = time.monotonic()
    if _phase in _spent_s:
        _spent_s[_phase] += now_s - _since_s
    _total_s[_phase] += now_s - _since_s
    _since_s = now_s
