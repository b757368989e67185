"""`jaxllm COMMAND`: parses arguments and dispatches. User errors end here, as one sentence and exit code 2."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand

from jaxllm import __version__
from jaxllm.config import Config, ConfigError, json_schema, load_config
from jaxllm.display import print_sentence
from jaxllm.runtime import exit_codes


class Command(TyperCommand):
    """Help that shows only the metavar of each argument. The metavar shows whether it is optional or repeatable."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(one.metavar) for one in self.params if one.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title in ("Arguments", "Options"):
            rows = []
            for one in self.get_params(ctx):
                if (record := one.get_help_record(ctx)) and title.lower().startswith(one.param_type_name):
                    # Some versions of typer escape brackets for rich, which is not used here.
                    name = one.metavar if title == "Arguments" else record[0]
                    rows.append((name, record[1].replace("\\[", "[")))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def epilog(*lines: str) -> str:
    """The example command lines at the end of a help text, not rewrapped."""
    return "\b\n" + "\n".join(["For example:", *(f"  jaxllm {line}" for line in lines)])


def example(*lines: str) -> dict[str, Any]:
    """Arguments of `app.command` that all commands here share, with example command lines."""
    return {"cls": Command, "epilog": epilog(*lines)}


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=epilog("train quickstart", "train --help"),
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Turns text into tokens.")
app.add_typer(data_app, name="data")
convert_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Converts models from and to Hugging Face format.")
app.add_typer(convert_app, name="convert")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
GpuCount = Annotated[
    int | None, typer.Option(metavar="N", help="Number of GPUs; none is needed here. Default: the config's mesh.")
]
GpusPerHost = Annotated[
    int | None, typer.Option(metavar="N", help="Default: the largest divisor of --gpus not above that kind's host size.")
]
CacheDir = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder of compile reports; default: jaxllm/compile in the user's cache.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile even if a report is stored, and store none.")]
SavedStep = Annotated[int | None, typer.Option(metavar="N", help="The checkpoint of this step; default: the newest.")]
Force = Annotated[bool, typer.Option("--force", help="Move an existing DST aside, to DST.before-1; it is not deleted.")]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Compare logits with transformers, in float32, before DST gets its name (extra reference)."),
]

