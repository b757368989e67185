"""Reads a recipe: the file, the overrides, and the shape that model.name refers to. Config (config.py) checks the rest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_kinds import SHAPE_KEYS, VARIANTS
from jaxllm.config.run_sections import RunConfig
from jaxllm.untrusted import RefusedInput, parse_yaml, read_yaml, shown


def config_folder() -> Path:
    """The folder configs/ of the checkout or of the installed wheel."""
    here = Path(__file__).parents[1]
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def published_models() -> list[str]:
    return sorted(path.stem for path in (config_folder() / "models").glob("*.yaml"))


def find_recipe(path: Path) -> Path:
    """The file itself. If it does not exist, the recipe of that name that comes with jaxllm, if any."""
    name = path.name if path.suffix == ".yaml" else f"{path.name}.yaml"
    ours = config_folder() / name
    return ours if not path.is_file() and path.parent in (Path(), Path("configs")) and ours.is_file() else path


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Copies the sections of an unchecked config and applies `section.key=value` strings.

    Raises:
      ConfigError: a string has another form.
    """
    values = {section: dict(keys) if isinstance(keys, Mapping) else keys or {} for section, keys in values.items()}
    for override in overrides:
        _apply(override, values)
    return values


def read_recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        nearest = difflib.get_close_matches(path.name, [p.name for p in config_folder().glob("*.yaml")], n=1)
        if nearest:
            hint = f"did you mean {config_folder() / nearest[0]}?"
        elif path.name in published_models():
            hint = f"that is the shape of a model, so set model.name={path.name} in a recipe."
        else:
            hint = "give the path of a YAML recipe such as configs/quickstart.yaml."
        raise ConfigError(f"There is no config file {path}: {hint}")
    try:
        values = read_yaml(path)
    except RefusedInput as error:
        raise ConfigError(f"{path} cannot be read as YAML ({error}): fix it.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no sections: write model:, train: and so on at the left margin.")
    return values


def refuse_code(path: str | Path, values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raises ConfigError if the recipe itself names classes to import: only who runs it may ask for that."""
    sinks = log.get("sinks") if isinstance(log := values.get("log"), Mapping) else None
    if sinks and not any(override.partition("=")[0].strip() == "log.sinks" for override in overrides):
        raise ConfigError(
            f"{path} sets log.sinks={shown(sinks)}, code that would run as you, and a recipe must not ask for that: remove the "
            f"key, or give log.sinks='[module:Class]' on the command line."
        )


def _apply(override: str, values: dict[str, Any]) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError(f"Cannot read the override {shown(override)!r}: write section.key=value, such as train.steps=100.")
    try:
        value = parse_yaml(text)
    except RefusedInput as error:
        raise ConfigError(f"Cannot read the value of {shown(override)!r} ({error}): quote it, or write it as YAML.") from None
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", text.strip()):
        # YAML reads 3e-4 as a string, because it has no dot.
        value = float(value)
    node = values
    for key in keys[:-1]:
        child = node.get(key)
        if child is None:
            child = {}
        if not isinstance(child, Mapping):
            raise ConfigError(f"{shown(override)!r} does not name a key: {key} has no keys below it.")
        node[key] = dict(child)
        node = node[key]
    node[keys[-1]] = value


def take_named(values: dict[str, Any]) -> None:
    """Fills in the shape that model.name refers to, and for a folder also weights and tokenizer. Keys in `values` win."""
    model = values.get("model", {})
    name = model.get("name") if isinstance(model, dict) else None
    if name is None or set(SHAPE_KEYS) - VARIANTS.keys() <= model.keys():
        # The config of an earlier run has the shape already, and the folder may no longer exist.
        return
    if isinstance(name, str) and name not in published_models():
        if Path(name).is_dir():
            return _take(values, *_of_folder(Path(name)))
        if ran := _as_it_ran(values, name):
            return _take(values, *ran)
        from jaxllm.config.hub import folder_of, is_hub_name, pinned

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
    from jaxllm.config.hub import stays

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
        nearest = difflib.get_close_matches(str(name), published_models(), n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose one of {', '.join(published_models())}."
        raise ConfigError(f"model.name={name} is neither a published model nor an existing folder: {hint}")
    return read_recipe(path)
