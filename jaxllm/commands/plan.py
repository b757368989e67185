"""`jaxllm plan`: the search, and compilations by compile_report that confirm its results.

    result = plan(config, gpu="h100-80gb", gpus=64, compile=8)
    result.best, result.candidates, result.rejected

Compilations run in processes of their own, each with its own JAX, because one takes a core or two for half a minute. If
processes cannot be started, they run in this process, one after another.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import Gpu, find_gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host, require_devices
from jaxllm.plan.confirm import Compiled, InlineExecutor, confirm
from jaxllm.plan.plan_result import Plan
from jaxllm.plan.quote import Quote, Terms, interruptions, quote
from jaxllm.plan.search import Progress, SearchOptions, best_with_fp8, search, why_nothing
from jaxllm.plan.sweep import (
    OBJECTIVES,
    Objective,
    Sweep,
    longest_sequence,
    objective_line,
    smallest_cluster,
    sweep_gpus,
)

log = logging.getLogger(__name__)

WORKERS = 2
"""Compilations at the same time; each uses one core most of the time."""


def plan(
    config: Config,
    gpu: str | Gpu = "h100-80gb",
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    *,
    compile: int = 0,
    objective: Objective = "speed",
    cache: Path | None = None,
    workers: int = WORKERS,
    progress: Progress | None = None,
    **rules: Any,
) -> Plan:
    """Searches pipe x data x context x tensor x ZeRO x microbatch x schedule x remat x offload_state for the
    fastest config that fits.

    The config gives model, sequence length, global batch and all other settings; with train.batch_schedule a step with the
    largest batch that the run reaches is planned. With parallel.replica all replicas get the same mesh. A KeyboardInterrupt
    stops the search, not the program: the plan then holds the best candidates so far and is marked as interrupted.

    Args:
      gpu: a kind, by name, by a YAML file that describes it, or as a Gpu.
      gpus: of all replicas; default: run.cpu_devices, or the size of the config's mesh. With objective=gpus, the upper limit.
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.
      compile: number of best candidates to confirm by compiling the train step, and to rank by its schedule. This needs the
        extra aot; without it, the plan is marked as not confirmed.
      objective: speed: tokens/s/GPU; gpus: the fewest GPUs on which any config fits; sequence: the longest sequence with which
        any config fits; microbatch: the largest. Ties go to the fastest.
      cache: folder of compile reports, read and extended.
      workers: compilations at the same time.
      rules: fields of SearchOptions. keep: settings that stay as the config has them: any of pipe, data, context, tensor, zero,
        schedule, remat, microbatch_sequences, offload_state. across_hosts: whether context x tensor may cross
        hosts; None: only if nothing fits otherwise. host_bytes_per_gpu: limit of host memory for offloading; None: the GPU's
        share of its host's.

    Raises:
      ConfigError: nothing fits (with the cheapest change that would), or an argument is invalid.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"--objective={objective} is not one of the choices: use {', '.join(OBJECTIVES)}.")
    if compile < 0:
        raise ConfigError(f"--compile={compile} is not valid: it should be 0, for none, or more.")
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    count = require_devices(config, gpus)
    options = SearchOptions(**{"largest_microbatch": objective == "microbatch", **rules})
    way = {"gpus": smallest_cluster, "sequence": longest_sequence}.get(objective, search)
    result = way(config, kind, count, gpus_per_host, options, progress=progress)
    if not result.candidates and not result.interrupted:
        raise ConfigError(why_nothing(result, options))
    try:
        result = result if result.interrupted else replace(result, with_fp8=best_with_fp8(result, options))
    except KeyboardInterrupt:
        result = replace(result, interrupted=True)
    if compile and not result.interrupted:
        result = _confirmed(result, compile, cache, workers, progress)
        if not result.candidates and not result.interrupted:
            refused = result.rejected[-1]
            raise ConfigError(
                f"No candidate remains on {result.gpus} x {kind.name}: all that should fit is {refused.reason}, such as "
                f"{refused.example}: use more GPUs, or shorter sequences."
            )
    return result


@dataclass(frozen=True)
class Request:
    """The command's arguments as typed; see plan()."""

    gpu: str = "h100-80gb"
    gpus: int | None = None
    gpus_per_host: int | None = None
    compile: int = 8
    objective: Objective = "speed"
    keep: tuple[str, ...] = ()
    across_hosts: bool | None = None
    host_gib_per_gpu: float | None = None
    terms: Terms = field(default_factory=Terms)
    """What a quote for the winner is asked for."""
    sweep: str | None = None
    """`gpus`: also plans for 1, 2, 4 ... up to all GPUs."""
    cache: str | None = None
    """None: jaxllm/compile in the user's cache folder."""
    no_cache: bool = False

    @property
    def rules(self) -> dict[str, Any]:
        """Fields of SearchOptions."""
        host_bytes = None if self.host_gib_per_gpu is None else self.host_gib_per_gpu * 2**30
        return {"keep": self.keep, "across_hosts": self.across_hosts, "host_bytes_per_gpu": host_bytes}


