"""The watchdog: ends a run that goes on without getting on, after it has shown where the process stands.

A collective that a peer never joins, a file system that never answers, a deadlock: the process lives, its heart beats, and
nothing happens. A thread looks every second at what progress.py says. Its last words need Python's lock; where a C call never
gives that back, the interpreter's own timer (faulthandler) prints the stacks and exits with 1.

A process that waits for another has done nothing wrong: while the line says that a peer is at something else than a step, a
step may take as long as that something else. A process that is frozen as a whole has its supervisor; `beat` tells it so.
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

from jaxllm import exits, progress
from jaxllm.config import RunConfig
from jaxllm.peers import Line, flush, print_sentence

LOOK_S = 1.0
BEAT_S = 1.0
OLD_NEWS_S = 3.0
STACKS_S = 1.0
"""For the others to show where they stand, before a process ends and their collectives fail of it."""
_beating: set[int] = set()


class Watchdog:
    """with Watchdog(config.run, distributed.line): watches what the process does within.

    Args:
      line: asked for the line to the other processes; None as long as there is none.
      end, look_s: for tests. How to end this process with a code, and the seconds between two looks.
    """

    def __init__(
        self,
        run: RunConfig,
        line: Callable[[], Line | None] = lambda: None,
        *,
        end: Callable[[int], Any] | None = None,
        look_s: float = LOOK_S,
    ):
        self._run, self._line, self._end, self._look_s = run, line, end, look_s
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
        # Begun anew at each look, so it goes off only where no Python runs. As long as the slowest work may take: a process
        # that is stopped and goes on must not end of it.
        no_python_s = max(self._run.stuck_min_s, self._run.phase_timeout_s)
        while not self._over.wait(self._look_s):
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(no_python_s, exit=True, file=sys.__stderr__)
            if sentence := self.verdict():
                self._bark(sentence)
                return

    def verdict(self) -> str | None:
        """What is wrong, as a sentence; None if nothing is. Looks `look_s` apart."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 10 * self._look_s:
            # This thread stood still, so the whole process did: Ctrl-Z, say. What it does has not taken that long.
            self._awake_s = now_s
        self._looked_s = now_s
        seen = progress.now()
        seconds = min(seen.seconds, now_s - self._awake_s)
        limit_s, because = self._limit(seen)
        if seen.phase == "meet" or seconds <= limit_s:
            return None
        line = self._line()
        name = line.name() if line else "this process"
        return f"{name} is stuck: {seen} has taken {seconds:.0f} s ({because}); start again from the last checkpoint"

    def _limit(self, seen: progress.Snapshot) -> tuple[float, str]:
        """Seconds, and where they come from."""
        run = self._run
        patience = f"run.phase_timeout_s={run.phase_timeout_s:g}"
        if seen.phase != "step":
            return run.phase_timeout_s, patience
        # The line's word is a second or two old: who was at something else for less may be in the same step by now.
        line = self._line()
        if (behind := line and line.behind()) and behind.seen.seconds > OLD_NEWS_S:
            peer = f"process {behind.rank} on {behind.host}"
            return run.phase_timeout_s, f"waiting for {peer}, {behind.seen.seconds:.0f} s in {behind.seen}; {patience}"
        times = [took.step_s for took in progress.last_steps()]
        usual_s = statistics.median(times) if times else 0.0
        keys = f"run.stuck_factor={run.stuck_factor:g}, run.stuck_min_s={run.stuck_min_s:g}"
        return max(run.stuck_min_s, run.stuck_factor * usual_s), f"usual are {usual_s:.2g} s; {keys}" if times else keys

    def _bark(self, sentence: str) -> None:
        line = self._line()
        if line:
            line.stuck(sentence)
        print_sentence(sentence)
        if line and (where := line.standing()):
            print_sentence(where)
        progress.show_stacks()
        flush()
        # Process 0 waits for the others as it is.
        if line and line.rank:
            time.sleep(STACKS_S)
        end = self._end or (line.leave if line else os._exit)
        end(exits.LOST)


def beat(pipe: int | None) -> None:
    """From now on a byte a second goes down the supervisor's pipe, until the process ends; once it does, more calls do nothing.
    None, or no pipe's write end: there is no supervisor.
    """
    if pipe is None or pipe in _beating:
        return
    try:
        # Where a launcher hands on variables but no open files (srun), the number may be that of something else by now.
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode) or fcntl.fcntl(pipe, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            return
        os.set_blocking(pipe, False)
        # It is this process's: what it starts would keep the pipe open, and hold the supervisor up.
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
            # The supervisor does not read; it has been stopped itself, say.
            pass
        except OSError:
            return
        time.sleep(BEAT_S)
