"""Watchdog: ends a run that is alive but makes no progress, after printing where it is stuck.

A collective that a peer never joins, a file system that never answers, a deadlock: the process lives, its heartbeat continues,
and nothing happens. A thread checks progress.py every second. Its last message needs Python's global lock; if a C call never
releases that, the interpreter's own timer (faulthandler) prints the stacks and exits with 1.

A process that waits for another has done nothing wrong: while the peer monitor reports a peer in another phase than a step, a
step may take as long as that phase may. And no step is stuck while any process begins something: in DiLoCo's rounds a fast
replica waits at an outer step for a slow one. In a run that is stuck all processes wait: in rounds from the next outer step on,
at the latest. A process that is frozen as a whole is its supervisor's job; `beat` sends the supervisor heartbeats.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import stat
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxllm.cluster import exit_codes, progress
from jaxllm.cluster.peer_monitor import PeerMonitor
from jaxllm.config import RunConfig
from jaxllm.terminal import flush, print_sentence

LOOK_S = 1.0
"""Between two checks."""
BEAT_S = 1.0
STATUS_AGE_S = 3.0
STACKS_S = 1.0
"""Time for the others to print their stacks before this process ends and their collectives fail."""
_beating: set[int] = set()


class Watchdog:
    """with Watchdog(config.run, distributed.peer_monitor): watches the process inside the block.

    Args:
      monitor: returns the peer monitor; None while there is none.
      end: for tests. It ends this process with a code.
    """

    def __init__(
        self, run: RunConfig, monitor: Callable[[], PeerMonitor | None] = lambda: None, end: Callable[[int], Any] | None = None
    ):
        self._run, self._monitor, self._end = run, monitor, end
        self._over = threading.Event()
        self._looked_s = self._awake_s = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        # Restarted at each check, so it fires only while no Python runs. The limit is that of the slowest work: a process that
        # is stopped and resumed must not end because of it.
        no_python_s = max(self._run.stuck_min_s, self._run.phase_timeout_s)
        while not self._over.wait(LOOK_S):
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(no_python_s, exit=True, file=sys.__stderr__)
            if sentence := self.verdict():
                self._end_run(sentence)
                return

    def verdict(self) -> str | None:
        """The problem as a sentence; None if there is none. Called every LOOK_S seconds."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 10 * LOOK_S:
            # This thread stood still, so the whole process did (Ctrl-Z, for example): its phase has not taken that long.
            self._awake_s = now_s
        self._looked_s = now_s
        seen = progress.now()
        seconds = min(seen.seconds, now_s - self._awake_s)
        limit_s, because = self._limit(seen)
        if seen.phase == "meet" or seconds <= limit_s:
            return None
        monitor = self._monitor()
        if seen.phase == "step" and monitor and monitor.idle_s is not None and monitor.idle_s <= limit_s:
            return None
        name = monitor.name() if monitor else "this process"
        return f"{name} is stuck: {seen} has taken {seconds:.0f} s ({because}); start again from the last checkpoint"

    def _limit(self, seen: progress.Snapshot) -> tuple[float, str]:
        """Limit in seconds, and its origin."""
        run = self._run
        patience = f"run.phase_timeout_s={run.phase_timeout_s:g}"
        if seen.phase != "step":
            return run.phase_timeout_s, patience
        # The monitor's status is a second or two old: a peer that was in another phase for less may be in the same step by now.
        monitor = self._monitor()
        if (slowest := monitor and monitor.slowest) and slowest.seen.seconds > STATUS_AGE_S:
            peer = f"process {slowest.rank} on {slowest.host}"
            return run.phase_timeout_s, f"waiting for {peer}, {slowest.seen.seconds:.0f} s in {slowest.seen}; {patience}"
        times = [took.step_s for took in progress.last_steps()]
        usual_s = statistics.median(times) if times else 0.0
        keys = f"run.stuck_factor={run.stuck_factor:g}, run.stuck_min_s={run.stuck_min_s:g}"
        return max(run.stuck_min_s, run.stuck_factor * usual_s), f"usual are {usual_s:.2g} s; {keys}" if times else keys

    def _end_run(self, sentence: str) -> None:
        monitor = self._monitor()
        if monitor:
            monitor.announce_stuck(sentence)
        print_sentence(sentence)
        if monitor and (where := monitor.status_by_process()):
            print_sentence(where)
        progress.show_stacks()
        flush()
        # Process 0's `leave` waits for the others already.
        if monitor and monitor.rank:
            time.sleep(STACKS_S)
        end = self._end or (monitor.leave if monitor else os._exit)
        end(exit_codes.LOST)


def beat(pipe: int | None) -> None:
    """Sends one byte a second through the supervisor's pipe until the process ends; further calls with the same pipe do
    nothing. With None, or anything but a pipe's write end, there is no supervisor."""
    if pipe is None or pipe in _beating:
        return
    try:
        # A launcher that passes variables but no open files (srun) leaves a number that may belong to another file by now.
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode) or fcntl.fcntl(pipe, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            return
        os.set_blocking(pipe, False)
        # The pipe belongs to this process: a child would keep it open and delay the supervisor.
        os.set_inheritable(pipe, False)
    except OSError:
        return
    _beating.add(pipe)
    threading.Thread(target=_beat, args=[pipe], name="beat", daemon=True).start()


def _beat(pipe: int) -> None:
    while True:
        try:
            os.write(pipe, b".")
        except BlockingIOError:
            # The supervisor does not read; it may be stopped itself.
            pass
        except OSError:
            return
        time.sleep(BEAT_S)
