"""Waste in a compiled step: unnecessary copies, exposed collectives, work on the host's CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax

from jaxllm.compile.inspect_table import ParameterRow, describe
from jaxllm.compile.program import CollectiveRow
from jaxllm.config import Config
from jaxllm.display import readable
from jaxllm.mesh import CONTEXT, DATA, PIPE, TENSOR, ZERO_AXES, axis_sizes
from jaxllm.parallel.parameters import parameter_table
from jaxllm.sharding import STACK_DIMS

GIANT_SHARE = 0.01
"""Share of the capacity: a parameter whose copies take more gets a warning."""
SMALL_GATHER_BYTES, MANY_GATHERS = 2**20, 16
"""Number and size of consecutive gathers whose latency costs more than their bytes."""
SMALL_BYTES = 2**16
"""A smaller synchronous collective (a norm, a count) gets no warning."""


def warnings(
    config: Config, collectives: Sequence[CollectiveRow], text: str, capacity: int | None, fits: bool | None
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
        yield "XLA computes a part of the step on the host's CPU, which is very slow: check parallel.remat and offload_state."


def unknown_loop_warnings(loops: int) -> Iterator[str]:
    if loops:
        which = "a loop with collectives" if loops == 1 else f"{loops} loops with collectives"
        yield f"XLA gives no trip count for {which}: transfers in it count once, and are more in reality."


def replicated_giants(config: Config, capacity: int, fits: bool | None) -> Iterator[str]:
    """Parameters of which every rank along an axis holds the same large part, although a dim would divide. Stored weights are
    always reported. The compute copy is replicated by design below ZeRO 3, so it is reported only if the step does not fit.
    """
    sizes = axis_sizes(config.parallel)
    lines = [describe(parameter, config) for parameter in jax.tree.leaves(parameter_table(config)[1])]
    masters: dict[str, list[ParameterRow]] = {}
    copies: dict[str, list[ParameterRow]] = {}
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
        cure = ": parallel.zero=1 or more shards them." if axis in ZERO_AXES and config.parallel.zero == 0 else "."
        yield f"Weights and moments of {_names(found)}, {readable(size)}, are the same on all {sizes[axis]} {axis} ranks{cure}"
    if fits is False and config.parallel.zero < 3:
        for axis, found in copies.items():
            size = sum(line.bytes_per_device.compute_copy for line in found)
            yield (
                f"The {config.model.compute_dtype} copies of {_names(found)}, {readable(size)}, are the same on all "
                f"{sizes[axis]} {axis} ranks: parallel.zero=3 gathers them a layer at a time."
            )


def _could_split(line: ParameterRow, layout: tuple[tuple[str, ...], ...], axis: str, sizes: dict[str, int]) -> bool:
    """Whether the layout leaves an axis unused that divides a device's part of some dim. Only layers go over `pipe`."""
    if sizes[axis] == 1 or any(axis in axes for axes in layout):
        return False
    left = [size // math.prod(sizes[a] for a in axes) for size, axes in zip(line.shape, layout, strict=True)]
    dims = [size for size, dim in zip(left, line.dims, strict=True) if (dim in STACK_DIMS) == (axis == PIPE)]
    return any(size % sizes[axis] == 0 for size in dims)


def _names(lines: Sequence[ParameterRow]) -> str:
    return ", ".join(line.path for line in lines)
