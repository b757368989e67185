"""A loss of the caller's: on every mesh its loss and gradients are those of one device, and those of its definition."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import Run, assert_close, unequal_batch

from jaxllm.model.llama import Llama
from jaxllm.model.loss import chunked
from jaxllm.parallel.parameters import merge_model
from jaxllm.train.build import Given

MICROBATCHES, ROWS, S = 4, 4, 16
AXES = ("replica", "pipe", "data", "context", "tensor", "zero")
TIED = ("model.tie_embeddings=true",)
MESHES = {
    "pipe-tensor-chunks-tied": ((1, 2, 1, 1, 2, 1), TIED),
    "data-tensor-once": ((1, 1, 2, 1, 2, 1), ()),
    "hybrid-context-zero3-tied": ((2, 1, 2, 2, 1, 3), TIED),
}


def batch(seed=0):
    """Weights of tokens and of sequences beside the loader's arrays."""
    arrays = unequal_batch(seed, (MICROBATCHES, ROWS, S), least=0.05)
    rng = np.random.default_rng(seed + 1)
    arrays["weight"] = rng.random((MICROBATCHES, ROWS, S)).astype(np.float32)
    arrays["importance"] = rng.random((MICROBATCHES, ROWS)).astype(np.float32)
    return arrays


def weighted(h_BSD, head_VD, rows):
    """Weighted cross-entropy, plus a term that only hidden states have. The count is no integer."""
    logits_BSV = jnp.einsum("BSD,VD->BSV", h_BSD, head_VD, preferred_element_type=jnp.float32)
    assert logits_BSV.shape[-1] == 258, "no padding"
    log_p_BSV = jax.nn.log_softmax(logits_BSV)
    loss_BS = -jnp.take_along_axis(log_p_BSV, rows["targets"][..., None], axis=-1)[..., 0]
    loss_BS += 0.01 * jnp.square(h_BSD.astype(jnp.float32)).mean(-1)
    weights_BS = jnp.where(rows["mask"], rows["weight"] * rows["importance"][:, None], 0.0)
    return (loss_BS * weights_BS).sum(), weights_BS.sum()


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(mesh, overrides, loss=weighted):
        sizes = dict(zip(AXES, mesh, strict=True))
        config = tiny_config(
            *(f"parallel.{axis}={size}" for axis, size in sizes.items()),
            f"train.global_batch_sequences={MICROBATCHES * ROWS}",
            f"train.microbatch_sequences={ROWS // (sizes['data'] * sizes['replica'])}",
            "model.vocab_size=258",
            "train.loss=given",
            *overrides,
        )
        return Run(config, batch, Given(loss=loss))

    return make


ONE = (1, 1, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def on_one_device(make_run):
    @cache
    def found(overrides):
        run = make_run(ONE, overrides)
        loss, gradients = run.gradients()
        return run, loss, run.plain(gradients)

    return found


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_equal_one_device(make_run, on_one_device, name):
    mesh, overrides = MESHES[name]
    _, one_loss, one_gradients = on_one_device(overrides)
    run = make_run(mesh, overrides, chunked(weighted, 8) if "chunks" in name else weighted)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, one_loss, rtol=1e-6)
    assert_close(run.plain(gradients), one_gradients, 2e-5)


def test_it_is_the_mean_of_its_definition(on_one_device):
    """Without microbatches, scaling and regions."""
    (run, loss, gradients), arrays = on_one_device(()), batch()
    whole = {name: jnp.asarray(array.reshape(-1, *array.shape[2:])) for name, array in arrays.items()}

    def mean(params):
        network: Llama = merge_model(run.config, params)
        total, count = weighted(network.hidden(whole["tokens"], whole["positions"]), network.head_matrix(), whole)
        return total / count

    with jax.set_mesh(run.mesh):
        expected, expected_gradients = jax.jit(jax.value_and_grad(mean))(run.state.params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(gradients, run.plain(expected_gradients), 2e-5)
