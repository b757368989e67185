"""How fast the devices send: collectives along a mesh axis, and copies between all GPUs of a host and its memory, as offload
makes them. Measured and judged.

    for one in collectives(mesh, axis, size_bytes, limited): collective(one, group, gpu)
    for one in host_copies(hosts, size_bytes, gpu): host_copy(one, gpu)
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.cluster.distributed import gathered
from jaxllm.cost_model.hardware import Gpu, host_copy_bytes_per_s
from jaxllm.cost_model.network import Group, all_gather_s, all_reduce_s, permute_s
from jaxllm.display import readable
from jaxllm.doctor.checks import FAIL, OK, WARN, Row, count_text, rate_text
from jaxllm.mesh.axes import HOST, axis_index, groups_along

GOOD_SHARE, POOR_SHARE, POOR_SHARE_ACROSS = 0.7, 0.35, 0.1
"""Shares of the expected speed: below the first is a warning; below the second, or between hosts below the third, a failure.
Between hosts the expectation is that of NVIDIA's reference systems, and many clusters have less."""
REPEATS = 7
COSTS = {"all-reduce": all_reduce_s, "all-gather": all_gather_s, "permute": permute_s}
"""Seconds that a collective should take, from the size in bytes, the group and its links."""
TO_HOST, FROM_HOST, BOTH_WAYS = "copies to the host", "copies from the host", "copies both ways"


# --------------------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Collective:
    """One kind of collective along one axis, on all its groups at once."""

    what: str
    axis: str
    ranks: int
    size_bytes: int
    """Size of the full array, as cost_model/network.py counts: an all-reduce's sum, an all-gather's result on each rank."""
    seconds: float
    """The median of REPEATS, on the slowest process."""
    right: bool
    """Whether every device has the expected numbers."""
    expected_s: float | None = None


