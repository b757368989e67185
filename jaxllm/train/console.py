"""What a run prints: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxllm.plan.cost import short
from jaxllm.train.metrics import Record


class Console:
    """Says lines and shows steps, on one process of a run. On the others (main=False) it is silent."""

    def __init__(self, total_steps: int, main: bool = True):
        self._total, self._main = total_steps, main
        self._console = RichConsole(highlight=False, soft_wrap=True, markup=False)
        self._bar: Progress | None = None
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Console:
        if self._main and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(compact=True))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        if not self._main:
            return
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            print(line, flush=True)

    def step(self, record: Record, mfu: float | None, due: bool) -> None:
        """Shows one step's metrics; `due` says whether it gets a line of its own."""
        line = (
            f"step {record['step']}/{self._total}  tokens {short(record['tokens'])}  loss {record['loss']:.4f}  "
            f"{short(record['tokens_per_s_per_device'])} tokens/s/device"
        )
        if mfu is not None:
            line += f"  MFU {100 * mfu:.1f}% (causal)"
        if math.isfinite(record.get("noise_scale_tokens", math.inf)):
            line += f"  noise scale {short(record['noise_scale_tokens'])} tokens"
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description=line)
        elif due:
            self.say(line + self._remaining(int(record["step"])))

    def _remaining(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, step)
            return ""
        started, first = self._first
        seconds = (now - started) / max(step - first, 1) * (self._total - step)
        return f"  {int(seconds // 60)}:{int(seconds % 60):02d} left"
