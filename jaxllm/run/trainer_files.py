"""What a Trainer writes when its program asks (Trainer.save and Trainer.export). `fit` writes by itself."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from jaxllm.checkpoint.files import require_plain_path, saved_steps
from jaxllm.checkpoint.joined_checkpoints import joined_checkpoints
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.run_lock import hold_run_dir, unfenced
from jaxllm.cluster import distributed, progress
from jaxllm.config import CheckpointConfig, Config, ConfigError
from jaxllm.run import saving
from jaxllm.weights.export import export as export_weights
from jaxllm.weights.export import require_format
from jaxllm.weights.staging import require_new
from jaxllm.weights.streaming import Conversion

_OWN: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()
"""Trainer -> the run directories that it has begun."""


def save(trainer: Any, run_dir: str | Path | None) -> Path:
    """See Trainer.save."""
    config = trainer.config if run_dir is None else _in_folder(trainer.config, run_dir)
    folder, step, own = Path(config.run.dir).absolute(), trainer.step, _OWN.setdefault(trainer, set())
    with distributed.raising_together():
        if config.checkpoint.store is not None:
            raise ConfigError("checkpoint.store is filled by jaxllm.fit alone: leave it out for trainer.save.")
        saving.make_run_dir(config)
    with joined_checkpoints(folder, config.checkpoint, None) as (leads, _), hold_run_dir(folder, leads) as require:
        with distributed.raising_together():
            if (steps := saved_steps(folder / "checkpoints")) and folder not in own:
                raise ConfigError(f"{folder} has checkpoints: name another run_dir, or let jaxllm.fit continue that run.")
            if steps and steps[-1] >= step:
                raise ConfigError(f"{folder} has step {steps[-1]} already, and this is step {step}: name another run_dir.")
        own.add(folder)
        _write(trainer, folder, config, trainer.state, require)
        with _by_leader(leads, folder):
            if leads:
                saving.write_config(folder, config)
                saving.keep_companions(folder, trainer)
    return folder / "checkpoints" / str(step)


def export(trainer: Any, destination: str | Path, to: str, options: dict[str, Any]) -> Conversion | None:
    """See Trainer.export."""
    target, leads = Path(destination).absolute(), distributed.is_main_process()
    # Beside it, where there must be room for as much, under a name that no other export has.
    folder = target.parent / distributed.first_nonempty(f".jaxllm-{uuid.uuid4().hex[:12]}.weights" if leads else "")
    with distributed.raising_together():
        _check(trainer.config, str(destination), folder, to, options)
    config = _in_folder(trainer.config, folder).model_copy(update={"checkpoint": CheckpointConfig()})
    try:
        with _by_leader(leads, target):
            if leads:
                folder.mkdir(parents=True)
        with joined_checkpoints(folder, config.checkpoint, None):
            # What exports read of a state.
            _write(trainer, folder, config, {"step": trainer.state.step, "params": trainer.state.params})
        done = None
        with _by_leader(leads, target):
            if leads:
                saving.keep_companions(folder, trainer)
                done = replace(export_weights(folder, target, to, **options), source=f"step {trainer.step}")
        return done
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)


def _check(config: Config, destination: str, folder: Path, to: str, options: dict[str, Any]) -> None:
    """Refuses what would be refused after the weights are written."""
    require_format(to)
    require_new(destination, bool(options.get("force")), is_file=to == "gguf")
    require_plain_path("trainer.export's folder", folder.parent)
    if "step" in options:
        raise ConfigError("step= has no effect: trainer.export writes the present weights. Leave it out.")
    if to == "peft" and config.model.lora is None:
        raise ConfigError("to='peft' writes an adapter, and the config has no model.lora: choose another format.")
    if options.get("verify") and distributed.is_one_of_several():
        raise ConfigError("verify=True needs one process: leave it out, and verify what was written by `jaxllm convert`.")


def _write(trainer: Any, folder: Path, config: Config, state: Any, require: Callable[[], None] = unfenced) -> None:
    with closing(Checkpoints(folder, config.checkpoint, require)) as checkpoints, progress.phase("save"):
        checkpoints.save(trainer.step, state, saving.meta_of(trainer, config))
        checkpoints.wait()


@contextmanager
def _by_leader(leads: bool, where: Path) -> Iterator[None]:
    """What process 0 does in the block; all processes enter it, and have its error."""
    with distributed.raising_together():
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{where} cannot be written ({reason}): remove the cause, or choose another.") from error


def _in_folder(config: Config, run_dir: str | Path) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
