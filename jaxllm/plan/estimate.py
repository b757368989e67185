"""Memory and speed of a config, by closed forms alone: what `jaxllm estimate` prints. No JAX.

report = estimate(config, gpu="h100-80gb", gpus=64)
report.fits, report.memory.peak_bytes, report.speed.tokens_per_s_per_gpu
print("\\n".join(report.lines()))
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import AMPERE, HOPPER, require_trains
from jaxllm.config.model_spec import has_experts
from jaxllm.config.named import title_of
from jaxllm.config.remat_policy import remat_words
from jaxllm.config.types import zero_text
from jaxllm.cost_model import flops
from jaxllm.cost_model.error_range import ErrorRange, error_range, range_json, range_lines
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import FIT_SHARE, Gpu, capacity_text, fits_text
from jaxllm.cost_model.hosts import HOST_GPUS, choose_gpus_per_host, hosts_text, require_devices
from jaxllm.cost_model.megatron import SAFE_SHARE, megatron_memory, nominal_bytes, record_text
from jaxllm.cost_model.memory import MemoryEstimate, StageMemory, estimate_memory
from jaxllm.cost_model.replicas import exchange_json, exchange_lines
from jaxllm.cost_model.step_parts import StepTime
from jaxllm.cost_model.step_time import CONVENTIONS, Convention, estimate_step_time, step_time_lines
from jaxllm.display import preformatted, readable
from jaxllm.plan.advice import Change, changes_that_fit

LABEL_WIDTH = 28
"""Characters of a table's first column."""
MOST_CHANGES = 4
"""Changes listed of those that would fit."""


@dataclass(frozen=True)
class Verdict:
    """Bytes of one device by one convention, and their limit."""

    memory: MemoryEstimate
    capacity_bytes: int | None
    """None without a GPU."""

    @property
    def fits(self) -> bool | None:
        """Whether the fullest stage is within the capacity; None without a GPU."""
        return None if self.capacity_bytes is None else self.memory.peak_bytes <= self.capacity_bytes

    def to_json(self) -> dict[str, Any]:
        stages = [{**vars(one), "total_bytes": one.total_bytes} for one in self.memory.stages]
        sizes = {"peak_bytes": self.memory.peak_bytes, "capacity_bytes": self.capacity_bytes}
        share = None if self.capacity_bytes is None else self.memory.peak_bytes / self.capacity_bytes
        moment = self.memory.moment or None
        return {"stages": stages, "moment": moment, **sizes, "share_of_capacity": share, "fits": self.fits}


