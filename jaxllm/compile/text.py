"""Terminal output of `jaxllm inspect` (the mesh drawn, tables of layouts and bytes, memory under remat, the warnings) and of
`jaxllm compile`.
"""

import io
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxllm.compile.inspect import REACHED, Report, axes_line
from jaxllm.compile.kernels import KernelAccount
from jaxllm.compile.overlap import total
from jaxllm.compile.report import CompileReport
from jaxllm.config import ConfigError
from jaxllm.cost_model.hardware import capacity_text, fits_text
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.cost_model.kernel_rates import KernelRates
from jaxllm.display import readable
from jaxllm.mesh.axes import CONTEXT, TENSOR
from jaxllm.parallel.zigzag import table_text
from jaxllm.terminal import console, terminal_table

# ---------------------------------------------------------------------------------------------------------------- inspect

WIDTH = 80
"""Maximum characters of a line."""


def render_inspect(report: Report) -> Group:
    """The report for a terminal of at least 80 columns."""
    padded = f", {report.vocabulary_padding_rows} padding rows of the vocabulary not counted"
    held = report.bytes_per_device.total
    precision = [(row.what, row.inputs, row.sums, row.result) for row in report.precision]
    parts = [
        Text(f"Mesh of {report.gpus} devices, slow network to fast:\n  {axes_line(report.mesh)}"),
        Text(f"{hosts_text(report.gpus, report.gpus_per_host)} ({report.hosts_because})"),
        *mesh_drawing(report),
        *zigzag_drawing(report),
        Text(f"\n{report.parameter_count:,} parameters{padded if report.vocabulary_padding_rows else ''}"),
        Text("Axes that shard each dim: `compute` in the train step, `master` at rest"),
        layout_table(report),
        Text(f"\nOn each device with ZeRO {report.zero}, compute in {report.compute_dtype}; activations not counted"),
        parameter_bytes_table(report),
        Text(f"Total {readable(held)} per device ({held:,} bytes)"),
        *activation_lines(report),
        Text("\nPrecision on a GPU: as multiplied or added, of sums inside, of the result"),
        Padding(terminal_table(precision, ("", "inputs", "sums", "result")), (0, 0, 0, 2)),
        *(Text(f"\nNote: {note}") for note in report.notes),
    ]
    lines = [Padding(line, (0, 0, 0, 2)) for line in warning_lines(report)]
    return Group(*parts, *([Text("\nWarnings"), *lines] if lines else []))


def in_columns(rendered: Group) -> str:
    """The output of rich at WIDTH columns, without colours."""
    # In a notebook, rich would also display an empty output of its own.
    file = io.StringIO()
    console(width=WIDTH, file=file, color_system=None, force_jupyter=False).print(rendered)
    return file.getvalue()


def mesh_drawing(report: Report) -> Iterator[Padding]:
    """Device ids in rows along the fastest axis; each host is a box if there are several."""
    for host in elided(list(range(report.hosts)), 4):
        if host is None:
            yield Padding("...", (0, 0, 0, 4))
            continue
        rows = "\n".join("..." if row is None else row for row in elided(host_rows(report, host), 8))
        box = Text(rows) if report.hosts == 1 else Panel(Text(rows), title=f"host {host}", title_align="left", expand=False)
        yield Padding(box, (0, 0, 0, 2), expand=False)


def zigzag_drawing(report: Report) -> Iterator[Text]:
    """The chunks of a sequence on each context rank, and the blocks of a ring; --picture draws long tables."""
    if 1 < (c := report.mesh[CONTEXT]) <= 4:
        yield Text(
            f"\nA sequence is split into {2 * c} chunks; context rank r holds r and {2 * c - 1}-r. Blocks of attention at each "
            f"ring step, as query chunk < key chunk:"
        )
        yield Text("  " + table_text(c).replace("\n", "\n  ") + "\n")


