"""Figures of schedules: the timeline of a pipeline, drawn from the table that is executed, and the zigzag order
(parallel/zigzag.py).

matplotlib is optional (extra `notebook`) and is imported only when a figure is drawn.
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.display import readable
from jaxllm.parallel.zigzag import blocks, chunks
from jaxllm.pipeline_schedule import Schedule, idle_share

ENDINGS = (".png", ".svg")
BLUE, ORANGE, GREEN, PURPLE = _HUES = ((0.12, 0.37, 0.65), (0.83, 0.42, 0.05), (0.16, 0.50, 0.28), (0.52, 0.25, 0.60))
"""Hues of chunk 0, 1, ... (then from the first again); forward is a lighter tint."""
_IDLE = (0.90, 0.90, 0.90)
_LABEL_INCHES = 0.17
"""Smallest width of one forward that has room for its microbatch's number."""


def new_figure(width: float, height: float, dpi: int = 150, title: str = "", title_size: int = 10) -> Any:
    """A matplotlib Figure, with its size in inches, that has no window.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("Drawing needs matplotlib: pip install 'jaxllm[notebook]'.") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=title_size, x=0.01, ha="left", parse_math=False)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Writes a figure to a .png or .svg file.

    Raises:
      ConfigError: the file name ends in something else, or the file cannot be written.
    """
    if Path(path).suffix not in ENDINGS:
        raise ConfigError(f"{path} is not the name of a figure: let it end in {' or '.join(ENDINGS)}.")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another file.") from None


def style_axes(axes: Any, y_label: str) -> None:
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def schedule_figure(schedule: Schedule, *, slot_bytes: int | None = None, backward_cost: float = 2.0) -> Any:
    """Timeline of every stage, with its residual slots in use over time and their maximum.

    Args:
      slot_bytes: residuals of one chunk for one microbatch; None: the figure shows numbers of slots only.
      backward_cost: drawn length of a backward, in forwards. All stages wait for the slowest, so a tick in which any stage runs
        backward has this length everywhere.

    Returns:
      A Figure, as new_figure; a notebook shows it.
    """
    edges = _tick_edges(schedule, backward_cost)
    P = schedule.stages
    # At least the width of a page, at most that of a screen.
    width = float(np.clip(0.24 * edges[-1], 7, 20))
    rows = 0.42 * P + 0.3
    below = 2.1 if schedule.has_backward else 0
    side = 2.3 if schedule.has_backward else 1.2
    figure = new_figure(width + side, rows + below + 1.5, title=_title(schedule), title_size=11)
    grid = figure.add_gridspec(
        2 if below else 1, 2, width_ratios=(width, side), height_ratios=(rows, below) if below else (rows,)
    )
    timeline = figure.add_subplot(grid[0, 0])
    _draw_units(timeline, schedule, edges, label=width / edges[-1] > _LABEL_INCHES)
    axis_of_time = timeline
    if below:
        axis_of_time = figure.add_subplot(grid[1, 0], sharex=timeline)
        timeline.tick_params(labelbottom=False)
        _draw_live(axis_of_time, schedule, edges)
        _draw_most(figure.add_subplot(grid[0, 1], sharey=timeline), schedule, slot_bytes)
    _draw_legend(figure.add_subplot(grid[-1, 1]), schedule)
    _label_ticks(axis_of_time, edges, width)
    scale = f", drawn as long as its slowest stage: forward 1, backward {backward_cost:g}" if below else ""
    axis_of_time.set_xlabel(f"tick{scale}", fontsize=9)
    return figure


def _tick_edges(schedule: Schedule, backward_cost: float) -> np.ndarray:
    """float [ticks + 1]: start of each tick, in forwards; the last entry is the end."""
    forward, backward = (units.valid.any(axis=1) for units in (schedule.forward, schedule.backward))
    # In an evaluation, the tick that computes only the last loss has a width too.
    lengths = np.maximum(forward + backward_cost * backward, 0.5)
    return np.concatenate([[0.0], lengths.cumsum()])


