"""benchmarks/zero_bubble.py: the ticks in which the gradients of weights are made, and the published table."""

from itertools import product

import numpy as np
import pytest
import scripts

from jaxllm.pipeline_schedule import make_schedule

zero_bubble = scripts.load("benchmarks/zero_bubble.py")

PIPELINES = [(1, 1, 3), (2, 1, 5), (2, 3, 4), (4, 1, 8), (4, 1, 9), (4, 2, 8), (8, 1, 32), (8, 5, 16)]
"""(stages, virtual stages, microbatches)."""


def schedule_of(P, V, M):
    return make_schedule("interleaved" if V > 1 else "1f1b", P, M, V)


def deferred(P, V, M):
    """(D, schedule, ticks in which stages make gradients of weights) for every D up to P - 1."""
    schedule = schedule_of(P, V, M)
    return [(D, schedule, zero_bubble.weight_ticks(schedule, D)) for D in range(P)]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_each_unit_that_may_wait_saves_a_tick(pipeline):
    P, V, M = pipeline
    for D, schedule, weights in deferred(P, V, M):
        assert weights.any(axis=1).sum() == M * V + P - 1 - D == schedule.backward_units - D


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_unit_is_made_once_and_not_before_its_backward(pipeline):
    P, V, M = pipeline
    for D, schedule, weights in deferred(P, V, M):
        assert (weights.sum(axis=0) == M * V).all()
        waiting = zero_bubble.units_waiting(schedule, weights)
        assert waiting.min() >= 0
        assert waiting.max() <= D


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_without_waiting_the_table_is_that_of_the_backward_pass(pipeline):
    schedule = schedule_of(*pipeline)
    assert np.array_equal(zero_bubble.weight_ticks(schedule, 0), schedule.backward.valid)


@pytest.mark.parametrize("pipeline", [(2, 1, 3), (3, 1, 3), (3, 1, 5), (2, 2, 4), (4, 1, 4)])
def test_no_choice_of_ticks_takes_fewer(pipeline):
    for D, schedule, weights in deferred(*pipeline):
        assert weights.any(axis=1).sum() == fewest_ticks(schedule.backward.valid, D)


def fewest_ticks(backward, most_waiting):
    """The best of all choices of ticks."""
    backward = backward[backward.any(axis=1)]
    best = []
    for chosen in product((False, True), repeat=len(backward)):
        waiting, kept = np.zeros(backward.shape[1], int), True
        for made, runs in zip(backward, chosen, strict=True):
            waiting = waiting + made
            waiting = waiting - (runs & (waiting > 0))
            kept &= bool((waiting <= most_waiting).all())
        if kept:
            best.append(sum(chosen) + waiting.max())
    return min(best)


@pytest.mark.parametrize("V", zero_bubble.VIRTUAL_STAGES)
def test_the_saving_is_part_of_the_bubble(V):
    case = zero_bubble.Case(zero_bubble.configured("selective", 16, V))
    of_a_stage_s = zero_bubble.Case(zero_bubble.configured("selective", 16, 1)).weight_s
    assert 0 < case.saved_s <= (zero_bubble.P - 1) * of_a_stage_s / V * (1 + 1e-9)
    assert case.saved_s < case.bubble_s


def test_the_published_table_is_what_the_script_prints():
    text = zero_bubble.RESULTS.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- zero-bubble: begin -->\n")
    assert rest.partition("\n<!-- zero-bubble: end -->")[0] == zero_bubble.table()
