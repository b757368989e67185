"""`jaxllm plan`: the search, and compilations that confirm its results.

    result = plan(config, gpu="h100-80gb", gpus=64, compile=8)
    result.best, result.candidates, result.rejected

Without compilations it imports no JAX.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.compile.confirm import compiler, confirm, processes
from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host, require_devices
from jaxllm.plan.fastest_remat import Progress, silent
from jaxllm.plan.plan_result import Plan
from jaxllm.plan.quote import Quote, Terms, interruptions, quote
from jaxllm.plan.search import SearchOptions, best_with_fp8, search, why_nothing
from jaxllm.plan.sweep import OBJECTIVES, Objective, Sweep, longest_sequence, objective_line, smallest_cluster, sweep_gpus
from jaxllm.terminal import console


def plan(
    config: Config,
    gpu: str | Gpu = "h100-80gb",
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    *,
    compile: int = 0,
    objective: Objective = "speed",
    cache: Path | None = None,
    workers: int = 2,
    progress: Progress = silent,
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
      workers: compilations at the same time; each uses one core most of the time.
      rules: fields of SearchOptions, such as keep: settings that stay as the config has them (space.KEEPABLE).

    Raises:
      ConfigError: nothing fits (with the cheapest change that would), or an argument is invalid.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"--objective={objective} is not one of the choices: use {', '.join(OBJECTIVES)}.")
    if compile < 0:
        raise ConfigError(f"--compile={compile} is not valid: it should be 0, for none, or more.")
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    count = require_devices(config, gpus)
    options = SearchOptions(**{"largest_microbatch": objective == "microbatch", "progress": progress, **rules})
    way = {"gpus": smallest_cluster, "sequence": longest_sequence}.get(objective, search)
    result = way(config, kind, count, gpus_per_host, options)
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
        return {
            **self.plan.to_json(),
            "objective": self.objective,
            "cost": None if self.quote is None else self.quote.cost.to_json(),
            "quote": None if self.quote is None else self.quote.to_json(),
            "sweep": None if self.sweep is None else self.sweep.to_json(),
        }

    def print(self, rows: int) -> None:
        """Prints to standard output; a file or a pipe gets the width that the tables need."""
        from jaxllm.plan.search_text import WIDTH, render

        out = console()
        if not out.is_terminal:
            out = console(width=WIDTH)
        out.print(render(self.plan, rows, self.quote, self.sweep, self.looked_for, out.width))


def outcome(
    config: Config,
    gpu: str = "h100-80gb",
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    *,
    compile: int = 0,
    objective: Objective = "speed",
    terms: Terms = Terms(),
    sweep: str | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
    **rules: Any,
) -> Outcome:
    """The plan of plan(), which has the other arguments, the quote for its winner, and the sweep.

    Args:
      terms: what the quote is asked for.
      sweep: `gpus`: also plans for 1, 2, 4 ... up to all GPUs.

    Raises:
      ConfigError: see plan() and quote(); or tokens or sweep cannot be parsed.
      KeyboardInterrupt: interrupted before any config that fits was found.
    """
    tokens = terms.number_of_tokens
    if sweep not in (None, "gpus"):
        raise ConfigError(f"--sweep={sweep} cannot be swept: use --sweep gpus.")
    most, kind = require_devices(config, gpus), find_gpu(gpu)
    # The search may take minutes: terms that no run can meet are refused before it.
    # With objective=gpus, --gpus is only an upper limit.
    if objective != "gpus":
        per_host, _ = choose_gpus_per_host(most, gpus_per_host, kind.gpus_per_host, config.parallel)
        interruptions(config, kind, most, per_host, terms)
    options: dict[str, Any] = {"compile": compile, "objective": objective, "cache": cache, "progress": progress, **rules}
    result = plan(config, kind, gpus, gpus_per_host, **options)
    if not result.candidates:
        raise KeyboardInterrupt
    swept = None
    if sweep is not None and not result.interrupted:
        limits = SearchOptions(**rules, largest_microbatch=objective == "microbatch", progress=progress)
        swept = sweep_gpus(result.config, kind, most, gpus_per_host, limits, known=result, tokens=tokens)
    best = result.candidates[0]
    offer = quote(best.config, kind, result.gpus_per_host, best.tokens_per_s_per_gpu, terms)
    return Outcome(result, objective, objective_line(objective, config, most), offer, swept)


def _confirmed(result: Plan, count: int, cache: Path | None, workers: int, progress: Progress) -> Plan:
    from jaxllm.compile.aot import require_compiler

    try:
        require_compiler(result.gpu)
    except ConfigError as error:
        return replace(result, unconfirmed_because=str(error))
    with processes(workers) as start:
        return confirm(result, count, compiler(result, cache), start, workers, progress)
