"""Whether a run fits into its devices' memory: asked before anything is made, and answered again when a device runs out.

On CPU devices nothing is asked: the estimate is one of GPUs, and the machine's memory is shared.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxllm.config import Config, ConfigError
from jaxllm.plan.advice import Change, changes_that_fit, smallest_cluster
from jaxllm.plan.cluster import choose_gpus_per_host
from jaxllm.plan.found import FIT_SHARE
from jaxllm.plan.hardware import RESERVE_BYTES, Gpu, gpu_from_device_kind, readable
from jaxllm.plan.memory import MemoryEstimate, estimate_memory

log = logging.getLogger(__name__)

EstimateMemory = Callable[[Config], MemoryEstimate]
"""Of which, unlike in a search, the terms are read too."""

OUT_OF_MEMORY = r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|[Oo]ut of memory"
"""In what JAX raises: XLA's own status, the driver's, and NCCL's words."""
DOUBT = 0.1
"""Of the capacity: an estimate above it by no more starts with a warning. Of compiled steps one in twenty was off by more than
7% (benchmarks/memory_accuracy.py)."""
SAFER_SHARE = 0.9
"""Of what a run that ran out was estimated at: what advice for it may take, since the estimate alone did not see it coming."""
MOST_ADVICE = 6
"""Changes named after a device ran out."""


@dataclass(frozen=True)
class Fit:
    """The estimate of a run beside the memory there is."""

    memory: MemoryEstimate
    capacity_bytes: int
    """What a step may take of one device."""

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.capacity_bytes

    @property
    def line(self) -> str:
        """What a run says at its start."""
        share = self.memory.peak_bytes / self.capacity_bytes
        return (
            f"memory by the estimate {readable(self.memory.peak_bytes)}, {share:.1%} of the {readable(self.capacity_bytes)} "
            f"that a step may take"
        )


def capacity_of(device: jax.Device) -> int | None:
    """Bytes that a step may take of this device: of what this process has reserved, else of what the hardware table says, less
    the reserve. None for a CPU and for a GPU of which neither is known.
    """
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - RESERVE_BYTES
    known = gpu_from_device_kind(device.device_kind)
    return known.capacity_bytes if known else None


def require_fit(
    config: Config,
    device: jax.Device,
    capacity_of: Callable[[jax.Device], int | None] = capacity_of,
    estimate: EstimateMemory | None = None,
) -> Fit | None:
    """Holds the estimate of a resolved config against the memory of its devices, of which `device` is one.

    Returns:
      None where the memory is not known.

    Raises:
      ConfigError: it cannot fit, and run.allow_overcommit is false; names the cheapest change that would.
    """
    capacity_bytes = capacity_of(device)
    if capacity_bytes is None:
        return None
    gpu = gpu_from_device_kind(device.device_kind)
    estimate = estimate or partial(estimate_memory, gpu=gpu)
    fit = Fit(estimate(config), capacity_bytes)
    if fit.fits:
        return fit
    too_much = (
        f"A step takes {readable(fit.memory.peak_bytes)} of a device by the estimate, and may take "
        f"{readable(fit.capacity_bytes)}"
    )
    if fit.memory.peak_bytes <= (1 + DOUBT) * capacity_bytes:
        log.warning("%s: it starts all the same, as the estimate may be off by so much.", too_much)
        return fit
    if config.run.allow_overcommit:
        log.warning("%s: it starts all the same, as run.allow_overcommit=true says.", too_much)
        return fit
    cure = _cheapest(config, capacity_bytes, gpu, estimate)
    raise ConfigError(f"{too_much}: {cure}, or run.allow_overcommit=true to start all the same.")


def _cheapest(config: Config, capacity_bytes: int, gpu: Gpu | None, estimate: EstimateMemory) -> str:
    """The middle of a sentence: what to set. No change is advised that fills the capacity to the last byte."""
    capacity_bytes = int(FIT_SHARE * capacity_bytes)
    found = changes_that_fit(config, capacity_bytes, gpu, _per_host(config, gpu), estimate)
    if found:
        return f"set {found[0].overrides} ({found[0].figures})"
    tried = f"no change that was tried makes it fit on {config.devices} GPUs"
    larger = smallest_cluster(config, capacity_bytes, gpu, estimate)
    if larger is None:
        return (
            f"{tried} or on more of them, so take a smaller model or shorter sequences (`jaxllm plan` looks at every mesh of a "
            f"number of GPUs)"
        )
    return f"{tried}, but {larger.config.devices} would do with {larger.overrides} ({larger.figures})"


