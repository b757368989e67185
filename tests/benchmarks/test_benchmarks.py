"""The benchmarks at their smallest sizes: they run, and their figures agree with each other."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import outside
import pytest

STEP = Path(__file__).parents[2] / "benchmarks" / "step.py"
CHECKPOINT = STEP.with_name("checkpoint.py")


def run(*arguments, script=STEP) -> subprocess.CompletedProcess:
    """Runs on one CPU device, independent of the devices that conftest.py forces."""
    environment = outside.environment(JAX_PLATFORMS="cpu")
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_dry_run_reports_figures_that_agree():
    finished = run("--dry-run", "--json")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["batch"] == {"sequences": 4, "sequence_length": 32, "microbatches": 1, "tokens": 128}
    assert report["jaxllm"]["compile_s"] > 0
    assert report["jaxllm"]["temporary_bytes"] > 0
    sides = ["jaxllm", "transformers"] if report["transformers"] else ["jaxllm"]
    for side in (report[name] for name in sides):
        step_s = side["step_s"]
        assert 0 < step_s["lower_quartile"] <= step_s["median"] <= step_s["upper_quartile"]
        assert side["tokens_per_s_per_device"] * step_s["median"] == pytest.approx(128)
        assert side["mfu_causal"] is None  # a CPU has no known peak
    if find_spec("torch") and find_spec("transformers"):
        ours, theirs = (report[name]["tokens_per_s_per_device"] for name in sides)
        assert report["ratio"] == pytest.approx(ours / theirs)
        assert report["no_reference"] is None
    else:
        assert report["ratio"] is None
        assert "not installed" in report["no_reference"]


def test_the_cost_of_a_save_is_measured_both_ways():
    finished = run("--quick", "--json", script=CHECKPOINT)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["command"] == "python benchmarks/checkpoint.py --quick --json"
    for kind in ("asynchronous", "synchronous"):
        waits, writes = report[kind]["wait_s"], report[kind]["write_s"]
        assert len(waits) == len(writes) == report["saves"] == 2
        assert all(0 < wait <= write for wait, write in zip(waits, writes, strict=True))
    assert report["synchronous"]["step_s"] == []


@pytest.mark.slow
def test_the_cost_of_a_copy_to_a_store_is_measured_against_a_disk():
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    finished = run("--store", "--quick", "--json", script=CHECKPOINT)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["store"] == "moto"
    assert len(report["copy_s"]) == report["saves"] == 2
    # A copy of the tiny model may be done before the next save.
    assert [len(report[kind]["wait_s"]) for kind in ("disk", "disk and store")] == [2, 2]
    copied = report["disk and store"]
    assert all(0 < wait <= write for wait, write in zip(copied["wait_s"], copied["write_s"], strict=True))
