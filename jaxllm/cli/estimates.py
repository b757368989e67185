"""Commands on a config that run nothing: inspect and estimate. cli/app.py gives them their names."""

from __future__ import annotations

import json
from typing import Annotated, Any, cast

import typer

from jaxllm.cli.options import (
    AchievedTflops,
    AsJson,
    CheckpointRate,
    GpuCount,
    GpusPerHost,
    MtbfHours,
    NewTokens,
    Price,
    Prompts,
    PromptTokens,
    Purpose,
    Recipe,
    RestartMinutes,
    StoredDtype,
    Tokens,
    WindowTokens,
    fitted,
    load,
    print_report,
)
from jaxllm.config import ConfigError


def inspect(
    recipe: Recipe,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Devices of the mesh; none is needed here.")] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(metavar="N", help="Default: the largest divisor of --gpus not above 8.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="Show what shapes waste of a step on this kind of GPU.")
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

    report = inspect_config(loaded, gpus, gpus_per_host, gpu)
    if picture is not None:
        from jaxllm.plots.schedule import zigzag_picture

        zigzag_picture(loaded.parallel.context, picture)
    print_report(report, as_json, render)


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
    purpose: Purpose = "train",
    stored_dtype: StoredDtype = None,
    sequence_length: WindowTokens = None,
    prompts: Prompts = None,
    prompt_tokens: PromptTokens = None,
    max_new_tokens: NewTokens = None,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT", help="Draw bytes over sequence, microbatch or step; step compiles for --gpu (needs extra aot)."
        ),
    ] = None,
    tokens: Tokens = None,
    price: Price = None,
    mtbf_hours: MtbfHours = None,
    restart_minutes: RestartMinutes = None,
    checkpoint_gb_per_s: CheckpointRate = None,
    achieved_tflops: AchievedTflops = None,
    as_json: AsJson = False,
) -> None:
    """Estimates memory per device, and speed. Bytes by term and stage, by closed forms, within a second."""
    loaded = load(recipe)
    terms = (tokens, price, mtbf_hours, restart_minutes, checkpoint_gb_per_s, achieved_tflops)
    given = {"prompts": prompts, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    given |= {"stored_dtype": stored_dtype, "sequence_length": sequence_length}
    sizes = {name: value for name, value in given.items() if value is not None}
    if purpose != "train" or sizes:
        from jaxllm.plan.inference_estimate import estimate_inference

        only_training = picture is not None or over is not None or convention != "jaxllm"
        if purpose != "train" and (only_training or any(term is not None for term in terms)):
            raise ConfigError(f"Pictures, --convention and the quote are for training: leave them out with --for={purpose}.")
        found = estimate_inference(loaded, cast(Any, purpose), gpu, gpus, gpus_per_host, **sizes)
        print(json.dumps(found.to_json()) if as_json else fitted(found.lines()))
        return
    from jaxllm.plan.estimate import estimate as estimate_config
    from jaxllm.plan.quote import Terms, quote_estimate

    report = estimate_config(loaded, gpu, gpus, gpus_per_host, cast(Any, convention))
    offer = quote_estimate(report, Terms(*terms))
    draw_estimate(report, picture, over)
    if as_json:
        print(json.dumps(report.to_json() | ({} if offer is None else {"quote": offer.to_json()})))
    else:
        print(fitted([*report.lines(), *([] if offer is None else ["", *offer.lines()])]))


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
