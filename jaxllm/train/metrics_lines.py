"""The lines of a run's metrics.jsonl, for the parts of a resumed run that remember its last steps."""

from __future__ import annotations

from pathlib import Path


def metrics_lines(path: Path) -> list[str]:
    """Lines with their ends; a crash may have truncated the last one. Empty if there is no such file."""
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