@dataclass(frozen=True)
class Estimate:
    """The complete result of `jaxllm estimate`. Memory, capacity and verdict are those of the requested convention."""

    config: Config
    """Resolved for the given number of GPUs."""
    gpu: Gpu | None
    gpus_per_host: int
    hosts_because: str
    convention: Convention
    by_convention: dict[str, Verdict]
    """jaxllm's own, always; the published rule for Megatron-LM if requested."""
    speed: StepTime | None
    """None without a GPU."""
    changes: tuple[Change, ...] = ()
    """Changes with which the config would fit with FIT_SHARE to spare, cheapest first; empty if jaxllm's own estimate fits."""

    def __repr__(self) -> str:
        on = f"{self.devices} x {self.gpu.name}" if self.gpu else f"{self.devices} GPUs"
        verdict = {None: "", True: ", which fits", False: ", which does not fit"}[self.fits]
        speed = f"; {self.speed.tokens_per_s_per_gpu:,.0f} tokens/s/GPU predicted" if self.speed else ""
        return f"<Estimate for {on}: {readable(self.peak_bytes)} on the fullest{verdict}{speed}>"

    def _repr_html_(self) -> str:
        return preformatted("\n".join(self.lines()))

    @property
    def verdict(self) -> Verdict:
        return self.by_convention[self.convention]

    @property
    def memory(self) -> MemoryEstimate:
        return self.verdict.memory

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest stage."""
        return self.memory.peak_bytes

    @property
    def capacity_bytes(self) -> int | None:
        return self.verdict.capacity_bytes

    @property
    def fits(self) -> bool | None:
        return self.verdict.fits

    @property
    def devices(self) -> int:
        return self.memory.devices

    @property
    def host_bytes(self) -> int:
        """Bytes per device in host memory, by jaxllm's own estimate."""
        return self.by_convention["jaxllm"].memory.host_bytes

    @property
    def speed_range(self) -> ErrorRange:
        """How far off the speed may be; needs a GPU."""
        if self.gpu is None:
            raise ValueError("Without a GPU there is no speed, and no range of it.")
        return error_range(self.config, self.gpu, self.gpus_per_host, self.convention)

    @property
    def mfu(self) -> float | None:
        """Share of the dense peak of the compute dtype, with causal attention counted, for every convention."""
        if self.speed is None or self.gpu is None:
            return None
        model, peak = self.config.model, self.gpu.peak_flops(self.config.model.compute_dtype)
        return flops.mfu(self.speed.tokens_per_s_per_gpu, model, self.config.train.sequence_length, peak, self.config.frozen)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers. `stages` to `fits` are the convention's; `by_convention` has all of them."""
        speed, parallel = self.speed, self.config.parallel
        axes = ("replica",) * (parallel.replica > 1) + ("pipe", "data", "context", "tensor")
        own = ("devices", "gpus_per_host", "hosts_because", "convention", "host_bytes", "mfu")
        of_speed = ("tokens_per_s_per_gpu", "tflops_per_gpu", "step_s", "exposed_communication_share")
        return {
            **{name: getattr(self, name) for name in own},
            "gpu": self.gpu and self.gpu.name,
            "mesh": {axis: getattr(parallel, axis) for axis in axes},
            **self.verdict.to_json(),
            **{name: speed and getattr(speed, name) for name in of_speed},
            **(range_json(speed.tokens_per_s_per_gpu, self.speed_range) if speed else {}),
            "terms_s": speed and dict(speed.terms_s),
            "phases_s": speed and speed.phases_s,
            "hidden_s": speed and dict(speed.hidden_s),
            "between_replicas": exchange_json(self.config, speed and speed.between_replicas_s),
            "changes": [change.to_json() for change in self.changes],
            "by_convention": {name: verdict.to_json() for name, verdict in self.by_convention.items()},
        }

    def lines(self) -> Iterator[str]:
        """The estimate as terminal text."""
        yield from self._heading()
        own = self.by_convention["jaxllm"]
        yield ""
        moment = f", when it is fullest ({own.memory.moment})" if own.memory.moment else ""
        yield f"Bytes on one device{moment}"
        yield from memory_table(own.memory.stages)
        if self.config.parallel.pipe > 1:
            yield "  (each stage the same: all run one program)"
        if own.memory.host_bytes:
            yield f"  and {readable(own.memory.host_bytes)} for each in its host's memory"
        yield from self._own_verdict(own)
        if "megatron" in self.by_convention:
            yield ""
            yield "By the published rule for Megatron-LM (Fujii et al. 2024), the first stage"
            yield "  (it covers 1F1B, plain or interleaved, ZeRO 0 and 1, and no recomputation)"
            published = self.by_convention["megatron"]
            yield from memory_table(published.memory.stages)
            if self.gpu is not None and published.capacity_bytes is not None:
                nominal, says = nominal_bytes(self.gpu), "calls it safe" if published.fits else "does not call it safe"
                share = published.memory.peak_bytes / nominal
                yield f"The rule {says}: {share:.1%} of {readable(nominal)}, of which it fills {SAFE_SHARE:.0%}"
            yield record_text()
        yield ""
        if self.speed is None:
            yield "Without --gpu there is no capacity to fit into and no speed to predict: name one, such as --gpu h100-80gb."
        else:
            yield from self._speed_lines(self.speed)
        if self.config.parallel.replica > 1:
            yield ""
            yield from exchange_lines(self.config, self.speed and self.speed.between_replicas_s)

    def _heading(self) -> Iterator[str]:
        config, parallel, train = self.config, self.config.parallel, self.config.train
        on = f"{self.devices} x {self.gpu.name}" if self.gpu else f"{self.devices} GPU{'s' if self.devices > 1 else ''}"
        yield (f"{title_of(config.model)} on {on}, {hosts_text(self.devices, self.gpus_per_host)} ({self.hosts_because})")
        pipeline = f"; {parallel.schedule}" if parallel.pipe > 1 else ""
        replicas = f"replica {parallel.replica}, " if parallel.replica > 1 else ""
        virtual = f" x {parallel.virtual_stages} virtual" if parallel.virtual_stages > 1 else ""
        yield (
            f"  {replicas}pipe {parallel.pipe}{virtual}, data {parallel.data}, context {parallel.context}, "
            f"tensor {parallel.tensor}; {zero_text(parallel.zero, parallel.expert)}{pipeline}; "
            f"remat {remat_words(parallel.remat)}"
        )
        M, b = config.num_microbatches, config.microbatch_sequences
        yield (
            f"  {config.step_tokens:,} tokens a step: {M} microbatch{'es' if M > 1 else ''} of {b} x {train.sequence_length:,} "
            f"on each data rank"
        )

    def _own_verdict(self, own: Verdict) -> Iterator[str]:
        if own.capacity_bytes is None or self.gpu is None:
            return
        yield fits_text(own.memory.peak_bytes, own.capacity_bytes)
        if own.fits and own.memory.peak_bytes > FIT_SHARE * own.capacity_bytes:
            yield f"  (above {FIT_SHARE:.0%}, where the estimate alone is not enough: check with `jaxllm compile`)"
        yield capacity_text(self.gpu.memory_bytes)
        if self.changes:
            yield "What would fit, cheapest first"
            for change in self.changes[:MOST_CHANGES]:
                yield f"  {change.overrides} ({change.figures})"

    def _speed_lines(self, speed: StepTime) -> Iterator[str]:
        counted = "as Megatron-LM counts: the full square" if self.convention == "megatron" else "causal"
        yield "Speed, predicted"
        yield (
            f"  {speed.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; {speed.tflops_per_gpu:,.1f} TFLOP/s/GPU ({counted}); "
            f"MFU {self.mfu:.1%} (causal)"
        )
        yield from (f"  {line}" for line in range_lines(speed.tokens_per_s_per_gpu, self.speed_range))
        yield from (f"  {line}" for line in step_time_lines(speed))


