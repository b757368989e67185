"""Global batch size and sequence length over a run: phases in which both are constant, each of which begins at a number of
consumed tokens.

All arithmetic is on integers, so that step, consumed tokens and data position follow from each other and a resumed run
continues exactly. Llama 3 405B (arXiv 2407.21783, section 3.4.1) trained with 4M tokens a step, 8M from 252M tokens on and 16M
from 2.87T on.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """A range of steps with the same batch size and sequence length."""

    first_step: int
    """Steps done before the phase."""
    first_sequence: int
    """Sequences consumed before the phase."""
    sequences: int
    """Sequences per step."""
    parts: int = 1
    """Parts that each sequence is cut into. A step trains on `parts` times as many rows, with the same tokens."""


def phases_of(
    first_batch: int, schedule: Sequence[Sequence[int]], sequence_length: int, lengths: Sequence[Sequence[int]] = ()
) -> tuple[Phase, ...]:
    """The phases of a run without an end. A step is never split: a phase begins with the first step at whose start at least
    its tokens are consumed. A phase without any step is dropped, and so is one that changes nothing.

    Args:
      first_batch: sequences per step from token 0 on.
      schedule: (tokens consumed, sequences per step from there on), tokens ascending.
      sequence_length: tokens per sequence.
      lengths: (tokens consumed, length of a part up to there), tokens ascending; each length divides sequence_length.
    """
    parts = [*(sequence_length // length for _, length in lengths), 1]
    changes: list[tuple[int, int | None, int | None]] = [(tokens, sequences, None) for tokens, sequences in schedule]
    changes += [(until, None, following) for (until, _), following in zip(lengths, parts[1:], strict=True)]
    phases = [Phase(0, 0, first_batch, parts[0])]
    for from_tokens, new_sequences, new_parts in sorted(changes, key=lambda change: change[0]):
        last = phases[-1]
        now = (new_sequences or last.sequences, new_parts or last.parts)
        missing_tokens = from_tokens - last.first_sequence * sequence_length
        steps = max(0, -(-missing_tokens // (last.sequences * sequence_length)))
        if steps == 0:
            phases.pop()
        if not phases or phases[-1][2:] != now:
            phases.append(Phase(last.first_step + steps, last.first_sequence + steps * last.sequences, *now))
    return tuple(phases)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of the step that follows `step` steps."""
    return phases[bisect.bisect_right(phases, step, key=lambda phase: phase.first_step) - 1]


def sequences_before(phases: Sequence[Phase], step: int) -> int:
    """Sequences consumed by the first `step` steps. It is also the index of the next sample."""
    phase = phase_at(phases, step)
    return phase.first_sequence + (step - phase.first_step) * phase.sequences


def batches_of(first_batch: int, schedule: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """All sequences per step, in order."""
    return (first_batch, *(sequences for _, sequences in schedule))


def doublings(batch: int, most: int) -> tuple[int, ...]:
    """`batch` doubled again and again, up to `most`."""
    return () if 2 * batch > most else (2 * batch, *doublings(2 * batch, most))


def done_by(phases: Sequence[Phase], step: int) -> tuple[Phase, ...]:
    """The phases in which the first `step` steps ran. A run that has done these steps can no longer change them."""
    return tuple(phase for phase in phases if phase.first_step < step)
