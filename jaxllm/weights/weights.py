"""Model weights without the rest of a training state: finds them, starts runs from them, and exports them.

Weights are stored in a run directory, in one of its checkpoints, in a Hugging Face folder, or in one of jaxllm's own
(weights/folder.py describes its format). `export` writes jaxllm's own format.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxllm.checkpoint import files
from jaxllm.checkpoint.arrays import give_up, names_of, read_arrays, restacked
from jaxllm.cluster import distributed
from jaxllm.config import Config, ConfigError, whole_rope_scaling
from jaxllm.config.hf_config import CONFIG, MODEL, SHAPE_KEYS, TOKENIZER, VARIANTS, stored_section
from jaxllm.config.hub import folder_of
from jaxllm.config.model_config import LoraConfig
from jaxllm.config.types import DOCUMENTS, GIVEN
from jaxllm.data.stores import is_address
from jaxllm.data.tokenizer import BYTES
from jaxllm.parallel.parameters import chosen, with_part
from jaxllm.weights.folder import Folder, Index, open_folder
from jaxllm.weights.read_weights import load_params
from jaxllm.weights.safetensors import CODES, DTYPES
from jaxllm.weights.staging import companion_files, copy_companions, new_folder, require_new
from jaxllm.weights.stored_models import copied
from jaxllm.weights.streaming import Conversion, Move, describe_model, in_files, stream, total_bytes

ADAPTER = "--adapter"
MAY_DIFFER = ("rope_theta", "rope_scaling", "norm_eps")
"""Model keys that may differ from the initial weights, for example to extend the context. A warning names them."""
MUST_AGREE = tuple(key for key in SHAPE_KEYS if key not in MAY_DIFFER)

Adapters = str | Path | Sequence[str | Path]
log = logging.getLogger(__name__)


@dataclass
class OrbaxFolder(Folder):
    """A checkpoint's state, an Orbax folder, read as NumPy arrays. It removes what pads the arrays for a mesh.

    Reading loads a parameter with all its layers, because an Orbax chunk may hold all of them: reading layer by layer would
    load the chunk again for each. The last parameter read is cached.
    """

    def __post_init__(self):
        super().__post_init__()
        self._kept: tuple[tuple[str, ...], np.ndarray] | None = None
        self._handler = ocp.PyTreeCheckpointHandler()
        with in_one_sentence(self.path):
            found = self._handler.metadata(self.path)  # pyright: ignore[reportArgumentType]  # a pathlib path works
        leaves = jax.tree_util.tree_leaves_with_path(getattr(found, "tree", found)["params"])
        self._saved = {names_of(path): leaf for path, leaf in leaves}

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        dtype = np.dtype(self._described_at(path).dtype)
        if dtype not in CODES:
            raise ConfigError(f"{'.'.join(path)} in {self.path} has dtype {dtype}: it is not a checkpoint of jaxllm.")
        return dtype

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        if self._kept is None or self._kept[0] != path:
            # Before the next one takes memory.
            self._kept = None
            self._kept = path, self._whole(path)
        return self._kept[1] if index is None else self._kept[1][tuple(index)]

    def _described_at(self, path: tuple[str, ...]) -> Any:
        if path not in self._saved:
            raise ConfigError(f"{self.path} has no parameter {'.'.join(path)}: it was saved by another model.")
        return self._saved[path]

    def _whole(self, path: tuple[str, ...]) -> np.ndarray:
        """Reads one parameter in the shape of the model."""
        entry, item = self.entries[path], self._described_at(path)
        arguments: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for name in reversed(("params", *path)):
            item, arguments = {name: item}, {name: arguments}
        with in_one_sentence(self.path):
            restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
            found: Any = self._handler.restore(self.path, args=restore)  # pyright: ignore[reportArgumentType]  # as above
        (array,) = map(np.asarray, jax.tree.leaves(found))
        if entry.stack:
            # Chunks of virtual pipeline stages, in execution order (parallel/parameters.py).
            array = array.reshape(-1, *array.shape[array.ndim - len(entry.shape) + 1 :])
        if any(have < want for have, want in zip(array.shape, entry.shape, strict=True)):
            raise ConfigError(
                f"{entry.name} has shape {array.shape} in {self.path}, not {entry.shape}: it was saved by another model."
            )
        # Zeros pad layers for a pipeline, vocabulary rows for a mesh, and the dim that ZeRO shards.
        return array[tuple(slice(size) for size in entry.shape)]


@contextmanager
def in_one_sentence(arrays: Path) -> Iterator[None]:
    """Turns errors of Orbax, of any type, into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The weights in {arrays} cannot be read ({files.why(error)}): use others.") from None


