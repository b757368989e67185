"""Console output of a run: a live bar on a terminal, a live line in a notebook, plain lines anywhere else.

The rich package draws colours and the bar. NO_COLOR turns colours off. Output that is not a terminal, or a terminal that cannot
move its cursor (TERM=dumb), gets neither.
"""

from __future__ import annotations

import errno
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TimeRemainingColumn

from jaxllm.cluster import progress
from jaxllm.cost_model.noise_reading import short
from jaxllm.display import escaped
from jaxllm.run.metrics import Record
from jaxllm.terminal import QUIET_S, bar, console, in_lines_of_a_log, time_left
from jaxllm.untrusted import one_line

NOTEBOOK_REFRESH_S = 0.2
"""Minimum time between two updates of a notebook's line. Each is a message, and a tiny model makes hundreds of steps/s."""


class Console:
    """Prints lines and shows steps, on one process of a run. On the others (main=False) it prints nothing.

    Attributes:
      is_stopping: () -> whether a signal asks the run to stop. A pipe that breaks then is no error.
    """

    def __init__(self, total_steps: int, main: bool = True):
        self._total, self._main = total_steps, main
        self.is_stopping: Callable[[], bool] = lambda: False
        self._bar: Progress | None = None
        self._line: NotebookLine | None = None
        self._log = in_lines_of_a_log(self.say)
        self._last = 0, total_steps, ""
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Console:
        # In a Jupyter kernel IPython is already imported and has a shell.
        ipython = sys.modules.get("IPython")
        if self._main and ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            self._line = NotebookLine()
        elif self._main:
            self._bar = bar(BarColumn(bar_width=10), TimeRemainingColumn(compact=True), on=console(soft_wrap=True))
        if self._bar is not None:
            self._task = self._bar.add_task("starting", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        with self._while_somebody_reads():
            if self._bar is not None:
                self._bar.stop()
            if self._line is not None:
                self._line.flush()

    @contextmanager
    def _while_somebody_reads(self) -> Iterator[None]:
        """A terminal that was closed, whose SIGHUP stops the run, or the `tee` that it took along: the save must not fail."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO and not (error.errno == errno.EPIPE and self.is_stopping()):
                raise
            self._main = False

    def resize(self, total_steps: int) -> None:
        """Changes the number of the last step."""
        self._total = total_steps
        if self._bar is not None:
            self._bar.update(self._task, total=total_steps)

    def say(self, line: str) -> None:
        if not self._main:
            return
        with self._while_somebody_reads():
            if self._bar is not None:
                self._bar.console.print(one_line(line))
            else:
                print(one_line(line), flush=True)

    def step(self, record: Record, due: bool) -> None:
        """Shows the metrics of one step. With `due` it prints a line of its own."""
        if not self._main:
            return
        loss = "no target" if record.get("no_targets") else f"loss {record['loss']:.4f}"
        line = (
            f"step {record['step']}/{self._total}  tokens {short(record['tokens'])}  {loss}  "
            f"{short(record['tokens_per_s_per_device'])} tokens/s/device"
        )
        if "mfu" in record:
            line += f"  MFU {100 * record['mfu']:.1f}% (causal)"
        if math.isfinite(record.get("noise_scale_tokens", math.inf)):
            line += f"  noise scale {short(record['noise_scale_tokens'])} tokens"
        if self._bar is None:
            line += self._remaining(int(record["step"]))
        self._last = int(record["step"]), self._total, line
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description=line)
        elif self._line is not None:
            self._line.show(*self._last)
        elif due:
            self.say(line)

    def progress(self, what: str, done: int, total: int) -> None:
        """Shows how far something is that is no step: in the place of the last step's line, or in lines of a log."""
        # At its end the last step's line is there again.
        place = (done, total, f"{what} {done:,}/{total:,}") if done < total else self._last
        if self._bar is not None:
            self._bar.update(self._task, description=place[2])
        elif self._line is not None:
            self._line.show(*place)
        else:
            self._log(what, done, total)

    def _remaining(self, step: int) -> str:
        started, first = self._first = self._first or (time.monotonic(), step)
        left = time_left(time.monotonic() - started, step - first, self._total - step)
        return left and f"  {left} left"


def what_lasts() -> str | None:
    """The phase that this process is in for QUIET_S or more, such as the read of a large checkpoint; None for a step."""
    seen = progress.now()
    return None if seen.phase == "step" or seen.seconds < QUIET_S else f"{seen}, {seen.seconds:.0f} s so far"


class NotebookLine:
    """One output of a cell that is updated in place: a bar and the newest step's line. The last one is saved with the cell."""

    def __init__(self):
        self._handle: Any = None
        self._shown_s = 0.0
        self._newest: tuple[int, int, str] | None = None

    def show(self, step: int, total: int, line: str) -> None:
        self._newest = step, total, line
        if time.monotonic() - self._shown_s >= NOTEBOOK_REFRESH_S or step >= total:
            self.flush()

    def flush(self) -> None:
        """Shows the latest step that is not shown yet."""
        if self._newest is None:
            return
        from IPython.display import display  # type: ignore[import-not-found]

        (step, total, line), self._newest = self._newest, None
        bar = f'<progress value="{step}" max="{total}"></progress>'
        content = {"text/plain": line, "text/html": f"{bar} <code>{escaped(line)}</code>"}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._shown_s = time.monotonic()
