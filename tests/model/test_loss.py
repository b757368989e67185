"""The chunked loss equals the plain one, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.model.loss import cross_entropy

B, S, D, V, ROWS = 2, 10, 8, 13, 16


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(B, S, D)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (B, S)) / 7, jnp.float32)
    return h, head, targets, weights


def plain(h, head, targets, weights, z=0.0):
    log_p = jax.nn.log_softmax((h @ head.T)[..., :V])
    log_z = jax.nn.logsumexp((h @ head.T)[..., :V], axis=-1)
    loss = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return jnp.sum(weights * (loss + z * log_z**2)), jnp.sum(weights * loss)


@pytest.mark.parametrize("z", [0.0, 0.1])
@pytest.mark.parametrize("chunk_tokens", [1, 6, 8, 1000])
def test_equals_the_plain_loss(inputs, chunk_tokens, z):
    """Chunks of 1, 3 (one short), 4 (one short) and all positions. Rows past the vocabulary get no probability."""
    h, head, targets, weights = inputs

    def ours(h, head):
        return cross_entropy(h, head, targets, weights, V, chunk_tokens, z)

    (objective, loss), gradients = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(h, head)
    (expected, plain_loss), expected_gradients = jax.value_and_grad(
        lambda h, head: plain(h, head, targets, weights, z), argnums=(0, 1), has_aux=True
    )(h, head)
    np.testing.assert_allclose((objective, loss), (expected, plain_loss), rtol=1e-6)
    np.testing.assert_allclose(ours(h, head), (expected, plain_loss), rtol=1e-6)
    for ours_, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours_, theirs, atol=1e-6)
    assert (gradients[1][V:] == 0).all()


def test_a_masked_target_has_no_gradient(inputs):
    h, head, targets, weights = inputs
    dh = jax.grad(lambda h: cross_entropy(h, head, targets, weights, V, 4, 0.0)[0])(h)
    masked = np.asarray(weights) == 0
    assert (np.asarray(dh)[masked] == 0).all()
    assert (np.abs(np.asarray(dh)[~masked]).max(-1) > 0).all()


def test_the_logits_of_a_batch_never_exist():
    """No value in the program, forward or backward, is as large as all logits."""
    big, vocab = 512, 1024
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((1, big, D), jnp.bfloat16), ((vocab, D), jnp.bfloat16))]
    ints, floats = jax.ShapeDtypeStruct((1, big), jnp.int32), jax.ShapeDtypeStruct((1, big), jnp.float32)

    def objective(h, head, targets, weights):
        return cross_entropy(h, head, targets, weights, vocab, 64, 0.0)[0]

    compiled = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(*shapes, ints, floats).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < big * vocab * 4 / 2
