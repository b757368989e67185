"""Estimates and plans of several replicas over a network of their own."""

import dataclasses

import pytest
from plan_stand_ins import small

from jaxllm.compile.plan import plan
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.replicas import exchange_lines, exchange_of
from jaxllm.plan.estimate import estimate
from jaxllm.plan.fastest_remat import MESH
from jaxllm.plan.search import SearchOptions, search
from jaxllm.plan.search_text import heading_lines, verdict_lines
from jaxllm.plan.sweep import longest_sequence, smallest_cluster, sweep_gpus

H100 = GPUS["h100-80gb"]
UNLIMITED = dataclasses.replace(H100, network_bandwidth_bytes_per_s=1e25, link_bandwidth_bytes_per_s=1e25)
KEEP = SearchOptions(keep=("remat", "offload_state"))
TWO = ("parallel.replica=2", "parallel.replica_latency_ms=0", "parallel.replica_gbit_per_s=")


def islands(*overrides, gbit=10.0):
    values = {"steps": 100, "sequence_length": 2048, "global_batch_sequences": 32}
    recipe = {"model": {"name": "llama-3.2-1b"}, "train": values}
    return load_config(recipe, [*TWO[:2], f"{TWO[2]}{gbit}", *overrides])


# ------------------------------------------------------------------------------------------------------------- estimate


@pytest.mark.parametrize(("diloco", "steps"), [((), 1), (("train.diloco_steps=20",), 20)])
def test_an_estimate_says_what_crosses_and_for_how_long(diloco, steps):
    report = estimate(islands("parallel.zero=1", "train.microbatch_sequences=1", *diloco), H100, 16)
    exchange, values = exchange_of(report.config), report.to_json()
    assert values["between_replicas"] == {
        **dataclasses.asdict(exchange),
        "sent_bytes": exchange.sent_bytes,
        "exposed_s_per_step": report.speed.between_replicas_s,
    }
    assert (exchange.replicas, exchange.gpus, exchange.steps) == (2, 8, steps)
    # Of two replicas in a ring each sends one array, of 80% of 10 Gbit/s.
    assert steps * report.speed.between_replicas_s == pytest.approx(exchange.sent_bytes / 1e9)
    lines = list(report.lines())
    assert lines[-2:] == list(exchange_lines(report.config, report.speed.between_replicas_s))
    assert "  replica 2, pipe 1, data 8, context 1, tensor 1; ZeRO 1; remat selective" in lines


def test_without_a_gpu_or_other_replicas_there_are_no_seconds():
    report = estimate(islands(), gpus=16)
    assert report.to_json()["between_replicas"]["exposed_s_per_step"] is None
    assert list(report.lines())[-1].endswith("and receives as much")
    alone = estimate(islands("parallel.replica=1"), H100, 16)
    assert alone.to_json()["between_replicas"] is None
    assert "replica" not in "\n".join(alone.lines())


# ----------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("schedule", ["[]", "[[1000000, {}], [5000000, {}]]"])
def test_over_a_network_without_limits_a_plan_is_that_of_one_replica(schedule):
    """With half the GPUs and half of each batch."""
    batch = "train.batch_schedule=" + schedule
    several = search(islands(batch.format(96, 64), gbit=1e25), UNLIMITED, 16, options=KEEP)
    alone = islands("parallel.replica=1", "train.global_batch_sequences=16", batch.format(48, 32))
    alone = search(alone, UNLIMITED, 8, options=KEEP)

    def figures(plan):
        # The slowest GPU of a step is one of all replicas.
        seconds = {str(one.choice): one.step_s - one.predicted.terms_s.get("slowest_gpu", 0.0) for one in plan.candidates}
        return seconds, {str(one.choice): one.estimate_bytes for one in plan.candidates}

    for of_several, of_one in zip(figures(several), figures(alone), strict=True):
        # The slowest of more GPUs moves the bound of the search, by one configuration here.
        both = of_several.keys() & of_one.keys()
        assert len(both) >= max(len(of_several), len(of_one)) - 1
        assert {name: of_several[name] for name in both} == pytest.approx({name: of_one[name] for name in both}, rel=1e-6)


