"""Standard error: one sentence, or a bar; and for processes that may exit at once, flushing without waiting for a thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

LONGEST_WORD = 300
"""Characters: a path or a value that is longer loses its middle."""


def safe_to_print(sentence: str) -> str:
    """The sentence, and any lines below it, with control characters escaped and no word longer than LONGEST_WORD: it may quote
    what comes from outside."""
    half = LONGEST_WORD // 2
    words = [word if len(word) <= LONGEST_WORD else f"{word[:half]}...{word[-half:]}" for word in sentence.split(" ")]
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in " ".join(words)
    )


def print_sentence(sentence: str) -> None:
    """Prints one sentence to standard error, as the command line does."""
    # Bypasses sys.stderr, whose lock a stuck main thread may hold. The reader may be gone: the process is mostly about to exit,
    # and must not fail because of it.
    with suppress(OSError):
        os.write(2, f"jaxllm: {safe_to_print(sentence)}\n".encode())


def flush() -> None:
    """Flushes the main thread's output; gives up after a second, as that thread may be stuck while printing."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            # The reader may be gone, or the stream closed.
            with suppress(OSError, ValueError):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on, no thread starts at the end of the interpreter; the main thread is here then.
        flush()
    else:
        thread.join(1)


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A bar, if standard error is a terminal. Yields what is called with the number of bytes done since the last call."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