def _per_host(config: Config, gpu: Gpu | None) -> int | None:
    return choose_gpus_per_host(config.devices, None, gpu.gpus_per_host)[0] if gpu else None


# ------------------------------------------------------------------------------------------------------- running out


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and re.search(OUT_OF_MEMORY, str(error)) is not None


@dataclass
class Explaining:
    """What is known of a run when a device runs out of memory."""

    config: Config
    trainer: Any = None
    """A Trainer, once there is one."""
    capacity_of: Callable[[jax.Device], int | None] = field(default=capacity_of)
    estimate: EstimateMemory | None = None
    """Default: estimate_memory, for the kind of GPU that is here."""

    def advice(self, error: BaseException) -> str:
        """One sentence of what happened and what to set; then the estimate, XLA's figure, and what else would take less."""
        device = jax.local_devices()[0]
        config = self.trainer.config if self.trainer is not None else self.config.resolve(jax.device_count())
        gpu = gpu_from_device_kind(device.device_kind)
        estimate = self.estimate or partial(estimate_memory, gpu=gpu)
        capacity_bytes, memory, compiled_bytes = self.capacity_of(device), estimate(config), self._compiled_bytes()
        target = round(SAFER_SHARE * memory.peak_bytes)
        if capacity_bytes is not None:
            # Where XLA takes more than the estimate says, so it will of a change.
            seen = max(memory.peak_bytes, compiled_bytes or 0)
            target = min(target, int(FIT_SHARE * capacity_bytes * memory.peak_bytes / seen))
        found = changes_that_fit(config, target, gpu, _per_host(config, gpu), estimate)
        return "\n".join(
            [
                f"A device ran out of memory {self._when()}: {_cure(found)}.",
                *_figures(memory, compiled_bytes, capacity_bytes, device),
                *_numbered(found),
                f"  JAX says: {' '.join(str(error).splitlines()[0].split())[:300]}",
            ]
        )

    def _when(self) -> str:
        if self.trainer is None:
            return "while the state was made"
        if self.trainer.compiled is None:
            return "before the train step was compiled"
        return f"in step {max(self.trainer.step, 1)}"

    def _compiled_bytes(self) -> int | None:
        """By XLA; None before the step was compiled."""
        compiled = None if self.trainer is None else self.trainer.compiled
        return None if compiled is None else total_bytes(compiled.memory_analysis())


def _figures(
    memory: MemoryEstimate, compiled_bytes: int | None, capacity_bytes: int | None, device: jax.Device
) -> Iterator[str]:
    def beside(size: int) -> str:
        return "" if capacity_bytes is None else f", {size / capacity_bytes:.1%} of {readable(capacity_bytes)}"

    whose = " of a GPU, which this device is not" if device.platform == "cpu" else ""
    yield f"  by the estimate       {readable(memory.peak_bytes)}{whose}{beside(memory.peak_bytes)}"
    largest = sorted(memory.peak_stage.terms_bytes.items(), key=lambda term: -term[1])[:4]
    parts = ", ".join(f"{name.replace('_', ' ')} {readable(size)}" for name, size in largest)
    yield f"    of it               {parts}"
    if compiled_bytes is None:
        yield "  by XLA, as compiled   not known: the train step was not compiled yet"
    else:
        yield f"  by XLA, as compiled   {readable(compiled_bytes)}{beside(compiled_bytes)}"
    if capacity_bytes is not None and max(memory.peak_bytes, compiled_bytes or 0) <= capacity_bytes:
        which = "By the estimate it" if compiled_bytes is None else "Either"
        yield f"  {which} would fit: look in nvidia-smi for other programs that hold memory of these GPUs."


def _cure(found: list[Change]) -> str:
    return f"set {found[0].overrides}" if found else "take more GPUs, a smaller model or shorter sequences"


def _numbered(found: list[Change]) -> Iterator[str]:
    if found:
        yield "  what would take less, cheapest first:"
    for number, change in enumerate(found[:MOST_ADVICE], start=1):
        cost = f": {change.cost}" if change.cost else ""
        yield f"    {number}. {change.overrides} ({change.figures}){cost}"


@contextmanager
def explaining_out_of_memory(config: Config) -> Iterator[Explaining]:
    """Round a run: a device that runs out of memory in here ends in a ConfigError that says what to change. The run tells it
    of its trainer: `explaining.trainer = trainer`.

    Raises:
      ConfigError: a device ran out of memory, at whatever point.
    """
    explaining = Explaining(config)
    try:
        yield explaining
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(explaining.advice(error)) from None


def total_bytes(memory: Any) -> int:
    """What a compiled program takes of a device, from its memory_analysis()."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes
