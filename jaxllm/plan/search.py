"""Finds the fastest way to spread a config over GPUs that fits, by the estimates of memory and time.

    plan = search(config, find_gpu("h100-80gb"), gpus=64)
    plan.best                                       a resolved Config

The caller may pass other estimates. confirm.py confirms the result by compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxllm.config import Config
from jaxllm.config.capability import require_runs
from jaxllm.config.checks import keeps_whole_layers, unlike_all_on_host
from jaxllm.config.types import OFFLOAD_STATES
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import MemoryEstimate, estimate_memory
from jaxllm.cost_model.step_parts import StepTime
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.display import readable
from jaxllm.plan.plan_result import FIT_SHARE, Candidate, Plan, Rejected
from jaxllm.plan.space import (
    BEYOND_HOST,
    UNEVEN,
    Choice,
    Group,
    groups,
    meshes,
    remat_text,
    why_not,
)

HOST_BYTES_PER_GPU = 128 * 2**30
"""Host memory per GPU for offloading: 1 TB for eight GPUs, as in the smaller DGX A100; a DGX H100 has twice that (NVIDIA's data
sheets)."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""Multiples of the present GPUs that are tried if nothing fits."""
MESH, CONFIGURATION = "mesh", "configuration"
KEPT_AWAY = "--keep leaves no configuration"
DOES_NOT_FIT = f"estimated above {FIT_SHARE:.0%} of the capacity"
HOST_FULL = "needs more host memory than a GPU's share"
_LEANER = {"selective": "full", "none": "selective"}
"""Remat policy -> a policy that never needs more memory."""


EstimateMemory = Callable[[Config], MemoryEstimate]
EstimateTime = Callable[[Config, Gpu, int], StepTime]
"""Takes a resolved config, a kind of GPU and the GPUs per host."""
Progress = Callable[[str, int, int], None]
"""Called with (description of the work, amount done, total amount)."""


@dataclass(frozen=True)
class Limits:
    """Memory limits of a configuration, per GPU."""

    device_bytes: float
    """Limit for the estimate."""
    host_bytes: float

    def broken_by(self, memory: MemoryEstimate) -> str | None:
        """The reason for rejection; None if it fits."""
        if memory.peak_bytes > self.device_bytes:
            return DOES_NOT_FIT
        return HOST_FULL if memory.host_bytes > self.host_bytes else None


@dataclass
class _Tally:
    """Counts rejected meshes and configurations."""

    counts: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    leanest: tuple[Choice, int] | None = None

    def add(self, unit: str, reason: str, count: int, example: Choice | str) -> None:
        so_far, first = self.counts.get((unit, reason), (0, None))
        self.counts[unit, reason] = so_far + count, first or str(example)

    def count(self, unit: str) -> int:
        return sum(count for (counted, _), (count, _) in self.counts.items() if counted == unit)

    def see(self, choice: Choice, memory: MemoryEstimate) -> None:
        """Records one that does not fit. add() counts it."""
        if self.leanest is None or memory.peak_bytes < self.leanest[1]:
            self.leanest = choice, memory.peak_bytes

    def rejected(self) -> tuple[Rejected, ...]:
        rows = []
        for (unit, reason), (count, example) in self.counts.items():
            if reason == DOES_NOT_FIT and self.leanest is not None:
                example = f"{self.leanest[0]}: {readable(self.leanest[1])}"
            rows.append(Rejected(unit, reason, count, example))
        return tuple(sorted(rows, key=lambda row: (row.unit != MESH, -row.count)))


@dataclass(frozen=True)
class SearchOptions:
    """Choices and limits of a search."""

    keep: Collection[str] = ()
    """Names of space.KEEPABLE; these settings stay as the config has them."""
    across_hosts: bool | None = None
    """Whether context x tensor may cross hosts; None: only if nothing fits otherwise."""
    host_bytes_per_gpu: float = HOST_BYTES_PER_GPU
    """Limit of host memory for offloading."""
    device_bytes: float | None = None
    """Limit for the estimate; default: FIT_SHARE of the kind's capacity."""
    largest_microbatch: bool = False
    """Whether to rank by microbatch first."""
    estimate: EstimateMemory | None = None
    """Default: estimate_memory."""
    step_time: EstimateTime = estimate_step_time
    prune: bool = True
    """Whether to skip what needs more than a rejected neighbour: larger microbatches, and remat that keeps more."""

    def limits(self, gpu: Gpu) -> Limits:
        device_bytes = FIT_SHARE * gpu.capacity_bytes if self.device_bytes is None else self.device_bytes
        return Limits(device_bytes, self.host_bytes_per_gpu)

    def reaches(self) -> tuple[bool, ...]:
        """Values of `across_hosts` to try in turn."""
        return (False, True) if self.across_hosts is None else (self.across_hosts,)


