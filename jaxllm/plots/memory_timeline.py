"""Memory over one train step, by XLA's buffer assignment, beside the estimate: what `jaxllm estimate --over step` draws.

The step is compiled as in training. The GPUs need not be present.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.cluster import distributed
from jaxllm.compile import aot
from jaxllm.compile.buffers import BACKWARD, FORWARD, UPDATE, StepMemory, read_dump
from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import StageMemory
from jaxllm.plan.estimate import Estimate
from jaxllm.plots.memory import (
    ACTIVATIONS,
    HUES,
    OPTIMIZER,
    draw_capacity,
    draw_stacks,
    fold_slivers,
    legend_beside,
    short_number,
    title_of,
    y_limit,
)
from jaxllm.plots.schedule import new_figure, save, style_axes

_PHASES = {FORWARD: (0.93, 0.95, 0.99), BACKWARD: (1.0, 0.95, 0.90), UPDATE: (0.95, 0.92, 0.97)}
SHORT_SPAN = 0.01
"""Share of all instructions. A shorter range of one phase gets the colour of its neighbours."""


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
    save(step_figure(curve, held_bytes, own.memory.peak_stage, **options), path)


def compile_with_buffers(config: Config, gpu: Gpu, gpus_per_host: int) -> tuple[StepMemory, Any]:
    """(temporaries over the step on one device, the compiled step's memory_analysis()) of a resolved config.

    Raises:
      ConfigError: packages are missing, or this XLA does not dump the buffer assignment.
    """
    devices = aot.gpu_devices(config.devices // gpus_per_host, gpus_per_host, gpu)
    with tempfile.TemporaryDirectory() as folder:
        lowered = aot.trace_step(config, devices).lowered
        options = aot.options_for(config, lowered, devices[0]) | {"xla_dump_to": folder}
        compiled = lowered.compile(compiler_options=options)
        try:
            curve = read_dump(folder)
        except FileNotFoundError:
            raise ConfigError(f"XLA of JAX {jax.__version__} dumps no buffer assignment: use JAX 0.12 to draw one.") from None
    return curve, compiled.memory_analysis()


def step_figure(
    curve: StepMemory, held_bytes: int, stage: StageMemory, *, capacity_bytes: int | None = None, title: str = ""
) -> Any:
    """Memory of a device in use at each instruction, by XLA's buffer assignment, with the estimate's terms beside it.

    Args:
      held_bytes: arguments and outputs, which are allocated all the time.
      stage: the fullest stage of the estimate.
    """
    figure = new_figure(10, 4.8, title=title)
    grid = figure.add_gridspec(1, 2, width_ratios=(4.2, 1))
    axes, n = figure.add_subplot(grid[0, 0]), len(curve.phases)
    set_aside = held_bytes + curve.allocated_bytes
    highest, unit, unit_name = y_limit(max(set_aside, stage.total_bytes), capacity_bytes)
    for phase, start, end in curve.spans(SHORT_SPAN * n):
        axes.axvspan(start, end, color=_PHASES[phase], linewidth=0)
        if end - start > 0.06 * n:
            axes.text((start + end) / 2, 1.12 * highest / unit, phase, ha="center", va="top", fontsize=9)
    edges, held = np.arange(n + 1), held_bytes / unit
    used = {"baseline": held, "fill": True, "color": HUES[ACTIVATIONS]}
    axes.stairs(held + curve.used_bytes / unit, edges, label="temporaries in use, by XLA", **used)
    axes.stairs(np.full(n, held), edges, fill=True, color=HUES[OPTIMIZER], label="state and batch, all the time")
    lines = {"set aside by XLA": (set_aside, "-"), "estimate": (stage.total_bytes, ":")}
    for name, (size, style) in lines.items():
        label = f"{name}, {short_number(size / unit)} {unit_name}"
        axes.axhline(size / unit, color="black", linewidth=1, linestyle=style, label=label)
    axes.set(xlim=(0, n), ylim=(0, 1.14 * highest / unit))
    axes.set_xlabel("instruction of the compiled step, in order; a loop's body once", fontsize=9)
    style_axes(axes, f"{unit_name} on one device")
    beside = figure.add_subplot(grid[0, 1], sharey=axes)
    draw_stacks(beside, fold_slivers([stage.terms_bytes]), unit, 0.7)
    beside.set_xticks([0], ["estimate"], fontsize=8)
    beside.set_xlim(-0.6, 0.6)
    beside.tick_params(labelleft=False, left=False)
    beside.spines[["top", "right", "left"]].set_visible(False)
    legend_beside(beside, 1.0)
    for each in (axes, beside):
        draw_capacity(each, capacity_bytes, highest, unit)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return figure
