"""The kernels for grouped matmuls on Hopper: interpreted on a CPU, against jax.lax.ragged_dot and its gradients in float32, and
compiled for an H100.
"""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.compile.aot import can_compile_for_gpus, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.config import ConfigError
from jaxllm.model.experts import grouped_matmul
from jaxllm.model.grouped_matmul import ALIGNED, BAND, ROWS, hopper_grouped_matmul, row_tiles
from jaxllm.parallel.kernels import choose_grouped_matmul

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX does not interpret kernels for GPUs on a CPU"
)

R, E, D, F = 304, 6, 64, 256
"""Tiles of 64 and of 128 columns, and more steps than are in flight."""

SIZES = {
    "uneven": [3, 150, 21, 1, 70, 59],
    "first, middle and last empty": [0, 37, 0, 133, 134, 0],
    "one has all": [0, 0, 0, R, 0, 0],
    "full tiles": [128, 0, 128, 0, 48, 0],
    "one beyond full tiles": [129, 63, 65, 1, 1, 45],
    # Rows at the end that no expert has, as empty slots of buffers are (parallel/expert_parallel.py).
    "rows of none": [13, 0, 101, 1, 20, 0],
}


def products(matmul, x_RD, w_EDF, sizes_E, dy_RF):
    y_RF, transpose = jax.vjp(lambda x_RD, w_EDF: matmul(x_RD, w_EDF, sizes_E), x_RD, w_EDF)
    return y_RF, *transpose(dy_RF)


@functools.cache
def interpreted():
    """`products` of the kernels, traced and compiled once. What a kernel has not written is nan, and a race is an error."""
    shapes = [(R, D), (E, D, F), (E,), (R, F)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.int32 if shape == (E,) else jnp.bfloat16) for shape in shapes]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, on_race="raise")):
        traced = jax.jit(functools.partial(products, hopper_grouped_matmul)).trace(*inputs)
        return traced.lower().compile()


def no_numbers(x):
    return jnp.where(jnp.arange(x.shape[1])[None] % 2, jnp.nan, jnp.inf).astype(x.dtype)


def operands():
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in [(R, D), (E, D, F), (R, F)]]


@functools.cache
def answers(sizes):
    x_RD, w_EDF, dy_RF = operands()
    return interpreted()(x_RD, w_EDF, jnp.array(sizes, jnp.int32), dy_RF)


@needs_interpreter
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_and_gradients_equal_ragged_dot(sizes):
    x_RD, w_EDF, dy_RF = operands()
    sizes_E = jnp.array(sizes, jnp.int32)
    found = answers(tuple(sizes))
    expected = products(jax.lax.ragged_dot, *(x.astype(jnp.float32) for x in (x_RD, w_EDF)), sizes_E, dy_RF.astype(jnp.float32))
    rows = sum(sizes)
    for ours, theirs, written in zip(found, expected, (rows, rows, E), strict=True):
        assert ours.dtype == jnp.bfloat16
        ours, theirs = ours[:written], theirs[:written]
        # Rounded once: at most half a unit in the last place of bfloat16, and the order of the sum.
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=2**-8, atol=1e-4)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_an_expert_without_finite_rows_leaves_the_others_alone():
    """nan in every other column and inf in the rest."""
    sizes = SIZES["uneven"]
    (x_RD, w_EDF, dy_RF), sizes_E = operands(), jnp.array(sizes, jnp.int32)
    of_R, bad = np.repeat(np.arange(E), sizes), 2
    x_RD, dy_RF = (jnp.where(of_R[:, None] == bad, no_numbers(x), x) for x in (x_RD, dy_RF))
    found = interpreted()(x_RD, w_EDF, sizes_E, dy_RF)
    for ours, before, expert in zip(found, answers(tuple(sizes)), (of_R, of_R, np.arange(E)), strict=True):
        np.testing.assert_array_equal(ours[expert != bad], before[expert != bad])
        assert not jnp.isfinite(ours[expert == bad]).any()


