"""What the page's worker runs: jaxllm's own estimate and plan, from the page's fields to text and numbers.

    answer("estimate", '{"settings": ["model.name=llama-3.1-8b", ...], "gpu": "h100-80gb", "gpus": "64"}')

Settings are `section.key=value` strings, as on the command line; the last wins. Numbers are put into words here, as in the
terminal, and the page only lays them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

import jaxllm
from jaxllm.compile.plan import Outcome, outcome
from jaxllm.config import Config, ConfigError, load_config
from jaxllm.cost_model.hosts import MOST_GPUS
from jaxllm.display import readable
from jaxllm.plan.estimate import Estimate, estimate
from jaxllm.plan.plan_result import Candidate, beside_lines, certainty_lines, recipe
from jaxllm.untrusted import RefusedInput, parse_json, whole_number

ROWS = 10
"""Candidates in the table."""
POINTS = 20_000
"""Candidates in the picture, the best ones."""
SIZES = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    "tie_embeddings",
)
"""Fields of a model of one's own."""


def answer(kind: str, request: str, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> str:
    """Answers the page: an object with `error`, one sentence, or the result.

    Args:
      kind: estimate or plan.
      request: JSON of the page's fields: settings, gpu, gpus, gpus_per_host and objective, all texts.
    """
    try:
        asked = parse_json(request)
        config = load_config({}, asked["settings"])
        gpu, gpus, per_host = asked["gpu"], number(asked, "gpus"), number(asked, "gpus_per_host")
        if kind == "estimate":
            return json.dumps(of_estimate(estimate(config, gpu, gpus, per_host), config))
        objective = asked.get("objective") or "speed"
        return json.dumps(of_plan(outcome(config, gpu, gpus, per_host, objective=objective, progress=progress)))
    except ConfigError as error:
        return json.dumps({"error": str(error)})


def number(asked: Mapping[str, Any], name: str) -> int | None:
    text, option = str(asked.get(name) or "").strip(), "--" + name.replace("_", "-")
    try:
        return whole_number(text, 1, MOST_GPUS) if text else None
    except RefusedInput as error:
        raise ConfigError(f"{option}={text} is not valid: {error}.") from None


# ------------------------------------------------------------------------------------------------------------- estimate


def of_estimate(found: Estimate, config: Config) -> dict[str, Any]:
    """The estimate: its JSON as of `jaxllm estimate --json`, and what the page shows of it."""
    fullest = max(found.memory.stages, key=lambda stage: stage.total_bytes)
    result = {
        "json": json.dumps(found.to_json()),
        "lines": "\n".join(found.lines()),
        "fits": found.fits,
        "verdict": verdict(found),
        "bytes": [
            {"name": name, "value": size, "text": readable(size), "kind": kind_of(name)}
            for name, size in fullest.terms_bytes.items()
            if size
        ],
        "total": {"value": fullest.total_bytes, "text": readable(fullest.total_bytes)},
        "seconds": [],
        "speed": None,
        "changes": [
            {"text": " ".join(settings(change.keys)), "figures": change.figures, "settings": settings(change.keys)}
            for change in found.changes
        ],
        "recipe": recipe_text(found, config),
        "sizes": {f"model.{key}": as_yaml(getattr(config.model, key)) for key in SIZES},
    }
    if found.capacity_bytes is not None:
        result["capacity"] = {"value": found.capacity_bytes, "text": readable(found.capacity_bytes)}
    if (speed := found.speed) is not None:
        low, high = found.speed_range.of(speed.tokens_per_s_per_gpu)
        result["speed"] = {
            "tokens/s/GPU": f"{speed.tokens_per_s_per_gpu:,.0f}",
            "range": f"{low:,.0f} to {high:,.0f}",
            "TFLOP/s/GPU": f"{speed.tflops_per_gpu:,.1f}",
            "MFU": f"{found.mfu:.1%}",
            "seconds a step": f"{speed.step_s:,.3f}",
        }
        result["seconds"] = [
            {"name": name, "value": time_s, "text": f"{time_s:.4f} s", "kind": "time"}
            for name, time_s in speed.terms_s.items()
            if time_s
        ]
    return result


def verdict(found: Estimate) -> str:
    if found.capacity_bytes is None or found.gpu is None:
        return f"{readable(found.peak_bytes)} on each GPU"
    share = f"{found.peak_bytes / found.capacity_bytes:.1%} of the {readable(found.capacity_bytes)}"
    return f"{readable(found.peak_bytes)}, {share} that a step may take on {found.devices} x {found.gpu.name}"


def kind_of(name: str) -> str:
    """The group of a term of memory, for its colour."""
    if name in ("master_weights", "optimizer", "outer_state", "weights"):
        return "state"
    if name.startswith("gradients"):
        return "gradients"
    return "activations" if name.startswith("activations") else "working"


def recipe_text(found: Estimate, config: Config) -> str:
    """The config for `jaxllm train`, with a comment on its origin."""
    on = f" --gpu {found.gpu.name}" if found.gpu else ""
    lines = (
        f"From the planner's page, jaxllm {jaxllm.__version__}, for {found.devices} GPUs: {readable(found.peak_bytes)} each.",
        f"  jaxllm estimate recipe.yaml{on} --gpus {found.devices} --gpus-per-host {found.gpus_per_host}",
    )
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(recipe(config), sort_keys=False)


# ----------------------------------------------------------------------------------------------------------------- plan


def of_plan(found: Outcome) -> dict[str, Any]:
    """The plan: its JSON as of `jaxllm plan --compile 0 --json`, and what the page shows of it."""
    plan = found.plan
    best = plan.candidates[:ROWS]
    return {
        "json": json.dumps(found.to_json()),
        "looked_for": found.looked_for,
        "counts": (
            f"{len(plan.candidates):,} of {plan.configurations:,} configurations of {plan.meshes:,} meshes fit on "
            f"{plan.gpus} x {plan.gpu.name}. Predicted, not measured, and not confirmed by compiling."
        ),
        "notes": [*certainty_lines(plan), *beside_lines(plan)],
        "rows": [row(candidate, plan.capacity_bytes, plan.gpus) for candidate in best],
        "points": [[one.estimate_bytes / plan.capacity_bytes, one.tokens_per_s_per_gpu] for one in plan.candidates[:POINTS]],
        "rejected": [f"{line.count:,} x {line.unit}: {line.reason}, such as {line.example}" for line in plan.rejected],
    }


def row(candidate: Candidate, capacity_bytes: int, gpus: int) -> dict[str, Any]:
    train = candidate.config.train
    sizes = {
        "train.microbatch_sequences": candidate.config.microbatch_sequences,
        "train.sequence_length": train.sequence_length,
        "train.global_batch_sequences": train.global_batch_sequences,
    }
    spread = {f"parallel.{key}": value for key, value in recipe(candidate.config)["parallel"].items()}
    return {
        "layout": str(candidate.choice),
        "memory": f"{readable(candidate.estimate_bytes)}, {candidate.estimate_bytes / capacity_bytes:.0%}",
        "tokens": f"{candidate.tokens_per_s_per_gpu:,.0f}",
        "tflops": f"{candidate.time.tflops_per_gpu:,.0f}",
        "settings": [*settings(spread), *settings(sizes)],
        "gpus": str(gpus),
    }


def settings(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={as_yaml(value)}" for key, value in values.items()]


def as_yaml(value: Any) -> str:
    """The value as an override takes it, on one line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
