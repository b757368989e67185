"""Runs a program in a process of its own, so that its crashes and out-of-memory errors do not affect the caller.

    said, error = subprocess_runner.run([sys.executable, "measure.py"], limit_s=600)

The program prints its results to standard output as JSON objects, one per line, as early as it knows them. Results before a
crash are kept.
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
"""Pattern of out-of-memory messages from JAX, the driver and PyTorch."""


def run(
    command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None, log: Path | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns (the objects it printed, the reason of its failure or None). After the time limit its process group is killed.

    Args:
      variables: extra environment variables.
      log: a file to which its standard error is appended.
    """
    # A new process group, not a new session: it still ends with our session.
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
        out, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        out, stderr = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{stderr}\n")
    said = [found for line in out.splitlines() if (found := _object(line)) is not None]
    if late:
        return said, f"{_LATE} {limit_s:.0f} s."
    return said, reason(stderr) if process.returncode else None


def is_late(error: str | None) -> bool:
    """Whether the error of `run` is that a program took too long."""
    return error is not None and error.startswith(_LATE)


def _object(line: str) -> dict[str, Any] | None:
    """Parses a line as a JSON object. None for anything else: messages of a library, or an incomplete line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def reason(stderr: str) -> str:
    """Reason of a program's failure, from its last output."""
    if _RAN_OUT.search(stderr):
        return OUT_OF_MEMORY
    return " | ".join([line.strip() for line in stderr.splitlines() if line.strip()][-3:])[-500:] or "It ended without a word."