Recipe = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG [SECTION.KEY=VALUE]...",
        help="A YAML recipe, or the name of one that comes with jaxllm, such as quickstart; and keys to override, such as "
        "train.steps=100, in any order.",
    ),
]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxllm {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", help="Print jaxllm's version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Trains Llama-family models with JAX."""


@app.command(**example("train quickstart train.steps=100 run.dir=runs/first"))
def train(recipe: Recipe) -> None:
    """Trains a model; resumes automatically from the run directory."""
    loaded = load(recipe)
    from jaxllm.runtime import distributed, exit_codes
    from jaxllm.train.loop import fit

    if fit(loaded).stopped_by and distributed.launch_info().restarts:
        # Some launchers end the other processes as soon as one exits.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise typer.Exit(exit_codes.RESTART)


@app.command(**example("inspect quickstart --gpus 8 parallel.tensor=2"))
def inspect(
    recipe: Recipe,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Devices of the mesh; none is needed here.")] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(metavar="N", help="Default: the largest divisor of --gpus not above 8.")
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw which context rank computes which attention block, and when."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the mesh, the parameters and wasted work. Each parameter with its shardings and bytes per device."""
    loaded = load(recipe)
    from jaxllm.compile.inspect import inspect_config
    from jaxllm.compile.inspect_text import render

    report = inspect_config(loaded, gpus, gpus_per_host)
    if picture is not None:
        from jaxllm.plots.zigzag import picture as draw

        draw(loaded.parallel.context, picture)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(render(report))


@app.command(**example("estimate quickstart --gpu h100-80gb --gpus 8"))
def estimate(
    recipe: Recipe,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="The kind of GPU, such as h100-80gb; default: memory only, no speed."),
    ] = None,
    gpus: GpuCount = None,
    gpus_per_host: GpusPerHost = None,
    convention: Annotated[
        str,
        typer.Option(
            metavar="jaxllm|megatron", help="megatron: the published rule's memory and verdict, and Megatron-LM's FLOP count."
        ),
    ] = "jaxllm",
    picture: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw the bytes of each stage as stacked bars; .png or .svg.")
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT", help="Draw bytes over sequence, microbatch or step; step compiles for --gpu (needs extra aot)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimates memory per device, and speed. Bytes by term and stage, by closed forms, within a second."""
    from jaxllm.plan.estimate import estimate as estimate_config

    report = estimate_config(load(recipe), gpu, gpus, gpus_per_host, cast(Any, convention))
    if over is not None and picture is None:
        raise ConfigError(f"--over={over} draws a picture: add --picture FILE.png.")
    if over == "step" and picture is not None:
        from jaxllm.plots.memory_timeline import draw_step

        draw_step(report, picture)
    elif picture is not None:
        from jaxllm.plots.memory import estimate_picture

        estimate_picture(report, picture, over)
    print(json.dumps(report.to_json()) if as_json else fitted(report.lines()))


@app.command("compile", **example("compile quickstart --gpu h100-80gb --gpus 8"))
def compile_(
    recipe: Recipe,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="The kind of GPU, such as h100-80gb; default: the local devices."),
    ] = None,
    gpus: GpuCount = None,
    gpus_per_host: GpusPerHost = None,
    real_memory: Annotated[
        bool, typer.Option("--real-memory", help="Compile again for the GPU's real memory, to see whether XLA rematerialises.")
    ] = False,
    cache: CacheDir = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Compiles the train step for GPUs, without having any. Reports its memory, its communication, and whether it fits."""
    from jaxllm.cost_model.hardware import find_gpu

    loaded = load(recipe)
    found = None if gpu is None else find_gpu(gpu)
    from jaxllm.compile.report import compile_report
    from jaxllm.compile.text import render
    from jaxllm.runtime.distributed import cache_folder

    folder = None if no_cache else Path(cache) if cache else cache_folder() / "compile"
    report = compile_report(loaded, found, gpus, gpus_per_host, real_memory=real_memory, cache=folder)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(render(report))


@app.command(**example("plan quickstart --gpu h100-80gb --gpus 8 --out best.yaml"))
def plan(
    recipe: Recipe,
    gpu: Annotated[str, typer.Option(metavar="NAME|FILE.yaml", help="The kind of GPU, such as h200-141gb.")] = "h100-80gb",
    gpus: GpuCount = None,
    gpus_per_host: GpusPerHost = None,
    compile_: Annotated[
        int, typer.Option("--compile", metavar="K", help="Confirm the best K by compiling the real step; 0: estimates only.")
    ] = 8,
    objective: Annotated[
        str,
        typer.Option(
            metavar="GOAL",
            help="speed; gpus: the fewest, up to --gpus, that fit; sequence: the longest; microbatch: the largest.",
        ),
    ] = "speed",
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Do not change this setting of the config: tensor, zero, remat ... Repeatable."),
    ] = None,
    across_hosts: Annotated[
        bool | None,
        typer.Option(
            "--across-hosts/--within-hosts", help="May context x tensor cross hosts? Default: only if nothing else fits."
        ),
    ] = None,
    host_gib_per_gpu: Annotated[
        float, typer.Option(metavar="GIB", min=0, help="Host memory that offloading may use per GPU.")
    ] = 128.0,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Also days, GPU-hours and energy for 300B, 15T ...")] = None,
    sweep: Annotated[str | None, typer.Option(metavar="gpus", help="gpus: also the best of 1, 2, 4 ... up to --gpus.")] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE.yaml", help="Write the best plan as a recipe; a new file.")] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=0, help="Number of candidates in the table.")] = 10,
    cache: CacheDir = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Searches for the fastest config that fits. Tries meshes, ZeRO, microbatch, schedule and remat; confirms by compiling."""
    loaded = load(recipe)
    from jaxllm.commands.plan import Request, outcome, progress_bar
    from jaxllm.plan.recipe import check_new, write_recipe

    request = Request(
        gpu=gpu,
        gpus=gpus,
        gpus_per_host=gpus_per_host,
        compile=compile_,
        objective=cast(Any, objective),
        keep=tuple(keep or ()),
        across_hosts=across_hosts,
        host_gib_per_gpu=host_gib_per_gpu,
        tokens=tokens,
        sweep=sweep,
        cache=cache,
        no_cache=no_cache,
    )
    if out is not None:
        check_new(out)
    try:
        with nullcontext() if as_json else progress_bar() as progress:
            found = outcome(loaded, request, progress)
    except KeyboardInterrupt:
        print("jaxllm: interrupted before any config that fits was found.", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        found.print(rows)
    if out is not None:
        write_recipe(found.plan, out, f"jaxllm {shlex.join(sys.argv[1:])}")
    if found.interrupted:
        what = "this is the best so far" if found.plan.interrupted else "the plan is complete, the sweep is not"
        print(f"jaxllm: interrupted; {what}.", file=sys.stderr)
        raise typer.Exit(130)


@app.command(**example("schedule mesh-demo parallel.pipe=4 train.microbatch_sequences=1"))
def schedule(
    recipe: Recipe,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the timeline; ends in .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the pipeline schedule. The work of each stage over time, its idle share of the step, and what it must store."""
    loaded = load(recipe)
    from jaxllm.plan.pipeline_report import pipeline_report

    report = pipeline_report(loaded)
    if out is not None:
        from jaxllm.plots.schedule import schedule_picture

        schedule_picture(report.schedule, out, slot_bytes=report.slot_bytes)
    print(json.dumps(report.to_json()) if as_json else fitted(report.lines()))


@app.command("report", **example("report runs/quickstart"))
def report_(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory (run.dir). It is only read, except for the page.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="The page; default: report.html in RUN. It is overwritten.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="Predict step times on this kind of GPU; default: the measured step time."),
    ] = None,
    gpus_per_host: Annotated[int | None, typer.Option(metavar="N", min=1, help="GPUs per host; default: that kind's.")] = None,
    loss: Annotated[
        float | None,
        typer.Option(metavar="NATS", help="Count hours to this training loss (smoothed); default: the lowest reached."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else; without --out, no page.")
    ] = False,
) -> None:
    """Reports on a run, with charts in one HTML page. Also predicts the effect of more data ranks."""
    from jaxllm.run_report.page import FILE_NAME, write_page
    from jaxllm.run_report.summary import report_on

    report = report_on(run, gpu=gpu, gpus_per_host=gpus_per_host, loss=loss)
    page = None if as_json and out is None else write_page(report, Path(run) / FILE_NAME if out is None else out)
    print(json.dumps(report.to_json()) if as_json else fitted([*report.lines(), "", f"page {page}"]))


@app.command(**example("export runs/quickstart models/quickstart"))
def export(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory, or one of its checkpoints.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder.")],
    step: SavedStep = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")] = "float32",
    force: Force = False,
) -> None:
    """Writes only the weights of a run. For train.init_from, for other machines, or for an archive."""
    from jaxllm.checkpoint.weights import export as export_weights

    found = export_weights(source, destination, step, dtype, force)
    print(f"exported {found.description} to {destination} as {dtype}")


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Settings such as model.compute_dtype=float32 or parallel.tensor=2. Default: float32 on CPU, bfloat16 on GPUs, "
        "on all devices here.",
    ),
]
ModelFolder = Annotated[
    str, typer.Option(metavar="DIR", help="A Hugging Face or jaxllm model folder, a run directory or one of its checkpoints.")
]
OtherTokenizer = Annotated[
    str | None, typer.Option(metavar="PATH|bytes", help="A folder with tokenizer.json, or bytes; default: the model's own.")
]


