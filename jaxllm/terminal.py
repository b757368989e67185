"""The terminal: sentences, bars and tables. What is not printable is escaped on the way out, as names come from anywhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from jaxllm.untrusted import in_lines, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

LONGEST_WORD = 300
"""Characters: a path or a value that is longer loses its middle."""
QUIET_S = 10.0
"""Seconds that nothing is silent for longer."""


def safe_to_print(sentence: str) -> str:
    """The sentence with each word as `shown` has it: it may quote what comes from outside."""
    return " ".join(shown(word, LONGEST_WORD) for word in sentence.split(" "))


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


def console(**options: Any) -> Console:
    """rich's, with these arguments. It takes nothing in a text for markup, and lets no control character of it through."""
    from rich.console import Console
    from rich.segment import Segment

    class Escaping(Console):
        def render(self, *arguments: Any, **more: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **more):
                yield segment if segment.control else Segment(in_lines(segment.text), segment.style)

    return Escaping(highlight=False, markup=False, emoji=False, **options)


def bar(*columns: Any, on: Console) -> Progress | None:
    """A progress bar that begins with the description of its task, and leaves nothing behind. None where no cursor moves."""
    if not on.is_terminal or on.is_dumb_terminal:
        return None
    from rich.progress import Progress, TextColumn
    from rich.table import Column

    # A column of its own may wrap: on 80 columns a long line takes two rows. Otherwise its end, the bar and the time left would
    # be cut off.
    return Progress(TextColumn("{task.description}", markup=False, table_column=Column()), *columns, console=on, transient=True)


def in_lines_of_a_log(say: Callable[[str], None]) -> Callable[..., None]:
    """Says of each thing that takes longer than QUIET_S how far it is, as often. Is told (what, done, of all, a note)."""
    began: dict[str, tuple[float, int]] = {}
    said_s = -QUIET_S

    def show(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal said_s
        now_s = time.monotonic()
        began_s, first = began.setdefault(what, (now_s, done))
        if done >= total:
            del began[what]
        elif now_s - max(said_s, began_s) >= QUIET_S:
            said_s = now_s
            left = time_left(now_s - began_s, done - first, total - done)
            say(f"{what} {done / total:.0%}{left and f', {left} left'}  {note}".rstrip())

    return show


def time_left(seconds: float, done: int, left: int) -> str:
    """Such as 12:05, when `done` took that long; "" where nothing is done."""
    if done <= 0:
        return ""
    seconds *= left / done
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


@contextmanager
def progress_shown(visible: bool = True) -> Iterator[Callable[..., None]]:
    """A bar on standard error, or lines where that is no terminal; nothing if not visible."""
    from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn

    shown = bar(BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True), on=console(stderr=True))
    if shown is None or not visible:
        yield in_lines_of_a_log(print_sentence if visible else lambda _: None)
        return
    with shown:
        task = shown.add_task("")
        yield lambda what, done, total, note="": shown.update(task, description=f"{what}  {note}", completed=done, total=total)


@contextmanager
def saying(what: Callable[[], str | None]) -> Iterator[None]:
    """Prints what() to standard error every QUIET_S seconds, where it is anything: of what has no end in sight."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(QUIET_S):
            if sentence := what():
                # Through sys.stderr, which a bar redirects. It may hang there, or have no reader: no other thread waits for it.
                with suppress(OSError, ValueError):
                    print(f"jaxllm: {safe_to_print(sentence)}", file=sys.stderr, flush=True)

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def bytes_bar(what: str, total: int, visible: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields what any thread calls with the number of bytes done since the last call."""
    done, one_at_a_time = 0, threading.Lock()
    with progress_shown(visible) as show:

        def advance(count: int) -> None:
            nonlocal done
            with one_at_a_time:
                done += count
                show(what, done, total)

        yield advance


def terminal_table(
    rows: Iterable[Sequence[str | Text]],
    headings: Sequence[str] = (),
    *,
    right: Collection[str | int] = (),
    whole: Collection[str] = (),
    bold: str | None = None,
    gap: int = 2,
    **options: Any,
) -> Table:
    """A table of rich without lines, for a terminal. Cells that are too long are folded; text is shown as it is.

    Args:
      right: columns that are right-aligned: their headings, or without headings their numbers.
      whole: headings of columns that are not folded.
      bold: first cell of the row that is bold.
      gap: spaces between columns.
    """
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    grid = Table(box=None, padding=(0, gap, 0, 0), header_style="bold", show_header=bool(headings), **options)
    for column in headings or range(len(rows[0])):
        side = "right" if column in right else "left"
        grid.add_column(str(column), overflow="fold", justify=side, no_wrap=column in whole)
    for row in rows:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in row)
        grid.add_row(*cells, style="bold" if row[0] == bold else None)
    return grid
