"""Gradients that are added to float32 sums where they are made are autodiff's, in bfloat16 at least as near to float32's;
and on a GPU nothing is copied for them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import Run, assert_close, unequal_batch
from tiny import TINY

from jaxllm.compile.aot import can_compile_for_gpus
from jaxllm.compile.report import compile_report
from jaxllm.config import load_config
from jaxllm.config.attention import HOPPER
from jaxllm.config.layer_stack import MOST_IN_STAGE, MOST_UNROLLED, has_older_xla, has_own_layers
from jaxllm.cost_model.hardware import GPUS
from jaxllm.model import loss
from jaxllm.model.fp8 import RoundedMatrix, fp8_matmul, letters
from jaxllm.model.layers import Ops, look_up
from jaxllm.parallel import accumulate

rng = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize("spec", ["BSD,DNH->BSNH", "BSNH,NHD->BSD", "BSD,DF->BSF"])
def test_a_matmul_adds_its_gradient_in_float32(spec):
    """The product of bfloat16 arrays is not rounded before it is added; x's gradient is autodiff's."""
    sizes = dict(zip("BSDNHF", (2, 3, 8, 4, 5, 7), strict=True))
    of_x, of_w, result = ([sizes[letter] for letter in letters] for letters in spec.replace("->", ",").split(","))
    x, w, dy = (normal(*shape, dtype=jnp.bfloat16) for shape in (of_x, of_w, result))
    before = normal(*of_w)
    _, vjp = jax.vjp(lambda x, total: accumulate.matmul(spec, x, accumulate.Accumulating(w, total)), x, before)
    dx, total = vjp(dy)
    exact = jax.vjp(lambda w: jnp.einsum(spec, x.astype(jnp.float32), w), w.astype(jnp.float32))[1](dy.astype(jnp.float32))[0]
    np.testing.assert_allclose(total, before + exact, rtol=1e-6, atol=1e-6)
    assert (dx == jax.vjp(lambda x: jnp.einsum(spec, x, w), x)[1](dy)[0]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", ["BSD,DNH->BSNH", "BSNH,NHD->BSD", "BSD,DF->BSF"])
def test_a_matrix_that_is_rounded_once_gives_the_bits_of_one_that_is_rounded_each_time(spec, dtype):
    """But for its own gradient in bfloat16, which is added before it is rounded: that is float32's."""
    sizes = dict(zip("BSDNHF", (2, 3, 16, 4, 8, 32), strict=True))
    of_x, of_w, result = letters(spec)
    x, w, dy = (normal(*(sizes[letter] for letter in part), dtype=dtype) for part in (of_x, of_w, result))
    matrix, before = RoundedMatrix.of(w, sum(letter in of_x for letter in of_w)), normal(*w.shape)
    y, vjp = jax.vjp(lambda x, total: accumulate.matmul(spec, x, accumulate.Accumulating(matrix, total)), x, before)
    dx, total = vjp(dy)
    expected, its_vjp = jax.vjp(partial(fp8_matmul, spec), x, w)
    exact = jax.vjp(partial(fp8_matmul, spec), x.astype(jnp.float32), w.astype(jnp.float32))[1](dy.astype(jnp.float32))[1]
    for found, its in ((y, expected), (dx, its_vjp(dy)[0]), (total, before + exact)):
        assert found.dtype == its.dtype
        np.testing.assert_array_equal(found, its)


