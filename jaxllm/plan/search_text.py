"""A plan as terminal text, as `jaxllm plan` prints it, and as HTML for a notebook."""

import textwrap
from collections.abc import Iterator, Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxllm.config.named import title_of
from jaxllm.config.remat_policy import remat_text
from jaxllm.cost_model.hardware import FIT_SHARE
from jaxllm.cost_model.hosts import hosts_text
from jaxllm.cost_model.replicas import exchange_lines
from jaxllm.display import preformatted, readable, table
from jaxllm.plan.fastest_remat import MESH
from jaxllm.plan.plan_result import Candidate, Plan, beside_lines, certainty_lines
from jaxllm.plan.quote import Quote
from jaxllm.plan.space import STATE_WORDS, Choice, schedule_text
from jaxllm.plan.sweep import Sweep, SweepRow
from jaxllm.terminal import terminal_table

GIB = 2**30
WIDTH = 120
"""Columns that the full table of candidates needs. A narrower terminal gets NARROW_HEADINGS, which need 80."""
HEADINGS = (
    *("#", "pipe", "data", "context", "tensor", "ZeRO", "micro-\nbatch", "schedule", "remat"),
    *("estimate\nGiB", "XLA\nGiB", "of\ncapacity", "tokens/s\n/GPU", "TFLOP/s\n/GPU (MFU)"),
)
NARROW_HEADINGS = (
    *("pipe", "data", "con-\ntext", "ten-\nsor", "Ze-\nRO", "mi-\ncro-\nbatch", "schedule", "remat"),
    *("GiB", "of\ncapa-\ncity", "tokens/s\n/GPU", "TFLOP/s\n(MFU)"),
)
WORDS = ("schedule", "remat")
"""Columns that are not numbers."""
REMAT_WIDTH = 20
NOTEBOOK_ROWS = 10
NARROW_SWEEP_HEADINGS = {"efficiency": "effi-\nciency", "exposed": "ex-\nposed", "hierarchical": "hier-\narchy"}


def render(
    plan: Plan,
    rows: int = 10,
    quote: Quote | None = None,
    sweep: Sweep | None = None,
    objective: str | None = None,
    width: int = WIDTH,
) -> Group:
    """The plan as terminal text of `width` columns, with `rows` candidates.

    Args:
      objective: the objective in words, as a line below the heading.
      width: 80 or more.
    """
    narrow = width < WIDTH
    parts = [*heading_lines(plan), *([] if objective is None else [f"  {objective}"]), ""]
    headings, best = NARROW_HEADINGS if narrow else HEADINGS, enumerate(plan.candidates[:rows], 1)
    shown = [narrow_cells(plan, one) if narrow else cells(plan, number, one) for number, one in best]
    parts += [terminal_table(shown, headings, right=set(headings) - set(WORDS), gap=1, pad_edge=False)]
    parts += verdict_lines(plan, rows, narrow=narrow)
    if quote is not None:
        parts += ["", *quote.lines()]
    if sweep is not None:
        parts += ["\nMore GPUs, the same global batch", sweep_table(sweep, narrow), *sweep_lines(sweep)]
    if plan.rejected:
        searched = plan.meshes - sum(line.count for line in plan.rejected if line.unit == MESH)
        of = f"{plan.meshes:,} meshes, and of the {plan.configurations:,} configurations of the {searched:,} that divide"
        left_out = [(f"{line.count:,}", line.unit, line.reason, line.example) for line in plan.rejected]
        headings = ("count", "of", "because", "such as")
        parts += [f"\nLeft out of {of}", terminal_table(left_out, headings, right=("count",), whole=("of",))]
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))


def as_html(plan: Plan) -> str:
    """The plan as HTML for a notebook: the best candidates, and the rejected ones."""
    rows = [cells(plan, number, one) for number, one in enumerate(plan.candidates[:NOTEBOOK_ROWS], 1)]
    below = "\n".join(verdict_lines(plan, NOTEBOOK_ROWS, in_terminal=False))
    left_out = [(line.reason, line.example, f"{line.count:,}", line.unit) for line in plan.rejected]
    return (
        table(rows, HEADINGS, left=0, caption="\n".join(heading_lines(plan)))
        + preformatted(below)
        + (table(left_out, ("left out because", "such as", "count", "of"), left=2) if left_out else "")
    )


def heading_lines(plan: Plan) -> Iterator[str]:
    train = plan.config.train
    yield (
        f"{title_of(plan.config.model)} on {plan.gpus} x {plan.gpu.name}, "
        f"{hosts_text(plan.gpus, plan.gpus_per_host)} ({plan.hosts_because})"
    )
    yield (
        f"  {plan.config.largest_phase.sequences:,} sequences of {train.sequence_length:,} tokens a step"
        f"{', the largest batch' if plan.config.has_phases else ''}; a step may take {readable(plan.capacity_bytes)}, its "
        f"estimate {FIT_SHARE:.0%} of that"
    )
    if (replicas := plan.config.parallel.replica) > 1:
        yield f"  in {replicas:,} replicas (islands), each with the meshes below, and its share of the sequences"


