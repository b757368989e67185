"""Global batch size over a run: phases of constant batch size, each of which begins at a number of consumed tokens.

    phases = phases_of(8, ((1000, 16), (4000, 32)), sequence_length=16)
    phase_at(phases, step).sequences          # batch of the step that follows `step` steps
    sequences_before(phases, step)            # consumed by that many steps

All arithmetic is on integers, so that step, consumed tokens and data position follow from each other and a resumed run
continues exactly. Llama 3 405B (arXiv 2407.21783, section 3.4.1) trained with 4M tokens a step, 8M from 252M tokens on and 16M
from 2.87T on.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """A range of steps with the same batch size."""

    first_step: int
    """Steps done before the phase."""
    first_sequence: int
    """Sequences consumed before the phase."""
    sequences: int
    """Sequences per step."""


def phases_of(first_batch: int, schedule: Sequence[Sequence[int]], sequence_length: int) -> tuple[Phase, ...]:
    """The phases of a run without an end. A step is never split: a batch size begins with the first step at whose start at
    least its tokens are consumed. A phase without any step is dropped, and so is one that does not change the batch size.

    Args:
      first_batch: sequences per step from token 0 on.
      schedule: (tokens consumed, sequences per step from there on), tokens ascending.
      sequence_length: tokens per sequence.
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
    """Sequences consumed by the first `step` steps. It is also the index of the next sample."""
    phase = phase_at(phases, step)
    return phase.first_sequence + (step - phase.first_step) * phase.sequences


def done_by(phases: Sequence[Phase], step: int) -> tuple[Phase, ...]:
    """The phases in which the first `step` steps ran. A run that has done these steps can no longer change them."""
    return tuple(phase for phase in phases if phase.first_step < step)
