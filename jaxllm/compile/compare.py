"""Compares two compile reports of one step: what got worse, what got better, and by how much.

    found = compare(report, other, "earlier.json", is_earlier=True)
    for change in found.changes: change.name, change.before, change.after, change.verdict

XLA is deterministic: two compilations of one step by the same versions differ in nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxllm.compile.program import CollectiveRow
from jaxllm.compile.report import CompileReport
from jaxllm.config import ConfigError
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.untrusted import shown

SAME = 0.001
"""A figure that changes by at most this fraction of its total is the same. It is not for noise, of which there is none: without
it a scalar's all-reduce that takes a microsecond more would be listed above everything else."""
ALL = "all"


@dataclass(frozen=True)
class Figures:
    """Figures of one kind, of each of which less is better."""

    unit: str
    """bytes, FLOPs, s or nothing."""
    total: float
    """What a change is compared with, to see whether it matters."""
    by_name: dict[str, float]


@dataclass(frozen=True)
class Change:
    """One figure in both reports."""

    name: str
    unit: str
    before: float
    after: float
    verdict: str
    """worse, better or same."""

    @property
    def relative(self) -> float:
        """The change as a fraction of the value before, which is infinite for what is new."""
        more = self.after - self.before
        return more / self.before if self.before else math.copysign(math.inf, more) if more else 0.0

    @property
    def is_total(self) -> bool:
        return ": " not in self.name or self.name.endswith(f": {ALL}")

    def to_json(self) -> dict[str, Any]:
        """`change` is the relative one; None for what is new."""
        change = self.relative if math.isfinite(self.relative) else None
        return {**vars(self), "change": change}


@dataclass(frozen=True)
class Comparison:
    before: CompileReport
    """The baseline."""
    after: CompileReport
    names: tuple[str, str]
    """Which report is the baseline, and which is the other."""
    because: str
    """Why that one is the baseline."""
    changes: tuple[Change, ...]
    """What got worse, the largest relative change first; what got better; what is the same."""

    def to_json(self) -> dict[str, Any]:
        found = [change.to_json() for change in self.changes]
        return {"before": self.names[0], "after": self.names[1], "because": self.because, "changes": found}


def compare(report: CompileReport, other: CompileReport, name: str, *, is_earlier: bool = False) -> Comparison:
    """Compares the report of a command with the other one that it names.

    Args:
      name: the user's name for the other.
      is_earlier: it was stored by an earlier command.

    Raises:
      ConfigError: they are for different GPUs.
    """
    require_same_gpus(report, other)
    here, there = _version(report), _version(other)
    other_first, because = is_earlier, "it is the earlier report" if is_earlier else "it is the step without --against"
    if here != there:
        other_first, because = there < here, "it has the older JAX"
    pairs = [(report, "this command"), (other, name)]
    (before, first), (after, second) = reversed(pairs) if other_first else pairs
    return Comparison(before, after, (first, second), because, tuple(_changes(before, after)))


def require_same_gpus(report: CompileReport, other: CompileReport) -> None:
    """Raises ConfigError if the two steps are for GPUs of another kind or number, or hosts of another size."""
    kinds = [(one.gpu, one.gpus, one.gpus_per_host) for one in (report, other)]
    if kinds[0] != kinds[1]:
        ours, theirs = (f"{gpus} x {shown(gpu)} ({hosts_text(gpus, max(1, size))})" for gpu, gpus, size in kinds)
        raise ConfigError(f"This step is for {ours}, and the other for {theirs}: --against compares steps for the same GPUs.")


def figures(report: CompileReport) -> dict[str, Figures]:
    """All figures that are compared, by what they are about."""
    total = float(report.total_bytes)
    memory = {ALL: total, "arguments": float(report.argument_bytes), "temporaries": float(report.temp_bytes)}
    sent = _by_kind(report.collectives)
    all_sent = sum(sent.values())
    bare = _by_kind(row for row in report.collectives if not row.behind_matmuls)
    found = {
        "memory": Figures("bytes", total, memory),
        "memory of the host": _single("bytes", report.host_bytes),
        "FLOPs as traced": _single("FLOPs", report.executed_flops),
        "FLOPs in XLA's program": _single("FLOPs", report.compiled_flops),
        "HLO instructions": _single("", report.hlo_instructions),
        "collectives": _single("", sum(row.count for row in report.collectives)),
        "sent": Figures("bytes", all_sent, {ALL: all_sent, **sent}),
        "sent, not hidden": Figures("bytes", all_sent, {ALL: sum(bare.values()), **bare}),
    }
    if (real := report.real_memory) is not None:
        found["memory, with the GPU's own"] = _single("bytes", real.total_bytes)
        found["FLOPs, with the GPU's own memory"] = _single("FLOPs", real.compiled_flops)
    if (account := report.kernels) is not None:
        # Collectives have a kind of their own below.
        parts = {shown(row.part): row.seconds for row in account.parts if row.part != "transfers"}
        found["kernel launches"] = _single("", sum(row.runs for row in account.parts))
        found["time"] = Figures("s", account.step_s, {ALL: account.step_s, **parts})
        if (all_exposed := report.exposed_transfers_s) is not None:
            exposed = {_over(row.kind, row.axes): row.exposed_s for row in report.overlap if row.every_steps is None}
            found["exposed"] = Figures("s", account.step_s, {ALL: all_exposed, **exposed})
    return found


def _changes(before: CompileReport, after: CompileReport) -> list[Change]:
    first, second = figures(before), figures(after)
    changes = []
    for about in (about for about in first if about in second):
        one, two = first[about], second[about]
        matters = SAME * max(one.total, two.total)
        for figure in one.by_name | two.by_name:
            values = one.by_name.get(figure, 0.0), two.by_name.get(figure, 0.0)
            more = values[1] - values[0]
            verdict = "worse" if more > matters else "better" if more < -matters else "same"
            changes.append(Change(f"{about}: {figure}" if figure else about, one.unit, *values, verdict))
    return sorted(changes, key=_rank)


def _rank(change: Change) -> tuple:
    if change.verdict == "same":
        # In the order of `figures`.
        return (2,)
    return (change.verdict == "better", -abs(change.relative), -abs(change.after - change.before))


def _single(unit: str, value: float) -> Figures:
    return Figures(unit, float(value), {"": float(value)})


def _by_kind(rows: Iterable[CollectiveRow]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        # A group of one sends nothing.
        if row.axes:
            name = _over(row.kind, row.axes)
            sums[name] = sums.get(name, 0.0) + row.sent_bytes
    return sums


def _over(kind: str, axes: Iterable[str]) -> str:
    return shown(f"{kind} over {' x '.join(axes)}")


def _version(report: CompileReport) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", report.jax_version)]
