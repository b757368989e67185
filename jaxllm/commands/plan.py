"""`jaxllm plan`: the search, with compilations by compile_report to confirm what it finds.

    found = plan(config, gpu="h100-80gb", gpus=64, compile=8)
    found.best, found.candidates, found.rejected

Compilations run in processes of their own, JAX in each, since one takes a core or two for half a minute. Where processes cannot
be started they run here, one after another.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.flops import parameter_count, train_flops_per_token
from jaxllm.cost_model.hardware import Gpu, find_gpu
from jaxllm.cost_model.hosts import require_devices
from jaxllm.plan.confirm import Here, confirm
from jaxllm.plan.cost import TrainingCost, board_watts, parse_tokens, training_cost
from jaxllm.plan.plan_result import Plan
from jaxllm.plan.search import HOST_BYTES_PER_GPU, Progress, SearchOptions, search, why_nothing
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
"""Compilations at once: each takes one core most of the time."""


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
    """Searches pipe x data x context x tensor x ZeRO x microbatch x schedule x remat for what fits and is fastest.

    The config gives model, sequence length, global batch and all the rest. A KeyboardInterrupt ends the search, not the
    program: the plan then holds the best so far, and says so.

    Args:
      gpu: a kind, by name, by a YAML file that describes it, or as a Gpu.
      gpus: how many; default: run.cpu_devices, or as many as the config's mesh. With objective=gpus: at most so many.
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.
      compile: so many of the best are confirmed by compiling the train step; needs the extra aot, without which the plan says
        that it is not confirmed.
      objective: speed: tokens/s/GPU; gpus: the fewest GPUs that anything fits on; sequence: the longest sequence of which
        anything fits; microbatch: the largest. Each then the fastest.
      cache: a folder of compile reports, to take from and add to.
      workers: compilations at once.
      rules: fields of SearchOptions. keep: what is left as the config has it: any of pipe, data, context, tensor, zero,
        schedule, remat, microbatch_sequences. across_hosts: whether context x tensor may reach beyond a host; None: where
        nothing fits otherwise. host_bytes_per_gpu: what offloading may take of the host's memory.

    Raises:
      ConfigError: nothing fits (with the cheapest change that would), or an argument cannot be.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"--objective={objective} is not one of the choices: use {', '.join(OBJECTIVES)}.")
    if compile < 0:
        raise ConfigError(f"--compile={compile} is not valid: it should be 0, for none, or more.")
    if (islands := config.parallel.replica) > 1:
        raise ConfigError(
            f"A plan is for one island, not parallel.replica={islands}: set parallel.replica=1 and --gpus to one island's."
        )
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    count = require_devices(config, gpus)
    options = SearchOptions(**{"largest_microbatch": objective == "microbatch", **rules})
    if objective == "gpus":
        found = smallest_cluster(config, kind, count, gpus_per_host, options, progress=progress)
    elif objective == "sequence":
        found = longest_sequence(config, kind, count, gpus_per_host, options, progress=progress)
    else:
        found = search(config, kind, count, gpus_per_host, options, progress=progress)
    if not found.candidates and not found.interrupted:
        raise ConfigError(why_nothing(found, options))
    if compile and not found.interrupted:
        found = _confirmed(found, compile, cache, workers, progress)
        if not found.candidates and not found.interrupted:
            refused = found.rejected[-1]
            raise ConfigError(
                f"Nothing is left on {found.gpus} x {kind.name}: all that should fit is {refused.reason}, such as "
                f"{refused.example}: use more GPUs, or shorter sequences."
            )
    return found


@dataclass(frozen=True)
class Request:
    """What the command asks for, as it was typed; see plan()."""

    gpu: str = "h100-80gb"
    gpus: int | None = None
    gpus_per_host: int | None = None
    compile: int = 8
    objective: Objective = "speed"
    keep: tuple[str, ...] = ()
    across_hosts: bool | None = None
    host_gib_per_gpu: float = HOST_BYTES_PER_GPU / 2**30
    tokens: str | None = None
    """15T: what so many cost."""
    sweep: str | None = None
    """gpus: the best of 1, 2, 4 ... up to all GPUs besides."""
    cache: str | None = None
    """None: jaxllm/compile in the user's cache."""
    no_cache: bool = False

    @property
    def rules(self) -> dict[str, Any]:
        """Fields of SearchOptions."""
        host_bytes = self.host_gib_per_gpu * 2**30
        return {"keep": self.keep, "across_hosts": self.across_hosts, "host_bytes_per_gpu": host_bytes}


@dataclass(frozen=True)
class Outcome:
    """The whole of `jaxllm plan`."""

    plan: Plan
    objective: Objective
    looked_for: str
    """The objective in words."""
    cost: TrainingCost | None
    sweep: Sweep | None

    @property
    def interrupted(self) -> bool:
        return self.plan.interrupted or (self.sweep is not None and self.sweep.interrupted)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            **self.plan.to_json(),
            "objective": self.objective,
            "cost": None if self.cost is None else self.cost.to_json(),
            "sweep": None if self.sweep is None else self.sweep.to_json(),
        }

    def print(self, rows: int) -> None:
        """On standard output; a file or a pipe gets the width that the tables want."""
        from rich.console import Console

        from jaxllm.plan.search_text import WIDTH, render

        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, width=WIDTH)
        console.print(render(self.plan, rows, self.cost, self.sweep, self.looked_for, console.width))


