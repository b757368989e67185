"""Cost of collectives: placement of ranks, against every device of a mesh; formulas, against simple cases."""

import dataclasses
import itertools
import math

import pytest

from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.network import (
    ALL_REDUCES,
    Group,
    Links,
    all_gather_s,
    all_reduce_s,
    group_of,
    hierarchical_all_reduce_s,
    inside_bytes_per_s,
    links_of,
    permute_s,
    reduce_scatter_s,
    ring_all_reduce_s,
    slowest_link,
    tree_all_reduce_s,
)

LINKS = Links(link_bytes_per_s=400e9, peers=1, link_latency_s=3e-6, network_bytes_per_s=50e9, network_latency_s=14e-6)
FREE_STARTS = dataclasses.replace(LINKS, link_latency_s=0.0, network_latency_s=0.0)
COLLECTIVES = (all_gather_s, reduce_scatter_s, all_reduce_s, permute_s, *ALL_REDUCES.values())
GIB = 2**30


def groups_of_a_mesh(devices: int, size: int, stride: int) -> list[list[int]]:
    """Device numbers of all groups of an axis."""
    return [
        [block * size * stride + offset + rank * stride for rank in range(size)]
        for block in range(devices // (size * stride))
        for offset in range(stride)
    ]


@pytest.mark.parametrize("per_host", [1, 2, 4, 8])
def test_every_group_lies_as_said(per_host):
    for size, stride in itertools.product([1, 2, 4, 8, 16], [1, 2, 4, 8, 16]):
        group = group_of(size, stride, per_host)
        for members in groups_of_a_mesh(512, size, stride):
            hosts = [device // per_host for device in members]
            assert len(set(hosts)) == group.hosts
            assert {hosts.count(host) for host in hosts} == {group.inside}


@pytest.mark.parametrize(("per_host", "size", "stride"), [(6, 4, 1), (6, 6, 2), (12, 8, 3), (8, 3, 1), (5, 2, 2)])
def test_where_hosts_do_not_divide_evenly_no_group_is_split_finer_than_said(per_host, size, stride):
    group = group_of(size, stride, per_host)
    assert group.size == size
    for members in groups_of_a_mesh(size * stride * per_host, size, stride):
        for block in range(group.hosts):
            together = members[block * group.inside : (block + 1) * group.inside]
            assert len({device // per_host for device in together}) == 1


def test_one_rank_sends_nothing():
    alone = Group(1, 1)
    assert [way(GIB, alone, LINKS) for way in COLLECTIVES] == [0.0] * len(COLLECTIVES)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rings_inside_a_host(n):
    group = Group(n, 1)
    one_way = (n - 1) * LINKS.link_latency_s + (n - 1) / n * GIB / LINKS.link_bytes_per_s
    assert all_gather_s(GIB, group, LINKS) == pytest.approx(one_way, rel=1e-12)
    assert reduce_scatter_s(GIB, group, LINKS) == pytest.approx(one_way, rel=1e-12)
    assert ring_all_reduce_s(GIB, group, LINKS) == pytest.approx(2 * one_way, rel=1e-12)
    assert hierarchical_all_reduce_s(GIB, group, LINKS) == pytest.approx(2 * one_way, rel=1e-12)


def test_a_ring_over_hosts_has_the_adapters_of_its_ranks():
    assert slowest_link(Group(1, 4), LINKS) == LINKS.network_bytes_per_s
    assert slowest_link(Group(4, 4), LINKS) == 4 * LINKS.network_bytes_per_s
    assert slowest_link(Group(16, 4), LINKS) == LINKS.link_bytes_per_s
    # Each of its ranks separately, whatever else is in the host.
    assert permute_s(GIB, Group(4, 4), FREE_STARTS) == GIB / LINKS.network_bytes_per_s


def test_between_hosts_a_hierarchy_sends_one_part_of_the_bytes():
    swift = dataclasses.replace(FREE_STARTS, link_bytes_per_s=math.inf)
    group = Group(8, 4)
    across = ring_all_reduce_s(GIB / 8, Group(1, 4), swift)
    assert hierarchical_all_reduce_s(GIB, group, swift) == pytest.approx(across, rel=1e-12)


def test_short_messages_climb_trees_and_long_ones_go_round():
    many = Group(1, 512)
    assert tree_all_reduce_s(1024, many, LINKS) < ring_all_reduce_s(1024, many, LINKS) / 10
    assert ring_all_reduce_s(100 * GIB, Group(8, 1), LINKS) < tree_all_reduce_s(100 * GIB, Group(8, 1), LINKS)
    for size_bytes, group in itertools.product([1024, GIB], [many, Group(8, 1), Group(8, 16)]):
        assert all_reduce_s(size_bytes, group, LINKS) == min(way(size_bytes, group, LINKS) for way in ALL_REDUCES.values())


@pytest.mark.parametrize("way", COLLECTIVES, ids=lambda way: way.__name__)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_more_bytes_and_more_hosts_never_take_less(way, gpu):
    links = links_of(gpu)
    groups = [Group(1, 1), *(Group(gpu.gpus_per_host, hosts) for hosts in (1, 2, 4, 64))]
    times_s = [[way(size_bytes, group, links) for size_bytes in (2**10, 2**20, 2**30)] for group in groups]
    for row in times_s:
        assert row == sorted(row)
    for column in zip(*times_s, strict=True):
        assert list(column) == sorted(column)


def test_a_pair_on_a_board_without_switch_has_a_third_of_the_links():
    direct, switched = links_of(GPUS["h100-94gb"]), links_of(GPUS["h100-80gb"])
    whole = GPUS["h100-94gb"].link_bandwidth_bytes_per_s
    assert [inside_bytes_per_s(Group(n, 1), direct) / whole for n in (2, 3, 4)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert {inside_bytes_per_s(Group(n, 1), switched) for n in (2, 4, 8)} == {GPUS["h100-80gb"].link_bandwidth_bytes_per_s}
    # Two cards under one bridge have all the links.
    nvl = GPUS["h100-nvl-94gb"]
    assert inside_bytes_per_s(Group(2, 1), links_of(nvl)) == nvl.link_bandwidth_bytes_per_s


def test_reaching_half_the_bandwidth_takes_twice_as_long():
    whole, half = (dataclasses.replace(links_of(GPUS["h100-80gb"], share), link_latency_s=0.0) for share in (1.0, 0.5))
    assert all_gather_s(GIB, Group(8, 1), half) == pytest.approx(2 * all_gather_s(GIB, Group(8, 1), whole))
