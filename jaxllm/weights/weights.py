"""Model weights without the rest of a training state: finds them, starts runs from them, and exports them.

Weights are stored in a run directory, in one of its checkpoints, in a Hugging Face folder, or in one of jaxllm's own
(weights/folder.py describes its format). `export` writes jaxllm's own format. Format 1, which is still read, stored the
weights with Orbax: DST/weights/ with {"params": ...}.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.arrays import give_up, read_arrays, restacked
from jaxllm.checkpoint.checksums import DamagedError, changed, verified
from jaxllm.checkpoint.files import BACKSLASH, META, STATE, damage, newest_whole, read_meta, require_plain_path
from jaxllm.cluster import distributed
from jaxllm.config import Config, ConfigError, whole_rope_scaling
from jaxllm.config.hf_config import CONFIG, MODEL, SHAPE_KEYS, TOKENIZER, VARIANTS, read_object, stored_section
from jaxllm.config.hub import folder_of
from jaxllm.config.model_config import LoraConfig
from jaxllm.config.types import GIVEN
from jaxllm.data.stores import is_address
from jaxllm.data.tokenizer import BYTES
from jaxllm.parallel.parameters import chosen, with_part
from jaxllm.weights.adapters import AdapterFolder, MergedFolder, open_adapter
from jaxllm.weights.folder import Folder, is_model_folder, open_folder
from jaxllm.weights.orbax_reader import OrbaxFolder, in_one_sentence
from jaxllm.weights.read_weights import load_params
from jaxllm.weights.safetensors import DTYPES
from jaxllm.weights.staging import companion_files, copy_companions, new_folder, require_new
from jaxllm.weights.stored_models import copied
from jaxllm.weights.streaming import LARGEST_FILE, Move, describe_model, in_files, stream

WEIGHTS = "weights"
ADAPTER = "--adapter"
MAY_DIFFER = ("rope_theta", "rope_scaling", "norm_eps")
"""Model keys that may differ from the initial weights, for example to extend the context. A warning names them."""
MUST_AGREE = tuple(key for key in SHAPE_KEYS if key not in MAY_DIFFER)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightsSource:
    """Weights on disk."""

    description: str
    """Path for messages, with the step if it is a run."""
    folder: Path
    """The Orbax folder, or the folder of the safetensors files."""
    model: dict[str, Any]
    """The model section of the config they were trained with, with at least the keys of the shape."""
    run_dir: Path | None
    """The run directory of a checkpoint; None for a model folder."""
    opened: Folder | None = None
    """The opened model folder in safetensors; None otherwise."""
    train: dict[str, Any] | None = None
    """The train section of a checkpoint's config; None otherwise."""
    trained_on_bytes: bool = False
    """Whether the run's text was bytes."""
    adapters: tuple[str, ...] = ()
    """Folders of adapters to merge, in PEFT's format."""
    version: str = ""
    """The same for the same objects of a store, on each host; "" for a local path."""

    @property
    def merges(self) -> bool:
        """Whether adapters are merged into the weights: its own, if it is a run with model.lora, and those given."""
        return bool(self.adapters) or self.model.get("lora") is not None

    def as_folder(self) -> Folder:
        """Returns a folder that reads one parameter at a time as NumPy arrays, with adapters merged. It needs no device: it
        starts JAX on the CPU."""
        if self.opened is None:
            distributed.start_without_devices()
        return self.merged()

    def unmerged(self) -> Folder:
        """The same with adapters apart. For a run, JAX must have started."""
        if self.opened is not None:
            return self.opened
        if self.run_dir is not None and (reason := changed(self.folder.parent)):
            raise DamagedError(self.folder.parent, reason)
        return OrbaxFolder(**self._described(), arrays=self.folder.absolute())

    def merged(self) -> Folder:
        """A folder with adapters merged. For a run, JAX must have started."""
        base, plain = self.unmerged(), without_lora(self.model)
        if not self.merges:
            return base
        own = [(base, LoraConfig.model_validate(self.model["lora"]).scale)] if "lora" in self.model else []
        given = [open_adapter(ADAPTER, text, plain) for text in self.adapters]
        adapters = [*own, *((folder, folder.scale) for folder in given)]
        kept = ("path", "description", "companions", "hugging_face", "sequence_length", "trained_on_bytes")
        about = {name: getattr(base, name) for name in kept}
        return MergedFolder(**about, model=plain, base=base, adapters=adapters)

    def outline(self) -> Folder:
        """Returns a folder with the model's description only. Reading values of a run would start JAX."""
        return self.opened or Folder(**self._described())

    def _described(self) -> dict[str, Any]:
        home = (self.run_dir or self.folder.parent) / TOKENIZER
        return {
            "path": self.folder,
            "description": self.description,
            "model": self.model,
            "companions": home if home.is_dir() else None,
            "sequence_length": (self.train or {}).get("sequence_length"),
            "trained_on_bytes": self.trained_on_bytes,
        }


