"""benchmarks/batch_study.py: the selection of runs, the end of the study, and the row of one run."""

import json
import subprocess
import sys
from pathlib import Path

import outside
import pytest
import scripts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "batch_study.py"


@pytest.fixture(scope="module")
def batch_study():
    return scripts.load("benchmarks/batch_study.py")


def best_of(run):
    """The best rate of a run in a synthetic model: larger batches need larger rates. The first small run's is below 1e-3."""
    return {"target": run.batch // 32 + 1, "small": -2, "large": 4, "ramp": 2}[run.kind]


def line(batch_study, run):
    away = (run.rate - best_of(run)) ** 2
    tokens = None if away > 20 else 1000.0 * run.batch * (1 + away) + run.seed
    found = {"tokens": tokens, "steps": tokens and tokens / run.batch / 64, "loss": 2 + away / 10}
    known = {"noise": [2000.0, 1000.0, None], "least_steps": 90.0, "least_tokens": 90000.0}
    return {**batch_study.asdict(run), **found, **known}


def carried_out(batch_study, path):
    study = batch_study.Study(path, batch_study.FULL)
    while wanted := list(study.wanted()):
        assert len(set(wanted)) == len(wanted)
        # Stopped repeatedly.
        study = batch_study.Study(path, batch_study.FULL)
        study.add(line(batch_study, wanted[0]))
    return study


def test_each_sweep_ends_round_its_best_and_three_seeds_repeat_it(batch_study, tmp_path):
    study = carried_out(batch_study, tmp_path / "results.jsonl")
    for batch, kind in study.groups():
        best = best_of(batch_study.Run(batch, 0, 0, kind))
        assert study.best(batch, kind) == best
        assert [line["seed"] for line in study.seeds_of(batch, kind)] == [0, 1, 2]
        # No run was made that the sweep did not need.
        assert set(study.rates(batch, kind)) >= {best - 1, best, best + 1}
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(study.results)


def test_every_run_has_a_config_with_all_parts_and_the_tokens_it_should_have(batch_study):
    size = batch_study.FULL
    for batch, kind in batch_study.Study(Path("nowhere"), size).groups():
        config = batch_study.configured(batch_study.Run(batch, 1, 0, kind), size)
        assert config.num_microbatches == batch_study.PARTS
        tokens = config.tokens_before(config.train.steps)
        assert tokens == size.equal_tokens if kind != "target" else 0 <= tokens - size.most_tokens < batch * 64


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


def test_the_law_is_found_again(batch_study):
    tokens = {batch: 90_000.0 + 45 * batch for batch in (512, 1024, 2048, 4096)}
    assert batch_study.fitted(tokens) == pytest.approx((90_000, 45))