def host_rows(report: Report, host: int) -> list[str]:
    """'data 0, tensor 0..7: 0 1 2 3 4 5 6 7' for each row of devices of a host, at most as wide as a box.

    mesh.make_mesh assigns ids in this order: by host, the fastest axis first.
    """
    used = {axis: size for axis, size in report.mesh.items() if size > 1} or {TENSOR: 1}
    *slow, fast = used
    length = used[fast]
    ids = range(host * report.gpus_per_host, (host + 1) * report.gpus_per_host)
    rows = []
    for number, group in itertools.groupby(ids, lambda i: i // length):
        row = list(group)
        places = np.unravel_index(number, [used[axis] for axis in slow]) if slow else ()
        label = [f"{axis} {place}" for axis, place in zip(slow, places, strict=True)]
        label = ", ".join([*label, f"{fast} {row[0] % length}..{row[-1] % length}"]) + ": "
        devices = " ".join(map(str, row))
        # Eight columns are for the box and its margin.
        if len(label + devices) > WIDTH - 8:
            devices = f"{row[0]} {row[1]} ... {row[-1]}"
        rows.append(label + devices)
    return rows


def elided(items: list[Any], most: int) -> list[Any]:
    """At most `most` of the items, with None in place of those left out in the middle."""
    return items if len(items) <= most else [*items[: most - 2], None, items[-1]]


def layout_table(report: Report) -> Table:
    """A row for each dim of each parameter; stacked layers show one layer."""
    lines = []
    for parameter in report.parameters:
        stacked = parameter.dims[0] == "layers"
        shape = parameter.shape[1:] if stacked else parameter.shape
        times = f" x {parameter.shape[0]}" if stacked else ""
        if stacked and report.mesh[parameter.compute[0][0]] > 1:
            times += f" over {parameter.compute[0][0]}"
        under = f"  {parameter.dtype} [{', '.join(map(str, shape))}]{times}"
        padded = zip(parameter.shape, parameter.zeros, strict=True)
        sizes = [f"{size} + {zeros}" if zeros else str(size) for size, zeros in padded]
        rows = list(zip(parameter.dims, sizes, parameter.compute, parameter.master, strict=True))[stacked:]
        for left, row in itertools.zip_longest([parameter.path, under], rows):
            dim, size, *specs = row or ("", "", None, None)
            split = ["" if spec is None else " x ".join(a for a in spec if report.mesh[a] > 1) or "-" for spec in specs]
            lines.append((left or "", dim, size, *split))
    return terminal_table(lines, ("parameter", "dim", "size", "compute", "master"), right=("size",))


def parameter_bytes_table(report: Report) -> Table:
    sizes = [(parameter.path, parameter.bytes_per_device) for parameter in report.parameters]
    rows = [(name, *map(readable, asdict(size).values())) for name, size in (*sizes, ("total", report.bytes_per_device))]
    kinds = ("master", "moments", "copy", "gradients")
    return terminal_table(rows, ("parameter", *kinds), right=kinds, bold="total")


def activation_lines(report: Report) -> Iterator[Text]:
    """The tensors that remat keeps, and the load on the host's link."""
    block, state = report.activations, report.state_offload
    yield Text(f"\nRemat {block.policy}: bytes for each token of a sequence and each layer, on one device")
    for label, sizes in (("kept", block.kept), ("offloaded", block.offloaded)):
        if sizes:
            listed = ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items())
            yield Text(f"  {label} {sum(sizes.values()):,.0f}: {listed}")
    if block.recomputed:
        yield Text(f"  recomputed: {', '.join(block.recomputed)}")
    if block.unnamed:
        yield Text(f"  kept {block.unnamed:,.0f}, all that autodiff needs, with plain XLA attention")
    link = f"{report.link_bytes_per_s / 1e9:.0f} GB/s each way of {report.gpu}'s link"
    if block.offloaded:
        yield Text(
            f"  {block.link_s * 1e9:,.0f} ns to the host at {link}, behind {block.compute_s * 1e9:,.0f} ns of compute "
            f"({REACHED:.0%} of the bfloat16 peak)" + (": the link is the slower" if block.link_s > block.compute_s else "")
        )
    if state.what != "none":
        yield Text(
            f"\noffload_state {state.what}: {readable(state.host)} of the total are in the host's memory. Each step brings "
            f"{readable(state.to_device)} in and {readable(state.to_host)} out: {state.link_s:.2g} s at {link}"
        )


