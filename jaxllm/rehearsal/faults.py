"""The faults of a rehearsal, planned from a seed, and what it has shown: for each fault what the run said and lost, and whether
the promise held.

Moments of faults are steps, saves and starts of the run, not seconds: a slow machine meets the same faults. The promise: the
run finishes, every step has the loss and gradient norm of a run without faults, bit for bit, no checkpoint that was complete is
lost, and each fault is named, with its host and cause, within NAMED_WITHIN_S.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from jaxllm.cluster.peer_monitor import CAUSES, CLOSED, SILENT
from jaxllm.rehearsal.hosts import Line
from jaxllm.terminal import terminal_table

Kind = Literal["kill", "freeze", "cut"]
Moment = Literal["step", "save", "start"]
MOMENTS: dict[Moment, int] = {"step": 6, "save": 3, "start": 1}
"""With their weights."""
FIRST_STEP, STEPS_APART = 7, 12
"""The first fault comes when there may be a checkpoint; the next one when the run has caught up and saved again."""
WORDS: dict[Kind, str] = {"kill": "power loss", "freeze": "freeze", "cut": "cut cable"}
NAMED_WITHIN_S = 60.0
EXPECTED = {"kill": (CAUSES[CLOSED], CAUSES[SILENT]), "freeze": (CAUSES[SILENT],), "cut": (CAUSES[SILENT],)}
"""Causes that a sentence may name for each kind of fault. A host without power says nothing; its system, if it still runs,
closes the connections."""
COMPARED = ("loss", "grad_norm")
Metrics = Mapping[str, Any]


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


# ----------------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Strike:
    """A fault that happened."""

    fault: Fault
    unix_s: float
    during: str
    reached: int
    """The last step in metrics.jsonl."""


@dataclass(frozen=True)
class History:
    """What was seen of a run."""

    planned: Sequence[Fault]
    strikes: Sequence[Strike]
    lines: Sequence[Line]
    """What the hosts printed."""
    metrics: Sequence[Metrics]
    """Lines of metrics.jsonl by time, with those of steps that were done again."""
    committed: Mapping[int, float]
    """Step of each complete checkpoint, and when it was first seen, in seconds since 1970."""
    not_whole: Mapping[int, str]
    """Steps of checkpoints that should be there at the end and are not intact, with the reason."""
    unfinished: str
    """Why the run did not finish; "" if it did."""


def naming(strike: Strike, lines: Sequence[Line]) -> Line | None:
    """The first sentence of another host that names a fault's host and cause, in time."""
    for line in _sentences(strike, lines):
        # "process 3 on h3 is lost", "processes 1, 2 and 3 on h1 are lost"
        found = re.match(r"jaxllm: process(?:es)? ([\d, and]+) on .* (?:is|are) lost", line.text)
        names_host = found and str(strike.fault.host) in re.findall(r"\d+", found[1])
        if names_host and any(cause in line.text for cause in EXPECTED[strike.fault.kind]):
            return line
    return None


def _sentences(strike: Strike, lines: Sequence[Line]) -> Iterator[Line]:
    """What jaxllm said on other hosts in the time to name a fault."""
    for line in lines:
        in_time = 0 <= line.unix_s - strike.unix_s <= NAMED_WITHIN_S
        if in_time and line.host != strike.fault.host and line.text.startswith("jaxllm: "):
            yield line


@dataclass(frozen=True)
class Report:
    """The verdict on a history."""

    steps: int
    """Number of steps of the whole run."""
    reference: Sequence[Metrics]
    """Metrics of the run without faults."""
    history: History

    @cached_property
    def problems(self) -> list[str]:
        """Sentences on what breaks the promise."""
        return [*self._unfinished(), *self._unnamed(), *self._different(), *self._lost()]

    @property
    def held(self) -> bool:
        return not self.problems

    def lost_s(self, strike: Strike) -> float | None:
        """Seconds from a fault until the step that the run had reached is reached again; None: never."""
        began_s = 0.0
        for line in self.history.metrics:
            began_s = line.get("start_unix_s", began_s)
            if began_s > strike.unix_s and line["step"] >= strike.reached:
                return line["unix_s"] - strike.unix_s
        return None

    def render(self) -> Group:
        """For a terminal of at least 80 columns."""
        rows, said = [], []
        for number, strike in enumerate(self.history.strikes, start=1):
            line, lost_s = naming(strike, self.history.lines), self.lost_s(strike)
            named = f"{line.unix_s - strike.unix_s:.1f} s" if line else "not named"
            line = line or next(_sentences(strike, self.history.lines), None)
            text = line.text.removeprefix("jaxllm: ") if line else "the other hosts said nothing"
            rows.append((str(number), str(strike.fault), strike.during, named, "-" if lost_s is None else f"{lost_s:.0f} s"))
            said.append(Text(f"{number}  {text}"))
        lines = [f"not held: {problem}" for problem in self.problems] or [
            f"held: {self.steps} steps, each with the loss and gradient norm of the run without faults, bit for bit; "
            f"{len(self.history.committed)} checkpoints, none lost; every fault named within {NAMED_WITHIN_S:.0f} s"
        ]
        grid = terminal_table(rows, ("", "fault", "during", "named after", "lost"), right=("named after", "lost"))
        return Group(grid, Text(), *said, Text(), *map(Text, lines))

    def _unfinished(self) -> Iterator[str]:
        if self.history.unfinished:
            yield self.history.unfinished
        for fault in self.history.planned[len(self.history.strikes) :]:
            yield f"the {fault} did not happen: the run was over"
        done = {line["step"] for line in self.history.metrics}
        if missing := [step for step in range(1, self.steps + 1) if step not in done]:
            yield f"{len(missing)} of {self.steps} steps were not done, the first is {missing[0]}"

    def _unnamed(self) -> Iterator[str]:
        for number, strike in enumerate(self.history.strikes, start=1):
            if naming(strike, self.history.lines) is None:
                yield f"fault {number}, the {strike.fault}, was not named with its cause within {NAMED_WITHIN_S:.0f} s"

    def _different(self) -> Iterator[str]:
        expected = {line["step"]: line for line in self.reference}
        differing = [
            (line["step"], key, line[key], expected[line["step"]][key])
            for line in self.history.metrics
            for key in COMPARED
            if line["step"] in expected and line[key] != expected[line["step"]][key]
        ]
        if differing:
            step, key, found, wanted = differing[0]
            steps = len({one[0] for one in differing})
            # null is a number that is not finite.
            apart = max(math.inf if None in (a, b) else abs(a - b) / abs(b or a) for _, _, a, b in differing)
            yield (
                f"{steps} step{'s differ' if steps > 1 else ' differs'} from the run without faults, at most by {apart:.1e} of "
                f"the value; the first is step {step}, with {key} {found!r} instead of {wanted!r}"
            )

    def _lost(self) -> Iterator[str]:
        for line in self.history.metrics:
            if "start_unix_s" not in line:
                continue
            saved = [step for step, unix_s in self.history.committed.items() if unix_s < line["start_unix_s"]]
            if saved and line["step"] <= max(saved):
                yield f"checkpoint {max(saved)} was complete, and the next start began after step {line['step'] - 1}"
        for step, reason in self.history.not_whole.items():
            yield f"checkpoint {step} was complete, and is not whole at the end: {reason}"
