"""Reads the arrays of a checkpoint directly into the sharding of another mesh, and restacks layers for another pipeline."""

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import ConfigError
from jaxllm.mesh.sharding import Parameter, stack_dims

OF_REPLICAS = ("islands", "residual")
"""Names of a state's arrays that each replica has its own copy of (diloco.py). They have a leading replica dim."""


def read_arrays(folder: Path, like: Any, table: Any) -> Any:
    """Reads the arrays that `like` names from an Orbax folder, and no others. A layer stack that was saved for another pipeline
    keeps its saved shape; `restacked` then gives it the shape in `like`.

    Args:
      like: nested dicts of ShapeDtypeStructs with shardings. Each array is read directly into its sharding, whatever mesh wrote
        it, and cast to its dtype.
      table: Parallelized.table. An array whose path ends with the path of a parameter has its dims. Beyond the parameter's
        shape there are only zeros, on the disk and in `like`: they are added or removed.

    Raises:
      ConfigError: an array is missing or has another shape; the message names it.
      Exception: the files are damaged, or see is_not_damage in files.py.
    """
    silence_orphans()
    handler = ocp.PyTreeCheckpointHandler()
    found = handler.metadata(folder)  # pyright: ignore[reportArgumentType]  # a pathlib path works
    saved = {names_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(found, "tree", found))}
    on_disk = as_saved(folder, saved, like, table)

    def arguments(path: Any, x: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        is_whole = tuple(saved[names_of(path)]) == x.shape
        return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=is_whole)

    restore_args = jax.tree_util.tree_map_with_path(arguments, on_disk)
    partial = set(saved) != {names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)}
    # Only the handler: Checkpointer.restore ends with a barrier, where the others would wait for a process that failed.
    args = ocp.args.PyTreeRestore(item=on_disk, restore_args=restore_args, partial_restore=partial)
    return handler.restore(folder, args=args)  # pyright: ignore[reportArgumentType]  # a pathlib path works


def as_saved(source: Path | str, saved: Mapping[tuple[str, ...], tuple[int, ...]], like: Any, table: Any) -> Any:
    """`like` with the shapes to read: those of `like`, and where the layers are stacked for another pipeline, the saved shape.

    Args:
      source: what has the arrays, for messages.
      saved: its arrays' shapes, by their path (names_of).
      like, table: as for read_arrays, as is the ConfigError.
    """
    parameters = {names_of(path): parameter for path, parameter in jax.tree_util.tree_leaves_with_path(table)}

    def read_as(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = names_of(path)
        if names not in saved:
            raise ConfigError(f"{source} has no array {'.'.join(names)}: it was saved by another model or optimizer.")
        name = next((names[i:] for i in range(len(names)) if names[i:] in parameters), names)
        of_replicas = names[0] in OF_REPLICAS
        own = x.shape[of_replicas:]
        parameter = parameters.get(name, Parameter(".".join(name), own, x.dtype, ("",) * len(own), is_matrix=False))
        may_be_padded = parameter.is_matrix
        replica_dims = x.ndim - len(parameter.dims)
        shape, wanted = saved[names][replica_dims:], x.shape[replica_dims:]
        stacked = stack_dims(parameter.dims)
        of_stack = len(shape) - (len(wanted) - stacked)
        sizes = zip(shape[of_stack:], parameter.shape[stacked:], parameter.dims[stacked:], strict=False)
        # Other replicas are cut off, or are zeros until they join (run/rounds.py).
        is_other = not of_replicas and tuple(saved[names][:replica_dims]) != x.shape[:replica_dims]
        # The rows of a vocabulary are padded for pipe x tensor too, here or in the run.
        is_other = is_other or any(d != "vocab" and (a < least or (a > least and not may_be_padded)) for a, least, d in sizes)
        if is_other or (of_stack not in (1, 3) if stacked else of_stack):
            raise ConfigError(
                f"{parameter.path} has shape {tuple(saved[names])} in {source} and {parameter.shape} in this config: use the "
                f"same model."
            )
        if of_stack == stacked <= 1 or tuple(shape[:of_stack]) == wanted[:stacked]:
            return x
        if replica_dims:
            raise ConfigError(
                f"{source} holds DiLoCo replicas whose layers are stacked for another pipeline: resume with the same "
                f"parallel.pipe and parallel.virtual_stages."
            )
        return _of_another_stack(x, stacked, shape[:of_stack])

    return jax.tree_util.tree_map_with_path(read_as, like)


def give_up(arrays: Any) -> Any:
    """Frees arrays and returns their ShapeDtypeStructs, because two states may not fit into memory."""
    layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
    jax.tree.map(lambda x: x.delete(), arrays)
    return layout


def restacked(arrays: Any, like: Any) -> Any:
    """Gives layer stacks the shape in `like` (parallel/parameters.py): other chunks, with identity layers of zeros added or
    removed at the end. It converts one array after the other and deletes the inputs.
    """
    return jax.tree.map(_restack, arrays, like)


def _of_another_stack(like: jax.ShapeDtypeStruct, stacked: int, leading: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Replaces the first `stacked` dims of `like`, which count layers, by the dims `leading`. The result is sharded over the
    same axes, with zero layers at the end if they are needed to divide.
    """
    sharding, sizes = like.sharding, list(leading)
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * like.ndim][: like.ndim]
        axis = next((entry for entry in spec[:stacked] if entry is not None), None)
        ways = 1 if axis is None else sharding.mesh.shape[axis]
        # Layers may be added to a single dim; of three dims, the one that divides is sharded, or none.
        home = next((i for i, size in enumerate(sizes) if size % ways == 0), 0 if len(sizes) == 1 else None)
        if home is not None:
            sizes[home] = -(-sizes[home] // ways) * ways
        entries = [axis if i == home else None for i in range(len(sizes))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries, *spec[stacked:]), memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct((*sizes, *like.shape[stacked:]), like.dtype, sharding=sharding)


def _restack(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape == like.shape:
        return x
    # There are one or three leading dims; two arrays with one are equal by now.
    of_stack, stacked = {-2: (1, 3), 0: (3, 3), 2: (3, 1)}[x.ndim - like.ndim]

    def cut(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)
        rows, layers = x.reshape(-1, *x.shape[of_stack:]), math.prod(like.shape[:stacked])
        rows = jnp.pad(rows, [(0, max(0, layers - rows.shape[0]))] + [(0, 0)] * (rows.ndim - 1))
        return rows[:layers].reshape(like.shape)

    found = jax.jit(cut, out_shardings=like.sharding)(x)
    x.delete()
    return found


def names_of(path: Any) -> tuple[str, ...]:
    """A tree path as names, equal for a namedtuple and for the dict that Orbax makes of it."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


ORPHANS = ("Event loop is closed", "Encountered error while reading array index")


def silence_orphans() -> None:
    """Suppresses useless tracebacks and logs. After the first array that fails, Orbax closes its event loop, and asyncio,
    TensorStore (writing) or Python (reading) print a traceback for each array that finishes later. They would hide the one
    useful sentence. Orbax also logs through absl the errors that it raises, and warnings that would appear below a notebook
    cell.
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
