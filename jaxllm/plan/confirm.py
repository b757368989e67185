"""Confirms the best candidates of a plan by compiling them, and ranks them by their compiled schedules.

    plan = confirm(plan, 8, compile_candidate)

The caller passes in the function that compiles. This module does not import JAX.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.display import readable
from jaxllm.plan.fastest_remat import CONFIGURATION
from jaxllm.plan.plan_result import Plan, Rejected, ranked
from jaxllm.plan.search import Progress

TRIES = 3
"""Limit on compilations, as a multiple of the number to confirm."""
MOST_OF_ERROR = 200
"""Characters of a compiler's error message that are kept."""
COMPILED_ABOVE = "compiled above capacity"
HOST_COMPILED_ABOVE = "compiled above a GPU's share of host memory"
COMPILE_REFUSED = "cannot be compiled"


@dataclass(frozen=True)
class Compiled:
    """Figures of a compiled step, of one device."""

    total_bytes: int
    host_bytes: int
    """In pinned host memory."""
    transfers_s: float | None
    """Exposed time of its transfers, by its schedule; None: not known."""

    def above(self, plan: Plan) -> tuple[str, int] | None:
        """(reason for rejection, bytes) of a step that does not fit; else None."""
        if self.total_bytes > plan.capacity_bytes:
            return COMPILED_ABOVE, self.total_bytes
        return (HOST_COMPILED_ABOVE, self.host_bytes) if self.host_bytes > plan.host_bytes_per_gpu else None


Compile = Callable[[Config], Compiled]
"""Compiles the step of a config."""


class InlineExecutor(Executor):
    """An executor that runs each call immediately, in the calling thread."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def confirm(
    plan: Plan,
    count: int,
    compile_candidate: Compile,
    start: Callable[[], Executor] = InlineExecutor,
    workers: int = 1,
    progress: Progress | None = None,
) -> Plan:
    """Compiles the best candidates until `count` of them fit into the capacity and into a GPU's share of host memory by XLA's
    own bytes. Candidates that do not fit or do not compile move to the rejected, and the next best ones replace them, up to
    TRIES x count compilations. If all that are confirmed use the host's memory, the best of those that do not is compiled
    too, as one more. The confirmed ones are ranked again, with the exposed transfers of their schedules
    (StepTime.as_scheduled); the others stay behind them in the model's order.

    The set of compiled candidates does not depend on which compilation ends first. A KeyboardInterrupt stops the loop; the
    results so far are returned.

    Args:
      compile_candidate: takes a resolved config. ConfigError and RuntimeError (including XLA's own) reject the candidate.
      start: makes an executor that runs it. If a worker dies, the executor is replaced and each candidate that was in it runs
        alone, to find the one that kills it. Default: compile in this process, one after another.
      workers: compilations at the same time.
    """
    run = _Compilations(plan, count, compile_candidate, start, workers, progress)
    interrupted, asked = False, 0
    try:
        run.until(range(len(plan.candidates)), count, TRIES * count)
        asked = len(run.confirmed)
        if run.confirmed and all(plan.candidates[number].uses_host for number in run.confirmed):
            run.until((n for n, one in enumerate(plan.candidates) if not one.uses_host and n not in run.refused), 1, TRIES)
    except KeyboardInterrupt:
        interrupted = True
    return _with_figures(plan, count, asked, run.confirmed, run.refused, interrupted)


@dataclass
class _Compilations:
    """Compilations of a plan's candidates, by their numbers."""

    plan: Plan
    count: int
    compile_candidate: Compile
    start: Callable[[], Executor]
    workers: int
    progress: Progress | None
    confirmed: dict[int, Compiled] = field(default_factory=dict)
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(reason, example)."""
    executor: Executor | None = None

    def until(self, numbers: Iterable[int], wanted: int, most: int) -> None:
        """Compiles these candidates in turn until so many more are confirmed, or `most` were compiled."""
        waiting, running, tried = deque(numbers), {}, 0
        wanted += len(self.confirmed)
        while True:
            while waiting and len(running) < self.workers and len(self.confirmed) + len(running) < wanted and tried < most:
                number = waiting.popleft()
                self.executor = self.executor or self.start()
                running[self.executor.submit(self.compile_candidate, self.plan.candidates[number].config)] = number
                tried += 1
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken = [number for number in (self._ended(future, running.pop(future)) for future in done) if number is not None]
            if broken:
                broken += running.values()
                running.clear()
                if len(broken) == 1 and self.workers == 1:
                    self._refuse(broken[0], COMPILE_REFUSED, "the compiler died of it")
                else:
                    waiting.extendleft(sorted(broken, reverse=True))
                    tried -= len(broken)
                self.executor, self.workers = self.start(), 1
            if self.progress is not None:
                total = max(len(self.confirmed), min(self.count, len(self.plan.candidates)))
                self.progress("compiled", len(self.confirmed), total)

    def _ended(self, future: Future, number: int) -> int | None:
        """Sorts a candidate's result in; its number if the executor broke."""
        try:
            compiled = future.result()
        except BrokenExecutor:
            return number
        except (ConfigError, RuntimeError) as error:
            self._refuse(number, COMPILE_REFUSED, " ".join(str(error).split())[:MOST_OF_ERROR])
            return None
        if (above := compiled.above(self.plan)) is None:
            self.confirmed[number] = compiled
        else:
            self._refuse(number, above[0], readable(above[1]))
        return None

    def _refuse(self, number: int, reason: str, example: str) -> None:
        self.refused[number] = reason, f"{self.plan.candidates[number].choice}: {example}"


def _with_figures(
    plan: Plan,
    count: int,
    asked: int,
    confirmed: dict[int, Compiled],
    refused: dict[int, tuple[str, str]],
    interrupted: bool,
) -> Plan:
    """The plan with the figures of compilations.

    Args:
      asked: number confirmed of the `count` that were asked for, without the one more that uses no host memory.
        Not read if interrupted.
    """
    every = list(enumerate(plan.candidates))
    seen = [
        dataclasses.replace(one, compiled_bytes=confirmed[n].total_bytes, scheduled_transfers_s=confirmed[n].transfers_s)
        for n, one in every
        if n in confirmed
    ]
    seen = ranked(seen, plan.largest_microbatch)
    rest = [one for n, one in every if n not in confirmed and n not in refused]
    classes: dict[str, list[str]] = {}
    for number in sorted(refused):
        reason, example = refused[number]
        classes.setdefault(reason, []).append(example)
    rejected = [Rejected(CONFIGURATION, reason, len(examples), examples[0]) for reason, examples in classes.items()]
    because = plan.unconfirmed_because
    if interrupted:
        because = f"interrupted after {len(confirmed)} of {count} were confirmed"
    elif asked < min(count, len(plan.candidates) - len(refused)):
        because = (
            f"{len(refused)} of {len(confirmed) + len(refused)} that were compiled need too much memory or cannot be compiled"
        )
    return dataclasses.replace(
        plan,
        candidates=(*seen, *rest),
        rejected=(*plan.rejected, *rejected),
        interrupted=plan.interrupted or interrupted,
        confirmed=len(confirmed),
        unconfirmed_because=because,
    )
