"""Tables that a script writes into a page, between two markers: <!-- NAME: begin --> and <!-- NAME: end -->."""

from __future__ import annotations

from pathlib import Path


def write_between(file: Path, name: str, text: str) -> None:
    """Replaces the text between the markers. Raises SystemExit if the file has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = file.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{file} has no {begin} and {end}: put them where the table should be.")
    file.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
