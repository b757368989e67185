"""HTML page of `jaxllm report RUN`: one file with its charts inside, which loads nothing from a server."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.plan.data_ranks import OverRanks, RankRow
from jaxllm.run_report import svg
from jaxllm.run_report.history import COMPILING, DATA, DOWN, EVALUATING, REDONE, SAVING, STARTING, TRAINING, History, positive
from jaxllm.run_report.summary import COMPILED, ESTIMATE, IN_USE, RunReport, duration
from jaxllm.run_report.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Curve, Mark, line_chart, number, spread
from jaxllm.untrusted import in_lines

FILE_NAME = "report.html"
"""Default name, inside the run directory."""
USUAL = 0.99
"""Share of a chart's points that its height is chosen for: a spike would flatten the rest."""
GIB = 2**30
MOST_MARKS = 60
"""Maximum number of marks of one kind in a chart; more would hide the curve."""
MOST_TICKS = 8
PALE_BLUE = "#8fb0d8"
_PART_COLORS = {
    **{TRAINING: BLUE, DATA: ORANGE, EVALUATING: GREEN, SAVING: PURPLE, COMPILING: "#5a7d2a", STARTING: "#7a6a4f"},
    **{REDONE: RED, DOWN: GREY},
}
CAVEAT = (
    "Method: a step of batch B makes the progress of 1 / (1 + N / B) steps without noise, where N is the noise scale measured "
    "at that time (McCandlish et al. 2018). The microbatch and the other axes stay constant, and each number of ranks uses the "
    "fastest accumulation. The law assumes a well chosen learning rate at every batch, and it counts training alone: no "
    "starts, saves or evaluations. In branching experiments batches far larger than the noise scale still paid "
    "(Merrill et al. 2025): the numbers are an order of magnitude, so try before you buy."
)
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1320px; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p { max-width: 90ch; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { font-family: inherit; }
.bar { max-width: 900px; } .wide { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
table.numbers td, table.numbers th { text-align: right; font-variant-numeric: tabular-nums; }
.own { font-weight: 600; } .no { opacity: .5; } .small { font-size: .9em; opacity: .8; }
STYLE@media print {
  :root { color-scheme: light; } body { font-size: 9pt; margin: 0; padding: 0; } .wide { overflow: visible; }
  .grid { grid-template-columns: 1fr 1fr; gap: .5rem; } .grid > div, tr, p { break-inside: avoid; }
}
</style>
</head>
<body>
"""


def write(text: str, path: str | Path) -> Path:
    """Writes a page and replaces an existing file.

    Raises:
      ConfigError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out={path} cannot be written ({error.strerror}): choose another file.") from None
    return path


def page(report: RunReport) -> str:
    """The page as HTML text."""
    name, times_s = escape(report.history.folder.resolve().name), report.history.times_s
    parts = [
        f"<h1>{name}</h1>",
        f'<div class="wide">{_table([], report.facts())}</div>',
        *paragraphs(report.notes()),
        grid([*training_charts(report.history), memory_chart(report)]),
    ]
    if times_s:
        colored = [(name, seconds, _PART_COLORS[name]) for name, seconds in times_s.items()]
        bar = svg.parts_bar("From the first start to the last step", colored)
        whole = sum(times_s.values()) or 1.0
        rows = [(name, duration(seconds), f"{seconds / whole:.1%}") for name, seconds in times_s.items() if seconds]
        table = _table(["", "time", "share"], rows)
        parts += ["<h2>Where the time went</h2>", f'<div class="bar">{bar}</div>', table]
    parts += ["<h2>Effect of more data ranks</h2>", *paragraphs(report.verdict())]
    if (over := report.over_ranks) is not None:
        parts += [grid(rank_charts(report, over)), f'<div class="wide">{_rank_table(report, over)}</div>']
        parts.append(f'<p class="small">{escape(CAVEAT)}</p>')
    return document(name, parts)


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """HTML text of a page of these parts, with more CSS; the title is HTML text too."""
    return in_lines(_HEAD.replace("STYLE", style).replace("TITLE", title) + "\n".join(parts) + "\n</body>\n</html>\n")


# --------------------------------------------------------------------------------------------------------------- pictures


def training_charts(history: History) -> list[str]:
    """Charts of loss, learning rate, batch and noise scale, gradient norm and speed over tokens."""
    tokens = history.tokens
    restarts = _marks(history, history.restarts, "restart", RED)
    saves = _marks(history, history.saves, "save", GREY)
    loss = [spread("each step", tokens, history.column("loss"), PALE_BLUE), spread("smoothed", tokens, history.smoothed_loss)]
    at, evaluated = history.evaluated()
    if evaluated.size:
        loss.append(Curve("held-out", at, evaluated, ORANGE, dots=True))
    rate = [spread("learning rate", tokens, history.column("learning_rate"))]
    norm = [spread("gradient norm", tokens, positive(history.column("grad_norm")))]
    unusual = [
        *_marks(history, history.steps[history.column("skipped") > 0], "skipped step", RED),
        *_marks(history, history.steps[history.column("loss_spike") > 0], "spike", ORANGE),
    ]
    speed = [spread("tokens/s/device", tokens, history.column("tokens_per_s_per_device"))]
    return [
        line_chart("Loss", loss, x_label="tokens", y_label="nats per token", usual=USUAL, marks=restarts),
        line_chart("Learning rate", rate, x_label="tokens", y_label="learning rate"),
        batch_chart(history),
        line_chart("Gradient norm", norm, x_label="tokens", y_label="before clipping", y_log=True, marks=unusual),
        line_chart("Speed", speed, x_label="tokens", y_label="tokens/s/device", usual=USUAL, marks=[*saves, *restarts]),
    ]


def batch_chart(history: History) -> str:
    """Chart of the batch and of the noise scale with its interval, in tokens."""
    curves = [spread("batch", history.tokens, history.batch_tokens)]
    noise = positive(history.column("noise_scale_tokens"))
    if (measured := np.flatnonzero(np.isfinite(noise))).size:
        measured = measured[:: math.ceil(measured.size / svg.MOST_POINTS)]
        low, high = (positive(history.column(f"noise_scale_{end}"))[measured] for end in ("low", "high"))
        curves.append(Curve("noise scale", history.tokens[measured], noise[measured], ORANGE, low, high))
    title = "Batch and noise scale" if len(curves) > 1 else "Batch (noise scale not measured)"
    return line_chart(title, curves, x_label="tokens", y_label="tokens of a step", y_log=True)


def memory_chart(report: RunReport) -> str:
    """Chart of the peak memory in use over time, beside the predictions."""
    history, sizes = report.history, report.memory_bytes
    used, ends = history.column("memory_peak_bytes") / GIB, history.tokens[[0, -1]]
    colors = {ESTIMATE: ORANGE, COMPILED: GREEN}
    predicted = {name: size for name, size in sizes.items() if name != IN_USE}
    curves = [Curve(name, ends, np.full(2, size / GIB), colors.get(name, RED)) for name, size in predicted.items()]
    if IN_USE in sizes:
        curves.append(spread(IN_USE, history.tokens, used))
    title = "Memory" if IN_USE in sizes else "Memory (not logged: in use)"
    return line_chart(title, curves, x_label="tokens", y_label="GiB on one device")


def rank_charts(report: RunReport, over: OverRanks) -> list[str]:
    """Hours and GPU-hours to the loss against data ranks that fit, with a band for the noise scale's interval."""
    marks = [Mark(report.history.config.data_ranks, "this run", GREY)]
    if over.stops_paying is not None:
        marks.append(Mark(over.stops_paying, "stops paying", RED))
    rows = [row for row in over.rows if row.fits is not False] or list(over.rows)
    ranks = np.array([row.data_ranks for row in rows], float)

    def chart(key: str, words: str, color: str) -> str:
        values = _of_rows(rows, key, ranks)
        ends = np.array([values, *(_of_rows(over.rows, key, ranks) for over in report.by_interval)])
        curve = Curve(words, ranks, values, color, np.fmin.reduce(ends), np.fmax.reduce(ends))
        x_ticks = ranks[:: math.ceil(len(ranks) / MOST_TICKS)]
        axes = {"x_label": "data ranks", "y_label": words, "x_log": True, "y_log": True, "x_ticks": x_ticks, "marks": marks}
        return line_chart(f"{words} to a loss of {report.target_loss:.4f}", [curve], **axes)

    return [chart("hours", "Hours", BLUE), chart("gpu_hours", "GPU-hours", PURPLE)]


def _of_rows(rows: Sequence[RankRow], key: str, ranks: np.ndarray) -> np.ndarray:
    """Values of `key` for these ranks, in their order; not-a-number for a missing row."""
    known = {row.data_ranks: getattr(row, key) for row in rows}
    return np.array([known.get(int(count), math.nan) for count in ranks])


def _marks(history: History, steps: Iterable[float], label: str, color: str) -> list[Mark]:
    steps = list(steps)
    return [
        Mark(float(np.interp(step, history.steps, history.tokens)), label, color)
        for step in steps[:: max(1, math.ceil(len(steps) / MOST_MARKS))]
    ]


# ----------------------------------------------------------------------------------------------------------------- tables


def _rank_table(report: RunReport, over: OverRanks) -> str:
    heading = ["data ranks", "GPUs", "microbatches", "batch, tokens", "steps", "tokens", "a step", "hours", "GPU-hours", ""]
    rows, classes = [], []
    for row in over.rows:
        note = "does not fit" if row.fits is False else "stops paying" if row.data_ranks == over.stops_paying else ""
        counts = [f"{count:,}" for count in (row.data_ranks, row.gpus, row.microbatches)]
        costs = [duration(row.step_s), f"{row.hours:,.4g}", f"{row.gpu_hours:,.4g}"]
        rows.append([*counts, number(row.batch_tokens), number(row.steps), number(row.tokens), *costs, note])
        classes.append("no" if row.fits is False else "own" if row.data_ranks == report.history.config.data_ranks else "")
    return _table(heading, rows, classes)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] | None = None) -> str:
    """An HTML table, of numbers if it has a heading. `classes` has one CSS class per row."""
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in heading)}</tr>" if heading else ""
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    names = classes or [""] * len(cells)
    body = "".join(f'<tr class="{name}">{row}</tr>' for name, row in zip(names, cells, strict=True))
    return f'<table class="{"numbers" if heading else "words"}">{head}{body}</table>'


def paragraphs(sentences: Iterable[str]) -> list[str]:
    return [f"<p>{escape(sentence)}</p>" for sentence in sentences]


def grid(pictures: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(f"<div>{picture}</div>" for picture in pictures)}</div>'
