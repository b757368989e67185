"""Networks beside Llama on every kind of mesh: loss and gradients equal one device's.

Each of these models has what several networks have, so that few meshes hold all of it to one device.
tests/model/test_reference.py compares each network with transformers.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import assert_close, run_of_one_batch

from jaxllm.model import layers
from jaxllm.parallel.parameters import merge_model

ROWS, S = 24, 16
NETWORK = ("model.head_dim=16", "model.num_layers=3", "model.vocab_size=258")
# Without a norm of their input, values would differ less between tokens than biases are large, and attention have no gradient.
OLMO2 = ("model.qk_norm=width", "model.block_norms=after", "model.initializer_std=0.2")
NETWORKS = {
    "gqa": ("model.num_kv_heads=2", "model.qkv_bias=true", "model.qk_norm=head", "model.block_norms=both"),
    "gqa-width": ("model.num_kv_heads=2", "model.no_rope_every=2", *OLMO2),
    "mqa-tied": ("model.num_kv_heads=1", "model.qkv_bias=true", "model.tie_embeddings=true", *OLMO2),
}
CASES = [
    # data, context, tensor, pipe; ZeRO; microbatches
    ((8, 1, 1, 1), 0, 1, "gqa", "parallel.remat=selective"),
    ((4, 1, 2, 1), 1, 2, "mqa-tied", "parallel.remat=none"),
    # Stored matrices that end with zeros, and gradients that are sent once.
    ((3, 1, 1, 1), 1, 1, "gqa-width", "model.scan_layers=false"),
    ((2, 1, 4, 1), 3, 2, "gqa-width", "parallel.remat=full"),
    ((1, 2, 2, 1), 2, 2, "gqa-width", "parallel.remat=offload"),
    ((2, 2, 1, 1), 3, 1, "mqa-tied", "parallel.context_method=all_gather"),
    ((2, 1, 4, 1), 1, 1, "mqa-tied", "parallel.tensor_ring=true"),
    ((1, 1, 2, 2), 1, 4, "gqa", "parallel.remat=full"),
    ((2, 1, 1, 2), 3, 2, "mqa-tied", "parallel.schedule=gpipe"),
    ((1, 2, 1, 2), 2, 2, "gqa", "parallel.remat=selective"),
    ((2, 1, 1, 2), 1, 2, "gqa-width", "model.num_layers=4 parallel.schedule=interleaved parallel.virtual_stages=2"),
    # Own arrays, a first and a last microbatch. With documents it would not send once (layer_stack.sends_once).
    pytest.param((4, 1, 1, 1), 1, 2, "mqa-tied", "model.scan_layers=false data.mask_documents=false", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def random_vectors(monkeypatch):
    """Norms start at 1 and biases at 0, where much would go unnoticed."""
    plain = layers.parameter

    def parameter(rngs, model, spec, zero_rows=0):
        made = plain(rngs, model, spec, zero_rows)
        if spec.is_matrix:
            return made
        noise = 0.3 * jax.random.normal(jax.random.key(sum(map(ord, spec.path))), spec.shape, jnp.float32)
        return type(made)(made[...] + noise, **made.get_metadata())

    monkeypatch.setattr(layers, "parameter", parameter)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    """Makes runs whose microbatches, however many, share one batch of ROWS sequences."""

    def make(mesh, network, *more, zero=0, microbatches=1):
        of_model = partial(tiny_config, *NETWORK, *NETWORKS[network])
        return run_of_one_batch(of_model, (ROWS, S), mesh, *more, zero=zero, microbatches=microbatches)

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    @functools.cache
    def gradients(network, *of_model):
        run = make_run((1, 1, 1, 1), network, *of_model)
        loss, found = run.gradients()
        return loss, run.plain(found)

    return gradients


@pytest.mark.parametrize(("mesh", "zero", "microbatches", "network", "more"), CASES, ids=str)
def test_loss_and_gradients_equal_one_device(make_run, one_device, mesh, zero, microbatches, network, more):
    run = make_run(mesh, network, *more.split(), zero=zero, microbatches=microbatches)
    drawn = run.state.params["layers"]
    norms = drawn["attention"]["query_norm"], drawn["attention_post_norm"]
    vectors = [norm["scale"] - 1 for norm in norms] + [x for name, x in drawn["attention"].items() if name == "key_bias"]
    assert all(jnp.abs(vector).max() > 0.3 for vector in vectors)
    loss, gradients = run.gradients()
    expected = one_device(network, *(key for key in more.split() if "num_layers" in key))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    # Of a key bias's gradient little is left: without the rotation, softmax would not see the bias.
    assert_close(run.plain(gradients), expected[1], 1e-5)


@pytest.fixture
def own_losses(monkeypatch):
    """Blocks with a loss of their own, as routers have: the square of what they return."""
    plain = layers.Block.__call__

    def call(self, h_BSD, *others):
        h_BSD, losses = plain(self, h_BSD, *others)
        return h_BSD, losses | {"square": 0.05 * jnp.sum(jnp.square(h_BSD.astype(jnp.float32)))}

    monkeypatch.setattr(layers.Block, "__call__", call)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == 4 else pytest.mark.slow, id=str(CASES[case][0])) for case in (1, 2, 4, 7, 9)],
)
def test_losses_of_blocks_have_gradients(make_run, own_losses, case):
    """In a loop and with arrays of their own, sent once, on the host, in pipelines with an identity layer."""
    mesh, zero, microbatches, network, more = CASES[case]
    run, one = make_run(mesh, network, *more.split(), zero=zero, microbatches=microbatches), make_run((1, 1, 1, 1), network)
    rows = {name: jnp.asarray(x[0]) for name, x in one.batch(0).items()}

    def objective(params):
        own, model = [], merge_model(one.config, params)

        def run_layers(block, layers, h_BSD, block_context):
            for number in range(one.config.model.num_layers):
                layer = jax.tree.map(lambda x, n=number: x[n], layers)
                h_BSD, losses = block(layer, h_BSD, block_context.of_layer(number))
                own.append(losses["square"])
            return h_BSD

        h_BSD = model.hidden(*(rows.get(name) for name in ("tokens", "positions", "segments")), run_layers=run_layers)
        log_p = jax.nn.log_softmax(jnp.einsum("BSD,VD->BSV", h_BSD, model.head_matrix())[..., : one.config.model.vocab_size])
        loss_BS = -jnp.take_along_axis(log_p, rows["targets"][..., None], axis=-1)[..., 0]
        of_targets = jnp.sum(jnp.where(rows["mask"], loss_BS, 0.0)) / rows["mask"].sum().astype(jnp.float32)
        return of_targets + sum(own) / rows["tokens"].size

    expected = one.plain(jax.jit(jax.grad(objective))(one.state.params))
    assert_close(one.plain(one.gradients()[1]), expected, 1e-5)
    assert_close(run.plain(run.gradients()[1]), expected, 1e-5)


def test_the_noise_scale_has_the_same_gradients(make_run, one_device):
    run = make_run((2, 2, 2, 1), "gqa", "log.noise_scale_every=1", zero=3, microbatches=2)
    with jax.set_mesh(run.mesh):
        loss, gradients, parts = jax.jit(run.functions.value_grad_and_parts)(run.state.params, run.place(run.batch(0)))
    np.testing.assert_allclose(loss, one_device("gqa")[0], rtol=1e-6)
    assert_close(run.plain(gradients), one_device("gqa")[1], 1e-5)
    one = make_run((1, 1, 1, 1), "gqa", "log.noise_scale_every=1", "train.microbatch_sequences=6")
    one.batch = lambda seed: {name: x.reshape(4, -1, S) for name, x in run.batch(seed).items()}
    with jax.set_mesh(one.mesh):
        expected = jax.jit(one.functions.value_grad_and_parts)(one.state.params, one.place(one.batch(0)))[2]
    for found, value in zip(parts, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5)


def test_fp8_is_within_rounding_of_float32(make_run, one_device):
    run = make_run((2, 1, 2, 1), "gqa-width", "model.matmul_dtype=fp8", zero=3, microbatches=2)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, one_device("gqa-width")[0], rtol=2e-3)
    # Each layer's update is as large as a norm makes it, and the embedding's gradient has the rounding of all of them.
    assert_close(run.plain(gradients), one_device("gqa-width")[1], 0.4)