def collectives(
    mesh: Mesh, axis: str, size_bytes: int, limited: Callable[[str], AbstractContextManager[None]]
) -> Iterator[Collective]:
    """Times all-reduce, all-gather and permute along an axis; every process must call it, and iterate over all of them.

    Args:
      size_bytes: of the full array; each device takes about this much and twice that.
      limited: called with the name of each; the context in which it is measured.
    """
    ranks, shape = mesh.shape[axis], mesh.devices.shape
    numbers = np.moveaxis(np.arange(mesh.devices.size).reshape(shape), axis_index(axis), -1)
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]

    def expected(values: np.ndarray) -> np.ndarray:
        """[device, value] that a device should have, from [..., rank along the axis, value]."""
        return np.moveaxis(values, -2, axis_index(axis) - 1).reshape(mesh.devices.size, -1)

    every_rank = np.repeat(numbers[..., None, :], ranks, axis=-2)
    kinds = {
        "all-reduce": (partial(lax.psum, axis_name=axis), 1, expected(every_rank.sum(-1, keepdims=True))),
        "all-gather": (partial(lax.all_gather, axis_name=axis, axis=1, tiled=True), ranks, expected(every_rank)),
        "permute": (partial(lax.ppermute, axis_name=axis, perm=ring), 1, expected(np.roll(numbers, 1, -1)[..., None])),
    }
    for what, (function, parts, values) in kinds.items():
        length = max(size_bytes // 4 // parts, 1)
        with limited(what):
            seconds, right = _time(mesh, function, length, values)
            slowest, all_right = max(gathered(seconds)), all(gathered(right))
        yield Collective(what, axis, ranks, 4 * length * parts, slowest, all_right)


def widest_group(grid: np.ndarray, host_of: Mapping[int, Hashable], axis: str) -> Group:
    """The group of this axis with the fewest ranks per host: all others wait for it. Where its hosts have different numbers of
    its ranks, the smallest counts."""
    shapes = []
    for group in groups_along(grid, axis):
        hosts = [host_of[device.process_index] for device in group]
        shapes.append(Group(min(hosts.count(host) for host in hosts), len(set(hosts))))
    return min(shapes, key=lambda group: (group.inside, -group.hosts))


def _time(mesh: Mesh, function: Callable[[jax.Array], jax.Array], length: int, values: np.ndarray) -> tuple[float, bool]:
    """(median seconds, whether the devices of this process have values[device, part]); a device's input is its number."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.devices.size, length)
    given = jax.jit(lambda: lax.broadcasted_iota(jnp.float32, shape, 0), out_shardings=sharding)()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
    run = jax.jit(mapped, out_shardings=sharding)
    # Compiles, and NCCL chooses its route.
    answer = jax.block_until_ready(run(given))
    right = True
    for shard in answer.addressable_shards:
        parts = np.asarray(shard.data).reshape(values.shape[1], -1)
        right &= bool((parts == values[shard.index[0].start or 0][:, None]).all())
    return _median_s(partial(run, given)), right


def _median_s(run: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def collective(one: Collective, group: Group, gpu: Gpu | None) -> Row:
    check, across = f"{one.what} over {one.axis}", f" across {group.hosts} hosts" if group.hosts > 1 else ""
    found = (
        f"{rate_text(one.size_bytes / one.seconds)} of {readable(one.size_bytes)} over {count_text(one.ranks, 'rank')}{across}"
    )
    if not one.right:
        todo = "numbers arrive changed: run NVIDIA's DCGM diagnostics, and leave out the GPU or adapter it names"
        return Row(check, FAIL, f"{found}; the result is wrong", todo)
    if one.expected_s is None or gpu is None:
        return Row(check, OK, f"{found}; no speed is expected of these devices")
    share = one.expected_s / one.seconds
    found += f"; {share:.0%} of the {rate_text(one.size_bytes / one.expected_s)} expected of {gpu.name}"
    if share >= GOOD_SHARE:
        return Row(check, OK, found)
    poor = POOR_SHARE if group.hosts == 1 else POOR_SHARE_ACROSS
    todo = (
        "NCCL_DEBUG=INFO shows whether it goes by NVLink (P2P) or through the host (SHM); nvidia-smi topo -m shows the links"
        if group.hosts == 1
        else "NCCL_DEBUG=INFO shows whether it goes by InfiniBand (NET/IB) or by TCP (NET/Socket); --gpu FILE.yaml describes a "
        "slower network than that of NVIDIA's reference system"
    )
    return Row(check, FAIL if share < poor else WARN, found, todo)


# -------------------------------------------------------------------------------------------------------------- host copies


@dataclass(frozen=True)
class HostCopy:
    """One copy by each device of a host, all at the same time."""

    way: str
    devices: int
    """On the host that has the most."""
    size_bytes: int
    """What each device sends in each direction."""
    seconds: float
    """The median of REPEATS, on the slowest process."""
    expected_bytes_per_s: float | None
    """None without a kind of GPU."""

    @property
    def bytes_per_s(self) -> float:
        """The speed of one device in one direction."""
        return self.size_bytes / self.seconds


def host_copies(hosts: Mapping[int, Any], size_bytes: int, gpu: Gpu | None) -> Iterator[HostCopy]:
    """Times copies to pinned host memory, from it, and both at once, of all devices; every process must call it, and iterate
    over all of them.

    Args:
      hosts: the host of each rank.
      size_bytes: of one copy; each device takes about twice that, and its host's memory as much.
    """
    on_host = Counter(hosts[rank] for rank, count in enumerate(gathered(jax.local_device_count())) for _ in range(count))
    here = [SingleDeviceSharding(device) for device in jax.local_devices()]
    there = [sharding.with_memory_kind(HOST) for sharding in here]
    inside = jax.device_put([jnp.ones(size_bytes // 4)] * len(here), here)
    outside = jax.device_put(inside, there)
    ways = {TO_HOST: (inside, there), FROM_HOST: (outside, here), BOTH_WAYS: (inside + outside, there + here)}
    for way, (arrays, shardings) in ways.items():
        copy = partial(jax.device_put, arrays, shardings)
        # Allocates; and all processes of a host begin together.
        jax.block_until_ready(copy())
        gathered("ready")
        most, slowest_s = max(on_host.values()), max(gathered(_median_s(copy)))
        expected = gpu and host_copy_bytes_per_s(gpu, most, both_ways=way == BOTH_WAYS)
        yield HostCopy(way, most, size_bytes, slowest_s, expected)


def host_copy(one: HostCopy, gpu: Gpu | None) -> Row:
    """The verdict. A slow link is a warning: only offload, and loading weights, need it."""
    each = "each way " if one.way == BOTH_WAYS else ""
    found = f"{rate_text(one.bytes_per_s)} {each}for each of {count_text(one.devices, 'device')} of a host at once"
    if (expected := one.expected_bytes_per_s) is None or gpu is None:
        return Row(one.way, OK, f"{found}; no speed is expected of these devices")
    found += f"; {one.bytes_per_s / expected:.0%} of the {rate_text(expected)} assumed for {gpu.name}"
    if one.bytes_per_s >= GOOD_SHARE * expected:
        return Row(one.way, OK, found)
    todo = (
        "before planning with offload give host_bandwidth_bytes_per_s (one GPU alone) and host_memory_bandwidth_bytes_per_s in "
        "--gpu FILE.yaml; nvidia-smi -q shows the PCIe link, numactl whether processes are on the GPU's side"
    )
    return Row(one.way, WARN, found, todo)
