"""The CPUs that a process may use, and the NUMA nodes of these and of its GPUs, without a verdict: checks.py judges them.

Linux describes both in /sys: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-devices-node ("cpulist") and
https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci ("numa_node"; -1 where the firmware does not tell).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.machine.host import allowed_cpus
from jaxllm.untrusted import RefusedInput, read_text, whole_number

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Binding:
    """CPUs and NUMA nodes of one process."""

    cpus: int
    """CPUs that the process may use."""
    host_cpus: int
    nodes: list[int]
    """NUMA nodes of these CPUs; empty if the kernel does not tell."""
    host_nodes: int
    gpu_nodes: dict[str, int]
    """NUMA node of each GPU that the process drives, by nvidia-smi's number; without those whose node is unknown."""

    @property
    def far_gpus(self) -> list[str]:
        """GPUs on nodes where the process has no CPU."""
        return [gpu for gpu, node in self.gpu_nodes.items() if self.nodes and node not in self.nodes]


def binding(pci: Mapping[str, str], driven: Collection[str], sysfs: Path = SYSFS) -> Binding:
    """Binding of this process.

    Args:
      pci: PCI address by UUID, of all GPUs of the host in nvidia-smi's order.
      driven: UUIDs of the GPUs that this process drives.
    """
    mine, cpus_of = allowed_cpus(), _cpus_of_nodes(sysfs)
    gpu_nodes = {}
    for number, (uuid, address) in enumerate(pci.items()):
        node = _node_of(address, sysfs) if uuid in driven else None
        if node is not None:
            gpu_nodes[str(number)] = node
    nodes = sorted(node for node, cpus in cpus_of.items() if cpus & mine)
    return Binding(len(mine), os.cpu_count() or len(mine), nodes, len(cpus_of), gpu_nodes)


def _cpus_of_nodes(sysfs: Path) -> dict[int, set[int]]:
    """CPUs of each NUMA node that has any; empty if the kernel does not tell."""
    found = {}
    for folder in sysfs.glob("devices/system/node/node[0-9]*"):
        try:
            found[int(folder.name.removeprefix("node"))] = _numbers(read_text(folder / "cpulist").strip())
        except (OSError, RefusedInput):
            continue
    # A node may be memory alone.
    return {node: cpus for node, cpus in found.items() if cpus}


def _numbers(text: str) -> set[int]:
    """The kernel's lists, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        least = whole_number(first)
        found.update(range(least, whole_number(last if dash else first, least, 2**20) + 1))
    return found


def _node_of(address: str, sysfs: Path) -> int | None:
    """NUMA node of a PCI device; nvidia-smi writes the domain with eight digits and in capitals, the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    try:
        return whole_number(read_text(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").strip())
    except (OSError, RefusedInput):
        return None
