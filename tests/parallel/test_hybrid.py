"""Hybrid sharding: several replicas (mesh axis `replica`), ZeRO inside each, gradients summed across. The same numbers as one
device, and nothing gathered from another replica.
"""

import jax
import numpy as np
import pytest
from meshes import Run, assert_close, unequal_batch

from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.compile.overlap import simulate_overlap
from jaxllm.config import ConfigError
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.replicas import exchange_of
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.mesh.axes import axis_sizes, batch_sharding, make_mesh

MICROBATCHES, ROWS, S = 2, 8, 16
AXES = ("replica", "pipe", "data", "context", "tensor")
MESHES = [
    # Sizes of AXES, and ZeRO's level.
    ((2, 1, 4, 1, 1), 0),
    ((2, 1, 4, 1, 1), 1),
    ((4, 1, 2, 1, 1), 2),
    ((2, 1, 2, 1, 2), 3),
    ((2, 1, 2, 2, 1), 1),
    ((2, 2, 2, 1, 1), 1),
    ((2, 2, 2, 1, 1), 3),
    ((8, 1, 1, 1, 1), 1),
    ((2, 2, 1, 1, 2), 2),
    ((2, 1, 1, 2, 2), 3),
]
SLOW = MESHES[6:]


def batch(seed=0):
    return unequal_batch(seed, (MICROBATCHES, ROWS, S), ends=1)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(mesh, zero, *more):
        axes = [f"parallel.{axis}={size}" for axis, size in zip(AXES, mesh, strict=True)]
        rows = f"train.microbatch_sequences={ROWS // (mesh[0] * mesh[2])}"
        sizes = ("train.global_batch_sequences=16", rows, "model.num_layers=3", "model.vocab_size=258")
        rates = ("optimizer.learning_rate=1e-2", "train.steps=20")
        return Run(tiny_config(*axes, *sizes, *rates, f"parallel.zero={zero}", *more), batch)

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    """(loss, gradients, parameters, losses of six steps)"""
    run = make_run((1, 1, 1, 1, 1), 0)
    loss, gradients = run.gradients()
    params = run.plain(run.state.params)
    return loss, run.plain(gradients), params, run.losses(6)


@pytest.mark.parametrize(
    ("mesh", "zero"), [pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else []) for case in MESHES]
)
def test_loss_and_gradients_equal_one_device(make_run, one_device, mesh, zero):
    expected_loss, expected, params, _ = one_device
    run = make_run(mesh, zero)
    jax.tree.map(np.testing.assert_array_equal, run.plain(run.state.params), params)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(run.plain(gradients), expected, 2e-6)


@pytest.mark.parametrize(("mesh", "zero"), [MESHES[1], pytest.param(*MESHES[3], marks=pytest.mark.slow)])
def test_six_steps_equal_one_device(make_run, one_device, mesh, zero):
    np.testing.assert_allclose(make_run(mesh, zero).losses(6), one_device[3], rtol=2e-5)


def test_evaluation_counts_the_tokens_of_all_islands(make_run):
    run = make_run(*MESHES[1])
    with jax.set_mesh(run.mesh):
        total, count = jax.jit(run.functions.loss_sum)(run.state.params, run.place(batch()))
    assert int(count) == batch()["mask"].sum()
    np.testing.assert_allclose(total / int(count), run.gradients()[0], rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ what is sent

SIZES = (
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.vocab_size=2048",
    "train.sequence_length=32",
    "train.global_batch_sequences=32",
    "train.microbatch_sequences=1",
)


def compiled(config, devices):
    config = config.resolve(len(devices))
    return Module(compile_step(config, devices).as_text(), axis_sizes(config.parallel))


def collectives(config, devices):
    return compiled(config, devices).collectives()


SLOW_LINK = ("parallel.replica_gbit_per_s=0.001", "parallel.replica_latency_ms=0")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_is_gathered_from_another_island(tiny_config, zero):
    config = tiny_config(*SIZES, "parallel.replica=2", "parallel.data=4", f"parallel.zero={zero}")
    found = collectives(config, jax.devices())
    assert {c.axes for c in found if c.kind == "all-gather"} <= {("data",)}
    across = [c for c in found if "replica" in c.axes]
    # Besides the gradients: the loss and the number of targets.
    large = [c for c in across if c.elements > 10]
    assert {(c.kind, c.axes, c.loops) for c in large} == {("all-reduce", ("replica",), ())}
    elements = sum(c.elements * c.executed for c in large)
    assert elements == pytest.approx(parameter_count(config.model) / (4 if zero else 1), abs=100)
    # The estimate knows them to the byte.
    assert 4 * elements == exchange_of(config).rank_bytes


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_on_gpus_each_island_scatters_and_shares_are_summed_across(tiny_config):
    mesh = ("parallel.replica=2", "parallel.data=4", "parallel.zero=1", *SLOW_LINK)
    config = tiny_config(*SIZES, *mesh, "model.compute_dtype=bfloat16")
    module = compiled(config, gpu_devices(hosts=2, gpus_per_host=4))
    # Of more than counters, and than the scales of norms.
    found = [c for c in module.collectives() if c.elements >= 1000]
    count = parameter_count(config.model)
    kinds = {("all-gather", ("data",)), ("reduce-scatter", ("data",)), ("all-reduce", ("replica",))}
    assert {(c.kind, c.axes) for c in found} == kinds
    across = [c for c in found if "replica" in c.axes]
    assert {dtype for c in across for dtype, _ in c.buffers} == {"f32"}
    assert sum(c.elements * c.executed for c in across) == pytest.approx(count / 4, abs=200)
    # Over a slow link the schedule's seconds are those of the step-time model.
    transfers = simulate_overlap(module, GPUS["h100-80gb"], 4, parallel=config.parallel)
    seconds = sum(t.exposed_s * t.collective.executed for t in transfers if "replica" in t.collective.axes)
    assert seconds == pytest.approx(estimate_step_time(config, GPUS["h100-80gb"], 4).between_replicas_s, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------- the mesh


def test_an_island_is_a_block_of_devices(tiny_config):
    parallel = tiny_config("parallel.replica=2", "parallel.data=2", "parallel.tensor=2").parallel
    mesh = make_mesh(parallel, jax.devices())
    assert mesh.axis_names == AXES
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids.reshape(2, -1).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Replica r has the r-th part of each microbatch's rows.
    indices = batch_sharding(mesh).devices_indices_map((3, 8, 16))
    firsts = [indices[device][1].start or 0 for device in jax.devices()]
    assert firsts == [0, 0, 2, 2, 4, 4, 6, 6]


def test_without_islands_the_mesh_has_no_axis_for_them(tiny_config):
    assert make_mesh(tiny_config("parallel.data=8").parallel, jax.devices()).axis_names == AXES[1:]


def test_a_batch_that_does_not_divide_over_islands_is_refused(tiny_config):
    message = r"global_batch_sequences=10 does not divide into parallel.replica x data = 4 ranks: use 8 or 12"
    with pytest.raises(ConfigError, match=message):
        tiny_config("parallel.replica=2", "parallel.data=2", "train.global_batch_sequences=10")