def search(
    config: Config,
    gpu: Gpu,
    gpus: int,
    gpus_per_host: int | None = None,
    options: SearchOptions = SearchOptions(),
    *,
    progress: Progress | None = None,
) -> Plan:
    """Estimates every configuration of the space (space.py) and ranks those that fit by predicted tokens/s/GPU, then by bytes.
    With train.batch_schedule the figures are those of a step with the largest batch that the run reaches.

    The config gives model, sequence length, global batch and every setting that is not searched. A KeyboardInterrupt stops the
    search, not the program: the plan then holds the results so far and is marked as interrupted.

    Args:
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.

    Raises:
      ConfigError: gpus_per_host does not divide gpus, `keep` has a name that is not KEEPABLE, or the GPU cannot run the model.
    """
    require_runs(config.model, gpu.chip.compute_capability, gpu.name)
    per_host, because = choose_gpus_per_host(gpus, gpus_per_host, gpu.gpus_per_host)
    estimate = options.estimate or partial(estimate_memory, gpu=gpu)
    keep, limits = options.keep, options.limits(gpu)
    candidates: list[Candidate] = []
    for across in options.reaches():
        tally, interrupted = _Tally(), False
        every = list(meshes(config, gpus, keep))
        seen = 0
        try:
            for mesh in every:
                reason, left = why_not(config, mesh, per_host, across), []
                if reason is None:
                    left = [group for group in groups(config, mesh, keep) if group.microbatches or group.uneven_microbatches]
                    reason = None if left else KEPT_AWAY
                seen += 1
                if reason is not None:
                    tally.add(MESH, reason, 1, str(mesh))
                for group in left:
                    for candidate, memory in _fitting(config, group, limits, estimate, tally, options.prune):
                        speed = options.step_time(candidate.at_largest_batch, gpu, per_host)
                        candidates.append(Candidate(candidate, memory.peak_bytes, memory.host_bytes, speed))
                if progress is not None:
                    progress("meshes", seen, len(every))
        except KeyboardInterrupt:
            interrupted = True
        if candidates or interrupted or (MESH, BEYOND_HOST) not in tally.counts:
            break

    return Plan(
        config=config,
        gpu=gpu,
        gpus=gpus,
        gpus_per_host=per_host,
        hosts_because=because,
        host_bytes_per_gpu=options.host_bytes_per_gpu,
        candidates=tuple(sorted(candidates, key=lambda one: one.rank(options.largest_microbatch))),
        rejected=tally.rejected(),
        meshes=seen,
        configurations=len(candidates) + tally.count(CONFIGURATION),
        leanest=tally.leanest,
        largest_microbatch=options.largest_microbatch,
        interrupted=interrupted,
    )


def any_fits(
    config: Config, gpu: Gpu, gpus: int, gpus_per_host: int | None = None, options: SearchOptions = SearchOptions()
) -> bool:
    """Whether the search would find a candidate. It stops at the first, and tries meshes that need least memory first."""
    per_host, _ = choose_gpus_per_host(gpus, gpus_per_host, gpu.gpus_per_host)
    keep, limits, estimate = options.keep, options.limits(gpu), options.estimate or partial(estimate_memory, gpu=gpu)
    every = list(meshes(config, gpus, keep))
    # Sharding the layers' work needs less memory than sharding the batch.
    every.sort(key=lambda mesh: mesh.data)
    for across in options.reaches():
        for mesh in every:
            if why_not(config, mesh, per_host, across) is None:
                for group in sorted(groups(config, mesh, keep), key=lambda group: -group.zero):
                    if next(_fitting(config, group, limits, estimate, _Tally(), prune=True), None) is not None:
                        return True
    return False


