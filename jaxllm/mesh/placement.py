"""Where the ranks of a mesh run: which processes share a host, which groups cross hosts, and what that costs.

Processes exchange host names at start-up (cluster/distributed.py), so the launcher's numbering does not matter.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.cluster import distributed
from jaxllm.config import ParallelConfig
from jaxllm.cost_model.hardware import Gpu, gpu_from_device_kind
from jaxllm.mesh.axes import LOCAL, TENSOR, axis_index, groups_along, make_mesh

log = logging.getLogger(__name__)


def mesh_on_hosts(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a resolved config, with tensor and context inside a host where they fit. Logs a warning where they do not.

    Raises:
      ConfigError: the product of the axes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    host_of = hosts_of(devices)
    mesh = make_mesh(parallel, devices, host_of)
    for warning in crossings(mesh.devices, host_of):
        log.warning("%s", warning)
    return mesh


def hosts_of(devices: Sequence[jax.Device]) -> dict[int, Hashable]:
    """The host of each process that has some of the devices: the name that the process gave when all met. Where names are
    missing, and for devices that are only compiled for, each process counts as a host and its number is the name.
    """
    processes = {device.process_index for device in devices}
    # Devices of a topology that is only compiled for have process numbers too, but these are not our processes.
    if len(processes) > 1 and set(devices) <= set(jax.devices()):
        named = dict(enumerate(distributed.hosts()))
        if processes <= named.keys():
            return {process: named[process] for process in processes}
    return {process: process for process in processes}


def crossings(grid: np.ndarray, host_of: Mapping[int, Hashable]) -> list[str]:
    """One sentence for each of tensor and context that crosses hosts, with figures and what to change."""
    sentences = []
    host_of_device = [host_of[device.process_index] for device in grid.flat]
    per_host = min(host_of_device.count(host) for host in set(host_of_device))
    for axis in LOCAL:
        hosts_of_group = [{host_of[device.process_index] for device in group} for group in groups_along(grid, axis)]
        across = [hosts for hosts in hosts_of_group if len(hosts) > 1]
        if not across:
            continue
        size = grid.shape[axis_index(axis)]
        names = sorted(map(str, max(across, key=len)))
        shown = ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])
        product = "parallel.tensor" if axis == TENSOR else "parallel.context x parallel.tensor"
        sentences.append(
            f"{axis}={size} crosses hosts in {len(across)} of {len(hosts_of_group)} groups, which span up to {len(names)} "
            f"hosts ({shown}){_slower(grid, host_of, axis)}: every layer waits for the network. Make {product} a divisor of "
            f"the {per_host} device{'s' if per_host > 1 else ''} of a host, or ask for larger hosts."
        )
    return sentences


def _slower(grid: np.ndarray, host_of: Mapping[int, Hashable], axis: str) -> str:
    """How much slower the axis is across hosts, by the data sheets; '' for devices without one."""
    gpu: Gpu | None = gpu_from_device_kind(grid.flat[0].device_kind)
    if gpu is None:
        return ""
    groups = [[host_of[device.process_index] for device in group] for group in groups_along(grid, axis)]
    adapters = min(hosts.count(host) for hosts in groups for host in hosts)
    inside = gpu.link_bandwidth_bytes_per_s / 1e9
    across = min(inside, adapters * gpu.network_bandwidth_bytes_per_s / 1e9)
    return f"; a ring there carries {across:.0f} GB/s instead of the {inside:.0f} GB/s inside a host of {gpu.name}"
