"""Matmuls in a ring of tensor ranks equal plain matmuls, and steps with them equal one device's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import Run, assert_close, unequal_batch

from jaxllm.config import ConfigError
from jaxllm.config.layer_stack import RING_CHUNK_BYTES, rings_tensor
from jaxllm.cost_model.step_sizes import StepSizes
from jaxllm.mesh.axes import TENSOR
from jaxllm.parallel.tensor_ring import TensorRing

B, S, D, N, H, F = 2, 24, 8, 12, 2, 36
ROWS, POSITIONS = 8, 16
MODELS = {
    "untied": ("model.num_kv_heads=2", "model.vocab_size=258"),
    "tied": ("model.num_kv_heads=1", "model.tie_embeddings=true"),
}
CASES = [
    # Model, data ranks, microbatches, overrides.
    ("untied", 2, 4, ("parallel.tensor=4", "parallel.zero=1")),
    # One key-value head for two ranks.
    ("tied", 4, 4, ("parallel.tensor=2", "parallel.zero=3", "parallel.remat=full")),
    ("untied", 2, 4, ("parallel.tensor=2", "parallel.context=2", "parallel.zero=2", "parallel.remat=offload")),
    ("untied", 2, 4, ("parallel.tensor=2", "parallel.pipe=2", "parallel.remat=none")),
    ("tied", 1, 4, ("parallel.tensor=2", "parallel.pipe=2", "parallel.remat=selective")),
    # Sends each layer once.
    ("tied", 2, 1, ("parallel.tensor=4", "parallel.zero=1", "parallel.remat=selective")),
]


def array(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def attention_half(gather, scatter):
    def half(x_BSD, weights, out_NHD):
        q, k, v = gather(("BSD,DNH->BSNH", "BSD,DKH->BSKH", "BSD,DKH->BSKH"), x_BSD, weights, in_order=True)
        # Depends on the order of positions.
        repeats = q.shape[2] // k.shape[2]
        mixed = q * jnp.cumsum(jnp.repeat(k * v, repeats, axis=2), axis=1)
        return scatter("BSNH,NHD->BSD", mixed, out_NHD, in_order=True)

    return half


def feed_forward_half(gather, scatter):
    def half(x_BSD, weights, down_FD):
        gate, up = gather(("BSD,DF->BSF",) * 2, x_BSD, weights, in_order=False)
        return scatter("BSF,FD->BSD", jax.nn.silu(gate) * up, down_FD, in_order=False)

    return half


def plain_gather(specs, x, weights, in_order):
    return tuple(jnp.einsum(spec, x, w) for spec, w in zip(specs, weights, strict=True))


def plain_scatter(spec, y, w, in_order):
    return jnp.einsum(spec, y, w)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("half", "weights", "last"),
    [
        (attention_half, ((D, N, H), (D, 12, H), (D, 12, H)), (N, H, D)),
        # One key-value head, which every rank has.
        (attention_half, ((D, N, H), (D, 1, H), (D, 1, H)), (N, H, D)),
        # Narrower keys, which join the queries.
        (feed_forward_half, ((D, F), (D, F)), (F, D)),
        (feed_forward_half, ((D, 4 * F), (D, 4 * F)), (4 * F, D)),
    ],
    ids=["heads", "one key-value head", "feed-forward", "wide feed-forward"],
)
def test_a_half_and_its_gradients_equal_plain_matmuls(half, weights, last, ranks):
    mesh = jax.make_mesh((ranks,), (TENSOR,), devices=jax.devices()[:ranks], axis_types=(jax.sharding.AxisType.Auto,))
    ring = TensorRing(ranks, "NF" if weights[1][1] == 1 else "NFK")
    inputs = (array(0, B, S, D), tuple(array(n + 1, *shape) for n, shape in enumerate(weights)), array(9, *last))
    results = []
    for gather, scatter in ((ring.gather_matmul, ring.matmul_scatter), (plain_gather, plain_scatter)):

        def both(inputs, dy, run=half(gather, scatter)):
            y, vjp = jax.vjp(run, *inputs)
            return y, vjp(dy)

        with jax.set_mesh(mesh):
            results.append(jax.device_get(jax.jit(both)(inputs, array(10, B, S, D))))
    assert_close(*results, 1e-5)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(model, data, microbatches, *more):
        sizes = (f"train.sequence_length={POSITIONS}", "model.num_layers=3", f"parallel.data={data}")
        batch = (f"train.global_batch_sequences={ROWS * microbatches}", f"train.microbatch_sequences={ROWS // data}")
        config = tiny_config(*MODELS[model], *sizes, *batch, "optimizer.learning_rate=1e-2", *more)
        return Run(config, functools.partial(unequal_batch, shape=(microbatches, ROWS, POSITIONS), ends=1))

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    return functools.cache(lambda model, microbatches: make_run(model, 1, microbatches).gradients())


@pytest.mark.parametrize(
    ("model", "data", "microbatches", "more"), CASES, ids=lambda x: " ".join(x) if isinstance(x, tuple) else None
)
def test_loss_and_gradients_equal_one_device(make_run, one_device, model, data, microbatches, more):
    run, expected = make_run(model, data, microbatches, *more, "parallel.tensor_ring=true"), one_device(model, microbatches)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(run.plain(gradients), jax.device_get(expected[1]), 2e-6)


def test_a_ring_permutes_and_gathers_only_what_the_weights_gradients_read(make_run):
    """Two rings of t - 1 transfers in each half, forward and backward; the inputs of both halves are gathered once more."""

    def collectives(*more):
        run = make_run("untied", 1, 4, "parallel.tensor=4", "parallel.remat=selective", "model.scan_layers=true", *more)
        with jax.set_mesh(run.mesh):
            lowered = jax.jit(run.functions.value_and_grad).lower(run.state.params, run.place(run.batch(0)))
        text = lowered.as_text()
        return text.count("stablehlo.collective_permute"), text.count('"stablehlo.all_gather"')

    (plain_permutes, plain_gathers), (permutes, gathers) = collectives(), collectives("parallel.tensor_ring=true")
    assert (plain_permutes, permutes) == (0, 8 * 3)
    assert gathers - plain_gathers == 2


def test_chunks_from_8_mib_on_go_in_a_ring(tiny_config):
    def rings(*more):
        return rings_tensor(tiny_config("train.global_batch_sequences=8", *more).resolve(8))

    wide = ("model.hidden_size=4096", "model.compute_dtype=bfloat16", "parallel.tensor=4", "parallel.data=2")
    chunk = RING_CHUNK_BYTES // (2 * 4096)
    assert chunk == 1024
    assert rings(*wide, f"train.sequence_length={4 * chunk}", "train.microbatch_sequences=1")
    assert not rings(*wide, f"train.sequence_length={2 * chunk}", "train.microbatch_sequences=1")
    assert rings(*wide, f"train.sequence_length={2 * chunk}", "train.microbatch_sequences=2")
    large = (*wide, f"train.sequence_length={4 * chunk}", "train.microbatch_sequences=2")
    for off in ("parallel.remat=none", "model.matmul_dtype=fp8", "model.scan_layers=false", "parallel.tensor_ring=false"):
        assert not rings(*large, off)
    assert not rings("parallel.tensor=1", "parallel.tensor_ring=true", "train.microbatch_sequences=1")


def test_without_remat_a_ring_keeps_a_rank_s_share_of_the_inputs(tiny_config):
    """So does autodiff: the residual of a ring is its input, which the backward pass gathers again."""

    def kept(ring):
        more = ("parallel.tensor=4", "parallel.data=2", "parallel.remat=none", f"parallel.tensor_ring={ring}")
        return StepSizes(tiny_config("train.global_batch_sequences=8", *more).resolve(8)).kept

    gathered, shared = kept("false"), kept("true")
    inputs = {"attention_input", "mlp_input"}
    assert {name: size / 4 if name in inputs else size for name, size in gathered.items()} == shared


@pytest.mark.parametrize("unlike", ["model.matmul_dtype=fp8", "model.scan_layers=false"])
def test_what_cannot_be_cut_into_chunks_is_refused(tiny_config, unlike):
    sizes = (
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_heads=4",
        "model.num_kv_heads=4",
        "model.head_dim=16",
    )
    with pytest.raises(
        ConfigError, match=f"tensor_ring=true multiplies in chunks, which {unlike} does not: set tensor_ring=false"
    ):
        tiny_config(*sizes, "parallel.tensor=2", "parallel.tensor_ring=true", unlike)