def without_lora(model: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section of the network with its adapters merged."""
    return {name: value for name, value in model.items() if name != "lora"}


def find_weights(key: str, text: str, step: int | None = None, adapters: Sequence[str] = ()) -> WeightsSource:
    """Finds the weights at a path: a run directory (its newest complete checkpoint, or that of `step`), one of its checkpoints,
    or a model folder, Hugging Face's or jaxllm's own; or at an address of one of them in a store, or of a run's
    checkpoint.store, which is copied into the cache. Uses no device.

    Args:
      key: the option or key that the user set to `text`, for error messages.
      adapters: folders in PEFT's format, to be merged one after the other.

    Raises:
      ConfigError: the path has no weights, or there is no adapter for them.
    """
    found = _find_weights(key, text, step)
    for adapter in adapters:
        open_adapter(ADAPTER, adapter, without_lora(found.model))
    return replace(found, adapters=tuple(adapters))


def _find_weights(key: str, text: str, step: int | None) -> WeightsSource:
    if not text:
        raise ConfigError(f"{key} is empty: give a run directory, one of its checkpoints, or a model folder.")
    if is_address(text):
        path, address = copied(key, text, step)
        found = _find_weights(key, str(path), None)
        # A run's says the step.
        found = replace(found, description=address, version=path.relative_to(distributed.cache_folder()).as_posix())
        if found.opened is not None:
            found.opened.description = address
        return found
    path = folder_of(key, text, weights=True)
    if step is not None and path.is_dir() and not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"--step={step} selects a checkpoint of a run directory, and {text} is not a run directory: leave it out."
        )
    if not path.is_dir():
        raise ConfigError(f"{key}={text} is not a folder: give a run directory, one of its checkpoints, or a model folder.")
    if (path / MODEL).is_file() and read_object(path / MODEL).get("format") == 1:
        require_plain_path(key, path, BACKSLASH)
        return _read_format_1(key, path)
    if is_model_folder(path):
        opened = open_folder(key, str(path))
        return WeightsSource(opened.description, path, opened.model, None, opened)
    if (path / "checkpoints").is_dir():
        folder = path / "checkpoints"
        if step is None:
            step, _ = newest_whole(folder)
        if step is None:
            raise ConfigError(f"{key}={text} is a run without a checkpoint yet: let it save one, or give another.")
        path = folder / str(step)
        if not path.is_dir():
            present = ", ".join(sorted((p.name for p in folder.iterdir() if p.name.isdecimal()), key=int)) or "none"
            raise ConfigError(f"{key}={text} has no checkpoint of step {step}: it has {present}.")
    elif not (path / META).is_dir() and not (path / STATE).is_dir():
        raise ConfigError(
            f"{key}={text} holds no weights: give a run directory, one of its checkpoints (such as "
            f"runs/first/checkpoints/400), or a folder with {CONFIG} (Hugging Face) or {MODEL} (jaxllm)."
        )
    require_plain_path(key, path, BACKSLASH)
    if reason := damage(path):
        raise ConfigError(f"{key}: the checkpoint {path} is damaged ({reason}): give another.")
    meta = read_meta(path)
    run_dir = path.absolute().parent.parent
    config = meta["config"]
    section = stored_section(config["model"], f"The metadata of {path}")
    data = config.get("data") or {}
    kinds = {part.get("source") for part in data.get("mixture") or [data]}
    # A run keeps the files of any other tokenizer, without which a checkpoint may have been copied; two sources need not have
    # one.
    kept, named = (run_dir / TOKENIZER / "tokenizer.json").is_file(), data.get("tokenizer")
    on_bytes = named == BYTES or not (kept or named or kinds & {"megatron", GIVEN, None})
    about = {"train": config.get("train"), "trained_on_bytes": on_bytes}
    return WeightsSource(f"{run_dir} at step {meta['step']}", path / STATE, section, run_dir, **about)


def _read_format_1(key: str, path: Path) -> WeightsSource:
    section = stored_section(read_object(path / MODEL).get("model"), str(path / MODEL))
    return WeightsSource(str(path), path / WEIGHTS, section, None)


def initial_weights(config: Config) -> WeightsSource | None:
    """Finds the weights that train.init_from names. None if it is not set. Uses no device.

    Raises:
      ConfigError: there are none, or their model has another shape. The message names the key and both values.
    """
    if config.train.init_from is None:
        return None
    source = find_weights("train.init_from", config.train.init_from)
    companion_files(source.outline().companions)
    for key in MUST_AGREE:
        theirs, ours = source.model.get(key, VARIANTS.get(key)), getattr(config.model, key)
        if theirs != ours:
            raise ConfigError(
                f"train.init_from={config.train.init_from} holds a model with model.{key}={theirs}, not {ours}: "
                f"set model.{key}={theirs}, or start from other weights."
            )
    ours_said = config.model.model_dump(mode="json")
    for key in MAY_DIFFER:
        theirs, ours = source.model.get(key), ours_said[key]
        if key == "rope_scaling" and isinstance(theirs, dict):
            theirs = whole_rope_scaling(theirs)
        if key in source.model and theirs != ours:
            log.warning(
                "The weights of train.init_from come from a model with model.%s=%s; this run sets %s.", key, theirs, ours
            )
    return source


def initial_folder(source: WeightsSource) -> str | None:
    """The folder from which a run began, if its config names one."""
    return (source.train or {}).get("init_from")


def initial_adapter(config: Config) -> AdapterFolder | None:
    """Opens the adapter that train.init_adapter names. None if it is not set.

    Raises:
      ConfigError: there is none, or model.lora describes another.
    """
    if config.train.init_adapter is None:
        return None
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


def read_initial(source: WeightsSource | None, adapter: AdapterFolder | None, params: Any, table: Any) -> Any:
    """`params` with the values of initial weights and of an initial adapter, which take the place of those that are there.

    Args:
      table: Parallelized.table.
    """
    base, own = (partial(chosen, table=table, which=which) for which in (lambda p: not p.is_lora, lambda p: p.is_lora))
    found, adapters = base(params), own(params)
    if source is not None:
        found = read_weights(source, give_up(found), base(table))
    if adapter is not None:
        adapters = load_params(adapter, give_up(adapters), own(table))
    return with_part(with_part(params, found), adapters)


def read_weights(source: WeightsSource, like: Any, table: Any) -> Any:
    """Reads the parameters with the shardings and dtypes of `like` (nested dict of ShapeDtypeStructs). The optimizer moments of
    a checkpoint are read only to verify its files.

    Args:
      table: Parallelized.table.

    Raises:
      ConfigError: the files are damaged, or hold values that are not finite.
    """
    if source.opened is not None or source.merges:
        params = load_params(source.merged(), like, table)
    else:
        with ExitStack() as stack:
            stack.enter_context(in_one_sentence(source.folder))
            if source.run_dir is not None:
                stack.enter_context(verified(source.folder.parent))
            read = read_arrays(source.folder.absolute(), {"params": like}, {"params": table})["params"]
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
) -> WeightsSource:
    """Exports the weights of a run directory or checkpoint into jaxllm's own format, one parameter at a time. It needs host
    memory for the largest parameter with all its layers, independent of the mesh in training.

    Args:
      step: the checkpoint of a run directory; default: the newest.
      dtype: float32, bfloat16 or float16.
      force: move an existing folder aside.
      adapters: as in find_weights.

    Raises:
      ConfigError: the destination exists, there is nothing to export, or it cannot be written.
    """
    require_new(destination, force)
    numpy_dtype = dtype_named(dtype)
    source = find_weights("SRC", text, step, adapters)
    folder = source.as_folder()
    companion_files(folder.companions)
    tensors = {entry.name: (numpy_dtype, entry.shape) for entry in folder.entries.values()}
    layout = in_files(tensors, WEIGHTS, LARGEST_FILE, {})
    with new_folder(destination, layout.total_bytes, force) as aside:
        stream(own_moves(folder, numpy_dtype), layout, aside)
        more = {"sequence_length": folder.sequence_length, "trained_on_bytes": folder.trained_on_bytes}
        (aside / MODEL).write_text(describe_model(folder.model, source.description, numpy_dtype, layout, more))
        copy_companions(folder.companions, aside / TOKENIZER)
    return source


def dtype_named(name: str) -> np.dtype:
    """The dtype of this name. Raises ConfigError if weights cannot be stored in it."""
    found = {dtype.name: dtype for dtype in DTYPES.values()}
    if name not in found:
        raise ConfigError(f"--dtype={name} is not one of the choices: use {', '.join(found)}.")
    return found[name]


def own_moves(folder: Folder, dtype: np.dtype) -> list[Move]:
    """Copies each parameter of a folder, layer by layer, under the same name."""
    moves = []
    for entry in folder.entries.values():
        for layer in range(entry.layers or 1):
            elements = folder.slab(entry, layer)
            moves.append(Move(entry.name, elements, None, dtype, entry.name, layer * elements.size))
    return moves
