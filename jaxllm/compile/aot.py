"""Compiles the real train step without running it, for devices that need not be present.

    devices = gpu_devices(hosts=1, gpus_per_host=8)
    compiled = compile_step(config, devices)
    compiled.memory_analysis(), compiled.as_text()

XLA needs a description of the GPU, its plugin and NVIDIA's assembler (extra `aot`), not a GPU.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
from jax.experimental import topologies

from jaxllm.config import Config, ConfigError
from jaxllm.config.rounds import exchanges_beside_steps
from jaxllm.cost_model.hardware import GPUS, Gpu
from jaxllm.cost_model.memory import may_fit
from jaxllm.machine.host import installed, installed_version
from jaxllm.machine.xla_flags import compile_options
from jaxllm.mesh.placement import mesh_on_hosts
from jaxllm.run.programs import batch_layout
from jaxllm.run.rounds import early_exchange, layout_of_number
from jaxllm.train.build import build_training

DEMAND_BYTES = 10**15
"""Memory size that XLA is given for each GPU. It is large enough that XLA never rematerialises and reports what the program
needs. XLA also counts host buffers, and a large batch soon offloads a terabyte."""

OLDEST = (7, 5)
"""The first compute capability for which CUDA 13's assembler compiles (CUDA 13.0 release notes; tried with 7.0)."""

# XLA's GpuTargetConfigProto. The limits of blocks and registers are the same for all these compute capabilities (CUDA
# programming guide).
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {chip.threads_per_multiprocessor}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {chip.shared_memory_per_block}
  shared_memory_per_core: {chip.shared_memory_per_multiprocessor}
  core_count: {chip.multiprocessors} fpus_per_core: {chip.fpus_per_multiprocessor}
  clock_rate_ghz: {chip.clock_ghz} l2_cache_size: {chip.l2_cache_bytes}
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: {chip.compute_capability[0]} minor: {chip.compute_capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def can_compile_for_gpus() -> bool:
    """Whether the CUDA plugin and NVIDIA's assembler are installed."""
    try:
        return all(importlib.util.find_spec(name) for name in ("jax_plugins.xla_cuda13", "nvidia.cudnn", "nvidia.cu13"))
    except ModuleNotFoundError:  # not even the parent package
        return False


def versions() -> list[str]:
    """Versions of the installed packages that compile: the CUDA plugin, cuDNN and the assembler."""
    return installed("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc")


def require_compiler(gpu: Gpu) -> None:
    """Raises ConfigError if NVIDIA's packages are missing, or do not compile for this kind."""
    if not can_compile_for_gpus():
        raise ConfigError("Compiling for GPUs without one needs NVIDIA's packages: pip install 'jaxllm[aot]'.")
    if gpu.chip.compute_capability < OLDEST:
        major, minor = gpu.chip.compute_capability
        raise ConfigError(
            f"There is no compiler for {gpu.name}: that of CUDA 13, which jaxllm[aot] installs, begins at compute capability "
            f"{OLDEST[0]}.{OLDEST[1]}, and it has {major}.{minor}. Use `jaxllm estimate`, or `jaxllm plan --compile 0`."
        )


def gpu_devices(
    hosts: int, gpus_per_host: int, gpu: Gpu = GPUS["h100-80gb"], memory_bytes: int = DEMAND_BYTES
) -> Sequence[jax.Device]:
    """Descriptions of hosts x gpus_per_host GPUs of a kind, to compile for.

    Args:
      memory_bytes: memory of each GPU, as XLA is given it.

    Raises:
      ConfigError: see require_compiler.
    """
    require_compiler(gpu)
    topology = f"1x{hosts}x{gpus_per_host}"
    bandwidth, name = round(gpu.memory_bandwidth_bytes_per_s), gpu.device_kind or gpu.name
    # The lowest that pyproject.toml allows where another package, such as CUDA 12's, brings it.
    cudnn = (installed_version("nvidia-cudnn-cu13") or "9.12.0").split(".")
    target = _TARGET.format(chip=gpu.chip, bandwidth=bandwidth, memory=memory_bytes, cudnn=cudnn, name=name)
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=topology).devices


def compile_step(config: Config, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Compiles the train step of `config` for `devices`; with train.diloco_steps, the inner step, and with train.diloco_overlap
    one that synchronises a fragment too. It runs nothing and makes no array."""
    config = config.resolve(len(devices))
    lowered = trace_step(config, devices).lowered
    return lowered.compile(compiler_options=options_for(config, lowered, devices[0]))


def options_for(
    config: Config, lowered: jax.stages.Lowered, device: jax.Device, capacity_bytes: int | None = None
) -> dict[str, Any]:
    """Options to compile trace_step(config).lowered for devices of this kind. Args: capacity_bytes: see may_fit()."""
    options = compile_options(config, device, may_fit(config, device, capacity_bytes))
    return early_exchange(lowered, options, device) if exchanges_beside_steps(config) else options


@dataclass(frozen=True)
class TracedStep:
    """A train step, traced and lowered but not compiled."""

    jaxpr: jax.extend.core.ClosedJaxpr
    lowered: jax.stages.Lowered
    attention: str
    """Parallelized.attention: which kernel computes attention."""


def trace_step(config: Config, devices: Sequence[jax.Device]) -> TracedStep:
    """Traces and lowers the train step of `config` for `devices`."""
    config = config.resolve(len(devices))
    mesh = mesh_on_hosts(config.parallel, devices)
    training = build_training(config, mesh)

    M = config.num_microbatches
    batch = batch_layout(config, mesh, M, config.train.global_batch_sequences // M)
    platform = "cpu" if devices[0].platform == "cpu" else "cuda"
    with jax.set_mesh(mesh):
        number = () if training.outer is None else (layout_of_number(mesh),)
        traced = training.jit_step(training.step, bool(number)).trace(training.layout(), batch, *number)
        return TracedStep(traced.jaxpr, traced.lower(lowering_platforms=(platform,)), training.functions.attention)
