"""Picture of the zigzag order (parallel/zigzag.py): which rank computes which block in which ring step."""

from __future__ import annotations

from pathlib import Path

from jaxllm.parallel.zigzag import blocks, chunks
from jaxllm.plots.schedule import new_figure, save


def picture(c: int, path: str | Path) -> None:
    """Draws the square of query chunks x key chunks: each block in its rank's colour, with the ring step that computes it.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    side = 0.45 * 2 * c + 2.5
    figure = new_figure(side, side)
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
