"""Saves and resumes a run. A kill, a full disk, a torn file or another mesh loses nothing.

    run.dir/checkpoints/400/        one checkpoint; it has another name until it is complete
      state/                        the complete TrainState (with train.diloco_steps a DilocoState): Orbax, OCDBT (where
                                    hosts share no disk, one file for each piece of an array: host_shares.py)
      meta/metadata                 JSON: step, samples consumed, fingerprint of the text, config, versions
      files.json                    sizes and checksums of the files above
    run.dir/checkpoints-damaged/    damaged checkpoints: moved, never deleted

The rows that `vocab_rows` adds for a mesh are zero, and so are the layers that fill up a pipeline, and what makes a dim divide
over ZeRO's ranks. Reading adds or removes them, and restacks the layers for other virtual stages. A checkpoint fits every mesh.
"""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxllm.checkpoint.arrays import read_arrays, restacked, silence_orphans
from jaxllm.checkpoint.files import (
    BACKSLASH,
    MANIFEST,
    META,
    STATE,
    DamagedError,
    Meta,
    cannot_be_read,
    describe_files,
    describe_own_files,
    is_not_damage,
    newest_undamaged,
    newest_whole,
    read_meta,
    require_plain_path,
    saved_steps,
    set_aside,
    verified,
    why,
)
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints
from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints
from jaxllm.cluster import distributed, exit_codes, progress
from jaxllm.cluster.distributed import is_of_jax, raising_together
from jaxllm.cluster.exit_codes import causes
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.mesh.axes import HOST

State = Any
"""A TrainState or a DilocoState: a dataclass of arrays, trees of arrays, and such dataclasses. Fields of None are not saved."""


log = logging.getLogger(__name__)


class SaveError(ConfigError):
    """A checkpoint could not be written. The sentence names step, folder, reason, and the newest complete checkpoint."""


