"""`jaxllm COMMAND`: parses and dispatches. What a user can get wrong ends here, as one sentence and exit code 2."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer

from jaxllm.config import ConfigError, json_schema, load_config

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML recipe, such as configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Override keys, such as train.steps=100.")
]


@app.callback()
def callback() -> None:
    """Trains Llama-family models with JAX."""


@app.command()
def train(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Trains; resumes by itself from the run directory."""
    loaded = load_config(config, overrides or ())
    from jaxllm.train.loop import fit

    fit(loaded)


@app.command()
def schema() -> None:
    """Prints the JSON schema of a recipe, for editors."""
    print(json.dumps(json_schema(), indent=2))


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except ConfigError as error:
        print(f"jaxllm: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
