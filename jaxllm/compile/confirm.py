"""Confirms the best candidates of a plan by compiling them, and ranks them by their compiled schedules.

    with processes(2) as start:
        plan = confirm(plan, 8, compiler(plan, cache), start, workers=2)

Compilations run in processes of their own, each with its own JAX, because one takes a core or two for half a minute. If
processes cannot be started, they run in this process, one after another.
"""

import logging
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import Gpu
from jaxllm.display import readable
from jaxllm.plan.fastest_remat import CONFIGURATION, Progress, silent
from jaxllm.plan.plan_result import Plan, Rejected, ranked

log = logging.getLogger(__name__)

TRIES = 3
"""Limit on compilations, as a multiple of the number to confirm."""
MOST_OF_ERROR = 200
"""Characters of a compiler's error message that are kept."""
COMPILED_ABOVE = "compiled above capacity"
HOST_COMPILED_ABOVE = "compiled above a GPU's share of host memory"
COMPILE_REFUSED = "cannot be compiled"


Compile = Callable[[Config], Any]
"""Compiles the step of a config: total_bytes, host_bytes and exposed_transfers_s of its CompileReport."""


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
    progress: Progress = silent,
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
    run, asked = _Compilations(plan, count, compile_candidate, start, workers, progress), 0
    confirmed, refused = run.confirmed, run.refused
    try:
        run.until(range(len(plan.candidates)), count, TRIES * count)
        asked = len(confirmed)
        if confirmed and all(plan.candidates[number].uses_host for number in confirmed):
            run.until((n for n, one in enumerate(plan.candidates) if not one.uses_host and n not in refused), 1, TRIES)
    except KeyboardInterrupt:
        because = f"interrupted after {len(confirmed)} of {count} were confirmed"
        return run.figures(replace(plan, interrupted=True, unconfirmed_because=because))
    if asked < min(count, len(plan.candidates) - len(refused)):
        tried = f"{len(refused)} of {len(confirmed) + len(refused)} that were compiled"
        plan = replace(plan, unconfirmed_because=f"{tried} need too much memory or cannot be compiled")
    return run.figures(plan)


@dataclass
class _Compilations:
    """Compilations of a plan's candidates, by their numbers."""

    plan: Plan
    count: int
    compile_candidate: Compile
    start: Callable[[], Executor]
    workers: int
    progress: Progress
    confirmed: dict[int, Any] = field(default_factory=dict)
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
        if compiled.total_bytes > self.plan.capacity_bytes:
            self._refuse(number, COMPILED_ABOVE, readable(compiled.total_bytes))
        elif compiled.host_bytes > self.plan.host_bytes_per_gpu:
            self._refuse(number, HOST_COMPILED_ABOVE, readable(compiled.host_bytes))
        else:
            self.confirmed[number] = compiled
        return None

    def _refuse(self, number: int, reason: str, example: str) -> None:
        self.refused[number] = reason, f"{self.plan.candidates[number].choice}: {example}"

    def figures(self, plan: Plan) -> Plan:
        """The plan with the figures of the compilations: those confirmed, ranked, then those not compiled."""
        confirmed, refused = self.confirmed, self.refused
        seen = [
            replace(plan.candidates[n], compiled_bytes=compiled.total_bytes, scheduled_transfers_s=compiled.exposed_transfers_s)
            for n, compiled in sorted(confirmed.items())
        ]
        rest = [one for n, one in enumerate(plan.candidates) if n not in confirmed and n not in refused]
        classes: dict[str, list[str]] = {}
        for _, (reason, example) in sorted(refused.items()):
            classes.setdefault(reason, []).append(example)
        rejected = [Rejected(CONFIGURATION, reason, len(examples), examples[0]) for reason, examples in classes.items()]
        return replace(
            plan,
            candidates=(*ranked(seen, plan.largest_microbatch), *rest),
            rejected=(*plan.rejected, *rejected),
            confirmed=len(confirmed),
        )


def compiler(plan: Plan, cache: Path | None) -> Compile:
    """The compile function for confirm(), in a form that can be sent to another process: figures of compile_report."""
    # Its table is read-only, which pickle refuses.
    gpu = {**vars(plan.gpu), "dense_flops": dict(plan.gpu.dense_flops)}
    return partial(_compiled, gpu, plan.gpus, plan.gpus_per_host, cache)


def _compiled(gpu: dict[str, Any], gpus: int, gpus_per_host: int, cache: Path | None, config: Config) -> Any:
    # Here, because it imports JAX.
    from jaxllm.compile.report import compile_report

    # Not the report: this process would load JAX to read it.
    report = compile_report(config, Gpu(**gpu), gpus, gpus_per_host, cache=cache)
    return SimpleNamespace(**{key: getattr(report, key) for key in ("total_bytes", "host_bytes", "exposed_transfers_s")})


@contextmanager
def processes(workers: int) -> Iterator[Callable[[], Executor]]:
    """Yields a function that starts a new process pool in place of the previous one. On exit, all end, busy or not."""
    before = set(multiprocessing.active_children())
    pools: list[ProcessPoolExecutor] = []

    def leave() -> None:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        pools.clear()
        # A pool waits for its running task: half a minute, after Ctrl-C.
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()

    def start() -> Executor:
        leave()
        try:
            # Not forked, because JAX may have threads in this process already.
            spawn = multiprocessing.get_context("spawn")
            pools.append(ProcessPoolExecutor(workers, mp_context=spawn, initializer=_prepare_worker))
            pools[0].submit(int).result()
            return pools[0]
        except (OSError, BrokenExecutor) as error:
            # A script without `if __name__ == "__main__"` gets here too when its child imports it; that child must end.
            log.warning("Compilations run in this process, one after another: no processes could be started (%s).", error)
            return InlineExecutor()

    try:
        # Here, because a browser has no such machine. A pool starts its processes as they are needed.
        from jaxllm.machine.host import variable

        with variable("PYTHONSAFEPATH", "1"):
            yield start
    finally:
        leave()


def _prepare_worker() -> None:
    # Ctrl-C reaches all processes of a terminal; the parent stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Warnings about a candidate appear for the winner, in `jaxllm compile` and in the run.
    logging.disable(logging.WARNING)
