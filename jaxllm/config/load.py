"""Reads a recipe: the file and the overrides. Config (config.py) checks the rest."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_kinds import SHAPE_KEYS
from jaxllm.untrusted import RefusedInput, parse_yaml, read_yaml, shown

log = logging.getLogger(__name__)


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
    """Copies the sections of an unchecked config and applies `section.key=value` strings. Another model.name replaces the sizes
    in `values`, with a warning, and keeps those among the strings.

    Raises:
      ConfigError: a string has another form.
    """
    values = {section: dict(keys) if isinstance(keys, Mapping) else keys or {} for section, keys in values.items()}
    for override in sorted(overrides, key=lambda one: not one.startswith("model.name=")):
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
    if keys == ["model", "name"] and value not in (None, node.get("name")):
        node, before = {key: kept for key, kept in node.items() if key not in SHAPE_KEYS}, node
        values["model"] = node
        if sizes := [key for key in before if key not in node]:
            rest = [key for key in node if key != "name"]
            kept = f", whose {', '.join(rest)} {'stay' if len(rest) > 1 else 'stays'}" if rest else ""
            log.warning("%s replaces %s of the recipe%s.", shown(override), ", ".join(sizes), kept)
    node[keys[-1]] = value
