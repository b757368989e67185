"""Figures of device memory: its contents, over stages, settings or one step, beside the capacity; and that of a plan's
candidates against their speed. All are drawn from plain data.

    save(stage_figure(estimate.memory.stages, capacity_bytes=estimate.capacity_bytes), "stages.png")

Each *_figure returns a matplotlib Figure (a notebook shows it), as new_figure (schedule.py) makes it. GiB are 2^30 bytes.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.config.named import title_of as model_title
from jaxllm.config.remat_policy import remat_text
from jaxllm.config.types import zero_text
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import StageMemory, estimate_memory
from jaxllm.display import readable
from jaxllm.plan.advice import changed
from jaxllm.plan.estimate import Estimate, fold
from jaxllm.plots.schedule import BLUE, GREEN, ORANGE, PURPLE, new_figure, save, style_axes

MIB, GIB = 2**20, 2**30
OVER = ("sequence", "microbatch")
OPTIMIZER, PARAMETERS, GRADIENTS, ACTIVATIONS = GROUPS = ("optimizer", "parameters", "gradients", "activations")
_GROUP_OF = {GRADIENTS: "gradient", OPTIMIZER: "master|moment|optimizer", PARAMETERS: "weight|parameter|copy"}
"""Pattern in the names of a group's terms; the first match decides. Every other term exists only within a step: activations."""
HUES = {PARAMETERS: BLUE, GRADIENTS: GREEN, OPTIMIZER: PURPLE, ACTIVATIONS: ORANGE}
CAPACITY = {"color": (0.75, 0.1, 0.1), "linewidth": 1.4, "linestyle": (0, (5, 3))}
SMALL = 0.004
"""Share of the tallest bar. A term below it in every bar is too thin to see and is counted under `other`."""
MOST_STAGES = 16
"""Largest number of stages drawn one by one."""
MORE_BARS = 3
"""Maximum number of bars on each side of the config's own."""
FARTHEST = 3.0
"""Multiple of the capacity, or of the config's own bytes. A taller bar would leave the others no height."""


def group_of(term: str) -> str:
    """The group of a term by its name: parameters, gradients, optimizer (with moments and fp32 master weights) or
    activations."""
    return next((group for group, words in _GROUP_OF.items() if re.search(words, term)), ACTIVATIONS)


def grouped(terms_bytes: Mapping[str, int]) -> dict[str, int]:
    """Total bytes of each of GROUPS."""
    return {group: sum(size for term, size in terms_bytes.items() if group_of(term) == group) for group in GROUPS}


# ------------------------------------------------------------------------------------------------------------- stacked


def stage_figure(stages: Sequence[StageMemory], *, capacity_bytes: int | None = None, title: str = "") -> Any:
    """A stacked bar of terms for each stage, with the capacity as a line. Above MOST_STAGES stages, equal neighbours share one
    bar."""
    columns = fold(stages) if len(stages) > MOST_STAGES else [(f"stage {stage.stage}", stage) for stage in stages]
    labels = [label if len(stages) > 1 else "each device" for label, _ in columns]
    return _stacked(labels, fold_slivers([stage.terms_bytes for _, stage in columns]), "", capacity_bytes, title)


def over_figure(
    points: Sequence[tuple[int | str, Mapping[str, int]]],
    *,
    x_label: str,
    capacity_bytes: int | None = None,
    own: int | None = None,
    title: str = "",
) -> Any:
    """Parameters, gradients, optimizer and activations as a stacked bar for each value of a setting.

    Args:
      points: (value, term -> bytes of the fullest stage).
      own: the config's value, whose label is bold.
    """
    values = [value for value, _ in points]
    labels = [value if isinstance(value, str) else f"{value:,}" for value in values]
    place = values.index(own) if own in values else None
    return _stacked(labels, [grouped(terms) for _, terms in points], x_label, capacity_bytes, title, place)