def test_the_seconds_between_replicas_count():
    """With ZeRO 0 every data rank sends all gradients."""

    def fastest(gpu, gbit, zero):
        found = search(islands(f"parallel.zero={zero}", gbit=gbit), gpu, 16, options=keep).candidates
        return next(one for one in found if one.choice.mesh.data == 8)

    keep = dataclasses.replace(KEEP, keep=(*KEEP.keep, "zero"))
    slow = [fastest(H100, 10.0, zero).predicted for zero in (0, 1)]
    assert slow[0].between_replicas_s == pytest.approx(8 * slow[1].between_replicas_s, rel=0.01)
    assert slow[0].step_s > 3 * slow[1].step_s
    assert fastest(UNLIMITED, 1e25, 0).step_s < 1.3 * fastest(UNLIMITED, 1e25, 1).step_s
    assert search(islands(gbit=10.0), H100, 16, options=KEEP).candidates[0].choice.zero > 0


def test_with_diloco_nothing_of_the_state_is_on_the_host():
    found = search(islands("train.diloco_steps=10"), H100, 16, options=SearchOptions(keep=("remat",)))
    assert {one.choice.offload_state for one in found.candidates} == {"none"}
    best = found.candidates[0]
    assert best.to_json()["between_replicas"]["exposed_s_per_step"] == best.predicted.terms_s["outer_step"] > 0
    assert found.to_json()["replicas"] == 2


def test_the_plan_names_the_islands_and_what_crosses():
    found = search(islands(), H100, 16, options=KEEP)
    assert (
        list(heading_lines(found))[-1]
        == "  in 2 replicas (islands), each with the meshes below, and its share of the sequences"
    )
    best = found.candidates[0]
    crossing = list(exchange_lines(best.config, best.predicted.between_replicas_s))
    assert crossing[0] == "Between 2 replicas of 8 GPUs (10 Gbit/s each, 0 ms)"
    assert [line for line in verdict_lines(found, 10) if line in crossing] == crossing
    alone = search(islands("parallel.replica=1"), H100, 8, options=KEEP)
    assert "replica" not in "\n".join([*heading_lines(alone), *verdict_lines(alone, 10)])


def test_other_numbers_of_gpus_and_lengths_divide_over_the_replicas():
    config = islands("parallel.replica=3", "train.global_batch_sequences=48")
    options = dataclasses.replace(KEEP, device_bytes=12 * 2**30)
    rows = sweep_gpus(config, H100, 50, options=options).rows
    assert [row.gpus for row in rows] == [3, 6, 12, 24, 48]
    fewest = smallest_cluster(config, H100, 50, options=options)
    assert fewest.gpus % 3 == 0
    assert fewest.gpus in range(next(row.gpus for row in rows if row.best) // 2 + 1, 49)
    longest = longest_sequence(config, H100, 12, options=options)
    assert longest.candidates
    assert longest.best.devices == 12


def test_what_does_not_divide_over_the_replicas_is_said():
    message = r"parallel.replica=3 does not divide the 16 GPUs: set --gpus=15 or 18, or change parallel.replica\."
    with pytest.raises(ConfigError, match=message):
        plan(islands("parallel.replica=3"), H100, 16)
    with pytest.raises(ConfigError, match=r"parallel.replica=3 does not divide the 2 GPUs: set --gpus=3, or"):
        plan(islands("parallel.replica=3"), H100, 2, objective="gpus")
    with pytest.raises(ConfigError, match="mostly because global_batch_sequences=7 does not divide over replica x data"):
        plan(small("parallel.replica=2", "train.global_batch_sequences=7"), H100, 4)
    found = search(islands("train.global_batch_sequences=32", "train.batch_schedule=[[10000, 36]]"), H100, 16, options=KEEP)
    reasons = [row.reason for row in found.rejected if row.unit == MESH]
    assert "batch_schedule's 36 sequences do not divide over replica x data" in reasons


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        ("parallel.replica_gbit_per_s=0.0001", "greater than or equal to 0.001"),
        ("parallel.replica_latency_ms=200000", "less than or equal to 100000"),
    ],
)
def test_a_network_that_cannot_be_is_refused(key, bound):
    with pytest.raises(ConfigError, match=f"{key} is not valid: it should be {bound}"):
        islands(key)
