"""Charts as SVG text, for a page in a single file: curves with bands, points and marks, and a bar of parts. It needs only
numpy.

    line_chart("loss", [Curve("smoothed", tokens, loss)], x_label="tokens", y_label="nats")

Not-a-number interrupts a curve. A curve of more than MOST_POINTS points is averaged over neighbours, and a band can show their
minimum and maximum.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#1f5ea6", "#d46b0d", "#2a8047", "#854099", "#b3261e", "#9aa1ab"
MOST_POINTS = 600
WIDTH, HEIGHT = 640, 270
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 30, 42
"""Space beside the plot, in the same units."""
CHARACTER = 6.2
"""Approximate width of a letter."""
LINE = 11
"""Height of a line of text."""
MOST_LEGEND = 5
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Curve:
    """Points in order of x, connected by a curve."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str = BLUE
    low: np.ndarray | None = None
    """With `high`: a band around the curve."""
    high: np.ndarray | None = None
    dots: bool = False
    """Whether to draw the points only."""
    dash: str = ""
    """An SVG dash pattern; '': a solid line."""
    end_label: str = ""
    """Short text to the right of the last point."""


@dataclass(frozen=True)
class Mark:
    """A vertical line."""

    x: float
    label: str
    color: str = GREY


def spread(label: str, x: np.ndarray, y: np.ndarray, color: str = BLUE) -> Curve:
    """A curve of at most MOST_POINTS points, each the mean of its neighbours, in a band from their minimum to their maximum."""
    x, y = x[np.isfinite(x)], y[np.isfinite(x)]
    if len(y) <= MOST_POINTS:
        return Curve(label, x, y, color)
    parts = [part[np.isfinite(part)] for part in np.array_split(y, MOST_POINTS)]
    mean, low, high = (np.array([way(part) if part.size else np.nan for part in parts]) for way in (np.mean, np.min, np.max))
    return Curve(label, np.array([part[-1] for part in np.array_split(x, MOST_POINTS)]), mean, color, low, high)


def number(value: float, digits: int = 3) -> str:
    """'1.5M', '0.0003', '2e-05': a number with that many significant digits."""
    if not math.isfinite(value):
        return "-"
    for size, suffix in _SUFFIXES:
        # A number that would round up to 1000 uses the next suffix.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


# --------------------------------------------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """Maps values to positions on the page."""

    least: float
    most: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, values: float | np.ndarray) -> np.ndarray:
        low, high, values = (self._even(v) for v in (self.least, self.most, values))
        return self.start + (self.end - self.start) * (np.clip(values, low, high) - low) / (high - low)

    def _even(self, values: float | np.ndarray) -> np.ndarray:
        values = np.asarray(values, float)
        return np.log(np.maximum(values, np.finfo(float).tiny)) if self.is_log else values

    def ticks(self) -> list[float]:
        return log_ticks(self.least, self.most) if self.is_log else even_ticks(self.least, self.most)


def even_ticks(least: float, most: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    raw = (most - least) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Powers of ten; 2 and 5 times them as well if there are few; evenly spaced values if there are fewer than two of all
    these."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    tens = [10.0**power for power in powers if least <= 10.0**power <= most]
    if len(tens) >= 3:
        return tens[:: math.ceil(len(tens) / 6)]
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5) if least <= factor * 10.0**power <= most]
    return ticks if len(ticks) >= 2 else even_ticks(least, most)


def digits_of(ticks: Sequence[float]) -> int:
    """The number of digits that makes neighbouring ticks differ."""
    steps = np.diff(ticks)
    most = max(map(abs, ticks), default=0.0)
    return max(3, math.ceil(math.log10(most) - math.log10(steps.min())) + 1) if steps.size and most else 3


_LEAST, _MOST = 1e-250, 1e250


