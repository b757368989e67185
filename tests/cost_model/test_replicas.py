"""What crosses between replicas, and its time over a network of their own."""

import dataclasses
import math

import pytest

from jaxllm.config import load_config
from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.replicas import exchange_lines, exchange_of
from jaxllm.cost_model.step_parts import BANDWIDTH_SHARE
from jaxllm.cost_model.step_time import estimate_step_time

H100 = GPUS["h100-80gb"]
HUGE = 1e25
BY_NUMBER_OF_GPUS = {"slowest_gpu"}
"""A term that grows with all GPUs of a step, also of other replicas."""


def islands(gpus=32, *, replica=4, zero=1, sequences=64, diloco=None, gbit=10.0, latency_ms=0.0, **more):
    """Llama 3.2 1B; its replicas have a slow network of their own."""
    network = {"replica_gbit_per_s": gbit, "replica_latency_ms": latency_ms}
    batch = {"global_batch_sequences": sequences, "microbatch_sequences": 1, "diloco_steps": diloco}
    return load_config(
        {
            "model": {"name": "llama-3.2-1b"},
            "parallel": {"replica": replica, "zero": zero, **network, **more},
            "train": {"steps": 1000, "sequence_length": 4096, **batch},
        }
    ).resolve(gpus)


def step(config, gpu=H100):
    per_host, _ = choose_gpus_per_host(config.devices, None, gpu.gpus_per_host, config.parallel)
    return estimate_step_time(config, gpu, per_host)


def between_s(config, gpu=H100):
    return step(config, gpu).between_replicas_s


@pytest.mark.parametrize("diloco", [None, 10])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_over_a_network_without_limits_a_step_is_that_of_one_replica(zero, diloco):
    # A rank also sends no faster than by the links to its adapters.
    gpu = dataclasses.replace(H100, network_bandwidth_bytes_per_s=HUGE, link_bandwidth_bytes_per_s=HUGE)
    several = step(islands(zero=zero, diloco=diloco, gbit=HUGE), gpu)
    alone = step(islands(8, replica=1, zero=zero, sequences=16), gpu)
    assert several.between_replicas_s < 1e-9 * several.step_s
    exchange = "replica" if diloco is None else "outer_step"
    assert several.terms_s.keys() == {*alone.terms_s, exchange}
    for name in alone.terms_s.keys() - BY_NUMBER_OF_GPUS:
        assert several.terms_s[name] == pytest.approx(alone.terms_s[name], rel=1e-9)


def test_twice_the_bandwidth_halves_the_seconds_and_no_other_term():
    slow, fast = step(islands(gbit=10.0)), step(islands(gbit=20.0))
    assert slow.between_replicas_s == pytest.approx(2 * fast.between_replicas_s)
    assert slow.step_s - fast.step_s == pytest.approx(fast.between_replicas_s)


def test_a_rounds_seconds_are_shared_by_its_steps():
    every, rounds = between_s(islands(latency_ms=5.0)), [between_s(islands(diloco=H, latency_ms=5.0)) for H in (1, 2, 500)]
    assert [H * step_s for H, step_s in zip((1, 2, 500), rounds, strict=True)] == pytest.approx([every] * 3)


@pytest.mark.parametrize(("zero", "times"), [(0, 4), (1, 1), (3, 1)])
def test_all_gpus_of_a_replica_share_its_link(zero, times):
    """Four times the GPUs have a quarter of the shards each; with ZeRO 0 every data rank sends everything."""
    few, many = islands(8, zero=zero), islands(32, zero=zero)
    sent = [exchange_of(config).sent_bytes for config in (few, many)]
    assert sent[1] == pytest.approx(times * sent[0], rel=1e-3)
    assert between_s(many) == pytest.approx(times * between_s(few), rel=1e-3)
    seconds = sent[1] / (BANDWIDTH_SHARE * 10e9 / 8)
    assert between_s(many) == pytest.approx(seconds)


