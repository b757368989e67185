"""What XLA makes of a config's real train step, on GPUs that need not be here.

    report = compile_report(config, gpu=GPUS["h100-80gb"], gpus=64)
    report.total_bytes, report.fits, report.collectives

The step is the one that training runs, with the same options. It is compiled for GPUs with far more memory than they have, so
that XLA says what the program wants; what it does with the real memory is a second compilation (real_memory=True).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxllm.compile import aot
from jaxllm.compile.hlo import Collective, Module, byte_size
from jaxllm.compile.inspect_table import ParameterLine, describe
from jaxllm.compile.jaxpr_flops import matmul_flops, walk
from jaxllm.compile.overlap import Overlap, by_kind, play, sent_bytes
from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import RESERVE_BYTES, XLA_MEMORY_FRACTION, Gpu, gpu_from_device_kind, readable
from jaxllm.cost_model.hosts import hosts_of, require_devices
from jaxllm.mesh import CONTEXT, DATA, PIPE, TENSOR, ZERO_AXES, axis_sizes
from jaxllm.parallel.parameters import parameter_table
from jaxllm.runtime import distributed, xla_flags
from jaxllm.runtime.initialize import code_hash
from jaxllm.sharding import STACK_DIMS
from jaxllm.train.memory_check import capacity_of, total_bytes

log = logging.getLogger(__name__)

REMAT_SHARE = 0.76
"""Of the memory that XLA believes a GPU has; a step that takes more is rematerialised (measured, JAX 0.10.2)."""
GIANT_SHARE = 0.01
"""Of the capacity: a parameter whose copies take more is worth a warning."""
SMALL_GATHER_BYTES, MANY_GATHERS = 2**20, 16
"""So many gathers of less than that each, one after another, cost more in latency than in bytes."""
SMALL_BYTES = 2**16
"""A synchronous collective of less (a norm, a count) is not worth a warning."""
LARGEST = 8
"""Temporaries to name."""


@dataclass(frozen=True)
class CollectiveLine:
    """All collectives of one step that are alike, on one device."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes they run over; none for a group of one."""
    dtype: str
    asynchronous: bool
    in_loops: bool
    behind_matmuls: bool
    """Whether a matmul or fused attention lies between start and done."""
    instructions: int
    count: int
    """Executed in one step."""
    bytes: int
    """Of their results, in one step."""
    sent_bytes: int
    """What a device sends for them round a ring of n: (n-1)/n of a gathered or exchanged result, twice that of an all-reduced
    one, n-1 times a scattered one, once a permuted one."""


@dataclass(frozen=True)
class LargeResult:
    """The largest results of instructions, those of one shape and origin together."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    origin: str
    """The argument it comes from, or else the operation, as traced."""
    instructions: int
    in_loops: bool


@dataclass(frozen=True)
class RealMemory:
    """What XLA makes of the step when it knows the GPU's memory."""

    rematerialises: bool
    rematerialised_instructions: int
    temp_bytes: int
    total_bytes: int
    fits: bool
    compile_s: float


@dataclass(frozen=True)
class CompileReport:
    """The whole of `jaxllm compile`; bytes are of one device."""

    gpu: str
    gpus: int
    gpus_per_host: int
    hosts_because: str
    mesh: dict[str, int]
    attention: str
    argument_bytes: int
    """State and batch."""
    temp_bytes: int
    """The most that lives at once beside them."""
    output_bytes: int
    alias_bytes: int
    """Of the output, what takes the place of an argument."""
    total_bytes: int
    """argument + temp + output - alias."""
    host_bytes: int
    """In the host's pinned memory, for one device."""
    memory_bytes: int | None
    """The device's; None where it is not known (a CPU)."""
    capacity_bytes: int | None
    """What a step may take of it."""
    fits: bool | None
    share_of_capacity: float | None
    compile_s: float
    """Tracing, lowering and XLA."""
    trace_s: float
    hlo_instructions: int
    hlo_bytes: int
    """Of the optimised program's text."""
    executed_flops: int
    """Matmuls and cuDNN attention as traced, of all devices: with what is computed twice, before XLA drops anything."""
    attention_kernel_flops: int
    """cuDNN's part of that, by its shapes."""
    model_flops: int
    """Of one step: 6 for each matmul parameter and token, and causal attention."""
    near_rematerialisation: bool | None
    """By the share of memory taken, a rule of thumb; real_memory is certain."""
    real_memory: RealMemory | None
    collectives: tuple[CollectiveLine, ...]
    largest_results: tuple[LargeResult, ...]
    warnings: tuple[str, ...]
    jax_version: str
    overlap: tuple[Overlap, ...] = ()
    """What of the collectives shows, by kind and axes; none for devices that jaxllm has no figures of."""
    cached: bool = False

    def __repr__(self) -> str:
        verdict = {None: "", True: ", which fits", False: ", which does not fit"}[self.fits]
        return f"<CompileReport for {self.gpus} x {self.gpu}: {readable(self.total_bytes)} on each{verdict}>"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)


