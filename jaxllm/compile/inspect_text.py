"""Terminal output of `jaxllm inspect`: the mesh drawn, tables of layouts and bytes, memory under remat, and the warnings.

Console().print(render(report))
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxllm.compile.inspect import REACHED, Report, axes_line
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.display import readable
from jaxllm.mesh.axes import CONTEXT, TENSOR
from jaxllm.parallel.zigzag import table_text
from jaxllm.terminal import terminal_table

WIDTH = 80
"""Maximum characters of a line."""


def render(report: Report) -> Group:
    """The report for a terminal of at least 80 columns."""
    padded = f", {report.vocabulary_padding_rows} padding rows of the vocabulary not counted"
    total = report.bytes_per_device.total
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
        bytes_table(report),
        Text(f"Total {readable(total)} per device ({total:,} bytes)"),
        *activation_lines(report),
        *waste_lines(report),
        Text("\nPrecision on a GPU: as multiplied or added, of sums inside, of the result"),
        Padding(terminal_table(precision, ("", "inputs", "sums", "result")), (0, 0, 0, 2)),
        *(Text(f"\nNote: {note}") for note in report.notes),
    ]
    if report.warnings:
        parts.append(Text("\nWarnings"))
        parts += [Padding(line, (0, 0, 0, 2)) for line in warning_lines(report)]
    return Group(*parts)


def in_columns(rendered: Group) -> str:
    """The output of rich at WIDTH columns, without colours."""
    # In a notebook, rich would also display an empty output of its own.
    file = io.StringIO()
    console = Console(width=WIDTH, file=file, color_system=None, force_jupyter=False, highlight=False, markup=False)
    console.print(rendered)
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


def bytes_table(report: Report) -> Table:
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


def waste_lines(report: Report) -> Iterator[Text]:
    """Shares of the step that shapes waste, if a GPU was named."""
    if report.shape_waste is None:
        return
    yield Text(f"\nPredicted step on {report.gpu}: {report.shape_waste.step_s:.4g} s, wasted by shapes")
    for name, share in report.shape_waste.shares.items():
        yield Text(f"  {name.replace('_', ' '):<18}{share:>6.1%}")
    if report.better_shape is not None:
        yield Text(f"  {report.better_shape}")


def warning_lines(report: Report) -> Iterator[Text]:
    """One paragraph for all parameters that share a warning."""
    shared: dict[tuple[str | None, str], list[str]] = {}
    for warned in report.warnings:
        shared.setdefault((warned.axis, warned.message), []).extend([warned.parameter] if warned.parameter else [])
    for (axis, message), names in shared.items():
        over = " x ".join(f"{name}={report.mesh[name]}" for name in axis.split(" x ")) if axis else "not split"
        yield Text(f"{', '.join(names) or 'mesh'} ({over}): {message}")