class Checkpoints:
    """The checkpoints of one run directory, by step. With several processes, all create it and call it in the same order.

    Args:
      require: called before any change; RunDirLock.require if the run holds the directory.
      stored: the checkpoints in config.store, on process 0: a newer one there comes first.
      accept: called with the address of the store and the metadata of a checkpoint there before it is fetched; raises
        ConfigError if it is of another run.
      joined: those of a run whose hosts share no disk, on each process: they alone count, and `stored` does not.

    Attributes:
      latest: step of the newest intact checkpoint; None if there is none.
      said: sentences on the checkpoints in the store, on process 0.
      damaged: sentences on the newer checkpoints, which are damaged.
      on_saved: called with the step of each checkpoint that has been completed.
      is_awaited: whether something is still to read a step in the folder.

    Raises:
      ConfigError: there are checkpoints and none is intact.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        require: Callable[[], None] = unfenced,
        stored: StoredCheckpoints | None = None,
        accept: Callable[[str, Meta], None] = lambda address, meta: None,
        joined: JoinedCheckpoints | None = None,
    ):
        require_plain_path("run.dir", run_dir, BACKSLASH)
        self.folder = run_dir.absolute() / "checkpoints"
        self._config, self._require, self._joined = config, require, joined
        self._stored = stored if joined is None else joined if distributed.is_main_process() else None
        for there in filter(None, (stored, joined)):
            there.require, there.accept = require, accept
        # The folder of what this process saves.
        self._own = self.folder if joined is None else joined.shares.folder
        self.said: list[str] = []
        self._manager: ocp.CheckpointManager | None = None
        self._errors: list[Exception] = []
        self._saving: int | None = None
        self.on_saved: Callable[[int], None] = lambda step: None
        self.is_awaited: Callable[[int], bool] = lambda step: False
        self._refused: dict[int, str] = {}
        self.latest: int | None = None
        self._choose()
        self.newest_saved = self.newest_name

    @property
    def damaged(self) -> list[str]:
        return [f"checkpoint {step} is damaged ({reason})" for step, reason in self._refused.items()]

    def meta(self) -> Meta:
        """Metadata of the newest intact checkpoint."""
        return read_meta(self.folder / str(self.latest))

    def restore(self, like: State | Callable[[Meta], State], table: Any) -> State:
        """Reads the newest readable state in the layout `like` (ShapeDtypeStructs with shardings), and sets `latest` to its
        step. Damaged newer checkpoints are moved away.

        Args:
          like: the layout, or a function from the metadata of the checkpoint to the layout.
          table: the model's parameters as a nested dict of Parameter.

        Raises:
          ConfigError: none can be read, or an array has another shape.
        """
        while True:
            assert self.latest is not None, "there is none to restore"
            state, reason, folder = None, "", self.folder / str(self.latest)
            wanted = like(self.meta()) if callable(like) else like
            try:
                with verified(folder):
                    state = read_arrays(folder / STATE, as_dict(wanted), table)
            except DamagedError as error:
                reason = error.reason
            except ConfigError:
                raise
            except Exception as error:
                # Orbax raises many types, also plain Exceptions.
                if is_not_damage(error):
                    raise cannot_be_read(folder, error) from error
                reason = why(error)
            if not (reason := distributed.first_nonempty(reason)):
                break
            self._refused[self.latest] = reason
            if self._joined is not None:
                self._joined.damaged[self.latest] = reason
            elif self._stored is not None:
                self._stored.refuse(self.latest, reason)
            del state
            self._choose()
        if self._refused and distributed.is_main_process():
            # Training will save their steps again.
            self._require()
            for step in self._refused:
                if (self.folder / str(step)).exists():
                    set_aside(self.folder / str(step))
        # This is a collective, so it runs only after all processes have agreed that they could read.
        return as_state(restacked(state, as_dict(wanted)), wanted)

    @property
    def newest_name(self) -> int | None:
        """The newest step that is there, damaged or not."""
        found = {*self._refused, *(() if self._joined is None else self._joined.damaged)}
        return max(found if self.latest is None else {*found, self.latest}, default=None)

    def offer_saved(self) -> None:
        """Offers to the store what the folder has. After `restore`, which may find damage: in the store, a damaged checkpoint
        would displace an intact one.
        """
        if self._joined is not None:
            self._joined.begin(self.latest)
        elif self._stored is not None and self.latest is not None:
            self._stored.offer_local(self.latest)

    def save(self, step: int, state: State, meta: Meta) -> None:
        """Saves `state` as checkpoint `step`. It waits for the previous save, and returns when the state is copied, or with
        checkpoint.asynchronous=false when it is written. A step that is already saved does not change.

        Raises:
          SaveError: this save or the previous one failed.
          ConfigError: Orbax cannot use the path of the run directory.
        """
        require_plain_path("run.dir", self.folder.parent)
        try:
            self._require()
            self._settle()
            self._saving = step
            self._manager = self._manager or self._open()
            if step in self._manager.all_steps():
                self._saving = None
                return
            items = {STATE: ocp.args.PyTreeSave(as_dict(state)), META: ocp.args.JsonSave(meta)}
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            # Orbax does not copy arrays in host memory: the next step would overwrite them during the save.
            if not self._config.asynchronous or any(x.sharding.memory_kind == HOST for x in jax.tree.leaves(state)):
                self._settle()
        except Exception as error:
            raise self._failure(error) from error

    def raise_errors(self) -> None:
        """Raises SaveError if the current save has failed. To be called at each step."""
        if self._manager is None or self._saving is None:
            return
        try:
            if self._errors:
                raise self._errors[0]
            if not self._manager.is_saving_in_progress():
                self._settle()
        except Exception as error:
            raise self._failure(error) from error

    def wait(self, stopped_by: str | None = None) -> None:
        """Waits until all is written, also to the store. Every process calls it.

        Args:
          stopped_by: the signal that stopped the run, if one did. What the store does not take then for a reason that may pass
            is a warning: the checkpoint is in the folder, and the next start copies it.

        Raises:
          SaveError: a save failed.
        """
        try:
            self._settle()
        except Exception as error:
            raise self._failure(error) from error
        if self._config.store is not None:
            with raising_together(SaveError):
                if self._stored is not None:
                    # Hosts that share no disk may be deleting what the store has: an older one may seem the last.
                    for last in saved_steps(self._own)[-1:]:
                        if last == self.newest_saved and not self._config.goes_to_store(last):
                            self._stored.offer(last)
                    failure = self._stored.wait()
                    if failure is not None and stopped_by and failure.exit_code != exit_codes.BAD_INPUT:
                        log.warning("%s", failure)
                    elif failure is not None:
                        raise failure
            if self._joined is not None:
                self._joined.shares.look()

    def close(self) -> None:
        """Closes the manager after `wait`. Without `wait`, as after an error, a running save is abandoned."""
        if self._manager is not None and self._saving is None:
            self._manager.close()
            self._manager = None

    def _settle(self) -> None:
        if self._manager is None:
            return
        self._manager.wait_until_finished()
        if self._saving is not None:
            self.newest_saved, self._saving = self._saving, None
            # After a failure the next one is copied, whichever it is.
            if self._stored is not None and (self._config.goes_to_store(self.newest_saved) or self._stored.lacks_one):
                self._stored.offer(self.newest_saved)
            self.on_saved(self.newest_saved)

    def _open(self) -> ocp.CheckpointManager:
        silence_orphans()
        policies = ocp.checkpoint_managers
        kept: list[Any] = [policies.LatestN(self._config.keep)]
        if self._config.keep_every_steps is not None:
            kept.append(policies.EveryNSteps(self._config.keep_every_steps))
        options: dict[str, Any] = {"preservation_policy": policies.AnyPreservationPolicy(kept)}
        alone: dict[str, Any] = {}
        if self._joined is not None:
            # Orbax acts as in a run of this process alone, and HostShares deletes.
            rank = jax.process_index()
            alone["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"share-{rank}"
            )
            options = {"create": False, **alone}
        registry = ocp.DefaultCheckpointHandlerRegistry()
        registry.add(
            STATE, ocp.args.PyTreeSave, WatchedHandler(self._errors, describe_own_files, self._joined is not None, **alone)
        )
        if alone:
            registry.add(META, ocp.args.JsonSave, ocp.JsonCheckpointHandler(**alone))
        manager_options = ocp.CheckpointManagerOptions(
            **options,
            cleanup_tmp_directories=True,
            # Orbax calls it when every file is written and before the folder gets its name.
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._list_files,
                # In the background, a folder that cannot be made is reported after 300 s, and only by process 0.
                create_directories_asynchronously=False,
            ),
        )
        return ocp.CheckpointManager(self._own, options=manager_options, handler_registry=registry)

    def _list_files(self) -> None:
        unfinished = self._own.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        written = [folder for folder in unfinished if self._joined or (folder / MANIFEST).exists()]
        if not written:
            raise OSError(f"Orbax wrote no {Path(MANIFEST).name}, so that nothing could be read again")
        for folder in written:
            describe_files(folder)
        # Next, Orbax renames the folder and deletes older ones.
        self._require()
        if self._stored is not None and self._joined is None and self._config.store_every_steps is not None:
            self._give_up(step for step in saved_steps(self.folder)[: -self._config.keep] if step in self._stored.copied)

    def _give_up(self, steps: Iterable[int]) -> None:
        """Removes checkpoints that Orbax keeps by checkpoint.keep_every_steps and the store has. One that is awaited stays."""
        for step in steps:
            if not self.is_awaited(step):
                # What a kill leaves of it must have another name, or the next start would offer that to the store.
                aside = self.folder.parent / ".to-store" / f"{step}.old"
                with suppress(OSError):
                    aside.parent.mkdir(exist_ok=True)
                    (self.folder / str(step)).rename(aside)
                shutil.rmtree(aside, ignore_errors=True)

    def _choose(self) -> None:
        """Process 0 finds the newest intact checkpoint that was not refused yet, perhaps in the store, and broadcasts it."""
        if self._joined is not None:
            with progress.phase("restore"):
                self.latest, said = self._joined.choose()
            self.said += said
            return

        def newest() -> tuple[int | None, list[tuple[int, str]]]:
            if self._stored is not None:
                here = saved_steps(self.folder)
                with progress.phase("restore"):
                    step, said = self._stored.fetch(newest_undamaged(self.folder, self._refused))
                self.said += said
                if step in here:
                    reason = self._refused.pop(step, "it is not whole")
                    self.said.append(f"the local checkpoint {step} is damaged ({reason}): moved aside")
            latest, refused = newest_whole(self.folder, self._refused)
            return latest, [*refused.items()]

        self.latest, refused = distributed.from_main(newest)
        self._refused = dict(refused)

    def _failure(self, error: Exception) -> SaveError:
        if isinstance(error, SaveError):
            return error
        if self._joined is None:
            steps = saved_steps(self.folder)
        else:
            committed = self._joined.shares.committed
            steps = [] if committed is None else [committed]
        safe = f"the newest complete checkpoint is {steps[-1]}" if steps else "no earlier checkpoint exists"
        found = SaveError(
            f"Checkpoint {self._saving} could not be written to {self._own} ({why(error)}): {safe}; remove the cause, and "
            f"rerun the same command to resume."
        )
        if is_of_jax(causes(error, suppressed=True)[-1]):
            # The cause is a device or a lost peer, not the disk.
            found.exit_code = exit_codes.LOST
        return found


class WatchedHandler(ocp.PyTreeCheckpointHandler):
    """Records a write error at once. Orbax reports it only after a barrier of all processes, and if one process failed, that
    barrier times out after twenty minutes.

    Args:
      written: called in the background when this process has written its arrays, before that barrier, with their folder,
        which has another name until the save is complete.
      of_part: the folder is this process's alone, with a file for each of its pieces of the arrays. Orbax's end of a save is
        left out then, which expects the pieces of all processes.
    """

    def __init__(self, errors: list[Exception], written: Callable[[Path], None], of_part: bool, **options: Any):
        super().__init__(use_ocdbt=not of_part, **options)
        self._errors, self._written, self._of_part = errors, written, of_part

    async def async_save(self, directory: Any, *arguments: Any, **options: Any) -> Any:
        futures = await super().async_save(directory, *arguments, **options)
        # Orbax waits for them in this order.
        results = [*(future.result for future in futures or ()), lambda timeout=None: self._written(Path(directory))]
        return [SimpleNamespace(result=partial(self._watched, result)) for result in results]

    def finalize(self, directory: Any) -> None:
        if not self._of_part:
            self._watched(super().finalize, directory)

    def _watched(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except Exception as error:
            self._errors.append(error)
            raise


def as_dict(state: State) -> Any:
    if not dataclasses.is_dataclass(state):
        return state
    values = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: as_dict(value) for name, value in values if value is not None}


def as_state(arrays: Any, like: State) -> State:
    """Converts the output of as_dict back to a state like `like`."""
    if not dataclasses.is_dataclass(like):
        return arrays
    values = ((field.name, getattr(like, field.name)) for field in dataclasses.fields(like))
    return type(like)(**{name: None if value is None else as_state(arrays[name], value) for name, value in values})
