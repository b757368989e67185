"""What shapes waste of a step: nothing where all divides, and parts that sum to what the step would gain."""

import dataclasses
import math
import random

import pytest

from jaxllm.config import load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.shape_waste import PARTS, shape_waste
from jaxllm.cost_model.step_parts import TILES, tile_parts, tile_share
from jaxllm.cost_model.step_time import CONVENTIONS, estimate_step_time
from jaxllm.plan.advice import LEAST_GAIN, better_shape, better_shape_line

H100 = GPUS["h100-80gb"]
FOUR = dataclasses.replace(H100, chip=dataclasses.replace(H100.chip, multiprocessors=4))
"""Few multiprocessors, which whole numbers of large tiles fill."""
EVEN = {"num_layers": 8, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 32768}


def configured(devices=1, *, model=(), microbatch_sequences=1, **parallel):
    train = {"steps": 1, "sequence_length": 2048, "global_batch_sequences": 24, "microbatch_sequences": microbatch_sequences}
    values = {"model": EVEN | dict(model), "parallel": parallel, "data": {"mask_documents": False}, "train": train}
    return load_config(values).resolve(devices)


def some():
    choose = random.Random(1).choice
    for _ in range(20):
        pipe, virtual = choose([(1, 1), (2, 1), (3, 1), (3, 2)])
        tensor, data = choose([1, 2, 4]), choose([1, 2])
        parallel = {"pipe": pipe, "virtual_stages": virtual, "tensor": tensor, "zero": choose([0, 1, 3])}
        parallel |= {
            "schedule": "interleaved" if virtual > 1 else "1f1b",
            "remat": choose(["none", "selective", "full", "offload"]),
        }
        model = {
            "num_layers": choose([11, 12]),
            "vocab_size": choose([32768, 32001]),
            "intermediate_size": choose([4096, 4104]),
        }
        yield configured(pipe * tensor * data, model=model, **parallel)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_shapes_of_whole_tiles_and_waves_waste_nothing(convention):
    waste = shape_waste(configured(model={"num_layers": 2}), FOUR, 1, convention)
    assert waste.lost_s == dict.fromkeys(PARTS, 0.0)
    assert waste.line() == "of these, lost to: no shape, to 0.05%"


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size"])
def test_a_multiple_of_a_tile_wastes_less_than_one_more(key):
    """In tiles beyond the edge on a GPU whose last wave is empty too, and altogether on one that whole waves fill."""

    def waste(gpu, extra):
        return shape_waste(configured(model={key: EVEN[key] + extra}), gpu, 1)

    assert waste(H100, -128).lost_s["tiles"] < waste(H100, -127).lost_s["tiles"]
    assert waste(FOUR, 0).total_s < waste(FOUR, 1).total_s


def test_layers_that_divide_leave_no_identity_layers_and_one_more_layer_does():
    def waste(layers, **parallel):
        found = shape_waste(configured(6, model={"num_layers": layers}, pipe=3, **parallel), H100, 6)
        return found.shares["identity_layers"]

    interleaved = {"virtual_stages": 2, "schedule": "interleaved"}
    assert waste(12) == waste(12, **interleaved) == 0
    assert 0 < waste(11) < 1 / 12
    # Of 11 layers over 6 chunks of 2 one slot of 12 is empty, and over 3 chunks of 4 too.
    assert waste(11, **interleaved) == pytest.approx(waste(11), rel=0.05)
    assert waste(10) > waste(11)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_parts_sum_to_what_the_step_would_gain(convention):
    for config in some():
        waste = shape_waste(config, H100, config.devices, convention)
        assert waste.step_s == estimate_step_time(config, H100, config.devices, convention).step_s
        assert min(waste.lost_s.values()) > -1e-12 * waste.step_s
        assert sum(waste.shares.values()) == pytest.approx(waste.total_s / waste.step_s)
        assert waste.total_s < waste.step_s


def test_without_waste_a_step_is_that_of_a_gpu_it_fills():
    """One multiprocessor is always full: what remains is tiles, and of these none here."""
    config = configured(model={"num_layers": 2})
    waste = shape_waste(config, H100, 1)
    one = dataclasses.replace(H100, chip=dataclasses.replace(H100.chip, multiprocessors=1))
    assert waste.step_s - waste.total_s == pytest.approx(estimate_step_time(config, one, 1).step_s, rel=1e-12)


def test_the_share_of_a_matmul_is_the_product_of_its_parts():
    for rows, columns, length in ((100, 100, 100), (8192, 4097, 512), (300, 300, 9000), (1, 1, 1)):
        for multiprocessors in (1, 132):
            parts = tile_parts(rows, columns, length, multiprocessors)
            assert all(0 < part <= 1 for part in parts)
            assert math.prod(parts) == tile_share(rows, columns, length, multiprocessors)
            of_one = [rows * columns / (-(-rows // r) * r * -(-columns // c) * c) * speed for r, c, speed in TILES]
            assert tile_share(rows, columns, length, 1) == pytest.approx(max(of_one))


def test_layers_that_leave_slots_empty_are_advised_away_by_the_gain_of_the_step():
    config = configured(6, model={"num_layers": 11}, pipe=3, virtual_stages=2, schedule="interleaved", zero=1)
    found = better_shape(config, H100, 6)
    now, then = (estimate_step_time(c, H100, 6).step_s for c in (config, found.config))
    assert found.config.model == config.model
    assert found.config.devices == 6
    assert found.step_ratio == pytest.approx(then / now)
    assert found.step_ratio <= 1 - LEAST_GAIN
    assert shape_waste(found.config, H100, 6).total_s < shape_waste(config, H100, 6).total_s
    assert better_shape_line(found) == f"{found.overrides} would make the step {1 - then / now:.1%} shorter"


def test_where_nothing_is_wasted_nothing_is_advised():
    assert better_shape(configured(model={"num_layers": 2}), FOUR, 1) is None