def test_each_all_reduce_waits_for_its_messages():
    """With few replicas a ring has the fewest messages one after another, with many a tree."""
    for replica, messages in ((2, 2), (3, 4), (16, 8)):
        config = islands(8 * replica, replica=replica, sequences=8 * replica, gbit=HUGE, latency_ms=1000.0)
        assert between_s(config) == pytest.approx(exchange_of(config).reductions * messages, rel=0.01)
    # Llama 3.2 1B has seven matrices in a layer, and one embedding that is the head too. Codes of all travel together.
    assert exchange_of(config).reductions == 8
    train = config.train.model_copy(update={"diloco_steps": 10, "diloco_bits": 4})
    assert exchange_of(config.model_copy(update={"train": train})).reductions == 1


def test_the_network_that_is_not_named_is_that_between_hosts():
    unnamed = islands(64, gbit=None, latency_ms=None)
    own = H100.network_bandwidth_bytes_per_s * 16 * 8 / 1e9
    alike = islands(64, gbit=own, latency_ms=1000 * H100.network_latency_s)
    assert step(unnamed).terms_s == pytest.approx(step(alike).terms_s)
    # Nor is a link faster than the adapters of its GPUs.
    assert between_s(islands(64, gbit=HUGE, latency_ms=None)) == pytest.approx(between_s(unnamed))
    assert between_s(islands(64, gbit=None, latency_ms=50.0)) > between_s(unnamed)


def test_a_host_is_within_a_replica_whose_network_is_named():
    unnamed, named = islands(8, replica=2, gbit=None, latency_ms=None), islands(8, replica=2)
    assert [choose_gpus_per_host(8, None, 8, config.parallel)[0] for config in (unnamed, named)] == [8, 4]
    with pytest.raises(ConfigError, match=r"--gpus-per-host=8 does not divide the 4 GPUs of a replica: use one of 1, 2, 4\."):
        choose_gpus_per_host(8, 8, 8, named.parallel)


def test_a_compiled_schedule_replaces_the_sum_of_gradients_but_not_the_outer_step():
    for diloco, kept in ((None, 0.0), (10, between_s(islands(diloco=10)))):
        scheduled = step(islands(diloco=diloco)).as_scheduled(1.0)
        assert scheduled.between_replicas_s == kept
        assert scheduled.terms_s["transfers"] == 1.0
        waits_s = 1.0 + kept + scheduled.terms_s["overlap"] + scheduled.terms_s["slowest_gpu"]
        assert scheduled.exposed_communication_share == pytest.approx(waits_s / scheduled.step_s)


def test_a_single_replica_exchanges_nothing():
    alone = islands(8, replica=1, diloco=10)
    assert exchange_of(alone) is None
    assert list(exchange_lines(alone, 0.0)) == []
    assert between_s(alone) == 0.0


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        ({"gbit": 1600.0, "latency_ms": 2.5}, "(1,600 Gbit/s each, 2.5 ms)", "of gradients every step, {}: 3 s exposed"),
        ({"gbit": None, "latency_ms": None}, "(the network of the hosts)", "of gradients every step, {}: 3 s exposed"),
        ({"gbit": None, "latency_ms": 2.5}, "(adapters as between hosts, 2.5 ms)", "of gradients every step, {}: 3 s exposed"),
        (
            {"latency_ms": None, "diloco": 50},
            "(10 Gbit/s each, latency as between hosts)",
            "of weights every 50 steps, {}: 150 s exposed, 3 s a step",
        ),
    ],
)
def test_text_says_what_each_replica_sends(given, first, second):
    config = islands(**given)
    lines = list(exchange_lines(config, 3.0))
    assert lines[0] == f"Between 4 replicas of 8 GPUs {first}"
    sent = exchange_of(config).sent_bytes
    # Three quarters twice, of 4 bytes for each parameter.
    assert sent == pytest.approx(1.5 * 4 * 1_235_814_400, rel=1e-3)
    assert lines[1] == f"  each sends {sent / 2**30:.1f} GiB " + second.format("and receives as much")


@pytest.mark.parametrize(
    ("key", "value"), [("replica_gbit_per_s", 0), ("replica_latency_ms", -1), ("replica_gbit_per_s", math.inf)]
)
def test_networks_that_do_not_exist_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"parallel.{key}"):
        load_config(
            {
                "model": {"name": "llama-3.2-1b"},
                "parallel": {key: value},
                "train": {"steps": 1, "sequence_length": 16, "global_batch_sequences": 1},
            }
        )
