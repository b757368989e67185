"""`jaxllm train`: the training loop. It resumes, logs, evaluates and saves, and prints results at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from jaxllm.checkpoint.files import Meta, describe_run, saved_steps
from jaxllm.checkpoint.held_store import hold_store, joined_checkpoints
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.memory import STORED, MemoryCheckpoints, forget
from jaxllm.checkpoint.memory_restore import LostPieces
from jaxllm.checkpoint.run_lock import hold_run_dir
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints
from jaxllm.config import Config
from jaxllm.config.rounds import next_common_step
from jaxllm.cost_model.flops import mfu
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.parallel.types import Loss
from jaxllm.runtime import distributed, exit_codes, progress, watchdog
from jaxllm.train import fewer_hosts, trackers
from jaxllm.train.batch_growth import resumed
from jaxllm.train.console import Console
from jaxllm.train.epilogue import conclude, record_evaluation
from jaxllm.train.exports import exporting
from jaxllm.train.given import Batches, Given, adopted
from jaxllm.train.memory_check import explain_out_of_memory
from jaxllm.train.messages import by_source, describe_phase, noise_note, print_header, what_went_wrong, who_was_left_out
from jaxllm.train.metrics import Record, Sink, open_sinks
from jaxllm.train.run_dir import keep_companions, keep_reference, make_run_dir, require_same_run, write_config
from jaxllm.train.run_timer import RunTimer
from jaxllm.train.signals import SignalHandler
from jaxllm.train.stragglers import Stragglers, replica_here
from jaxllm.train.trainer import Trainer


def fit(
    config: Config,
    *,
    batches: Batches | None = None,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    on_step: Callable[[Record, Trainer], None] | None = None,
    import_s: float = 0.0,
) -> Trainer:
    """Trains `config` to its last step, from its newest checkpoint if the run directory has one. A signal may stop it earlier;
    Trainer.stopped_by then names it. If a supervisor restarts the run, one before the first step exits with exit_codes.RESTART.

    Args:
      batches, loss, optimizer, on_step: as Trainer's (docs/extending.md).
      import_s: seconds that this process spent on imports and the config before the call; 0: not known.
    """
    timer = RunTimer(import_s)
    launch, minutes = distributed.launch_info(), config.checkpoint.every_minutes
    watchdog.beat(launch.beat_fd)
    trackers.check(config)
    signals = SignalHandler(minutes * 60 if minutes else None, leave_early if launch.restarts else None)
    # Announce an error to the other processes before closing anything, because closing may wait for them.
    with ExitStack() as stack, distributed.leaving_on_errors(), explain_out_of_memory(config) as advice:
        stack.enter_context(watchdog.Watchdog(config.run, distributed.peer_monitor))
        folder = make_run_dir(config)
        if launch.restarts:
            stack.enter_context(signals)
        stored, resumes = stack.enter_context(store_of(adopted(config, Given(batches, loss, optimizer)), folder))
        leads, joined = stack.enter_context(joined_checkpoints(folder, config.checkpoint, stored))
        given: Any = {"batches": batches, "loss": loss, "optimizer": optimizer, "on_step": on_step}
        trainer = advice.trainer = Trainer(config, **given, resumes=resumes or (joined is not None and joined.has_parts()))
        stack.callback(trainer.close)
        require = stack.enter_context(hold_run_dir(folder, leads))
        asked, config = config, trainer.config
        console = stack.enter_context(Console(config.train.steps, main=distributed.is_main_process()))
        checkpoints = stack.enter_context(closing(open_checkpoints(trainer, folder, require, stored, joined)))
        print_header(console, trainer)
        if missing := fewer_hosts.describe(asked, config):
            console.say(missing)
        memory = stack.enter_context(memory_of(trainer, folder))
        resume(trainer, checkpoints, memory, folder, console)
        config = trainer.config
        console.resize(config.train.steps)
        keep_reference(folder, trainer, require)
        stack.enter_context(exporting(trainer, checkpoints, folder, console, signals))
        if (first := trainer.step) >= config.train.steps:
            console.say(f"nothing to train: train.steps={config.train.steps}")
        sinks = open_sinks(config, first, require, lambda: trainer.config.train.steps) if distributed.is_main_process() else []
        if distributed.is_main_process():
            for sink in sinks:
                stack.callback(sink.close)
            trainer.watch.recall(folder / "metrics.jsonl")
            keep_companions(folder, trainer)
        keep_config = partial(store_config, folder, trainer, require)
        keep_config()
        if not launch.restarts:
            # Before this point a signal has its default effect.
            stack.enter_context(signals)
        room = None
        if launch.restarts:
            room = stack.enter_context(distributed.waiting_room(lambda hosts: signals.ask(f"the return of {hosts}")))
        with progress.phase("step"):
            stopped_by = train(trainer, checkpoints, memory, signals, console, sinks, timer, keep_config)
        with progress.phase("save"):
            if trainer.step == trainer.memory_step:
                # Nothing was trained since, and the memory is about to be emptied.
                checkpoints.save(trainer.step, trainer.state, describe(trainer))
            checkpoints.wait(stopped_by)
            if memory is not None:
                memory.close(is_useless=True)
        with progress.phase("finish"):
            stopped_by = trainer.stopped_by = stopped_by or conclude(trainer, signals, console, sinks)
        if stopped_by and trainer.step:
            console.say(f"stopped at step {trainer.step} by {stopped_by}; saved; rerun the same command to resume")
        elif stopped_by:
            console.say(f"stopped before the first step by {stopped_by}; there is nothing to save")
        if room is not None:
            room.ended = not stopped_by
        console.say(f"run directory {folder}")
    return trainer


def store_config(folder: Path, trainer: Trainer, require: Callable[[], None]) -> None:
    if distributed.is_main_process():
        require()
        write_config(folder, trainer.config)


def leave_early(name: str) -> None:
    """Callback of SignalHandler: the signal `name` came before any training, and a supervisor restarts this run."""
    distributed.leave_at_once(
        f"stopped by {name} before the first step of this start: there is nothing to save", exit_codes.RESTART
    )


@contextmanager
def store_of(config: Config, folder: Path) -> Iterator[tuple[StoredCheckpoints | None, bool]]:
    """The run's checkpoints in its store, on process 0, and whether there are some, or in run.dir; the store is held until the
    end."""
    if config.checkpoint.store is not None or distributed.is_one_of_several():
        # Whether the run resumes the Trainer must know, on all processes alike.
        fewer_hosts.meet(config)
    with hold_store(folder, config.checkpoint) as (stored, has_one):
        has_one = has_one or bool(saved_steps(folder / "checkpoints"))
        # Hosts may have run directories of their own.
        yield stored, bool(distributed.first_nonempty("yes" if has_one else ""))


def open_checkpoints(
    trainer: Trainer,
    folder: Path,
    require: Callable[[], None],
    stored: StoredCheckpoints | None,
    joined: JoinedCheckpoints | None,
) -> Checkpoints:
    """The run's checkpoints; those of a store only if they are of the same run."""

    def accept(address: str, meta: Meta) -> None:
        require_same_run(address, meta, resumed(trainer.asked, meta), trainer.data.fingerprint, "checkpoint.store")

    return Checkpoints(folder, trainer.config.checkpoint, require, stored, accept, joined)


