"""Runs a program in a process of its own, so that its crashes and out-of-memory errors do not affect the caller.

    said, error = subprocess_runner.run([sys.executable, "measure.py"], limit_s=600)

The program prints its results to standard output as JSON objects, one per line, as early as it knows them. Results before a
crash are kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

OUT_OF_MEMORY = "A device ran out of memory"
_LATE = "It took more than"
_RAN_OUT = re.compile(r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|[Oo]ut of memory|OutOfMemoryError")
"""Pattern of out-of-memory messages from JAX, the driver and PyTorch."""


def run(
    command: Sequence[str],
    limit_s: float,
    variables: Mapping[str, str] | None = None,
    log: Path | None = None,
    each: Callable[[dict[str, Any]], str | None] | None = None,
    silent_s: float = math.inf,
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns (the objects it printed, the reason of its failure or None). After a time limit its process group is killed.

    Args:
      variables: extra environment variables.
      log: a file to which its standard error is appended.
      each: gets each object as soon as it is printed. It returns a line for the program's standard input, '' to end that
        input, or None.
      silent_s: time limit from one object to the next.
    """
    said: list[dict[str, Any]] = []
    end = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as errors:
        # A new process group, not a new session: it still ends with our session.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if each else None,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
            process_group=0,
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        late, last, answered = None, time.monotonic(), 0
        try:
            while True:
                limit = min(end, last + silent_s)
                line = lines.get(timeout=max(0.0, limit - time.monotonic()))
                if line is None:
                    process.wait(max(0.0, limit - time.monotonic()))
                    break
                if (found := _object(line)) is not None:
                    said.append(found)
                    last = time.monotonic()
                    if (answer := each(found) if each else None) is not None:
                        # What it wrote before is not the reason of a failure after. A seek would move its own position too.
                        answered = os.fstat(errors.fileno()).st_size
                        _answer(process, answer)
        except (queue.Empty, subprocess.TimeoutExpired):
            late = f"{_LATE} {min(limit_s, silent_s):.0f} s."
        finally:
            if process.poll() is None or late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            reader.join()
            process.wait()
            process.stdout.close()
            _answer(process, "")
        errors.seek(0)
        stderr = errors.read()
    stderr, latest = (part.decode(errors="replace") for part in (stderr, stderr[answered:]))
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{stderr}\n")
    return said, late or (reason(latest) if process.returncode else None)


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Puts the lines of a stream into the queue, and None at its end."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def _answer(process: subprocess.Popen[str], line: str) -> None:
    """Writes a line to the program's standard input, or ends it."""
    if process.stdin is None:
        return
    # If the program has crashed, its end is found later.
    with contextlib.suppress(BrokenPipeError):
        if line:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        else:
            process.stdin.close()


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