def cells(plan: Plan, number: int, one: Candidate) -> list[str]:
    """Cells of one candidate, under HEADINGS."""
    choice, compiled = one.choice, one.compiled_bytes
    peak_tflops = plan.gpu.peak_flops(plan.config.model.compute_dtype) / 1e12
    return [
        str(number),
        *(str(size) for size in (choice.mesh.pipe, choice.mesh.data, choice.mesh.context, choice.mesh.tensor)),
        str(choice.zero) if choice.expert == 1 else f"{choice.zero} e{choice.expert}",
        str(choice.microbatch_sequences),
        schedule_text(choice.schedule, choice.virtual_stages) if choice.mesh.pipe > 1 else "-",
        remat_cell(choice),
        f"{one.estimate_bytes / GIB:.1f}",
        "-" if compiled is None else f"{compiled / GIB:.1f}",
        f"{(compiled or one.estimate_bytes) / plan.capacity_bytes:.0%}",
        f"{one.tokens_per_s_per_gpu:,.0f}",
        f"{one.time.tflops_per_gpu:,.0f} ({one.time.tflops_per_gpu / peak_tflops:.0%})",
    ]


def remat_cell(choice: Choice) -> str:
    """What is kept or recomputed, and what waits on the host, in lines of REMAT_WIDTH columns."""
    state = "" if choice.offload_state == "none" else f"; host {STATE_WORDS[choice.offload_state]}"
    parts = f"{remat_text(choice.remat)}{state}".split("; ")
    return "\n".join(line for part in parts for line in textwrap.wrap(part, REMAT_WIDTH))


def narrow_cells(plan: Plan, one: Candidate) -> list[str]:
    """Cells of one candidate, under NARROW_HEADINGS: XLA's bytes if it was compiled, else the estimate, marked ~."""
    _, *where, schedule, remat, estimate, xla, share, speed, flops = cells(plan, 0, one)
    schedule = schedule.replace("interleaved", "inter-\nleaved")
    return [*where, schedule, remat, f"~{estimate}" if one.compiled_bytes is None else xla, share, speed, flops]


def verdict_lines(plan: Plan, rows: int, *, narrow: bool = False, in_terminal: bool = True) -> Iterator[str]:
    left = len(plan.candidates) - rows
    if left > 0:
        yield f"and {left:,} more that fit; " + ("--rows shows them, --json has all" if in_terminal else "candidates has all")
    if narrow:
        yield "GiB: XLA's where it was compiled, else the estimate (~)"
    yield "of capacity: XLA's bytes where it was compiled, else the estimate; speed predicted, causal attention counted"
    if any(isinstance(one.choice.remat, Mapping) for one in plan.candidates[:rows]):
        yield (
            "remat: of keep and recompute the shorter list is shown, and what no list names is the other; q k v query, key and "
            "value, attn and out the two outputs of attention"
        )
    if any(one.choice.expert > 1 for one in plan.candidates[:rows]):
        dropped = "" if plan.config.parallel.expert_buffer is None else ", and rows beyond parallel.expert_buffer are dropped"
        yield f"ZeRO 3 eN: parallel.expert=N, tokens travel to the ranks that have their experts{dropped}"
    yield from certainty_lines(plan)
    yield from beside_lines(plan)
    for best in plan.candidates[:1]:
        yield from exchange_lines(best.config, best.predicted.between_replicas_s)
    if plan.confirmed:
        unknown = sum(one.scheduled_transfers_s is None for one in plan.candidates[: plan.confirmed])
        but = f", but {unknown} with predicted ones (a loop's trip count is not known)" if unknown else ""
        yield (
            f"The first {plan.confirmed} confirmed by compiling the real step; their speed is with the transfers that show in "
            f"XLA's schedule{but}"
        )
    if plan.unconfirmed_because:
        yield f"Not confirmed: {plan.unconfirmed_because}"
    if plan.interrupted:
        yield "INTERRUPTED: the best so far, not of all"


def sweep_table(sweep: Sweep, narrow: bool = False) -> Table:
    with_days = any(row.days is not None for row in sweep.rows)
    ways = list(next((row.reduction_s for row in sweep.rows if row.reduction_s), {}))
    headings = ["GPUs", "tokens/s", "efficiency", "exposed", *(["days"] if with_days else []), *ways, "best"]
    names = [NARROW_SWEEP_HEADINGS.get(heading, heading) if narrow else heading for heading in headings]

    def figures(row: SweepRow) -> Iterator[str]:
        yield f"{row.gpus:,}"
        if row.best is None:
            yield from [*["-"] * (len(headings) - 2), "nothing fits"]
            return
        yield from (f"{row.tokens_per_s:,.0f}", f"{row.efficiency:.0%}", f"{row.best.time.exposed_communication_share:.1%}")
        yield from [f"{row.days:,.1f}"] if with_days else []
        yield from (f"{row.reduction_s[way]:.3g}" for way in ways)
        yield str(row.best.choice)

    return terminal_table([list(figures(row)) for row in sweep.rows], names, right=names[:-1], gap=1, pad_edge=False)


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    yield (
        "efficiency: tokens/s/GPU beside the fewest that fit; exposed: share of the step that waits for communication; the "
        "seconds of one float32 all-reduce of the gradients, alone, by ring, tree and hierarchy (analytic); each row is "
        "the best by prediction, and no figure is of XLA's schedule"
    )
    if sweep.interrupted:
        yield "INTERRUPTED: the last number of GPUs was not looked at to its end, and larger ones not at all"
    if sweep.stops_paying is not None:
        yield f"More GPUs stop paying in time at {sweep.stops_paying:,}: {sweep.because}"
    elif not sweep.interrupted and sum(row.best is not None for row in sweep.rows) > 1:
        yield "More GPUs pay in time as far as this goes"
