"""Changes that make a config fit into memory, cheapest first, and the change of its shapes that gains most. No JAX.

changes = changes_that_fit(config, capacity_bytes, gpu, gpus_per_host)
changes[0].overrides          "train.microbatch_sequences=1"
changes[0].peak_bytes         by the estimate, at most the capacity
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from jaxllm.config import Config, ConfigError, divisors
from jaxllm.config.attention import why_no_experts
from jaxllm.config.types import MASTER_ON_HOST, OFFLOAD_STATES
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import host_bytes_per_gpu
from jaxllm.cost_model.memory import EstimateMemory, estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.display import readable
from jaxllm.plan.search import SearchOptions, search

# ----------------------------------------------------------------------------------------------------------------- memory

CHUNK_TOKENS = 1024
"""Logits of this many tokens are small, and still fill an H100 with tiles."""
MOST_GPUS = 16384
"""The largest cluster that is tried."""
REMAT_LADDER = ("none", "selective", "full", "offload")
COSTS = {
    "parallel.zero=1": "costs nothing: as many bytes are sent",
    "parallel.zero=2": "reduces gradients once for every layer and microbatch",
    "parallel.zero=3": "gathers weights for every layer and microbatch",
    "train.microbatch_sequences": "makes matmuls smaller",
    "train.loss_chunk_tokens": "computes the head in smaller parts",
    "parallel.remat=selective": "recomputes norms and activation functions",
    "parallel.remat=full": "runs every layer's forward pass twice",
    "parallel.remat=offload": "sends activations to the host and back",
    "parallel.offload_state=optimizer": "sends the optimizer's state over the host's link twice a step",
    "parallel.offload_state=optimizer_and_master": (
        "sends the optimizer's state over the host's link twice a step, and master weights three times"
    ),
    "parallel.offload_state=all": (
        "sends the optimizer's state and master weights over the host's link in every step, and weights and gradient sums in "
        "every microbatch"
    ),
    "parallel.tensor": "sums activations over tensor ranks in every layer",
    "parallel.context": "sends keys and values between context ranks in every layer",
    "parallel.pipe": "leaves stages idle while the pipeline fills and drains",
}
"""What a change costs in time, by key=value, or by key alone."""


@dataclass(frozen=True)
class Change:
    """Keys of a config to set, and the estimated effect."""

    keys: Mapping[str, Any]
    """section.key -> value."""
    config: Config
    """The resolved config with these keys set."""
    peak_bytes: int
    """Estimated bytes of its fullest stage."""
    host_bytes: int
    """Bytes per device in host memory."""
    step_s: float | None
    """Predicted step time; None if the kind of GPU is not known."""
    step_ratio: float | None
    """Predicted step time over that of the original config."""

    @property
    def overrides(self) -> str:
        """The keys as command line overrides, quoted for a shell."""
        return " ".join(f"{key}={_argument(value)}" for key, value in self.keys.items())

    def to_json(self) -> dict[str, Any]:
        return {"keys": dict(self.keys), "peak_bytes": self.peak_bytes, "step_s": self.step_s}

    @property
    def cost(self) -> str:
        """The cost in words; '' if COSTS does not list the change."""
        costs = (COSTS.get(f"{key}={value}", COSTS.get(key)) for key, value in self.keys.items())
        return "; ".join(dict.fromkeys(words for words in costs if words))

    @property
    def figures(self) -> str:
        """'58.3 GiB, the step 7% longer'."""
        size = readable(self.peak_bytes)
        if self.host_bytes:
            size += f" and {readable(self.host_bytes)} on the host"
        if self.step_ratio is None:
            return size
        percent = round(100 * (self.step_ratio - 1))
        longer = "as long as now" if percent == 0 else f"{abs(percent)}% {'longer' if percent > 0 else 'shorter'}"
        return f"{size}, the step {longer}"


def changes_that_fit(
    config: Config,
    capacity_bytes: int,
    gpu: Gpu | None = None,
    gpus_per_host: int | None = None,
    estimate: EstimateMemory | None = None,
) -> list[Change]:
    """The mildest change of each kind that fits on the same number of devices, sorted by predicted step time; without a GPU, in
    the order of `ladders`. If no single change is enough, the fastest combination of several. If no combination is enough
    either and a GPU is given, the winner of a search over all meshes (plan/search.py). [] if nothing fits. Host memory is
    limited by hosts.host_bytes_per_gpu. Tensor ranks stay inside a host, unless they cross hosts already.

    Args:
      config: resolved.
      gpu, gpus_per_host: for the predicted step time. None: neither times nor hosts are known.
      estimate: computes the bytes of a config; default: estimate_memory.
    """
    trial = _Trial(config, capacity_bytes, gpu, gpus_per_host, estimate or partial(estimate_memory, gpu=gpu))
    changes = [change for ladder in ladders(config) if (change := trial.first_that_fits(ladder)) is not None]
    if not changes:
        changes = sorted(trial.that_fit(combinations(config)), key=_step_s)[:1] or list(trial.fastest_of_all())
    # sorted() is stable: changes with equal times keep their order.
    return sorted(changes, key=_step_s)


def smallest_cluster(
    config: Config, capacity_bytes: int, gpu: Gpu | None = None, estimate: EstimateMemory | None = None
) -> Change | None:
    """The smallest multiple of the present devices on which a step fits with every saving applied; None above MOST_GPUS."""
    trial = _Trial(config, capacity_bytes, None, None, estimate or partial(estimate_memory, gpu=gpu))
    for factor in (2, 3, 4, 6, *(2**power for power in range(3, 15))):
        larger = _everything(config, factor, gpu and gpu.gpus_per_host)
        if config.devices * factor <= MOST_GPUS and (change := trial.first_that_fits(larger)) is not None:
            return change
    return None


def ladders(config: Config) -> Iterator[list[dict[str, Any]]]:
    """One list of key -> value for each kind of change, mildest first."""
    p, train = config.parallel, config.train
    if p.zero == 0:
        yield [{"parallel.zero": 1}]
    yield [{"train.microbatch_sequences": n} for n in reversed(divisors(config.microbatch_sequences)[:-1])]
    if train.loss_chunk_tokens > CHUNK_TOKENS:
        yield [{"train.loss_chunk_tokens": CHUNK_TOKENS}]
    stronger = REMAT_LADDER[REMAT_LADDER.index(p.remat) + 1 :] if isinstance(p.remat, str) else REMAT_LADDER[2:]
    for remat in stronger:
        yield [{"parallel.remat": remat}]
    for zero in range(max(p.zero, 1) + 1, 4):
        yield [{"parallel.zero": zero}]
    more_on_host = OFFLOAD_STATES[OFFLOAD_STATES.index(p.offload_state) + 1 :]
    yield [{"parallel.offload_state": what} for what in more_on_host]
    # The same devices with 2, 4, 8 ... times the ranks on one axis, taken from data.
    factors = [2**power for power in range(1, int(p.data).bit_length()) if int(p.data) % 2**power == 0]
    for axis in ("tensor", "context", "pipe"):
        yield [{f"parallel.{axis}": getattr(p, axis) * n, "parallel.data": int(p.data) // n} for n in factors]


def combinations(config: Config) -> Iterator[dict[str, Any]]:
    """Combined changes, one more each time; in the end every mesh together with all of them."""
    keys: dict[str, Any] = {}
    zero, remat, meshes = config.parallel.zero, config.parallel.remat, list(_meshes(config, 1, None))
    steps = [
        {"parallel.zero": 1} if zero == 0 else {},
        {"train.microbatch_sequences": 1} if config.microbatch_sequences > 1 else {},
        {"parallel.remat": "full"} if remat not in ("full", "offload") else {},
        {"parallel.zero": 3} if zero < 3 and int(config.parallel.data) * config.parallel.context > 1 else {},
    ]
    for step in steps:
        keys |= step
        if step:
            yield dict(keys)
    # Gathering weights layer by layer costs more than storing a larger share of them.
    without_zero = {key: value for key, value in keys.items() if key != "parallel.zero"} | steps[0]
    yield from ({**savings, **mesh} for mesh in meshes for savings in (without_zero, keys))
    if config.parallel.offload_state not in MASTER_ON_HOST:
        keys |= {"parallel.offload_state": "optimizer_and_master"}
        yield from ({**keys, **mesh} for mesh in ({}, *meshes))


def _everything(config: Config, factor: int, host_size: int | None) -> Iterator[dict[str, Any]]:
    """Settings for `factor` times the devices: first more data ranks, then also every saving, then every mesh with the
    savings."""
    more = {"parallel.data": int(config.parallel.data) * factor}
    savings: dict[str, Any] = {"train.microbatch_sequences": 1, "parallel.zero": 3}
    if config.parallel.remat not in ("full", "offload"):
        savings["parallel.remat"] = "full"
    # An unset microbatch is the complete share of a data rank, so more ranks make it smaller.
    yield more
    yield {**more, **savings}
    yield from ({**savings, **mesh} for mesh in _meshes(config, factor, host_size))


def _meshes(config: Config, factor: int, host_size: int | None) -> Iterator[dict[str, Any]]:
    """Meshes of factor x the devices with at least the present tensor, context and pipe ranks, the fewest of these first."""
    p = config.parallel
    room = int(p.data) * factor
    powers = [2**power for power in range(room.bit_length())]
    splits = sorted(
        ((t, c, s) for t in powers for c in powers for s in powers if t * c * s > 1 and room % (t * c * s) == 0),
        key=lambda split: (split[0] * split[1] * split[2], split[2], split[1]),
    )
    for t, c, s in splits:
        if host_size is None or p.tensor * t <= host_size:
            sizes = {"tensor": p.tensor * t, "context": p.context * c, "pipe": p.pipe * s, "data": room // (t * c * s)}
            yield {f"parallel.{axis}": size for axis, size in sizes.items() if size != getattr(p, axis)}


@dataclass(frozen=True)
class _Trial:
    config: Config
    capacity_bytes: int
    gpu: Gpu | None
    gpus_per_host: int | None
    estimate: EstimateMemory

    def first_that_fits(self, ladder: Iterable[Mapping[str, Any]]) -> Change | None:
        return next(self.that_fit(ladder), None)

    def that_fit(self, ladder: Iterable[Mapping[str, Any]]) -> Iterator[Change]:
        """Yields the key -> value mappings that make a valid config that fits; the others are skipped."""
        host_bytes = host_bytes_per_gpu(self.gpu, self.gpus_per_host)
        for keys in ladder:
            config = changed(self.config, keys)
            if config is None and self.config.parallel.expert > 1:
                keys = {**keys, "parallel.expert": 1}
                config = changed(self.config, keys)
            if config is None or self._leaves_host(config) or self._has_no_kernels(config):
                continue
            memory = self.estimate(config)
            if memory.peak_bytes <= self.capacity_bytes and memory.host_bytes <= host_bytes:
                step_s, before_s = self._step_s(config), self._step_s(self.config)
                ratio = step_s / before_s if step_s and before_s else None
                yield Change(keys, config, memory.peak_bytes, memory.host_bytes, step_s, ratio)

    def fastest_of_all(self) -> Iterator[Change]:
        """The winner of a search; nothing without a GPU."""
        if self.gpu is None:
            return
        options = SearchOptions(device_bytes=self.capacity_bytes, estimate=self.estimate)
        plan = search(self.config, self.gpu, self.config.devices, self.gpus_per_host, options)
        if plan.interrupted:
            raise KeyboardInterrupt
        if plan.candidates:
            yield from self.that_fit([differences(self.config, plan.best)])

    def _has_no_kernels(self, config: Config) -> bool:
        """Whether the GPU cannot multiply the experts on so many tensor ranks."""
        capability = self.gpu and self.gpu.chip.compute_capability
        return why_no_experts(config.model, config.parallel.tensor, capability, "") is not None

    def _leaves_host(self, config: Config) -> bool:
        """Whether tensor ranks would cross hosts although they do not now."""
        tensor = config.parallel.tensor
        return bool(self.gpus_per_host and self.gpus_per_host % tensor and tensor > self.config.parallel.tensor)

    def _step_s(self, config: Config) -> float | None:
        if self.gpu is None or self.gpus_per_host is None:
            return None
        return estimate_step_time(config, self.gpu, self.gpus_per_host).step_s


def changed(config: Config, keys: Mapping[str, Any]) -> Config | None:
    """The config with section.key -> value set, validated as a complete config; None if it is invalid."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    for path, value in keys.items():
        name, key = path.split(".")
        sections[name] = sections[name].model_copy(update={key: value})
    try:
        # Each value is a valid one; validate each changed section, then how they fit together.
        for name in {path.split(".")[0] for path in keys}:
            section = sections[name]
            sections[name] = type(section).model_validate(section.model_dump(exclude_unset=True))
        config = Config.model_validate(sections)
        return config.resolve(config.devices)
    except (ValidationError, ConfigError):
        return None


def differences(config: Config, other: Config) -> dict[str, Any]:
    """section.key -> value of `other`, for the keys that a search or a change sets."""
    changed_keys = {}
    for section in ("parallel", "train"):
        mine, others = getattr(config, section), getattr(other, section)
        changed_keys |= {f"{section}.{key}": value for key, value in others if value != getattr(mine, key)}
    return changed_keys


def _argument(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return shlex.quote("{" + ", ".join(f"{name}: {action}" for name, action in value.items()) + "}")


def _step_s(change: Change) -> float:
    return change.step_s or 0.0
