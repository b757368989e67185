"""The fastest remat policy with which a configuration fits: the steps of a search.

A trial is a configuration without its remat, and says whether activations may wait on the host. Of the rungs of its ladder
(remat_ladder.py), fastest first, the first that fits is taken. A rung is skipped unestimated where one of its family that was
estimated and does not fit keeps so little more that the rung cannot fit either.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

from jaxllm.config import Config, Remat
from jaxllm.config.remat_policy import offloads
from jaxllm.cost_model.hardware import FIT_SHARE, Gpu
from jaxllm.cost_model.hosts import host_bytes_per_gpu
from jaxllm.cost_model.memory import EstimateMemory, MemoryEstimate, estimate_memory
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import StepTime
from jaxllm.cost_model.step_sizes import slots_of
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.display import readable
from jaxllm.plan.plan_result import Candidate, Rejected
from jaxllm.plan.remat_ladder import FAMILY, Ladder, LeastStep, Rung, layer_of
from jaxllm.plan.space import Choice, Group, data_ranks

MESH, CONFIGURATION = "mesh", "configuration"
DOES_NOT_FIT = f"estimated above {FIT_SHARE:.0%} of the capacity"
HOST_FULL = "needs more host memory than a GPU's share"
_FAMILIES = [names for count in range(len(FAMILY) + 1) for names in combinations(FAMILY, count)]
LEAN: dict[bool, tuple[Remat, ...]] = {
    False: tuple(dict.fromkeys(names, "keep") or "full" for names in _FAMILIES),
    True: tuple({"block_input": "offload", **dict.fromkeys(names, "offload")} for names in _FAMILIES),
}
"""Policies of which one needs least on the device, without and with tensors on the host: one for each family of
remat_ladder.py. SwiGLU's products and attention's second output may take more while they are recomputed than while they are
kept, which a chunk of few layers notices."""
HOPELESS = 2
"""Multiple of the limit at which no other policy of LEAN is tried. Chosen: the largest difference seen was 23%."""
COPIES = 3
"""Layers of activations, beyond those of all slots, that XLA holds at most: copied from their stack and fetched
(cost_model/layer_backward.py). Not where it turns whole stacks (_first)."""

Progress = Callable[[str, int, int], None]
"""Called with (description of the work, amount done, total amount)."""


def silent(*_: object) -> None: ...


@dataclass(frozen=True)
class SearchOptions:
    """Choices and limits of a search."""

    keep: Collection[str] = ()
    """Names of space.KEEPABLE; these settings stay as the config has them."""
    across_hosts: bool | None = None
    """Whether context x tensor may cross hosts; None: only if nothing fits otherwise."""
    host_bytes_per_gpu: float | None = None
    """Limit of host memory for offloading; default: the kind's share (hosts.host_bytes_per_gpu)."""
    device_bytes: float | None = None
    """Limit for the estimate; default: FIT_SHARE of the kind's capacity."""
    largest_microbatch: bool = False
    """Whether to rank by microbatch first."""
    estimate: EstimateMemory | None = None
    """Default: estimate_memory."""
    step_time: Callable[[Config, Gpu, int], StepTime] = estimate_step_time
    """Takes a resolved config, a kind of GPU and the GPUs per host."""
    prune: bool = True
    """Whether to skip what needs more than a rejected neighbour (larger microbatches, and remat that keeps more), and what is
    slower than `best` others even with nothing recomputed."""
    best: int = 100
    """Number of candidates that are the fastest by the step-time model; the others are some of those that fit."""
    progress: Progress = silent

    def reaches(self) -> tuple[bool, ...]:
        """Values of `across_hosts` to try in turn."""
        return (False, True) if self.across_hosts is None else (self.across_hosts,)


@dataclass
class Tally:
    """Counts rejected meshes and configurations."""

    counts: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    leanest: tuple[Choice, int] | None = None
    """The one that needs least of those that do not fit, which add() counts; and its bytes."""

    def add(self, unit: str, reason: str, count: int, example: Choice | str) -> None:
        so_far, first = self.counts.get((unit, reason), (0, None))
        self.counts[unit, reason] = so_far + count, first or str(example)

    def count(self, unit: str) -> int:
        return sum(count for (counted, _), (count, _) in self.counts.items() if counted == unit)

    def rejected(self) -> tuple[Rejected, ...]:
        rows = []
        for (unit, reason), (count, example) in self.counts.items():
            if reason == DOES_NOT_FIT and self.leanest is not None:
                example = f"{self.leanest[0]}: {readable(self.leanest[1])}"
            rows.append(Rejected(unit, reason, count, example))
        return tuple(sorted(rows, key=lambda row: (row.unit != MESH, -row.count)))


