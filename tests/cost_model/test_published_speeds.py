"""Speeds that others publish, and what is earned by them: the constants of several GPUs, and the ranges of predictions."""

import dataclasses
import math
import statistics

import pytest
import scripts

from jaxllm.config import load_config
from jaxllm.cost_model.error_range import HELD, LIMITS, error_range
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.step_parts import FITTED, MEASURED, PUBLISHED
from jaxllm.cost_model.step_time import estimate_step_time, step_model

published = scripts.load("benchmarks/published_speeds.py")
ROWS = published.speeds()
OURS = published.of_our_kind(ROWS)
LARGE = 8
"""Rows from which a kind or a page has a median of its own."""


def test_rows_have_a_layout_and_are_there_once():
    lines = published.SPEEDS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(ROWS) + 1
    assert len(set(lines)) == len(lines)
    for row in ROWS:
        p = row.config.parallel
        assert p.tensor * p.context * p.pipe * int(p.data) == row.gpus
        assert row.convention in ("jaxllm", "megatron")
        assert row.attention in ("cudnn", "flash1", "flash2", "flash3", "unfused", "unknown")
        assert 2019 <= row.year <= 2026
    assert {row.gpu.name for row in ROWS} <= GPUS.keys()


def test_every_unit_is_read_as_its_page_means_it():
    """llm-foundry prints tokens/s and the MFU with the full square; Llama 3 TFLOP/s; nanoGPT the milliseconds of a step."""
    by_page = [row for row in OURS if row.project == "llm-foundry" and row.config.model.hidden_size == 4096]
    row = next(one for one in by_page if (one.measured, one.gpus) == (10643, 8))
    flops = published.train_flops_per_token(row.config.model, 2048, causal=False)
    assert row.measured * flops / 989e12 == pytest.approx(0.4644, abs=0.003)
    llama = next(one for one in ROWS if one.source == "Llama 3" and one.gpus == 8192)
    assert llama.measured * published.train_flops_per_token(llama.config.model, 8192) == pytest.approx(430e12)
    step = next(one for one in ROWS if one.source == "nanoGPT 2022-12" and one.measured > 50_000)
    assert step.measured == pytest.approx(8 * 1024 / 0.135)


def test_the_constants_of_several_gpus_are_the_best_for_programs_of_their_kind():
    least = published.loss(OURS, PUBLISHED)
    for name in published.CONSTANTS:
        for factor in (0.95, 1.05):
            moved = dataclasses.replace(PUBLISHED, **{name: factor * getattr(PUBLISHED, name)})
            assert published.loss(OURS, moved) > 0.999 * least, (name, factor)


@pytest.mark.slow
def test_predictions_of_a_project_left_out_are_those_of_a_fit_to_the_others():
    (project, found) = max(published.left_out_errors(OURS).items(), key=lambda item: len(item[1]))
    fitted = published.fit([row for row in OURS if row.project != project])
    for row, error in found:
        assert math.log(row.measured / row.by(fitted)) == pytest.approx(error, abs=1e-3)


def test_ranges_hold_four_fifths_of_each_kind_of_gpu_that_was_left_out_by_project():
    found = [pair for pairs in published.left_out_errors(OURS).values() for pair in pairs]
    assert [row for row, _ in found] == sorted(OURS, key=lambda row: [r.project for r in OURS].index(row.project))
    for kind, there in published.by(OURS, lambda row: (row.gpu.name, row.precision)).items():
        errors = [error for row, error in found if row in there]
        if len(errors) < LARGE:
            continue
        ranges = [error_range(row.config, row.gpu, row.gpus_per_host) for row, _ in found if row in there]
        held = sum(of.low <= math.exp(error) <= of.high for of, error in zip(ranges, errors, strict=True))
        assert held >= HELD * len(errors), kind
    assert abs(statistics.median(error for _, error in found)) <= 0.1


def test_what_is_printed_is_in_the_middle_of_programs_of_its_kind():
    for kind, there in published.by(OURS, lambda row: (row.gpu.name, row.precision)).items():
        if len(there) >= LARGE:
            assert abs(statistics.median(row.error for row in there)) <= 0.1, kind
            assert sum(row.is_held for row in there) >= HELD * len(there), kind


def test_long_sequences_are_in_their_wider_range():
    """None of 16,385 tokens or more was fitted, and other programs' kernels and rings are slower."""
    long = [row for row in ROWS if row.convention == "jaxllm" and row.config.train.sequence_length > 16384]
    assert len(long) >= LARGE
    assert sum(row.is_held for row in long) >= HELD * len(long)
    config, gpu = long[-1].config, long[-1].gpu
    short = config.model_copy(update={"train": config.train.model_copy(update={"sequence_length": 2048})})
    assert error_range(config, gpu, 8).low < 0.75 * error_range(short, gpu, 8).low


