"""Finds the fastest way to spread a config over GPUs that fits, by the estimates of memory and time.

    plan = search(config, find_gpu("h100-80gb"), gpus=64)
    plan.best                                       a resolved Config

Every configuration of the space (space.py) has a least step time, that with nothing recomputed and no activations on the host.
In its order they get the fastest remat with which they fit (fastest_remat.py), until the next one's least time is above the
time of enough others: by the step-time model all that is left is slower than these, whatever its remat. That is exact; which
remat a configuration gets is exact up to the grain of its ladder and the bounds by which rungs are skipped. Of configurations
with the same mesh, ZeRO, schedule and microbatch, one that has more on the host is looked at only while it may be faster.

The caller may pass other estimates. confirm.py confirms the result by compiling.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from jaxllm.config import Config
from jaxllm.config.attention import FIRST_WITH, require_trains
from jaxllm.config.checks import keeps_whole_layers, unlike_all_on_host
from jaxllm.config.model_spec import has_experts
from jaxllm.config.types import OFFLOAD_STATES
from jaxllm.cost_model.hardware import FIT_SHARE, Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.display import readable
from jaxllm.plan.fastest_remat import CONFIGURATION, HOST_FULL, MESH, Fitting, SearchOptions, Trial, silent, ways
from jaxllm.plan.plan_result import TIE_SHARE, Candidate, Plan, ranked
from jaxllm.plan.space import BEYOND_HOST, UNEVEN, Group, Mesh, data_ranks, groups, meshes, why_not

KEPT_AWAY = "--keep leaves no configuration"
GAINS_NOTHING = "as fast with another use of the host, or with none"
SLOWER = "slower than the best even with nothing recomputed"
WITHOUT_HOST = 24
"""Number of the fastest candidates with nothing on the host that are found too: as many as confirm.py may compile of eight."""
SHOWN = 256
"""Configurations between two reports of progress."""


def search(
    config: Config, gpu: Gpu, gpus: int, gpus_per_host: int | None = None, options: SearchOptions = SearchOptions()
) -> Plan:
    """Ranks the configurations of the space that fit by predicted tokens/s/GPU (plan_result.ranked). With train.batch_schedule
    the figures are those of a step with the largest batch that the run reaches.

    The config gives model, sequence length, global batch and every setting that is not searched. A KeyboardInterrupt stops the
    search, not the program: the plan then holds the results so far and is marked as interrupted.

    Args:
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.

    Raises:
      ConfigError: gpus_per_host does not divide gpus, `keep` has a name that is not KEEPABLE, or the GPU cannot run the model.
    """
    require_trains(config, gpu.chip.compute_capability, gpu.name, tensor=1)
    every = list(meshes(config, gpus, options.keep))
    per_host, because = choose_gpus_per_host(gpus, gpus_per_host, gpu.gpus_per_host, config.parallel)
    for across in options.reaches():
        run = _Run(Fitting(config, gpu, per_host, options), options)
        try:
            run.rank(run.trials(every, across))
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        if run.candidates or interrupted or (MESH, BEYOND_HOST) not in run.fitting.tally.counts:
            break

    return Plan(
        config=config,
        gpu=gpu,
        gpus=gpus,
        gpus_per_host=per_host,
        hosts_because=because,
        host_bytes_per_gpu=run.fitting.host_bytes,
        candidates=ranked(run.candidates, options.largest_microbatch),
        rejected=run.fitting.tally.rejected(),
        meshes=run.meshes,
        configurations=len(run.candidates) + run.fitting.tally.count(CONFIGURATION),
        leanest=run.fitting.tally.leanest,
        largest_microbatch=options.largest_microbatch,
        interrupted=interrupted,
    )


@dataclass
class _Run:
    """A search in progress."""

    fitting: Fitting
    options: SearchOptions
    candidates: list[Candidate] = field(default_factory=list)
    meshes: int = 0
    """Those looked at."""
    fastest: list[tuple[int, float]] = field(default_factory=list)
    """Keys of the best candidates, sorted."""
    fastest_alone: list[tuple[int, float]] = field(default_factory=list)
    """The same of those with nothing on the host."""
    of_base: dict[tuple[Group, int], float] = field(default_factory=dict)
    """Group and microbatch -> the shortest step so far."""

    def trials(self, every: list[Mesh], across: bool) -> list[Trial]:
        """Every configuration that divides, in the order in which they are looked at. Those that do not divide are
        counted."""
        found: list[Trial] = []
        for mesh in every:
            reason = why_not(self.fitting.config, mesh, self.fitting.gpus_per_host, across)
            every_group = () if reason else groups(self.fitting.config, mesh, self.fitting.gpus_per_host, self.options.keep)
            left = [group for group in every_group if group.microbatches or group.uneven_microbatches]
            self.meshes += 1
            if not left:
                self.fitting.tally.add(MESH, reason or KEPT_AWAY, 1, str(mesh))
            for group in left:
                found += self._of_group(group)
            self.options.progress("meshes", self.meshes, len(every))

        def key(trial: Trial) -> tuple:
            # Of the same least time those with less on the host first.
            on_host = OFFLOAD_STATES.index(trial.offload_state), trial.to_host
            return *self.key(trial.microbatch_sequences, trial.least_s), *on_host

        return sorted(found, key=key)

    def _of_group(self, group: Group) -> Iterator[Trial]:
        both = ways(group, self.options.keep)
        if refused := group.uneven_microbatches:
            count = len(group.offload_states) * len(both) * len(refused)
            example = group.choice(group.remats[0], refused[0], group.offload_states[0])
            self.fitting.tally.add(CONFIGURATION, UNEVEN, count, example)
        for microbatch in group.microbatches:
            least_s = self.fitting.least_s(group, microbatch) if self.bounds else {}
            for state in group.offload_states:
                for to_host in both:
                    yield Trial(group, microbatch, state, to_host, least_s.get(state, 0.0))

    @property
    def bounds(self) -> bool:
        """Whether least times are those of the model that ranks."""
        return self.options.prune and self.options.step_time is estimate_step_time

    def key(self, microbatch_sequences: int, step_s: float) -> tuple[int, float]:
        """Sort key, best first."""
        return -microbatch_sequences if self.options.largest_microbatch else 0, step_s

    def rank(self, trials: list[Trial]) -> None:
        """Finds the candidates among trials, which are in the order of their keys. The others are counted."""
        for number, trial in enumerate(trials):
            if number % SHOWN == 0 or number + 1 == len(trials):
                self.options.progress("configurations", number + 1, len(trials))
            base = (trial.group, trial.microbatch_sequences)
            if self._is_slower(trial):
                found = SLOWER
            elif self.bounds and trial.uses_host and trial.least_s >= self.of_base.get(base, float("inf")):
                found = GAINS_NOTHING
            else:
                found = self.fitting.fastest(trial)
                if self.bounds and isinstance(found, Candidate) and trial.uses_host:
                    found = GAINS_NOTHING if found.step_s >= self.of_base.get(base, float("inf")) else found
            if isinstance(found, str):
                self.fitting.tally.add(CONFIGURATION, found, 1, trial.choice("offload" if trial.to_host else "full"))
                continue
            self.candidates.append(found)
            self.of_base[base] = min(found.step_s, self.of_base.get(base, found.step_s))
            key = self.key(trial.microbatch_sequences, found.step_s)
            bisect.insort(self.fastest, key)
            if not trial.uses_host:
                bisect.insort(self.fastest_alone, key)

    def _is_slower(self, trial: Trial) -> bool:
        """Whether enough others are faster than the trial can be: of all, and of those with nothing on the host."""
        key, best = self.key(trial.microbatch_sequences, trial.least_s), self.options.best
        alone = min(best, WITHOUT_HOST)

        def beaten(fastest: list[tuple[int, float]], count: int) -> bool:
            if len(fastest) < count:
                return False
            microbatch, step_s = fastest[count - 1]
            # Not those that may tie with it.
            return key > (microbatch, step_s / (1 - TIE_SHARE))

        return self.bounds and beaten(self.fastest, best) and (trial.uses_host or beaten(self.fastest_alone, alone))


def best_with_fp8(plan: Plan, options: SearchOptions = SearchOptions()) -> Candidate | None:
    """The best candidate of the same search with model.matmul_dtype=fp8; None if nothing fits, the chip has no FP8, or the
    config asks for it already.

    Raises:
      KeyboardInterrupt: the search was interrupted.
    """
    model = plan.config.model
    if model.multiplies_fp8 or has_experts(model) or plan.gpu.chip.compute_capability < FIRST_WITH["fp8"]:
        return None
    config = plan.config.model_copy(update={"model": model.model_copy(update={"matmul_dtype": "fp8"})})
    found = search(config, plan.gpu, plan.gpus, plan.gpus_per_host, replace(options, best=1, progress=silent))
    if found.interrupted:
        raise KeyboardInterrupt
    return next(iter(found.candidates), None)


def any_fits(
    config: Config, gpu: Gpu, gpus: int, gpus_per_host: int | None = None, options: SearchOptions = SearchOptions()
) -> bool:
    """Whether the search would find a candidate. It stops at the first, and tries meshes that need least memory first."""
    keep = options.keep
    every = list(meshes(config, gpus, keep))
    per_host, _ = choose_gpus_per_host(gpus, gpus_per_host, gpu.gpus_per_host, config.parallel)
    fitting = Fitting(config, gpu, per_host, options)
    # Sharding the layers' work needs less memory than sharding the batch.
    every.sort(key=lambda mesh: mesh.data)
    return any(
        fitting.leanest(Trial(group, microbatch, state, to_host), [])
        for across in options.reaches()
        for mesh in every
        if why_not(config, mesh, per_host, across) is None
        for group in sorted(groups(config, mesh, per_host, keep), key=lambda group: -group.zero)
        for microbatch in _smallest(group, config)
        for state in reversed(group.offload_states)
        for to_host in ways(group, keep)
    )


def _smallest(group: Group, config: Config) -> tuple[int, ...]:
    """The microbatches that need least: the smallest, and the whole share of a data rank, which accumulates nothing."""
    share = config.largest_phase.sequences // data_ranks(config, group.mesh)
    return tuple(dict.fromkeys((*group.microbatches[:1], *(size for size in group.microbatches if size == share))))


# ---------------------------------------------------------------------------------------------- a plan without candidates

MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""Multiples of the present GPUs that are tried if nothing fits."""


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
        f"Nothing fits on {gpus} x {gpu.name}: of those that the GPU is too small for, the leanest takes {readable(size)} of "
        f"the {readable(FIT_SHARE * gpu.capacity_bytes)} available ({choice})"
    )
    if on_host := sum(row.count for row in plan.rejected if row.reason == HOST_FULL):
        limit = readable(plan.host_bytes_per_gpu)
        needs += f"; {on_host:,} that may fit there need more than {limit} of the host (--host-gib-per-gpu)"

    def fits(changed: Config, devices: int = gpus) -> bool:
        per_host = None if devices % plan.gpus_per_host else plan.gpus_per_host
        return any_fits(changed, gpu, devices, per_host, options)

    changes = list(_changes(config, gpus, fits, "offload_state" in options.keep))
    return f"{needs}: use {' or '.join(changes)}." if changes else f"{needs}: use a smaller model."


def _changes(config: Config, gpus: int, fits: Callable[..., bool], keeps_state: bool) -> Iterator[str]:
    """Changes that help. State on the host costs only time, so if it is kept elsewhere and is enough there is no second."""
    more_on_host = OFFLOAD_STATES[OFFLOAD_STATES.index(config.parallel.offload_state) + 1 :] if keeps_state else ()
    for state in more_on_host:
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
