"""`jaxllm COMMAND`: parses and dispatches. What a user can get wrong ends here, as one sentence and exit code 2."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer

from jaxllm.config import Config, ConfigError, json_schema, load_config

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Recipe = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG [SECTION.KEY=VALUE]...",
        help="A YAML recipe, such as configs/quickstart.yaml, and keys to override, such as train.steps=100, in any order.",
    ),
]


@app.callback()
def callback() -> None:
    """Trains Llama-family models with JAX."""


@app.command()
def train(recipe: Recipe) -> None:
    """Trains; resumes by itself from the run directory."""
    loaded = load(recipe)
    from jaxllm.train.loop import fit

    fit(loaded)


@app.command()
def inspect(
    recipe: Recipe,
    gpus: Annotated[int | None, typer.Option(help="Devices of the mesh; none of them need be here.")] = None,
    gpus_per_host: Annotated[int | None, typer.Option(help="Default: the largest divisor of --gpus not above 8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Shows the mesh, every parameter with its shardings and bytes per device, and where the mesh wastes work."""
    loaded = load(recipe)
    from jaxllm.report import inspect_config, render

    report = inspect_config(loaded, gpus, gpus_per_host)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(render(report))


@app.command()
def schema() -> None:
    """Prints the JSON schema of a recipe, for editors."""
    print(json.dumps(json_schema(), indent=2))


def load(recipe: list[str]) -> Config:
    """The config of a command line: one file, and section.key=value strings before or after it."""
    files = [argument for argument in recipe if "=" not in argument]
    if len(files) != 1:
        given = f"{len(files)} were given: {', '.join(files)}" if files else "none was given"
        raise ConfigError(f"One config file is needed and {given}; overrides are written section.key=value.")
    return load_config(files[0], [argument for argument in recipe if "=" in argument])


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except ConfigError as error:
        print(f"jaxllm: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
