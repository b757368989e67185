"""Every policy computes the same gradients; each keeps less than the one before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.mesh import make_mesh
from jaxllm.parallel.parallelize import parallelize

needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
POLICIES = ("none", "selective", "full")


def gradients_and_memory(config):
    config = config.resolve(1)
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    rng = np.random.default_rng(0)
    shape = (1, config.train.global_batch_sequences, config.train.sequence_length)
    ids = rng.integers(0, 256, (*shape[:2], shape[2] + 1))
    batch = {
        "tokens": jnp.asarray(ids[..., :-1], jnp.int32),
        "targets": jnp.asarray(ids[..., 1:], jnp.int32),
        "mask": jnp.ones(shape, bool),
        "positions": jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32)[None, None], shape),
    }
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
        params = functions.initialize(jax.random.key(0))
        compiled = jax.jit(functions.value_and_grad).lower(params, batch).compile()
        loss, gradients = compiled(params, batch)
    return loss, gradients, compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module", params=["true", "false"], ids=["scanned", "unrolled"])
def results(tiny_config, request):
    """Six layers and 64 positions, so that activations outweigh the gradients' accumulators."""
    sizes = ("model.num_layers=6", "train.sequence_length=64", f"model.scan_layers={request.param}")
    return {policy: gradients_and_memory(tiny_config(f"parallel.remat={policy}", *sizes)) for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_same_loss_and_gradients(results, policy):
    loss, gradients, _ = results[policy]
    expected_loss, expected, _ = results["none"]
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), gradients, expected)


@pytest.mark.parametrize("results", ["true"], indirect=True, ids=["scanned"])
def test_memory_falls_in_the_order_it_should(results):
    """In a loop. Unrolled, the CPU compiler orders work without regard to memory: see the next test."""
    none, selective, full = (results[policy][2] for policy in POLICIES)
    assert full < 0.8 * selective
    assert selective < 0.8 * none


@needs_gpu_compiler
@pytest.mark.parametrize("scan", ["true", "false"], ids=["scanned", "unrolled"])
def test_memory_falls_on_the_gpu_target(tiny_config, scan):
    sizes = ("model.hidden_size=256", "model.intermediate_size=512", "model.num_layers=6", "train.sequence_length=1024")

    def temporary_bytes(policy):
        overrides = (f"parallel.remat={policy}", f"model.scan_layers={scan}", "model.compute_dtype=bfloat16")
        return compile_step(tiny_config(*sizes, *overrides), gpu_devices(1, 1)).memory_analysis().temp_size_in_bytes

    none, selective, full = map(temporary_bytes, POLICIES)
    assert full < 0.8 * selective
    assert selective < 0.8 * none
