"""Compares XLA's figure for a step with the peak that the allocator of one NVIDIA GPU reports. A step that cannot fit fails.

Each step uses the GPU in a new process, so this process must not hold it: run this file alone.
"""

import pytest
import scripts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def measuring():
    return scripts.load("benchmarks/memory_in_use.py")


def test_what_is_in_use_is_what_xla_says(measuring):
    found = {name: measuring.run_in_subprocess(overrides) for name, overrides in measuring.RECIPES.items()}
    print(*(measuring.line(name, one) for name, one in found.items()), sep="\n")
    assert len(found) >= 6
    assert {name: one["error"] for name, one in found.items() if "error" in one} == {}
    beyond = {name: measuring.excess(one) for name, one in found.items()}
    assert all(abs(share) <= measuring.TOLERANCE for share in beyond.values()), beyond


def test_the_first_step_above_what_there_is_fails(measuring):
    ran, failed = measuring.first_that_fails()
    assert failed is not None
    print(*(measuring.line(f"{one['sequences']} sequences", one) for one in [*ran, failed]), sep="\n")
    assert failed["error"] == measuring.OUT_OF_MEMORY
    assert failed["compiled_bytes"] > failed["limit_bytes"]
    assert all(found["compiled_bytes"] <= found["limit_bytes"] for found in ran)
    assert ran
