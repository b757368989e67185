"""benchmarks/gpu_grouped.py at its smallest."""

import json

import pytest
import scripts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def modules():
    return {name: scripts.load(f"benchmarks/{name}.py") for name in ("gpu_cases", "gpu_grouped")}


@pytest.fixture
def grouped(modules):
    return modules["gpu_grouped"]


def test_every_draw_gives_each_row_to_one_expert(grouped):
    work = grouped.Work("forward", 64, 2048, 1024, 65536)
    for draw in ("equal", "unequal", "edges"):
        assert work.sizes(draw).sum() == work.rows
    edges = work.sizes("edges")
    assert [edges[0], edges[1], edges[32], edges[-1]] == [0, 1, 0, 0]
    assert 0 < work.dropped() < 0.25


def test_the_first_cases_have_the_default_parameters(grouped):
    cases = grouped.cases(dry=False)
    assert json.loads(json.dumps(cases)) == cases
    first, tuning = cases[:6], cases[6:]
    assert [case["options"]["product"] for case in first[:3]] == list(grouped.PRODUCTS)
    for one, more in zip(first, tuning, strict=True):
        assert more["name"] == one["name"] + ", tuning"
        # jaxllm's own kernels have no parameters.
        assert one["options"]["configs"] == [[], *more["options"]["configs"][:1]]
    assert sum(case["options"]["most_s"] for case in cases) <= 150


def test_numbers_agree_with_float32(grouped):
    case = next(case for case in grouped.cases(dry=True) if case["options"]["product"] == "wgrad")
    row = dict(case)
    row |= grouped.grouped(row.update, **case["options"])
    assert [part["way"] for part in row["grouped"]] == ["dense", "capacity", "ragged_dot", "mosaic", "mosaic"]
    for part in row["grouped"]:
        assert "error" not in part
        assert "seconds" in part or part["way"] == "mosaic"
        # A JAX that does not interpret the kernels says so.
        assert ("errors" in part or "skipped" in part) == (part["way"] in ("ragged_dot", "mosaic"))
        assert all(error < grouped.CORRECT for error in part.get("errors", {}).values())
    assert len(grouped.table([row]).splitlines()) == 2 + 5


@pytest.mark.parametrize(
    ("seconds", "error", "expected"),
    [(1.5, 2e-3, "met"), (2.0, 2e-3, "MISSED"), (1.5, 0.1, "WRONG"), (1.5, float("nan"), "WRONG")],
)
def test_the_verdict(grouped, seconds, error, expected):
    common = {"tokens": 8192, "flops": 10**12, "predicted_s": 1.0}
    parts = [
        {**common, "way": "dense", "seconds": {"any": 1.0}},
        {
            **common,
            "way": "mosaic",
            "config": [64],
            "seconds": {"unequal": seconds},
            "errors": {"edges": 1e-3, "unequal": error},
        },
    ]
    row = {"kind": "grouped", "options": {"model": "OLMoE", "product": "forward"}, "grouped": parts}
    last = grouped.table([row]).splitlines()[-1]
    assert last.split(" | ")[-1] == f"{expected} |"
