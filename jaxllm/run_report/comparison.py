"""`jaxllm report RUN RUN ...`: runs side by side, and which of them reached a loss first, as text and as an HTML page.

comparison = compare(["runs/small-batch", "runs/large-batch"])
print("\\n".join(comparison.lines()))
write(comparison_page(comparison), "comparison.html")

Everything comes from metrics.jsonl and config.yaml of each run (history.py). No JAX.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.run_report.history import History, finite, positive, read_run
from jaxllm.run_report.page import USUAL, document, grid, paragraphs
from jaxllm.run_report.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Curve, line_chart, number, spread

LETTERS = "ABCDEFGHIJKL"
"""Labels of the runs. With more runs no chart could be read."""
WIDEST = 20
"""Characters of a cell on a terminal; the page has all of them."""
_TEXT = ("data.tokenizer", "data.source", "data.paths", "data.mixture", "data.chat_template")
"""Keys of the text and its tokens: if they differ, so may what a nat per token means."""
_CONTEXT = ("train.sequence_length", "data.packing", "data.mask_documents")


@dataclass(frozen=True)
class ComparedRun:
    letter: str
    name: str
    history: History
    reached_at: int | None
    """Index of the first metrics line with a smoothed loss at or below the common loss."""

    @cached_property
    def numbers(self) -> dict[str, float | None]:
        """What the table shows: History.numbers, and more."""
        history, at = self.history, self.reached_at
        return {
            **history.numbers,
            "hours": finite(history.hours[-1]),
            "least_loss": _least(history.smoothed_loss),
            "least_eval_loss": _least(history.evaluated()[1]),
            "learning_rate": history.config.optimizer.learning_rate,
            "steps_to_common_loss": None if at is None else int(history.steps[at]),
            "tokens_to_common_loss": None if at is None else int(history.tokens[at]),
            "hours_to_common_loss": None if at is None else finite(history.hours[at]),
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """section.key -> value, of the config as it was written, with defaults for keys that an older version did not have."""
        known = self.history.config.model_dump(mode="json")
        # The history's config has a placeholder there.
        known["data"]["tokenizer"] = None
        return {
            f"{section}.{key}": value
            for source in (known, self.history.written)
            for section, keys in source.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }


@dataclass(frozen=True)
class Comparison:
    """The complete result of `jaxllm report` with several runs."""

    runs: tuple[ComparedRun, ...]
    common_loss: float | None
    """Smoothed training loss; None: the runs have none in common, or their losses are not comparable."""

    @cached_property
    def differing(self) -> dict[str, list[Any]]:
        """section.key -> its value in each run, for keys whose values are not all equal."""
        # The directories always differ.
        keys = dict.fromkeys(key for run in self.runs for key in run.settings if key != "run.dir")
        values = {key: [run.settings.get(key) for run in self.runs] for key in keys}
        return {key: found for key, found in values.items() if any(one != found[0] for one in found)}

    def first(self, key: str) -> list[list[ComparedRun]]:
        """The runs with a number, smallest first; those with the same number together."""
        known = [(value, run) for run in self.runs if (value := run.numbers[key]) is not None]
        by_value = itertools.groupby(sorted(known, key=lambda one: one[0]), lambda one: one[0])
        return [[run for _, run in equal] for _, equal in by_value]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; null for unknown values."""
        orders = {name: self.first(f"{name}_to_common_loss") for name in ("tokens", "hours")}
        return {
            "runs": [
                {
                    **{"run": str(run.history.folder), "letter": run.letter, "name": run.name},
                    **run.numbers,
                    "config": {key: values[number] for key, values in self.differing.items()},
                }
                for number, run in enumerate(self.runs)
            ],
            "common_loss": self.common_loss,
            **{f"first_in_{name}": [run.name for run in order[0]] if order else [] for name, order in orders.items()},
            "warnings": list(self.warnings()),
        }

    # --------------------------------------------------------------------------------------------------------------- words

    def sentences(self) -> Iterator[str]:
        """Which run reached the common loss first, and what a reader must know before he compares."""
        yield from self.warnings()
        reached = [run for run in self.runs if run.reached_at is not None]
        if self.common_loss is None or not reached:
            return
        who = "Every run" if len(reached) == len(self.runs) else f"{len(reached)} of {len(self.runs)} runs"
        found = f"{who} reached a training loss of {self.common_loss:.4f} (smoothed): in tokens {self._order('tokens', number)}"
        if timeless := [run.name for run in reached if run.numbers["hours_to_common_loss"] is None]:
            yield f"{found}. In hours it is not known, because lines of {', '.join(timeless)} have no times."
        else:
            yield f"{found}; in hours {self._order('hours', '{:,.4g} h'.format)}."

    def _order(self, name: str, shown: Callable[[float], str]) -> str:
        key = f"{name}_to_common_loss"
        groups = [(" and ".join(run.name for run in runs), _cell(runs[0].numbers[key], shown)) for runs in self.first(key)]
        (first, least), later = groups[0], ", ".join(f"{names} ({value})" for names, value in groups[1:])
        return f"{first} first ({least}){f', then {later}' if later else ''}"

    def warnings(self) -> Iterator[str]:
        for keys, words in (
            (_TEXT, "The losses are not comparable if the texts or tokenizers are not the same, and the runs differ in {}."),
            (("data.held_out_fraction",), "The held-out losses are of different texts: the runs differ in {}."),
            (_CONTEXT, "Tokens do not see the same context, which changes the loss: the runs differ in {}."),
        ):
            if found := [key for key in keys if key in self.differing]:
                yield words.format(" and ".join(found))

    def table(self) -> list[tuple[str, list[str]]]:
        """Rows of (heading, a text for each run)."""
        shown: list[tuple[str, str, Callable[[float], str]]] = [
            ("tokens", "tokens", "{:,}".format),
            ("steps", "steps", "{:,}".format),
            ("hours", "hours", "{:,.4g}".format),
            ("loss at the end", "loss", "{:.4f}".format),
            ("lowest loss", "least_loss", "{:.4f}".format),
            ("held-out loss at the end", "eval_loss", "{:.4f}".format),
            ("lowest held-out loss", "least_eval_loss", "{:.4f}".format),
            ("devices", "devices", "{:,}".format),
            ("batch, tokens", "batch_tokens", "{:,.0f}".format),
            ("learning rate", "learning_rate", "{:g}".format),
            ("tokens/s/device", "tokens_per_s_per_device", number),
            ("noise scale, tokens", "noise_scale_tokens", number),
            ("restarts", "restarts", "{:,}".format),
        ]
        if self.common_loss is not None:
            ways = (("steps", "{:,}".format), ("tokens", "{:,}".format), ("hours", "{:,.4g}".format))
            shown += [(f"{name} to {self.common_loss:.4f}", f"{name}_to_common_loss", way) for name, way in ways]
        rows = [(heading, [_cell(run.numbers[key], way) for run in self.runs]) for heading, key, way in shown]
        rows += [
            (key, [value if isinstance(value, str) else json.dumps(value) for value in values])
            for key, values in self.differing.items()
        ]
        return [row for row in rows if any(cell != "-" for cell in row[1])]

    def lines(self) -> Iterator[str]:
        """The comparison as terminal text."""
        yield from self.sentences()
        yield ""
        yield from (f"{run.letter}  {run.name}" for run in self.runs)
        yield ""
        rows = [("", [run.letter for run in self.runs]), *self.table()]
        rows = [(name, [cell if len(cell) <= WIDEST else f"{cell[: WIDEST - 1]}…" for cell in cells]) for name, cells in rows]
        columns = zip(*(cells for _, cells in rows), strict=True)
        left, widths = max(len(name) for name, _ in rows), [max(map(len, column)) for column in columns]
        for name, cells in rows:
            yield f"{name:<{left}}{''.join(f'  {cell:>{width}}' for cell, width in zip(cells, widths, strict=True))}"