def test_each_row_is_in_one_tile_of_its_expert():
    random, jitted = np.random.default_rng(0), jax.jit(row_tiles, static_argnums=1)
    for rows, experts in ((8, 1), (304, 6), (4096, 64)):
        for sparse in (0.1, 1.0):
            sizes = random.multinomial(rows, random.dirichlet(np.full(experts, sparse)))
            tiles = np.array(jitted(jnp.array(sizes, jnp.int32), rows))
            assert tiles.shape[1] % BAND == 0
            begins = np.cumsum(sizes) - sizes
            found = np.concatenate([np.arange(first + before, first + before + some) for _, first, before, some in tiles.T])
            of = np.concatenate([np.full(some, expert) for expert, _, _, some in tiles.T])
            np.testing.assert_array_equal(found, np.arange(rows))
            np.testing.assert_array_equal(of, np.repeat(np.arange(experts), sizes))
            assert (tiles[1] % ALIGNED == 0).all()
            assert (tiles[2] + tiles[3] <= ROWS).all()
            used = tiles[:, tiles[3] > 0]
            assert (used[1] >= begins[used[0]] // ALIGNED * ALIGNED).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "sentence"),
    [
        ((304, 96, 64), jnp.bfloat16, "the sides of a matrix must be multiples of 64, and they are 96 and 64"),
        ((304, 64, 96), jnp.bfloat16, "the sides of a matrix must be multiples of 64, and they are 64 and 96"),
        ((300, 64, 64), jnp.bfloat16, "the number of rows must be a multiple of 8, and it is 300"),
        ((304, 64, 64), jnp.float32, "they multiply bfloat16 or float16, not float32"),
    ],
)
def test_what_the_kernels_cannot_multiply_is_refused(shape, dtype, sentence):
    rows, d, f = shape
    inputs = [
        jax.ShapeDtypeStruct((rows, d), dtype),
        jax.ShapeDtypeStruct((2, d, f), dtype),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    ]
    with pytest.raises(ConfigError, match=re.escape(f"on Hopper GPUs cannot run: {sentence}.")):
        jax.eval_shape(hopper_grouped_matmul, *inputs)


def test_each_device_has_its_grouped_matmul(tiny_config):
    """The kernels on Hopper alone, in bfloat16; elsewhere XLA's, with which no step is trained on a GPU."""
    sizes = ("model.hidden_size=64", "model.num_experts=4", "model.experts_per_token=2", "model.compute_dtype=bfloat16")
    config, h100, a100 = (
        tiny_config(*sizes),
        SimpleNamespace(platform="cuda", device_kind="NVIDIA H100 80GB HBM3"),
        SimpleNamespace(platform="cuda", device_kind="NVIDIA A100-SXM4-80GB"),
    )
    assert choose_grouped_matmul(config, h100) is hopper_grouped_matmul
    assert choose_grouped_matmul(tiny_config(*sizes, "model.compute_dtype=float32"), h100) is grouped_matmul
    assert choose_grouped_matmul(config, a100) is choose_grouped_matmul(config, jax.devices()[0]) is grouped_matmul


@pytest.mark.slow
@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_compiled_for_an_h100_three_kernels_compute_all():
    """Qwen3-30B-A3B, with 8,192 tokens. The product of each row with each matrix would take 12 GiB."""
    (device,) = gpu_devices(hosts=1, gpus_per_host=1)
    rows, experts, d, f = 65536, 128, 2048, 768

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    inputs = of(rows, d), of(experts, d, f), of(experts, dtype=jnp.int32), of(rows, f)
    traced = jax.jit(functools.partial(products, hopper_grouped_matmul)).trace(*inputs)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    text = compiled.as_text()
    assert text.count(" custom-call(") == text.count('custom_call_target="mosaic_gpu') == 3
    assert " dot(" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    module = Module(text, {})
    assert module.flops(module.entry) == 3 * 2 * rows * d * f
