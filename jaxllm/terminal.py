"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


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
      options: more arguments of rich's Table.
    """
    rows = list(rows)
    grid = Table(box=None, padding=(0, gap, 0, 0), header_style="bold", show_header=bool(headings), **options)
    for column in headings or range(len(rows[0])):
        side = "right" if column in right else "left"
        grid.add_column(str(column), overflow="fold", justify=side, no_wrap=column in whole)
    for row in rows:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in row)
        grid.add_row(*cells, style="bold" if row[0] == bold else None)
    return grid
