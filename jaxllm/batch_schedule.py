"""The global batch over a run: phases, each with its batch, that begin where so many tokens are consumed.

    phases = phases_of(8, ((1000, 16), (4000, 32)), sequence_length=16)
    phase_at(phases, step).sequences          # of the step that follows `step` steps
    sequences_before(phases, step)            # consumed by so many steps

All of it is arithmetic on whole numbers, so that the step, the tokens consumed and the place in the data follow from each
other, and a run that is taken up again goes on exactly. Llama 3 405B (arXiv 2407.21783, section 3.4.1) trained with 4M tokens a
step, 8M from 252M tokens on and 16M from 2.87T on.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """Steps of one batch."""

    first_step: int
    """Steps done before it."""
    first_sequence: int
    """Sequences consumed before it."""
    sequences: int
    """Of one step."""


def phases_of(first_batch: int, schedule: Sequence[Sequence[int]], sequence_length: int) -> tuple[Phase, ...]:
    """The phases of a run without end. A step is never cut: a batch begins with the first step at whose start at least its
    tokens are consumed. One whose turn another takes before it had a step is left out, and so is one that changes nothing.

    Args:
      first_batch: sequences of a step from token 0 on.
      schedule: (tokens consumed, sequences of a step from there on), tokens rising.
      sequence_length: tokens of a sequence.
    """
    phases = [Phase(0, 0, first_batch)]
    for from_tokens, sequences in schedule:
        last = phases[-1]
        missing_tokens = from_tokens - last.first_sequence * sequence_length
        steps = max(0, -(-missing_tokens // (last.sequences * sequence_length)))
        if steps == 0:
            phases.pop()
        if not phases or phases[-1].sequences != sequences:
            phases.append(Phase(last.first_step + steps, last.first_sequence + steps * last.sequences, sequences))
    return tuple(phases)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of the step that follows `step` steps."""
    return phases[bisect.bisect_right(phases, step, key=lambda phase: phase.first_step) - 1]


def sequences_before(phases: Sequence[Phase], step: int) -> int:
    """Sequences consumed by the first `step` steps: the number of the next sample."""
    phase = phase_at(phases, step)
    return phase.first_sequence + (step - phase.first_step) * phase.sequences


def done_by(phases: Sequence[Phase], step: int) -> tuple[Phase, ...]:
    """The phases that the first `step` steps ran through: what a run that has got so far can no longer change."""
    return tuple(phase for phase in phases if phase.first_step < step)