def estimate(
    config: Config,
    gpu: Gpu | str | None = None,
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    convention: Convention = "jaxllm",
) -> Estimate:
    """Estimates a config on a number of GPUs, which need not be present.

    Args:
      gpu: a kind, by name, by a YAML file that describes it, or as a Gpu. None: bytes only, without verdict and speed.
      gpus: default: the size of the config's mesh.
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.
      convention: megatron: memory and verdict by the published formula and its 80% rule (cost_model/megatron.py), FLOPs as
        Megatron-LM counts them, and the time of its schedule; jaxllm's own memory stays beside it.

    Raises:
      ConfigError: the mesh has another size, hosts do not divide, the GPU or convention does not exist, or the GPU cannot
        run the model.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"--convention={convention} is not one of the choices: use {', '.join(CONVENTIONS)}.")
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    devices = require_devices(config, gpus)
    capability = kind.chip.compute_capability if kind else HOPPER
    require_trains(config, capability, kind.name if kind else "a GPU")
    if convention == "megatron" and has_experts(config.model):
        raise ConfigError("--convention=megatron is of models without experts: leave it out.")
    if kind and convention == "megatron" and capability < AMPERE:
        raise ConfigError(
            f"--convention=megatron is of bfloat16 with fused attention, and {kind.name} has neither: leave it out."
        )
    config = config.resolve(devices).at_largest_batch
    host = kind.gpus_per_host if kind else HOST_GPUS
    per_host, because = choose_gpus_per_host(devices, gpus_per_host, host, config.parallel)
    verdicts = {"jaxllm": Verdict(estimate_memory(config, kind), kind and kind.capacity_bytes)}
    if convention == "megatron":
        verdicts["megatron"] = Verdict(megatron_memory(config), kind and int(SAFE_SHARE * nominal_bytes(kind)))
    speed = estimate_step_time(config, kind, per_host, convention) if kind else None
    own, changes = verdicts["jaxllm"], ()
    if kind and own.fits is False:
        changes = tuple(changes_that_fit(config, int(FIT_SHARE * kind.capacity_bytes), kind, per_host))
    return Estimate(config, kind, per_host, because, convention, verdicts, speed, changes)


def memory_table(stages: Sequence[StageMemory]) -> Iterator[str]:
    """One row per term, one column per stage; neighbouring stages with equal terms share a column."""
    columns = fold(stages)
    names = list(dict.fromkeys(name for _, stage in columns for name in stage.terms_bytes))
    width = max(12, *(len(label) + 2 for label, _ in columns))
    if len(columns) > 1:
        yield " " * (LABEL_WIDTH + 2) + "".join(f"{label:>{width}}" for label, _ in columns)
    for name in names:
        sizes = [stage.terms_bytes.get(name, 0) for _, stage in columns]
        if any(sizes):
            row = "".join(f"{readable(size) if size else '-':>{width}}" for size in sizes)
            yield f"  {name.replace('_', ' '):<{LABEL_WIDTH}}{row}"
    yield f"  {'total':<{LABEL_WIDTH}}" + "".join(f"{readable(stage.total_bytes):>{width}}" for _, stage in columns)


def fold(stages: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """('stages 1-6', the first of them) for neighbours with equal terms."""
    folded = []
    for _, group in groupby(stages, key=lambda stage: stage.terms_bytes):
        same = list(group)
        first, last = same[0].stage, same[-1].stage
        folded.append((f"stage {first}" if first == last else f"stages {first}-{last}", same[0]))
    return folded