def _fitting(
    config: Config, group: Group, limits: Limits, estimate: EstimateMemory, tally: _Tally, prune: bool
) -> Iterator[tuple[Config, MemoryEstimate]]:
    """The configurations of a group that fit; the others are counted."""
    if refused := group.uneven_microbatches:
        example = group.choice(group.remats[0], refused[0])
        tally.add(CONFIGURATION, UNEVEN, len(group.remats) * len(refused), example)
    share = config.largest_phase.sequences // group.mesh.data
    # A step of one microbatch accumulates no gradients, so it may need less memory than one of two smaller microbatches.
    several, one = (tuple(size for size in group.microbatches if (size == share) == is_one) for is_one in (False, True))
    for sizes in (several, one):
        yield from _fitting_of(config, group, sizes, limits, estimate, tally, prune)


def _fitting_of(
    config: Config,
    group: Group,
    sizes: Sequence[int],
    limits: Limits,
    estimate: EstimateMemory,
    tally: _Tally,
    prune: bool,
) -> Iterator[tuple[Config, MemoryEstimate]]:
    """The same for some of the microbatch sizes, ascending."""
    first_over: dict[str, tuple[int, str]] = {}
    for remat in group.remats:
        name = remat_text(remat)
        end, reason = len(sizes), None
        if prune and (leaner := _LEANER.get(name)) in first_over:
            end, reason = first_over[leaner]
        for number, microbatch in enumerate(sizes[:end]):
            choice = group.choice(remat, microbatch)
            candidate = choice.applied_to(config)
            memory = estimate(candidate.at_largest_batch)
            over = limits.broken_by(memory)
            if over is None:
                yield candidate, memory
                continue
            if over == DOES_NOT_FIT:
                tally.see(choice, memory)
            if prune:
                end, reason = number, over
                break
            tally.add(CONFIGURATION, over, 1, choice)
        if reason is not None:
            tally.add(CONFIGURATION, reason, len(sizes) - end, group.choice(remat, sizes[end]))
            first_over[name] = end, reason


# ----------------------------------------------------------------------------------------------------- nothing fits


def why_nothing(plan: Plan, options: SearchOptions = SearchOptions()) -> str:
    """One sentence for a plan without candidates: the obstacle, and the cheapest changes that help."""
    config, gpu, gpus = plan.config, plan.gpu, plan.gpus
    if not plan.rejected:
        return f"--keep leaves no configuration of {gpus} GPUs: change --gpus, or keep less."
    if plan.leanest is None:
        worst = max(plan.rejected, key=lambda row: row.count)
        return (
            f"No configuration for {gpus} x {gpu.name} is possible, mostly because {worst.reason} ({worst.count:,}, such as "
            f"{worst.example}): change --gpus, train.global_batch_sequences or --keep."
        )
    choice, size = plan.leanest
    needs = (
        f"Nothing fits on {gpus} x {gpu.name}: the leanest of {plan.configurations:,} configurations takes {readable(size)} of "
        f"the {readable(FIT_SHARE * gpu.capacity_bytes)} available ({choice})"
    )

    def fits(changed: Config, devices: int = gpus) -> bool:
        per_host = None if devices % plan.gpus_per_host else plan.gpus_per_host
        return any_fits(changed, gpu, devices, per_host, options)

    changes = list(_changes(config, gpus, fits))
    return f"{needs}: use {' or '.join(changes)}." if changes else f"{needs}: use a smaller model."


def _changes(config: Config, gpus: int, fits: Callable[..., bool]) -> Iterator[str]:
    """Changes that help. The first costs only time, so if it is enough there is no second."""
    for state in OFFLOAD_STATES[OFFLOAD_STATES.index(config.parallel.offload_state) + 1 :]:
        parallel = config.parallel.model_copy(update={"offload_state": state})
        if unlike_all_on_host(config.model, parallel.model_copy(update={"pipe": 1}), config.log):
            continue
        if fits(config.model_copy(update={"parallel": parallel})):
            keys = [f"parallel.offload_state={state}"]
            if state == "all":
                keys += ["parallel.pipe=1"] if config.parallel.pipe > 1 else []
                keys += ["parallel.zero=3"] if keeps_whole_layers(config.parallel) else []
            yield " ".join(keys)
            return
    for factor in MORE_GPUS:
        if fits(config, gpus * factor):
            yield f"--gpus={gpus * factor}"
            break
    S = config.train.sequence_length
    for length in (S // 2**power for power in range(1, S.bit_length())):
        if fits(config.model_copy(update={"train": config.train.model_copy(update={"sequence_length": length})})):
            yield f"train.sequence_length={length}"
            return
