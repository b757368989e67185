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
import errno
import itertools
import json
import logging
import math
import os
import shutil
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.config import CheckpointConfig, Config, ConfigError
from jaxllm.mesh import HOST
from jaxllm.pretrained.folder import versions
from jaxllm.runtime import distributed, exit_codes
from jaxllm.sharding import stack_dims

FORMAT = 1
STATE, META, FILES = "state", "meta", "files.json"
CHECKSUMMED_WHOLE = 64 * 2**20
"""Bytes. Of larger files the checksum covers the first and the last MiB: reading all of a large model again would take minutes,
and what is torn is torn at an end, or is of another size."""
SHARED_LIMIT_S = 20
"""How long a process looks for a file that process 0 wrote: NFS shows it after up to some seconds."""

Meta = dict[str, Any]
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


class WatchedHandler(ocp.PyTreeCheckpointHandler):
    """Notes an error of writing the state as it happens. Orbax tells a process of it after it has met all others, and where
    one failed they do not meet for twenty minutes.
    """

    def __init__(self, errors: list[Exception]):
        super().__init__()
        self._errors = errors

    async def async_save(self, *arguments: Any, **options: Any) -> Any:
        futures = await super().async_save(*arguments, **options)
        return [WatchedFuture(future, self._errors) for future in futures or ()]

    def finalize(self, directory: Any) -> None:
        try:
            super().finalize(directory)
        except Exception as error:
            self._errors.append(error)
            raise


