"""The shape that model.name refers to: a published model, a folder, or a model of the Hub."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxllm.config.errors import ConfigError, nearest
from jaxllm.config.hub import folder_of, is_hub_name, pinned, stays
from jaxllm.config.load import config_folder, published_models, read_recipe
from jaxllm.config.model_config import SHAPE_KEYS, VARIANTS, ModelConfig
from jaxllm.config.run_sections import RunConfig


def as_named(name: str) -> ModelConfig:
    """The model that a name refers to, without changes."""
    values: dict[str, Any] = {"model": {"name": name}}
    take_named(values)
    return ModelConfig.model_validate(values["model"])


def title_of(model: ModelConfig, otherwise: str = "The model") -> str:
    """The model's name for a heading, and which keys of its shape are other than that name says."""
    name, differs = model.name, []
    if name in published_models() or (name and Path(name).is_dir()):
        # A folder may have another model since.
        with suppress(ConfigError, ValidationError):
            named = as_named(name)
            differs = [key for key in SHAPE_KEYS if getattr(model, key) != getattr(named, key)]
    return f"{name} with another {', '.join(differs)}" if differs else name or otherwise


def take_named(values: dict[str, Any]) -> None:
    """Fills in the shape that model.name refers to, and for a folder also weights and tokenizer. Keys in `values` win."""
    model, name = values["model"], values["model"]["name"]
    if set(SHAPE_KEYS) - VARIANTS.keys() <= model.keys():
        # The config of an earlier run has the shape already, and the folder may no longer exist.
        return
    if isinstance(name, str) and name not in published_models():
        if Path(name).is_dir():
            return _take(values, *_of_folder(Path(name)))
        if ran := _as_it_ran(values, name):
            return _take(values, *ran)
        if is_hub_name(name):
            folder = folder_of("model.name", name, weights=False)
            model["name"] = pinned(name, folder)
            return _take(values, *_of_folder(folder))
    values["model"] = {**_published_shape(name), **model}


def _of_folder(path: Path) -> tuple[Mapping[str, Any], list[Path]]:
    """The shape of the model in a folder, and the folders that may have its tokenizer."""
    # Only a folder needs to read Hugging Face's config.json.
    from jaxllm.config.hf_config import folder_shape

    # For a checkpoint, the shape is in its run directory.
    home = path.parent.parent if path.parent.name == "checkpoints" else path
    if (shape := folder_shape(path)) is None and (home / "config.yaml").is_file():
        shape = read_recipe(home / "config.yaml").get("model")
    if not isinstance(shape, Mapping):
        raise ConfigError(
            f"model.name={path} holds no model: give a folder with config.json (Hugging Face) or model.json (jaxllm), a run "
            f"directory, one of its checkpoints, or one of {', '.join(published_models())}."
        )
    return shape, [home, home / "tokenizer"]


def _as_it_ran(values: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], list[Path]] | None:
    """The same from the files in run.dir, if that run used this model name and the model folder no longer exists. A model of
    the Hub stays at the commit that the run began with, also if its branch has moved.
    """
    run = values.get("run")
    folder = Path(str((run if isinstance(run, Mapping) else {}).get("dir", RunConfig.model_fields["dir"].default)))
    model = read_recipe(folder / "config.yaml").get("model") if (folder / "config.yaml").is_file() else None
    kept = model.get("name") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or (kept != name and not stays("model.name", name, str(kept), folder)):
        return None
    values["model"]["name"] = kept
    return model, [folder / "tokenizer"]


def _take(values: dict[str, Any], shape: Mapping[str, Any], tokenizers: Sequence[Path]) -> None:
    train, data = values.get("train"), values.setdefault("data", {})
    if isinstance(train, dict):
        train.setdefault("init_from", values["model"]["name"])
    values["model"] = {**{key: shape[key] for key in SHAPE_KEYS if key in shape}, **values["model"]}
    found = [home for home in tokenizers if (home / "tokenizer.json").is_file()]
    if isinstance(data, dict) and found:
        kinds = [part.get("source", "python_stdlib") for part in data.get("mixture") or [data] if isinstance(part, Mapping)]
        # Tokenized data names its own.
        if kinds and all(kind in ("python_stdlib", "files", "chat", "preferences") for kind in kinds):
            data.setdefault("tokenizer", str(found[0]))


def _published_shape(name: Any) -> dict[str, Any]:
    path = config_folder() / "models" / f"{name}.yaml"
    if isinstance(name, str) and name.startswith(("s3://", "gs://")):
        raise ConfigError(
            f"model.name={name} is an address: set train.init_from to it, and model.name to a published model or to a folder "
            f"with its config.json."
        )
    if isinstance(name, str) and "/" in name:
        raise ConfigError(
            f"model.name={name} is not a folder with a config.json: download the model to it, or name another folder."
        )
    if not isinstance(name, str) or not path.is_file():
        hint = nearest(name, published_models(), f"choose one of {', '.join(published_models())}.", 0.4)
        raise ConfigError(f"model.name={name} is neither a published model nor an existing folder: {hint}")
    return read_recipe(path)
