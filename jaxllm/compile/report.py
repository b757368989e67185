"""Compiles a config's real train step with XLA and reports on the result. The GPUs need not be present.

    report = compile_report(config, gpu=GPUS["h100-80gb"], gpus=64)
    report.total_bytes, report.fits, report.collectives

The step is the one that training runs, with the same options. It is compiled for GPUs with far more memory than they have, so
that XLA reports how much the program needs. Its behaviour with the real memory takes a second compilation (real_memory=True).
"""

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxllm import __version__
from jaxllm.cluster import distributed
from jaxllm.cluster.initialize import code_hash
from jaxllm.compile import aot
from jaxllm.compile.hlo import LargeResult, Module, largest_results
from jaxllm.compile.inspect import ParameterRow, describe
from jaxllm.compile.jaxpr_flops import kernel_flops, matmul_flops
from jaxllm.compile.kernels import KernelAccount, kernel_account
from jaxllm.compile.overlap import CollectiveRow, Overlap, by_kind, grouped, simulate_overlap, total
from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import branch_shares, require_trains
from jaxllm.config.rounds import steps_apart
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import RESERVE_BYTES, XLA_MEMORY_FRACTION, Gpu, gpu_from_device_kind
from jaxllm.cost_model.hosts import choose_gpus_per_host, require_devices
from jaxllm.cost_model.memory import cudnn_workspace
from jaxllm.display import readable
from jaxllm.machine import xla_flags
from jaxllm.machine.program_cache import write_whole
from jaxllm.mesh.axes import CONTEXT, DATA, PIPE, TENSOR, ZERO_AXES, axis_sizes
from jaxllm.mesh.sharding import STACK_DIMS
from jaxllm.parallel.parameters import parameter_table
from jaxllm.private_jax import without_dead_code
from jaxllm.run.memory_check import capacity_of, total_bytes
from jaxllm.untrusted import RefusedInput, checked, read_json

# ------------------------------------------------------------------------------------------------------------------ waste

GIANT_SHARE = 0.01
"""Share of the capacity: a parameter whose copies take more gets a warning."""
SMALL_GATHER_BYTES, MANY_GATHERS = 2**20, 16
"""Number and size of consecutive gathers whose latency costs more than their bytes."""
SMALL_BYTES = 2**16
"""A smaller synchronous collective (a norm, a count) gets no warning."""


def warnings(
    config: Config, collectives: Sequence[CollectiveRow], text: str, capacity: int | None, fits: bool | None, unknown_loops: int
) -> Iterator[str]:
    if capacity is not None:
        yield from replicated_giants(config, capacity, fits)
    for row in collectives:
        average, is_gather = row.bytes / row.count, row.kind == "all-gather" and not row.in_loops
        if is_gather and row.count >= MANY_GATHERS and average < SMALL_GATHER_BYTES:
            sizes = f"{readable(average)} each on average"
            yield f"{row.count} all-gathers over {' x '.join(row.axes)} move {sizes}: XLA did not combine them."
    for row in collectives:
        each = row.bytes / row.count
        if row.in_loops and not row.asynchronous and row.axes and each >= SMALL_BYTES:
            yield (
                f"{row.count} {row.kind}s of {row.dtype} over {' x '.join(row.axes)}, {readable(row.bytes)} a step, are "
                f"synchronous inside loops: nothing is computed meanwhile."
            )
    if '_xla_compute_type="host"' in text or 'execution_thread="host"' in text:
        yield "XLA computes a part of the step on the host's CPU, which is very slow: check parallel.remat and offload_state."
    if unknown_loops:
        which = "a loop with collectives" if unknown_loops == 1 else f"{unknown_loops} loops with collectives"
        yield f"XLA gives no trip count for {which}: transfers in it count once, and are more in reality."


def replicated_giants(config: Config, capacity: int, fits: bool | None) -> Iterator[str]:
    """Parameters of which every rank along an axis holds the same large part, although a dim would divide. Stored weights are
    always reported. The compute copy is replicated by design below ZeRO 3, so it is reported only if the step does not fit."""
    sizes, large = axis_sizes(config.parallel), GIANT_SHARE * capacity
    rows = [describe(parameter, config) for parameter in jax.tree.leaves(parameter_table(config)[1])]
    for axis in (PIPE, DATA, CONTEXT, TENSOR):
        there = [(row.path, row.bytes_per_device) for row in rows if _could_split(row, row.master, axis, sizes)]
        if giants := {path: size.master + size.moments for path, size in there if size.master + size.moments > large}:
            same = f"{', '.join(giants)}, {readable(sum(giants.values()))}, are the same on all {sizes[axis]} {axis} ranks"
            cure = ": parallel.zero=1 or more shards them." if axis in ZERO_AXES and config.parallel.zero == 0 else "."
            yield f"Weights and moments of {same}{cure}"
    for axis in ZERO_AXES if fits is False and config.parallel.zero < 3 else ():
        there = [(row.path, row.bytes_per_device) for row in rows if _could_split(row, row.compute, axis, sizes)]
        if giants := {path: size.compute_copy for path, size in there if size.compute_copy > large}:
            same = f"{', '.join(giants)}, {readable(sum(giants.values()))}, are the same on all {sizes[axis]} {axis} ranks"
            yield f"The {config.model.compute_dtype} copies of {same}: parallel.zero=3 gathers them a layer at a time."