class WatchedFuture:
    """An Orbax future that notes the error it raises."""

    def __init__(self, future: Any, errors: list[Exception]):
        self._future, self._errors = future, errors

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout)
        except Exception as error:
            self._errors.append(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


ORPHANS = ("Event loop is closed", "Encountered error while reading array index")


def silence_orphans() -> None:
    """After the first array that fails, Orbax closes its event loop, and asyncio, TensorStore (writing) or Python (reading)
    print a traceback for each array that finishes later. They say nothing, and would bury the sentence that does. Nor does what
    Orbax itself logs, by way of absl: it raises the errors too, and its warnings would stand below a notebook's cell.
    """
    for name in ("asyncio", "absl"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook
    if getattr(before, "silences_orphans", False):
        return

    def hook(raised: Any) -> None:
        if not str(raised.exc_value).startswith(ORPHANS):
            before(raised)

    hook.silences_orphans = True
    sys.unraisablehook = hook


def describe_run(config: Config, step: int, fingerprint: str, skipped_steps: int = 0) -> Meta:
    """What a checkpoint of `step` says of itself.

    Args:
      fingerprint: of the text the run reads.
      skipped_steps: of the steps until then, those that changed nothing.
    """
    return {
        "format": FORMAT,
        "step": step,
        "samples": config.sequences_before(step),
        "skipped_steps": skipped_steps,
        "fingerprint": fingerprint,
        "vocab_size": config.model.vocab_size,
        "config": config.model_dump(mode="json"),
        "versions": versions(),
    }


# ------------------------------------------------------------------------------------------------------ what is on the disk


def saved_steps(folder: Path) -> list[int]:
    """Steps in a folder of checkpoints, oldest first. Those still being written have other names."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def newest_whole(folder: Path, refused: Mapping[int, str] | None = None) -> tuple[int | None, dict[int, str]]:
    """(the newest step in a folder of checkpoints that is whole, why the steps above it are not). Steps that are `refused` for
    a reason already are not looked at; (None, {}) if the folder holds no checkpoints.

    Raises:
      ConfigError: none is whole, or one cannot be read here.
    """
    reasons = dict(refused or {})
    for step in reversed(saved_steps(folder)):
        if step not in reasons:
            reason = damage(folder / str(step))
            if reason is None:
                return step, reasons
            reasons[step] = reason
    if not reasons:
        return None, {}
    listed = ", ".join(f"{step} ({reason})" for step, reason in reasons.items())
    raise ConfigError(
        f"No checkpoint in {folder} is whole: {listed}; put a copy of one there, or choose another run.dir to start anew."
    )


def describe_files(folder: Path) -> dict[str, list[int]]:
    """{path: [bytes, CRC32]} of the files in the items of a checkpoint. Orbax adds to the files beside them later."""
    files = (path for item in (STATE, META) for path in sorted((folder / item).rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): [path.stat().st_size, checksum(path)] for path in files}


def checksum(path: Path) -> int:
    """CRC32 of a file; of a large one, of its first and last MiB."""
    value, size = 0, path.stat().st_size
    with path.open("rb") as file:
        if size > CHECKSUMMED_WHOLE:
            value = zlib.crc32(file.read(2**20))
            file.seek(-(2**20), os.SEEK_END)
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return value


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, as far as its files tell without reading the arrays; None if nothing is.

    Raises:
      ConfigError: a newer jaxllm wrote it, or this user may not read it.
    """
    try:
        read_meta(folder)
        if not (folder / STATE).is_dir():
            return f"{STATE} is missing"
        if not (folder / FILES).is_file():
            # Reading will tell.
            return None
        for name, (size, crc) in json.loads((folder / FILES).read_text()).items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
            if checksum(path) != crc:
                return f"{name} has changed"
    except ConfigError:
        raise
    except PermissionError as error:
        raise cannot_be_read(folder, error) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return why(error)
    return None


def read_meta(folder: Path) -> Meta:
    """The metadata of a checkpoint, without JAX.

    Raises:
      ConfigError: a newer jaxllm wrote it.
      OSError, ValueError, KeyError: it is missing or torn.
    """
    # The file that Orbax's JsonSave writes.
    meta = json.loads((folder / META / "metadata").read_text())
    if meta["format"] > FORMAT:
        raise ConfigError(
            f"{folder} has format {meta['format']}, and this jaxllm reads up to {FORMAT}: install a newer jaxllm."
        )
    return meta


def cannot_be_read(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder} cannot be read here ({why(error)}): nothing says that it is damaged, so remove the cause.")


def set_aside(folder: Path) -> Path:
    """Moves a damaged checkpoint to a name of its own in checkpoints-damaged, beside its folder."""
    home = folder.parent.parent / "checkpoints-damaged"
    home.mkdir(exist_ok=True)
    target = next(path for n in itertools.count(1) if not (path := home / f"{folder.name}-{n}").exists())
    shutil.move(folder, target)
    return target


def require_shared(run_dir: Path) -> None:
    """Every process must call it.

    Raises:
      ConfigError: on all processes, if one does not see what process 0 writes into the run directory.
    """
    if jax.process_count() == 1:
        return
    name = distributed.broadcast(f".shared-{uuid.uuid4().hex}")
    if distributed.is_main_process():
        (run_dir / name).touch()
    distributed.broadcast("written")
    deadline, missing = time.monotonic() + SHARED_LIMIT_S, ""
    while not (run_dir / name).exists():
        if time.monotonic() > deadline:
            missing = str(jax.process_index())
            break
        # Listing a folder makes NFS look again.
        os.listdir(run_dir)
        time.sleep(0.2)
    missing = distributed.first_nonempty(missing)
    if distributed.is_main_process():
        (run_dir / name).unlink()
    if missing:
        raise ConfigError(
            f"run.dir={run_dir} of process {missing} is not that of process 0: it must be on storage that all hosts share."
        )


# ---------------------------------------------------------------------------------------------------------- reading arrays

NOT_DAMAGE = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Permission denied", "Too many open files")
"""In the error of a read: the reason lies here, not in the checkpoint."""


def is_not_damage(error: BaseException) -> bool:
    links = distributed.causes(error, suppressed=True)
    return any(isinstance(link, MemoryError | PermissionError) for link in links) or any(
        word in str(link) for link in links for word in NOT_DAMAGE
    )


def read_arrays(folder: Path, like: Any, table: Any) -> Any:
    """Reads the arrays that `like` names from an Orbax folder; others in there are not read. Where a stack of layers was cut
    for another pipeline it comes as it was: `restacked` makes it what `like` says.

    Args:
      like: nested dicts of ShapeDtypeStructs with shardings. Each array is read straight into its layout, whatever mesh wrote
        it, and cast to its dtype.
      table: nested dict of Parameter. An array whose path ends in a parameter's has its dims. Along `vocab` and `layers`, zeros
        are added or rows cut off at the end.

    Raises:
      ConfigError: an array is not there, or has another shape; the message names it.
      Exception: the files are damaged, or see NOT_DAMAGE.
    """
    silence_orphans()
    handler = ocp.PyTreeCheckpointHandler()
    found = handler.metadata(folder)  # pyright: ignore[reportArgumentType]  # pathlib's will do
    saved = {_names(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(found, "tree", found))}
    dims = {_names(path): parameter.dims for path, parameter in jax.tree_util.tree_leaves_with_path(table)}

    def read_as(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = _names(path)
        if names not in saved:
            raise ConfigError(f"{folder} has no array {'.'.join(names)}: it was saved by another model or optimizer.")
        parameter = next((names[i:] for i in range(len(names)) if names[i:] in dims), names)
        of_parameter = dims.get(parameter, ("",) * x.ndim)
        # What each island has of its own (diloco.py) has a dim before the parameter's.
        islands = x.ndim - len(of_parameter)
        shape, wanted = saved[names][islands:], x.shape[islands:]
        stacked = stack_dims(of_parameter)
        of_stack = len(shape) - (len(wanted) - stacked)
        sizes = zip(shape[of_stack:], wanted[stacked:], of_parameter[stacked:], strict=False)
        is_other = tuple(saved[names][:islands]) != x.shape[:islands] or any(a != b and d != "vocab" for a, b, d in sizes)
        if is_other or (of_stack not in (1, 3) if stacked else of_stack):
            raise ConfigError(
                f"{'.'.join(parameter)} has shape {tuple(saved[names])} in {folder} and {x.shape} in this config: use the same "
                f"model."
            )
        if of_stack == stacked <= 1 or tuple(shape[:of_stack]) == wanted[:stacked]:
            return x
        if islands:
            raise ConfigError(
                f"{folder} holds islands of DiLoCo whose layers are cut for another pipeline: go on with the same "
                f"parallel.pipe and parallel.virtual_stages."
            )
        return _of_another_stack(x, stacked, shape[:of_stack])

    def arguments(path: Any, x: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        is_whole = tuple(saved[_names(path)]) == x.shape
        return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=is_whole)

    on_disk = jax.tree_util.tree_map_with_path(read_as, like)
    restore_args = jax.tree_util.tree_map_with_path(arguments, on_disk)
    partial = set(saved) != {_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)}
    # The handler alone: Checkpointer.restore ends in a barrier, where a process that failed would leave the others.
    args = ocp.args.PyTreeRestore(item=on_disk, restore_args=restore_args, partial_restore=partial)
    return handler.restore(folder, args=args)  # pyright: ignore[reportArgumentType]  # pathlib's will do


def lies_on_host(arrays: Any) -> bool:
    """Whether some of the arrays are in the host's memory (parallel.offload_state)."""
    return any(x.sharding.memory_kind == HOST for x in jax.tree.leaves(arrays))


def restacked(arrays: Any, like: Any) -> Any:
    """Stacks of layers as `like` has them (parallel/layer_stacking.py): cut into other chunks, identity layers of zeros added at the
    end or taken away. One array after the other; those given are deleted.
    """
    return jax.tree.map(_restack, arrays, like)


def _of_another_stack(like: jax.ShapeDtypeStruct, stacked: int, leading: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """`like`, an array with `stacked` dims that count layers, as one with the dims `leading` instead: split over the same axes,
    and with zero layers at its end where that takes them to divide.
    """
    sharding, sizes = like.sharding, list(leading)
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * like.ndim][: like.ndim]
        axis = next((entry for entry in spec[:stacked] if entry is not None), None)
        ways = 1 if axis is None else sharding.mesh.shape[axis]
        # One dim may have layers added; of three, the one that divides, or none.
        home = next((i for i, size in enumerate(sizes) if size % ways == 0), 0 if len(sizes) == 1 else None)
        if home is not None:
            sizes[home] = -(-sizes[home] // ways) * ways
        entries = [axis if i == home else None for i in range(len(sizes))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries, *spec[stacked:]), memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct((*sizes, *like.shape[stacked:]), like.dtype, sharding=sharding)


def _restack(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape == like.shape:
        return x
    # One leading dim or three; two of one are the same by now.
    of_stack, stacked = {-2: (1, 3), 0: (3, 3), 2: (3, 1)}[x.ndim - like.ndim]

    def cut(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)
        rows, layers = x.reshape(-1, *x.shape[of_stack:]), math.prod(like.shape[:stacked])
        rows = jnp.pad(rows, [(0, max(0, layers - rows.shape[0]))] + [(0, 0)] * (rows.ndim - 1))
        return rows[:layers].reshape(like.shape)

    found = jax.jit(cut, out_shardings=like.sharding)(x)
    x.delete()
    return found


def _names(path: Any) -> tuple[str, ...]:
    """A tree path as names, the same for a namedtuple and for the dict that Orbax made of it."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


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


KNOWN_CAUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)


def why(error: BaseException) -> str:
    """An error of Orbax, TensorStore or the file system in a few words."""
    links = distributed.causes(error, suppressed=True)
    for link in links:
        if isinstance(link, OSError) and link.strerror:
            return f"{link.strerror}: {link.filename}" if link.filename else link.strerror
        for code in KNOWN_CAUSES:
            if os.strerror(code) in str(link):
                return os.strerror(code)
    return f"{type(links[-1]).__name__}: {' '.join(str(links[-1]).split())[:200]}"
