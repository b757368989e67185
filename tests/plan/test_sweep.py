"""Searches over numbers of GPUs and sequence lengths, against looking at every one of them."""

import dataclasses
import math

import pytest
from plan_stand_ins import Memory, Time, estimate, gpu_for, small, step_time

from jaxllm.config import ConfigError, load_config
from jaxllm.plan.flops import parameter_count
from jaxllm.plan.hardware import GPUS
from jaxllm.plan.network import ALL_REDUCES, group_of, links_of, parameter_server_s, ring_all_reduce_s
from jaxllm.plan.search import FIT_SHARE, search
from jaxllm.plan.space import space
from jaxllm.plan.sweep import (
    PARAMETER_SERVER,
    gradient_reduction_s,
    host_size,
    longest_sequence,
    smallest_cluster,
    sweep_gpus,
)

H100 = GPUS["h100-80gb"]
BOTH = {"estimate": estimate, "step_time": step_time}


def leanest(config, gpus):
    return min((estimate(one).peak_bytes for one in space(config, gpus)), default=math.inf)


@pytest.mark.parametrize("gpus", [1, 8, 12])
def test_a_row_is_the_plan_of_its_number_of_gpus(gpus):
    sweep = sweep_gpus(small(), H100, gpus, tokens=1e9, **BOTH)
    assert [row.gpus for row in sweep.rows] == [n for n in (1, 2, 4, 8, 12) if n == gpus or (n < gpus and n != 12)]
    first = sweep.rows[0].best.tokens_per_s_per_gpu
    for row in sweep.rows:
        plan = search(small(), H100, row.gpus, **BOTH)
        assert row.best == plan.candidates[0]
        assert row.tokens_per_s == row.gpus * row.best.tokens_per_s_per_gpu
        assert row.efficiency == pytest.approx(row.best.tokens_per_s_per_gpu / first)
        assert row.days * 86400 * row.tokens_per_s == pytest.approx(1e9)


def test_efficiency_is_beside_the_smallest_that_fits():
    gpu = gpu_for(leanest(small(), 4) / FIT_SHARE + 2)
    sweep = sweep_gpus(small(), gpu, 8, **BOTH)
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
        return Time(1.0, 1e4 * 0.7**doublings)

    sweep = sweep_gpus(small(), H100, 16, estimate=estimate, step_time=slowing)
    assert sweep.stops_paying == stops
    assert sweep.because == ("" if stops is None else f"{2 * stops} GPUs are 2 times as many and 1.40 times as fast")


def test_the_global_batch_ends_the_sweep_too():
    """Two sequences keep two data ranks busy, and this model divides no other way."""
    config = small("train.global_batch_sequences=2", "train.sequence_length=2", "model.num_layers=1", "model.num_heads=1",
                   "model.num_kv_heads=1", "model.head_dim=16")  # fmt: skip
    sweep = sweep_gpus(config, H100, 8, **BOTH)
    assert [row.best is None for row in sweep.rows] == [False, False, True, True]
    assert sweep.stops_paying == 2
    assert sweep.because == "no mesh of 4 GPUs divides the batch and the model, and fits"


def test_gradients_are_reduced_over_the_ranks_that_share_weights():
    config = load_config(
        {"model": {"name": "llama-3-8b"}, "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 64}},
        ["parallel.pipe=2", "parallel.tensor=2", "parallel.context=2", "parallel.data=8", "train.microbatch_sequences=1"],
    )
    found = gradient_reduction_s(config, H100, 8)
    assert set(found) == {*ALL_REDUCES, PARAMETER_SERVER}
    # 16 ranks, two devices apart: four in each host of eight.
    size, group = 4 * parameter_count(config.model) / 4, group_of(16, 2, 8)
    assert (group.inside, group.hosts) == (4, 4)
    assert found["ring"] == ring_all_reduce_s(size, group, links_of(H100))
    assert found[PARAMETER_SERVER] == parameter_server_s(size, 16, 4, links_of(H100))
    alone = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 1, "context": 1})})
    assert set(gradient_reduction_s(alone, H100, 4).values()) == {0.0}


@pytest.mark.parametrize(("gpus", "given", "size"), [(4, None, None), (4, 8, 4), (16, 8, 8), (12, 8, 4), (3, 4, 1)])
def test_hosts_of_other_numbers_divide(gpus, given, size):
    assert host_size(gpus, given) == size


# ----------------------------------------------------------------------------------------------------------- objectives


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 16])
def test_the_smallest_cluster_is_the_first_that_fits(needed):
    """Bytes that any mesh of so many GPUs has room for, and none of fewer."""

    def shared(config):
        p = config.parallel
        return Memory(1000 * needed // (p.pipe * int(p.data) * p.context * p.tensor))

    config = small("train.global_batch_sequences=720720")
    gpu = dataclasses.replace(gpu_for(1000 / FIT_SHARE + 1), gpus_per_host=4)
    plan = smallest_cluster(config, gpu, 64, estimate=shared, step_time=step_time, keep=["remat", "zero"])
    # Below a host every number is looked at, then whole hosts.
    assert plan.gpus == (needed if needed <= 4 else math.ceil(needed / 4) * 4)
    assert plan.candidates


def test_no_cluster_is_large_enough():
    gpu = gpu_for(1000)
    with pytest.raises(ConfigError, match="Nothing fits on 8 x mine: the leanest of"):
        smallest_cluster(small(), gpu, 8, **BOTH)


def by_length(config):
    return Memory(config.train.sequence_length)


@pytest.mark.parametrize("start", [1024, 4096, 65536])
@pytest.mark.parametrize("most", [1024, 5 * 1024, 37 * 1024])
def test_the_longest_sequence_is_the_longest_that_fits(start, most):
    gpu = gpu_for(most / FIT_SHARE + 2)
    config = small(f"train.sequence_length={start}")
    plan = longest_sequence(config, gpu, 4, estimate=by_length, step_time=step_time)
    assert plan.config.train.sequence_length == most
    assert plan.best.train.sequence_length == most
    assert plan.best.train.global_batch_sequences == config.train.global_batch_sequences


def test_short_sequences_have_a_unit_of_their_own():
    gpu = gpu_for(90 / FIT_SHARE + 2)
    plan = longest_sequence(small("train.sequence_length=24"), gpu, 1, estimate=by_length, step_time=step_time)
    assert plan.config.train.sequence_length == 80


def test_no_sequence_is_short_enough():
    with pytest.raises(ConfigError, match="Nothing fits on 4 x mine"):
        longest_sequence(small(), gpu_for(10), 4, **BOTH)
