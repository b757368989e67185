"""Memory over one train step, by XLA's buffer assignment, beside the estimate: what `jaxllm estimate --over step` draws.

The step is compiled as in training. The GPUs need not be present.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax

from jaxllm import aot, distributed
from jaxllm.buffers import StepMemory, dump_options, read_dump
from jaxllm.config import Config, ConfigError
from jaxllm.memory_plots import step_picture, title_of
from jaxllm.plan.estimate import Estimate
from jaxllm.plan.hardware import Gpu
from jaxllm.xla_flags import compile_options


def draw_step(estimate: Estimate, path: str | Path) -> None:
    """Compiles the config of an estimate and draws the memory that one device has in use at each instruction.

    Raises:
      ConfigError: no GPU was named, packages are missing, or the file cannot be written.
    """
    if estimate.gpu is None:
        raise ConfigError("--over=step compiles the step: name the kind of GPU, such as --gpu h100-80gb.")
    distributed.start_without_devices()
    own = estimate.by_convention["jaxllm"]
    curve, memory = compile_with_buffers(estimate.config, estimate.gpu, estimate.gpus_per_host)
    held_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    options = {"capacity_bytes": own.capacity_bytes, "title": title_of(estimate)}
    step_picture(curve, held_bytes, own.memory.peak_stage, path, **options)


def compile_with_buffers(config: Config, gpu: Gpu, gpus_per_host: int) -> tuple[StepMemory, Any]:
    """(temporaries over the step on one device, the compiled step's memory_analysis()) of a resolved config.

    Raises:
      ConfigError: packages are missing, or this XLA does not dump the buffer assignment.
    """
    devices = aot.gpu_devices(config.devices // gpus_per_host, gpus_per_host, gpu)
    with tempfile.TemporaryDirectory() as folder:
        options = compile_options(config, devices[0].platform) | dump_options(folder)
        compiled = aot.lower_step(config, devices).compile(compiler_options=options)
        try:
            curve = read_dump(folder)
        except FileNotFoundError:
            raise ConfigError(f"XLA of JAX {jax.__version__} dumps no buffer assignment: use JAX 0.10 to draw one.") from None
    return curve, compiled.memory_analysis()
