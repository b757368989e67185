"""Signal handling: a signal stops the run between two steps, on all processes at the same one; saves by the clock work
likewise.

On the first SIGTERM or SIGINT the current step finishes. A second one exits at once, even while the main thread is in C++ (a
compilation, a collective that no peer joins): Python would run a handler only afterwards, but it writes the signal's number to
a pipe at once, and a thread reads that. If a supervisor restarts the run, a second SIGTERM changes nothing: launchers forward
the signals that they receive, schedulers send it again at the time limit, and both use SIGKILL when they want no save. In a
notebook or at Python's prompt the process is the user's whole session: there a second SIGINT raises KeyboardInterrupt, and the
run keeps its last save.

SIGUSR1, SIGUSR2 and SIGHUP ask for the same stop and never exit at once (docs/launch.md); a SIGTERM after them counts as the
first.

Before the first step there is nothing to save. If a supervisor restarts the run, a process that receives a signal before then
exits at once and ends the others too (`leave_early`): a compilation may take longer than a scheduler waits. `begin` ends that
period: all processes meet there, and none continues if one has received a signal. A process that has reached `begin` no longer
exits at once: the others may be past it a moment later, and would wait for it in their first step.

Several processes agree through a board at the coordinator. Process 0 alone makes plans, "stop after step c + 3", and every
process reads them after starting a step. c is the next step after s, which process 0 has started, for whose end all processes
wait: s + 1, or in DiLoCo's rounds, where replicas do not wait for each other, the step before the next outer step or beside
it. Why 3: losses are read one step behind, so `advance` returns for step n + 1 once step n is done. Step c is done only when
every process has started it, and process 0 has not. So no process has c done, none has returned from starting c + 1, and all
will read the plan after that: c + 1 would do. Two more steps are a margin, in case this argument has a flaw.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxllm.cluster import distributed
from jaxllm.terminal import print_sentence

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SIGNALS = (signal.SIGTERM, signal.SIGINT, *WARNINGS)
STEPS_AHEAD = 3
"""Steps of a plan after the next one that all wait for."""
SAME_SIGNAL_S = 0.5
"""`timeout` and some schedulers send a signal to the process and then to its group: two within this time count as one."""


def _caught_in_c() -> set[int]:
    """Signals that have a handler, also one that Python does not know of, as faulthandler's; where Linux says so."""
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        mask = int(status.partition("SigCgt:")[2].split()[0], 16)
        return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
    return set()


def interactive() -> bool:
    """Whether a user types: a notebook's kernel, IPython or Python's prompt. All of them set a prompt, scripts do not."""
    return hasattr(sys, "ps1")


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block, for work that must not stop halfway: otherwise it may raise between any two
    instructions. Python delivers none to threads other than the main one.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[-1])


@dataclass(frozen=True)
class StepActions:
    """Actions due after a step."""

    save: bool
    stopped_by: str | None
    """The signal's name, or None to continue. A stop includes a save."""


