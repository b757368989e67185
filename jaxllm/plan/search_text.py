"""A plan for a terminal. What `jaxllm plan` prints.

Console().print(render(plan, rows=10))
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxllm.plan.cost import TrainingCost
from jaxllm.plan.estimate import peak_flops
from jaxllm.plan.hardware import readable
from jaxllm.plan.search import FIT_SHARE, MESH, Plan
from jaxllm.plan.space import remat_text, schedule_text
from jaxllm.plan.sweep import PARAMETER_SERVER, Sweep

GIB = 2**30
WIDTH = 110
"""Columns the tables want."""
HEADINGS = (
    *("#", "pipe", "data", "context", "tensor", "ZeRO", "micro-\nbatch", "schedule", "remat"),
    *("estimate\nGiB", "XLA\nGiB", "of\ncapacity", "tokens/s\n/GPU", "TFLOP/s\n/GPU (MFU)"),
)


def render(
    plan: Plan, rows: int = 10, cost: TrainingCost | None = None, sweep: Sweep | None = None, objective: str | None = None
) -> Group:
    """The plan for a terminal of WIDTH columns, with so many candidates.

    Args:
      objective: what was looked for, in words: a line below the heading.
    """
    hosts = plan.gpus // plan.gpus_per_host
    train = plan.config.train
    parts = [
        Text(
            f"{plan.config.model.name or 'The model'} on {plan.gpus} x {plan.gpu.name}, {hosts} "
            f"{'host' if hosts == 1 else 'hosts'} of {plan.gpus_per_host} ({plan.hosts_because})"
        ),
        Text(
            f"  {train.global_batch_sequences:,} sequences of {train.sequence_length:,} tokens a step; a step may take "
            f"{readable(plan.capacity_bytes)}, its estimate {FIT_SHARE:.0%} of that"
        ),
        *([] if objective is None else [Text(f"  {objective}")]),
        Text(""),
        candidates_table(plan, rows),
        *(Text(line) for line in verdict_lines(plan, rows)),
    ]
    if cost is not None:
        parts += [Text(""), *(Text(line) for line in cost.lines())]
    if sweep is not None:
        parts += [Text("\nMore GPUs, the same global batch"), sweep_table(sweep), *(Text(line) for line in sweep_lines(sweep))]
    if plan.rejected:
        searched = plan.meshes - sum(line.count for line in plan.rejected if line.unit == MESH)
        parts += [
            Text(
                f"\nLeft out of {plan.meshes:,} meshes, and of the {plan.configurations:,} configurations of the {searched:,} "
                f"that divide"
            ),
            rejected_table(plan),
        ]
    return Group(*parts)


def candidates_table(plan: Plan, rows: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    peak_tflops = peak_flops(plan.gpu, plan.config.model.compute_dtype) / 1e12
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("schedule", "remat") else "right", overflow="fold")
    for number, one in enumerate(plan.candidates[:rows], 1):
        choice, compiled = one.choice, one.compiled_bytes
        table.add_row(
            str(number),
            *(str(size) for size in (choice.mesh.pipe, choice.mesh.data, choice.mesh.context, choice.mesh.tensor)),
            str(choice.zero),
            str(choice.microbatch_sequences),
            schedule_text(choice.schedule, choice.virtual_stages) if choice.mesh.pipe > 1 else "-",
            remat_text(choice.remat),
            f"{one.estimate_bytes / GIB:.1f}",
            "-" if compiled is None else f"{compiled / GIB:.1f}",
            f"{(compiled or one.estimate_bytes) / plan.capacity_bytes:.0%}",
            f"{one.tokens_per_s_per_gpu:,.0f}",
            f"{one.tflops_per_gpu:,.0f} ({one.tflops_per_gpu / peak_tflops:.0%})",
        )
    return table


def verdict_lines(plan: Plan, rows: int) -> Iterator[str]:
    left = len(plan.candidates) - rows
    if left > 0:
        yield f"and {left:,} more that fit; --rows shows them, --json has all"
    yield "of capacity: XLA's bytes where it was compiled, else the estimate; speed predicted, causal attention counted"
    if plan.confirmed:
        yield f"The first {plan.confirmed} confirmed by compiling the real step"
    if plan.unconfirmed_because:
        yield f"Not confirmed: {plan.unconfirmed_because}"
    if plan.interrupted:
        yield "INTERRUPTED: the best so far, not of all"


def rejected_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("count", justify="right")
    table.add_column("of", no_wrap=True)
    table.add_column("because", overflow="fold")
    table.add_column("such as", overflow="fold")
    for line in plan.rejected:
        table.add_row(f"{line.count:,}", line.unit, Text(line.reason), Text(line.example))
    return table


def sweep_table(sweep: Sweep) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    with_days = any(row.days is not None for row in sweep.rows)
    ways = list(next((row.reduction_s for row in sweep.rows if row.reduction_s), {}))
    headings = ["GPUs", "tokens/s", "efficiency", "exposed", *(["days"] if with_days else []), *ways, "best"]
    for heading in headings:
        name = {PARAMETER_SERVER: "server"}.get(heading, heading)
        table.add_column(name, justify="left" if heading == "best" else "right", overflow="fold")
    for row in sweep.rows:
        if row.best is None:
            table.add_row(f"{row.gpus:,}", *["-"] * (len(headings) - 2), "nothing fits")
            continue
        table.add_row(
            f"{row.gpus:,}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.efficiency:.0%}",
            f"{row.best.exposed_communication_share:.1%}",
            *([f"{row.days:,.1f}"] if with_days else []),
            *(f"{row.reduction_s[way]:.3g}" for way in ways),
            Text(str(row.best.choice)),
        )
    return table


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    yield (
        "efficiency: tokens/s/GPU beside the fewest that fit; exposed: share of the step that waits for communication; the "
        "seconds of one float32 all-reduce of the gradients, alone, by ring, tree, hierarchy, and a parameter server (analytic)"
    )
    if sweep.interrupted:
        yield "INTERRUPTED: the last number of GPUs was not looked at to its end, and larger ones not at all"
    if sweep.stops_paying is not None:
        yield f"More GPUs stop paying in time at {sweep.stops_paying:,}: {sweep.because}"
    elif not sweep.interrupted and sum(row.best is not None for row in sweep.rows) > 1:
        yield "More GPUs pay in time as far as this goes"
