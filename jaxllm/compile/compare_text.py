"""Two compile reports side by side as terminal text. `jaxllm compile --against` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxllm.compile.compare import SAME, Change, Comparison
from jaxllm.compile.inspect import axes_line
from jaxllm.compile.report import CompileReport
from jaxllm.compile.text import teraflops
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.display import readable, terminal_table
from jaxllm.untrusted import shown

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
    before, after = reports = (comparison.before, comparison.after)
    yield f"The train step for {before.gpus} x {before.gpu}, {hosts_text(before.gpus, before.gpus_per_host)}, compiled twice"
    for which, name, report, other in zip(("before", "after"), comparison.names, reports, reports[::-1], strict=True):
        yield f"  {which}: {shown(name, 60)}"
        yield f"    {_made_by(report)}"
        if flags := [flag for flag in report.xla_flags.split() if flag not in other.xla_flags.split()]:
            yield f"    with {shown(' '.join(flags), 200)}"
    yield f"  The baseline is {shown(comparison.names[0])}: {comparison.because}."
    if before.packages[-1:] != after.packages[-1:]:
        yield "  Different code of jaxllm: it too may have changed the step, the times and the counts."
    if before.model_flops != after.model_flops:
        yield "  The two steps are different work: their models or batches differ."
    if (line := _layout(before)) != _layout(after):
        yield f"  {line} before, {_layout(after)} after"
    if None not in (before.share_of_capacity, after.share_of_capacity) and before.fits != after.fits:
        verdict = "It fits now" if after.fits else "It DOES NOT FIT any more"
        yield f"{verdict}: {after.share_of_capacity:.1%} of what a step may take, {before.share_of_capacity:.1%} before"


def _made_by(report: CompileReport) -> str:
    plugin = [package for package in report.packages if "plugin" in package or package.startswith("jaxllm ")]
    return shown(", ".join([f"JAX {report.jax_version}", *plugin]), 160)


def _layout(report: CompileReport) -> str:
    return shown(f"{axes_line(report.mesh)}; attention {report.attention}", 160)


def _table(changes: Sequence[Change]) -> Iterator[RenderableType]:
    figures = ("before", "after", "change")
    table: Table = terminal_table(("", *figures), right=figures)
    for column, least in zip(table.columns, WIDTHS, strict=True):
        column.min_width = least
    for change in changes[:ROWS]:
        before, after = _value(change.before, change.unit), _value(change.after, change.unit)
        table.add_row(change.name, before, after, change_text(change))
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