class SignalHandler:
    """with SignalHandler(...) as handler: the main thread's signals ask to stop; afterwards the previous handlers are restored.

    In a thread other than the main one it handles no signal, but saves by the clock still work.

    Args:
      save_every_s: seconds between saves by the clock of process 0; None: never.
      leave_early: ends this process, and the others, given the signal's name; called in a thread when a signal comes before
        `begin`. None: no supervisor restarts this run, and such a signal waits for `begin`.

    Attributes:
      next_common: (step) -> the first later one whose end all processes wait for.
    """

    def __init__(self, save_every_s: float | None = None, leave_early: Callable[[str], None] | None = None):
        self.next_common: Callable[[int], int] = lambda step: step + 1
        self._save_every_s, self._leave_early = save_every_s, leave_early
        self._last_save_s = time.monotonic()
        self._signal: str | None = None
        self._begun, self._lock = False, threading.Lock()
        self._previous: dict[int, Any] = {}
        self._handled_s: float | None = None
        self._board = distributed.Board()
        self._posted = False
        self._plans: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            # None: the handler was set from C, and cannot be restored from here.
            if handler is not None:
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._watcher.join()
        self._reader.close()

    @property
    def asked(self) -> bool:
        """Whether a signal has come to this process."""
        return self._signal is not None

    def ask(self, reason: str) -> None:
        """Asks to stop, as a signal named `reason` does; from any thread of any process."""
        with self._lock:
            early, self._signal = not self._begun, self._signal or reason
        if early and self._leave_early is not None:
            self._leave_early(reason)

    def begin(self) -> str | None:
        """Every process must call it once, when it is ready for its first step. Returns the signal that any of them has
        received, or None: then all train.
        """
        with self._lock:
            self._begun = True
        self.saved()
        return self.agreed_signal()

    def actions_after(self, step: int) -> StepActions:
        """Every process must call it after each step it starts, with the number of started steps."""
        timed = self._save_every_s is not None and time.monotonic() - self._last_save_s >= self._save_every_s
        if jax.process_count() == 1:
            return StepActions(timed or self._signal is not None, self._signal)
        self._exchange(step, timed)
        stop, save = self._plans.get("stop"), self._plans.get("save")
        stopped_by = stop[1] if stop and step >= stop[0] else None
        return StepActions(stopped_by is not None or bool(save and save[0] == step), stopped_by)

    def agreed_signal(self) -> str | None:
        """The signal that any process has received, the same answer on all; every process must call it. For work without steps,
        which all processes reach at the same point.
        """
        return distributed.first_nonempty(self._signal or "") or None

    def saved(self) -> None:
        """Restarts the clock; to be called after each save."""
        self._last_save_s = time.monotonic()

    def _exchange(self, step: int, timed: bool) -> None:
        """Posts this process's signal, makes plans on process 0, and reads them."""
        if self._signal is not None and not self._posted:
            self._board.put(f"asked-{jax.process_index()}", self._signal)
            self._posted = True
        posted = self._board.read()
        if distributed.is_main_process():
            asked = next((text for name, text in sorted(posted.items()) if name.startswith("asked-")), self._signal)
            plan = f"{self.next_common(step) + STEPS_AHEAD} {asked or ''}"
            if asked and "stop" not in posted:
                posted["stop"] = plan
                self._board.put("stop", plan)
            # The previous plan is carried out first: a slower process could not read it any more.
            if timed and int(posted.get("save", "0").split()[0]) < step:
                posted["save"] = plan
                self._board.put("save", plan)
        for name in ("stop", "save"):
            if name in posted:
                at, _, by = posted[name].partition(" ")
                self._plans[name] = int(at), by

    def _listen(self) -> None:
        caught = _caught_in_c()
        free = [n for n in WARNINGS if signal.getsignal(n) == signal.SIG_DFL and n not in caught]
        self._handled = [*(n for n in SIGNALS if n not in WARNINGS), *free]
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._handled:
            # Python's own would end the process, or raise KeyboardInterrupt in the middle of an operation.
            self._previous[number] = signal.signal(number, self._in_main_thread)

    def _in_main_thread(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if number in WARNINGS:
            return
        if self._handled_s is None:
            self._handled_s = now
        elif number == signal.SIGINT and interactive() and now - self._handled_s > SAME_SIGNAL_S:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        first_s = None
        while received := self._reader.recv(16):
            for number in received:
                if number not in self._handled:
                    continue
                now = time.monotonic()
                if number in WARNINGS or first_s is None:
                    first_s = first_s if number in WARNINGS else now
                    self.ask(signal.Signals(number).name)
                elif number == signal.SIGINT and interactive():
                    # The main thread handles it.
                    continue
                elif now - first_s > SAME_SIGNAL_S and not (self._leave_early is not None and number == signal.SIGTERM):
                    print_sentence(f"exited at once on a second signal, {signal.Signals(number).name}; nothing more was saved")
                    os._exit(128 + number)