def limits(curves: Sequence[Curve], is_log: bool, usual: float = 1.0) -> tuple[float, float]:
    """(lowest, highest) value of a y axis: that of all points, or for each curve that of its `usual` share of points nearest
    the bottom, so that one spike does not flatten the rest."""
    low, high = [], []
    for curve in curves:
        for values in (curve.y, curve.low, curve.high):
            if values is None:
                continue
            values = values[np.isfinite(values) & ((values > 0) | (not is_log))].clip(-_MOST, _MOST)
            if values.size:
                low.append(values.min())
                high.append(values.max() if curve.dots or usual == 1 else np.quantile(values, usual))
    if not low:
        return (1.0, 10.0) if is_log else (0.0, 1.0)
    least, most = float(min(low)), float(max(high))
    if is_log:
        return _apart(least / 1.2, most * 1.2, is_log)
    room = 0.06 * (most - least) or 0.05 * abs(most) or 1.0
    return _apart(*((least - room, most + room) if least < 0 or least > 0.3 * most else (0.0, most + room)))


def _apart(least: float, most: float, is_log: bool = False) -> tuple[float, float]:
    """Two ends of an axis between which floats have room for ticks, whatever numbers a file holds."""
    least, most = (min(max(end, _LEAST if is_log else -_MOST), _MOST) for end in (least, most))
    room = 1e-6 * max(abs(least), abs(most), _LEAST)
    return (least, most) if most - least > room else (least - room / 2, most + room / 2)


# --------------------------------------------------------------------------------------------------------------- charts


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    x_ticks: Sequence[float] | None = None,
    marks: Sequence[Mark] = (),
    usual: float = 1.0,
    width: int = WIDTH,
) -> str:
    """An <svg> of curves over one pair of axes. Curves with end labels are named by these, and are not in the legend.

    Args:
      x_ticks: positions of labels; default: round numbers.
      marks: vertical lines; each label is in the legend once.
      usual: see `limits`.
    """
    found = np.concatenate([curve.x[np.isfinite(curve.x)] for curve in curves] or [[]])
    least, most = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
    if least == most:
        least, most = (least / 2, most * 2) if x_log else (least - 0.5, most + 0.5)
    least, most = _apart(least, most, x_log)
    labelled = any(curve.end_label for curve in curves)
    across = Scale(least, most, LEFT, width - RIGHT - labelled * CHARACTER, x_log)
    up = Scale(*limits(curves, y_log, usual), HEIGHT - BOTTOM, TOP, y_log)
    body = [*_axes(across, up, x_label, y_label, across.ticks() if x_ticks is None else x_ticks)]
    for mark in (mark for mark in marks if least <= mark.x <= most):
        vertical = f"M{float(across(mark.x)):.1f} {TOP}V{HEIGHT - BOTTOM}"
        body.append(f'<path d="{vertical}" stroke="{mark.color}" stroke-dasharray="2 3" fill="none"/>')
    for curve in curves:
        body += _drawn(curve, across, up)
    body += _end_labels(curves, across, up)
    named = [(curve.label, curve.color) for curve in curves if not curve.end_label]
    named += [(mark.label, mark.color) for mark in marks]
    return _svg(title, [*body, *_legend(list(dict.fromkeys(named)))], HEIGHT, width)


