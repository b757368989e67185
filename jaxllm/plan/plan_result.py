"""Results of a search: the candidates that fit, and the rejected ones with reasons. search.py fills them in."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from jaxllm.config import Config, ConfigError
from jaxllm.config.named import as_named, title_of
from jaxllm.cost_model.error_range import LAYOUT_ERRORS, ErrorRange, error_range, kind_of_layout, range_json, range_lines
from jaxllm.cost_model.hardware import FIT_SHARE, Gpu
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.cost_model.replicas import exchange_json
from jaxllm.cost_model.step_parts import BETWEEN_GPUS, OUTER_STEP, StepTime
from jaxllm.display import readable
from jaxllm.plan.space import Choice, choice_in
from jaxllm.untrusted import one_line

TIE_SHARE = 0.005
"""Speeds that differ by less than this share are ties. Chosen: a tenth of the smallest error between two layouts
(error_range.LAYOUT_ERRORS), so half a percent is no reason to send more."""
SENT = (*BETWEEN_GPUS, OUTER_STEP, "offload", "offload_state")


@dataclass(frozen=True)
class Candidate:
    """A config that fits, with its figures; bytes are of one device. With train.batch_schedule they are of a step with the
    largest batch that the run reaches."""

    config: Config
    """Resolved."""
    estimate_bytes: int
    host_bytes: int
    predicted: StepTime
    """By the step-time model alone."""
    compiled_bytes: int | None = None
    scheduled_transfers_s: float | None = None
    """Exposed time of the transfers of a step in XLA's schedule; None: not compiled, or not known."""

    @cached_property
    def time(self) -> StepTime:
        """The predicted step, with the transfers of XLA's schedule if they are known."""
        scheduled_s = self.scheduled_transfers_s
        return self.predicted if scheduled_s is None else self.predicted.as_scheduled(scheduled_s)

    @property
    def step_s(self) -> float:
        return self.time.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.time.tokens_per_s_per_gpu

    @property
    def sent_s(self) -> float:
        """Predicted seconds of all transfers of a step, hidden ones too: between GPUs, and to and from the host."""
        terms_s, hidden_s = self.predicted.terms_s, self.predicted.hidden_s
        return math.fsum(times_s.get(name, 0.0) for name in SENT for times_s in (terms_s, hidden_s))

    @property
    def uses_host(self) -> bool:
        """Whether activations or state wait in the host's memory."""
        return self.choice.uses_host

    @property
    def choice(self) -> Choice:
        return choice_in(self.config)

    def __repr__(self) -> str:
        return f"<{self.choice}: {readable(self.estimate_bytes)}, {self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU predicted>"

    def to_json(self) -> dict[str, Any]:
        speed = ("tokens_per_s_per_gpu", "tflops_per_gpu", "step_s", "exposed_communication_share")
        own = ("sent_s", "estimate_bytes", "compiled_bytes", "host_bytes", "scheduled_transfers_s")
        return {
            **self.choice.settings,
            **{name: getattr(self.time, name) for name in speed},
            **{name: getattr(self, name) for name in own},
            "predicted_step_s": self.predicted.step_s,
            "predicted_transfers_s": self.predicted.transfers_s,
            "between_replicas": exchange_json(self.config, self.predicted.between_replicas_s),
        }


def ranked(candidates: Iterable[Candidate], largest_microbatch: bool = False) -> tuple[Candidate, ...]:
    """Candidates, best first: by speed; among ties with the fastest of them (TIE_SHARE), by what they send, then by estimated
    bytes. The next tie begins with the fastest that is left, so the order is a total one. With largest_microbatch by microbatch
    before all."""

    def microbatch(one: Candidate) -> int:
        return one.config.microbatch_sequences if largest_microbatch else 0

    by_speed = sorted(candidates, key=lambda one: (-microbatch(one), -one.tokens_per_s_per_gpu))
    keys: list[tuple[int, float, int]] = []
    tie, first = 0, None
    for one in by_speed:
        if first is None or (
            microbatch(one) != microbatch(first) or one.tokens_per_s_per_gpu < (1 - TIE_SHARE) * first.tokens_per_s_per_gpu
        ):
            tie, first = tie + 1, one
        keys.append((tie, one.sent_s, one.estimate_bytes))
    return tuple(by_speed[number] for number in sorted(range(len(keys)), key=keys.__getitem__))


@dataclass(frozen=True)
class Rejected:
    """All that were rejected for one reason."""

    unit: str
    """mesh or configuration: a mesh that breaks a rule is rejected with all its configurations."""
    reason: str
    count: int
    example: str
    """For those that do not fit, the one that needs least."""


