"""The device mesh. Axis names are spelled here and nowhere else.

The axes go from slow network to fast: pipe and data may cross hosts, context and tensor should not. Devices are ordered by
host, process and id, and `tensor` varies fastest, so neighbours on the fast axes share a host. mesh/placement.py knows which
processes share one.

With parallel.replica above 1 the mesh has an outermost axis `replica`. Each replica is a mesh of the four other axes; the
network between replicas is slower. Without it the axis does not exist.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ConfigError, ParallelConfig

PIPE, DATA, CONTEXT, TENSOR = AXES = ("pipe", "data", "context", "tensor")
REPLICA = "replica"
"""Not among AXES: only a mesh with several replicas has it. ZeRO shards within a replica. Across replicas gradients are summed;
with DiLoCo (train/diloco.py) weights are averaged once in a while."""

MANUAL = (PIPE, DATA, CONTEXT)
"""Axes of a replica along which the train step writes its collectives by hand, as along `replica` (manual_axes). The compiler
handles `tensor` alone (docs: one region)."""
ZERO_AXES = (DATA, CONTEXT)
"""Ranks along these hold the same weights, so ZeRO shards over both."""

LOCAL = (TENSOR, CONTEXT)
"""Axes that should stay inside a host: their collectives run several times a layer. The most important comes first."""

HOST = "pinned_host"
"""Memory kind of a sharding whose arrays are stored in the host's pinned memory."""

T = TypeVar("T")


def make_mesh(
    parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None, host_of: Mapping[int, Hashable] | None = None
) -> Mesh:
    """The mesh ([replica,] pipe, data, context, tensor) of a resolved config.

    Args:
      devices: all of jax.devices() by default.
      host_of: the host of each process (placement.hosts_of); by default each process counts as a host.

    Raises:
      ConfigError: the product of the axes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = axis_sizes(parallel)
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices):
        raise ConfigError(f"The mesh {sizes} is {math.prod(shape)} devices, but there are {len(devices)}: change parallel.*.")
    if host_of is None:
        host_of = {device.process_index: device.process_index for device in devices}
    return Mesh(device_grid(devices, host_of, shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def device_grid(devices: Sequence[jax.Device], host_of: Mapping[int, Hashable], shape: tuple[int, ...]) -> np.ndarray:
    """Devices as [replica if any, pipe, data, context, tensor]. As many groups of context x tensor as possible are inside one
    host, then as many groups of tensor. Hosts are in the order of their first process.
    """
    hosts: dict[Hashable, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        hosts.setdefault(host_of[device.process_index], []).append(device)
    *_, context, tensor = shape
    return np.array(order_by_groups(list(hosts.values()), context * tensor, tensor), dtype=object).reshape(shape)


def axis_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Size of each axis that the mesh has, outermost first."""
    axes = {PIPE: parallel.pipe, DATA: int(parallel.data), CONTEXT: parallel.context, TENSOR: parallel.tensor}
    return {REPLICA: parallel.replica, **axes} if parallel.replica > 1 else axes


def manual_axes(mesh: Mesh) -> set[str]:
    """MANUAL, and `replica` where the mesh has it: collectives between replicas are written by hand too."""
    return set(MANUAL) | ({REPLICA} & set(mesh.axis_names))


def batch_axes(parallel: ParallelConfig) -> tuple[str, ...]:
    """Axes whose ranks read different tokens."""
    return (REPLICA, *ZERO_AXES) if parallel.replica > 1 else ZERO_AXES


def axis_index(axis: str) -> int:
    """Index of an axis in the shape of a mesh, counted from the end because `replica` may be missing."""
    axes = (REPLICA, *AXES)
    return axes.index(axis) - len(axes)


def order_by_groups(hosts: Sequence[Sequence[T]], *sizes: int) -> list[T]:
    """All items of the hosts in an order that can be cut into groups of each size, with as many groups as possible inside one
    host. Sizes fall, and each divides the one before it. Hosts whose devices divide evenly keep their order.
    """
    ordered: list[T] = []
    left = [list(host) for host in hosts]
    for size in (*sizes, 1):
        for host in left:
            whole = len(host) // size * size
            ordered += host[:whole]
            del host[:whole]
    return ordered


def groups_along(grid: np.ndarray, axis: str) -> np.ndarray:
    """Devices as [group, rank along the axis]: each row is one group of this axis's collectives."""
    return np.moveaxis(grid, axis_index(axis), -1).reshape(-1, grid.shape[axis_index(axis)])


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays [microbatch, sequence of the microbatch, position]. A replica reads consecutive sequences of each
    microbatch."""
    return NamedSharding(mesh, PartitionSpec(None, (REPLICA, DATA) if REPLICA in mesh.axis_names else DATA, CONTEXT))