@dataclass(frozen=True)
class WeightsSource:
    """Weights on disk."""

    outline: Folder
    """The opened model folder in safetensors; else the description only: reading values of a run would start JAX."""
    checkpoint: Path | None = None
    """The folder of a run's checkpoint; None otherwise."""
    began_from: str | None = None
    """The train.init_from of a run."""
    adapters: tuple[str, ...] = ()
    """Folders of adapters to merge, in PEFT's format."""
    version: str = ""
    """The same for the same objects of a store, on each host; "" for a local path."""

    @property
    def description(self) -> str:
        return self.outline.description

    @property
    def model(self) -> dict[str, Any]:
        return self.outline.model

    @property
    def merges(self) -> bool:
        """Whether adapters are merged into the weights: its own, if it is a run with model.lora, and those given."""
        return bool(self.adapters) or self.model.get("lora") is not None

    def as_folder(self) -> Folder:
        """Returns a folder that reads one parameter at a time as NumPy arrays, with adapters merged. It needs no device: it
        starts JAX on the CPU."""
        if self.checkpoint is not None:
            distributed.start_without_devices()
        return self.merged()

    def unmerged(self) -> Folder:
        """The same with adapters apart. For a run, JAX must have started."""
        if self.checkpoint is None:
            return self.outline
        if reason := files.changed(self.checkpoint):
            raise files.DamagedError(self.checkpoint, reason)
        return OrbaxFolder(**about(self.outline))

    def merged(self) -> Folder:
        """A folder with adapters merged. For a run, JAX must have started."""
        base, plain = self.unmerged(), without_lora(self.model)
        if not self.merges:
            return base
        from jaxllm.weights.adapters import MergedFolder, open_adapter

        own = [base] if "lora" in self.model else []
        given = [open_adapter(ADAPTER, text, plain) for text in self.adapters]
        adapters = [(folder, LoraConfig.model_validate(folder.model["lora"]).scale) for folder in (*own, *given)]
        said: dict[str, Any] = about(base) | {"model": plain}
        return MergedFolder(**said, base=base, adapters=adapters)


def about(folder: Folder) -> dict[str, Any]:
    """What each kind of folder says of a model."""
    return {field.name: getattr(folder, field.name) for field in fields(Folder)}


