"""Reads files of one JSON object per line, such as metrics.jsonl. A crash, an editor or a disk may have damaged some lines."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.untrusted import INT64, RefusedInput, parse_json, reason_of
from jaxllm.untrusted import read_lines as lines_of

ALWAYS_NUMBERS = ("tokens", "unix_s", "start_unix_s")
"""What jaxllm writes as a finite number into each line that has it."""
LEAST = 1e-60


def read_lines(path: Path, containing: str = "", last: int | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each readable line with its record. Nothing if there is no file.

    Args:
      containing: only lines with this text, to parse no others.
      last: only so many lines at the end.

    Raises:
      ConfigError: it cannot be read.
    """
    lines, text = lines_of(path), containing.encode()
    try:
        for line in lines if last is None else deque(lines, maxlen=last):
            if text in line and (record := parse(line)) is not None:
                yield line, record
    except FileNotFoundError:
        return
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{path} cannot be read ({reason_of(error)}): move it away.") from None


def parse(line: bytes) -> dict[str, Any] | None:
    """The numbers of a line, with None for those that are not finite, or as large or small as none of jaxllm's. None for a line
    that is no object with the number of a step, or has an integer beyond 64 bits, or no such number for one of ALWAYS_NUMBERS.
    """
    try:
        given = parse_json(line, lenient=True)
    except RefusedInput:
        return None
    if not isinstance(given, dict) or type(given.get("step")) is not int or given["step"] < 0:
        return None
    if any(isinstance(x, int) and not -INT64 <= x <= INT64 for x in given.values()):
        return None
    known = {name: x for name, x in given.items() if x is None or isinstance(x, int | float)}
    record = {name: x if x == 0 or (x is not None and LEAST <= abs(x) <= 1 / LEAST) else None for name, x in known.items()}
    return None if any(name in given and record.get(name) is None for name in ALWAYS_NUMBERS) else record


def before_step(lines: bytes, step: int) -> int:
    """How many bytes come before the last lines, those of `step` and later ones. Damaged lines among these count with them."""
    kept = len(lines)
    for line in reversed(lines.splitlines(keepends=True)):
        if (record := parse(line)) is not None and record["step"] < step:
            break
        kept -= len(line)
    return kept
