"""Stops a run between two steps, on all processes at the same one, when a signal asks for it; saves by the clock likewise.

The first SIGTERM or SIGINT lets the step under way finish; a second leaves at once, also while the main thread sits in C++ (a
compilation, a collective that nobody joins): Python would run a handler only afterwards, but the signal's number is written to
a pipe at once, and a thread reads it. Where somebody restarts the run, a second SIGTERM changes nothing: launchers pass on what
they were sent themselves, schedulers send it again at the end of the time, and both mean SIGKILL when they want no save. In a
notebook or at Python's prompt the process is the user's whole session: a second SIGINT raises KeyboardInterrupt there, and the
last save is what remains of the run.

Until the first step there is nothing to save. Where somebody restarts the run, a process that is told to stop by then leaves at
once and takes the others along (`leave_early`): a compilation may take longer than a scheduler waits. `begin` ends that: all
processes meet there, and none of them goes on if one was told to stop before. Whoever has come to it no longer leaves at once,
for the others may be past it a moment later, and would wait for it in their first step.

Several processes agree through a board at the coordinator. Process 0 alone makes plans, "stop after step s + 4", and every
process looks for them after starting a step. Why 4: losses are read one step behind, so `advance` returns for step n + 1 once
step n is done, and that is done only when every process has started it, since its loss is a sum over all. When process 0 plans
after starting step s, it has not started s + 1, so nobody has step s + 1 done, nobody has returned from starting s + 2, and all
will look after that: s + 2 would do. Two more are for a reader of this who finds the flaw.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm import distributed
from jaxllm.peers import print_sentence

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STEPS_AHEAD = 4
SAME_SIGNAL_S = 0.5
"""`timeout` and some schedulers send a signal to the process and then to its group: two within this time are one."""


def interactive() -> bool:
    """Whether somebody types: a notebook's kernel, IPython or Python's prompt. All of them set a prompt, scripts do not."""
    return hasattr(sys, "ps1")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Round what must happen whole or not at all: ctrl-C, which else may raise between any two instructions, comes at its end.
    In other threads than the main one Python delivers none.
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
class Due:
    """What is to be done after a step."""

    save: bool
    stopped_by: str | None
    """The signal's name, or None to go on. Whoever stops saves too."""


class Interrupt:
    """with Interrupt(...) as interrupt: the main thread's signals ask to stop; afterwards they are as they were.

    In another thread than the main one it listens to no signal, and the clock still works.

    Args:
      save_every_s: seconds between saves by the clock of process 0; None: never.
      leave_early: ends this process, and the others, given the signal's name; called in a thread when a signal comes before
        `begin`. None: nobody restarts this run, and such a signal waits for `begin`.
    """

    def __init__(self, save_every_s: float | None = None, leave_early: Callable[[str], None] | None = None):
        self._save_every_s, self._leave_early = save_every_s, leave_early
        self._last_save_s = time.monotonic()
        self._signal: str | None = None
        self._begun, self._lock = False, threading.Lock()
        self._previous: dict[int, Any] = {}
        self._handled_s: float | None = None
        self._board = distributed.Board()
        self._told = False
        self._plans: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            # None: it was set from C, and cannot be set back from here.
            if handler is not None:
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._watcher.join()
        self._reader.close()

    def begin(self) -> str | None:
        """To be called by every process once, when it is ready for its first step. Returns the signal that any of them was told
        to stop by, or None: then all train.
        """
        with self._lock:
            self._begun = True
        self.saved()
        return self.asked()

    def due(self, step: int) -> Due:
        """To be called by every process after each step it starts, with the number of steps started."""
        timed = self._save_every_s is not None and time.monotonic() - self._last_save_s >= self._save_every_s
        if jax.process_count() == 1:
            return Due(timed or self._signal is not None, self._signal)
        self._exchange(step, timed)
        stop, save = self._plans.get("stop"), self._plans.get("save")
        stopped_by = stop[1] if stop and step >= stop[0] else None
        return Due(stopped_by is not None or bool(save and save[0] == step), stopped_by)

    def asked(self) -> str | None:
        """The signal that any process received, the same answer on all; every process must call it. For work that is not made
        of steps, where all are at the same place.
        """
        return distributed.first_said(self._signal or "") or None

    def saved(self) -> None:
        """The clock starts anew; to be called after each save."""
        self._last_save_s = time.monotonic()

    def _exchange(self, step: int, timed: bool) -> None:
        """Tells what was asked here, makes plans on process 0, and reads them."""
        if self._signal is not None and not self._told:
            self._board.put(f"asked-{jax.process_index()}", self._signal)
            self._told = True
        posted = self._board.read()
        if distributed.is_main_process():
            asked = next((text for name, text in sorted(posted.items()) if name.startswith("asked-")), self._signal)
            plan = f"{step + STEPS_AHEAD} {asked or ''}"
            if asked and "stop" not in posted:
                posted["stop"] = plan
                self._board.put("stop", plan)
            # The plan before is carried out first: whoever lags could not find it any more.
            if timed and int(posted.get("save", "0").split()[0]) < step:
                posted["save"] = plan
                self._board.put("save", plan)
        for name in ("stop", "save"):
            if name in posted:
                at, _, by = posted[name].partition(" ")
                self._plans[name] = int(at), by

    def _listen(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # Python's own would end the process, or raise KeyboardInterrupt in the middle of something.
            self._previous[number] = signal.signal(number, self._in_main_thread)

    def _in_main_thread(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self._handled_s is None:
            self._handled_s = now
        elif number == signal.SIGINT and interactive() and now - self._handled_s > SAME_SIGNAL_S:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        first_s = None
        while received := self._reader.recv(16):
            for number in received:
                if number not in SIGNALS:
                    continue
                now = time.monotonic()
                if first_s is None:
                    first_s = now
                    with self._lock:
                        early, self._signal = not self._begun, signal.Signals(number).name
                    if early and self._leave_early is not None:
                        self._leave_early(self._signal)
                elif number == signal.SIGINT and interactive():
                    # The main thread sees to it.
                    continue
                elif now - first_s > SAME_SIGNAL_S and not (self._leave_early is not None and number == signal.SIGTERM):
                    print_sentence(f"left at once by a second signal, {signal.Signals(number).name}; nothing more was saved")
                    os._exit(128 + number)
