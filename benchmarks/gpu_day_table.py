"""Markdown tables of what gpu_day.py measures beside the steps of gpu_table.py: each figure beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gpu_grouped

GIB = 2**30
Row = Mapping[str, Any]

PRETENDED = (
    "| pretended | GiB in use | XLA there | XLA without a GPU | estimate | s a step | account without transfers | model |",
    "|---|---|---|---|---|---|---|---|",
)
STEPS = (
    "| step | ms | tokens/s | predicted | MFU, full square (causal) | GB in use | XLA there | estimate |",
    "|---|---|---|---|---|---|---|---|",
)
NEAR = (
    "| near the limit | share by the estimate | GiB in use | XLA | estimate | tokens/s | predicted |",
    "|---|---|---|---|---|---|---|",
)


def text(rows: Mapping[str, Row]) -> str:
    sections = [
        "\n".join(_pretended(rows)),
        "\n".join(_steps(rows)),
        "\n".join(_near(rows)),
        gpu_grouped.table([row for row in rows.values() if row["kind"] == "grouped"]),
        *(f"{name}: {_short(row)}" for name, row in rows.items() if row["kind"] == "real_run"),
    ]
    return "\n\n".join(section for section in sections if section)


def _pretended(rows: Mapping[str, Row]) -> Iterator[str]:
    found = {name: row for name, row in rows.items() if row["kind"] == "pretend" and "step_s" in row}
    if not found:
        return
    yield from PRETENDED
    for name, row in found.items():
        predicted = row.get("predicted", {})
        sizes = (row.get("in_use_bytes"), row["compiled_bytes"], predicted.get("compiled_bytes"), row["estimate_bytes"])
        seconds = (row["step_s"]["median"], row["account_compute_s"], row["predicted_compute_s"])
        yield _line(name, *map(_gib, sizes), *map(_seconds, seconds))


def _steps(rows: Mapping[str, Row]) -> Iterator[str]:
    found = {name: row for name, row in rows.items() if row["kind"] == "train" and "step_s" in row and "about" not in row}
    if not found:
        return
    yield from STEPS
    for name, row in found.items():
        sizes = (row.get(key) for key in ("in_use_bytes", "compiled_bytes", "estimate_bytes"))
        speeds = (row["tokens_per_s"], row.get("predicted", {}).get("tokens_per_s"))
        mfu = f"{row['mfu_full_square']:.1%} ({row['mfu_causal']:.1%})"
        gigabytes = ("" if size is None else f"{size / 1e9:.2f}" for size in sizes)
        yield _line(name, f"{1e3 * row['step_s']['median']:,.0f}", *map(_speed, speeds), mfu, *gigabytes)


def _near(rows: Mapping[str, Row]) -> Iterator[str]:
    found = {name: row for name, row in rows.items() if row["kind"] == "limit"}
    if not found:
        return
    yield from NEAR
    for name, row in found.items():
        predicted = row.get("predicted", {})
        sizes = (row.get("in_use_bytes"), row.get("compiled_bytes"), row.get("estimate_bytes"))
        share = f"{predicted['share']:.1%}" if predicted else ""
        speeds = (row.get("tokens_per_s"), predicted.get("tokens_per_s"))
        yield _line(name, share, *map(_gib, sizes), *map(_speed, speeds))
    for name, row in found.items():
        if "sentence" in row:
            yield f"\n{name} says: {row['sentence'].splitlines()[0]}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _speed(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def _seconds(s: float | None) -> str:
    return "" if s is None else f"{s:.3f}"


def _short(row: Row) -> str:
    left_out = ("name", "kind", "options", "about", "predicted", "expected_s", "after", "python", "date", "device")
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in left_out)
