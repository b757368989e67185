"""Weights alone: where to find them, how a run starts from them, and how they are exported.

They lie in a run directory, in one of its checkpoints, in a folder of Hugging Face's, or in one of jaxllm's own
(pretrained/folder.py says what that holds). `export` writes the last kind. In its first format, which is still read, the
weights were Orbax's: DST/weights/ with {"params": ...}.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm import distributed
from jaxllm.config import Config, ConfigError
from jaxllm.hf_config import CONFIG, MODEL, SHAPE_KEYS, read_json
from jaxllm.pretrained.folder import TOKENIZER, Folder, copy_companions, is_model_folder, open_folder
from jaxllm.pretrained.load import load_params
from jaxllm.pretrained.safetensors import DTYPES
from jaxllm.pretrained.staging import new_folder, require_new
from jaxllm.pretrained.streaming import LARGEST_FILE, Move, describe_model, in_files, stream
from jaxllm.train.checkpoint_arrays import read_arrays, restacked
from jaxllm.train.checkpoint_files import META, STATE, damage, newest_whole, read_meta, why
from jaxllm.train.orbax_folder import OrbaxFolder

WEIGHTS = "weights"
MAY_DIFFER = ("rope_theta", "rope_scaling", "norm_eps")
"""Of the model, what a run may have otherwise than the weights it starts from, as when a context is made longer; it is told."""
MUST_AGREE = tuple(key for key in SHAPE_KEYS if key not in MAY_DIFFER)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Weights on disk."""

    description: str
    """For people: a path and, of a run, the step."""
    folder: Path
    """The Orbax folder, or where the safetensors files are."""
    model: dict[str, Any]
    """The section of the config they were trained with, or at least the shape's keys of it."""
    run_dir: Path | None
    """Of a checkpoint; None for a model folder."""
    opened: Folder | None = None
    """Of a model folder in safetensors."""
    train: dict[str, Any] | None = None
    """Of a checkpoint: the config's train section."""

    def as_folder(self) -> Folder:
        """To read one parameter at a time, as NumPy arrays. Needs no device: where JAX has not started, it gets the CPU."""
        if self.opened is not None:
            return self.opened
        distributed.start_without_devices()
        return OrbaxFolder(**self._described(), arrays=self.folder.absolute())

    def outline(self) -> Folder:
        """What the folder says of itself, for those who need none of its values: a run's would start JAX."""
        return self.opened or Folder(**self._described())

    def _described(self) -> dict[str, Any]:
        home = (self.run_dir or self.folder.parent) / TOKENIZER
        return {
            "path": self.folder,
            "description": self.description,
            "model": self.model,
            "companions": home if home.is_dir() else None,
            "sequence_length": (self.train or {}).get("sequence_length"),
        }


def find_weights(key: str, text: str, step: int | None = None) -> Source:
    """The weights a path means: a run directory (its newest whole checkpoint, or that of `step`), one of its checkpoints, or a
    model folder, Hugging Face's or jaxllm's own. Touches no device.

    Args:
      key: what the user set to `text`, for errors.

    Raises:
      ConfigError: there are none.
    """
    path = Path(text)
    if step is not None and path.is_dir() and not (path / "checkpoints").is_dir():
        raise ConfigError(f"--step={step} chooses among the checkpoints of a run directory, and {text} is none: leave it out.")
    if not path.is_dir():
        raise ConfigError(f"{key}={text} is no folder: give a run directory, one of its checkpoints, or a model's folder.")
    if (path / MODEL).is_file() and read_json(path / MODEL).get("format") == 1:
        return _of_format_1(key, path)
    if is_model_folder(path):
        opened = open_folder(key, text)
        return Source(opened.description, path, opened.model, None, opened)
    if (path / "checkpoints").is_dir():
        folder = path / "checkpoints"
        if step is None:
            step, _ = newest_whole(folder)
        if step is None:
            raise ConfigError(f"{key}={text} is a run without a checkpoint yet: let it save one, or give another.")
        path = folder / str(step)
        if not path.is_dir():
            present = ", ".join(sorted((p.name for p in folder.iterdir() if p.name.isdecimal()), key=int)) or "none"
            raise ConfigError(f"{key}={text} has no checkpoint of step {step}: there are {present}.")
    elif not (path / META).is_dir() and not (path / STATE).is_dir():
        raise ConfigError(
            f"{key}={text} holds no weights: give a run directory, one of its checkpoints (such as "
            f"runs/first/checkpoints/400), or a folder with {CONFIG} (Hugging Face) or {MODEL} (jaxllm)."
        )
    if reason := damage(path):
        raise ConfigError(f"{key}: the checkpoint {path} is damaged ({reason}): give another.")
    meta = read_meta(path)
    run_dir = path.absolute().parent.parent
    config = meta["config"]
    return Source(f"{run_dir} at step {meta['step']}", path / STATE, config["model"], run_dir, train=config.get("train"))


