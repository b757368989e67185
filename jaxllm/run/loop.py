"""`jaxllm train`: the training loop, and what a run does beside its steps (run/hooks.py)."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import jax
import optax

from jaxllm.checkpoint.run_lock import hold_run_dir
from jaxllm.cluster import distributed, exit_codes, progress, watchdog
from jaxllm.config import Config
from jaxllm.config.rounds import next_common_step
from jaxllm.parallel.types import Loss
from jaxllm.run import batch_growth, evaluation, exports, fewer_hosts, messages, noise_scale, saving, stragglers
from jaxllm.run.console import Console, what_lasts
from jaxllm.run.given import adopted
from jaxllm.run.hooks import Run
from jaxllm.run.memory_check import explain_out_of_memory
from jaxllm.run.metrics import Record
from jaxllm.run.signals import SignalHandler
from jaxllm.run.step_metrics import RunTimer
from jaxllm.run.tracker_kinds import kinds_of
from jaxllm.run.trainer import Trainer
from jaxllm.terminal import saying
from jaxllm.train.build import Batches, Given


def fit(
    config: Config,
    *,
    batches: Batches | None = None,
    documents: Iterable[Any] | None = None,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    on_step: Callable[[Record, Trainer], None] | None = None,
    hooks: Iterable[Callable[[Run], None]] = (),
    import_s: float = 0.0,
) -> Trainer:
    """Trains `config` to its last step, from its newest checkpoint if the run directory has one. A signal may stop it earlier;
    Trainer.stopped_by then names it. If a supervisor restarts the run, one before the first step exits with exit_codes.RESTART.

    Args:
      batches, documents, loss, optimizer, on_step: as Trainer's (docs/extending.md).
      hooks: each is called with the Run once its state is restored, and registers what to do beside the steps (run/hooks.py).
      import_s: seconds that this process spent on imports and the config before the call; 0: not known.
    """
    timer = RunTimer(import_s)
    launch, minutes = distributed.launch_info(), config.checkpoint.every_minutes
    watchdog.beat(launch.beat_fd)
    # Those that cannot work on this host, which may become that of process 0.
    for kind in kinds_of(config):
        kind.check()
    signals = SignalHandler(minutes * 60 if minutes else None, leave_early if launch.restarts else None)
    # Announce an error to the other processes before closing anything, because closing may wait for them.
    with ExitStack() as stack, distributed.leaving_on_errors(), explain_out_of_memory(config) as advice:
        stack.enter_context(watchdog.Watchdog(config.run, distributed.peer_monitor))
        if distributed.is_main_process():
            stack.enter_context(saying(what_lasts))
        folder = saving.make_run_dir(config)
        if launch.restarts:
            stack.enter_context(signals)
        stores = stack.enter_context(saving.stores_of(adopted(config, Given(batches, loss, optimizer, documents)), folder))
        given: Any = {"batches": batches, "documents": documents, "loss": loss, "optimizer": optimizer, "on_step": on_step}
        trainer = advice.trainer = Trainer(config, **given, resumes=stores.resumes)
        stack.callback(trainer.close)
        require = stack.enter_context(hold_run_dir(folder, stores.leads))
        console = stack.enter_context(Console(trainer.config.train.steps, main=distributed.is_main_process()))
        console.is_stopping = lambda: signals.asked
        run = Run(config, trainer, folder, console, signals, timer, stores, require, stack)
        for register in (*FEATURES, *hooks):
            register(run)
        if not launch.restarts:
            # Before this point a signal has its default effect.
            stack.enter_context(signals)
        with progress.phase("step"):
            train(run)
        with progress.phase("save"):
            run.emit("trained")
        with progress.phase("finish"):
            run.emit("ended")
        if trainer.stopped_by and trainer.step:
            console.say(f"stopped at step {trainer.step} by {trainer.stopped_by}; saved; rerun the same command to resume")
        elif trainer.stopped_by:
            console.say(f"stopped before the first step by {trainer.stopped_by}; there is nothing to save")
        console.say(f"run directory {folder}")
    return trainer


def leave_early(name: str) -> None:
    """Callback of SignalHandler: the signal `name` came before any training, and a supervisor restarts this run."""
    distributed.leave_at_once(
        f"stopped by {name} before the first step of this start: there is nothing to save", exit_codes.RESTART
    )


def train(run: Run) -> None:
    """The training loop. Metrics arrive one step late; what is due after a step waits for it. trainer.stopped_by is the signal,
    or the hook's reason, that stopped the run.
    """
    trainer, signals, console = run.trainer, run.signals, run.console
    started = time.perf_counter()
    if run.first < trainer.config.train.steps:
        trainer.prepare()
        if trainer.programs.compile_s is not None:
            source = ", from the cache" if trainer.programs.from_cache else ""
            console.say(f"compiled the train step in {trainer.programs.compile_s:.1f} s{source}")
    else:
        console.say(f"nothing to train: train.steps={trainer.config.train.steps}")
    signals.next_common = lambda step: next_common_step(trainer.config, step)
    trainer.stopped_by = signals.begin()
    while trainer.step < trainer.config.train.steps and not trainer.stopped_by:
        run.emit("before")
        run.publish(trainer.advance())
        moment = run.moment(signals.actions_after(trainer.step))
        run.emit("begun", moment)
        if due := run.due(moment):
            run.publish(trainer.finish())
        for act in due:
            act(moment)
        trainer.stopped_by = moment.stopped_by or (None if moment.last else run.asks_to_stop)
    # Where a hook stopped the run, nothing may have waited for its last step.
    run.publish(trainer.finish())
    if trainer.step > run.first:
        console.say(f"trained {trainer.step - run.first} steps in {time.perf_counter() - started:.0f} s")


def profile(run: Run) -> None:
    """log.profile_steps = [first, last]: a trace of these steps in run.dir/profile. A run that resumes among them traces the
    rest."""
    span = run.asked.log.profile_steps
    if not span:
        return
    first, last = span

    def start() -> None:
        step = run.trainer.step + 1
        if step == max(first, run.first + 1) and step <= last:
            jax.profiler.start_trace(str(run.folder / "profile"))

    run.on("before", start)
    run.when(lambda moment: moment.step == last, lambda _: jax.profiler.stop_trace())


FEATURES: tuple[Callable[[Run], None], ...] = (
    messages.print_header,
    # Before a save: the trace ends with its step, and hosts are compared while they are idle.
    profile,
    stragglers.register,
    noise_scale.register,
    # Restores the state, which the others need.
    saving.register,
    evaluation.keep_reference,
    exports.register,
    messages.register,
    batch_growth.register,
    evaluation.register,
    # After the evaluation, which may be stopped too.
    fewer_hosts.register,
)
"""What a run does beside its steps, in the order in which it registers with the run."""
