"""Checks before a run: it fits into device memory, its documents into attention, and cuDNN's attention is right. Also advice
when a device runs out of memory.

On CPU devices, for which there is no estimate, only what no machine of this size can hold is refused.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax

from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import packed_documents, power_of_four, window_shares
from jaxllm.cost_model.flops import state_bytes
from jaxllm.cost_model.hardware import FIT_SHARE, RESERVE_BYTES, Gpu, compute_capability, gpu_from_device_kind
from jaxllm.cost_model.memory import EstimateMemory, MemoryEstimate, estimate_memory
from jaxllm.display import readable
from jaxllm.machine.host import require_host_memory
from jaxllm.model.cudnn_attention import largest_error
from jaxllm.run import advisor

log = logging.getLogger(__name__)

OUT_OF_MEMORY = r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|[Oo]ut of memory"
"""Pattern of JAX's out-of-memory errors: XLA's status, the driver's, and NCCL's message."""
DOUBT = 0.1
"""Tolerance as a fraction of the capacity. A run whose estimate is above it by at most this starts with a warning: one in
twenty estimates of compiled steps was off by more than 7% (benchmarks/memory_accuracy.py)."""
SAFER_SHARE = 0.9
"""Target of advice for a run that ran out of memory, as a fraction of its estimate, since the estimate was too low."""
MOST_ADVICE = 6
"""Maximum number of changes to list after a device ran out of memory."""


@dataclass(frozen=True)
class Fit:
    """The estimate of a run and the available memory."""

    memory: MemoryEstimate
    capacity_bytes: int
    """Bytes that a step may use on one device."""
    speed: Any = None
    """Predicted tokens/s of a device (plan.quote.Span); None for an unknown GPU, and without a planner."""

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.capacity_bytes

    @property
    def line(self) -> str:
        """Line in the header of a run."""
        share = self.memory.peak_bytes / self.capacity_bytes
        speed = "" if self.speed is None else f"; {self.speed.text(' tokens/s/GPU predicted', 0)}"
        return (
            f"memory by the estimate {readable(self.memory.peak_bytes)}, {share:.1%} of the {readable(self.capacity_bytes)} "
            f"that a step may take{speed}"
        )


def capacity_of(device: jax.Device) -> int | None:
    """Bytes that a step may use on this device: what this process has reserved or, if unknown, the capacity in the hardware
    table, minus the reserve. None for a CPU and for an unknown GPU.
    """
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - RESERVE_BYTES
    known = gpu_from_device_kind(device.device_kind)
    return known.capacity_bytes if known else None


def check_memory(config: Config, device: jax.Device) -> Fit | None:
    """Compares the estimate of a resolved config with the memory of `device`, one of its devices, and predicts the speed. None
    if the memory is not known. Without run.allow_overcommit, ConfigError names the cheapest change with which it would fit."""
    capacity_bytes = capacity_of(device)
    if capacity_bytes is None:
        if device.platform == "cpu" and not config.run.allow_overcommit:
            # The least: the state in float32, sharded over all devices, and a batch of token ids.
            batch_bytes = 4 * config.train.global_batch_sequences * config.train.sequence_length
            share = (state_bytes(config) + batch_bytes) * jax.local_device_count() // jax.device_count()
            require_host_memory(share, "Weights, optimizer state and batch")
        return None
    gpu = gpu_from_device_kind(device.device_kind)
    estimate = partial(estimate_memory, gpu=gpu, capability=compute_capability(device))
    planner = advisor.answers
    speed = None if gpu is None or planner is None else planner.speed(config, gpu)
    fit = Fit(estimate(config), capacity_bytes, speed)
    if fit.fits:
        return fit
    too_much = (
        f"A step needs {readable(fit.memory.peak_bytes)} on a device by the estimate, and may take "
        f"{readable(fit.capacity_bytes)}"
    )
    in_doubt = fit.memory.peak_bytes <= (1 + DOUBT) * capacity_bytes
    if in_doubt or config.run.allow_overcommit:
        because = "the estimate may be off by this much" if in_doubt else "of run.allow_overcommit=true"
        log.warning("%s: the run starts anyway, because %s.", too_much, because)
        return fit
    cure = _cheapest(config, capacity_bytes, gpu, estimate)
    raise ConfigError(f"{too_much}: {cure}, or run.allow_overcommit=true to start anyway.")


def _cheapest(config: Config, capacity_bytes: int, gpu: Gpu | None, estimate: EstimateMemory) -> str:
    """Advice in the middle of a sentence. It never fills the capacity completely."""
    capacity_bytes = int(FIT_SHARE * capacity_bytes)
    if (planner := advisor.answers) is None:
        return "start the run by jaxllm.fit or `jaxllm train`, which say what would fit"
    found = planner.changes_that_fit(config, capacity_bytes, gpu, estimate)
    if found:
        return f"set {found[0].overrides} ({found[0].figures})"
    tried = f"no change that was tried makes it fit on {config.devices} GPUs"
    larger = planner.smallest_cluster(config, capacity_bytes, gpu, estimate)
    if larger is None:
        return (
            f"{tried} or on more of them, so use a smaller model or shorter sequences (`jaxllm plan` searches all meshes for "
            f"a number of GPUs)"
        )
    return f"{tried}, but {larger.config.devices} would do with {larger.overrides} ({larger.figures})"


# ------------------------------------------------------------------------------------------------------- running out


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and re.search(OUT_OF_MEMORY, str(error)) is not None


def out_of_memory_lines(error: BaseException, config: Config, trainer: Any) -> list[str]:
    """One sentence with the failure and the fix; then the estimate, XLA's figure, and other changes that need less.
    trainer: None before it exists."""
    device = jax.local_devices()[0]
    config = config.resolve(jax.device_count()) if trainer is None else trainer.config
    compiled = None if trainer is None else trainer.programs.current
    gpu = gpu_from_device_kind(device.device_kind)
    estimate = partial(estimate_memory, gpu=gpu, capability=compute_capability(device))
    compiled_bytes = None if compiled is None else total_bytes(compiled.memory_analysis())
    capacity_bytes, memory = capacity_of(device), estimate(config)
    target = round(SAFER_SHARE * memory.peak_bytes)
    if capacity_bytes is not None:
        # If XLA needs more than the estimate, assume the same ratio after a change.
        seen = max(memory.peak_bytes, compiled_bytes or 0)
        target = min(target, int(FIT_SHARE * capacity_bytes * memory.peak_bytes / seen))
    planner = advisor.answers
    found = [] if planner is None else planner.changes_that_fit(config, target, gpu, estimate)
    changes = [f"{one.overrides} ({one.figures}){f': {one.cost}' if one.cost else ''}" for one in found[:MOST_ADVICE]]
    cure = f"set {found[0].overrides}" if found else "use more GPUs, a smaller model or shorter sequences"
    when = "while the state was made"
    if trainer is not None:
        when = "before the train step was compiled" if compiled is None else f"in step {max(trainer.step, 1)}"
    return [
        f"A device ran out of memory {when}: {cure}.",
        *_figures(memory, compiled_bytes, capacity_bytes, device),
        *(["  changes that need less memory, cheapest first:"] if found else []),
        *(f"    {number}. {change}" for number, change in enumerate(changes, start=1)),
        f"  JAX says: {' '.join(str(error).splitlines()[0].split())[:300]}",
    ]


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


@contextmanager
def explain_out_of_memory(config: Config) -> Iterator[SimpleNamespace]:
    """Context of a run: if a device runs out of memory inside, it raises a ConfigError that says what to change. The run sets
    `trainer` of the value once it has one."""
    run = SimpleNamespace(trainer=None)
    try:
        yield run
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(*out_of_memory_lines(error, config, run.trainer)) from None


def total_bytes(memory: Any) -> int:
    """Bytes that a compiled program uses on a device, from its memory_analysis()."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


