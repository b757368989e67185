"""The hours over a slow link in docs/why-many-gpus.md and RESULTS.md are those of benchmarks/island_links.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import scripts

CHECKOUT = Path(__file__).parents[2]
links = scripts.load(CHECKOUT / "benchmarks" / "island_links.py")


def row(page: str, heading: str, gbit: str) -> list[float]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    table = text[text.index(f"| {heading}") :].split("\n\n")[0]
    found = next(line for line in table.splitlines() if line.startswith(f"| {gbit} |"))
    return [float(cell.replace(",", "")) for cell in found.strip("| ").split("|")[1:]]


def test_the_page_has_the_hours_of_the_results():
    data, mesh, hybrid, _, *rounds = row("benchmarks/RESULTS.md", "Gbit/s between 8 islands", "10")
    assert row("docs/why-many-gpus.md", "Gbit/s between 8 islands", "10") == [data, mesh, hybrid, *rounds]


@pytest.mark.parametrize("way", ["data", "hybrid", "DiLoCo, H = 50", "DiLoCo, H = 50, 4 bits"])
def test_hours(way):
    """One link, without the single mesh: the search for that takes ten seconds."""
    found = row("benchmarks/RESULTS.md", "Gbit/s between 8 islands", "10")[list(links.WAYS).index(way)]
    assert links.TOKENS / links.tokens_per_s(way, 8, 10.0, 10.0) / 3600 == pytest.approx(found, rel=0.01)