def _could_split(row: ParameterRow, layout: tuple[tuple[str, ...], ...], axis: str, sizes: dict[str, int]) -> bool:
    """Whether the layout leaves an axis unused that divides a device's part of some dim. Only layers go over `pipe`."""
    if sizes[axis] == 1 or any(axis in axes for axes in layout):
        return False
    left = [size // math.prod(sizes[a] for a in axes) for size, axes in zip(row.shape, layout, strict=True)]
    dims = [size for size, dim in zip(left, row.dims, strict=True) if (dim in STACK_DIMS) == (axis == PIPE)]
    return any(size % sizes[axis] == 0 for size in dims)


# ----------------------------------------------------------------------------------------------------------------- report

log = logging.getLogger(__name__)

REMAT_SHARE = 0.76
"""Share of the GPU's memory, as XLA knows it, above which XLA rematerialises a step unless an option prevents it (measured,
JAX 0.10.2)."""


@dataclass(frozen=True)
class RealMemory:
    """The compiled step if XLA knows the GPU's real memory."""

    rematerialises: bool
    rematerialised_instructions: int
    temp_bytes: int
    total_bytes: int
    fits: bool
    compile_s: float
    compiled_flops: int
    """As CompileReport.compiled_flops."""


@dataclass(frozen=True)
class CompileReport:
    """The complete result of `jaxllm compile`; bytes are of one device."""

    gpu: str
    gpus: int
    gpus_per_host: int
    hosts_because: str
    mesh: dict[str, int]
    attention: str
    argument_bytes: int
    """State and batch."""
    temp_bytes: int
    """The peak of temporary buffers."""
    output_bytes: int
    alias_bytes: int
    """Part of the output that reuses an argument's memory."""
    workspace_bytes: int
    """What cuDNN's workspace takes at most beside the temporaries, by the estimate; 0 on a GPU, where XLA knows it."""
    total_bytes: int
    """argument + temp + output - alias + workspace."""
    host_bytes: int
    """Bytes per device in pinned host memory."""
    memory_bytes: int | None
    """Memory of the device; None if it is not known (a CPU)."""
    capacity_bytes: int | None
    """The part of it that a step may use."""
    fits: bool | None
    share_of_capacity: float | None
    compile_s: float
    """Time for tracing, lowering and XLA."""
    trace_s: float
    hlo_instructions: int
    hlo_bytes: int
    """Length of the optimised program's text."""
    executed_flops: int
    """FLOPs of matmuls and cuDNN attention as traced, on all devices: including recomputation, without what nothing reads."""
    attention_kernel_flops: int
    """cuDNN's part of them, by its shapes."""
    compiled_flops: int
    """FLOPs of matmuls and cuDNN attention in XLA's program, on all devices. With more than executed_flops it repeats some."""
    model_flops: int
    """FLOPs of one step: 6 per matmul parameter and token, and causal attention."""
    near_rematerialisation: bool | None
    """By the share of memory, which is a rule of thumb; real_memory is certain. False where an option prevents it."""
    real_memory: RealMemory | None
    collectives: tuple[CollectiveRow, ...]
    largest_results: tuple[LargeResult, ...]
    warnings: tuple[str, ...]
    jax_version: str
    overlap: tuple[Overlap, ...] = ()
    """Exposed time of collectives, by kind and axes; empty for devices whose figures are not known."""
    exposed_transfers_s: float | None = None
    """Exposed time of the collectives of each step; None if XLA does not state a loop's trip count, or without `overlap`."""
    kernels: KernelAccount | None = None
    """Every kernel by part; None for devices whose figures are not known."""
    packages: tuple[str, ...] = ()
    """What compiled it, with versions: the CUDA plugin, cuDNN and the assembler if installed, and last jaxllm with its code."""
    xla_flags: str = ""
    """XLA_FLAGS, with what jaxllm added."""
    cached: bool = False

    def __repr__(self) -> str:
        verdict = {None: "", True: ", which fits", False: ", which does not fit"}[self.fits]
        return f"<CompileReport for {self.gpus} x {self.gpu}: {readable(self.total_bytes)} on each{verdict}>"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compile_report(
    config: Config,
    gpu: Gpu | None = None,
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    *,
    real_memory: bool = False,
    cache: Path | None = None,
) -> CompileReport:
    """Compiles the train step of a config and analyses the result. It runs nothing and makes no array.

    Args:
      gpu: the kind to compile for; the GPUs need not be present. None: the present devices, of any kind.
      gpus: default: the size of the config's mesh.
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size.
      real_memory: compile once more, for the memory that the GPU has.
      cache: folder of earlier reports, read and extended. Not used for present devices.

    Raises:
      ConfigError: the mesh has another size, hosts do not divide, a parameter cannot be sharded, or packages are missing.
    """
    if gpu is None:
        return _for_attached_devices(config, gpus, gpus_per_host, real_memory)
    distributed.start_without_devices()
    gpus = require_devices(config, gpus)
    require_trains(config, gpu.chip.compute_capability, gpu.name)
    config = config.resolve(gpus).at_largest_batch
    per_host, because = choose_gpus_per_host(gpus, gpus_per_host, gpu.gpus_per_host, config.parallel)
    # This reports missing packages even if the report is cached.
    devices = aot.gpu_devices(gpus // per_host, per_host, gpu)
    file = None if cache is None else cache / f"{cache_key(config, gpu, gpus, per_host, real_memory)}.json"
    if file is not None and (cached := _read(file, because)) is not None:
        return cached
    real = aot.gpu_devices(gpus // per_host, per_host, gpu, gpu.memory_bytes) if real_memory else None
    report = _compile(config, devices, real, gpu.capacity_bytes, gpu, per_host, because, on_device=False)
    if file is not None:
        _write(file, report)
    return report


def _for_attached_devices(config: Config, gpus: int | None, per_host: int | None, real_memory: bool) -> CompileReport:
    distributed.start(config.run)
    devices = jax.devices()
    if real_memory:
        raise ConfigError("--real-memory is for GPUs named by --gpu: present devices have their own memory.")
    require_present(gpus, devices)
    known, capacity = gpu_from_device_kind(devices[0].device_kind), capacity_of(devices[0])
    per_host, because = choose_gpus_per_host(len(devices), per_host, max(1, jax.local_device_count()), config.parallel)
    return _compile(config.resolve(len(devices)).at_largest_batch, devices, None, capacity, known, per_host, because)


def require_present(gpus: int | None, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if there are not as many devices here as asked for."""
    if gpus not in (None, len(devices)):
        here = "is 1 device" if len(devices) == 1 else f"are {len(devices)} devices"
        raise ConfigError(f"There {here} here, not {gpus}: name a kind with --gpu to compile for others.")


def _compile(
    config: Config,
    devices: Sequence[jax.Device],
    real: Sequence[jax.Device] | None,
    capacity: int | None,
    gpu: Gpu | None,
    per_host: int,
    because: str,
    on_device: bool = True,
) -> CompileReport:
    """Compiles for `devices`. Args: gpu: their figures; real: devices with real memory; on_device: `devices` are present."""
    memory_bytes = None if gpu is None else gpu.memory_bytes
    started = time.perf_counter()
    step = aot.trace_step(config, devices)
    trace_s = time.perf_counter() - started
    options = aot.options_for(config, step.lowered, devices[0], capacity)
    may_remat = not xla_flags.NO_REMAT_GPU_OPTIONS.keys() & options.keys()
    compiled = step.lowered.compile(compiler_options=options)
    compile_s = time.perf_counter() - started
    text: str = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    sizes = axis_sizes(config.parallel)
    shares = branch_shares(config.model, config.train.sequence_length)
    module = Module(text, sizes, shares)
    collectives = grouped(module.collectives(), sizes)
    workspace = 0 if on_device or gpu is None else cudnn_workspace(config, gpu)
    size = total_bytes(memory) + workspace
    fused_flops = kernel_flops(step.jaxpr, shares)
    fp8, parallel = config.model.multiplies_fp8, config.parallel
    apart = None if config.train.diloco_steps is None else steps_apart(config.train)
    overlap = by_kind(simulate_overlap(module, gpu, per_host, fp8=fp8, parallel=parallel), apart) if gpu else ()
    # The exchange of a fragment that is beside this step is not in every step, and stays predicted.
    each_step = [row for row in overlap if row.every_steps is None]
    again = None if real is None or capacity is None else _with_real_memory(config, real, size, capacity, workspace)
    fits = None if capacity is None else size <= capacity
    unknown_loops = module.loops_without_trip_count()
    return CompileReport(
        gpu=devices[0].device_kind if gpu is None else gpu.name,
        gpus=len(devices),
        gpus_per_host=per_host,
        hosts_because=because,
        mesh=sizes,
        attention=step.attention,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        workspace_bytes=workspace,
        total_bytes=size,
        host_bytes=host_bytes(memory),
        memory_bytes=memory_bytes,
        capacity_bytes=capacity,
        fits=fits,
        share_of_capacity=None if capacity is None else size / capacity,
        compile_s=compile_s,
        trace_s=trace_s,
        hlo_instructions=sum(map(len, module.computations.values())),
        hlo_bytes=len(text),
        executed_flops=matmul_flops(without_dead_code(step.jaxpr), shares) + fused_flops,
        attention_kernel_flops=fused_flops,
        compiled_flops=len(devices) * module.flops(module.entry),
        model_flops=config.step_tokens
        * train_flops_per_token(config.model, config.train.sequence_length, frozen=config.frozen),
        near_rematerialisation=None if memory_bytes is None else may_remat and size > REMAT_SHARE * memory_bytes,
        real_memory=again,
        collectives=collectives,
        largest_results=largest_results(module),
        warnings=tuple(warnings(config, collectives, text, capacity, fits, unknown_loops)),
        jax_version=jax.__version__,
        overlap=overlap,
        exposed_transfers_s=None if gpu is None or unknown_loops else total(each_step).exposed_s,
        kernels=kernel_account(module, config, gpu, per_host, overlap) if gpu else None,
        packages=(*aot.versions(), f"jaxllm {__version__} (code {code_hash()[:10]})"),
        xla_flags=xla_flags.given_flags(),
    )


def _with_real_memory(
    config: Config, devices: Sequence[jax.Device], demand: int, capacity: int, workspace: int = 0
) -> RealMemory:
    started = time.perf_counter()
    compiled = aot.compile_step(config, devices)
    compile_s = time.perf_counter() - started
    # XLA's name for a rematerialised instruction.
    text = compiled.as_text() or ""
    repeated = len(re.findall(r"^\s*(?:ROOT )?%\S+\.remat\S* = ", text, re.MULTILINE))
    memory: Any = compiled.memory_analysis()
    total = total_bytes(memory) + workspace
    changed = repeated > 0 or total < demand
    module = Module(text, axis_sizes(config.parallel), branch_shares(config.model, config.train.sequence_length))
    flops = len(devices) * module.flops(module.entry)
    return RealMemory(changed, repeated, memory.temp_size_in_bytes, total, total <= capacity, compile_s, flops)


def host_bytes(memory: Any) -> int:
    """total_bytes(), but of host memory."""
    held = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    return held + memory.host_temp_size_in_bytes


# ---------------------------------------------------------------------------------------------------------------- cache


def cache_key(config: Config, gpu: Gpu, gpus: int, per_host: int, real_memory: bool) -> str:
    """Hash of everything that the report depends on: the config without logs, checkpoints and run directory, the GPUs, the
    versions of JAX and of the libraries that compile, XLA_FLAGS, jaxllm's own source."""
    what = config.model_dump(mode="json", exclude={"log": True, "checkpoint": True, "run": {"dir", "compilation_cache"}})
    kind = {**vars(gpu), "dense_flops": dict(gpu.dense_flops), "chip": asdict(gpu.chip)}
    share = [XLA_MEMORY_FRACTION, RESERVE_BYTES]
    versions = [jax.__version__, jaxlib.__version__, *aot.versions(), xla_flags.given_flags(), code_hash()]
    inputs = json.dumps([what, kind, share, gpus, per_host, real_memory, versions], sort_keys=True)
    return hashlib.sha256(inputs.encode()).hexdigest()


def _read(file: Path, because: str) -> CompileReport | None:
    try:
        return replace(checked(read_json(file, finite=False), CompileReport), hosts_because=because, cached=True)
    except FileNotFoundError:
        return None
    except (OSError, RefusedInput) as error:
        log.warning("%s is not a usable report (%s): compiling again.", file, error)
        return None


def _write(file: Path, report: CompileReport) -> None:
    """Writes the report atomically. If the folder cannot be written, the next start compiles again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(report.to_json()).encode())
    except OSError as error:
        log.warning("The report is not cached: %s cannot be written (%s).", file.parent, error.strerror or error)