def _title(schedule: Schedule) -> str:
    P, V, M = schedule.stages, schedule.virtual_stages, schedule.microbatches
    chunks = f" × {V} virtual" if V > 1 else ""
    slots = f", {schedule.slots} residual slots on each stage" if schedule.has_backward else ", forward only"
    return (
        f"{schedule.name}: {P} stages{chunks}, {M} microbatches\n"
        f"{schedule.ticks} ticks, {idle_share(P, M, V):.1%} of the step idle{slots}"
    )


def _shade(chunk: int, forward: bool) -> tuple[float, float, float]:
    hue = np.array(_HUES[chunk % len(_HUES)])
    # The hues repeat, lighter each time.
    hue = hue + (1 - hue) * 0.3 * (chunk // len(_HUES))
    red, green, blue = hue + (1 - hue) * 0.62 if forward else hue
    return red, green, blue


def _draw_units(axes: Any, schedule: Schedule, edges: np.ndarray, label: bool) -> None:
    """One row for each stage, and below them one for the loss, which all stages compute together."""
    P = schedule.stages
    line = {"edgecolor": "white", "linewidth": 0.8} if label else {"linewidth": 0}
    axes.set(xlim=(0, edges[-1]), ylim=(P + 0.3, -0.5))
    axes.set_yticks([*range(P), P - 0.1], [*(f"stage {i}" for i in range(P)), "loss"], fontsize=9)
    axes.tick_params(length=0)
    # The labels have the colours of the lines and bars beside them.
    for i, stage in enumerate(axes.get_yticklabels()[:P]):
        stage.set(color=_stage_color(i, P), fontweight="bold")
    axes.spines[:].set_visible(False)
    for i in range(P):
        axes.broken_barh([(0, edges[-1])], (i - 0.42, 0.84), facecolor=_IDLE, linewidth=0)
    forward_length = np.where(schedule.forward.valid.any(axis=1), 1.0, 0.0)
    begin = {True: edges[:-1], False: edges[:-1] + forward_length}
    length = {True: forward_length, False: edges[1:] - begin[False]}
    for is_forward, units in ((True, schedule.forward), (False, schedule.backward)):
        for i in range(P):
            for c in range(schedule.virtual_stages):
                ticks = np.flatnonzero(units.valid[:, i] & (units.chunk[:, i] == c))
                spans = [(begin[is_forward][t], length[is_forward][t]) for t in ticks]
                axes.broken_barh(spans, (i - 0.42, 0.84), facecolor=_shade(c, is_forward), **line)
                if label:
                    _write(axes, spans, i, units.microbatch[ticks, i], "black" if is_forward else "white")
    heads = np.flatnonzero(schedule.head_mb >= 0)
    spans = [(edges[t], edges[t + 1] - edges[t]) for t in heads]
    axes.broken_barh(spans, (P - 0.32, 0.44), facecolor=(0.25, 0.25, 0.25), **line)
    if label:
        _write(axes, spans, P - 0.1, schedule.head_mb[heads], "white")


def _write(axes: Any, spans: list[tuple[float, float]], y: float, microbatches: np.ndarray, color: str) -> None:
    for (start, length), m in zip(spans, microbatches.tolist(), strict=True):
        axes.text(start + length / 2, y, m, ha="center", va="center", fontsize=8 if m < 100 else 6, color=color)


def _stage_color(stage: int, stages: int) -> tuple[float, ...]:
    """From black for the first stage, which holds most residuals, to a light red."""
    share = stage / max(stages - 1, 1)
    return (0.10 + 0.80 * share, 0.10 + 0.38 * share, 0.10 + 0.35 * share)


def _draw_live(axes: Any, schedule: Schedule, edges: np.ndarray) -> None:
    for i in range(schedule.stages):
        axes.stairs(schedule.live[:, i], edges, baseline=None, color=_stage_color(i, schedule.stages), linewidth=1.6)
    axes.axhline(schedule.slots, color="black", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(0, schedule.slots * 1.15)
    axes.yaxis.get_major_locator().set_params(integer=True)
    part = f"\n(each 1/{schedule.virtual_stages} of a stage)" if schedule.virtual_stages > 1 else ""
    style_axes(axes, f"slots in use{part}")


def _draw_most(axes: Any, schedule: Schedule, slot_bytes: int | None) -> None:
    most = schedule.live.max(axis=0)
    for i, slots in enumerate(most.tolist()):
        axes.barh(i, schedule.slots, height=0.62, facecolor="none", edgecolor="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.barh(i, slots, height=0.62, color=_stage_color(i, schedule.stages))
        text = f"{slots}" + ("" if slot_bytes is None else f" = {readable(slots * slot_bytes)}")
        inside = slots > 0.6 * schedule.slots
        place, color = (0, "white") if inside else (slots, "black")
        axes.text(place + 0.03 * schedule.slots, i, text, ha="left", va="center", fontsize=8, color=color)
    axes.set_title("most slots in use", fontsize=9)
    axes.tick_params(labelleft=False, length=0)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


def _draw_legend(axes: Any, schedule: Schedule) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    V = schedule.virtual_stages
    entries = []
    for c in range(V):
        chunk = f", chunk {c}" if V > 1 else ""
        entries.append(Patch(color=_shade(c, True), label=f"forward{chunk}"))
        if schedule.has_backward:
            entries.append(Patch(color=_shade(c, False), label=f"backward{chunk}"))
    entries.append(Patch(color=_IDLE, label="idle"))
    entries.append(Patch(color=(0.25, 0.25, 0.25), label="loss, on all stages"))
    if schedule.has_backward:
        entries.append(Line2D([], [], color="black", linewidth=1, linestyle=(0, (4, 3)), label="slots each stage has"))
    axes.axis("off")
    axes.legend(handles=entries, loc="upper left", fontsize=8, frameon=False, borderaxespad=0)


def _label_ticks(axes: Any, edges: np.ndarray, width: float) -> None:
    """Labels ticks in their middle, as many as there is room for."""
    middles = (edges[:-1] + edges[1:]) / 2
    room = 0.22 * edges[-1] / width
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if n * np.diff(edges).min() >= room or n == 10**6)
    axes.set_xticks(middles[::every], [str(t) for t in range(0, len(middles), every)], fontsize=8)


def zigzag_picture(c: int, path: str | Path) -> None:
    """Draws the square of query chunks x key chunks: each block in its rank's colour, with the ring step that computes it."""
    side = 0.45 * 2 * c + 2.5
    figure = new_figure(side, side, dpi=100)
    axes = figure.add_subplot(aspect="equal", title=f"Zigzag, context = {c}: colour is the rank, number the ring step")
    axes.set(xlim=(0, 2 * c), ylim=(2 * c, 0), xlabel="key chunk", ylabel="query chunk (rank that holds it)")
    centres = [chunk + 0.5 for chunk in range(2 * c)]
    holder = {chunk: rank for rank in range(c) for chunk in chunks(rank, c)}
    axes.set_xticks(centres, [str(chunk) for chunk in range(2 * c)])
    axes.set_yticks(centres, [f"{chunk} ({holder[chunk]})" for chunk in range(2 * c)])
    for rank, steps in enumerate(blocks(c)):
        for step, products in enumerate(steps):
            for q, k in products:
                corners = [(k, q), (k + 1, q + 1), (k, q + 1)] if q == k else [(k, q), (k + 1, q), (k + 1, q + 1), (k, q + 1)]
                axes.fill(*zip(*corners, strict=True), color=f"C{rank % 10}", alpha=0.6, linewidth=0)
                axes.text(k + (0.33 if q == k else 0.5), q + (0.67 if q == k else 0.5), step, ha="center", va="center")
    save(figure, path)