@app.command("eval", **example("eval --model runs/quickstart --text book.txt"))
def evaluate(
    model: ModelFolder,
    text: Annotated[str, typer.Option(metavar="FILE", help="A file of UTF-8 text.")],
    overrides: Overrides = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(metavar="S", help="Tokens per window; default: 1024, or less if the model was made for less."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens from one window to the next; default: S. Less gives each token more context."),
    ] = None,
    tokenizer: OtherTokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Scores a text: nats per token, perplexity, bits per byte. Windows overlap only by --stride; the rest is dropped."""
    from jaxllm.commands import predict
    from jaxllm.commands.plan import progress_bar

    options = {"sequence_length": sequence_length, "stride": stride, "tokenizer": tokenizer, "say": tell}
    with progress_bar() as progress:
        score = predict.evaluate(model, text, overrides or [], **options, progress=progress)
    show(json.dumps(score.to_json()) if as_json else fitted(score.lines()))


@app.command(**example("generate --model runs/quickstart --prompt 'def ' --temperature 0.8"))
def generate(
    model: ModelFolder,
    prompt: Annotated[
        list[str], typer.Option(metavar="TEXT", help="A text to continue. Repeatable: prompts are processed together.")
    ],
    overrides: Overrides = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are user messages: answer them with the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="With --chat: the system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="At most this many tokens per prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token; 1 samples from the model's probabilities.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the likeliest tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens; default: from all.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the sampling.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the continuation, like a stop token. Repeatable.")
    ] = None,
    tokenizer: OtherTokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Continues prompts, to see what a model has learned. Uses a key-value cache and prints text as it is generated."""
    from jaxllm.commands import predict
    from jaxllm.inference.text_stream import InTurn

    before = [f"> {text}\n" for text in prompt] if chat else prompt
    on_text = InTurn(before, show_at_once)
    found = predict.generate(
        model,
        prompt,
        overrides or [],
        chat=chat,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or [],
        tokenizer=tokenizer,
        say=tell,
        **({} if as_json else {"on_text": on_text}),
    )
    if as_json:
        show(json.dumps({"completions": [{"prompt": text, **one.to_json()} for text, one in zip(prompt, found, strict=True)]}))


@app.command(**example("doctor", "doctor quickstart parallel.data=2"))
def doctor(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="As for `jaxllm train`; none: all devices here."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="The expected kind of GPU; default: the kind found.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Checks devices, network, clocks and run directory. Here or on all processes of a launch; exit code 1 if a check fails."""
    from jaxllm.cost_model.hardware import find_gpu
    from jaxllm.doctor.doctor import examine, read, render

    found = None if gpu is None else find_gpu(gpu)
    given = recipe or []
    loaded, parallel, run = read([one for one in given if "=" not in one], [one for one in given if "=" in one])
    report = examine(run, parallel, loaded, found)
    if report.is_shown_here and as_json:
        print(json.dumps(report.to_json()), flush=True)
    elif report.is_shown_here:
        from rich.console import Console

        Console(highlight=False, markup=False).print(render(report))
    if report.failed:
        raise typer.Exit(1)


@data_app.command("prepare", **example("data prepare 'books/**/*.txt' --out data/books --tokenizer bytes"))
def data_prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files or quoted patterns (** for folders). .jsonl, .json and .ndjson: one object per line; .parquet: rows; "
            "any other text file: one document. .gz and .zst are decompressed.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder to write; a stopped run resumes in it.")],
    tokenizer: Annotated[str, typer.Option(metavar="PATH|bytes", help="A folder with tokenizer.json, or bytes.")],
    text_key: Annotated[str, typer.Option(metavar="NAME", help="The field or column that holds the text.")] = "text",
    workers: Annotated[int | None, typer.Option(metavar="N", help="Number of processes; default: one per CPU.")] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Do the I-th of N parts of the work, from 0; all parts use the same --out.")
    ] = "0/1",
    shard_megabytes: Annotated[
        int | None,
        typer.Option(metavar="MIB", help="Approximate MiB of input per shard; default: a 64th of the input, but 4 to 256."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first broken record instead of counting it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenizes text once into a folder to train on. It uses several processes; run it again to resume."""
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
    print(json.dumps(summary.to_json()) if as_json else fitted(summary.lines()))


@convert_app.command("from-hf", **example("convert from-hf smollm2 models/smollm2"))
def convert_from_hf(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder with config.json and *.safetensors.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder, in jaxllm's own format.")],
    force: Force = False,
    verify: Verify = False,
) -> None:
    """Converts a Hugging Face folder to jaxllm's own format. Bit for bit, one tensor at a time; verifies the result."""
    from jaxllm.checkpoint.hf_convert import from_hf

    print("\n".join(from_hf(source, destination, force=force, verify=verify).lines()))


@convert_app.command("to-hf", **example("convert to-hf runs/quickstart models/quickstart-hf"))
def convert_to_hf(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A jaxllm model folder, a run directory or a checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder that transformers can load.")],
    step: SavedStep = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16; default: as stored.")
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Largest file, such as 500MiB; larger models become several files with an index."),
    ] = "5GB",
    max_position: Annotated[
        int | None,
        typer.Option(metavar="N", help="max_position_embeddings; default: the model's own, or the run's length if longer."),
    ] = None,
    force: Force = False,
    verify: Verify = False,
) -> None:
    """Writes a model or a run as a Hugging Face folder. Verifies the result."""
    from jaxllm.checkpoint.hf_convert import parse_size, to_hf

    done = to_hf(
        source,
        destination,
        step=step,
        dtype=dtype,
        largest_file=parse_size(max_shard_size),
        max_position=max_position,
        force=force,
        verify=verify,
    )
    print("\n".join(done.lines()))


@app.command(**example("schema > recipe.schema.json"))
def schema() -> None:
    """Prints the JSON schema of a recipe, for editors."""
    print(json.dumps(json_schema(), indent=2))


def fitted(lines: Iterable[str]) -> str:
    """The lines as one text. On a terminal, lines that are too long are wrapped between words and indented."""
    if not sys.stdout.isatty():
        return "\n".join(lines)
    width = shutil.get_terminal_size().columns
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    )


