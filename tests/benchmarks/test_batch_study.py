"""benchmarks/batch_study.py: one run of it, and the fit of the published table."""

import json
import re
import subprocess
import sys
from pathlib import Path

import outside
import pytest
import scripts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "batch_study.py"


@pytest.mark.slow
def test_a_run_stops_where_it_reaches_the_target(tmp_path):
    one = json.dumps({"batch": 8, "rate": 5, "seed": 0, "kind": "target", "limit_tokens": 40_000})
    command = [sys.executable, SCRIPT, tmp_path / "results.jsonl", "--dry-run", "--one", one]
    environment = outside.environment(JAX_PLATFORMS="cpu")
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert 0 < found["tokens"] < 40_000
    assert found["steps"] == pytest.approx(found["tokens"] / 512)
    scale, low, high = found["noise"]
    assert 0 <= low <= scale <= (high or float("inf"))
    # A step is worth less than one without noise.
    assert found["least_steps"] <= found["steps"] + 1


def test_runs_of_a_kind_have_equal_tokens_or_equal_steps():
    study = scripts.load("benchmarks/batch_study.py")
    size = study.FULL
    configs = {
        (batch, kind): study.configured(study.Run(batch, 0, 0, kind), size)
        for batch, kind in study.Study(Path("-"), size).groups()
    }
    tokens = {config.total_tokens for (_, kind), config in configs.items() if kind in ("tokens", "ramp", "grows")}
    assert tokens == {size.equal_tokens}
    assert {config.train.steps for (_, kind), config in configs.items() if kind == "steps"} == {size.equal_steps}
    first, last = study.ENDS
    for kind in ("ramp", "grows"):
        config = configs[last, kind]
        assert config.batches[0] == first
        assert config.train.batch_grows_to == last if kind == "grows" else config.batches[-1] == last
    assert min(size.at_equal_tokens) * 64 <= max(size.at_equal_tokens)


def test_the_law_is_found_again():
    tokens = {batch: 90_000.0 + 45 * batch for batch in (512, 1024, 2048, 4096)}
    assert scripts.load("benchmarks/batch_study.py").fitted(tokens) == pytest.approx((90_000, 45))


def test_seconds_to_the_loss_are_those_of_the_stored_runs():
    """On the page the script's table, and in its text the ratios that follow from it."""
    study = scripts.load("benchmarks/batch_study.py")
    text = study.seconds_table(study.Study(SCRIPT.with_suffix(".jsonl"), study.FULL))
    page = study.PAGE.read_text(encoding="utf-8")
    assert f"<!-- seconds: begin -->\n{text}\n<!-- seconds: end -->" in page, f"python {SCRIPT} ... --table --write"
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    rows = [dict(zip(lines[0], (float(cell.replace(",", "")) for cell in line), strict=True)) for line in lines[2:]]
    assert [row["seconds on one core"] for row in rows] == sorted(row["seconds on one core"] for row in rows)
    assert [row["seconds on them"] for row in rows] == sorted((row["seconds on them"] for row in rows), reverse=True)
    (first, second, *_), (*_, before, last) = rows, rows
    _, least_steps = study.fitted({row["batch, tokens"]: row["tokens"] for row in rows})
    shown = " ".join(page.partition("<!-- seconds: end -->")[2].partition("![")[0].split())
    found = re.search(
        r"takes (\S+) times the tokens, and (\S+) times the seconds.* That is (\S+) times as fast.*"
        r"first doubling gives (\S+) times the speed, the last (\S+)\.",
        shown,
    )
    assert [float(word) for word in found.groups()] == pytest.approx(
        [
            last["tokens"] / first["tokens"],
            last["seconds on one core"] / first["seconds on one core"],
            first["steps"] / last["steps"],
            first["steps"] / second["steps"],
            before["steps"] / last["steps"],
        ],
        abs=0.05,
    )
    step_s = first["seconds a step"]
    assert f"16 devices need {last['steps']:.0f} steps of {step_s} s, {last['seconds on them']:.0f} s in place of 17" in shown
    assert f"S = {least_steps:.0f} steps of the law, {least_steps * step_s:.0f} s" in shown


def test_the_page_has_the_stored_curves_of_one_two_and_four_devices():
    curves = scripts.load("benchmarks/loss_over_seconds.py")
    runs = curves.read(SCRIPT.with_name("loss_over_seconds.jsonl"))
    assert [run["devices"] for run in runs] == list(curves.DEVICES)
    page = (SCRIPT.parents[1] / "docs" / "why-many-gpus.md").read_text(encoding="utf-8")
    assert curves.table(runs) in page
    assert max(run["held_out"] for run in runs) - min(run["held_out"] for run in runs) < 0.0075
    assert "within 0.007\nnats" in page