# ---------------------------------------------------------------------------------------------------------- attention

ATTENTION_TOLERANCE = 0.03


def with_room_for_documents(config: Config, device: jax.Device, count: Callable[[], int]) -> Config:
    """`config` with data.max_documents for the data, if attention packs documents and by default takes fewer. count: gives
    the most documents of a sequence in the data; it is called if attention packs them."""
    most = packed_documents(config, compute_capability(device))
    if most is None or (found := count()) <= most:
        return config
    if config.data.max_documents is not None:
        raise ConfigError(
            f"data.max_documents={most} and the data has a sequence with {found:,} documents, free space at its end counted as "
            f"one: set data.max_documents to {found} or more, or to null."
        )
    data = config.data.model_copy(update={"max_documents": power_of_four(found)})
    return config.model_copy(update={"data": data})


def require_right_attention(config: Config, attention: str, mesh: jax.sharding.Mesh) -> None:
    """Compares cuDNN's attention, which uses a private binding of JAX, with plain XLA on a GPU before training
    starts, and refuses it if they differ."""
    device = mesh.devices.flat[0]
    if not attention.startswith("cudnn") or device.platform == "cpu":
        return
    model, packs = config.model, None
    if config.data.mask_documents:
        packs = packed_documents(config, compute_capability(device)) is not None
    heads = (model.num_heads // model.num_kv_heads, model.head_dim)
    has_windows = any(window_shares(model, config.train.sequence_length))
    with jax.default_device(jax.local_devices()[0]):
        error = largest_error(*heads, packs=packs, has_windows=has_windows)
        if error < ATTENTION_TOLERANCE:
            return
        halves_are_right = packs and largest_error(*heads, packs=False, has_windows=has_windows) < ATTENTION_TOLERANCE
    raise ConfigError(
        f"cuDNN's attention is off by {100 * error:.1f}% on this machine, so its version and JAX {jax.__version__} do not fit "
        f"together: set model.attention={'cudnn_halves' if halves_are_right else 'xla'}, or install other versions."
    )
