"""The figures of docs/why-many-gpus.md are those of its commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jaxllm
from jaxllm.cli.app import app
from jaxllm.cost_model.hardware import GPUS
from jaxllm.data.measures import fill
from jaxllm.plan.search import SearchOptions, search
from jaxllm.plan.sweep import sweep_gpus, sweep_of

CHECKOUT = Path(__file__).parents[2]
RECIPE = CHECKOUT / "docs" / "recipes" / "8b-on-8.yaml"
H100 = GPUS["h100-80gb"]
TOKENS = 15e12
GIB = 2**30


def rows(heading: str) -> list[list[str]]:
    """The rows of the page's table under a header row that starts with `heading`."""
    page = (CHECKOUT / "docs" / "why-many-gpus.md").read_text(encoding="utf-8")
    table = page[page.index(f"| {heading}") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[\d,]*\d(?:\.\d+)?", text)]


def estimated(*overrides: str) -> dict:
    command = [
        "estimate",
        str(RECIPE),
        "--gpu",
        "h100-80gb",
        "--gpus",
        "8",
        "train.microbatch_sequences=1",
        *overrides,
        "--json",
    ]
    return json.loads(CliRunner().invoke(app, command).stdout)


def config_of(*overrides: str) -> jaxllm.Config:
    return jaxllm.load_config(RECIPE, overrides)


def test_accumulation():
    for sequences, microbatches, step, speed in ([numbers(cell)[0] for cell in row] for row in rows("sequences a step")):
        found = estimated("parallel.zero=2", "parallel.remat=selective", f"train.global_batch_sequences={sequences:.0f}")
        assert microbatches == sequences / 8
        assert found["step_s"] == pytest.approx(step, rel=0.01)
        assert found["tokens_per_s_per_gpu"] == pytest.approx(speed, abs=1)


@pytest.mark.parametrize("row", rows("tokens a sequence"), ids=lambda row: row[0])
def test_attention(row):
    length, scores, workspace, plain, fused, share = (numbers(cell)[0] for cell in row)
    fixed = ("parallel.remat=full", "train.global_batch_sequences=8", f"train.sequence_length={length:.0f}")
    xla, cudnn = (estimated(*fixed, f"model.attention={name}") for name in ("xla", "cudnn"))
    assert xla["stages"][0]["terms_bytes"]["attention_scores"] / GIB == pytest.approx(scores, rel=0.01)
    assert cudnn["stages"][0]["terms_bytes"]["attention_workspace"] / GIB == pytest.approx(workspace, rel=0.02)
    assert xla["peak_bytes"] / GIB == pytest.approx(plain, rel=0.01)
    assert cudnn["peak_bytes"] / GIB == pytest.approx(fused, rel=0.02)
    assert cudnn["terms_s"]["attention"] / cudnn["step_s"] == pytest.approx(share / 100, abs=0.006)


@pytest.mark.parametrize("row", rows("positions of a sequence"), ids=lambda row: row[0])
def test_fill(row):
    """Other versions of Python have another library."""
    S, padded, packed, padded_tokens, packed_tokens, times = (numbers(cell)[0] for cell in row)
    config = jaxllm.load_config("quickstart", [f"train.sequence_length={S:.0f}"])
    found = fill(config).rows
    assert [100 * one.target_share for one in found] == pytest.approx([padded, packed], abs=4)
    assert [one.targets_a_step for one in found] == pytest.approx([padded_tokens, packed_tokens], rel=0.1)
    assert found[0].sequences / found[1].sequences == pytest.approx(times, rel=0.1)
    assert [100 * tokens / (8 * S) for tokens in (padded_tokens, packed_tokens)] == pytest.approx([padded, packed], abs=0.06)


@pytest.mark.slow
def test_gpus():
    sweep = sweep_gpus(config_of(), H100, 1024, tokens=TOKENS)
    found = {row.gpus: row for row in sweep.rows}
    for gpus, speed, each, waits, days, _ in rows("H100s"):
        row = found[int(numbers(gpus)[0])]
        assert row.best is not None
        assert row.days is not None
        assert row.efficiency is not None
        assert f"{row.tokens_per_s:,.0f}" == speed
        assert f"{row.efficiency:.0%}" == each
        assert f"{row.days:,.0f}" == days
        if waits:
            assert f"{row.best.time.exposed_communication_share:.1%}" == waits
    assert sweep.stops_paying is None


@pytest.mark.slow
@pytest.mark.parametrize(("model", "fewest"), [("llama-3.2-1b", 1), ("llama-3.1-8b", 1), ("llama-3.1-70b", 8)])
def test_batches(model, fewest):
    cells = next(row for row in rows("1,024 H100s") if row[0].startswith(model.split("-")[2].upper()))[1:]
    for sequences, cell in zip((128, 1024), cells, strict=True):
        config = config_of(f"model.name={model}", f"train.global_batch_sequences={sequences}")
        found = [search(config, H100, gpus, min(gpus, 8), SearchOptions(best=1)) for gpus in (fewest, 1024)]
        _, last = sweep_of(found, TOKENS).rows
        days, share = numbers(cell)[:2]
        assert last.days == pytest.approx(days, abs=0.5 if days > 10 else 0.05)
        assert last.efficiency == pytest.approx(share / 100, abs=0.006)
