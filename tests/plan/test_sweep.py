"""Searches over numbers of GPUs and sequence lengths, against an exhaustive search."""

import dataclasses
import itertools
import math

import pytest
from choices import space
from plan_stand_ins import HELD, Compiled, Memory, estimate, gpu_for, small, step_time

from jaxllm.compile.confirm import confirm
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.hardware import FIT_SHARE, GPUS
from jaxllm.cost_model.network import ALL_REDUCES, group_of, links_of, ring_all_reduce_s
from jaxllm.cost_model.step_parts import StepTime
from jaxllm.plan.search import SearchOptions, search
from jaxllm.plan.search_text import sweep_lines
from jaxllm.plan.sweep import (
    MOST_TOKENS,
    gradient_reduction_s,
    host_size,
    longest_sequence,
    objective_line,
    smallest_cluster,
    sweep_gpus,
)

H100 = GPUS["h100-80gb"]
BOTH = SearchOptions(keep=HELD, estimate=estimate, step_time=step_time)
FEW = dataclasses.replace(BOTH, keep=[*HELD, "remat", "zero"])
"""For what does not depend on how many configurations a number of GPUs has."""


def leanest(config, gpus):
    return min((estimate(one).peak_bytes for one in space(config, gpus, keep=HELD)), default=math.inf)


@pytest.mark.parametrize("gpus", [1, 12])
def test_a_row_is_the_plan_of_its_number_of_gpus(gpus):
    sweep = sweep_gpus(small(), H100, gpus, options=BOTH, tokens=1e9)
    assert [row.gpus for row in sweep.rows] == [n for n in (1, 2, 4, 8, 12) if n == gpus or (n < gpus and n != 12)]
    first = sweep.rows[0].best.tokens_per_s_per_gpu
    for row in sweep.rows:
        plan = search(small(), H100, row.gpus, options=BOTH)
        assert row.best == plan.candidates[0]
        assert row.tokens_per_s == row.gpus * row.best.tokens_per_s_per_gpu
        assert row.efficiency == pytest.approx(row.best.tokens_per_s_per_gpu / first)
        assert row.days * 86400 * row.tokens_per_s == pytest.approx(1e9)


def test_efficiency_is_beside_the_smallest_that_fits():
    gpu = gpu_for(leanest(small(), 4) / FIT_SHARE + 2)
    sweep = sweep_gpus(small(), gpu, 8, options=BOTH)
    assert [row.best is None for row in sweep.rows] == [True, True, False, False]
    assert sweep.rows[2].efficiency == 1
    assert sweep.rows[0].tokens_per_s is sweep.rows[0].days is sweep.rows[3].days is None


@pytest.mark.parametrize(("slower_from", "stops"), [(2, 1), (4, 2), (8, 4), (16, 8), (32, None)])
def test_more_gpus_stop_paying_where_the_gain_falls_short(slower_from, stops):
    """From some number on, twice the GPUs are 1.4 times as fast."""

    def slowing(config, gpu, per_host):
        p = config.parallel
        gpus = p.pipe * int(p.data) * p.context * p.tensor
        doublings = max(0, math.log2(gpus) - math.log2(slower_from) + 1)
        return StepTime({"matmuls": 1.0}, {}, 1e4 * 0.7**doublings, 100.0)

    sweep = sweep_gpus(small(), H100, 16, options=dataclasses.replace(FEW, step_time=slowing))
    assert sweep.stops_paying == stops
    assert sweep.because == ("" if stops is None else f"{2 * stops} GPUs are 2 times as many and 1.40 times as fast")


@pytest.mark.parametrize("gpus", [2, 4, 5])
def test_a_plan_that_is_there_is_taken_for_its_number(gpus):
    """A confirmed plan has another winner than the search."""
    config = small("train.global_batch_sequences=80")
    plan = search(config, H100, gpus, options=FEW)
    confirmed = dataclasses.replace(plan, candidates=plan.candidates[1:])
    sweep = sweep_gpus(config, H100, 8, options=FEW, known=confirmed)
    assert [row.gpus for row in sweep.rows] == sorted({1, 2, 4, 8, gpus})
    for row in sweep.rows:
        of = confirmed if row.gpus == gpus else search(config, H100, row.gpus, options=FEW)
        assert row.best == of.candidates[0]


def test_rows_are_predicted_where_schedules_are_known():
    """They rank the second above the first."""
    plan = search(small(), H100, 4, options=FEW)
    confirmed = confirm(plan, 2, lambda config: Compiled(1, 0, 9.0 if config == plan.best else 0.0))
    assert confirmed.best == plan.candidates[1].config != plan.best
    found, alone = (sweep_gpus(small(), H100, 8, options=FEW, known=known) for known in (confirmed, None))
    assert found == alone


