"""Reads the file of a recipe. Config (config.py) applies overrides and checks the rest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError, nearest
from jaxllm.untrusted import RefusedInput, read_yaml, shown


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


def read_recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        names = [*(recipe.name for recipe in config_folder().glob("*.yaml")), *published_models()]
        hint = nearest(path.name, names, "give the path of a YAML recipe such as configs/quickstart.yaml.")
        if path.name in published_models():
            hint = f"that is the shape of a model, so set model.name={path.name} in a recipe."
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
    if sinks and not any(override.lstrip("+-").partition("=")[0].strip() == "log.sinks" for override in overrides):
        raise ConfigError(
            f"{path} sets log.sinks={shown(sinks)}, code that would run as you, and a recipe must not ask for that: remove the "
            f"key, or give log.sinks='[module:Class]' on the command line."
        )
