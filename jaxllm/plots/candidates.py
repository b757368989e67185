"""Picture of a plan's candidates: memory of each against its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config.remat_policy import remat_text
from jaxllm.plots.memory import ACTIVATIONS, CAPACITY, GIB, HUES, PARAMETERS, style_axes
from jaxllm.plots.schedule import new_figure


def candidates_figure(candidates: Sequence[Mapping[str, Any]], *, capacity_bytes: int | None = None, title: str = "") -> Any:
    """Memory of every candidate against its speed, and the frontier: the candidates that none beats in both.

    Args:
      candidates: as `jaxllm plan --json` has them: estimate_bytes, compiled_bytes (or None), tokens_per_s_per_gpu, and
        pipe, data, context, tensor, zero, microbatch_sequences and remat, which label the fastest.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    figure = new_figure(9.4, 5, dpi=150)
    axes = figure.add_subplot()
    if title:
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
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
    best, found = float("-inf"), []
    for i in order:
        if points[i][1] > best:
            best = points[i][1]
            found.append(i)
    return found


def _name(candidate: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{axis} {candidate[axis]}" for axis in ("pipe", "data", "context", "tensor") if candidate[axis] > 1)
    rest = f"ZeRO {candidate['zero']}, microbatch {candidate['microbatch_sequences']}, remat {remat_text(candidate['remat'])}"
    return f"{axes}; {rest}" if axes else rest
