"""How long the stages of a pipeline are idle, and how many microbatches make that short."""

from __future__ import annotations

import math

from jaxllm.pipeline_schedule import ScheduleError

USUAL_IDLE = 0.1
"""An idle share that is usually acceptable; reports give the number of microbatches that it needs."""


def idle_share(stages: int, microbatches: int, virtual_stages: int = 1) -> float:
    """Share of a step in which a stage is idle: (P-1) / (MV + P-1), for every schedule."""
    return (stages - 1) / (microbatches * virtual_stages + stages - 1)


def microbatches_for(idle: float, stages: int, virtual_stages: int = 1) -> int:
    """The smallest M whose idle share is below `idle`; a multiple of P where virtual stages need one.

    Raises:
      ScheduleError: no number of microbatches is enough.
    """
    if not idle > 0:
        raise ScheduleError(f"No number of microbatches brings the idle share of a pipeline below {idle}: ask for more than 0.")
    multiple = stages if virtual_stages > 1 else 1
    # Solve for M and round down, then increase M until the public formula holds.
    M = multiple * max(1, math.floor((stages - 1) * (1 / idle - 1) / virtual_stages / multiple))
    while idle_share(stages, M, virtual_stages) >= idle:
        M += multiple
    return M
