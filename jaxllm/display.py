"""How results reach people: sizes in bytes, and small HTML tables for notebooks.

The only style of the HTML tables is alignment, so that a notebook's own theme, light or dark, applies.
"""

import html
from collections.abc import Iterable, Sequence

from jaxllm.untrusted import in_lines


def escaped(text: object) -> str:
    return html.escape(in_lines(str(text)))


def table(rows: Iterable[Sequence[object]], headings: Sequence[str] = (), *, left: int = 1, caption: str = "") -> str:
    """Makes an HTML table. Cells are escaped, and line breaks in them are kept.

    Args:
      left: number of columns, from the left, that are left-aligned. The others are right-aligned.
    """

    def line(cells: Sequence[object], tag: str) -> str:
        sides = ("left" if column < left else "right" for column in range(len(cells)))
        inside = (
            f'<{tag} style="text-align:{side}">{_in_lines(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )
        return f'<tr style="vertical-align:top">{"".join(inside)}</tr>'

    above = f'<caption style="text-align:left;caption-side:top"><b>{_in_lines(caption)}</b></caption>' if caption else ""
    head = f"<thead>{line(headings, 'th')}</thead>" if headings else ""
    return f"<table>{above}{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def preformatted(text: str) -> str:
    """Text in a fixed-width font, as in a terminal."""
    return f'<pre style="line-height:1.2">{escaped(text)}</pre>'


def _in_lines(cell: object) -> str:
    return escaped(cell).replace("\n", "<br>")


def readable(size_bytes: float) -> str:
    """'1.5 MiB': powers of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"