def show(text: str, end: str = "\n") -> None:
    """Prints on the main process only."""
    from jaxllm.runtime.distributed import is_main_process

    if is_main_process():
        print(text, end=end, flush=True)


def show_at_once(text: str) -> None:
    show(text, end="")


def tell(line: str) -> None:
    """Prints a line to standard error on the main process only."""
    from jaxllm.runtime.distributed import is_main_process

    if is_main_process():
        print(line, file=sys.stderr, flush=True)


def load(recipe: list[str]) -> Config:
    """The config of a command line: one file, and section.key=value strings before or after it."""
    files = [argument for argument in recipe if "=" not in argument]
    if len(files) != 1:
        given = f"{len(files)} were given: {', '.join(files)}" if files else "none was given"
        raise ConfigError(f"One config file is needed and {given}; overrides are written section.key=value.")
    return load_config(files[0], [argument for argument in recipe if "=" in argument])


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Orbax logs a page for each error of a save, and raises it too; our one sentence is enough.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        print(f"jaxllm: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.EPIPE, *exit_codes.FULL):
            raise
        # The reader of a pipe may stop early.
        if error.errno != errno.EPIPE:
            print_sentence(f"{error.strerror} for {error.filename or 'what it prints or writes'}: make room there.")
        # The rest in the buffers would fail again at exit.
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        sys.exit(exit_codes.exit_code_for(error))


if __name__ == "__main__":
    main()
