"""Weights alone: where to find them, how a run starts from them, and how they are exported.

DST/model.json    what the model is: its section of the config, where the weights came from, versions
DST/weights/      Orbax: {"params": ...}, float32 or bfloat16, exactly model.vocab_size rows in embedding and head
DST/tokenizer/    a copy of run.dir/tokenizer, if the run has one
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxllm.config import Config, ConfigError, ModelConfig, ParallelConfig, RunConfig
from jaxllm.train.checkpoint import META, STATE, damage, newest_whole, read_arrays, read_meta, restacked, versions, why

MODEL, WEIGHTS, TOKENIZER = "model.json", "weights", "tokenizer"
FORMAT = 1
SHAPE_KEYS = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    "tie_embeddings",
)


@dataclass(frozen=True)
class Source:
    """Weights on disk."""

    description: str
    """For people: a path and, of a run, the step."""
    folder: Path
    """The Orbax folder."""
    model: dict[str, Any]
    """The section of the config they were trained with."""
    run_dir: Path | None
    """Of a checkpoint; None for an export."""


def find_weights(key: str, text: str, step: int | None = None) -> Source:
    """The weights a path means: a run directory (its newest whole checkpoint, or that of `step`), one of its checkpoints, or a
    folder made by `export`. Touches no device.

    Args:
      key: what the user set to `text`, for errors.

    Raises:
      ConfigError: there are none.
    """
    path = Path(text)
    if step is not None and path.is_dir() and not (path / "checkpoints").is_dir():
        raise ConfigError(f"--step={step} chooses among the checkpoints of a run directory, and {text} is none: leave it out.")
    if not path.is_dir():
        raise ConfigError(f"{key}={text} is no folder: give a run directory, one of its checkpoints, or an exported folder.")
    if (path / MODEL).is_file():
        return _exported(key, path)
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
            f"runs/first/checkpoints/400), or a folder that jaxllm export wrote."
        )
    if reason := damage(path):
        raise ConfigError(f"{key}: the checkpoint {path} is damaged ({reason}): give another.")
    meta = read_meta(path)
    run_dir = path.absolute().parent.parent
    return Source(f"{run_dir} at step {meta['step']}", path / STATE, meta["config"]["model"], run_dir)


def _exported(key: str, path: Path) -> Source:
    try:
        found = json.loads((path / MODEL).read_text())
        if found["format"] > FORMAT:
            raise ConfigError(
                f"{key}={path} has format {found['format']}, this jaxllm reads up to {FORMAT}: install a newer one."
            )
        return Source(str(path), path / WEIGHTS, dict(found["model"]), None)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {path / MODEL} is damaged ({why(error)}): export again.") from None


def initial_weights(config: Config) -> Source | None:
    """Where train.init_from finds its weights; None if it is not set. Touches no device.

    Raises:
      ConfigError: there are none, or those of a model of another shape; names the key of the model and both values.
    """
    if config.train.init_from is None:
        return None
    source = find_weights("train.init_from", config.train.init_from)
    for key in SHAPE_KEYS:
        theirs, ours = source.model.get(key), getattr(config.model, key)
        if theirs != ours:
            raise ConfigError(
                f"train.init_from={config.train.init_from} holds a model with model.{key}={theirs}, not {ours}: "
                f"set model.{key}={theirs}, or start from other weights."
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
    try:
        read = read_arrays(source.folder.absolute(), {"params": like}, {"params": table})["params"]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The weights in {source.folder} cannot be read ({why(error)}): use others.") from None
    return restacked(read, like)


def export(text: str, destination: str, step: int | None = None, dtype: str = "float32") -> Source:
    """Writes the weights of a run directory or checkpoint into a folder of their own. It takes host memory for the float32
    parameters and runs on one CPU device, whatever mesh trained them.

    Args:
      step: of a run directory, this checkpoint rather than the newest.
      dtype: float32 or bfloat16.

    Raises:
      ConfigError: the destination exists, there is nothing to export, or it cannot be written.
    """
    target = Path(destination).absolute()
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype={dtype} is not one of the choices: use float32 or bfloat16.")
    if target.exists():
        raise ConfigError(f"{destination} exists already, and an export overwrites nothing: choose another folder.")
    source = find_weights("The source of an export", text, step)
    from jaxllm import distributed

    distributed.start(RunConfig(cpu_devices=1))
    import orbax.checkpoint as ocp

    from jaxllm.parallel.parallelize import parameter_table

    # A mesh of one device pads nothing.
    config = Config.model_construct(model=ModelConfig.model_validate(source.model), parallel=ParallelConfig(data=1))
    _, table = parameter_table(config)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype, sharding=sharding), table)
    params = read_weights(source, like, table)
    aside = target.with_name(f".{target.name}.being-written")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(aside / WEIGHTS, {"params": params})
        described = {"format": FORMAT, "model": source.model, "source": source.description, "dtype": dtype}
        (aside / MODEL).write_text(json.dumps(described | {"versions": versions()}, indent=2) + "\n")
        if source.run_dir is not None and (source.run_dir / TOKENIZER).is_dir():
            shutil.copytree(source.run_dir / TOKENIZER, aside / TOKENIZER)
        aside.rename(target)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ConfigError(f"{destination} could not be written ({why(error)}): remove the cause, or choose another.") from error
    return source