def _stacked(
    labels: Sequence[str],
    columns: Sequence[Mapping[str, int]],
    x_label: str,
    capacity_bytes: int | None,
    title: str,
    own: int | None = None,
) -> Any:
    """Draws one stacked bar per column; `own` is the index of the config's column."""
    figure = new_figure(max(6.5, 1.0 * len(labels) + 4.2), 4.6, title=title)
    axes = figure.add_subplot()
    highest, unit, unit_name = y_limit(max(sum(column.values()) for column in columns), capacity_bytes)
    tops = draw_stacks(axes, columns, unit, 0.62)
    draw_capacity(axes, capacity_bytes, highest, unit)
    for i, top in enumerate(tops):
        label = axes.text(i, top + 0.008 * highest / unit, short_number(top), ha="center", va="bottom", fontsize=8, zorder=5)
        # A background, because the capacity line may cross the label.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85})
    axes.set(xlim=(-0.6, len(columns) - 0.4), ylim=(0, 1.12 * highest / unit))
    is_crowded = max(map(len, labels)) > 11 and len(labels) > 6
    axes.set_xticks(range(len(labels)), labels, fontsize=8, rotation=30 if is_crowded else 0)
    if own is not None:
        axes.get_xticklabels()[own].set_fontweight("bold")
    axes.set_xlabel(x_label, fontsize=9)
    style_axes(axes, f"{unit_name} on one device")
    legend_beside(axes, 1.01)
    return figure


def draw_stacks(axes: Any, columns: Sequence[Mapping[str, int]], unit: int, width: float) -> np.ndarray:
    """Draws one stacked bar of terms per column, at 0, 1, 2 ..., and returns the heights of the bars."""
    terms = list(dict.fromkeys(term for column in columns for term in column))
    # Memory that persists between steps is at the bottom.
    terms.sort(key=lambda term: GROUPS.index(group_of(term)))
    colors, bottom, x = colors_of(terms), np.zeros(len(columns)), np.arange(len(columns))
    for term in terms:
        heights = np.array([column.get(term, 0) for column in columns]) / unit
        axes.bar(x, heights, width, bottom, color=colors[term], label=term.replace("_", " "), edgecolor="white", linewidth=0.4)
        bottom += heights
    return bottom


def legend_beside(axes: Any, x: float) -> None:
    """A legend to the right of the axes, in the order of the bars, from top to bottom."""
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(x, 1), fontsize=8, frameon=False)


