"""No step compiles to more kernels, fusions, collectives or temporary bytes than benchmarks/hlo_budget.json allows."""

import os
import subprocess
import sys

import outside
import pytest
import scripts

from jaxllm.compile.aot import can_compile_for_gpus

PINNED = "JAXLLM_TEST_PINNED"
budget = scripts.load("benchmarks/hlo_budget.py")


def test_growth_is_named_and_shrinking_is_not():
    before = {"fusions": 40, "copies": 3, "all-gather": 2}
    now = {"fusions": 44, "copies": 2, "all-reduce": 1}
    assert budget.grown(before, now) == ["fusions 40 -> 44", "all-reduce 0 -> 1"]
    assert budget.grown(before, now, sign=-1) == ["copies 3 -> 2", "all-gather 2 -> 0"]
    assert budget.grown(now, now) == []


def test_the_file_has_every_step_and_a_reason():
    kept = budget.read()
    assert kept["steps"].keys() == budget.STEPS.keys()
    assert kept["reasons"]


@pytest.mark.slow
@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_nothing_grew():
    """Runs in a new process, because the compiler flags of conftest.py disable optimisations."""
    kept = budget.read()
    if kept["versions"] != budget.versions():
        others = f"the budget is of {', '.join(kept['versions'])}; here are {', '.join(budget.versions())}"
        # Where packages are pinned, a budget that is not held is a fault of the pins or of the file.
        assert not os.environ.get(PINNED), f"{others}: python benchmarks/hlo_budget.py --write REASON"
        pytest.skip(f"{others}; with {PINNED}=1 this fails")
    finished = subprocess.run(
        [sys.executable, budget.__file__], env=outside.environment(JAX_PLATFORMS="cpu"), capture_output=True, text=True
    )
    cure = "If that is as it should be, say why: python benchmarks/hlo_budget.py --write REASON"
    assert finished.returncode == 0, f"{finished.stdout}{finished.stderr}\n{cure}"
