"""`jaxllm COMMAND`: parses arguments and dispatches. User errors end here, as one sentence and exit code 2."""

import atexit
import gc
import json
import logging
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from jaxllm import BEGAN_S, __version__
from jaxllm.cli import options as opt
from jaxllm.cli.errors import ending_at_ctrl_c, ending_in_one_sentence, in_one_line, open_standard_streams
from jaxllm.cli.models import convert_from_hf, convert_to_hf, data_fill, data_prepare, evaluate, export, generate, lm_eval
from jaxllm.cli.options import argument, flag, option
from jaxllm.config import Config, ConfigError, json_schema
from jaxllm.terminal import progress_shown

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=opt.epilog("train quickstart", "train --help"),
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Turns text into tokens.")
app.add_typer(data_app, name="data")
convert_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Converts models from and to Hugging Face format.")
app.add_typer(convert_app, name="convert")


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
    """Trains Llama, Qwen, Gemma, OLMo and Mistral models with JAX."""


@app.command(**opt.example("train quickstart train.steps=100 run.dir=runs/first"))
def train(recipe: opt.Recipe) -> None:
    """Trains a model; resumes automatically from the run directory."""
    loaded = opt.load(recipe)
    with ending_at_ctrl_c():
        from jaxllm.cluster import distributed, exit_codes
        from jaxllm.run import advisor
        from jaxllm.run.loop import fit
        from jaxllm.run_report import for_runs

    advisor.answers = for_runs
    if fit(loaded, import_s=time.monotonic() - BEGAN_S).stopped_by and distributed.launch_info().restarts:
        # Some launchers end the other processes as soon as one exits.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise typer.Exit(exit_codes.RESTART)