def _of_format_1(key: str, path: Path) -> Source:
    section = read_json(path / MODEL).get("model")
    if not isinstance(section, dict):
        raise ConfigError(f"{key}: {path / MODEL} is damaged (it says nothing of the model): export again.")
    return Source(str(path), path / WEIGHTS, section, None)


def initial_weights(config: Config) -> Source | None:
    """Where train.init_from finds its weights; None if it is not set. Touches no device.

    Raises:
      ConfigError: there are none, or those of a model of another shape; names the key of the model and both values.
    """
    if config.train.init_from is None:
        return None
    source = find_weights("train.init_from", config.train.init_from)
    for key in MUST_AGREE:
        theirs, ours = source.model.get(key), getattr(config.model, key)
        if theirs != ours:
            raise ConfigError(
                f"train.init_from={config.train.init_from} holds a model with model.{key}={theirs}, not {ours}: "
                f"set model.{key}={theirs}, or start from other weights."
            )
    ours_said = config.model.model_dump(mode="json")
    for key in MAY_DIFFER:
        if key in source.model and source.model[key] != ours_said[key]:
            log.warning(
                "The weights of train.init_from come from a model with model.%s=%s; this run sets %s.",
                *(key, source.model[key], ours_said[key]),
            )
    return source


def read_weights(source: Source, like: Any, table: Any) -> Any:
    """The parameters, laid out as `like` (nested dict of ShapeDtypeStructs with shardings) and cast to its dtypes. Optimizer
    moments are not read.

    Args:
      table: nested dict of Parameter.

    Raises:
      ConfigError: the files are damaged.
    """
    if source.opened is not None:
        return load_params(source.opened, like)
    try:
        read = read_arrays(source.folder.absolute(), {"params": like}, {"params": table})["params"]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The weights in {source.folder} cannot be read ({why(error)}): use others.") from None
    return restacked(read, like)


def export(text: str, destination: str, step: int | None = None, dtype: str = "float32", force: bool = False) -> Source:
    """Writes the weights of a run directory or checkpoint into a folder of jaxllm's own format, one parameter after the other:
    it takes host memory for the largest, all its layers, whatever mesh trained them.

    Args:
      step: of a run directory, this checkpoint rather than the newest.
      dtype: float32, bfloat16 or float16.
      force: move an existing folder aside.

    Raises:
      ConfigError: the destination exists, there is nothing to export, or it cannot be written.
    """
    require_new(destination, force)
    numpy_dtype = dtype_named(dtype)
    source = find_weights("RUN_OR_CHECKPOINT", text, step)
    folder = source.as_folder()
    tensors = {entry.name: (numpy_dtype, entry.shape) for entry in folder.entries.values()}
    layout = in_files(tensors, WEIGHTS, LARGEST_FILE, {})
    with new_folder(destination, layout.total_bytes, force) as aside:
        stream(own_moves(folder, numpy_dtype), layout, aside)
        more = {"sequence_length": folder.sequence_length}
        (aside / MODEL).write_text(describe_model(source.model, source.description, numpy_dtype, layout, more))
        copy_companions(folder.companions, aside / TOKENIZER)
    return source


def dtype_named(name: str) -> np.dtype:
    """Raises ConfigError if weights are not stored so."""
    found = {dtype.name: dtype for dtype in DTYPES.values()}
    if name not in found:
        raise ConfigError(f"--dtype={name} is not one of the choices: use {', '.join(found)}.")
    return found[name]


def own_moves(folder: Folder, dtype: np.dtype) -> list[Move]:
    """Every parameter of a folder, layer by layer, into one of the same names."""
    moves = []
    for entry in folder.entries.values():
        for layer in range(entry.layers or 1):
            elements = folder.slab(entry, layer)
            moves.append(Move(entry.name, elements, None, dtype, entry.name, layer * elements.size))
    return moves