@dataclass(frozen=True)
class Plan:
    """The result of a search. Every mesh and configuration is either a candidate or rejected, including a mesh of which --keep
    leaves nothing."""

    config: Config
    """As given."""
    gpu: Gpu
    gpus: int
    gpus_per_host: int
    hosts_because: str
    host_bytes_per_gpu: float
    """Limit of host memory for offloading."""
    candidates: tuple[Candidate, ...]
    """Those that fit, best first: those confirmed, then the others. Left out are those that cannot be among the fastest by
    their least time and those that gain nothing by the host; `rejected` counts them."""
    rejected: tuple[Rejected, ...]
    meshes: int
    """Number of meshes of these GPUs searched so far; `configurations` counts those of meshes that break no rule."""
    configurations: int
    leanest: tuple[Choice, int] | None = None
    """The configuration that needs least among those that do not fit, and its bytes."""
    largest_microbatch: bool = False
    """Whether candidates are ranked by microbatch first."""
    interrupted: bool = False
    confirmed: int = 0
    unconfirmed_because: str | None = None
    """The reason why fewer were confirmed than requested."""
    with_fp8: Candidate | None = None
    """The best with model.matmul_dtype=fp8, by prediction; None if it was not looked for, the chip has none, or the config asks
    for it."""

    def __repr__(self) -> str:
        best = f"; the best {self.candidates[0]!r}" if self.candidates else ""
        return f"<Plan for {self.gpus} x {self.gpu.name}: {len(self.candidates):,} configurations fit{best}>"

    @property
    def capacity_bytes(self) -> int:
        return self.gpu.capacity_bytes

    @property
    def best(self) -> Config:
        """The winner, resolved.

        Raises:
          ConfigError: nothing fits.
        """
        if not self.candidates:
            raise ConfigError(f"Nothing fits on {self.gpus} x {self.gpu.name}: use more GPUs, or shorter sequences.")
        return self.candidates[0].config

    @property
    def without_host(self) -> Candidate | None:
        """The best candidate with nothing on the host beside a winner that has; None if the winner has not, or none fits."""
        if not self.candidates or not self.candidates[0].uses_host:
            return None
        return next((one for one in self.candidates if not one.uses_host), None)

    @cached_property
    def speed_range(self) -> ErrorRange:
        """How far off the winner's speed may be."""
        return error_range(self.best, self.gpu, self.gpus_per_host)

    @cached_property
    def undecided(self) -> tuple[Candidate, ...]:
        """Candidates that may be faster than the winner: the larger of both layouts' errors is as large as the difference."""
        own, others = self.speed_range.layout_error, self.candidates[1:]
        errors = (LAYOUT_ERRORS[kind_of_layout(one.config, self.gpus_per_host)] for one in others)
        return tuple(one for one, error in zip(others, errors, strict=True) if self.faster(one) <= max(error, own))

    def faster(self, other: Candidate) -> float:
        """Share by which the winner is faster than another candidate."""
        return self.candidates[0].tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        own = ("gpus", "gpus_per_host", "hosts_because", "capacity_bytes", "host_bytes_per_gpu", "meshes", "configurations")
        return {
            **{name: getattr(self, name) for name in (*own, "confirmed", "unconfirmed_because", "interrupted")},
            "gpu": self.gpu.name,
            "replicas": self.config.parallel.replica,
            "fit_share": FIT_SHARE,
            "sequence_length": self.config.train.sequence_length,
            "global_batch_sequences": self.config.train.global_batch_sequences,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "candidates_that_fit": len(self.candidates),
            **(range_json(self.candidates[0].tokens_per_s_per_gpu, self.speed_range) if self.candidates else {}),
            "undecided": len(self.undecided),
            "without_host": _beside(self, self.without_host),
            "with_fp8": _beside(self, self.with_fp8),
            "rejected": [asdict(rejected) for rejected in self.rejected],
        }


def _beside(plan: Plan, other: Candidate | None) -> dict[str, Any] | None:
    """Another candidate as JSON, and the share by which the winner is faster."""
    return None if other is None else {**other.to_json(), "winner_faster": plan.faster(other)}


# ---------------------------------------------------------------------------------------- words of a plan, without rich