@dataclass(frozen=True)
class Outcome:
    """The complete result of `jaxllm plan`."""

    plan: Plan
    objective: Objective
    looked_for: str
    """The objective in words."""
    quote: Quote | None
    sweep: Sweep | None

    @property
    def interrupted(self) -> bool:
        return self.plan.interrupted or (self.sweep is not None and self.sweep.interrupted)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            **self.plan.to_json(),
            "objective": self.objective,
            "cost": None if self.quote is None else self.quote.cost.to_json(),
            "quote": None if self.quote is None else self.quote.to_json(),
            "sweep": None if self.sweep is None else self.sweep.to_json(),
        }

    def print(self, rows: int) -> None:
        """Prints to standard output; a file or a pipe gets the width that the tables need."""
        from rich.console import Console

        from jaxllm.plan.search_text import WIDTH, render

        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, width=WIDTH)
        console.print(render(self.plan, rows, self.quote, self.sweep, self.looked_for, console.width))


def outcome(config: Config, request: Request, progress: Progress | None = None) -> Outcome:
    """The plan of plan(), the quote for its winner, and the sweep.

    Raises:
      ConfigError: see plan() and quote(); or tokens or sweep cannot be parsed.
      KeyboardInterrupt: interrupted before any config that fits was found.
    """
    tokens = request.terms.number_of_tokens
    if request.sweep not in (None, "gpus"):
        raise ConfigError(f"--sweep={request.sweep} cannot be swept: use --sweep gpus.")
    most, kind = require_devices(config, request.gpus), find_gpu(request.gpu)
    # The search may take minutes: terms that no run can meet are refused before it.
    # With objective=gpus, --gpus is only an upper limit.
    if request.objective != "gpus":
        per_host, _ = choose_gpus_per_host(most, request.gpus_per_host, kind.gpus_per_host, config.parallel)
        interruptions(config, kind, most, per_host, request.terms)
    cache = None
    if request.compile and not request.no_cache:
        cache = Path(request.cache) if request.cache is not None else _cache_folder()
    result = plan(
        config,
        request.gpu,
        request.gpus,
        request.gpus_per_host,
        compile=request.compile,
        objective=request.objective,
        cache=cache,
        progress=progress,
        **request.rules,
    )
    if not result.candidates:
        raise KeyboardInterrupt
    sweep = None
    if request.sweep is not None and not result.interrupted:
        sweep = sweep_gpus(
            result.config,
            result.gpu,
            most,
            request.gpus_per_host,
            SearchOptions(**request.rules, largest_microbatch=request.objective == "microbatch"),
            known=result,
            tokens=tokens,
            progress=progress,
        )
    best = result.candidates[0]
    offer = quote(best.config, result.gpu, result.gpus_per_host, best.tokens_per_s_per_gpu, request.terms)
    return Outcome(result, request.objective, objective_line(request.objective, config, most), offer, sweep)


def _cache_folder() -> Path:
    # This imports JAX, which a plan by estimates alone does not need.
    from jaxllm.cluster.distributed import cache_folder

    return cache_folder() / "compile"


# ------------------------------------------------------------------------------------------------------- compiling


def _confirmed(result: Plan, count: int, cache: Path | None, workers: int, progress: Progress | None) -> Plan:
    from jaxllm.compile.aot import require_compiler

    try:
        require_compiler(result.gpu)
    except ConfigError as error:
        return replace(result, unconfirmed_because=str(error))
    compile_candidate = Compiler.of(result, cache)
    with processes(workers) as start:
        return confirm(result, count, compile_candidate, start, workers, progress)


@dataclass(frozen=True)
class Compiler:
    """The compile function for confirm(), in a form that can be sent to another process: figures of compile_report."""

    gpu: dict[str, Any]
    """Fields of a Gpu, with its read-only table as a dict."""
    gpus: int
    gpus_per_host: int
    cache: Path | None

    @classmethod
    def of(cls, result: Plan, cache: Path | None) -> Compiler:
        parts = {**vars(result.gpu), "dense_flops": dict(result.gpu.dense_flops)}
        return cls(parts, result.gpus, result.gpus_per_host, cache)

    def __call__(self, config: Config) -> Compiled:
        from jaxllm.compile.report import compile_report

        report = compile_report(config, Gpu(**self.gpu), self.gpus, self.gpus_per_host, cache=self.cache)
        return Compiled(report.total_bytes, report.host_bytes, report.exposed_transfers_s)


@contextmanager
def processes(workers: int) -> Iterator[Callable[[], Executor]]:
    """Yields a function that starts a new process pool in place of the previous one. On exit, all processes end, busy or
    not."""
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
        yield start
    finally:
        leave()


def _prepare_worker() -> None:
    # Ctrl-C reaches all processes of a terminal; the parent stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Warnings about a candidate appear for the winner, in `jaxllm compile` and in the run.
    logging.disable(logging.WARNING)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar for plan() on standard error; nothing if that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, Any] = {}
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda what, done, total: None
        return
    with Bar(*columns, console=console, transient=True) as bar:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show
