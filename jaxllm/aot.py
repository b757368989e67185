"""Compiles the real train step without running it, for devices that need not be there.

    devices = gpu_devices(hosts=1, gpus_per_host=8)
    compiled = compile_step(config, devices)
    compiled.memory_analysis(), compiled.as_text()

XLA needs a description of the GPU, its plugin and NVIDIA's assembler (extra `aot`), not a GPU. So far there is one target, the
H100; `jaxllm compile` (part 6) will know the others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxllm.config import Config, ConfigError
from jaxllm.mesh import batch_sharding, make_mesh, replicated
from jaxllm.train.build import build_training
from jaxllm.xla_flags import compile_options

# XLA's GpuTargetConfigProto. Sizes from NVIDIA's H100 SXM5 data sheet and CUDA's limits for compute capability 9.0. The memory
# is far larger than the real 80 GB, so that XLA says what the program wants: near capacity it starts to rematerialise.
H100_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 1000000000000
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def can_compile_for_gpus() -> bool:
    """Whether the CUDA plugin and NVIDIA's assembler are installed."""
    try:
        return all(importlib.util.find_spec(name) for name in ("jax_plugins.xla_cuda13", "nvidia.cudnn", "nvidia.cu13"))
    except ModuleNotFoundError:  # not even the parent package
        return False


def gpu_devices(hosts: int, gpus_per_host: int) -> Sequence[jax.Device]:
    """Descriptions of hosts x gpus_per_host H100s, to compile for.

    Raises:
      ConfigError: the packages are missing.
    """
    if not can_compile_for_gpus():
        raise ConfigError("Compiling for GPUs without one needs NVIDIA's packages: pip install 'jaxllm[aot]'.")
    topology = f"1x{hosts}x{gpus_per_host}"
    return topologies.get_topology_desc(platform="cuda", target_config=H100_TARGET, topology=topology).devices


def compile_step(config: Config, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """The compiled train step of `config` on `devices`. Nothing is computed, no array is made."""
    return lower_step(config, devices).compile(compiler_options=compile_options(config, devices[0].platform))


def lower_step(config: Config, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """The train step as handed to XLA."""
    config = config.resolve(len(devices))
    mesh = make_mesh(config.parallel, devices)
    training = build_training(config, mesh)

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    M = config.num_microbatches
    shape = (M, config.train.global_batch_sequences // M, config.train.sequence_length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "mask": jnp.bool_}
    if config.data.mask_documents:
        dtypes["segments"] = jnp.int32
    batch = {name: placed(jax.ShapeDtypeStruct(shape, dtype), batch_sharding(mesh)) for name, dtype in dtypes.items()}
    platform = "cpu" if devices[0].platform == "cpu" else "cuda"
    with jax.set_mesh(mesh):
        state = jax.tree.map(placed, jax.eval_shape(training.create, 0), training.shardings)
        jitted = jax.jit(training.step, donate_argnums=0, out_shardings=(training.shardings, replicated(mesh)))
        return jitted.trace(state, batch).lower(lowering_platforms=(platform,))