def outcome(config: Config, request: Request, progress: Progress | None = None) -> Outcome:
    """The plan of plan(), what its winner costs, and the sweep.

    Raises:
      ConfigError: as plan(); tokens or sweep cannot be read.
      KeyboardInterrupt: before anything that fits was found.
    """
    tokens = None if request.tokens is None else parse_tokens(request.tokens)
    if request.sweep not in (None, "gpus"):
        raise ConfigError(f"--sweep={request.sweep} is nothing to sweep: use --sweep gpus.")
    cache = None
    if request.compile and not request.no_cache:
        cache = Path(request.cache) if request.cache is not None else _cache_folder()
    found = plan(
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
    if not found.candidates:
        raise KeyboardInterrupt
    sweep, most = None, require_devices(config, request.gpus)
    if request.sweep is not None and not found.interrupted:
        sweep = sweep_gpus(
            found.config,
            found.gpu,
            most,
            request.gpus_per_host,
            SearchOptions(**request.rules, largest_microbatch=request.objective == "microbatch"),
            known=found,
            tokens=tokens,
            progress=progress,
        )
    cost = None if tokens is None else cost_of(found, tokens)
    return Outcome(found, request.objective, objective_line(request.objective, config, most), cost, sweep)


def cost_of(found: Plan, tokens: float) -> TrainingCost:
    """What the winner takes for so many tokens, at its predicted speed."""
    model = found.config.model
    flops = train_flops_per_token(model, found.config.train.sequence_length)
    speed = found.candidates[0].tokens_per_s_per_gpu
    watts = board_watts(found.gpu)
    return training_cost(parameter_count(model), tokens, speed * flops, found.gpus, flops_per_token=flops, watts_per_gpu=watts)


def _cache_folder() -> Path:
    # Brings in JAX, which a plan by estimates alone does without.
    from jaxllm.runtime.distributed import cache_folder

    return cache_folder() / "compile"


# ------------------------------------------------------------------------------------------------------- compiling


def _confirmed(found: Plan, count: int, cache: Path | None, workers: int, progress: Progress | None) -> Plan:
    from jaxllm.compile.aot import can_compile_for_gpus, gpu_devices

    if not can_compile_for_gpus():
        try:
            gpu_devices(1, 1)
        except ConfigError as error:
            return replace(found, unconfirmed_because=str(error))
    compile_bytes = Compiler.of(found, cache)
    with processes(workers) as start:
        return confirm(found, count, compile_bytes, start, workers, progress)


@dataclass(frozen=True)
class Compiler:
    """compile_report's bytes as confirm() wants them, in a form that can be sent to another process."""

    gpu: dict[str, Any]
    """Fields of a Gpu, its read-only table as a dict."""
    gpus: int
    gpus_per_host: int
    cache: Path | None

    @classmethod
    def of(cls, found: Plan, cache: Path | None) -> Compiler:
        parts = {**vars(found.gpu), "dense_flops": dict(found.gpu.dense_flops)}
        return cls(parts, found.gpus, found.gpus_per_host, cache)

    def __call__(self, config: Config) -> int:
        from jaxllm.compile.report import compile_report

        return compile_report(config, Gpu(**self.gpu), self.gpus, self.gpus_per_host, cache=self.cache).total_bytes


@contextmanager
def processes(workers: int) -> Iterator[Callable[[], Executor]]:
    """What makes pools of so many processes, each instead of the last; when it closes, so do they, busy or not."""
    before = set(multiprocessing.active_children())
    pools: list[ProcessPoolExecutor] = []

    def leave() -> None:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        pools.clear()
        # A pool waits for what runs in it: half a minute, after Ctrl-C.
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()

    def start() -> Executor:
        leave()
        try:
            # Not forked: JAX may have threads here already.
            spawn = multiprocessing.get_context("spawn")
            pools.append(ProcessPoolExecutor(workers, mp_context=spawn, initializer=_prepare_worker))
            pools[0].submit(int).result()
            return pools[0]
        except (OSError, BrokenExecutor) as error:
            # Also of a script without `if __name__ == "__main__"`: a process that imports it gets here too, and must end.
            log.warning("No processes to compile in (%s): compiling here, one after another.", error)
            return Here()

    try:
        yield start
    finally:
        leave()


def _prepare_worker() -> None:
    # Ctrl-C reaches all processes of a terminal; the first of them sees to the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is worth saying about a candidate is said of the winner, by `jaxllm compile` and the run.
    logging.disable(logging.WARNING)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error for what plan() reports; nothing where that is no terminal."""
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