def test_the_limits_of_the_data_are_those_of_the_rows():
    for capability, limits in LIMITS["jaxllm"].items():
        there = [row for row in OURS if row.gpu.chip.compute_capability == capability]
        lengths = (row.config.train.sequence_length for row in there)
        assert limits == (max(row.gpus for row in there), max(row.gpus_per_host for row in there), max(lengths))


def test_one_hopper_gpu_has_what_was_measured_and_all_else_what_others_publish():
    recipe = {"model": {"name": "llama-3.2-1b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 8}}
    one, eight = (load_config(recipe).resolve(gpus) for gpus in (1, 8))
    ours, theirs = step_model("jaxllm").constants, step_model("megatron").constants
    assert ours(one, GPUS["h100-80gb"]) == MEASURED
    assert ours(eight, GPUS["h100-80gb"]) == ours(one, GPUS["a100-80gb"]) == PUBLISHED
    assert theirs(one, GPUS["h100-80gb"]) == theirs(eight, GPUS["a100-80gb"]) == FITTED


def test_compute_beside_transfers_is_slower():
    recipe = {"model": {"name": "llama-3.1-8b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 64}}
    config = load_config(recipe, ["parallel.zero=3"]).resolve(64)
    step = estimate_step_time(config, GPUS["h100-80gb"], 8)
    free = estimate_step_time(config, GPUS["h100-80gb"], 8, fitted=dataclasses.replace(PUBLISHED, overlap_cost=0.0))
    assert step.hidden_s == free.hidden_s
    assert step.terms_s["overlap"] == pytest.approx(PUBLISHED.overlap_cost * sum(step.hidden_s.values()))
    assert step.step_s == pytest.approx(free.step_s + step.terms_s["overlap"])


def test_a_step_has_three_phases():
    recipe = {"model": {"name": "llama-3.1-8b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 64}}
    keys = ("parallel.zero=3", "parallel.pipe=4", "parallel.remat=full", "parallel.zero=1")
    for convention in ("jaxllm", "megatron"):
        for key in keys:
            step = estimate_step_time(load_config(recipe, [key]).resolve(64), GPUS["h100-80gb"], 8, convention)
            assert list(step.phases_s) == ["forward", "backward", "update"]
            assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
            assert step.phases_s["forward"] < step.phases_s["backward"]
            again = step.as_scheduled(0.1)
            assert sum(again.phases_s.values()) == pytest.approx(again.step_s)
            assert again.phases_s["update"] == step.phases_s["update"]
    full = estimate_step_time(load_config(recipe, ["parallel.remat=full"]).resolve(64), GPUS["h100-80gb"], 8)
    kept = estimate_step_time(load_config(recipe, ["parallel.remat=none"]).resolve(64), GPUS["h100-80gb"], 8)
    assert full.forward_share < kept.forward_share


def test_the_page_says_what_the_record_says():
    text = " ".join((scripts.CHECKOUT / "docs" / "estimate.md").read_text(encoding="utf-8").split())
    by_project = [pair for pairs in published.left_out_errors(OURS).values() for pair in pairs]
    for gpu in ("a100-40gb", "a100-80gb", "h100-80gb"):
        there = [(row, error) for row, error in by_project if row.gpu.name == gpu]
        ranges = [(error_range(row.config, row.gpu, row.gpus_per_host), math.exp(error)) for row, error in there]
        left = (
            len(there),
            statistics.median(math.exp(-error) - 1 for _, error in there),
            sum(of.low <= x <= of.high for of, x in ranges),
        )
        printed = statistics.median(row.error for row, _ in there), sum(row.is_held for row, _ in there)
        cells = [
            f"{left[1]:+.1%}",
            f"{left[2]} ({left[2] / left[0]:.0%})",
            f"{printed[0]:+.1%}",
            f"{printed[1]} ({printed[1] / left[0]:.0%})",
        ]
        assert f"| {gpu} | {left[0]} | {' | '.join(cells)} |" in text
    ours = [row for row in ROWS if row.convention == "jaxllm"]
    assert f"has {len(ROWS)} speeds" in text
    assert f"{len(ours)} of programs" in text
    assert f"{len(ROWS) - len(ours)} of Megatron-LM" in text
    assert f"fitted to {len(OURS)} of the former" in text
    assert f"is {statistics.median(math.exp(-error) - 1 for _, error in by_project):+.1%}" in text
