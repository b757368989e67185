"""The phase, step and step times of this process. The watchdog, the peer monitor and the straggler log read them.

    with progress.phase("compile"): ...
    progress.at_step(12)
    progress.now()  # Snapshot(phase="step", step=12, seconds=0.3)
    progress.last_steps()  # times of the last 50 steps
    progress.totals()["save"]  # seconds spent saving since the process started

One thread at a time sets the phase: while it is inside one, phases of other threads do not count. Any thread may read it. The
phase before the first one is "start".
"""

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxllm.cluster.socket_messages import Elapsed
from jaxllm.untrusted import Whole

Phase = Literal[
    "start", "meet", "devices", "dataset", "initialize", "restore", "compile", "data", "step", "evaluate", "save", "finish"
]
"""meet: wait for the other processes to start, which has its own time limit. devices: JAX finds them. dataset: open the texts.
initialize: the state of step 0. data: wait for a batch. start: what else comes before the first step."""
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Snapshot:
    phase: Phase
    step: Whole
    """Steps started, over the whole run; 0 before the first."""
    seconds: Elapsed
    """Time since the phase began. It restarts at 0 with each step, and when an inner phase ends."""

    def __str__(self) -> str:
        """Text such as "step 12" or "save after step 12", which fits after "during"."""
        if self.phase == "step":
            return f"step {self.step}" if self.step else "start"
        return f"{self.phase} after step {self.step}" if self.step else self.phase


class StepTime(NamedTuple):
    """Seconds that one step took in this process, without saving, evaluation and compilation between two steps."""

    step_s: float
    """Duration without the wait for data."""
    data_s: float
    """Wait for the step's batch."""
    wait_s: float
    """Part of step_s: the wait for devices."""


KEPT_STEPS = 50
_lock = threading.Lock()
_phase: Phase = "start"
_outer: list[tuple[int, Phase]] = []
"""The thread inside phases and the phase outside of each, outermost first. All entries have the same thread."""
_step, _since_s = 0, time.monotonic()
_spent_s = {"step": 0.0, "data": 0.0, "wait": 0.0}
"""Since the last at_step. A step waits for its batch before it starts."""
_total_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
_data_s = 0.0
_in_a_row = 0
_steps: deque[StepTime] = deque(maxlen=KEPT_STEPS)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Sets the phase inside the block. Phases nest: when the block ends, the outer phase resumes, with its seconds from 0."""
    if name not in PHASES:
        raise ValueError(f"{name!r} is not one of the phases {', '.join(PHASES)}")
    global _phase
    thread = threading.get_ident()
    with _lock:
        counts = not _outer or _outer[-1][0] == thread
        depth = len(_outer)
        if counts:
            _pass()
            _outer.append((thread, _phase))
            _phase = name
    try:
        yield
    finally:
        if counts:
            with _lock:
                _pass()
                _phase = _outer[depth][1]
                # And any inside that Ctrl-C came before the end of.
                del _outer[depth:]


@contextmanager
def waiting() -> Iterator[None]:
    """Counts the time inside the block as waiting for devices."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _spent_s["wait"] += time.monotonic() - began_s


def at_step(step: int) -> None:
    """Marks the start of a step. `step` is the number of started steps, this one included. The phase does not change."""
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
    """Clears the step times: the next steps are of another kind, and earlier ones do not tell how long they take."""
    global _in_a_row
    with _lock:
        _in_a_row = 0
        _steps.clear()


def now() -> Snapshot:
    with _lock:
        return Snapshot(_phase, _step, time.monotonic() - _since_s)


def last_steps() -> list[StepTime]:
    """Times of the last KEPT_STEPS finished steps, oldest first, without the first step after a start, which is not typical."""
    with _lock:
        return list(_steps)


def totals() -> dict[str, float]:
    """Seconds that this process has spent in each phase, the current one up to now. Time in a nested phase counts for the inner
    one."""
    with _lock:
        # Not _pass: that would reset the phase's seconds, which the watchdog reads.
        found = dict(_total_s)
        found[_phase] += time.monotonic() - _since_s
        return found


def show_stacks() -> None:
    """Prints the stacks of all Python threads to the process's own standard error: notebooks and tests replace sys.stderr."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


def _pass() -> None:
    """Adds the time since the last change to the current phase."""
    global _since_s
    now_s = time.monotonic()
    if _phase in _spent_s:
        _spent_s[_phase] += now_s - _since_s
    _total_s[_phase] += now_s - _since_s
    _since_s = now_s
