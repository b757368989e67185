"""Reads files of one JSON object per line, such as metrics.jsonl. A crash, an editor or a disk may have damaged some lines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.untrusted import INT64, RefusedInput, parse_json
from jaxllm.untrusted import read_lines as lines_of

ALWAYS_NUMBERS = ("tokens", "unix_s", "start_unix_s")
"""What jaxllm writes as a finite number into each line that has it."""


def read_lines(path: Path, containing: str = "", last: int | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each readable line with its record. Nothing if there is no file.

    Args:
      containing: only lines with this text, to parse no others.
      last: only so many lines at the end.

    Raises:
      ConfigError: it is no regular file.
    """
    lines: Iterable[bytes] = lines_of(path) if path.exists() else ()
    text = containing.encode()
    try:
        for line in lines if last is None else deque(lines, maxlen=last):
            if text in line and (record := parse(line)) is not None:
                yield line, record
    except RefusedInput as error:
        raise ConfigError(f"{path} cannot be read ({error}): move it away.") from None


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line: an object with the number of a step, no value beyond 64 bits, and numbers for ALWAYS_NUMBERS. None
    for anything else."""
    try:
        record = parse_json(line, lenient=True)
    except RefusedInput:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int) or record["step"] < 0:
        return None
    if any(isinstance(x, int) and not -INT64 <= x <= INT64 for x in record.values()):
        return None
    counts = [record[name] for name in ALWAYS_NUMBERS if name in record]
    return record if all(isinstance(x, int | float) and math.isfinite(x) for x in counts) else None


def before_step(lines: bytes, step: int) -> int:
    """How many bytes come before the last lines, those of `step` and later ones. Damaged lines among these count with them."""
    kept = len(lines)
    for line in reversed(lines.splitlines(keepends=True)):
        if (record := parse(line)) is not None and record["step"] < step:
            break
        kept -= len(line)
    return kept


def numbers(record: Mapping[str, Any], *names: str) -> list[float] | None:
    """The values of these keys; None if one is not a number, such as null for a loss that is not finite."""
    values = [record.get(name) for name in names]
    return [float(x) for x in values] if all(isinstance(x, (int, float)) for x in values) else None  # type: ignore[arg-type]