@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupted_row_is_not_judged_by(after):
    """On four GPUs, the search is interrupted after this many configurations."""
    calls = itertools.count()

    def stopped(config):
        if config.devices == 4 and next(calls) == after:
            raise KeyboardInterrupt
        return estimate(config)

    def slow(config, gpu, per_host):
        return StepTime({"matmuls": 1.0}, {}, 1e4 / config.devices**0.9, 100.0)

    whole = sweep_gpus(small(), H100, 4, options=SearchOptions(keep=HELD, estimate=estimate, step_time=slow))
    part = sweep_gpus(small(), H100, 8, options=SearchOptions(keep=HELD, estimate=stopped, step_time=slow))
    assert part.interrupted
    assert not whole.interrupted
    # An interrupted row without candidates does not mean that nothing fits.
    assert [row.gpus for row in part.rows] == [1, 2, 4][: 3 if after else 2]
    assert all(row.best is not None for row in part.rows)
    assert part.stops_paying == whole.stops_paying == 1
    assert "INTERRUPTED" in "\n".join(sweep_lines(part))
    assert "INTERRUPTED" not in "\n".join(sweep_lines(whole))

    def fast_but_four(config, gpu, per_host):
        return StepTime({"matmuls": 1.0}, {}, 1e4 if config.devices < 4 else 1.0, 100.0)

    assert (
        sweep_gpus(small(), H100, 4, options=SearchOptions(keep=HELD, estimate=estimate, step_time=fast_but_four)).stops_paying
        == 2
    )
    calls = itertools.count()
    part = sweep_gpus(small(), H100, 8, options=SearchOptions(keep=HELD, estimate=stopped, step_time=fast_but_four))
    assert part.stops_paying is None
    assert "pay in time" not in "\n".join(sweep_lines(part))


def test_the_global_batch_ends_the_sweep_too():
    """Two sequences occupy only two data ranks, and this model does not divide in another way."""
    config = small("train.global_batch_sequences=2", "train.sequence_length=2", "model.num_layers=1", "model.num_heads=1",
                   "model.num_kv_heads=1", "model.head_dim=16")  # fmt: skip
    sweep = sweep_gpus(config, H100, 8, options=BOTH)
    assert [row.best is None for row in sweep.rows] == [False, False, True, True]
    assert sweep.stops_paying == 2
    assert sweep.because == "no mesh of 4 GPUs divides the batch and the model, and fits"


def test_gradients_are_reduced_over_the_ranks_that_share_weights():
    config = load_config(
        {"model": {"name": "llama-3-8b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 64}},
        ["parallel.pipe=2", "parallel.tensor=2", "parallel.context=2", "parallel.data=8", "train.microbatch_sequences=1"],
    )
    found = gradient_reduction_s(config, H100, 8)
    assert set(found) == set(ALL_REDUCES)
    # 16 ranks, two devices apart: four in each host of eight.
    size, group = 4 * parameter_count(config.model) / 4, group_of(16, 2, 8)
    assert (group.inside, group.hosts) == (4, 4)
    assert found["ring"] == ring_all_reduce_s(size, group, links_of(H100))
    alone = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 1, "context": 1})})
    assert set(gradient_reduction_s(alone, H100, 4).values()) == {0.0}


@pytest.mark.parametrize(("gpus", "given", "size"), [(4, None, None), (4, 8, 4), (16, 8, 8), (12, 8, 4), (3, 4, 1)])
def test_hosts_of_other_numbers_divide(gpus, given, size):
    assert host_size(gpus, given, small()) == size
    named = ("parallel.replica=2", "parallel.replica_latency_ms=10", "train.global_batch_sequences=16")
    assert host_size(2 * gpus, given, small(*named)) == size