def compare(folders: Sequence[str | Path], *, loss: float | None = None) -> Comparison:
    """Reads run directories and compares them.

    Args:
      loss: smoothed training loss, in nats, at which runs are compared. Default: the lowest that every run reached, if the
        losses are comparable.

    Raises:
      ConfigError: a folder is not a run directory or is given twice, there are too many, or none of them reached the loss.
    """
    if len(folders) > len(LETTERS):
        raise ConfigError(f"{len(folders)} runs are too many to tell apart in a chart: give at most {len(LETTERS)}.")
    places: dict[Path, str | Path] = {}
    for folder in folders:
        if (before := places.setdefault(Path(folder).resolve(), folder)) is not folder:
            raise ConfigError(f"{before} and {folder} are the same run: give each run once.")
    histories = [read_run(folder) for folder in folders]
    names = [place.name for place in places]
    names = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    runs = [ComparedRun(*run, None) for run in zip(LETTERS, names, histories, strict=False)]
    least = [run.numbers["least_loss"] for run in runs]
    known = [value for value in least if value is not None]
    if loss is not None and not any(value <= loss for value in known):
        lowest = f"the least smoothed loss is {min(known):.4f}; give that or more" if known else "no step has a finite loss"
        raise ConfigError(f"--loss={loss:g} was reached by none of these runs: {lowest}.")
    comparable = not any(key in Comparison(tuple(runs), None).differing for key in _TEXT)
    if loss is None and comparable and len(known) == len(runs):
        loss = max(known)
    return Comparison(tuple(ComparedRun(run.letter, run.name, run.history, run.history.reached(loss)) for run in runs), loss)


def _least(values: np.ndarray) -> float | None:
    return float(np.nanmin(values)) if np.isfinite(values).any() else None


def _cell(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


# --------------------------------------------------------------------------------------------------------------- the page

FILE_NAME = "comparison.html"
"""Default name, inside the first run's directory."""
CHART_WIDTH = 420
"""So narrow that a telephone shows its text about as large as that of the page."""
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
DASHES = ("", "7 3", "2 2", "9 2 2 2")
"""Twelve runs have different pairs of colour and dash. A black and white print shows dashes and letters."""
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
        # Attributes of a History.
        for name in ("tokens", "steps", "hours"):
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
        f'<tr><th scope="row">{_breakable(name)}</th>{"".join(map(_html_cell, cells[here]))}</tr>'
        for name, cells in comparison.table()
    )
    return f'<div class="wide"><table class="runs"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _html_cell(text: str) -> str:
    return f"<td{LONG_CLASS if len(text) > LONG else ''}>{escape(text)}</td>"


def _breakable(key: str) -> str:
    """The name of a key, which may be broken at its dots and underscores."""
    return "".join(f"{escape(part)}<wbr>" if part in "._" else escape(part) for part in re.split("([._])", key))