@app.command(**opt.example("inspect quickstart --gpus 8 parallel.tensor=2"))
def inspect(
    recipe: opt.RecipeOrModel,
    gpus: Annotated[int | None, option("N", "Devices of the mesh; none is needed here.")] = None,
    gpus_per_host: Annotated[int | None, option("N", "Default: the largest divisor of --gpus not above 8.")] = None,
    gpu: Annotated[str | None, option("NAME|FILE.yaml", "Show what shapes waste of a step on this kind of GPU.")] = None,
    picture: Annotated[
        str | None, option("FILE.png", "Draw which context rank computes which attention block, and when.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Shows the mesh, the parameters and wasted work. Each parameter with its shardings and bytes per device."""
    loaded = opt.load(recipe, or_model=True)
    from jaxllm.compile.inspect import inspect_config
    from jaxllm.compile.text import render_inspect

    report = inspect_config(loaded, gpus, gpus_per_host, gpu)
    if picture is not None:
        from jaxllm.plots.schedule import zigzag_picture

        zigzag_picture(loaded.parallel.context, picture)
    opt.print_report(report, as_json, render_inspect)


@app.command(
    **opt.example("estimate quickstart --gpu h100-80gb --gpus 8", "estimate quickstart --for generate --prompts 8 --gpus 1")
)
def estimate(
    recipe: opt.RecipeOrModel,
    gpu: Annotated[str | None, option("NAME|FILE.yaml", "Kind of GPU, such as h100-80gb; default: memory alone.")] = None,
    gpus: opt.GpuCount = None,
    gpus_per_host: opt.GpusPerHost = None,
    convention: Annotated[
        str, option("jaxllm|megatron", "megatron: the published rule's memory and verdict, and Megatron-LM's FLOP count.")
    ] = "jaxllm",
    picture: Annotated[str | None, option("FILE.png", "Draw the bytes of each stage as stacked bars; .png or .svg.")] = None,
    purpose: opt.Purpose = "train",
    stored_dtype: opt.StoredDtype = None,
    sequence_length: opt.WindowTokens = None,
    prompts: opt.Prompts = None,
    prompt_tokens: opt.PromptTokens = None,
    max_new_tokens: opt.NewTokens = None,
    over: Annotated[
        str | None, option("WHAT", "Draw bytes over sequence, microbatch or step; step compiles for --gpu (needs extra aot).")
    ] = None,
    tokens: opt.Tokens = None,
    price: opt.Price = None,
    mtbf_hours: opt.MtbfHours = None,
    restart_minutes: opt.RestartMinutes = None,
    checkpoint_gb_per_s: opt.CheckpointRate = None,
    achieved_tflops: opt.AchievedTflops = None,
    as_json: opt.AsJson = False,
) -> None:
    """Estimates memory per device, and speed. Bytes by term and stage, by closed forms, within a second."""
    terms = (tokens, price, mtbf_hours, restart_minutes, checkpoint_gb_per_s, achieved_tflops)
    given = {"prompts": prompts, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    given |= {"stored_dtype": stored_dtype, "sequence_length": sequence_length}
    sizes = {name: value for name, value in given.items() if value is not None}
    if purpose != "train" or sizes:
        from jaxllm.plan.inference_estimate import estimate_inference, load_untrained

        only_training = picture is not None or over is not None or convention != "jaxllm"
        if purpose != "train" and (only_training or any(term is not None for term in terms)):
            raise ConfigError(f"Pictures, --convention and the quote are for training: leave them out with --for={purpose}.")
        loaded = opt.load(recipe, load_untrained, or_model=True)
        found = estimate_inference(loaded, cast(Any, purpose), gpu, gpus, gpus_per_host, **sizes)
        opt.print_report(found, as_json)
        return
    from jaxllm.plan.estimate import estimate as estimate_config
    from jaxllm.plan.quote import Terms, quote_estimate

    report = estimate_config(opt.load(recipe, or_model=True), gpu, gpus, gpus_per_host, cast(Any, convention))
    offer = quote_estimate(report, Terms(*terms))
    draw_estimate(report, picture, over)
    if as_json:
        print(json.dumps(report.to_json() | ({} if offer is None else {"quote": offer.to_json()})))
    else:
        opt.print_lines([*report.lines(), *([] if offer is None else ["", *offer.lines()])])


def draw_estimate(report: Any, picture: str | None, over: str | None) -> None:
    """Writes the picture, if one is wanted."""
    if over is not None and picture is None:
        raise ConfigError(f"--over={over} draws a picture: add --picture FILE.png.")
    if over == "step" and picture is not None:
        from jaxllm.plots.memory_timeline import draw_step

        draw_step(report, picture)
    elif picture is not None:
        from jaxllm.plots.memory import estimate_picture

        estimate_picture(report, picture, over)


@app.command("compile", **opt.example("compile quickstart --gpu h100-80gb --gpus 8"))
def compile_(
    recipe: opt.RecipeOrModel,
    gpu: Annotated[str | None, option("NAME|FILE.yaml", "Kind of GPU, such as h100-80gb; default: the local devices.")] = None,
    gpus: opt.GpuCount = None,
    gpus_per_host: opt.GpusPerHost = None,
    real_memory: Annotated[
        bool, flag("--real-memory", "Compile again for the GPU's real memory, to see whether XLA rematerialises.")
    ] = False,
    kernels: Annotated[
        bool,
        flag("--kernels", "Show the time of every kernel by part: a roofline at shares of the peaks that an H100 reached."),
    ] = False,
    against: Annotated[
        list[str] | None, option("OTHER", "Compare with key=value (several may be given) or another recipe.")
    ] = None,
    save: Annotated[str | None, option("DIR", "Compile the run's programs into DIR, for run.compilation_cache=DIR.")] = None,
    run: Annotated[
        int | None, option("STEPS", "Run steps of rank 0 on the one local GPU: its compute, without transfers.", min=1)
    ] = None,
    cache: opt.CacheDir = None,
    no_cache: opt.NoCache = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compiles the train step for GPUs, without having any. Reports its memory, its communication, and whether it fits."""
    from jaxllm.cost_model.gpu_choice import find_gpu

    if save and (against or kernels or real_memory or cache or no_cache):
        raise ConfigError("--save makes no report: leave out --against, --kernels, --real-memory, --cache and --no-cache.")
    if run and (gpu or gpus_per_host or save or against or kernels or real_memory or cache or no_cache):
        raise ConfigError("--run runs on the local GPU and makes no report: give it only --gpus and --json.")
    loaded = opt.load(recipe, or_model=True)
    found = None if gpu is None else find_gpu(gpu)
    if run:
        from jaxllm.compile.pretend import run_rank

        opt.print_report(run_rank(loaded, gpus, run), as_json, lambda found: found.text())
        return
    if save:
        compile_and_save(loaded, save, found, gpus, gpus_per_host, as_json)
        return
    from jaxllm.compile.compare import compare, render_comparison
    from jaxllm.compile.report import compile_report
    from jaxllm.compile.text import account_of, render, render_kernels

    other = opt.load_other(recipe, against) if against else None
    options: dict[str, Any] = {"real_memory": real_memory, "cache": opt.compile_cache(cache, no_cache)}
    report = compile_report(loaded, found, gpus, gpus_per_host, **options)
    if kernels:
        account_of(report)
    compared = None if other is None else compile_report(other, found, gpus, gpus_per_host, **options)
    comparison = None
    if compared is not None and not kernels:
        comparison = compare(report, compared, ("this command", " ".join(against or [])))
    if as_json and compared is not None:
        more = {"comparison": comparison.to_json()} if comparison else {}
        print(json.dumps({**report.to_json(), "against": compared.to_json(), **more}), flush=True)
    elif comparison is not None:
        opt.print_report(comparison, False, render_comparison)
    else:
        opt.print_report(report, as_json, partial(render_kernels, against=compared) if kernels else render)


def compile_and_save(config: Config, folder: str, gpu: Any, gpus: int | None, gpus_per_host: int | None, as_json: bool) -> None:
    from jaxllm.cluster.distributed import is_main_process
    from jaxllm.compile.save import save_programs, saved_lines

    saved = save_programs(config, folder, gpu, gpus, gpus_per_host)
    if is_main_process() and as_json:
        print(json.dumps({"saved": [vars(one) for one in saved]}))
    elif is_main_process():
        opt.print_lines(saved_lines(saved, folder))


@app.command(**opt.example("plan quickstart --gpu h100-80gb --gpus 8 --out best.yaml"))
def plan(
    recipe: opt.RecipeOrModel,
    gpu: Annotated[str, option("NAME|FILE.yaml", "The kind of GPU, such as h200-141gb.")] = "h100-80gb",
    gpus: opt.GpuCount = None,
    gpus_per_host: opt.GpusPerHost = None,
    compile_: Annotated[int, option("K", "Confirm the best K by compiling the real step; 0: estimates only.", "--compile")] = 8,
    objective: Annotated[
        str, option("GOAL", "speed; gpus: the fewest, up to --gpus, that fit; sequence: the longest; microbatch: the largest.")
    ] = "speed",
    keep: Annotated[
        list[str] | None, option("NAME", "Do not change this setting of the config: tensor, zero, remat ... Repeatable.")
    ] = None,
    across_hosts: Annotated[
        bool | None,
        flag("--across-hosts/--within-hosts", "May context x tensor cross hosts? Default: only if nothing else fits."),
    ] = None,
    host_gib_per_gpu: Annotated[
        float | None, option("GIB", "Host memory that offloading may use per GPU. Default: 7/8 of its share.", min=0)
    ] = None,
    tokens: opt.Tokens = None,
    price: opt.Price = None,
    mtbf_hours: opt.MtbfHours = None,
    restart_minutes: opt.RestartMinutes = None,
    checkpoint_gb_per_s: opt.CheckpointRate = None,
    sweep: Annotated[str | None, option("gpus", "gpus: also the best of 1, 2, 4 ... up to --gpus.")] = None,
    out: Annotated[str | None, option("FILE.yaml", "Write the best plan as a recipe; a new file.")] = None,
    rows: Annotated[int, option("N", "Number of candidates in the table.", min=0)] = 10,
    cache: opt.CacheDir = None,
    no_cache: opt.NoCache = False,
    as_json: opt.AsJson = False,
) -> None:
    """Searches for the fastest config that fits. Tries mesh, ZeRO, microbatch, schedule, remat, host; compiles the best."""
    loaded = opt.load(recipe, or_model=True)
    from jaxllm.compile.plan import outcome
    from jaxllm.plan.plan_result import check_new, write_recipe
    from jaxllm.plan.quote import Terms

    options: dict[str, Any] = {
        "compile": compile_,
        "objective": objective,
        "terms": Terms(tokens, price, mtbf_hours, restart_minutes, checkpoint_gb_per_s),
        "sweep": sweep,
        # The folder's name needs JAX, which a plan by estimates alone does not.
        "cache": opt.compile_cache(cache, no_cache) if compile_ else None,
        "keep": tuple(keep or ()),
        "across_hosts": across_hosts,
        "host_bytes_per_gpu": None if host_gib_per_gpu is None else host_gib_per_gpu * 2**30,
    }
    if out is not None:
        check_new(out)
    try:
        with progress_shown(not as_json) as progress:
            found = outcome(loaded, gpu, gpus, gpus_per_host, progress=progress, **options)
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


@app.command(**opt.example("schedule mesh-demo parallel.pipe=4 train.microbatch_sequences=1"))
def schedule(
    recipe: opt.Recipe,
    out: Annotated[str | None, option("FILE", "Draw the timeline; ends in .png or .svg.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Shows the pipeline schedule. The work of each stage over time, its idle share of the step, and what it must store."""
    loaded = opt.load(recipe)
    from jaxllm.plan.pipeline_report import pipeline_report

    report = pipeline_report(loaded)
    if out is not None:
        from jaxllm.plots.schedule import save, schedule_figure

        save(schedule_figure(report.schedule, slot_bytes=report.slot_bytes), out)
    opt.print_report(report, as_json)


@app.command("report", **opt.example("report runs/quickstart", "report runs/small-batch runs/large-batch"))
def report_(
    runs: Annotated[list[str], argument("RUN...", "Run directories (run.dir); several are compared.")],
    out: Annotated[
        str | None, option("FILE.html", "The page; default: report.html in RUN, of several comparison.html in the first.")
    ] = None,
    gpu: Annotated[
        str | None, option("NAME|FILE.yaml", "Predict step times on this kind of GPU; default: the measured step time.")
    ] = None,
    gpus_per_host: Annotated[int | None, option("N", "GPUs per host; default: that kind's.", min=1)] = None,
    loss: Annotated[
        float | None, option("NATS", "Count hours to this training loss (smoothed); default: the lowest reached.")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object and nothing else; without --out, no page.")] = False,
) -> None:
    """Reports on runs, with charts in one HTML page. Of one run it also predicts the effect of more data ranks."""
    from jaxllm.run_report.page import write

    report: Any
    if len(runs) > 1:
        from jaxllm.run_report.comparison import FILE_NAME, compare
        from jaxllm.run_report.comparison import comparison_page as page

        if gpu is not None or gpus_per_host is not None:
            raise ConfigError("--gpu and --gpus-per-host predict more data ranks of one run: leave them out, or give one RUN.")
        report = compare(runs, loss=loss)
    else:
        from jaxllm.run_report.page import FILE_NAME, page
        from jaxllm.run_report.summary import report_on

        report = report_on(runs[0], gpu=gpu, gpus_per_host=gpus_per_host, loss=loss)
    path = None if as_json and out is None else write(page(report), Path(runs[0]) / FILE_NAME if out is None else out)
    opt.print_report(report, as_json)
    if not as_json:
        opt.print_lines(["", f"page {path}"])


app.command(**opt.example("export runs/quickstart models/quickstart --to hf --dtype bfloat16"))(export)
app.command("eval", **opt.example("eval --model runs/quickstart --text book.txt"))(evaluate)
app.command("lm-eval", **opt.example("lm-eval --model smollm2 --tasks arc_easy --limit 100"))(lm_eval)
app.command(**opt.example("generate --model runs/quickstart --prompt 'def ' --temperature 0.8"))(generate)


@app.command(**opt.example("doctor", "doctor quickstart parallel.data=2"))
def doctor(
    recipe: Annotated[
        list[str] | None, argument("[CONFIG] [SECTION.KEY=VALUE]...", "As for `jaxllm train`; none: all devices here.")
    ] = None,
    gpu: Annotated[str | None, option("NAME|FILE.yaml", "The expected kind of GPU; default: the kind found.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Checks devices, network, clocks and run directory. Here or on all processes of a launch; exit code 1 if a check fails."""
    from jaxllm.cost_model.gpu_choice import find_gpu
    from jaxllm.doctor.doctor import examine, read, render

    found = None if gpu is None else find_gpu(gpu)
    given = recipe or []
    loaded, parallel, run = read([one for one in given if "=" not in one], [one for one in given if "=" in one])
    report = examine(run, parallel, loaded, found)
    if report.is_shown_here:
        opt.print_report(report, as_json, render)
    if report.failed:
        raise typer.Exit(1)


data_app.command("prepare", **opt.example("data prepare 'books/**/*.txt' --out data/books --tokenizer bytes"))(data_prepare)
data_app.command("fill", **opt.example("data fill quickstart train.sequence_length=8192"))(data_fill)
convert_app.command("from-hf", **opt.example("convert from-hf smollm2 models/smollm2"))(convert_from_hf)
convert_app.command("to-hf", **opt.example("convert to-hf runs/quickstart models/quickstart-hf"))(convert_to_hf)


@app.command(**opt.example("schema > recipe.schema.json"))
def schema() -> None:
    """Prints the JSON schema of a recipe, for editors."""
    print(json.dumps(json_schema(), indent=2))


def main() -> None:
    open_standard_streams()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(in_one_line)
    # Orbax logs a page for each error of a save, and raises it too; our one sentence is enough.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Python looks through every object for garbage as it ends, half a second's work after training.
    atexit.register(gc.freeze)
    with ending_in_one_sentence():
        # Typer's own main would end without a sentence if the reader of a pipe stops.
        command = typer.main.get_command(app)
        # Not public: with another typer a command runs, and completes nothing.
        getattr(command, "_main_shell_completion", lambda *_: None)({}, "jaxllm")
        with command.make_context("jaxllm", sys.argv[1:]) as context:
            command.invoke(context)
    sys.exit(0)
