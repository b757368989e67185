"""Compares two compile reports of one step: what got worse, what got better, and by how much.

    found = compare(report, other, ("this step", "with remat full"))
    for change in found.changes: change.name, change.before, change.after, change.verdict

XLA is deterministic: two compilations of one step by the same versions differ in nothing.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from jaxllm.compile.inspect import axes_line
from jaxllm.compile.overlap import CollectiveRow
from jaxllm.compile.report import CompileReport
from jaxllm.compile.text import teraflops
from jaxllm.config import ConfigError
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.display import readable
from jaxllm.terminal import terminal_table
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
    changes: tuple[Change, ...]
    """What got worse, the largest relative change first; what got better; what is the same."""

    def to_json(self) -> dict[str, Any]:
        found = [change.to_json() for change in self.changes]
        return {"before": self.names[0], "after": self.names[1], "changes": found}


def compare(before: CompileReport, after: CompileReport, names: tuple[str, str]) -> Comparison:
    """Raises ConfigError if the two steps are for GPUs of another kind or number, or hosts of another size."""
    kinds = [(one.gpu, one.gpus, one.gpus_per_host) for one in (before, after)]
    if kinds[0] != kinds[1]:
        first, second = (f"{gpus} x {shown(gpu)} ({hosts_text(gpus, max(1, size))})" for gpu, gpus, size in kinds)
        raise ConfigError(f"One step is for {first}, and the other for {second}: compare steps for the same GPUs.")
    figures_before, figures_after = figures(before), figures(after)
    changes = []
    for about in (about for about in figures_before if about in figures_after):
        one, two = figures_before[about], figures_after[about]
        matters = SAME * max(one.total, two.total)
        for figure in one.by_name | two.by_name:
            values = one.by_name.get(figure, 0.0), two.by_name.get(figure, 0.0)
            more = values[1] - values[0]
            verdict = "worse" if more > matters else "better" if more < -matters else "same"
            changes.append(Change(f"{about}: {figure}" if figure else about, one.unit, *values, verdict))
    return Comparison(before, after, names, tuple(sorted(changes, key=_rank)))


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


# ---------------------------------------------------------------------------------------------------------------- as text

ROWS = 20
"""Rows of a table; the JSON has all."""
WIDTHS = (38, 11, 11, 8)
"""Columns of all tables stand below each other."""


def render_comparison(comparison: Comparison) -> Group:
    """The comparison for a terminal of at least 80 columns: what got worse first."""
    parts: list[RenderableType] = list(map(Text, _heading(comparison)))
    for verdict, title in (("worse", "Worse"), ("better", "Better")):
        changes = [change for change in comparison.changes if change.verdict == verdict]
        parts.append(Text(f"\n{title}{'' if changes else ': nothing'}", style="bold"))
        parts += _table(changes) if changes else []
    same = [change for change in comparison.changes if change.verdict == "same"]
    parts += [Text(f"\nThe same, to {SAME:.1%} of the total"), *_table([change for change in same if change.is_total])]
    left = sum(not change.is_total for change in same)
    parts += [Text(f"  and {left} figures of parts; --json has all")] if left else []
    if new := [line for line in comparison.after.warnings if line not in comparison.before.warnings]:
        parts += [Text("\nNew warnings"), *(Text(f"  {shown(line, 400)}") for line in new)]
    return Group(*parts)


def _heading(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.before, comparison.after
    yield f"The train step for {before.gpus} x {before.gpu}, {hosts_text(before.gpus, before.gpus_per_host)}, compiled twice"
    yield from (f"  {which}: {shown(name, 60)}" for which, name in zip(("before", "after"), comparison.names, strict=True))
    if before.model_flops != after.model_flops:
        yield "  The two steps are different work: their models or batches differ."
    if (line := _layout(before)) != _layout(after):
        yield f"  {line} before, {_layout(after)} after"
    if None not in (before.share_of_capacity, after.share_of_capacity) and before.fits != after.fits:
        verdict = "It fits now" if after.fits else "It DOES NOT FIT any more"
        yield f"{verdict}: {after.share_of_capacity:.1%} of what a step may take, {before.share_of_capacity:.1%} before"


def _layout(report: CompileReport) -> str:
    return shown(f"{axes_line(report.mesh)}; attention {report.attention}", 160)


def _table(changes: Sequence[Change]) -> Iterator[RenderableType]:
    figures, first = ("before", "after", "change"), changes[:ROWS]
    rows = [(one.name, _value(one.before, one.unit), _value(one.after, one.unit), change_text(one)) for one in first]
    table = terminal_table(rows, ("", *figures), right=figures)
    for column, least in zip(table.columns, WIDTHS, strict=True):
        column.min_width = least
    yield Padding(table, (0, 0, 0, 2))
    if len(changes) > ROWS:
        yield Text(f"  and {len(changes) - ROWS} more; --json has all")


def change_text(change: Change) -> str:
    """'+12.3%', new or gone; nothing for what would be 0.0%."""
    if abs(change.relative) < 0.0005:
        return ""
    return "new" if math.isinf(change.relative) else "gone" if change.after == 0 else f"{change.relative:+.1%}"


def _value(value: float, unit: str) -> str:
    if unit == "bytes":
        return readable(value)
    if unit == "FLOPs":
        return f"{teraflops(round(value))} TFLOP"
    return f"{1e3 * value:,.1f} ms" if unit == "s" else f"{value:,.0f}"
