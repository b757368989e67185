"""HTML page of `jaxllm report RUN RUN ...`: one file with its charts inside, which loads nothing from a server.

write(comparison_page(comparison), "comparison.html")
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import escape

import numpy as np

from jaxllm.run_report.comparison import ComparedRun, Comparison
from jaxllm.run_report.history import History, positive
from jaxllm.run_report.page import USUAL, document, grid, paragraphs
from jaxllm.run_report.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Curve, line_chart, spread

FILE_NAME = "comparison.html"
"""Default name, inside the first run's directory."""
CHART_WIDTH = 420
"""So narrow that a telephone shows its text about as large as that of the page."""
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
DASHES = ("", "7 3", "2 2", "9 2 2 2")
"""Twelve runs have different pairs of colour and dash. A black and white print shows dashes and letters."""
AXES = ("tokens", "steps", "hours")
"""Attributes of a History."""
_STYLE = """\
.grid { grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); }
svg .end { font-weight: 700; paint-order: stroke; stroke: Canvas; stroke-width: 4px; stroke-linejoin: round; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; }
.legend li { overflow-wrap: anywhere; } svg.key { width: 48px; height: 12px; margin-right: .5rem; }
table.runs { font-variant-numeric: tabular-nums; margin-top: 1.5rem; border-collapse: separate; border-spacing: 0; }
table.runs td, table.runs th { border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
table.runs td, thead th { text-align: right; max-width: 12rem; padding: .2rem 0 .2rem .8rem; }
table.runs td.long { overflow-wrap: anywhere; min-width: 6rem; }
tbody th { font-weight: normal; position: sticky; left: 0; background: Canvas; }
"""
LONG, LONG_CLASS = 16, ' class="long"'
"""Characters of a value, such as a path, from which on it may be broken anywhere."""
COLUMNS = 6
"""Runs of one table, which a printed page has room for."""
METHOD = (
    "Training losses are means over the last 2% of a run's steps. Hours are all from the first start to a step, except "
    "those between two starts. Runs are compared at the lowest training loss that all reached; --loss names another."
)


def comparison_page(comparison: Comparison) -> str:
    """The page as HTML text."""
    names = ", ".join(run.name for run in comparison.runs)
    parts = [
        f"<h1>{len(comparison.runs)} runs compared</h1>",
        *paragraphs(comparison.sentences()),
        _legend(comparison),
        grid(charts(comparison)),
        *(_table(comparison, first) for first in range(0, len(comparison.runs), COLUMNS)),
        f'<p class="small">{escape(METHOD)}</p>',
    ]
    return document(escape(names), parts, _STYLE)


def charts(comparison: Comparison) -> list[str]:
    """Losses over tokens, steps and hours; batch, noise scale and speed over tokens. Charts without a point are left out."""
    runs = list(enumerate(comparison.runs))
    found: list[str | None] = []
    losses: dict[str, Callable[[History, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
        "Training loss, smoothed": lambda history, over: (over, history.smoothed_loss),
        "Held-out loss": History.evaluated,
    }
    for title, curve in losses.items():
        for name in AXES:
            curves = [_styled(place, run, *curve(run.history, getattr(run.history, name))) for place, run in runs]
            found.append(_chart(f"{title} (nats per token)", curves, name))
    for title, key, is_log in (
        ("Batch (tokens of a step)", "batch_tokens", True),
        ("Gradient noise scale (tokens)", "noise_scale_tokens", True),
        ("Speed (tokens/s/device)", "tokens_per_s_per_device", False),
    ):
        curves = []
        for place, run in runs:
            values = run.history.batch_tokens if key == "batch_tokens" else positive(run.history.column(key))
            # A noise scale is measured at some steps only: its points are connected.
            there = np.isfinite(values) if key == "noise_scale_tokens" else np.full(len(values), True)
            curves.append(_styled(place, run, run.history.tokens[there], values[there]))
        found.append(_chart(title, curves, "tokens", is_log))
    return [chart for chart in found if chart is not None]


def _styled(place: int, run: ComparedRun, x: np.ndarray, y: np.ndarray) -> Curve:
    curve = spread(run.name, x, y, COLORS[place % len(COLORS)])
    return replace(curve, low=None, high=None, dash=DASHES[place % len(DASHES)], end_label=run.letter)


def _chart(title: str, curves: list[Curve], x_label: str, is_log: bool = False) -> str | None:
    if not any(np.isfinite(curve.y).any() for curve in curves):
        return None
    axes = {"x_label": x_label, "y_label": "", "y_log": is_log, "usual": USUAL}
    return line_chart(title, curves, **axes, width=CHART_WIDTH)


def _legend(comparison: Comparison) -> str:
    rows = []
    for place, run in enumerate(comparison.runs):
        color, dash = COLORS[place % len(COLORS)], DASHES[place % len(DASHES)]
        line = f'<path d="M0 6H48" stroke="{color}" stroke-width="2" stroke-dasharray="{dash or "none"}"/>'
        rows.append(f'<li><svg class="key" viewBox="0 0 48 12">{line}</svg><b>{run.letter}</b> {escape(run.name)}</li>')
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _table(comparison: Comparison, first: int) -> str:
    """The runs from `first` on, as many as fit."""
    here = slice(first, first + COLUMNS)
    head = "".join(f'<th scope="col">{run.letter}</th>' for run in comparison.runs[here])
    rows = "".join(
        f'<tr><th scope="row">{_breakable(name)}</th>{"".join(map(_cell, cells[here]))}</tr>'
        for name, cells in comparison.table()
    )
    return f'<div class="wide"><table class="runs"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<td{LONG_CLASS if len(text) > LONG else ''}>{escape(text)}</td>"


def _breakable(key: str) -> str:
    """The name of a key, which may be broken at its dots and underscores."""
    return "".join(f"{escape(part)}<wbr>" if part in "._" else escape(part) for part in re.split("([._])", key))
