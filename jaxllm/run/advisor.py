"""What a run asks of the planner and the report, which `jaxllm.fit` and the command line hand in: advisor.use(for_runs). The
questions are the functions of run_report/for_runs.py. A run that nobody gave answers to does without.
"""

from __future__ import annotations

from typing import Any

_current: Any = None


def use(advisor: Any) -> None:
    """Every later question goes to `advisor`: a module with these functions."""
    global _current
    _current = advisor


def ask() -> Any:
    """The module; None if there is none."""
    return _current
