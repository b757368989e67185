"""Hooks: what a run does beside its steps. Each feature registers its own (run/loop.py: FEATURES), as a user may.

    def sizes(run):
        run.every(100, lambda moment: run.console.say(f"{moment.step}: {norm(run.trainer.state.params)}"))

    jaxllm.fit(config, hooks=[sizes])

Order, for each step:

    before()          the previous step may still run
    record(metrics)   of the previous step, or of a step that was waited for: metrics come one step late
    begun(moment)     the step runs
    functions of `every` and `when` that are due(moment), in the order of their registration: the step is complete, so
                      trainer.state is its result

and once at the end of a run, also one that was stopped: trained(), with the last step complete and saved, then ended(). `line`
has every line for metrics.jsonl: records of steps, and results of evaluations. Values are numbers of Python.

All processes call the same functions in the same order: what is due must depend on the config and the moment alone. A function
may then use the devices, or wait for other processes. What may take longer than run.stuck_min_s stands in a phase of its own:
with progress.phase("evaluate"). `every` sees to that. What a function raises ends the run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.cluster import progress
from jaxllm.config import Config
from jaxllm.run.console import Console
from jaxllm.run.metrics import Record
from jaxllm.run.signals import SignalHandler, StepActions

Event = Literal["before", "record", "begun", "line", "trained", "ended"]


@dataclass(frozen=True)
class Moment:
    """A step that has begun, as all processes see it."""

    step: int
    """Its number, from 1."""
    last: bool
    stopped_by: str | None
    """The signal, or the reason of Run.stop, that stops the run after this step."""
    asks_to_save: bool
    """A save by the clock is due, or the run is stopped."""

    @property
    def ends(self) -> bool:
        """Whether no step follows, as far as is known when this one begins."""
        return self.last or self.stopped_by is not None


@dataclass
class Run:
    """One start of a run, which features register with.

    Attributes:
      asked: the config that was given.
      trainer: its Trainer, which imports some of the features.
      timer, stores: step_metrics.RunTimer, saving.Stores.
      folder: run.dir.
      require: raises if the run does not hold run.dir any more; to be called before writing there.
      stack: contexts that end with the run, the last one first.
      checkpoints, first: those of run.dir, and the step that the run starts from; known once saving.py has restored the state.
      asks_to_stop: the reason that `stop` was given.
    """

    asked: Config
    trainer: Any
    folder: Path
    console: Console
    signals: SignalHandler
    timer: Any
    stores: Any
    require: Callable[[], None]
    stack: ExitStack
    checkpoints: Checkpoints = field(init=False)
    first: int = field(init=False)
    asks_to_stop: str | None = None
    _hooks: dict[Event, list[Callable[..., Any]]] = field(default_factory=dict)
    _due: list[tuple[str, Callable[[Moment], bool], Callable[[Moment], Any]]] = field(default_factory=list)

    def on(self, event: Event, act: Callable[..., Any]) -> None:
        """Calls `act` at each `event`, with its arguments, after those that were registered before."""
        self._hooks.setdefault(event, []).append(act)

    def when(self, is_due: Callable[[Moment], bool], act: Callable[[Moment], Any], name: str = "") -> None:
        """Waits for each step for which is_due(moment), which must be the same on all processes, and calls act(moment).

        Args:
          name: others may ask is_due(name, moment).
        """
        self._due.append((name, is_due, act))

    def every(self, steps: int, act: Callable[[Moment], Any]) -> None:
        """Waits for every steps-th step, and calls act(moment)."""
        if steps < 1:
            raise ValueError(f"run.every({steps}, ...): give a number of steps of at least 1.")

        def in_its_phase(moment: Moment) -> None:
            with progress.phase("evaluate"):
                act(moment)

        self.when(lambda moment: moment.step % steps == 0, in_its_phase)

    def stop(self, reason: str | None) -> None:
        """Stops the run, which saves, after the step that runs or is complete; not after the last step, nor for None. All
        processes must ask at the same step.
        """
        self.asks_to_stop = self.asks_to_stop or reason

    def moment(self, signals: StepActions) -> Moment:
        """The step that has just begun."""
        last = self.trainer.step == self.trainer.config.train.steps
        stopped_by = None if last else signals.stopped_by or self.asks_to_stop
        return Moment(self.trainer.step, last, stopped_by, signals.save or stopped_by is not None)

    def is_due(self, name: str, moment: Moment) -> bool:
        """Whether something of this name is due."""
        return any(is_due(moment) for known, is_due, _ in self._due if known == name)

    def due(self, moment: Moment) -> list[Callable[[Moment], Any]]:
        return [act for _, is_due, act in self._due if is_due(moment)]

    def emit(self, event: Event, *arguments: Any) -> None:
        for act in self._hooks.get(event, ()):
            act(*arguments)

    def write(self, line: Record) -> None:
        """Emits a line for metrics.jsonl."""
        self.emit("line", line)

    def publish(self, record: Record | None) -> None:
        """Emits a step's metrics, if there are any."""
        if record is not None:
            self.emit("record", record)


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