def warning_lines(report: Report) -> Iterator[Text]:
    """One paragraph for all parameters that share a warning."""
    shared: dict[tuple[str | None, str], list[str]] = {}
    for warned in report.warnings:
        shared.setdefault((warned.axis, warned.message), []).extend([warned.parameter] if warned.parameter else [])
    for (axis, message), names in shared.items():
        over = " x ".join(f"{name}={report.mesh[name]}" for name in axis.split(" x ")) if axis else "not split"
        yield Text(f"{', '.join(names) or 'mesh'} ({over}): {message}")


# ---------------------------------------------------------------------------------------------------------------- compile

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
        parts.append(Text(f"\nCollectives of one step, on one device ({legend})"))
        parts.append(Padding(collectives_table(report), (0, 0, 0, 2)))
        if (left := len(report.collectives) - ROWS) > 0:
            parts.append(Text(f"  and {left} kinds that send less; --json has all"))
    if report.overlap:
        parts += [Text("\nExposed communication, by kind"), Padding(overlap_table(report), (0, 0, 0, 2))]
        parts.append(Text("  bare: no matmul between start and done; shows: by a model's times"))
        if (every := max((row.every_steps or 0 for row in report.overlap), default=0)) > 1:
            parts.append(Text(f"  over replica: in one of {every:,} steps"))
    if report.largest_results:
        parts += [Text("\nLargest results of instructions (some share memory, at different times)"), results_table(report)]
    lines = [Padding(Text(line), (0, 0, 0, 2)) for line in report.warnings]
    return Group(*parts, *([Text("\nWarnings"), *lines] if lines else []))


def heading(report: CompileReport) -> list[Text]:
    """For what was compiled, and how long it took."""
    taken = f"compiled in {report.compile_s:.1f} s" + (", earlier (from the cache)" if report.cached else "")
    hosts = f"{hosts_text(report.gpus, report.gpus_per_host)} ({report.hosts_because})"
    step = f"The train step for {report.gpus} x {report.gpu}, {hosts}, {taken}"
    return [Text(step), Text(f"  {axes_line(report.mesh)}; attention {report.attention}")]


def bytes_table(report: CompileReport) -> Table:
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
    cells = [(f"  {name}", f"{'-' if size < 0 else ''}{readable(abs(size))}", f"{size:,}") for name, size in rows]
    return terminal_table(cells, right=(1, 2), bold="  total")


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
    rows = []
    for row in report.collectives[:ROWS]:
        how = "hidden" if row.behind_matmuls else "bare" if row.asynchronous else "sync"
        axes = " x ".join(row.axes) or "-"
        where = "loops" if row.in_loops else ""
        rows.append((row.kind, axes, row.dtype, f"{row.count:,}", readable(row.sent_bytes), how, where))
    return terminal_table(rows, ("kind", "over", "dtype", "times", "sent", "how", ""), right=("times", "sent"), gap=1)


def overlap_table(report: CompileReport) -> Table:
    figures, rows = ("sent", "bare", "shows", "TFLOP behind"), []
    for row in (*report.overlap[:ROWS], total(report.overlap)):
        shares = (f"{row.bare_share:.0%}", f"{row.exposed_share:.0%}")
        flops = teraflops(round(row.flops_behind))
        rows.append((row.kind, " x ".join(row.axes), readable(row.sent_bytes), *shares, flops))
    return terminal_table(rows, ("kind", "over", *figures), right=figures, gap=1)