def without_lora(model: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section of the network with its adapters merged."""
    return {name: value for name, value in model.items() if name != "lora"}


def find_weights(key: str, text: str | Path, step: int | None = None, adapters: Adapters = ()) -> WeightsSource:
    """Finds the weights at a path: a run directory (its newest complete checkpoint, or that of `step`), one of its checkpoints,
    or a model folder, Hugging Face's or jaxllm's own; or at an address of one of them in a store, or of a run's
    checkpoint.store, which is copied into the cache. Uses no device.

    Args:
      key: the option or key that the user set to `text`, for error messages.
      adapters: a folder in PEFT's format, or several, to be merged one after the other.

    Raises:
      ConfigError: the path has no weights, or there is no adapter for them.
    """
    found = _find_weights(key, str(text), step)
    named = tuple(map(str, [adapters] if isinstance(adapters, str | Path) else adapters))
    for adapter in named:
        from jaxllm.weights.adapters import open_adapter

        open_adapter(ADAPTER, adapter, without_lora(found.model))
    return replace(found, adapters=named)


def _find_weights(key: str, text: str, step: int | None) -> WeightsSource:
    if not text:
        raise ConfigError(f"{key} is empty: give a run directory, one of its checkpoints, or a model folder.")
    if is_address(text):
        path, address = copied(key, text, step)
        found = _find_weights(key, str(path), None)
        # A run's says the step.
        found.outline.description = address
        return replace(found, version=path.relative_to(distributed.cache_folder()).as_posix())
    path = folder_of(key, text, weights=True)
    if step is not None and path.is_dir() and not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"--step={step} selects a checkpoint of a run directory, and {text} is not a run directory: leave it out."
        )
    if not path.is_dir():
        raise ConfigError(f"{key}={text} is not a folder: give a run directory, one of its checkpoints, or a model folder.")
    if (path / MODEL).is_file() or (path / CONFIG).is_file():
        return WeightsSource(open_folder(key, str(path)))
    if (path / "checkpoints").is_dir():
        folder = path / "checkpoints"
        if step is None:
            step, _ = files.newest_whole(folder)
        if step is None:
            raise ConfigError(f"{key}={text} is a run without a checkpoint yet: let it save one, or give another.")
        path = folder / str(step)
        if not path.is_dir():
            present = ", ".join(sorted((p.name for p in folder.iterdir() if p.name.isdecimal()), key=int)) or "none"
            raise ConfigError(f"{key}={text} has no checkpoint of step {step}: it has {present}.")
    elif not (path / files.META).is_dir() and not (path / files.STATE).is_dir():
        raise ConfigError(
            f"{key}={text} holds no weights: give a run directory, one of its checkpoints (such as "
            f"runs/first/checkpoints/400), or a folder with {CONFIG} (Hugging Face) or {MODEL} (jaxllm)."
        )
    files.require_plain_path(key, path, files.BACKSLASH)
    if reason := files.damage(path):
        raise ConfigError(f"{key}: the checkpoint {path} is damaged ({reason}): give another.")
    meta = files.read_meta(path)
    path = path.absolute()
    run_dir = path.parent.parent
    config = meta["config"]
    section = stored_section(config["model"], f"The metadata of {path}")
    data = config.get("data") or {}
    kinds = {part.get("source") for part in data.get("mixture") or [data]}
    # A run keeps the files of any other tokenizer, without which a checkpoint may have been copied; two sources need not have
    # one.
    kept, named = (run_dir / TOKENIZER / "tokenizer.json").is_file(), data.get("tokenizer")
    on_bytes = named == BYTES or not (kept or named or kinds & {"megatron", "tokens", DOCUMENTS, GIVEN, None})
    where, train = f"{run_dir} at step {meta['step']}", config["train"]
    more = {"sequence_length": train["sequence_length"], "trained_on_bytes": on_bytes}
    companions = run_dir / TOKENIZER if (run_dir / TOKENIZER).is_dir() else None
    outline = Folder(path / files.STATE, where, section, companions, **more)
    return WeightsSource(outline, path, train.get("init_from"))


def initial_weights(config: Config) -> WeightsSource | None:
    """Finds the weights that train.init_from names. None if it is not set. Uses no device. ConfigError if there are none, or if
    their model has another shape; the message names the key and both values."""
    if config.train.init_from is None:
        return None
    source = find_weights("train.init_from", config.train.init_from)
    companion_files(source.outline.companions)
    ours_said = config.model.model_dump(mode="json")
    for key in MUST_AGREE:
        theirs, ours = source.model.get(key, VARIANTS.get(key)), ours_said[key]
        if key == "vision" and theirs is None and ours is not None:
            log.warning("train.init_from=%s has no vision tower: it begins with random values.", config.train.init_from)
        elif theirs != ours:
            raise ConfigError(
                f"train.init_from={config.train.init_from} holds a model with model.{key}={theirs}, not {ours}: "
                f"set model.{key}={theirs}, or start from other weights."
            )
    for key in MAY_DIFFER:
        theirs, ours = source.model.get(key), ours_said[key]
        if key == "rope_scaling" and isinstance(theirs, dict):
            theirs = whole_rope_scaling(theirs)
        if key in source.model and theirs != ours:
            log.warning(
                "The weights of train.init_from come from a model with model.%s=%s; this run sets %s.", key, theirs, ours
            )
    return source


def initial_adapter(config: Config) -> Folder | None:
    """Opens the adapter that train.init_adapter names. None if it is not set, ConfigError if there is none, or if model.lora
    describes another."""
    if config.train.init_adapter is None:
        return None
    from jaxllm.weights.adapters import open_adapter

    assert config.model.lora is not None, "refused by the config"
    text, ours = config.train.init_adapter, config.model.lora.model_dump(mode="json")
    found = open_adapter("train.init_adapter", text, config.model.model_dump(mode="json"))
    for key, theirs in found.model["lora"].items():
        if theirs != ours[key]:
            raise ConfigError(
                f"train.init_adapter={text} holds an adapter with model.lora.{key}={theirs}, not {ours[key]}: set that value, "
                f"or leave train.init_adapter out."
            )
    return found


def read_initial(source: WeightsSource | None, adapter: Folder | None, params: Any, table: Any) -> Any:
    """`params` with the values of initial weights and of an initial adapter, which take the place of those that are there.

    Args:
      table: Parallelized.table.
    """
    # The weights may be those of a model without a vision tower.
    theirs = None if source is None else {entry.name for entry in source.outline.entries.values()}
    of_base = lambda p: not p.is_lora and (theirs is None or p.path in theirs)  # noqa: E731
    base, own = (partial(chosen, table=table, which=which) for which in (of_base, lambda p: p.is_lora))
    found, adapters = base(params), own(params)
    if source is not None:
        found = read_weights(source, give_up(found), base(table))
    if adapter is not None:
        adapters = load_params(adapter, give_up(adapters), own(table))
    return with_part(with_part(params, found), adapters)


def read_weights(source: WeightsSource, like: Any, table: Any) -> Any:
    """Reads the parameters with the shardings and dtypes of `like` (nested dict of ShapeDtypeStructs). The optimizer moments of
    a checkpoint are read only to verify its files. ConfigError if these are damaged, or hold values that are not finite.

    Args:
      table: Parallelized.table.
    """
    if source.checkpoint is None or source.merges:
        params = load_params(source.merged(), like, table)
    else:
        with in_one_sentence(source.outline.path), files.verified(source.checkpoint):
            read = read_arrays(source.outline.path, {"params": like}, {"params": table})["params"]
        params = restacked(read, like)
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        if not _all_finite(array):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ConfigError(
                f"{name} in {source.description} has values that are not finite (NaN or infinite): use intact weights."
            )
    return params


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    # The array may be in the host's memory (parallel.offload_state).
    return jnp.isfinite(jax.device_put(array, jax.memory.Space.Device)).all()


def export(
    text: str,
    destination: str,
    step: int | None = None,
    dtype: str = "float32",
    force: bool = False,
    adapters: Sequence[str] = (),
) -> Conversion:
    """Exports the weights of a run directory or checkpoint into jaxllm's own format, one parameter at a time. It needs host
    memory for the largest parameter with all its layers, independent of the mesh in training.

    Args:
      dtype: float32, bfloat16 or float16.
      step, force, adapters: as in hf_convert.to_hf.

    Raises:
      ConfigError: the destination exists, there is nothing to export, or it cannot be written.
    """
    require_new(destination, force)
    numpy_dtype = dtype_named(dtype)
    source = find_weights("SRC", text, step, adapters)
    folder = source.as_folder()
    companion_files(folder.companions)
    moves, tensors = [], {}
    for entry in folder.entries.values():
        tensors[entry.name] = (numpy_dtype, entry.shape)
        for number in range(math.prod(entry.stack)):
            # A folder of Hugging Face has matrices transposed; here they are as jaxllm has them.
            elements = folder.array(entry, number)
            moves.append(Move(entry.name, elements, None, numpy_dtype, entry.name, number * elements.size))
    layout = in_files(tensors, "weights")
    with new_folder(destination, total_bytes(layout), force) as aside:
        stream(moves, layout, aside, "to jaxllm")
        more = {"sequence_length": folder.sequence_length, "trained_on_bytes": folder.trained_on_bytes}
        (aside / MODEL).write_text(describe_model(folder.model, source.description, numpy_dtype, layout, more))
        copy_companions(folder.companions, aside / TOKENIZER)
    return Conversion(source.description, destination, len(moves), total_bytes(layout), {dtype}, len(layout))


def dtype_named(name: str) -> np.dtype:
    """The dtype of this name. Raises ConfigError if weights cannot be stored in it."""
    found = {dtype.name: dtype for dtype in DTYPES.values()}
    if name not in found:
        raise ConfigError(f"--dtype={name} is not one of the choices: use {', '.join(found)}.")
    return found[name]
