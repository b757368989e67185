"""The faults of a rehearsal, planned from a seed: which host, what happens to it, and at which moment of the run.

Moments are steps, saves and starts of the run, not seconds: a slow machine meets the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "freeze", "cut"]
Moment = Literal["step", "save", "start"]
MOMENTS: dict[Moment, int] = {"step": 6, "save": 3, "start": 1}
"""With their weights."""
FIRST_STEP, STEPS_APART = 7, 12
"""The first fault comes when there may be a checkpoint; the next one when the run has caught up and saved again."""
WORDS: dict[Kind, str] = {"kill": "power loss", "freeze": "freeze", "cut": "cut cable"}


@dataclass(frozen=True)
class Fault:
    kind: Kind
    """kill: all processes of the host end at once, and it comes back; freeze: its training process stops; cut: its cable."""
    host: int
    moment: Moment
    """start: while the run starts, for the first time or after the fault before."""
    step: int
    """A step or save not before this one."""

    def __str__(self) -> str:
        when = {"step": f"after step {self.step}", "save": f"in a save after step {self.step}", "start": "in a start"}
        return f"{WORDS[self.kind]} of host {self.host} {when[self.moment]}"


def plan_faults(seed: int, hosts: int, counts: Mapping[Kind, int]) -> tuple[Fault, ...]:
    """The faults in their order: `counts` of each kind."""
    chance = random.Random(seed)
    kinds: list[Kind] = [kind for kind, count in counts.items() for _ in range(count)]
    chance.shuffle(kinds)
    faults = []
    for number, kind in enumerate(kinds):
        (moment,) = chance.choices(list(MOMENTS), list(MOMENTS.values()))
        step = FIRST_STEP + STEPS_APART * number + chance.randrange(STEPS_APART // 2)
        faults.append(Fault(kind, chance.randrange(hosts), moment, step))
    return tuple(faults)


def steps_for(faults: int) -> int:
    """Steps of a run that meets so many faults."""
    return FIRST_STEP + STEPS_APART * (faults + 1)
