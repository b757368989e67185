"""What a run asks of the planner and the report, which `jaxllm.fit` and the command line hand in: advisor.answers = for_runs.
The questions are the functions of run_report/for_runs.py. A run that nobody gave answers to does without.
"""

from typing import Any

answers: Any = None
"""The module with these functions; None if there is none."""
