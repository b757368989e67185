"""What a collective costs: seconds, by bytes, ranks and where the ranks lie.

    group = group_of(size=8, stride=4, gpus_per_host=8)     every fourth GPU: two in a host, four hosts
    all_reduce_s(2**30, group, links_of(gpu))

A message of B bytes takes latency + B / bandwidth (the alpha-beta model: Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH"). Bytes are those of the whole: what an all-gather leaves on each rank, what a
reduce-scatter takes from each, what an all-reduce does both to. A GPU has a link inside its host and a share of the host's
network adapters, both used both ways at once. All groups of an axis work at the same time, so a group has the adapters of its
own ranks and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from jaxllm.cost_model.hardware import Gpu

UNSWITCHED_GPUS = 4
"""Hosts of at most so many GPUs have no NVSwitch."""


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other: `hosts` times `inside` of them."""

    inside: int
    """In each host."""
    hosts: int

    @property
    def size(self) -> int:
        return self.inside * self.hosts


@dataclass(frozen=True)
class Links:
    """What a message meets. Times the share of the data sheet's bandwidth that collectives reach."""

    link_bytes_per_s: float
    """Of a GPU's links together."""
    peers: int
    """GPUs that those lead to one by one: a host of four has no switch, and a pair of its GPUs a third of the links. 1: to a
    switch."""
    link_latency_s: float
    network_bytes_per_s: float
    """Per GPU."""
    network_latency_s: float


def links_of(gpu: Gpu, share: float = 1.0) -> Links:
    """A GPU's links, at `share` of their bandwidth. Boards of four GPUs connect them pair by pair (NVIDIA, HGX A100 and H100
    4-GPU); those of eight have NVSwitches."""
    return Links(
        gpu.link_bandwidth_bytes_per_s * share,
        gpu.gpus_per_host - 1 if 1 < gpu.gpus_per_host <= UNSWITCHED_GPUS else 1,
        gpu.link_latency_s,
        gpu.network_bandwidth_bytes_per_s * share,
        gpu.network_latency_s,
    )


@lru_cache(maxsize=4096)
def group_of(size: int, stride: int, gpus_per_host: int) -> Group:
    """Where the ranks of a mesh axis lie: `size` of them, `stride` devices apart, devices dealt to hosts in order.

    k neighbours are in one host, wherever the group begins, if blocks of k x stride devices never cross a host's end. So many,
    with k a divisor of size, every host of every group has; where hosts do not divide evenly some have more, which a collective
    in lockstep does not feel.
    """
    inside = max(k for k in range(1, size + 1) if size % k == 0 and (k == 1 or gpus_per_host % (k * stride) == 0))
    return Group(inside, size // inside)


def slowest_link(group: Group, links: Links) -> float:
    """Bytes per second of a ring through all ranks: inside a host its links; between hosts all of its adapters, as NCCL lays as
    many rings as a host has, each out by another."""
    inside = inside_bytes_per_s(group, links)
    return inside if group.hosts == 1 else min(inside, links.network_bytes_per_s * group.inside)


def inside_bytes_per_s(group: Group, links: Links) -> float:
    """Of the links that lead to the group's ranks in the host; all of them where it has no other."""
    used = min(group.inside - 1, links.peers) if group.inside > 1 else links.peers
    return links.link_bytes_per_s * used / links.peers


def _ring_latency_s(group: Group, links: Links) -> float:
    """Of once round: a step for each rank but one, those between hosts slower."""
    across = group.hosts - 1
    return across * links.network_latency_s + (group.size - 1 - across) * links.link_latency_s


def _ring_s(size_bytes: float, group: Group, links: Links) -> float:
    """(n - 1) steps of B / n."""
    if group.size == 1:
        return 0.0
    n = group.size
    return _ring_latency_s(group, links) + (n - 1) / n * size_bytes / slowest_link(group, links)


def _split(group: Group) -> tuple[Group, Group]:
    """(the ranks of one host, one rank of each host)."""
    return Group(group.inside, 1), Group(1, group.hosts)


def _hierarchical_s(size_bytes: float, group: Group, links: Links) -> float:
    """A ring inside each host, and rings across, one for each rank of a host with its share of the bytes."""
    within, across = _split(group)
    return _ring_s(size_bytes, within, links) + _ring_s(size_bytes / group.inside, across, links)


def all_gather_s(size_bytes: float, group: Group, links: Links) -> float:
    """One ring, or rings inside and across hosts, whichever is faster: fewer steps across, or one set of bytes less."""
    return min(_ring_s(size_bytes, group, links), _hierarchical_s(size_bytes, group, links))


reduce_scatter_s = all_gather_s
"""The same backwards; adding is not counted, as the GPU does it while it receives."""


def ring_all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """Twice round: 2 (n - 1) steps of B / n (Patarasuk and Yuan 2009)."""
    return 2 * _ring_s(size_bytes, group, links)


def tree_all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """Up and down a double binary tree over hosts, a chain inside each: 2 B over the slowest link whatever the number of ranks,
    in 2 ceil(log2 hosts) steps across (Sanders, Speck and Traeff 2009; NCCL's tree)."""
    if group.size == 1:
        return 0.0
    steps_s = (group.inside - 1) * links.link_latency_s + math.ceil(math.log2(group.hosts)) * links.network_latency_s
    return 2 * (steps_s + size_bytes / slowest_link(group, links))


def hierarchical_all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """Reduce-scatter inside hosts, all-reduce across with what is left, all-gather inside."""
    within, across = _split(group)
    return 2 * _ring_s(size_bytes, within, links) + ring_all_reduce_s(size_bytes / group.inside, across, links)


ALL_REDUCES = {"ring": ring_all_reduce_s, "tree": tree_all_reduce_s, "hierarchical": hierarchical_all_reduce_s}


def all_reduce_s(size_bytes: float, group: Group, links: Links) -> float:
    """The fastest of ALL_REDUCES, as a library that measures would choose."""
    return min(way(size_bytes, group, links) for way in ALL_REDUCES.values())


def permute_s(size_bytes: float, group: Group, links: Links) -> float:
    """Each rank sends to its neighbour, all at once, so that the slowest pair counts: one GPU's share of the adapters."""
    if group.size == 1:
        return 0.0
    if group.hosts == 1:
        # One neighbour: one of the ways out.
        return links.link_latency_s + size_bytes * links.peers / links.link_bytes_per_s
    return links.network_latency_s + size_bytes / min(links.link_bytes_per_s, links.network_bytes_per_s)
