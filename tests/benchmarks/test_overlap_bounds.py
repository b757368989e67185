"""Steps of the overlap table wait no longer for transfers than benchmarks/overlap_bounds.json allows for the installed JAX."""

import subprocess
import sys

import outside
import pytest
import scripts

from jaxllm.compile.aot import can_compile_for_gpus

overlap = scripts.load("benchmarks/overlap.py")

TELLING = ("8b-zero1-tensor-64", "8b-zero3", "8b-pipe-tensor", "70b-zero3-context")
"""Steps that are compiled here: every axis, and both sizes. `python benchmarks/overlap.py --check` compares all."""


@pytest.mark.parametrize("version", ["0.10", "0.11", "0.12"])
def test_every_step_has_a_bound_under_every_version(version):
    assert list(overlap.read_bounds()[version]) == list(overlap.STEPS)


def test_the_step_that_shows_more_is_named():
    bounds_s = {"within": 1.0, "above": 1.0, "lost": 1.0, "never-known": None}
    found = overlap.above_bounds({"within": 1.0, "above": 1.5, "lost": None, "never-known": 9.0, "new": 0.0}, bounds_s)
    above, lost, new = found
    assert above == "above waits 1.500 s for transfers, more than its bound of 1.000 s."
    assert lost.startswith("lost has a loop whose trip count XLA does not state")
    assert new.endswith("python benchmarks/overlap.py new --bounds")


def test_a_run_does_one_thing(capsys):
    with pytest.raises(SystemExit):
        overlap.main(["no-step", "--check", "--bounds"])
    assert "argument --bounds: not allowed with argument --check" in capsys.readouterr().err


def test_a_bound_is_above_what_it_was_recorded_from(tmp_path, monkeypatch):
    """Other steps and other versions keep theirs."""
    monkeypatch.setattr(overlap, "BOUNDS", tmp_path / "bounds.json")
    monkeypatch.setattr(overlap, "minor_version", lambda: "0.9")
    overlap.write_bounds({"8b-zero3": 1.0, "70b-4d": None})
    monkeypatch.setattr(overlap, "minor_version", lambda: "0.10")
    overlap.write_bounds({"8b-zero3": 2.0})
    overlap.write_bounds({"8b-zero1-512-single": 0.0})
    bounds = overlap.read_bounds()
    assert bounds == {"0.9": {"8b-zero3": 1.05, "70b-4d": None}, "0.10": {"8b-zero1-512-single": 0.0, "8b-zero3": 2.1}}
    assert list(bounds) == ["0.9", "0.10"]
    assert overlap.above_bounds({"8b-zero3": 2.0}, bounds["0.10"]) == []


@pytest.mark.slow
@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_no_step_waits_longer_than_its_bound():
    """Runs in a new process, because the compiler flags of conftest.py disable optimisations."""
    command = [sys.executable, overlap.__file__, *TELLING, "--check"]
    finished = subprocess.run(command, env=outside.environment(JAX_PLATFORMS="cpu"), capture_output=True, text=True)
    cure = "If that is as it should be: python benchmarks/overlap.py --bounds"
    assert finished.returncode == 0, f"{finished.stdout}{finished.stderr}\n{cure}"