def parts_bar(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """An <svg> of one bar, divided in proportion to (label, size, colour), labels below; sizes of 0 or less are left out."""
    parts = [part for part in parts if part[1] > 0]
    whole, at, body = sum(size for _, size, _ in parts), float(LEFT), []
    right = WIDTH - RIGHT
    x, y = at, TOP + 44
    for label, size, color in parts:
        width = (right - LEFT) * size / whole
        words = escape(f"{label} {size / whole:.1%}")
        body.append(
            f'<rect x="{at:.1f}" y="{TOP}" width="{width:.1f}" height="26" fill="{color}"><title>{words}</title></rect>'
        )
        at += width
        if x > LEFT and x + CHARACTER * len(label) > right:
            x, y = float(LEFT), y + 16
        body.append(_text(x, y, label, "start", color))
        x += CHARACTER * len(label) + 14
    return _svg(title, body, y + 8)


def _svg(title: str, body: Sequence[str], height: int, width: int = WIDTH) -> str:
    name = escape(title)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    heading = f'<text x="{LEFT}" y="16" font-size="13" font-weight="600" fill="currentColor">{name}</text>'
    return "\n".join([head, f"<title>{name}</title>", heading, *body, "</svg>"])


def _axes(across: Scale, up: Scale, x_label: str, y_label: str, x_ticks: Sequence[float]) -> Iterator[str]:
    floor, right, y_ticks = HEIGHT - BOTTOM, across.end, up.ticks()
    for tick in y_ticks:
        at = float(up(tick))
        yield f'<path d="M{LEFT} {at:.1f}H{right:g}" stroke="currentColor" stroke-opacity="0.12" fill="none"/>'
        yield _text(LEFT - 6, at + 4, number(tick, digits_of(y_ticks)), "end")
    for tick in x_ticks:
        at = float(across(tick))
        yield f'<path d="M{at:.1f} {floor}v4" stroke="currentColor" stroke-opacity="0.5" fill="none"/>'
        yield _text(at, floor + 16, number(tick, digits_of(x_ticks)), "middle")
    yield f'<path d="M{LEFT} {floor}H{right:g}" stroke="currentColor" stroke-opacity="0.5" fill="none"/>'
    yield _text((LEFT + right) / 2, HEIGHT - 8, x_label, "middle")
    yield (
        f'<text transform="translate(13 {(TOP + floor) / 2:.1f}) rotate(-90)" text-anchor="middle" font-size="11" '
        f'fill="currentColor">{escape(y_label)}</text>'
    )


def _drawn(curve: Curve, across: Scale, up: Scale) -> Iterator[str]:
    if curve.dots:
        for x, y in zip(curve.x, curve.y, strict=True):
            if math.isfinite(x + y):
                yield f'<circle cx="{float(across(x)):.1f}" cy="{float(up(y)):.1f}" r="3" fill="{curve.color}"/>'
        return
    if curve.low is not None and curve.high is not None:
        for run in _unbroken(curve.x + curve.low + curve.high):
            x = across(curve.x[run])
            edge = [*zip(x, up(curve.high[run]), strict=True), *zip(x[::-1], up(curve.low[run])[::-1], strict=True)]
            yield f'<path d="{_path(edge)}Z" fill="{curve.color}" fill-opacity="0.18"/>'
    for run in _unbroken(curve.x + curve.y):
        points = list(zip(across(curve.x[run]), up(curve.y[run]), strict=True))
        if len(points) == 1:
            yield f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2" fill="{curve.color}"/>'
        else:
            dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
            yield f'<path d="{_path(points)}" stroke="{curve.color}" stroke-width="1.5"{dash} fill="none"/>'


def _end_labels(curves: Sequence[Curve], across: Scale, up: Scale) -> Iterator[str]:
    """Each label beside the last point of its curve, or at the nearest height of the chart where no other one is."""
    placed: list[tuple[float, float]] = []
    for curve in curves:
        there = np.flatnonzero(np.isfinite(curve.x) & np.isfinite(curve.y))
        if not curve.end_label or not there.size:
            continue
        x, end = float(across(curve.x[there[-1]])), float(up(curve.y[there[-1]]))
        heights = [end, *sorted(np.arange(up.end, up.start, LINE), key=lambda y, end=end: abs(y - end))]
        near = [other for at, other in placed if abs(at - x) < 2 * CHARACTER]
        y = next((y for y in heights if all(abs(y - other) >= LINE for other in near)), end)
        placed.append((x, y))
        yield _text(x + 3, y + 4, curve.end_label, "start", curve.color).replace("<text", '<text class="end"', 1)


def _unbroken(values: np.ndarray) -> list[slice]:
    """Slices of consecutive finite values."""
    return np.ma.flatnotmasked_contiguous(np.ma.masked_invalid(values))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _legend(named: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The legend at the top right, in one row; a single entry needs none."""
    if len(named) < 2:
        return
    at = float(WIDTH - RIGHT)
    for label, color in reversed(named[:MOST_LEGEND]):
        yield _text(at, 16, label, "end", color)
        at -= CHARACTER * len(label) + 14


def _text(x: float, y: float, words: str, anchor: str, color: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="{color}">{escape(words)}</text>'
