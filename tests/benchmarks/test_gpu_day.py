"""The plan for fifteen minutes of one GPU, and the steps near the limit of its memory. Nothing is measured."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import scripts

from jaxllm.cost_model.hardware import GPUS

KINDS = ("h100-80gb", "h200-141gb")


@pytest.fixture(scope="module")
def modules():
    names = ("gpu", "gpu_day", "gpu_limit", "gpu_pretend")
    return SimpleNamespace(**{name: scripts.load(f"benchmarks/{name}.py") for name in names})


def found(name):
    gpu = GPUS[name]
    return {"device": gpu.device_kind, "capacity_bytes": gpu.capacity_bytes}


def planned(modules, name, block):
    """Names of the cases that a block begins, in its order, on a machine where nothing was measured but known rows."""
    runner = modules.gpu.Runner(Path("/dev/null"), [modules.gpu.KNOWN], 0.0, device=GPUS[name].device_kind)
    left, names = modules.gpu.BLOCKS_S[block] - modules.gpu_day.START_S, []
    for case in modules.gpu_day.cases(block, found(name), dry=False):
        if not runner.is_done(case) and runner.expected_s(case) <= left:
            left -= runner.expected_s(case)
            names.append(case.name)
    return names


@pytest.mark.parametrize("name", KINDS)
def test_the_first_block_has_time_for_what_decides_most(modules, name):
    """Programs of many GPUs, FP8 beside bfloat16 where it is not known yet, and each product of both mixtures."""
    names = planned(modules, name, 1)
    assert names[0].endswith("tiny")
    assert [n for n in names[:4] if n.startswith("pretend")] == names[:4]
    of_experts = itertools.product(("OLMoE", "Qwen3-30B-A3B"), ("forward", "dgrad", "wgrad"))
    assert {f"grouped, {model}, {product}" for model, product in of_experts} <= set(names)
    fp8 = [n for n in names if n.endswith("fp8")]
    assert len(fp8) == (0 if name == "h100-80gb" else 1)
    assert sum(modules.gpu.BLOCKS_S.values()) <= 15 * 60 - 75  # a machine's start counts too


@pytest.mark.parametrize("name", KINDS)
def test_the_second_block_goes_to_the_limit_and_trains_a_run(modules, name):
    names = planned(modules, name, 2)
    assert len([n for n in names if n.startswith("near the limit")]) >= 5
    assert "a real run" in names
    every = [case.name for case in modules.gpu_day.cases(2, found(name), dry=False)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("name", KINDS)
def test_steps_near_the_limit_are_there_by_the_estimate(modules, name):
    gpu = GPUS[name]
    near = {case["name"]: tuple(case["options"]["overrides"]) for case in modules.gpu_limit.cases(found(name), dry=False)}
    size = {n: modules.gpu_limit._bytes(of, gpu.device_kind) / gpu.capacity_bytes for n, of in near.items()}
    of_shares = [share for n, share in size.items() if n.endswith("%")]
    assert of_shares == sorted(of_shares)
    for share in modules.gpu_limit.SHARES:
        assert size[f"near the limit, {share:.1%}"] == pytest.approx(share, abs=0.01)
    assert all(0.85 < size[f"near the limit, {kind}"] <= 1 for kind in ("offload", "looped", "S 32768, full"))


def test_every_pretended_step_was_compiled_without_the_gpu_and_fits(modules):
    stored = json.loads(modules.gpu_day.PREDICTED.read_text())["h100-80gb"]
    cases = modules.gpu_pretend.cases(dry=False)
    assert stored.keys() == {case["name"] for case in cases}
    for predicted in stored.values():
        assert predicted["share"] <= 1
        assert {"compiled_bytes", "estimate_bytes", "predicted_compute_s", "account_compute_s", "schedule"} <= predicted.keys()


def test_cases_have_their_predictions(modules):
    for case in modules.gpu_day.cases(2, found("h100-80gb"), dry=False):
        if case.kind in ("train", "limit", "pretend"):
            assert case.predicted["estimate_bytes"] > 0


def test_the_rows_of_one_h200_give_the_published_figures(modules):
    """The command that docs/figures.md names."""
    printed = modules.gpu.gpu_table.text(
        modules.gpu.Runner(Path("/dev/null"), [scripts.CHECKOUT / "benchmarks/gpu_h200.jsonl"], 0.0).rows
    )
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in printed.splitlines()}
    published = (scripts.CHECKOUT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    for step, layers in (("8B, S 8192, selective", "`selective`"), ("8B, S 8192, selective, fp8", "the same in FP8")):
        assert f"| {layers} | {' | '.join(cells[step][:3])} | {cells[step][3].split(' ')[0]}" in published
    for step, sequences in (("olmoe 6 layers", 2), ("olmoe 6 layers, 4", 4)):
        ms, speed, _, mfu, *_ = cells[step]
        assert f"| {sequences} | {ms} ms | {speed} | {mfu.split('(')[1].removesuffix(')')} |" in published
    assert "| Qwen3-30B-A3B, dgrad | 8,192 | mosaic | unequal | 0.458 | 0.600 | 450 | 62% |" in printed
