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
    for row in collectives:
        if not row.in_loops and row.kind == "all-gather":
            average = row.bytes / row.count
            if row.count >= MANY_GATHERS and average < SMALL_GATHER_BYTES:
                yield (
                    f"{row.count} all-gathers over {' x '.join(row.axes)} move {readable(average)} each on average: XLA did "
                    f"not combine them."
                )
    for row in collectives:
        each = row.bytes / row.count
        if row.in_loops and not row.asynchronous and row.axes and each >= SMALL_BYTES:
            yield (
                f"{row.count} {row.kind}s of {row.dtype} over {' x '.join(row.axes)}, {readable(row.bytes)} a step, are "
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
    rows = [describe(parameter, config) for parameter in jax.tree.leaves(parameter_table(config)[1])]
    masters: dict[str, list[ParameterRow]] = {}
    copies: dict[str, list[ParameterRow]] = {}
    for row in rows:
        at_rest = row.bytes_per_device.master + row.bytes_per_device.moments
        for axis in (PIPE, DATA, CONTEXT, TENSOR):
            if at_rest > GIANT_SHARE * capacity and _could_split(row, row.master, axis, sizes):
                masters.setdefault(axis, []).append(row)
            held = row.bytes_per_device.compute_copy
            if held > GIANT_SHARE * capacity and axis in ZERO_AXES and _could_split(row, row.compute, axis, sizes):
                copies.setdefault(axis, []).append(row)
    for axis, rows in masters.items():
        size = sum(row.bytes_per_device.master + row.bytes_per_device.moments for row in rows)
        cure = ": parallel.zero=1 or more shards them." if axis in ZERO_AXES and config.parallel.zero == 0 else "."
        yield f"Weights and moments of {_names(rows)}, {readable(size)}, are the same on all {sizes[axis]} {axis} ranks{cure}"
    if fits is False and config.parallel.zero < 3:
        for axis, rows in copies.items():
            size = sum(row.bytes_per_device.compute_copy for row in rows)
            yield (
                f"The {config.model.compute_dtype} copies of {_names(rows)}, {readable(size)}, are the same on all "
                f"{sizes[axis]} {axis} ranks: parallel.zero=3 gathers them a layer at a time."
            )


def _could_split(row: ParameterRow, layout: tuple[tuple[str, ...], ...], axis: str, sizes: dict[str, int]) -> bool:
    """Whether the layout leaves an axis unused that divides a device's part of some dim. Only layers go over `pipe`."""
    if sizes[axis] == 1 or any(axis in axes for axes in layout):
        return False
    left = [size // math.prod(sizes[a] for a in axes) for size, axes in zip(row.shape, layout, strict=True)]
    dims = [size for size, dim in zip(left, row.dims, strict=True) if (dim in STACK_DIMS) == (axis == PIPE)]
    return any(size % sizes[axis] == 0 for size in dims)


def _names(rows: Sequence[ParameterRow]) -> str:
    return ", ".join(row.path for row in rows)
