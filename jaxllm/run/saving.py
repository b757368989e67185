"""A run's checkpoints: found and restored before the first step, saved when they are due, and at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from jaxllm.checkpoint.files import Meta, describe_run, saved_steps
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints, joined_checkpoints
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints, hold_store
from jaxllm.cluster import distributed, progress
from jaxllm.config import Config
from jaxllm.run import fewer_hosts
from jaxllm.run.batch_growth import resumed
from jaxllm.run.hooks import Run, is_multiple
from jaxllm.run.run_dir import require_same_run
from jaxllm.run.trainer import Trainer

PERIODS = ("every_steps", "keep_every_steps", "store_every_steps", "export_every_steps")
"""Keys of the section checkpoint: a multiple of any of them is saved."""


class Stores(NamedTuple):
    """Where a run's checkpoints are beside run.dir, which the Trainer must know before it is made."""

    stored: StoredCheckpoints | None
    """Those in checkpoint.store, on process 0."""
    joined: JoinedCheckpoints | None
    """Those of hosts without a shared disk."""
    leads: bool
    """Whether this process holds run.dir for itself or for others."""
    resumes: bool
    """Whether there is a checkpoint anywhere, on all processes alike."""


@contextmanager
def stores_of(config: Config, folder: Path) -> Iterator[Stores]:
    """The stores of a run are held until the end of the context."""
    if config.checkpoint.store is not None or distributed.is_one_of_several():
        # Whether the run resumes the Trainer must know, on all processes alike.
        fewer_hosts.meet(config)
    with hold_store(folder, config.checkpoint) as (stored, has_one):
        has_one = has_one or bool(saved_steps(folder / "checkpoints"))
        # Hosts may have run directories of their own.
        resumes = bool(distributed.first_nonempty("yes" if has_one else ""))
        with joined_checkpoints(folder, config.checkpoint, stored) as (leads, joined):
            yield Stores(stored, joined, leads, resumes or (joined is not None and joined.has_parts()))


def open_checkpoints(run: Run) -> Checkpoints:
    """The run's checkpoints; those of a store only if they are of the same run."""
    trainer = run.trainer

    def accept(address: str, meta: Meta) -> None:
        require_same_run(address, meta, resumed(trainer.asked, meta), trainer.data.fingerprint, "checkpoint.store")

    return Checkpoints(run.folder, trainer.config.checkpoint, run.require, run.stores.stored, accept, run.stores.joined)


def resume(run: Run) -> None:
    """Restores the newest state, if there is one."""
    trainer, checkpoints, folder, console = run.trainer, run.checkpoints, run.folder, run.console
    if checkpoints.latest is not None:
        meta = checkpoints.meta()
        require_same_run(folder, meta, resumed(trainer.asked, meta), trainer.data.fingerprint)
        with progress.phase("restore"):
            trainer.restore(checkpoints)
        for sentence in checkpoints.said:
            console.say(sentence)
        for sentence in checkpoints.damaged:
            console.say(f"{sentence}: moved to {folder / 'checkpoints-damaged'}")
        console.say(f"resumed from step {trainer.step} in {folder}")
    checkpoints.offer_saved()


def describe(trainer: Trainer) -> Meta:
    """Metadata for a checkpoint now."""
    noise = trainer.metrics.noise.state() if trainer.metrics.noise.found else ()
    return describe_run(trainer.config, trainer.step, trainer.data.fingerprint, trainer.metrics.watch.skipped_steps, noise)


def register(run: Run) -> None:
    """Restores the newest state. Saves by checkpoint.*, by the clock, before a stop and after the last step."""
    trainer: Trainer = run.trainer
    config = trainer.config.checkpoint
    run.checkpoints = checkpoints = run.stack.enter_context(closing(open_checkpoints(run)))
    resume(run)
    run.first = saved_step = trainer.step
    run.console.resize(trainer.config.train.steps)

    def save() -> None:
        nonlocal saved_step
        with progress.phase("save"):
            checkpoints.save(trainer.step, trainer.state, describe(trainer))
        saved_step = trainer.step
        run.signals.saved()

    def finish() -> None:
        if trainer.step != saved_step:
            # A signal came during an evaluation, or a hook stopped the run.
            save()
        checkpoints.wait(trainer.stopped_by)

    run.on("before", checkpoints.raise_errors)
    periods = [getattr(config, key) for key in PERIODS]
    run.when(
        lambda moment: moment.last or moment.asks_to_save or any(is_multiple(moment.step, period) for period in periods),
        lambda _: save(),
        name="save",
    )
    run.on("trained", finish)
