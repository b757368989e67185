"""Runs a program in a process of its own, so that what it breaks, or runs out of, is its own affair.

    said, error = apart.run([sys.executable, "measure.py"], limit_s=600)

What such a program found it says on standard output as JSON objects, a line each, as early as it knows it: what was said before
a crash is kept.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = "A device ran out of memory"
_LATE = "It took more than"
_RAN_OUT = re.compile(r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|[Oo]ut of memory|OutOfMemoryError")
"""In what JAX, the driver and PyTorch say of it."""


def run(
    command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None, log: Path | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """(what it said, why it failed or None). A timeout ends the process and all that it started.

    Args:
      variables: of the environment, beside those here.
      log: a file to which its standard error is added.
    """
    # A group of its own, not a session: what ends our session ends it too.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(variables or {})},
        process_group=0,
    )
    late = False
    try:
        out, told = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        out, told = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{told}\n")
    said = [found for line in out.splitlines() if (found := _object(line)) is not None]
    if late:
        return said, f"{_LATE} {limit_s:.0f} s."
    return said, reason(told) if process.returncode else None


def is_late(error: str | None) -> bool:
    """Whether this is what `run` says of a program that took too long."""
    return error is not None and error.startswith(_LATE)


def _object(line: str) -> dict[str, Any] | None:
    """None where it is something else: a library's chatter, or half a line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def reason(told: str) -> str:
    """Why a program failed, from what it wrote last."""
    if _RAN_OUT.search(told):
        return OUT_OF_MEMORY
    return " | ".join([line.strip() for line in told.splitlines() if line.strip()][-3:])[-500:] or "It ended without a word."