@contextmanager
def memory_of(trainer: Trainer, folder: Path) -> Iterator[MemoryCheckpoints | None]:
    """The run's checkpoints in memory, if it has any; closed at the end."""
    config = trainer.config.checkpoint
    if config.memory_every_steps is None:
        if distributed.is_main_process():
            forget(folder)
        yield None
        return
    memory = MemoryCheckpoints(folder, config, trainer.state, trainer.absent_hosts)
    try:
        yield memory
    finally:
        memory.close()


def say_damaged(checkpoints: Checkpoints, folder: Path, console: Console) -> None:
    for sentence in checkpoints.said:
        console.say(sentence)
    for sentence in checkpoints.damaged:
        console.say(f"{sentence}: moved to {folder / 'checkpoints-damaged'}")


def resume(
    trainer: Trainer, checkpoints: Checkpoints, memory: MemoryCheckpoints | None, folder: Path, console: Console
) -> None:
    """Restores the newest state, of the memory of the hosts or of the run directory, if there is one."""
    stored, found = checkpoints.latest, None
    if memory is not None:
        with progress.phase("restore"):
            found = memory.find(stored, checkpoints.newest_name)
    if found is not None:
        require_same_run(found.folder, found.meta(), resumed(trainer.asked, found.meta()), trainer.data.fingerprint)
        try:
            with progress.phase("restore"):
                trainer.restore(found)
            trainer.memory_step = trainer.step
            checkpoints.set_damaged_aside()
            say_damaged(checkpoints, folder, console)
            newest = "there is none" if stored is None else f"the newest is {stored}"
            console.say(f"resumed from step {trainer.step} in {found.folder}; in {folder} {newest}")
        except LostPieces as error:
            if stored is None:
                raise
            console.say(str(error))
            found = None
    if found is None and stored is not None:
        meta = checkpoints.meta()
        require_same_run(folder, meta, resumed(trainer.asked, meta), trainer.data.fingerprint)
        with progress.phase("restore"):
            trainer.restore(checkpoints)
        say_damaged(checkpoints, folder, console)
        console.say(f"resumed from step {trainer.step} in {folder}")
    checkpoints.offer_saved()
    if memory is not None:
        memory.begin(keep=found)


