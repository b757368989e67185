"""Results of a search: the candidates that fit, and the rejected ones with reasons. search.py fills them in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.step_parts import StepTime
from jaxllm.display import readable
from jaxllm.plan.space import Choice, choice_in

FIT_SHARE = 0.95
"""Largest share of the capacity at which an estimated config counts as fitting. The rest covers underestimates."""


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
    def tflops_per_gpu(self) -> float:
        return self.time.tflops_per_gpu

    @property
    def exposed_communication_share(self) -> float:
        return self.time.exposed_communication_share

    def rank(self, largest_microbatch: bool) -> tuple[float, ...]:
        """Sort key, best first: by speed, then by estimated bytes; with largest_microbatch by microbatch before both."""
        by_speed = (-self.tokens_per_s_per_gpu, self.estimate_bytes)
        return (-self.config.microbatch_sequences, *by_speed) if largest_microbatch else by_speed

    @property
    def choice(self) -> Choice:
        return choice_in(self.config)

    def __repr__(self) -> str:
        return f"<{self.choice}: {readable(self.estimate_bytes)}, {self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU predicted>"

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            **dataclasses.asdict(choice.mesh),
            "zero": choice.zero,
            "microbatch_sequences": choice.microbatch_sequences,
            "schedule": choice.schedule,
            "virtual_stages": choice.virtual_stages,
            "remat": choice.remat,
            "estimate_bytes": self.estimate_bytes,
            "compiled_bytes": self.compiled_bytes,
            "host_bytes": self.host_bytes,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "tflops_per_gpu": self.tflops_per_gpu,
            "step_s": self.step_s,
            "exposed_communication_share": self.exposed_communication_share,
            "predicted_step_s": self.predicted.step_s,
            "predicted_transfers_s": self.predicted.transfers_s,
            "scheduled_transfers_s": self.scheduled_transfers_s,
        }


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
    """All that fit, best first: those confirmed, then the others."""
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

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "gpus_per_host": self.gpus_per_host,
            "hosts_because": self.hosts_because,
            "capacity_bytes": self.capacity_bytes,
            "fit_share": FIT_SHARE,
            "sequence_length": self.config.train.sequence_length,
            "global_batch_sequences": self.config.train.global_batch_sequences,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "candidates_that_fit": len(self.candidates),
            "confirmed": self.confirmed,
            "unconfirmed_because": self.unconfirmed_because,
            "rejected": [dataclasses.asdict(rejected) for rejected in self.rejected],
            "meshes": self.meshes,
            "configurations": self.configurations,
            "interrupted": self.interrupted,
        }