def certainty_lines(plan: Plan) -> Iterator[str]:
    """How sure the winner's speed and its place are."""
    if not plan.candidates:
        return
    best, *more = range_lines(plan.candidates[0].tokens_per_s_per_gpu, plan.speed_range)
    yield f"Number 1: {best}"
    yield from (f"{line[0].upper()}{line[1:]}" for line in more)
    if plan.undecided:
        meshes = len({one.choice.mesh for one in plan.undecided})
        yield (
            f"{len(plan.undecided):,} others, of {meshes} mesh{'es' if meshes > 1 else ''}, are within the error between two "
            f"layouts ({plan.speed_range.layout_error:.0%} for number 1's kind): their order is not certain"
        )


def beside_lines(plan: Plan) -> Iterator[str]:
    """The best candidate without the host beside a winner that uses it, and the best with FP8."""
    if plan.candidates and plan.candidates[0].uses_host:
        if (other := plan.without_host) is None:
            yield "Without the host's memory: nothing fits"
        else:
            yield f"Without the host's memory: {_beside_text(plan, other)}"
        yield (
            "Copies to and from the host are predicted: shared by the GPUs of a host, hidden behind compute; by how much they "
            "slow that compute is not measured"
        )
    if plan.with_fp8 is not None:
        yield f"With FP8 (model.matmul_dtype=fp8): {_beside_text(plan, plan.with_fp8)}"


def _beside_text(plan: Plan, other: Candidate) -> str:
    """'8,791 tokens/s/GPU, 1.6% less than the best: pipe 1 x ...'"""
    gain = other.tokens_per_s_per_gpu / plan.candidates[0].tokens_per_s_per_gpu - 1
    confirmed = "" if other.compiled_bytes is None else ", confirmed"
    return (
        f"{other.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {abs(gain):.1%} {'more' if gain > 0 else 'less'} than the "
        f"best{confirmed}: {other.choice}"
    )


# ------------------------------------------------------------------------------- the winner as a recipe for `jaxllm train`


def recipe(config: Config) -> dict[str, Any]:
    """The set values by section: load_config(recipe(config)) == config. Sizes that follow from model.name are left out."""
    values = config.model_dump(mode="json", exclude_unset=True)
    name = config.model.name
    if name is not None:
        published, model = as_named(name), values["model"]
        differs = {key for key in model if getattr(config.model, key) != getattr(published, key)}
        values["model"] = {key: value for key, value in model.items() if key == "name" or key in differs}
    return {section: keys for section, keys in values.items() if keys}


def check_new(path: str | Path) -> Path:
    """Checks that a file can be created there and returns its path.

    Raises:
      ConfigError: the file exists, or its folder does not.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(f"--out={path} exists already, and a plan never overwrites a file: choose another file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out={path}: the folder {path.parent} does not exist; create it, or choose another.")
    return path


def write_recipe(plan: Plan, path: str | Path, command: str) -> None:
    """Writes plan.best with a comment on its origin.

    Raises:
      ConfigError: nothing fits, or the file exists or cannot be written.
    """
    text = yaml.safe_dump(recipe(plan.best), sort_keys=False)
    heading = "".join(f"# {one_line(line)}".rstrip() + "\n" for line in _origin_lines(plan, Path(path), command))
    try:
        # Exclusive creation: another process may have created the file since the check.
        with check_new(path).open("x", encoding="utf-8") as file:
            file.write(heading + text)
    except OSError as error:
        raise ConfigError(f"--out={path} cannot be written ({error.strerror}): choose another file.") from None


def _origin_lines(plan: Plan, path: Path, command: str) -> Iterator[str]:
    best = plan.candidates[0]
    how = "predicted" if best.scheduled_transfers_s is None else "predicted with the transfers of XLA's schedule"
    xla = "not compiled" if best.compiled_bytes is None else f"by XLA {readable(best.compiled_bytes)}"
    yield f"{title_of(plan.config.model, 'A model')}: {best.choice}."
    yield ""
    yield f"  command    jaxllm train {path}"
    yield f"  planned    {command}"
    yield f"  hardware   {plan.gpus} x {plan.gpu.name}, {hosts_text(plan.gpus, plan.gpus_per_host)}"
    yield (
        f"  memory     estimate {readable(best.estimate_bytes)} (at most {FIT_SHARE:.0%} of {readable(plan.capacity_bytes)}), "
        f"{xla}"
    )
    if (other := plan.without_host) is not None:
        yield f"  no host    {other.tokens_per_s_per_gpu:,.0f} tokens/s/GPU with nothing in the host's memory: {other.choice}"
    yield (
        f"  expect     {best.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {best.time.tflops_per_gpu:,.0f} TFLOP/s/GPU (causal), "
        f"{how}, not measured"
    )