@pytest.mark.parametrize("is_head", [False, True])
def test_an_embedding_adds_rows_and_hands_its_sum_to_the_head(is_head):
    table, before, dh, from_head = normal(6, 4), normal(6, 4), normal(2, 3, 4), normal(6, 4)
    ids = jnp.array([[0, 5, 0], [0, 2, 5]])

    def objective(total):
        h, passed = accumulate.look_up(Ops(), 1, table, total, ids, is_head)
        # The head's use, by its cotangent alone: the sum that it was given and its own gradient.
        head = jnp.sum(_adds(passed, from_head)) if is_head else 0.0
        return jnp.sum(h * dh) + head

    mesh = jax.make_mesh((1, 1), ("pipe", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = jax.shard_map(jax.grad(objective), in_specs=jax.P(), out_specs=jax.P(), axis_names={"pipe"}, check_vma=False)
        total = jax.jit(run)(before)
    expected = jax.grad(lambda table: jnp.sum(look_up(table, ids) * dh))(table)
    np.testing.assert_allclose(total, before + expected + (from_head if is_head else 0), rtol=1e-5, atol=1e-6)


@jax.custom_vjp
def _adds(total, gradient):
    return jnp.zeros(())


_adds.defvjp(lambda total, gradient: (jnp.zeros(()), (total, gradient)), lambda kept, _: (kept[0] + kept[1], None))


def test_the_heads_gradient_is_added_in_the_forward_pass():
    h, head, before = normal(2, 6, 8), normal(10, 8), normal(10, 8)
    targets, weights = jnp.asarray(rng.integers(0, 9, (2, 6))), jnp.full((2, 6), 1 / 12, jnp.float32)
    options = (9, 4, 0.1)

    def ours(h, total):
        return loss.cross_entropy(h, head, targets, weights, *options, total)

    def theirs(h, head):
        return loss.cross_entropy(h, head, targets, weights, *options)

    (found, aux), (dh, total) = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(h, before)
    (expected, _), (dh_expected, dhead) = jax.value_and_grad(theirs, argnums=(0, 1), has_aux=True)(h, head)
    assert found == expected
    assert aux == theirs(h, head)[1]
    assert (dh == dh_expected).all()
    np.testing.assert_allclose(total, before + dhead, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ whole steps


@pytest.fixture(scope="module")
def gradients_of(module_tiny_config):
    kept = {}

    def run(dtype, scan, tied=False, microbatches=4):
        key = dtype, scan, tied, microbatches
        if key not in kept:
            overrides = (f"model.compute_dtype={dtype}", f"model.scan_layers={scan}", f"model.tie_embeddings={tied}")
            sizes = ("model.num_layers=3", "train.microbatch_sequences=2", f"train.global_batch_sequences={2 * microbatches}")
            config = module_tiny_config("parallel.data=1", *sizes, *overrides)
            one = Run(config, lambda seed: unequal_batch(seed, (microbatches, 2, 16), ends=1))
            kept[key] = jax.tree.map(np.asarray, one.gradients())
        return kept[key]

    return run


@pytest.fixture(scope="module")
def module_tiny_config():
    return lambda *overrides: load_config(TINY, [f"data.paths=[{__file__}]", *overrides])


@pytest.mark.parametrize("tied", [False, True])
def test_unrolled_layers_have_the_same_gradients(gradients_of, tied):
    (loss_a, a), (loss_b, b) = (gradients_of("float32", scan, tied) for scan in ("true", "false"))
    assert loss_a == loss_b
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), a, b)


def test_sums_of_float32_products_are_nearer_to_float32(gradients_of):
    """In bfloat16: a product that is not rounded before it is added is at least as near as one that is."""

    def distance(scan):
        half, exact = gradients_of("bfloat16", scan)[1]["layers"], gradients_of("float32", "true")[1]["layers"]
        squares = [np.sum((a - b) ** 2) / np.sum(b**2) for a, b in zip(*map(jax.tree.leaves, (half, exact)), strict=True)]
        return np.sqrt(np.mean(squares))

    assert distance("false") < distance("true")


@pytest.mark.parametrize("scan", ["true", "false"])
def test_a_single_microbatchs_gradients_follow_float32s(gradients_of, scan):
    """Nothing is added to them, so that layers' stay in bfloat16, within its rounding (2^-8 a product)."""
    found, exact = (gradients_of(dtype, scan, microbatches=1)[1] for dtype in ("bfloat16", "float32"))
    assert {g.dtype for g in jax.tree.leaves(found)} == {np.dtype("float32")}
    assert all((g == np.asarray(g, jnp.bfloat16)).all() for g in jax.tree.leaves(found["layers"]))
    assert_close(found, exact, 0.02)


# ------------------------------------------------------------------------------------------------------ which steps unroll


PIPELINE = ("parallel.pipe=2", "train.global_batch_sequences=8", "train.microbatch_sequences=4")
TWO = ("train.global_batch_sequences=8", "train.microbatch_sequences=1")
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2")
SINGLE = ("train.global_batch_sequences=8", "train.microbatch_sequences=8")


@pytest.mark.parametrize(
    ("overrides", "capability", "expected"),
    [
        ((), HOPPER, True),
        ((), None, False),
        (("model.scan_layers=true",), HOPPER, False),
        (("model.scan_layers=false",), None, True),
        (("parallel.data=4", "parallel.zero=1"), HOPPER, True),
        (("parallel.data=4", "parallel.zero=3", *TWO), HOPPER, not has_older_xla()),
        (("parallel.data=4", "parallel.zero=3", *TWO, "model.scan_layers=false"), HOPPER, True),
        (("parallel.data=4", "parallel.zero=3", *TWO, "parallel.remat=full"), HOPPER, False),
        (
            ("parallel.data=4", "parallel.zero=3", "train.global_batch_sequences=4", "train.microbatch_sequences=1"),
            HOPPER,
            False,
        ),
        (("parallel.data=4", "parallel.zero=3", *TWO, "model.matmul_dtype=fp8", "model.scan_layers=false"), HOPPER, False),
        (("parallel.data=4", "parallel.zero=2", *EXPERTS, "model.scan_layers=false"), HOPPER, False),
        (("parallel.zero=2",), HOPPER, True),
        (("parallel.remat=full",), HOPPER, False),
        (("parallel.remat=none",), HOPPER, True),
        (("parallel.remat={query: keep, mlp_gate: keep}",), HOPPER, False),
        (("parallel.remat=full", "model.scan_layers=false"), HOPPER, True),
        ((*SINGLE, "data.mask_documents=true"), HOPPER, True),
        ((*SINGLE, "data.mask_documents=true"), (8, 0), False),
        ((*SINGLE, "data.mask_documents=true", "model.attention=cudnn_halves"), HOPPER, False),
        (SINGLE, (8, 0), True),
        (("train.global_batch_sequences=8", "train.microbatch_sequences=4", "data.mask_documents=true"), (8, 0), True),
        (("parallel.tensor=2",), HOPPER, False),
        (("parallel.tensor=2", "model.scan_layers=false"), HOPPER, True),
        (("parallel.context=2",), HOPPER, False),
        (("parallel.pipe=2", "parallel.zero=1"), HOPPER, True),
        (("parallel.pipe=2", "parallel.data=2", "parallel.zero=2"), HOPPER, False),
        ((*PIPELINE, "parallel.schedule=interleaved", "parallel.virtual_stages=2", "model.num_layers=4"), HOPPER, False),
        ((*PIPELINE, "data.mask_documents=true"), HOPPER, True),
        ((*PIPELINE, "data.mask_documents=true"), (8, 0), False),
        ((*PIPELINE, "parallel.remat=none", "model.scan_layers=false"), HOPPER, False),
        ((*PIPELINE, f"model.num_layers={2 * MOST_IN_STAGE}"), HOPPER, True),
        ((*PIPELINE, f"model.num_layers={2 * MOST_IN_STAGE + 1}"), HOPPER, False),
        ((*PIPELINE, *EXPERTS, "model.scan_layers=false"), HOPPER, False),
        (("parallel.remat=offload", "model.scan_layers=false"), HOPPER, False),
        ((f"model.num_layers={MOST_UNROLLED}",), HOPPER, True),
        ((f"model.num_layers={MOST_UNROLLED + 1}",), HOPPER, False),
    ],
)
def test_layers_have_their_own_arrays_where_that_pays(tiny_config, overrides, capability, expected):
    config = tiny_config("parallel.data=1", "data.mask_documents=false", "model.compute_dtype=bfloat16", *overrides)
    assert has_own_layers(config.resolve(config.devices), capability) is expected


@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
@pytest.mark.parametrize(
    ("gpus", "parts", "moved_share", "memory", "overrides"),
    [
        (1, ("sums", "stacks", "slices", "zero_fills"), 0.35, 1.01, ()),
        (2, ("sums", "stacks", "slices"), 0.4, 1.02, ("parallel.zero=3", "train.global_batch_sequences=4")),
        # Residuals are copied into a ring either way. In so small a step the update, with gradients in both forms, is fullest.
        (2, ("sums", "slices"), 0.48, 1.08, ("parallel.pipe=2", "parallel.zero=1", "train.global_batch_sequences=16")),
    ],
    ids=["alone", "shards", "stages"],
)
def test_unrolled_layers_copy_little(gpus, parts, moved_share, memory, overrides):
    """Compiled for two microbatches on one H100 and on two with ZeRO 3, and for two stages and sixteen: layers in a loop read
    weights out of stacks, copy and add gradients; own layers leave that to their matmuls, in hardly more memory."""
    base = {
        "model": {"num_layers": 4, "hidden_size": 1024, "intermediate_size": 2816, "num_heads": 8, "vocab_size": 2048},
        "train": {
            **{"steps": 1, "sequence_length": 2048, "global_batch_sequences": 2, "microbatch_sequences": 1},
            "loss_chunk_tokens": 1024,
        },
        "data": {"mask_documents": False},
    }
    reports = {}
    for scan in ("false", "true"):
        config = load_config(base, [f"model.scan_layers={scan}", *overrides])
        reports[scan] = compile_report(config, GPUS["h100-80gb"], gpus)
    moved = {scan: sum(row.bytes for row in report.kernels.parts if row.part in parts) for scan, report in reports.items()}
    assert moved["false"] < moved_share * moved["true"]
    assert reports["false"].kernels.step_s < reports["true"].kernels.step_s
    assert reports["false"].total_bytes <= memory * reports["true"].total_bytes
    assert reports["false"].compiled_flops == reports["false"].executed_flops
