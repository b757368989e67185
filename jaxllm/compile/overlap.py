"""Simulates a compiled step's schedule: how much of each collective's time is hidden behind compute, and how much is exposed.

    transfers = simulate_overlap(Module(text, axes), GPUS["h100-80gb"], gpus_per_host=8)
    for row in by_kind(transfers): row.kind, row.axes, row.exposed_share

XLA's optimised HLO lists instructions in issue order. The simulated device goes through that list. A matmul or fused attention
takes the time of its FLOPs, at the share of the peak that cost_model/step_time.py uses for large matmuls. A collective's start
hands the transfer to the link of its axes, which runs one transfer after another. Its done waits until that transfer ends. A
loop's body is simulated once and counts once per iteration. The schedule is XLA's own; the times come from a model. Nothing is
measured.

The simulation is pessimistic: only matmuls and attention count as compute. Norms, casts, the optimizer and kernel launches take
no time and hide nothing. It is optimistic in two points: a loop inside which a link is busy counts as plain compute for
transfers that span that loop; and two transfers over different axes may share one hardware link.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.compile.hlo import RUNNING, Collective, Instruction, Module, byte_size, operands, trip_count
from jaxllm.config import ParallelConfig
from jaxllm.config.attention import HOPPER
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.network import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_of,
    links_of,
    permute_s,
    reduce_scatter_s,
)
from jaxllm.cost_model.replicas import over_replica_network
from jaxllm.cost_model.step_parts import BANDWIDTH_SHARE, MEASURED


@dataclass(frozen=True)
class Transfer:
    """One collective instruction and its simulated time. Bytes and seconds are per execution and device."""

    collective: Collective
    sent_bytes: float
    transfer_s: float
    """Duration on an idle link."""
    exposed_s: float
    """Time for which the device waits for the transfer."""


@dataclass(frozen=True)
class Overlap:
    """All transfers of one kind over the same axes, in one step on one device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    sent_bytes: float
    bare_bytes: float
    """Bytes of collectives with no matmul and no attention between start and done, by the HLO text alone."""
    exposed_bytes: float
    """Each transfer's bytes times the exposed share of its time, by the simulation."""
    flops_behind: float
    transfer_s: float
    exposed_s: float
    every_steps: int | None = None
    """Between DiLoCo's replicas, the steps from one exchange to the next; None: in each step."""

    @property
    def bare_share(self) -> float:
        return self.bare_bytes / self.sent_bytes if self.sent_bytes else 0.0

    @property
    def exposed_share(self) -> float:
        return self.exposed_bytes / self.sent_bytes if self.sent_bytes else 0.0


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one step with the same properties, on one device."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes that they run over; none for a group of one."""
    dtype: str
    asynchronous: bool
    in_loops: bool
    behind_matmuls: bool
    """Whether there is a matmul or fused attention between start and done."""
    instructions: int
    count: int
    """Executions in one step."""
    bytes: int
    """Bytes of their results, in one step."""
    sent_bytes: int
    """Bytes that a device sends for them, as the function sent_bytes has it."""


def simulate_overlap(
    module: Module, gpu: Gpu, gpus_per_host: int, *, fp8: bool = False, parallel: ParallelConfig | None = None
) -> list[Transfer]:
    """Simulates every collective of the module that has more than one participant.

    Args:
      gpus_per_host: devices are assigned to hosts in the order of the module's axes.
      fp8: whether matmuls run at the FP8 peak. The model applies it to all of them, the head's too, so it hides too little.
      parallel: of the resolved config; it may name the network between replicas.
    """
    simulation = _Simulation(module, gpu, gpus_per_host, fp8, parallel)
    simulation.run_s(module.entry)
    with_axes = ((c, (c.computation, c.name)) for c in simulation.in_order if c.axes)
    return [replace(simulation.alone[key], collective=c, exposed_s=simulation.exposed_s[key]) for c, key in with_axes]


def by_kind(transfers: Iterable[Transfer], apart: int | None = None) -> tuple[Overlap, ...]:
    """Groups transfers by kind and axes, those that send most first. apart: every_steps of exchanges between replicas."""
    groups: dict[tuple[str, tuple[str, ...]], list[Overlap]] = {}
    for transfer in transfers:
        groups.setdefault((transfer.collective.kind, transfer.collective.axes), []).append(_in_step(transfer))
    rows = [total(of, *key, every_steps=apart if "replica" in key[1] else None) for key, of in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.sent_bytes))


def total(rows: Sequence[Overlap], kind: str = "all", axes: tuple[str, ...] = (), every_steps: int | None = None) -> Overlap:
    """Sums all rows into one."""
    sums = (sum(getattr(row, name) for row in rows) for name in _SUMMED)
    return Overlap(kind, axes, *sums, every_steps=every_steps)


def grouped(collectives: Iterable[Collective], sizes: Mapping[str, int]) -> tuple[CollectiveRow, ...]:
    """Groups collectives by kind, axes, dtype, and how they run; those that send most first."""
    groups: dict[tuple, list[Collective]] = {}
    for c in collectives:
        dtype = " ".join(sorted({dtype for dtype, _ in c.buffers}))
        groups.setdefault((c.kind, c.axes, dtype, c.asynchronous, bool(c.loops), c.spans_matmul), []).append(c)
    rows = []
    for key, members in groups.items():
        size = sum(c.executed * sum(byte_size(*buffer) for buffer in c.buffers) for c in members)
        n = math.prod(sizes[axis] for axis in key[1])
        sent = round(sent_bytes(key[0], size, n))
        rows.append(CollectiveRow(*key, len(members), sum(c.executed for c in members), size, sent))  # type: ignore[call-arg]
    return tuple(sorted(rows, key=lambda row: -row.sent_bytes))


