"""The device mesh. Axis names are spelled here and nowhere else.

Slow network to fast: pipe and data may cross hosts, context and tensor should not. Devices are laid out by process and then
by id, with `tensor` varying fastest, so that neighbours on the fast axes share a host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ConfigError, ParallelConfig

PIPE, DATA, CONTEXT, TENSOR = AXES = ("pipe", "data", "context", "tensor")

MANUAL = (PIPE, DATA, CONTEXT)
"""Axes along which the train step moves data by hand; the compiler sees to `tensor` alone (docs: one region)."""
ZERO_AXES = (DATA, CONTEXT)
"""Ranks along these hold the same weights, so ZeRO shards over both."""

log = logging.getLogger(__name__)


def make_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (pipe, data, context, tensor) of a resolved config.

    Raises:
      ConfigError: the product of the axes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = axis_sizes(parallel)
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices):
        raise ConfigError(f"The mesh {sizes} is {math.prod(shape)} devices, but there are {len(devices)}: change parallel.*.")
    devices.sort(key=lambda device: (device.process_index, device.id))
    grid = np.array(devices, dtype=object).reshape(shape)
    warn_if_fast_axes_cross_hosts(grid)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(parallel: ParallelConfig) -> dict[str, int]:
    return {PIPE: parallel.pipe, DATA: int(parallel.data), CONTEXT: parallel.context, TENSOR: parallel.tensor}


def warn_if_fast_axes_cross_hosts(grid: np.ndarray) -> None:
    """Tensor and context collectives run several times a layer; across hosts they run at the speed of the network."""
    context_x_tensor = math.prod(grid.shape[2:])
    for group in grid.reshape(-1, context_x_tensor):
        hosts = {device.process_index for device in group}
        if len(hosts) > 1:
            log.warning(
                "context x tensor = %d devices lie on %d processes (%s): every layer waits for the network. "
                "Make the product at most %d, the devices of one process, if these are different hosts.",
                context_x_tensor,
                len(hosts),
                ", ".join(map(str, sorted(hosts))),
                grid.size // len({device.process_index for device in grid.flat}),
            )
            return


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [microbatch, sequence of the microbatch, position]."""
    return NamedSharding(mesh, PartitionSpec(None, DATA, CONTEXT))
