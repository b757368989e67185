"""`jaxllm COMMAND`: parses and dispatches. What a user can get wrong ends here, as one sentence and exit code 2."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxllm.config import Config, ConfigError, json_schema, load_config

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Text into tokens.")
app.add_typer(data_app, name="data")

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
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw which context rank computes which block of attention, and when."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Shows the mesh, every parameter with its shardings and bytes per device, and where the mesh wastes work."""
    loaded = load(recipe)
    from jaxllm.report import inspect_config, render

    report = inspect_config(loaded, gpus, gpus_per_host)
    if picture is not None:
        from jaxllm.parallel.zigzag import picture as draw

        draw(loaded.parallel.context, picture)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(render(report))


@app.command("compile")
def compile_(
    recipe: Recipe,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="The kind of GPU, such as h100-80gb; default: the devices here."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many; none of them need be here. Default: the config's mesh.")] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(help="Default: the largest divisor of --gpus not above that kind's host size.")
    ] = None,
    real_memory: Annotated[
        bool, typer.Option("--real-memory", help="Compile again for the GPU's real memory: does XLA rematerialise?")
    ] = False,
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where reports are kept; default: jaxllm/compile in the user's cache.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile whatever is kept, and keep nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compiles the real train step for GPUs that need not be here: its bytes, what it sends, and whether it fits."""
    from jaxllm.plan.hardware import find_gpu

    loaded = load(recipe)
    found = None if gpu is None else find_gpu(gpu)
    from jaxllm.compile_report import compile_report
    from jaxllm.compile_text import render
    from jaxllm.distributed import cache_folder

    folder = None if no_cache else Path(cache) if cache else cache_folder() / "compile"
    report = compile_report(loaded, found, gpus, gpus_per_host, real_memory=real_memory, cache=folder)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(render(report))


@app.command()
def schedule(
    recipe: Recipe,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the timeline; ends in .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Shows the pipeline's schedule: what each stage does when, how much of the step it is idle, what it must remember."""
    loaded = load(recipe)
    from jaxllm.plan.pipeline_report import pipeline_report

    report = pipeline_report(loaded)
    if out is not None:
        from jaxllm.plots import schedule_picture

        schedule_picture(report.schedule, out, slot_bytes=report.slot_bytes)
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory, or one of its checkpoints.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder.")],
    step: Annotated[int | None, typer.Option(help="This checkpoint of a run; default: the newest.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Writes the weights alone: for train.init_from, for other machines, or to keep."""
    from jaxllm.train.weights import export as export_weights

    found = export_weights(source, destination, step, dtype)
    print(f"exported {found.description} to {destination} as {dtype}")


@data_app.command("prepare")
def data_prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files or quoted patterns (** for folders). .jsonl, .json and .ndjson: an object a line; .parquet: rows; "
            "any other text file: one document. .gz and .zst are decompressed.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder to write; a stopped run goes on in it.")],
    tokenizer: Annotated[str, typer.Option(metavar="PATH|bytes", help="A folder with tokenizer.json, or bytes.")],
    text_key: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one for each CPU.")] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Make the I-th of N parts of the work, from 0; all with the same --out.")
    ] = "0/1",
    shard_megabytes: Annotated[
        int | None, typer.Option(help="MiB of input that become one shard, about; default: a 64th of it, but 4 to 256.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first broken record instead of counting it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Tokenizes text once into a folder to train on, with several processes; run it again to go on."""
    from jaxllm.data.prepare import parse_shard, prepare

    try:
        summary = prepare(
            inputs,
            out,
            tokenizer=tokenizer,
            text_key=text_key,
            workers=workers,
            shard=parse_shard(shard),
            shard_bytes=None if shard_megabytes is None else shard_megabytes * 2**20,
            strict=strict,
            progress=not as_json,
        )
    except KeyboardInterrupt as stopped:
        print(f"jaxllm: {stopped or 'stopped before anything was prepared.'}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(json.dumps(summary.to_json()) if as_json else "\n".join(summary.lines()))


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
    # Orbax logs a page for each error of a save, and raises it too: one sentence from us is enough.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        app()
    except ConfigError as error:
        print(f"jaxllm: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