def report_from_json(values: dict[str, Any]) -> CompileReport:
    """The inverse of to_json. Raises TypeError or KeyError for what is not one."""
    tupled = lambda cls, items: tuple(  # noqa: E731
        cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}) for item in items
    )
    real = values["real_memory"]
    return CompileReport(
        **{
            **values,
            "real_memory": RealMemory(**real) if real else None,
            "collectives": tupled(CollectiveLine, values["collectives"]),
            "largest_results": tupled(LargeResult, values["largest_results"]),
            "warnings": tuple(values["warnings"]),
            "overlap": tupled(Overlap, values["overlap"]),
        }
    )


def compile_report(
    config: Config,
    gpu: Gpu | None = None,
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    *,
    real_memory: bool = False,
    cache: Path | None = None,
) -> CompileReport:
    """Compiles the train step of a config and reads what came out. Nothing is computed, no array is made.

    Args:
      gpu: the kind to compile for, none of which need be here. None: the devices that are, whatever they are.
      gpus: default: as many as the config's mesh.
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.
      real_memory: compile once more, for the memory that the GPU has.
      cache: a folder of earlier reports, to take this one from or add it to. Not for devices that are here.

    Raises:
      ConfigError: the mesh is not that many devices, hosts do not divide, a parameter does not fit, packages are missing.
    """
    if gpu is None:
        return _for_attached_devices(config, gpus, gpus_per_host, real_memory)
    distributed.start_without_devices()
    gpus = require_devices(config, gpus)
    config = config.resolve(gpus).at_largest_batch
    per_host, because = hosts_of(gpus, gpus_per_host, gpu.gpus_per_host)
    # Tells of missing packages even where a report is at hand.
    devices = aot.gpu_devices(gpus // per_host, per_host, gpu)
    file = None if cache is None else cache / f"{cache_key(config, gpu, gpus, per_host, real_memory)}.json"
    if file is not None and (found := _read(file, because)) is not None:
        return found
    real = aot.gpu_devices(gpus // per_host, per_host, gpu, gpu.memory_bytes) if real_memory else None
    kind = (gpu.name, gpu.memory_bytes, gpu.capacity_bytes)
    report = _compile(config, devices, real, kind, gpu, per_host, because)
    if file is not None:
        _write(file, report)
    return report


def _for_attached_devices(config: Config, gpus: int | None, per_host: int | None, real_memory: bool) -> CompileReport:
    distributed.start(config.run)
    devices = jax.devices()
    if real_memory:
        raise ConfigError("--real-memory is for GPUs named by --gpu: devices that are here have their own memory.")
    if gpus not in (None, len(devices)):
        here = "is 1 device" if len(devices) == 1 else f"are {len(devices)} devices"
        raise ConfigError(f"There {here} here, not {gpus}: name a kind with --gpu to compile for others.")
    kind = devices[0].device_kind
    known = gpu_from_device_kind(kind)
    per_host, because = hosts_of(len(devices), per_host, max(1, jax.local_device_count()))
    named = (known.name if known else kind, known.memory_bytes if known else None, capacity_of(devices[0]))
    return _compile(config.resolve(len(devices)).at_largest_batch, devices, None, named, known, per_host, because)


def _compile(
    config: Config,
    devices: Sequence[jax.Device],
    real: Sequence[jax.Device] | None,
    kind: tuple[str, int | None, int | None],
    gpu: Gpu | None,
    per_host: int,
    because: str,
) -> CompileReport:
    """Args: kind: name, memory and capacity of a device; gpu: its figures; real: the same devices, with their own memory."""
    name, memory_bytes, capacity = kind
    options = xla_flags.compile_options(config, devices[0].platform)
    started = time.perf_counter()
    step = aot.trace_step(config, devices)
    trace_s = time.perf_counter() - started
    compiled = step.lowered.compile(compiler_options=options)
    compile_s = time.perf_counter() - started
    text: str = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    sizes = axis_sizes(config.parallel)
    module = Module(text, sizes)
    collectives = grouped(module.collectives(), sizes)
    total = total_bytes(memory)
    kernels = kernel_flops(step.jaxpr)
    again = None if real is None or capacity is None else _with_real_memory(config, real, total, capacity)
    fits = None if capacity is None else total <= capacity
    return CompileReport(
        gpu=name,
        gpus=len(devices),
        gpus_per_host=per_host,
        hosts_because=because,
        mesh=sizes,
        attention=step.attention,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        total_bytes=total,
        host_bytes=host_bytes(memory),
        memory_bytes=memory_bytes,
        capacity_bytes=capacity,
        fits=fits,
        share_of_capacity=None if capacity is None else total / capacity,
        compile_s=compile_s,
        trace_s=trace_s,
        hlo_instructions=sum(map(len, module.computations.values())),
        hlo_bytes=len(text),
        executed_flops=matmul_flops(step.jaxpr) + kernels,
        attention_kernel_flops=kernels,
        model_flops=config.step_tokens * train_flops_per_token(config.model, config.train.sequence_length),
        near_rematerialisation=None if memory_bytes is None else total > REMAT_SHARE * memory_bytes,
        real_memory=again,
        collectives=collectives,
        largest_results=largest_results(module),
        warnings=(*warnings(config, collectives, text, capacity, fits), *untold(module.loops_of_unknown_turns())),
        jax_version=jax.__version__,
        overlap=by_kind(play(module, gpu, per_host, fp8=config.model.matmul_dtype == "fp8")) if gpu else (),
    )


def _with_real_memory(config: Config, devices: Sequence[jax.Device], demand: int, capacity: int) -> RealMemory:
    started = time.perf_counter()
    compiled = aot.compile_step(config, devices)
    compile_s = time.perf_counter() - started
    # XLA's name for an instruction that it computes again.
    repeated = len(re.findall(r"^\s*(?:ROOT )?%\S+\.remat\S* = ", compiled.as_text() or "", re.MULTILINE))
    memory: Any = compiled.memory_analysis()
    total = total_bytes(memory)
    changed = repeated > 0 or total < demand
    return RealMemory(changed, repeated, memory.temp_size_in_bytes, total, total <= capacity, compile_s)


def host_bytes(memory: Any) -> int:
    """The same as total_bytes(), of the host's memory."""
    held = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    return held + memory.host_temp_size_in_bytes


# ----------------------------------------------------------------------------------------------- what the program holds


def grouped(collectives: Iterable[Collective], sizes: dict[str, int]) -> tuple[CollectiveLine, ...]:
    """By kind, axes, dtype, and how they run; the one that sends most first."""
    groups: dict[tuple, list[Collective]] = {}
    for c in collectives:
        dtype = " ".join(sorted({dtype for dtype, _ in c.buffers}))
        groups.setdefault((c.kind, c.axes, dtype, c.asynchronous, bool(c.loops), c.spans_matmul), []).append(c)
    lines = []
    for key, members in groups.items():
        size = sum(c.executed * sum(byte_size(*buffer) for buffer in c.buffers) for c in members)
        n = math.prod(sizes[axis] for axis in key[1])
        sent = round(sent_bytes(key[0], size, n))
        lines.append(CollectiveLine(*key, len(members), sum(c.executed for c in members), size, sent))  # type: ignore[call-arg]
    return tuple(sorted(lines, key=lambda line: -line.sent_bytes))


def largest_results(module: Module) -> tuple[LargeResult, ...]:
    """XLA's public interface does not give its buffer assignment for GPUs, so these are what instructions make: some live at
    different times in the same memory.
    """
    groups: dict[tuple, list[bool]] = {}
    sizes: dict[tuple, int] = {}
    for result in module.results():
        key = (result.dtype, result.shape, origin(result.argument, result.op_name))
        groups.setdefault(key, []).append(result.in_loop)
        sizes[key] = result.size_bytes
    largest = sorted(groups, key=lambda key: -sizes[key])[:LARGEST]
    return tuple(
        LargeResult(sizes[key], *key, len(groups[key]), all(groups[key]))  # type: ignore[call-arg]
        for key in largest
    )


def origin(argument: str, op_name: str) -> str:
    """'layers.mlp.up' of state.params['layers']['mlp']['up'], or the last words of an operation's path that say something."""
    if argument:
        path = argument.removeprefix("state.").removeprefix("params")
        return ".".join(re.findall(r"\w+", path)) or argument
    dull = r"jit\(\w+\)|shard_map|while|body|closed_call|checkpoint|cond|branch_\d+_fun|custom_vjp_call|remat2?"
    words = [word for word in op_name.split("/") if word and not re.fullmatch(dull, word)]
    backward = "backward: " if any("transpose(" in word for word in words) else ""
    said = [word for word in words if not re.fullmatch(r"(transpose|jvp|rematted_computation)\b.*", word)]
    return backward + "/".join(said[-2:] or words[-1:]) if words else op_name.rsplit("/", 1)[-1]


def kernel_flops(jaxpr: Any) -> int:
    """FLOPs of cuDNN's attention in one step of all devices, by its shapes (q [B, S, N, H], k [B, T, K, H]): 4 B S T N H
    forward and 10 backward, which makes the scores again; half of it under a causal mask. Documents cut it into rectangles,
    which count whole.
    """
    total = 0
    for visit in walk(jaxpr):
        found = re.match(r"dot_product_attention_(fwd|bwd)", visit.equation.primitive.name)
        if found:
            (B, S, N, H), (_, T, *_) = (x.aval.shape for x in visit.equation.invars[:2])
            causal = "CAUSAL" in str(visit.equation.params.get("mask_type", "")).upper()
            flops = (4 if found[1] == "fwd" else 10) * B * S * T * N * H // (2 if causal else 1)
            total += flops * visit.executed * visit.ranks
    return total


# ------------------------------------------------------------------------------------------------------------- warnings


def warnings(
    config: Config, collectives: Sequence[CollectiveLine], text: str, capacity: int | None, fits: bool | None
) -> Iterator[str]:
    if capacity is not None:
        yield from replicated_giants(config, capacity, fits)
    for line in collectives:
        if not line.in_loops and line.kind == "all-gather":
            average = line.bytes / line.count
            if line.count >= MANY_GATHERS and average < SMALL_GATHER_BYTES:
                yield (
                    f"{line.count} all-gathers over {' x '.join(line.axes)} move {readable(average)} each on average: XLA did "
                    f"not combine them."
                )
    for line in collectives:
        each = line.bytes / line.count
        if line.in_loops and not line.asynchronous and line.axes and each >= SMALL_BYTES:
            yield (
                f"{line.count} {line.kind}s of {line.dtype} over {' x '.join(line.axes)}, {readable(line.bytes)} a step, are "
                f"synchronous inside loops: nothing is computed meanwhile."
            )
    if '_xla_compute_type="host"' in text or 'execution_thread="host"' in text:
        yield "XLA computes a part of the step on the host's CPU, which is very slow: look at parallel.remat and offload_state."


def untold(loops: int) -> Iterator[str]:
    if loops:
        which = "a loop with collectives turns" if loops == 1 else f"{loops} loops with collectives turn"
        yield f"XLA does not say how often {which}: what is sent there is counted once, and is more."


def replicated_giants(config: Config, capacity: int, fits: bool | None) -> Iterator[str]:
    """Parameters of which every rank along an axis holds the same large part, though a dim of it would divide. At rest always;
    the copy to compute with is whole by choice below ZeRO 3, so it is named only where the step does not fit.
    """
    sizes = axis_sizes(config.parallel)
    lines = [describe(parameter, config) for parameter in jax.tree.leaves(parameter_table(config)[1])]
    masters: dict[str, list[ParameterLine]] = {}
    copies: dict[str, list[ParameterLine]] = {}
    for line in lines:
        at_rest = line.bytes_per_device.master + line.bytes_per_device.moments
        for axis in (PIPE, DATA, CONTEXT, TENSOR):
            if at_rest > GIANT_SHARE * capacity and _could_split(line, line.master, axis, sizes):
                masters.setdefault(axis, []).append(line)
            held = line.bytes_per_device.compute_copy
            if held > GIANT_SHARE * capacity and axis in ZERO_AXES and _could_split(line, line.compute, axis, sizes):
                copies.setdefault(axis, []).append(line)
    for axis, found in masters.items():
        size = sum(line.bytes_per_device.master + line.bytes_per_device.moments for line in found)
        cure = ": parallel.zero=1 or more shares them out." if axis in ZERO_AXES and config.parallel.zero == 0 else "."
        yield f"Weights and moments of {_names(found)}, {readable(size)}, are the same on all {sizes[axis]} {axis} ranks{cure}"
    if fits is False and config.parallel.zero < 3:
        for axis, found in copies.items():
            size = sum(line.bytes_per_device.compute_copy for line in found)
            yield (
                f"The {config.model.compute_dtype} copies of {_names(found)}, {readable(size)}, are the same on all "
                f"{sizes[axis]} {axis} ranks: parallel.zero=3 gathers them a layer at a time."
            )


def _could_split(line: ParameterLine, layout: tuple[tuple[str, ...], ...], axis: str, sizes: dict[str, int]) -> bool:
    """Whether the layout leaves an axis unused that divides what a device has of some dim. Only layers go over `pipe`."""
    if sizes[axis] == 1 or any(axis in axes for axes in layout):
        return False
    left = [size // math.prod(sizes[a] for a in axes) for size, axes in zip(line.shape, layout, strict=True)]
    dims = [size for size, dim in zip(left, line.dims, strict=True) if (dim in STACK_DIMS) == (axis == PIPE)]
    return any(size % sizes[axis] == 0 for size in dims)


def _names(lines: Sequence[ParameterLine]) -> str:
    return ", ".join(line.path for line in lines)


# ---------------------------------------------------------------------------------------------------------------- cache


def cache_key(config: Config, gpu: Gpu, gpus: int, per_host: int, real_memory: bool) -> str:
    """Of all that the report depends on: the config but for its logs, checkpoints and place, the GPUs, the versions of JAX and
    of the libraries that compile, XLA_FLAGS, jaxllm's own source.
    """
    what = config.model_dump(mode="json", exclude={"log": True, "checkpoint": True, "run": {"dir"}})
    kind = {**vars(gpu), "dense_flops": dict(gpu.dense_flops), "chip": asdict(gpu.chip)}
    share = [XLA_MEMORY_FRACTION, RESERVE_BYTES]
    versions = [jax.__version__, jaxlib.__version__, *aot.versions(), xla_flags.given_flags(), code_hash()]
    told = json.dumps([what, kind, share, gpus, per_host, real_memory, versions], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _read(file: Path, because: str) -> CompileReport | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return report_from_json({**values, "hosts_because": because, "cached": True})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s is no report to use (%s): compiling anew.", file, error)
        return None


def _write(file: Path, report: CompileReport) -> None:
    """Whole or not at all. A folder that cannot be written costs the next start a compilation, and nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(report.to_json(), out)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        log.warning("The report is not kept for next time: %s cannot be written (%s).", file.parent, error.strerror or error)