@dataclass(frozen=True)
class Trial:
    """A configuration without its remat."""

    group: Group
    microbatch_sequences: int
    offload_state: str
    to_host: bool
    """Whether some activations wait on the host; else none does."""
    least_s: float = 0.0
    """Step time that no remat makes shorter, in seconds; 0 if it is not known."""

    @property
    def uses_host(self) -> bool:
        return self.to_host or self.offload_state != "none"

    def choice(self, remat: Remat) -> Choice:
        return self.group.choice(remat, self.microbatch_sequences, self.offload_state)


def ways(group: Group, keep: Collection[str]) -> tuple[bool, ...]:
    """Values of Trial.to_host."""
    return (offloads(group.remats[0]),) if "remat" in keep else (False, True)


class Fitting:
    """Finds the fastest remat of each trial of a search."""

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, options: SearchOptions):
        self.config, self.gpu, self.gpus_per_host = config, gpu, gpus_per_host
        self.keep, self.prune = options.keep, options.prune
        self.device_bytes = FIT_SHARE * gpu.capacity_bytes if options.device_bytes is None else options.device_bytes
        host_bytes = options.host_bytes_per_gpu
        self.host_bytes = host_bytes_per_gpu(gpu, gpus_per_host) if host_bytes is None else host_bytes
        self.estimate, self.step_time = options.estimate or partial(estimate_memory, gpu=gpu), options.step_time
        self.ladders: dict[tuple, Ladder] = {}
        self.tally = Tally()
        self.over: dict[tuple, tuple[int, str]] = {}
        """Trials that differ only in their microbatch -> the smallest that does not fit, and why."""
        self.sequences = config.largest_phase.sequences

    def model(self, choice: Choice, kind: type[StepModel] = LeastStep) -> StepModel:
        config = choice.applied_to(self.config).at_largest_batch
        return kind(config, self.gpu, self.gpus_per_host)

    def ladder(self, model: StepModel, own: bool = False) -> Ladder:
        key = (*layer_of(model), own)
        if key not in self.ladders:
            self.ladders[key] = Ladder(model, own)
        return self.ladders[key]

    def least_s(self, group: Group, microbatch_sequences: int) -> dict[str, float]:
        """offload_state -> a step time that no remat makes shorter.

        Of the ladder's policies none is faster than `selective` without copies into a stack; `none` is looked at too.
        """
        kept = group.remats[0] if "remat" in self.keep else None
        model = self.model(group.choice(kept or "selective", microbatch_sequences, "none"), StepModel if kept else LeastStep)
        least_s = model.time().step_s
        if kept is None and "none" in group.remats:
            least_s = min(least_s, self.model(group.choice("none", microbatch_sequences, "none"), StepModel).time().step_s)
        if self.config.data.mask_documents and model.has_own_layers and group.mesh.pipe == 1:
            # Here the loop of another policy may reduce gradients once a step (layer_stack.sends_once).
            least_s = 0.0
        return {state: least_s + model.state_offload_s(state) for state in group.offload_states}

    def fastest(self, trial: Trial) -> Candidate | str:
        """The fastest configuration that fits, or why none does."""
        share = self.sequences // data_ranks(self.config, trial.group.mesh)
        # A step of one microbatch accumulates no gradients, so it may need less memory than one of two smaller microbatches.
        alike = (trial.group, trial.offload_state, trial.to_host, trial.microbatch_sequences == share)
        if self.prune and alike in self.over and trial.microbatch_sequences >= self.over[alike][0]:
            return self.over[alike][1]
        refused: list[str] = []
        found = []
        for config, memory in self._that_fit(trial, refused):
            time = self.step_time(config.at_largest_batch, self.gpu, self.gpus_per_host)
            found.append(Candidate(config, memory.peak_bytes, memory.host_bytes, time))
        if found:
            return min(found, key=lambda one: one.step_s)
        reason = next((reason for reason in refused if reason == HOST_FULL), DOES_NOT_FIT)
        if alike not in self.over or trial.microbatch_sequences < self.over[alike][0]:
            self.over[alike] = trial.microbatch_sequences, reason
        return reason

    def leanest(self, trial: Trial, refused: list[str]) -> tuple[Config, MemoryEstimate] | None:
        """A configuration of the trial that fits if any does; else the reasons join `refused`."""
        for remat in trial.group.remats[:1] if "remat" in self.keep else LEAN[trial.to_host]:
            config, memory, over = self._judged(trial, remat)
            if over is None:
                return config, memory
            refused.append(over)
            if memory.peak_bytes > HOPELESS * self.device_bytes:
                break
        return None

    def _judged(self, trial: Trial, remat: Remat) -> tuple[Config, MemoryEstimate, str | None]:
        """(configuration, estimate, reason for rejection)."""
        choice = trial.choice(remat)
        config = choice.applied_to(self.config)
        memory = self.estimate(config.at_largest_batch)
        over = HOST_FULL if memory.host_bytes > self.host_bytes else None
        over = DOES_NOT_FIT if memory.peak_bytes > self.device_bytes else over
        if over == DOES_NOT_FIT and (self.tally.leanest is None or memory.peak_bytes < self.tally.leanest[1]):
            self.tally.leanest = choice, memory.peak_bytes
        return config, memory, over

    def _that_fit(self, trial: Trial, refused: list[str]) -> Iterator[tuple[Config, MemoryEstimate]]:
        """A few of a trial's configurations that fit, the fastest among them."""
        lean = self.leanest(trial, refused if self.prune or "remat" in self.keep else [])
        if "remat" in self.keep or (self.prune and lean is None):
            yield from [lean] if lean else []
            return
        model = self.model(trial.choice("selective"))
        ladder = self.ladder(model)
        own = [ladder.rung_of(remat) for remat in trial.group.remats if not isinstance(remat, str)]
        if trial.to_host:
            model.time()
            walks = [ladder.to_host(model, [rung for rung in own if rung.offloaded])]
        else:
            walks = [sorted((*ladder.on_device, *(rung for rung in own if not rung.offloaded)), key=lambda rung: rung.spent_s)]
        if not trial.to_host and model.has_own_layers:
            walks.append(list(self.ladder(model, own=True).on_device))
        over = len(refused)
        found = [one for walk in walks for one in self._first(trial, walk, refused)]
        yield from found or ([lean] if lean else [])
        # `none` keeps more than any other.
        if "none" in trial.group.remats and not trial.to_host and (len(refused) == over or not self.prune):
            config, memory, over = self._judged(trial, "none")
            if over is None:
                yield config, memory
            else:
                refused.append(over)

    def _first(self, trial: Trial, rungs: Sequence[Rung], refused: list[str]) -> Iterator[tuple[Config, MemoryEstimate]]:
        """The first rung that fits, if there is one."""
        config = trial.choice("full").applied_to(self.config).at_largest_batch
        p = config.parallel
        slots = slots_of(p.schedule, p.pipe, config.num_microbatches, p.virtual_stages)[0] if p.pipe > 1 else 1
        layers = slots * config.chunk_layers
        # XLA may turn whole stacks for the backward pass (cost_model/layer_backward.py), which bytes kept do not bound.
        turns = p.pipe == 1 and p.tensor > 1 and trial.microbatch_sequences > 1
        above: list[tuple[Rung, MemoryEstimate]] = []
        for rung in rungs:
            if self.prune and not turns and any(self._cannot_fit(rung, *other, layers) for other in reversed(above)):
                continue
            candidate, memory, over = self._judged(trial, rung.remat)
            if over is None:
                yield candidate, memory
                return
            refused.append(over)
            above.append((rung, memory))

    def _cannot_fit(self, rung: Rung, other: Rung, memory: MemoryEstimate, layers: int) -> bool:
        """Whether a rung is above a limit, by the estimate of another: where it keeps less, each layer and slot has less, and
        some copies; between families one layer's tensors may differ too."""
        less, less_out = max(0.0, other.kept - rung.kept), max(0.0, other.offloaded - rung.offloaded)
        least = memory.peak_bytes - (layers + COPIES) * less - COPIES * less_out
        if other.family != rung.family:
            least -= rung.whole
        host = memory.host_bytes - layers * (other.offloaded - rung.offloaded)
        return least > self.device_bytes or host > self.host_bytes