# ----------------------------------------------------------------------------------------------------------- objectives


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 16])
def test_the_smallest_cluster_is_the_first_that_fits(needed):
    """The state fits on any mesh of that many GPUs, and on none with fewer."""

    def shared(config):
        p = config.parallel
        return Memory(1000 * needed // (p.pipe * int(p.data) * p.context * p.tensor))

    config = small("train.global_batch_sequences=720720")
    gpu = dataclasses.replace(gpu_for(1000 / FIT_SHARE + 1), gpus_per_host=4)
    plan = smallest_cluster(
        config, gpu, 64, options=SearchOptions(estimate=shared, step_time=step_time, keep=[*HELD, "remat", "zero"])
    )
    # Below a host every number is tried, then complete hosts.
    assert plan.gpus == (needed if needed <= 4 else math.ceil(needed / 4) * 4)
    assert plan.candidates


def test_no_cluster_is_large_enough():
    gpu = gpu_for(1000)
    with pytest.raises(ConfigError, match="Nothing fits on 8 x mine: of those that the GPU is too small for, the leanest"):
        smallest_cluster(small(), gpu, 8, options=BOTH)


def by_length(config):
    return Memory(config.train.sequence_length)


@pytest.mark.parametrize("start", [1024, 4096, 65536])
@pytest.mark.parametrize("most", [1024, 5 * 1024, 37 * 1024])
def test_the_longest_sequence_is_the_longest_that_fits(start, most):
    gpu = gpu_for(most / FIT_SHARE + 2)
    config = small(f"train.sequence_length={start}")
    plan = longest_sequence(config, gpu, 4, options=SearchOptions(keep=HELD, estimate=by_length, step_time=step_time))
    assert plan.config.train.sequence_length == most
    assert plan.best.train.sequence_length == most
    assert plan.best.train.global_batch_sequences == config.train.global_batch_sequences


def test_short_sequences_have_a_unit_of_their_own():
    gpu = gpu_for(90 / FIT_SHARE + 2)
    plan = longest_sequence(
        small("train.sequence_length=24"), gpu, 1, options=SearchOptions(keep=HELD, estimate=by_length, step_time=step_time)
    )
    assert plan.config.train.sequence_length == 80


@pytest.mark.parametrize("start", [1024, 3 * 1024, MOST_TOKENS])
def test_no_sequence_is_longer_than_the_most(start):
    plan = longest_sequence(
        small(f"train.sequence_length={start}"),
        H100,
        1,
        options=SearchOptions(estimate=lambda config: Memory(1), step_time=step_time, keep=[*HELD, "remat"]),
    )
    assert plan.config.train.sequence_length == MOST_TOKENS


class Stopping:
    """An estimate that is interrupted once, at the first call for which `at` is true."""

    def __init__(self, at, estimate):
        self.at, self.estimate, self.stopped = at, estimate, False

    def __call__(self, config):
        if not self.stopped and self.at(config):
            self.stopped = True
            raise KeyboardInterrupt
        return self.estimate(config)


def test_ctrl_c_leaves_the_longest_sequence_so_far():
    gpu, config = gpu_for(37 * 1024 / FIT_SHARE + 2), small("train.sequence_length=1024")
    stopping = Stopping(lambda config: config.train.sequence_length == 40 * 1024, by_length)
    plan = longest_sequence(config, gpu, 4, options=SearchOptions(keep=HELD, estimate=stopping, step_time=step_time))
    assert plan.interrupted
    assert plan.candidates
    # 32 fit, 64 and 48 do not; then comes the interrupt.
    assert plan.config.train.sequence_length == 32 * 1024
    assert not longest_sequence(
        config, gpu, 4, options=SearchOptions(keep=HELD, estimate=by_length, step_time=step_time)
    ).interrupted
    with pytest.raises(KeyboardInterrupt):
        longest_sequence(
            config,
            gpu,
            4,
            options=SearchOptions(keep=HELD, estimate=Stopping(lambda config: True, by_length), step_time=step_time),
        )


def shared_by(config):
    return Memory(13000 // config.devices)


def test_ctrl_c_leaves_the_smallest_cluster_so_far():
    config, gpu = small("train.global_batch_sequences=720720", "parallel.zero=0"), gpu_for(1000 / FIT_SHARE + 1)
    options = {"step_time": step_time, "keep": ["remat", "zero"]}
    whole = smallest_cluster(
        config, dataclasses.replace(gpu, gpus_per_host=4), 64, options=SearchOptions(estimate=shared_by, **options)
    )
    assert whole.gpus == 16
    gpu = dataclasses.replace(gpu, gpus_per_host=1)
    assert smallest_cluster(config, gpu, 64, options=SearchOptions(estimate=shared_by, **options)).gpus == 13
    plan = smallest_cluster(
        config, gpu, 64, options=SearchOptions(estimate=Stopping(lambda config: config.devices == 12, shared_by), **options)
    )
    assert (plan.gpus, plan.interrupted) == (16, True)
    assert plan.candidates
    with pytest.raises(KeyboardInterrupt):
        smallest_cluster(
            config, gpu, 64, options=SearchOptions(estimate=Stopping(lambda config: config.devices == 4, shared_by), **options)
        )


def test_every_try_is_told_of():
    calls = []
    gpu = gpu_for(37 * 1024 / FIT_SHARE + 2)
    told = {"progress": lambda *one: calls.append(one)}
    options = SearchOptions(keep=HELD, estimate=by_length, step_time=step_time, **told)
    longest_sequence(small("train.sequence_length=1024"), gpu, 4, options=options)
    tries = [one[1:] for one in calls if one[0] == "sequence lengths"]
    # 1, 2, 4 ... 64 thousand; then 48, 40, 36, 38 and 37, after which the interval is empty.
    assert [done for done, _ in tries] == list(range(1, 13))
    assert all(done <= total for done, total in tries)
    assert tries[-1] == (12, 12)
    calls.clear()
    options = dataclasses.replace(BOTH, **told)
    smallest_cluster(small(), gpu_for(leanest(small(), 4) / FIT_SHARE + 2), 8, options=options)
    assert [one for one in calls if one[0] == "numbers of GPUs"][:3] == [("numbers of GPUs", n, 4) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("objective", "words"),
    [("speed", "The fastest"), ("gpus", "up to 1,000"), ("sequence", "in multiples of 16,"), ("microbatch", "The largest")],
)
def test_an_objective_has_its_line(objective, words):
    assert words in objective_line(objective, small("train.sequence_length=24"), 1000)


def test_no_sequence_is_short_enough():
    with pytest.raises(ConfigError, match="Nothing fits on 4 x mine"):
        longest_sequence(small(), gpu_for(10), 4, options=BOTH)
