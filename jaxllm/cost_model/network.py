"""Time of a collective in seconds, by bytes, ranks and the placement of the ranks.

    group = group_of(size=8, stride=4, gpus_per_host=8)     every fourth GPU: two in a host, four hosts
    all_reduce_s(2**30, group, links_of(gpu))

A message of B bytes takes latency + B / bandwidth (the alpha-beta model: Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH"). Bytes are those of the complete array: the result of an all-gather on each rank,
the input of a reduce-scatter, the array of an all-reduce. A GPU has a link inside its host and a share of the host's network
adapters; both work in both directions at once. All groups of an axis communicate at the same time, so a group has only the
adapters of its own ranks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from jaxllm.cost_model.hardware import Gpu

UNSWITCHED_GPUS = 4
"""Hosts of at most this many GPUs have no NVSwitch."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `hosts` x `inside` of them."""

    inside: int
    """Ranks in each host."""
    hosts: int

    @property
    def size(self) -> int:
        return self.inside * self.hosts


@dataclass(frozen=True)
class Links:
    """Bandwidths and latencies for messages, scaled by the share of the data sheet's bandwidth that collectives reach."""

    link_bytes_per_s: float
    """All links of a GPU together."""
    peers: int
    """GPUs that the links connect to directly: a host of four has no switch, so a pair of its GPUs has a third of the links. 1:
    the links connect to a switch."""
    link_latency_s: float
    network_bytes_per_s: float
    """Per GPU."""
    network_latency_s: float


def links_of(gpu: Gpu, share: float = 1.0) -> Links:
    """A GPU's links, at `share` of their bandwidth. Boards of four GPUs connect them pair by pair (NVIDIA, HGX A100 and H100
    4-GPU); boards of eight have NVSwitches."""
    return Links(
        gpu.link_bandwidth_bytes_per_s * share,
        gpu.gpus_per_host - 1 if 1 < gpu.gpus_per_host <= UNSWITCHED_GPUS else 1,
        gpu.link_latency_s,
        gpu.network_bandwidth_bytes_per_s * share,
        gpu.network_latency_s,
    )


@lru_cache(maxsize=4096)
def group_of(size: int, stride: int, gpus_per_host: int) -> Group:
    """Placement of the ranks of a mesh axis: `size` ranks, `stride` devices apart. Devices fill hosts in order.

    k neighbours share a host, for every group, if blocks of k x stride devices never cross a host boundary. If k also divides
    size, every host of every group has that many. If hosts do not divide evenly, some have more, which does not change the time
    of a collective in lockstep.
    """
    inside = max(k for k in range(1, size + 1) if size % k == 0 and (k == 1 or gpus_per_host % (k * stride) == 0))
    return Group(inside, size // inside)


def slowest_link(group: Group, links: Links) -> float:
    """Bytes per second of a ring through all ranks: inside a host, its links; between hosts, all adapters of the group's ranks,
    because NCCL builds as many rings as there are adapters."""
    inside = inside_bytes_per_s(group, links)
    return inside if group.hosts == 1 else min(inside, links.network_bytes_per_s * group.inside)


def inside_bytes_per_s(group: Group, links: Links) -> float:
    """Bandwidth of the links to the group's ranks in the host; all links if the group has a single rank there."""
    used = min(group.inside - 1, links.peers) if group.inside > 1 else links.peers
    return links.link_bytes_per_s * used / links.peers


def _ring_s(size_bytes: float, group: Group, links: Links) -> float:
    """Time of n - 1 steps of B / n bytes, with slower steps between hosts."""
    n, across = group.size, group.hosts - 1
    if n == 1:
        return 0.0
    latency_s = across * links.network_latency_s + (n - 1 - across) * links.link_latency_s
    return latency_s + (n - 1) / n * size_bytes / slowest_link(group, links)


def _hierarchical_s(size_bytes: float, group: Group, links: Links) -> float:
    """A ring inside each host, then rings across hosts: one for each rank of a host, with its share of the bytes."""
    within, across = Group(group.inside, 1), Group(1, group.hosts)
    return _ring_s(size_bytes, within, links) + _ring_s(size_bytes / group.inside, across, links)


def all_gather_s(size_bytes: float, group: Group, links: Links) -> float:
    """The faster of one ring, and rings inside and across hosts. The latter has fewer steps across, but sends more bytes."""
    return min(_ring_s(size_bytes, group, links), _hierarchical_s(size_bytes, group, links))


reduce_scatter_s = all_gather_s
"""The same in reverse. The additions are not counted, because the GPU adds while it receives."""


def ring_all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """Two rounds: 2 (n - 1) steps of B / n (Patarasuk and Yuan 2009)."""
    return 2 * _ring_s(size_bytes, group, links)


def tree_all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """Up and down a double binary tree over hosts, with a chain inside each: 2 B over the slowest link for any number of ranks,
    in 2 ceil(log2 hosts) steps across (Sanders, Speck and Traeff 2009; NCCL's tree)."""
    if group.size == 1:
        return 0.0
    steps_s = (group.inside - 1) * links.link_latency_s + math.ceil(math.log2(group.hosts)) * links.network_latency_s
    return 2 * (steps_s + size_bytes / slowest_link(group, links))


def hierarchical_all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """Reduce-scatter inside hosts, all-reduce of the shares across hosts, all-gather inside."""
    return 2 * _hierarchical_s(size_bytes, group, links)


ALL_REDUCES = {"ring": ring_all_reduce_s, "tree": tree_all_reduce_s, "hierarchical": hierarchical_all_reduce_s}


def all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """The fastest of ALL_REDUCES, which a library would choose by measurement."""
    return min(way(size_bytes, group, links) for way in ALL_REDUCES.values())


def all_to_all_s(size_bytes: float, group: Group, links: Links) -> float:
    """Each rank sends an equal part of its B bytes to every rank, itself included: through its links and its share of the
    adapters at the same time."""
    part, here, there = size_bytes / group.size, group.inside - 1, group.size - group.inside
    link_s = here and links.link_latency_s + here * part / inside_bytes_per_s(group, links)
    network_s = there and links.network_latency_s + there * part / links.network_bytes_per_s
    return max(link_s, network_s)


def permute_s(size_bytes: float, group: Group, links: Links) -> float:
    """All ranks send to their neighbour at the same time, so the slowest pair decides: one GPU's share of the adapters."""
    if group.size == 1:
        return 0.0
    if group.hosts == 1:
        # A single neighbour: the link to one peer.
        return links.link_latency_s + size_bytes * links.peers / links.link_bytes_per_s
    return links.network_latency_s + size_bytes / min(links.link_bytes_per_s, links.network_bytes_per_s)
