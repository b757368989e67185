"""Placement of devices in the mesh: tensor and context stay inside a host, for any numbering of the processes."""

import logging
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.cluster import distributed
from jaxllm.config import ParallelConfig
from jaxllm.cost_model.network import Group
from jaxllm.doctor.links import widest_group
from jaxllm.mesh import placement
from jaxllm.mesh.axes import device_grid, order_by_groups
from jaxllm.mesh.placement import crossings, hosts_of, mesh_on_hosts


@dataclass(frozen=True)
class Device:
    process_index: int
    id: int
    device_kind: str = "cpu"


def launch(hosts: str, each: int = 1, kind: str = "cpu") -> tuple[list[Device], dict[int, str]]:
    """(devices, host of each process), with one process per letter; the letter names its host."""
    # Device ids do not reveal the process, as with JAX on CPU.
    devices = [Device(process, 2048 * process + number, kind) for process in range(len(hosts)) for number in range(each)]
    return devices, dict(enumerate(hosts))


def hosts_in(grid: np.ndarray, host_of: dict[int, str]) -> list[str]:
    """The hosts of each context x tensor group, as one word."""
    rows = grid.reshape(-1, grid.shape[2] * grid.shape[3])
    return ["".join(host_of[device.process_index] for device in row) for row in rows]


@pytest.mark.parametrize(
    ("hosts", "each", "shape", "groups"),
    [
        ("ab", 4, (2, 1, 1, 4), ["aaaa", "bbbb"]),
        # Round robin, the numbering of `mpirun --map-by node` and SLURM's cyclic distribution.
        ("abababab", 1, (1, 2, 2, 2), ["aaaa", "bbbb"]),
        ("abcabc", 2, (3, 1, 1, 4), ["aaaa", "bbbb", "cccc"]),
        # Groups that cannot be inside a host come last: 6 + 6 devices hold two groups of 4, and so do 6 + 4 + 2.
        ("aaaaaabbbbbb", 1, (3, 1, 2, 2), ["aaaa", "bbbb", "aabb"]),
        ("abbaabbacaac", 1, (1, 3, 2, 2), ["aaaa", "bbbb", "aacc"]),
        # context spans two hosts, tensor does not.
        ("abab", 2, (1, 1, 2, 4), ["aaaabbbb"]),
    ],
)
def test_groups_of_the_fast_axes_are_inside_hosts(hosts, each, shape, groups):
    devices, host_of = launch(hosts, each)
    grid = device_grid(devices, host_of, shape)
    assert hosts_in(grid, host_of) == groups
    assert set(grid.flat) == set(devices)
    assert all(len({host_of[device.process_index] for device in row}) == 1 for row in grid.reshape(-1, shape[3]))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3), (8, 2)]))
def test_no_order_has_more_groups_inside_hosts(counts, sizes):
    """Each host holds its devices // size groups, which is the maximum."""
    hosts = [[(name, number) for number in range(count)] for name, count in enumerate(counts)]
    ordered = order_by_groups(hosts, *sizes)
    in_turn = [device for host in hosts for device in host]
    assert sorted(ordered) == in_turn
    large, small = sizes
    inside = [len({name for name, _ in ordered[i : i + large]}) == 1 for i in range(0, len(ordered) - large + 1, large)]
    assert sum(inside) >= sum(count // large for count in counts)
    # Groups of the smaller size too, in the remaining devices.
    inside = [len({name for name, _ in ordered[i : i + small]}) == 1 for i in range(0, len(ordered) - small + 1, small)]
    assert sum(inside) >= sum(count // small for count in counts)
    if all(count % large == 0 for count in counts):
        assert ordered == in_turn


def test_a_plain_launch_is_laid_out_by_process_and_id():
    devices, host_of = launch("abcd", 4)
    grid = device_grid(devices[::-1], host_of, (2, 2, 2, 2))
    assert list(grid.flat) == devices
    assert crossings(grid, host_of) == []


def test_a_warning_names_axis_hosts_figures_and_cure():
    devices, host_of = launch("ab", 8, "NVIDIA H100 80GB HBM3")
    grid = device_grid(devices, host_of, (1, 1, 1, 16))
    # A ring through two hosts leaves each through its 8 adapters of 50 GB/s; NVLink carries 450 GB/s.
    assert crossings(grid, host_of) == [
        "tensor=16 crosses hosts in 1 of 1 groups, which span up to 2 hosts (a, b); a ring there carries 400 GB/s instead "
        "of the 450 GB/s inside a host of h100-80gb: every layer waits for the network. Make parallel.tensor a divisor of the "
        "8 devices of a host, or ask for larger hosts."
    ]
    grid = device_grid(devices, host_of, (1, 1, 2, 8))
    (line,) = crossings(grid, host_of)
    assert line.startswith("context=2 crosses hosts in 8 of 8 groups, which span up to 2 hosts (a, b); a ring there carries 50")
    assert "Make parallel.context x parallel.tensor a divisor of the 8 devices of a host" in line
    assert crossings(device_grid(devices, host_of, (2, 2, 2, 2)), host_of) == []


def test_one_process_for_each_gpu_is_no_host_of_its_own():
    """16 processes on two hosts: no warning, although each group spans many processes."""
    devices, host_of = launch("ab" * 8, 1)
    assert crossings(device_grid(devices, host_of, (1, 2, 1, 8)), host_of) == []
    # Without information about hosts, each process counts as one.
    alone = {process: process for process in host_of}
    (line,) = crossings(device_grid(devices, alone, (1, 2, 1, 8)), alone)
    assert line.startswith("tensor=8 crosses hosts in 2 of 2 groups, which span up to 8 hosts (0, 1, 2, ... 7): every layer")
    assert "a divisor of the 1 device of a host" in line


def test_how_the_ranks_of_an_axis_lie():
    devices, host_of = launch("aabb", 2)
    grid = device_grid(devices, host_of, (2, 2, 1, 2))
    assert [widest_group(grid, host_of, axis) for axis in ("pipe", "data", "context", "tensor")] == [
        *(Group(1, 2), Group(2, 1), Group(1, 1), Group(2, 1))
    ]
    assert widest_group(device_grid(devices, host_of, (1, 8, 1, 1)), host_of, "data") == Group(4, 2)


def test_hosts_are_those_that_processes_told(monkeypatch):
    devices, host_of = launch("abab")
    hosts = list(host_of.values())
    monkeypatch.setattr(distributed, "hosts", lambda: hosts)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert hosts_of(devices) == host_of
    # A topology for compilation has its own numbers.
    others = [Device(process, 100 + process) for process in range(2)]
    assert hosts_of(others) == {0: 0, 1: 1}
    # Something else started JAX, so hosts are unknown.
    monkeypatch.setattr(distributed, "hosts", lambda: hosts[:1])
    assert hosts_of(devices) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_mesh_warns_once_for_each_axis(monkeypatch, caplog):
    # Here one process has all devices, so their ids name the host.
    monkeypatch.setattr(placement, "hosts_of", lambda devices: {0: "a"})
    with caplog.at_level(logging.WARNING, "jaxllm.mesh.placement"):
        made = mesh_on_hosts(ParallelConfig(pipe=2, data=1, context=2, tensor=2))
    assert caplog.records == []
    assert list(made.devices.flat) == jax.devices()
    monkeypatch.setattr(placement, "crossings", lambda grid, host_of: ["tensor", "context"])
    with caplog.at_level(logging.WARNING, "jaxllm.mesh.placement"):
        mesh_on_hosts(ParallelConfig(data=8))
    assert [record.message for record in caplog.records] == ["tensor", "context"]