def results_table(report: CompileReport) -> Table:
    rows = []
    for large in report.largest_results:
        times = f" x {large.instructions}" if large.instructions > 1 else ""
        shape = f"{large.dtype}[{','.join(map(str, large.shape))}]{times}"
        rows.append((f"  {readable(large.bytes)}", shape, large.origin))
    return terminal_table(rows, right=(0,))


# --------------------------------------------------------------------------------------------------------- kernel account


def render_kernels(report: CompileReport, against: CompileReport | None = None) -> Group:
    """The account for a terminal of at least 80 columns. Raises as account_of does."""
    account, other = account_of(report), None if against is None else account_of(against)
    table = _comparison(account, other) if other else _table(account)
    return Group(
        *heading(report),
        *verdict(report),
        *([Text("\nThe other"), *heading(against), *verdict(against)] if against else []),
        Text("\nKernels of one step, on one device, by roofline (nothing was timed)"),
        Padding(table, (0, 0, 0, 2)),
        Text(""),
        Text(_total("", account)),
        *([Text(_total("the other: ", other))] if other else []),
        Text("\nRates: shares of the peaks that one H100 reached; assumed for other GPUs (jaxllm/cost_model/kernel_rates.py)"),
        *(Text(f"  {rate}") for rate in _rates(account.rates)),
        *([Text("\nWarnings"), *(Text(f"  {line}") for line in report.warnings)] if report.warnings else []),
    )


def account_of(report: CompileReport) -> KernelAccount:
    """The report's account. Raises ConfigError if it has none."""
    if report.kernels is None:
        raise ConfigError(f"--kernels needs the figures of the GPU, and {report.gpu} has none: name a kind with --gpu.")
    return report.kernels


def _table(account: KernelAccount) -> Table:
    figures, rows = ("runs", "GB", "TFLOP", "ms", "least", "us a layer"), []
    for row in account.parts:
        layer = "" if row.layer_seconds is None else f"{1e6 * row.layer_seconds:,.0f}"
        flops = teraflops(row.flops) if row.flops else ""
        moved = f"{row.bytes / 1e9:,.1f}"
        rows.append((row.part, f"{row.runs:,}", moved, flops, _ms(row.seconds), _ms(row.least_seconds), layer))
    least = sum(row.least_seconds for row in account.parts)
    rows.append(("all", f"{sum(row.runs for row in account.parts):,}", "", "", _ms(account.step_s), _ms(least), ""))
    return terminal_table(rows, ("part", *figures), right=figures)


def _comparison(account: KernelAccount, other: KernelAccount) -> Table:
    ours, theirs = ({row.part: row.seconds for row in one.parts} for one in (account, other))
    pairs = {part: (ours.get(part, 0.0), theirs.get(part, 0.0)) for part in ours | theirs}
    times = sorted(pairs.items(), key=lambda item: -max(item[1]))
    times.append(("all", (account.step_s, other.step_s)))
    rows = [(part, _ms(a), _ms(b), f"{1e3 * (b - a):+,.1f}") for part, (a, b) in times]
    figures = ("ms", "other", "change")
    return terminal_table(rows, ("part", *figures), right=figures)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _total(whose: str, account: KernelAccount) -> str:
    phases = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in account.phases_s.items())
    return (
        f"{whose}{_ms(account.step_s)} ms a step ({phases}), MFU {account.mfu_full_square:.1%} with the full square of "
        f"attention, {account.mfu_causal:.1%} causal"
    )


def _rates(rates: KernelRates) -> Iterator[str]:
    yield f"{rates.matmul_flops_per_s / 1e12:,.3g} TFLOP/s in matmuls"
    yield f"{rates.attention_forward_flops_per_s / 1e12:,.3g} TFLOP/s in attention, of the causal half"
    yield f"{rates.attention_backward_flops_per_s / 1e12:,.3g} TFLOP/s in its backward pass"
    yield f"{rates.memory_bytes_per_s / 1e12:,.3g} TB/s of memory"
    yield f"{rates.launch_s * 1e6:,.3g} us between kernels"
