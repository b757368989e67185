"""Copies between GPUs and their host's memory, as offload makes them: measured for all GPUs at once, and judged.

for one in host_copies(hosts, size_bytes):         every process calls it
    row(one, gpu)
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxllm.cost_model.hardware import Gpu, host_copy_bytes_per_s
from jaxllm.doctor.checks import GOOD_SHARE, OK, WARN, Row, count_text, rate_text
from jaxllm.doctor.probes import REPEATS, gather_json
from jaxllm.mesh.axes import HOST

TO_HOST, FROM_HOST, BOTH_WAYS = "copies to the host", "copies from the host", "copies both ways"


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

    @property
    def bytes_per_s(self) -> float:
        """The speed of one device in one direction."""
        return self.size_bytes / self.seconds

    def expected_bytes_per_s(self, gpu: Gpu) -> float:
        return host_copy_bytes_per_s(gpu, self.devices, both_ways=self.way == BOTH_WAYS)

    def to_json(self, gpu: Gpu | None) -> dict[str, Any]:
        """Plain values; expected_bytes_per_s is null without a kind of GPU."""
        return {**vars(self), "bytes_per_s": self.bytes_per_s, "expected_bytes_per_s": gpu and self.expected_bytes_per_s(gpu)}


def host_copies(hosts: Mapping[int, Any], size_bytes: int) -> Iterator[HostCopy]:
    """Times copies to pinned host memory, from it, and both at once, of all devices; every process must call it, and iterate
    over all of them.

    Args:
      hosts: the host of each rank.
      size_bytes: of one copy; each device takes about twice that, and its host's memory as much.
    """
    on_host = Counter(hosts[rank] for rank, count in enumerate(gather_json(jax.local_device_count())) for _ in range(count))
    here = [SingleDeviceSharding(device) for device in jax.local_devices()]
    there = [sharding.with_memory_kind(HOST) for sharding in here]
    inside = jax.device_put([jnp.ones(size_bytes // 4)] * len(here), here)
    outside = jax.device_put(inside, there)
    ways = {TO_HOST: (inside, there), FROM_HOST: (outside, here), BOTH_WAYS: (inside + outside, there + here)}
    for way, (arrays, shardings) in ways.items():
        copy = partial(jax.device_put, arrays, shardings)
        # Allocates; and all processes of a host begin together.
        jax.block_until_ready(copy())
        gather_json("ready")
        taken = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            jax.block_until_ready(copy())
            taken.append(time.perf_counter() - begin)
        yield HostCopy(way, max(on_host.values()), size_bytes, max(gather_json(statistics.median(taken))))


def row(one: HostCopy, gpu: Gpu | None) -> Row:
    """The verdict. A slow link is a warning: only offload, and loading weights, need it."""
    each = "each way " if one.way == BOTH_WAYS else ""
    found = f"{rate_text(one.bytes_per_s)} {each}for each of {count_text(one.devices, 'device')} of a host at once"
    if gpu is None:
        return Row(one.way, OK, f"{found}; no speed is expected of these devices")
    expected = one.expected_bytes_per_s(gpu)
    found += f"; {one.bytes_per_s / expected:.0%} of the {rate_text(expected)} assumed for {gpu.name}"
    if one.bytes_per_s >= GOOD_SHARE * expected:
        return Row(one.way, OK, found)
    todo = (
        "before planning with offload give host_bandwidth_bytes_per_s (one GPU alone) and host_memory_bandwidth_bytes_per_s in "
        "--gpu FILE.yaml; nvidia-smi -q shows the PCIe link, numactl whether processes are on the GPU's side"
    )
    return Row(one.way, WARN, found, todo)
