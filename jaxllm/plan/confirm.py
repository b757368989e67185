"""The best candidates of a plan, confirmed by compiling them.

    plan = confirm(plan, 8, compile_bytes)

The function that compiles is handed in: nothing here knows JAX.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.plan.found import Plan, Rejected
from jaxllm.plan.hardware import readable
from jaxllm.plan.search import CONFIGURATION, Progress

TRIES = 3
"""Times the number to be confirmed: so many candidates are compiled at most."""
MOST_OF_ERROR = 200
"""Characters of a compiler's complaint."""
COMPILED_ABOVE = "compiled above capacity"
COMPILE_REFUSED = "cannot be compiled"


CompileBytes = Callable[[Config], int]
"""What the compiled step of a config takes of one device."""


def confirm(
    plan: Plan,
    count: int,
    compile_bytes: CompileBytes,
    start: Callable[[], Executor] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Plan:
    """Compiles the best candidates until `count` of them are within the capacity by XLA's own bytes; those that are not, or
    cannot be compiled, are moved to the rejected, and the next best takes their place, up to TRIES x count compilations.

    What is compiled does not depend on which compilation ends first. A KeyboardInterrupt ends it with what there is.

    Args:
      compile_bytes: of a resolved config. ConfigError and RuntimeError (XLA's own among them) reject the candidate.
      start: makes an executor that runs compile_bytes; one whose worker dies is replaced, and who was in it runs alone, to
        tell who kills it. None: compile here, one after another.
      workers: so many at once.
    """
    start = start or Here
    executor = start()
    waiting = deque(range(len(plan.candidates)))
    running: dict[Future, int] = {}
    confirmed: dict[int, int] = {}
    refused: dict[int, tuple[str, str]] = {}
    tried, interrupted = 0, False
    try:
        while True:
            while waiting and len(running) < workers and len(confirmed) + len(running) < count and tried < TRIES * count:
                number = waiting.popleft()
                running[executor.submit(compile_bytes, plan.candidates[number].config)] = number
                tried += 1
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken: list[int] = []
            for future in done:
                number = running.pop(future)
                try:
                    size = future.result()
                except BrokenExecutor:
                    broken.append(number)
                except (ConfigError, RuntimeError) as error:
                    said = " ".join(str(error).split())[:MOST_OF_ERROR]
                    refused[number] = COMPILE_REFUSED, f"{plan.candidates[number].choice}: {said}"
                else:
                    if size <= plan.capacity_bytes:
                        confirmed[number] = size
                    else:
                        example = f"{plan.candidates[number].choice}: {readable(size)}"
                        refused[number] = COMPILED_ABOVE, example
            if broken:
                broken += running.values()
                running.clear()
                if len(broken) == 1 and workers == 1:
                    refused[broken[0]] = COMPILE_REFUSED, f"{plan.candidates[broken[0]].choice}: the compiler died of it"
                else:
                    waiting.extendleft(sorted(broken, reverse=True))
                    tried -= len(broken)
                executor, workers = start(), 1
            if progress is not None:
                progress("compiled", len(confirmed), min(count, len(plan.candidates)))
    except KeyboardInterrupt:
        interrupted = True
    return _with_figures(plan, count, confirmed, refused, interrupted)


def _with_figures(
    plan: Plan,
    count: int,
    confirmed: dict[int, int],
    refused: dict[int, tuple[str, str]],
    interrupted: bool,
) -> Plan:
    every = list(enumerate(plan.candidates))
    seen = [dataclasses.replace(one, compiled_bytes=confirmed[n]) for n, one in every if n in confirmed]
    rest = [one for n, one in every if n not in confirmed and n not in refused]
    classes: dict[str, list[str]] = {}
    for number in sorted(refused):
        reason, example = refused[number]
        classes.setdefault(reason, []).append(example)
    lines = [Rejected(CONFIGURATION, reason, len(examples), examples[0]) for reason, examples in classes.items()]
    because = plan.unconfirmed_because
    if interrupted:
        because = f"interrupted after {len(confirmed)} of {count} were confirmed"
    elif len(confirmed) < min(count, len(plan.candidates) - len(refused)):
        because = f"{len(refused)} of {len(confirmed) + len(refused)} that were compiled take too much or cannot be compiled"
    return dataclasses.replace(
        plan,
        candidates=(*seen, *rest),
        rejected=(*plan.rejected, *lines),
        interrupted=plan.interrupted or interrupted,
        confirmed=len(confirmed),
        unconfirmed_because=because,
    )


class Here(Executor):
    """Runs what is submitted at once, in this thread."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