def train(
    trainer: Trainer,
    checkpoints: Checkpoints,
    memory: MemoryCheckpoints | None,
    signals: SignalHandler,
    console: Console,
    sinks: list[Sink],
    timer: RunTimer,
    keep_config: Callable[[], None],
) -> str | None:
    """The training loop. Metrics arrive one step late; evaluation, saving and profiling wait for the running step. It calls
    keep_config when the batch has grown. Returns the signal that stopped it, or None at the last step.
    """
    config, first = trainer.config, trainer.step
    peak_flops = peak_flops_of(trainer)
    stragglers = Stragglers(console.say, replica=lambda: replica_here(trainer.mesh) if trainer.rounds is not None else None)

    def publish(record: Record | None) -> None:
        if record is None:
            return
        record |= timer.record_keys(trainer, peak_flops)
        for sink in sinks:
            sink.write(record)
        if record["skipped"] or record["loss_spike"]:
            console.say(what_went_wrong(record))
        if record.get("islands_left_out"):
            console.say(who_was_left_out(record))
        rate = float(record["tokens_per_s_per_device"])
        length = config.train.sequence_length // config.phase_at(int(record["step"]) - 1).parts
        utilisation = mfu(rate, config.model, length, peak_flops, config.frozen) if peak_flops else None
        due = record["step"] % config.log.every_steps == 0 or record["step"] in (first + 1, config.train.steps)
        console.step(record, utilisation, due)

    def save(step: int, to: Checkpoints | MemoryCheckpoints = checkpoints) -> None:
        with progress.phase("save"):
            # A memory checkpoint belongs to what is in the store: a user may take the run back there.
            to.save(step, trainer.state, describe(trainer) | ({STORED: checkpoints.newest_saved} if to is memory else {}))

    started = time.perf_counter()
    if first < config.train.steps:
        compile_step(trainer, console)
    signals.next_common = lambda step: next_common_step(trainer.config, step)
    stopped_by = signals.begin()
    while trainer.step < config.train.steps and not stopped_by:
        checkpoints.raise_errors()
        announce_phase(trainer, console)
        with profile(config, trainer.step + 1, first + 1):
            publish(trainer.advance())
            config = announce_growth(trainer, config, console, keep_config)
            step, last = trainer.step, trainer.step == config.train.steps
            actions = signals.actions_after(step)
            stopped_by = None if last else actions.stopped_by
            kinds = ("every_steps", "keep_every_steps", "store_every_steps", "export_every_steps")
            periods = [getattr(config.checkpoint, kind) for kind in kinds]
            saves = last or actions.save or any(is_multiple(step, period) for period in periods)
            evaluates = not (last or stopped_by) and is_multiple(step, config.train.eval_every_steps)
            remembers = not (last or stopped_by) and is_multiple(step, config.checkpoint.memory_every_steps)
            stragglers.look()
            if saves or evaluates or remembers or ends_profile(config, step):
                publish(trainer.finish())
                if saves and not last:
                    stragglers.measure()
        if (saves or evaluates) and (note := noise_note(trainer)):
            console.say(note)
        if memory is not None and remembers:
            save(step, memory)
        if saves:
            save(step)
            signals.saved()
        if evaluates:
            found = record_evaluation(trainer, sinks, signals, config.train.eval_batches)
            if found is None:
                stopped_by = signals.agreed_signal()
                if not saves:
                    save(step)
            else:
                console.say(f"step {step}  held-out loss {found.loss:.4f}{by_source(found)}")
    if trainer.step > first:
        console.say(f"trained {trainer.step - first} steps in {time.perf_counter() - started:.0f} s")
    return stopped_by


def announce_phase(trainer: Trainer, console: Console) -> None:
    """Says that the next step begins a phase of train.batch_schedule or train.length_schedule."""
    if trainer.step > 0 and (phase := trainer.config.phase_at(trainer.step)).first_step == trainer.step:
        console.say(f"{describe_phase(trainer.config, phase)} from here on")


def announce_growth(trainer: Trainer, before: Config, console: Console, keep_config: Callable[[], None]) -> Config:
    """Says that the step that has just begun has a larger batch, by train.batch_grows_to. Returns the present config."""
    config = trainer.config
    if config is not before:
        console.resize(config.train.steps)
        console.say(f"{describe_phase(config, config.phases[-1])} from step {trainer.step} to {config.train.steps}")
        keep_config()
    return config


def describe(trainer: Trainer) -> Meta:
    """Metadata for a checkpoint now."""
    noise = trainer.noise.state() if trainer.noise.found else ()
    return describe_run(trainer.config, trainer.step, trainer.data.fingerprint, trainer.watch.skipped_steps, noise)


def compile_step(trainer: Trainer, console: Console) -> None:
    trainer.prepare()
    if trainer.compile_s is not None:
        source = ", from the cache" if trainer.programs.from_cache else ""
        console.say(f"compiled the train step in {trainer.compile_s:.1f} s{source}")


@contextmanager
def profile(config: Config, step: int, first_step: int):
    """Traces steps log.profile_steps = [first, last] into run.dir/profile; starts at `first_step` if a run resumes inside."""
    span = config.log.profile_steps
    if span and step == max(span[0], first_step) and step <= span[1]:
        jax.profiler.start_trace(str(Path(config.run.dir) / "profile"))
    yield
    if ends_profile(config, step):
        jax.profiler.stop_trace()


def ends_profile(config: Config, step: int) -> bool:
    return bool(config.log.profile_steps) and step == config.log.profile_steps[1]


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def peak_flops_of(trainer: Trainer) -> float | None:
    """Dense peak of this chip in the compute dtype, in FLOP/s; None for an unknown chip."""
    gpu = gpu_from_device_kind(trainer.mesh.devices.flat[0].device_kind)
    return gpu.peak_flops(trainer.config.model.compute_dtype) if gpu else None
