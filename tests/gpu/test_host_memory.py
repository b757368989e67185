"""Activations and optimizer state in host memory on one NVIDIA GPU: the numbers do not change, and checkpoints are right."""

import jax
import numpy as np
import pytest
from meshes import Run, assert_close

from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.config import CheckpointConfig
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.doctor.links import host_copies
from jaxllm.mesh.axes import HOST

pytestmark = pytest.mark.gpu

M, ROWS, S = 2, 2, 256
SIZES = (
    *("model.num_layers=4", "model.hidden_size=256", "model.intermediate_size=512", f"train.sequence_length={S}"),
    *("parallel.data=1", f"train.global_batch_sequences={M * ROWS}", f"train.microbatch_sequences={ROWS}"),
    *("model.attention=xla", "optimizer.learning_rate=1e-2"),
)


def batch(seed=0):
    ids = np.random.default_rng(seed).integers(0, 256, (M, ROWS, S + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (M, ROWS, S))
    return {"tokens": ids[..., :-1], "targets": ids[..., 1:], "mask": np.ones((M, ROWS, S), bool), "positions": positions}


def run(tiny_config, *more):
    return Run(tiny_config(*SIZES, *more), batch)


@pytest.fixture(autouse=True)
def full_precision():
    """Disables TF32, whose rounding depends on the tiling of a matmul."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("remat", ["offload", "{mlp_up: offload, query: keep}"])
def test_gradients_with_activations_on_the_host_are_those_without(tiny_config, remat):
    """The host buffer is not zeroed, so a read must return what was written."""
    loss, gradients = run(tiny_config, f"parallel.remat={remat}").gradients()
    expected_loss, expected = run(tiny_config, "parallel.remat=selective").gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(jax.device_get(gradients), jax.device_get(expected), 1e-5)


@pytest.mark.parametrize("what", ["optimizer", "optimizer_and_master", "all"])
def test_losses_with_the_state_on_the_host_are_those_without(tiny_config, what):
    ours = run(tiny_config, f"parallel.offload_state={what}")
    moments = [x for x in jax.tree.leaves(ours.state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {HOST}
    np.testing.assert_allclose(ours.losses(10), run(tiny_config).losses(10), rtol=1e-4)


@pytest.mark.parametrize("what", ["null", "optimizer_and_master"])
def test_a_checkpoint_is_of_its_own_step_though_training_goes_on(tiny_config, tmp_path, what):
    """An asynchronous save does not copy an array that is on the host already; the next step overwrites it."""
    ours = run(tiny_config, f"parallel.offload_state={what}")
    step, checkpoints = jax.jit(ours.step, donate_argnums=0), Checkpoints(tmp_path, CheckpointConfig())
    with jax.set_mesh(ours.mesh):
        state, _ = step(ours.state, ours.place(batch(0)))
        expected = jax.tree.map(np.array, jax.device_get((state.params, state.opt_state)))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        checkpoints.save(1, state, describe_run(ours.config, 1, ""))
        for seed in (1, 2, 3):
            state, _ = step(state, ours.place(batch(seed)))
        jax.block_until_ready(state)
        checkpoints.wait()
        checkpoints.close()
        found = Checkpoints(tmp_path, CheckpointConfig()).restore(like, ours.functions.table)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((found.params, found.opt_state)), expected)


def test_a_copy_reaches_the_link_of_the_figures():
    """Both ways at once too, which a link that shares its two directions, or copies that wait for each other, would not."""
    gpu = gpu_from_device_kind(jax.devices()[0].device_kind)
    if gpu is None:
        pytest.skip("no figures for this kind of GPU")
    for one in host_copies({0: 0}, 2**29, gpu):
        assert 0.6 < one.bytes_per_s / one.expected_bytes_per_s < 1.3, one
