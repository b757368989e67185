"""The compile report as terminal text. `jaxllm compile` prints it.

Console().print(render(report))
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxllm.compile.inspect import axes_line
from jaxllm.compile.overlap import total
from jaxllm.compile.report import CompileReport
from jaxllm.cost_model.hardware import capacity_text, fits_text
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.display import readable, terminal_table

ROWS = 14
"""Collectives in the table; the JSON has all."""
REPEATED_SHARE = 0.01
"""FLOPs beyond the traced ones, as a fraction of them, that are worth a line."""


def render(report: CompileReport) -> Group:
    """The report for a terminal of at least 80 columns."""
    parts = [
        *heading(report),
        Text("\nBytes on one device, by XLA"),
        bytes_table(report),
        *verdict(report),
        Text("\nOne step"),
        *(Padding(Text(line), (0, 0, 0, 2)) for line in step_lines(report)),
    ]
    if report.collectives:
        legend = "hidden: asynchronous, with a matmul between start and done; bare: without; sync: all wait"
        parts += [
            Text(f"\nCollectives of one step, on one device ({legend})"),
            Padding(collectives_table(report), (0, 0, 0, 2)),
        ]
        left = len(report.collectives) - ROWS
        if left > 0:
            parts.append(Text(f"  and {left} kinds that send less; --json has all"))
    if report.overlap:
        parts += [Text("\nExposed communication, by kind"), Padding(overlap_table(report), (0, 0, 0, 2))]
        parts.append(Text("  bare: no matmul between start and done; shows: by a model's times"))
        if (every := max((row.every_steps or 0 for row in report.overlap), default=0)) > 1:
            parts.append(Text(f"  over replica: in one of {every:,} steps"))
    if report.largest_results:
        parts += [Text("\nLargest results of instructions (some share memory, at different times)"), results_table(report)]
    if report.warnings:
        parts.append(Text("\nWarnings"))
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in report.warnings]
    return Group(*parts)


def heading(report: CompileReport) -> list[Text]:
    """For what was compiled, and how long it took."""
    taken = f"compiled in {report.compile_s:.1f} s" + (", earlier (from the cache)" if report.cached else "")
    return [
        Text(
            f"The train step for {report.gpus} x {report.gpu}, "
            f"{hosts_text(report.gpus, report.gpus_per_host)} ({report.hosts_because}), {taken}"
        ),
        Text(f"  {axes_line(report.mesh)}; attention {report.attention}"),
    ]


def bytes_table(report: CompileReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    rows = [
        ("arguments: state and batch", report.argument_bytes),
        ("temporaries, at their peak", report.temp_bytes),
        ("outputs", report.output_bytes),
        ("of these in place of arguments", -report.alias_bytes),
        ("total", report.total_bytes),
    ]
    if report.workspace_bytes:
        rows.insert(-1, ("cuDNN's workspace at most, estimated", report.workspace_bytes))
    if report.host_bytes:
        rows.append(("in the host's memory besides", report.host_bytes))
    for name, size in rows:
        sign = "-" if size < 0 else ""
        style = "bold" if name == "total" else ""
        table.add_row(f"  {name}", f"{sign}{readable(abs(size))}", f"{size:,}", style=style)
    return table


def verdict(report: CompileReport) -> Iterator[Text]:
    if report.capacity_bytes is None:
        yield Text("The memory of this device is not known.")
        return
    yield Text(fits_text(report.total_bytes, report.capacity_bytes), style="bold")
    if report.memory_bytes is not None:
        yield Text(capacity_text(report.memory_bytes))
    if (real := report.real_memory) is not None:
        if real.rematerialises:
            yield Text(
                f"With the real memory XLA rematerialises {real.rematerialised_instructions} instructions and takes "
                f"{readable(real.total_bytes)}: {teraflops(real.compiled_flops)} TFLOP a step instead of "
                f"{teraflops(report.compiled_flops)}, and it {'fits' if real.fits else 'does not fit'}"
            )
        else:
            yield Text("With the real memory XLA compiles the same program, without rematerialisation")
    elif report.near_rematerialisation:
        yield Text("Above three quarters of the memory XLA rematerialises to save memory: --real-memory shows the effect")


def step_lines(report: CompileReport) -> Iterator[str]:
    kernels = f", {teraflops(report.attention_kernel_flops)} of them cuDNN attention's by its shapes"
    yield (
        f"{teraflops(report.executed_flops)} TFLOP on all devices: matmuls as traced, with recomputation"
        f"{kernels if report.attention_kernel_flops else ''}; the model's own are {teraflops(report.model_flops)} (causal)"
    )
    if report.compiled_flops > (1 + REPEATED_SHARE) * report.executed_flops:
        yield f"XLA's program has {teraflops(report.compiled_flops)} TFLOP: it repeats matmuls, or several ranks do the same"
    yield f"{report.hlo_instructions:,} HLO instructions, {readable(report.hlo_bytes)} of text; JAX {report.jax_version}"


def teraflops(flops: int) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"


def collectives_table(report: CompileReport) -> Table:
    table = terminal_table(("kind", "over", "dtype", "times", "sent", "how", ""), right=("times", "sent"), gap=1)
    for row in report.collectives[:ROWS]:
        how = "hidden" if row.behind_matmuls else "bare" if row.asynchronous else "sync"
        axes = " x ".join(row.axes) or "-"
        where = "loops" if row.in_loops else ""
        table.add_row(row.kind, axes, row.dtype, f"{row.count:,}", readable(row.sent_bytes), how, where)
    return table


def overlap_table(report: CompileReport) -> Table:
    figures = ("sent", "bare", "shows", "TFLOP behind")
    table = terminal_table(("kind", "over", *figures), right=figures, gap=1)
    for row in (*report.overlap[:ROWS], total(report.overlap)):
        shares = (f"{row.bare_share:.0%}", f"{row.exposed_share:.0%}")
        flops = teraflops(round(row.flops_behind))
        table.add_row(row.kind, " x ".join(row.axes), readable(row.sent_bytes), *shares, flops)
    return table


def results_table(report: CompileReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for large in report.largest_results:
        times = f" x {large.instructions}" if large.instructions > 1 else ""
        shape = f"{large.dtype}[{','.join(map(str, large.shape))}]{times}"
        table.add_row(f"  {readable(large.bytes)}", shape, Text(large.origin))
    return table