def fold_slivers(columns: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    tallest = max(sum(column.values()) for column in columns)
    seen = {term for column in columns for term, size in column.items() if size > SMALL * tallest}
    merged = []
    for column in columns:
        kept = {term: size for term, size in column.items() if term in seen}
        other = sum(size for term, size in column.items() if term not in seen)
        merged.append(kept | ({"other": other} if other else {}))
    return merged


def colors_of(terms: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """One hue per group, lighter from term to term."""
    colors = {}
    for group in GROUPS:
        members = [term for term in terms if group_of(term) == group]
        for i, term in enumerate(members):
            hue = np.array(HUES[group])
            colors[term] = tuple(hue + (1 - hue) * 0.8 * i / max(len(members), 2))
    return colors


def y_limit(most_bytes: int, capacity_bytes: int | None) -> tuple[int, int, str]:
    """(upper end of the y axis, its unit in bytes, the unit's name). The end is the capacity, unless the bars would be small
    beside it."""
    highest = max(most_bytes, capacity_bytes if capacity_bytes and capacity_bytes <= FARTHEST * most_bytes else 0)
    return (highest, GIB, "GiB") if highest >= GIB / 2 else (highest, MIB, "MiB")


def draw_capacity(axes: Any, capacity_bytes: int | None, highest: int, unit: int) -> None:
    if capacity_bytes is not None:
        label = f"capacity {readable(capacity_bytes)}"
        if capacity_bytes <= highest:
            axes.axhline(capacity_bytes / unit, label=label, **CAPACITY)
        else:
            axes.plot([], [], label=f"{label}, above this", **CAPACITY)


def short_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# ---------------------------------------------------------------------------------------------------- from an estimate


def estimate_picture(estimate: Estimate, path: str | Path, over: str | None = None) -> None:
    """Draws `jaxllm estimate --picture FILE`: the stages, or bytes against `over`, one of OVER.

    Raises:
      ConfigError: `over` is unknown, matplotlib is not installed, or the file cannot be written.
    """
    title, capacity = title_of(estimate), estimate.by_convention["jaxllm"].capacity_bytes
    memory = estimate.by_convention["jaxllm"].memory
    if over is None:
        figure = stage_figure(memory.stages, capacity_bytes=capacity, title=title)
    elif over in OVER:
        points, own = variations(estimate.config, over, capacity, estimate.gpu)
        x_label = {"sequence": "sequence length, tokens", "microbatch": "sequences of a microbatch"}[over]
        figure = over_figure(points, x_label=x_label, capacity_bytes=capacity, own=own, title=title)
    else:
        raise ConfigError(f"--over={over} is not one of the choices: use {', '.join((*OVER, 'step'))}.")
    save(figure, path)


def variations(
    config: Config, over: str, capacity_bytes: int | None = None, gpu: Gpu | None = None
) -> tuple[list[tuple[int, Mapping[str, int]]], int]:
    """([(value, term -> bytes of the fullest stage)], the config's own value) for powers of two around the config's own
    sequence length or microbatch: those that the rest of the config allows and that fit into one figure with its own."""
    own = config.train.sequence_length if over == "sequence" else config.microbatch_sequences
    key = "train.sequence_length" if over == "sequence" else "train.microbatch_sequences"
    powers = {2**power for power in range(24)} | {own}
    valid = [(value, new) for value in sorted(powers) if (new := changed(config, {key: value})) is not None]
    place = [value for value, _ in valid].index(own)
    near = valid[max(0, place - MORE_BARS) : place + MORE_BARS + 1]
    stages = [(value, estimate_memory(new, gpu).peak_stage) for value, new in near]
    highest = FARTHEST * max(capacity_bytes or 0, next(stage.total_bytes for value, stage in stages if value == own))
    return [(value, stage.terms_bytes) for value, stage in stages if stage.total_bytes <= highest], own


def title_of(estimate: Estimate) -> str:
    """Figure title: model, GPUs and mesh."""
    p, kind = estimate.config.parallel, estimate.gpu.name if estimate.gpu else "GPU"
    mesh = f"pipe {p.pipe}, data {p.data}, context {p.context}, tensor {p.tensor}, {zero_text(p.zero, p.expert)}"
    return f"{model_title(estimate.config.model, 'model')} on {estimate.devices} x {kind}: {mesh}"


# ---------------------------------------------------------------------------------------------------- a plan's candidates


def candidates_figure(candidates: Sequence[Mapping[str, Any]], *, capacity_bytes: int | None = None, title: str = "") -> Any:
    """Memory of every candidate against its speed, and the frontier: the candidates that none beats in both.

    Args:
      candidates: as `jaxllm plan --json` has them: estimate_bytes, compiled_bytes (or None), tokens_per_s_per_gpu, and
        pipe, data, context, tensor, zero, microbatch_sequences and remat, which label the fastest.
    """
    figure = new_figure(9.4, 5, title=title)
    axes = figure.add_subplot()
    memory = np.array([c["compiled_bytes"] or c["estimate_bytes"] for c in candidates], float) / GIB
    speed = np.array([c["tokens_per_s_per_gpu"] for c in candidates], float)
    compiled = np.array([bool(c["compiled_bytes"]) for c in candidates], bool)
    axes.scatter(memory[~compiled], speed[~compiled], 12, color=(0.6, 0.65, 0.72), linewidth=0, label="candidate, estimated")
    if compiled.any():
        axes.scatter(memory[compiled], speed[compiled], 34, color=HUES[PARAMETERS], label="candidate, compiled", zorder=3)
    best = frontier(list(zip(memory.tolist(), speed.tolist(), strict=True)))
    axes.step(memory[best], speed[best], where="post", color=HUES[ACTIVATIONS], linewidth=1.4, label="frontier")
    axes.scatter(memory[best], speed[best], 16, color=HUES[ACTIVATIONS], zorder=4)
    if capacity_bytes is not None:
        axes.axvline(capacity_bytes / GIB, label=f"capacity {capacity_bytes / GIB:.1f} GiB", **CAPACITY)
    axes.set_xlim(0, 1.06 * max(memory.max(), (capacity_bytes or 0) / GIB))
    axes.set_ylim(0, 1.14 * speed.max())
    fastest = int(np.argmax(speed))
    right = memory[fastest] > 0.5 * axes.get_xlim()[1]
    axes.annotate(
        f"fastest: {_name(candidates[fastest])}",
        (memory[fastest], speed[fastest]),
        xytext=(-6 if right else 6, 8),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
    )
    axes.set_xlabel("GiB on one device", fontsize=9)
    style_axes(axes, "tokens/s/GPU, predicted")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
    return figure


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (less is better, more is better) that no other point beats, the smallest first."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    before = accumulate((points[i][1] for i in order), max, initial=float("-inf"))
    return [i for i, best in zip(order, before, strict=False) if points[i][1] > best]


def _name(candidate: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{axis} {candidate[axis]}" for axis in ("pipe", "data", "context", "tensor") if candidate[axis] > 1)
    rest = f"ZeRO {candidate['zero']}, microbatch {candidate['microbatch_sequences']}, remat {remat_text(candidate['remat'])}"
    return f"{axes}; {rest}" if axes else rest
