"""The device mesh. Axis names are spelled here and nowhere else.

Slow network to fast: pipe and data may cross hosts, context and tensor should not. Devices are laid out by host, process and
id, with `tensor` varying fastest, so that neighbours on the fast axes share a host. Which processes share one is what they said
of themselves when they met (distributed.members), whatever order the launcher numbered them in.

With parallel.replica above 1 an axis `replica` lies outside these: islands, each a mesh of the four, with a slower network
between them. Without, the axis is not there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm import distributed
from jaxllm.config import ConfigError, ParallelConfig
from jaxllm.plan.hardware import Gpu, gpu_from_device_kind
from jaxllm.plan.network import Group, links_of, slowest_link

PIPE, DATA, CONTEXT, TENSOR = AXES = ("pipe", "data", "context", "tensor")
REPLICA = "replica"
"""Outside AXES, and only of a mesh that has islands. ZeRO shards inside an island; across, gradients are summed, or with DiLoCo
(train/diloco.py) weights are brought together once in a while."""

MANUAL = (PIPE, DATA, CONTEXT)
"""Axes of an island along which the train step moves data by hand, as along `replica` (manual_axes); the compiler sees to
`tensor` alone (docs: one region)."""
ZERO_AXES = (DATA, CONTEXT)
"""Ranks along these hold the same weights, so ZeRO shards over both."""

LOCAL = (TENSOR, CONTEXT)
"""Axes that should stay inside a host: their collectives run several times a layer. The one that matters most first."""

HOST = "pinned_host"
"""Memory kind of a sharding whose arrays are stored in the host's pinned memory."""

T = TypeVar("T")
log = logging.getLogger(__name__)


def make_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh ([replica,] pipe, data, context, tensor) of a resolved config.

    Raises:
      ConfigError: the product of the axes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = axis_sizes(parallel)
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices):
        raise ConfigError(f"The mesh {sizes} is {math.prod(shape)} devices, but there are {len(devices)}: change parallel.*.")
    host_of = hosts_of(devices)
    grid = laid_out(devices, host_of, shape)
    for line in crossings(grid, host_of):
        log.warning("%s", line)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def laid_out(devices: Sequence[jax.Device], host_of: Mapping[int, Hashable], shape: tuple[int, ...]) -> np.ndarray:
    """[replica if any, pipe, data, context, tensor] of devices: as many groups of context x tensor as can be inside one host,
    and of those of tensor that are left; hosts in the order of their first process.
    """
    hosts: dict[Hashable, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        hosts.setdefault(host_of[device.process_index], []).append(device)
    *_, context, tensor = shape
    return np.array(in_hosts(list(hosts.values()), context * tensor, tensor), dtype=object).reshape(shape)


def axis_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Of the axes that the mesh has, outermost first."""
    island = {PIPE: parallel.pipe, DATA: int(parallel.data), CONTEXT: parallel.context, TENSOR: parallel.tensor}
    return {REPLICA: parallel.replica, **island} if parallel.replica > 1 else island


def manual_axes(mesh: Mesh) -> set[str]:
    """MANUAL, and the axis of islands where there are several: whatever crosses between them is written by hand."""
    return set(MANUAL) | ({REPLICA} & set(mesh.axis_names))


def batch_axes(parallel: ParallelConfig) -> tuple[str, ...]:
    """Axes whose ranks read different tokens."""
    return (REPLICA, *ZERO_AXES) if parallel.replica > 1 else ZERO_AXES


def place_of(axis: str) -> int:
    """Where an axis is in the shape of a mesh, counted from the end, as the one of islands may be missing."""
    axes = (REPLICA, *AXES)
    return axes.index(axis) - len(axes)


def hosts_of(devices: Sequence[jax.Device]) -> dict[int, Hashable]:
    """The host of each process that has some of the devices: its name, where all processes told theirs when they met, else the
    number of the process, as if each were a host. For devices that are only compiled for a process is a host too.
    """
    processes = {device.process_index for device in devices}
    # Devices of a topology to compile for have numbers of processes too, and they mean others.
    if len(processes) > 1 and set(devices) <= set(jax.devices()):
        named = {member.rank: member.host for member in distributed.members()}
        if processes <= named.keys():
            return {process: named[process] for process in processes}
    return {process: process for process in processes}


def in_hosts(hosts: Sequence[Sequence[T]], *sizes: int) -> list[T]:
    """All that the hosts have, in an order that can be cut into groups of any of the sizes, as many of them as can be inside
    one host. Sizes fall, and each divides the one before it. Hosts whose devices divide evenly stay in their order.
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
    """[group, rank along the axis]: who talks to whom in the collectives of this axis."""
    return np.moveaxis(grid, place_of(axis), -1).reshape(-1, grid.shape[place_of(axis)])


def widest_group(grid: np.ndarray, host_of: Mapping[int, Hashable], axis: str) -> Group:
    """How the group of this axis that has the fewest ranks to a host lies: all wait for it. Where its hosts have different
    numbers of its ranks, the smallest counts."""
    shapes = []
    for group in groups_along(grid, axis):
        hosts = [host_of[device.process_index] for device in group]
        shapes.append(Group(min(hosts.count(host) for host in hosts), len(set(hosts))))
    return min(shapes, key=lambda group: (group.inside, -group.hosts))


def crossings(grid: np.ndarray, host_of: Mapping[int, Hashable]) -> list[str]:
    """A sentence for each of tensor and context that leaves its host, with figures, and what to change."""
    lines = []
    everyone = [host_of[device.process_index] for device in grid.flat]
    per_host = min(everyone.count(host) for host in set(everyone))
    for axis in LOCAL:
        reached = [{host_of[device.process_index] for device in group} for group in groups_along(grid, axis)]
        across = [hosts for hosts in reached if len(hosts) > 1]
        if not across:
            continue
        size = grid.shape[place_of(axis)]
        names = sorted(map(str, max(across, key=len)))
        told = ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])
        product = "parallel.tensor" if axis == TENSOR else "parallel.context x parallel.tensor"
        lines.append(
            f"{axis}={size} leaves its host in {len(across)} of {len(reached)} groups, which lie on up to {len(names)} hosts "
            f"({told}){_slower(grid, host_of, axis)}: every layer waits for the network. Make {product} a divisor of the "
            f"{per_host} device{'s' if per_host > 1 else ''} of a host, or ask for larger hosts."
        )
    return lines


def _slower(grid: np.ndarray, host_of: Mapping[int, Hashable], axis: str) -> str:
    """What the network takes from the axis, by the data sheets; '' for devices that have none."""
    gpu: Gpu | None = gpu_from_device_kind(grid.flat[0].device_kind)
    if gpu is None:
        return ""
    links, within = links_of(gpu), Group(grid.shape[place_of(axis)], 1)
    inside, across = (slowest_link(group, links) / 1e9 for group in (within, widest_group(grid, host_of, axis)))
    return f"; a ring there carries {across:.0f} GB/s instead of the {inside:.0f} GB/s inside a host of {gpu.name}"


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [microbatch, sequence of the microbatch, position]. An island has consecutive sequences of each microbatch."""
    return NamedSharding(mesh, PartitionSpec(None, (REPLICA, DATA) if REPLICA in mesh.axis_names else DATA, CONTEXT))