def sent_bytes(kind: str, size_bytes: float, ranks: int) -> float:
    """Bytes that a device sends for a result of `size_bytes` on a ring of n ranks: (n-1)/n of a gathered or exchanged result,
    twice that of an all-reduced one, n-1 times a reduce-scattered one, once a permuted one."""
    n = ranks
    return size_bytes * {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}.get(kind, (n - 1) / n)


_SUMMED = ("count", "sent_bytes", "bare_bytes", "exposed_bytes", "flops_behind", "transfer_s", "exposed_s")


def _in_step(transfer: Transfer) -> Overlap:
    """A transfer in all its executions."""
    c, sent = transfer.collective, transfer.sent_bytes
    bare = 0 if c.flops_behind else sent
    exposed = sent * min(1.0, transfer.exposed_s / transfer.transfer_s) if transfer.transfer_s else 0
    figures: tuple[Any, ...] = (1, sent, bare, exposed, c.flops_behind, transfer.transfer_s, transfer.exposed_s)
    return Overlap(c.kind, c.axes, *(c.executed * figure for figure in figures))


class _Simulation:
    """The simulated device. The arguments are those of simulate_overlap."""

    def __init__(self, module: Module, gpu: Gpu, gpus_per_host: int, fp8: bool, parallel: ParallelConfig | None):
        self.module, self.links = module, links_of(gpu, BANDWIDTH_SHARE)
        self.parallel = parallel
        self.gpus_per_host = min(gpus_per_host, math.prod(module.axes.values()))
        fp8_flops = gpu.float8_flops if fp8 else None
        share = MEASURED.share_of_matmuls(gpu.chip.compute_capability >= HOPPER, is_fp8=bool(fp8_flops))
        self.flops_per_s = (fp8_flops or gpu.dense_flops["bfloat16"]) * share
        self.in_order = module.collectives()
        self.alone = {(c.computation, c.name): self.on_idle_link(c) for c in self.in_order}
        self.exposed_s: dict[tuple[str, str], float] = {}
        """Exposed time by (computation, name of the instruction)."""
        self.times_s: dict[str, float] = {}
        """Duration of one run of each computation."""

    def run_s(self, computation: str) -> float:
        """Seconds of one run of a computation, which is simulated once, with those that it calls."""
        if computation in self.times_s:
            return self.times_s[computation]
        now_s, among = 0.0, self.module.computations[computation]
        types = {instruction.name: instruction.result for instruction in among}
        # When the link of each set of axes is free, and when each transfer in flight arrives, by the name of its start.
        free_s: dict[tuple[str, ...], float] = {}
        arrives_s: dict[str, float] = {}
        for instruction in among:
            if transfer := self.alone.get((computation, instruction.name)):
                axes = transfer.collective.axes
                ends_s = free_s[axes] = max(now_s, free_s.get(axes, 0.0)) + transfer.transfer_s
                if transfer.collective.asynchronous:
                    arrives_s[instruction.name] = ends_s
                else:
                    self.exposed_s[computation, instruction.name] = ends_s - now_s
                    now_s = ends_s
            elif started := done_of(instruction, arrives_s):
                waited_s = max(0.0, arrives_s.pop(started) - now_s)
                self.exposed_s[computation, started] = waited_s
                now_s += waited_s
            elif instruction.op in RUNNING:
                now_s += trip_count(instruction) * sum(map(self.run_s, instruction.called))
            else:
                now_s += self.module.flops_of(instruction, types) / self.flops_per_s
        self.times_s[computation] = now_s
        return now_s

    def on_idle_link(self, collective: Collective) -> Transfer:
        """One execution with nothing else on the link; no time without participants. Axes that are not adjacent in the mesh
        count as if they were."""
        kind, axes, names = collective.kind, self.module.axes, list(self.module.axes)
        if not collective.axes:
            return Transfer(collective, 0.0, 0.0, 0.0)
        n = math.prod(axes[axis] for axis in collective.axes)
        inner = names[max(names.index(axis) for axis in collective.axes) + 1 :]
        group, links = group_of(n, math.prod(axes[axis] for axis in inner), self.gpus_per_host), self.links
        if 1 < len(collective.group) < n and collective.kind != "collective-permute":
            # Groups of a part of an axis (parallel/expert_parallel.py).
            n, hosts = len(collective.group), len({device // self.gpus_per_host for device in collective.group})
            group = Group(n // hosts, hosts)
        if self.parallel is not None and self.parallel.names_replica_network and "replica" in collective.axes:
            group, links = over_replica_network(self.parallel, n, links)
        size = sum(byte_size(*buffer) for buffer in collective.buffers)
        ways = {
            **{"all-reduce": all_reduce_s, "reduce-scatter": reduce_scatter_s, "collective-permute": permute_s},
            "all-to-all": all_to_all_s,
        }
        transfer_s = ways.get(kind, all_gather_s)(n * size if kind == "reduce-scatter" else size, group, links)
        return Transfer(collective, sent_bytes(kind, size, n), transfer_s, 0.0)


def done_of(instruction: Instruction, under_way: Mapping[str, float]) -> str | None:
    """The start in `under_way` that this instruction completes; None if it completes none."""
    if not instruction.op.endswith("-done"):
        return None
    return next((name for name in operands(instruction) if name in under_way), None)
