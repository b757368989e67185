"""Saving and resuming a run, so that nothing is lost: not to a kill, a full disk, a torn file, nor to another mesh.

    run.dir/checkpoints/400/        one checkpoint; as long as it is written it has another name
      state/                        the whole TrainState (with train.diloco_steps a DilocoState): Orbax, OCDBT
      meta/metadata                 JSON: step, samples consumed, fingerprint of the text, config, versions
      files.json                    sizes and checksums of the files above
    run.dir/checkpoints-damaged/    what was found torn: moved, never deleted

The rows that `vocab_rows` adds for a mesh are zero, and so are the layers that fill up a pipeline: reading cuts them off or
adds them, and cuts the stack of layers anew for other virtual stages. A checkpoint fits every mesh.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxllm.checkpoint.arrays import is_not_damage, lies_on_host, read_arrays, restacked
from jaxllm.checkpoint.files import (
    FILES,
    META,
    STATE,
    Meta,
    cannot_be_read,
    describe_files,
    newest_whole,
    read_meta,
    saved_steps,
    set_aside,
    why,
)
from jaxllm.checkpoint.orbax_errors import WatchedHandler, silence_orphans
from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.runtime import distributed, exit_codes

State = Any
"""A TrainState or a DilocoState: a dataclass of arrays, trees of them, and such dataclasses. What is None is not saved."""


class SaveError(ConfigError):
    """A checkpoint could not be written. One sentence: step, folder, reason, and what is safe."""


class Checkpoints:
    """The checkpoints of one run directory, by step. With several processes all make it, and call it in the same order.

    Args:
      require: called before anything here changes; RunDirLock.require where the run holds the directory.

    Attributes:
      latest: the newest whole checkpoint, as a step; None if there is none.
      damaged: sentences on the checkpoints newer than that which are not whole.

    Raises:
      ConfigError: there are checkpoints and none is whole.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, require: Callable[[], None] = unfenced):
        self.folder = run_dir.absolute() / "checkpoints"
        self._config, self._require = config, require
        self._manager: ocp.CheckpointManager | None = None
        self._errors: list[Exception] = []
        self._saving: int | None = None
        self._refused: dict[int, str] = {}
        self.latest: int | None = None
        self._choose()

    @property
    def damaged(self) -> list[str]:
        return [f"checkpoint {step} is damaged ({reason})" for step, reason in self._refused.items()]

    def meta(self) -> Meta:
        """What the newest whole checkpoint says of itself."""
        return read_meta(self.folder / str(self.latest))

    def restore(self, like: State | Callable[[Meta], State], table: Any) -> State:
        """The newest state that can be read, laid out as `like` (ShapeDtypeStructs with shardings); `latest` is then its step.
        Damaged ones that are newer are moved out of the way, since training will save their steps again.

        Args:
          like: or a function that says it, of what the checkpoint to be read says of itself.
          table: the model's parameters as a nested dict of Parameter.

        Raises:
          ConfigError: none can be read, or the state is another model's.
        """
        silence_orphans()
        while True:
            assert self.latest is not None, "there is none to restore"
            state, reason = None, ""
            wanted = like(self.meta()) if callable(like) else like
            try:
                state = read_arrays(self.folder / str(self.latest) / STATE, _as_dict(wanted), table)
            except ConfigError:
                raise
            except Exception as error:
                # Orbax raises all kinds, bare Exceptions among them.
                if is_not_damage(error):
                    raise cannot_be_read(self.folder / str(self.latest), error) from error
                reason = why(error)
            if not (reason := distributed.first_nonempty(reason)):
                break
            self._refused[self.latest] = reason
            del state
            self._choose()
        if self._refused and distributed.is_main_process():
            self._require()
            for step in self._refused:
                if (self.folder / str(step)).exists():
                    set_aside(self.folder / str(step))
        # Devices meet here, so it comes after the processes have agreed that all have read.
        return _as_state(restacked(state, _as_dict(wanted)), wanted)

    def save(self, step: int, state: State, meta: Meta) -> None:
        """Saves `state` as of `step`: returns once it is copied, or written if checkpoint.asynchronous=false. Waits for the
        save before it. A step that is saved already is left as it is.

        Raises:
          SaveError: this save, or the one before it, failed.
        """
        try:
            self._require()
            self._manager = self._manager or self._open()
            self._settle()
            if step in self._manager.all_steps():
                return
            self._saving = step
            items = {STATE: ocp.args.PyTreeSave(_as_dict(state)), META: ocp.args.JsonSave(meta)}
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            # Of arrays in the host's memory Orbax makes no copy: the next step would write into what is being saved.
            if not self._config.asynchronous or lies_on_host(state):
                self._settle()
        except Exception as error:
            raise self._failure(error) from error

    def raise_errors(self) -> None:
        """To be called at each step. Raises SaveError if the save under way has failed."""
        if self._manager is None or self._saving is None:
            return
        try:
            if self._errors:
                raise self._errors[0]
            if not self._manager.is_saving_in_progress():
                self._settle()
        except Exception as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Until all is written. Raises SaveError if it could not be."""
        try:
            if self._manager is not None:
                self._settle()
        except Exception as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """After `wait`. Without it, as after an error, what is being written is left to itself."""
        if self._manager is not None and self._saving is None:
            self._manager.close()
            self._manager = None

    def _settle(self) -> None:
        assert self._manager is not None, "to be opened first"
        self._manager.wait_until_finished()
        self._saving = None

    def _open(self) -> ocp.CheckpointManager:
        silence_orphans()
        policies = ocp.checkpoint_managers
        kept: list[Any] = [policies.LatestN(self._config.keep)]
        if self._config.keep_every_steps is not None:
            kept.append(policies.EveryNSteps(self._config.keep_every_steps))
        registry = ocp.DefaultCheckpointHandlerRegistry()
        registry.add(STATE, ocp.args.PyTreeSave, WatchedHandler(self._errors))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
            # Run when every file is written and before the folder gets its name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
        )
        return ocp.CheckpointManager(self.folder, options=options, handler_registry=registry)

    def _list_files(self) -> None:
        for folder in self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*"):
            (folder / FILES).write_text(json.dumps(describe_files(folder)))
        # What comes next is the folder's name, and the end of older ones.
        self._require()

    def _choose(self) -> None:
        """Process 0 looks for the newest whole checkpoint that was not refused yet, and tells the others."""
        found: dict[str, Any] = {"latest": None, "refused": {}, "error": ""}
        if distributed.is_main_process():
            try:
                found["latest"], found["refused"] = newest_whole(self.folder, self._refused)
            except ConfigError as error:
                found["error"] = str(error)
        found = json.loads(distributed.broadcast(json.dumps(found)))
        self._refused = {int(step): reason for step, reason in found["refused"].items()}
        self.latest = found["latest"]
        if found["error"]:
            raise ConfigError(found["error"])

    def _failure(self, error: Exception) -> SaveError:
        if isinstance(error, SaveError):
            return error
        steps = saved_steps(self.folder)
        safe = f"the newest complete checkpoint is {steps[-1]}" if steps else "no earlier checkpoint exists"
        found = SaveError(
            f"Checkpoint {self._saving} could not be written to {self.folder} ({why(error)}): {safe}; remove the cause, and "
            f"the same command goes on from there."
        )
        if distributed.is_of_jax(distributed.causes(error, suppressed=True)[-1]):
            # Not of the disk: a device, or a peer that is gone.
            found.exit_code = exit_codes.LOST
        return found


def _as_dict(state: State) -> Any:
    if not dataclasses.is_dataclass(state):
        return state
    values = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: _as_dict(value) for name, value in values if value is not None}


def _as_state(arrays: Any, like: State) -> State:
    """What _as_dict made of a state like `like`, as one again."""
    if not dataclasses.is_dataclass(like):
        return arrays
    values = ((field.name, getattr(like, field.name)) for field in dataclasses.fields(like))
    return type(like)(**{name: None if value is None else _as_state(arrays[name], value) for name, value in values})
