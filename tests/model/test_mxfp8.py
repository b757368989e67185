"""MXFP8 matmuls: a power of two for each 32 numbers along the dim that is summed; otherwise an ordinary matmul."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.model.fp8 import matmul_of
from jaxllm.model.mxfp8 import mxfp8

SPECS = {
    "BSD,DNH->BSNH": ((2, 32, 64), (64, 4, 8)),
    "BSNH,NHD->BSD": ((2, 32, 4, 8), (4, 8, 64)),
    "BSD,DF->BSF": ((2, 32, 64), (64, 96)),
}
MATMUL = matmul_of(mxfp8(on_gpu=False))


def arrays(spec):
    """Rows and columns of sizes that differ by many powers of two."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in SPECS[spec])
    x *= 2.0 ** rng.integers(-20, 20, size=(x.shape[0], x.shape[1], *[1] * (x.ndim - 2)))
    return x, 0.02 * w, rng.normal(size=np.einsum(spec, x, w).shape).astype(np.float32)


def rounded(x_MK):
    """The rounding by NumPy, from the definition: the smallest power of two by which no number is above 448."""
    blocks = x_MK.reshape(len(x_MK), -1, 32)
    scales = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=-1, keepdims=True) / 448))
    return ((blocks / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales).reshape(x_MK.shape)


def expected(spec, a, b):
    """The einsum of a and b, each rounded along what is summed."""
    of_a, of_b, of_y = spec.replace("->", ",").split(",")
    summed = [letter for letter in of_a if letter in of_b]

    def in_blocks(of, x):
        order = [of.index(letter) for letter in of if letter not in summed] + [of.index(letter) for letter in summed]
        moved = x.transpose(order)
        return (
            rounded(moved.reshape(-1, np.prod(moved.shape[len(of) - len(summed) :])))
            .reshape(moved.shape)
            .transpose(np.argsort(order))
        )

    return np.einsum(f"{of_a},{of_b}->{of_y}", in_blocks(of_a, a), in_blocks(of_b, b))


@pytest.mark.parametrize("spec", SPECS)
def test_each_matmul_rounds_in_blocks_along_what_it_sums(spec):
    x, w, dy = arrays(spec)
    y, vjp = jax.vjp(lambda x, w: MATMUL(spec, x, w), x, w)
    of_x, of_w, result = spec.replace("->", ",").split(",")
    wanted = (
        expected(spec, x, w),
        expected(f"{result},{of_w}->{of_x}", dy, w),
        expected(f"{of_x},{result}->{of_w}", x, dy),
    )
    for found, by_numpy in zip((y, *vjp(dy)), wanted, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, by_numpy, rtol=1e-4, atol=1e-6 * np.abs(by_numpy).max())


def test_rows_of_very_different_sizes_are_as_exact():
    """One scale for the array would leave the small rows nothing."""
    spec = "BSD,DF->BSF"
    x, w, _ = arrays(spec)
    exact, found = np.einsum(spec, x, w), MATMUL(spec, x, w)
    errors = np.linalg.norm(found - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert 1e-3 < errors.max() < 0.1


@pytest.mark.parametrize("size", [1e-38, 3e-36, 1e-30, 1e-8, 1e8, 1e30])
def test_numbers_of_any_size_are_finite_and_as_exact(size):
    """Below some 1e-35 float32's own least numbers end, and products become 0."""
    spec = "BSD,DF->BSF"
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in SPECS[spec])
    exact, found = np.einsum(spec, x, w), np.asarray(MATMUL(spec, np.float32(size) * x, w)) / size
    assert np.isfinite(found).all()
    assert size < 1e-35 or np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.1


def test_bfloat16_stays_bfloat16_and_zeros_are_zeros():
    spec = "BSD,DF->BSF"
    x, w, dy = (jnp.asarray(x, jnp.bfloat16) for x in arrays(spec))
    y, vjp = jax.vjp(lambda x, w: MATMUL(spec, x, w), x, w)
    assert {a.dtype for a in (y, *vjp(dy))} == {jnp.dtype(jnp.bfloat16)}
    assert (MATMUL(spec, 0 * x, w) == 0).all()


@pytest.mark.parametrize("told", [np.inf, np.nan])
def test_a_number_that_is_not_finite_is_told_where_it_is(told):
    x, w, _ = arrays("BSD,DF->BSF")
    x[0, 3, 0] = told
    found = np.asarray(MATMUL("BSD,DF->BSF", x, w))
    assert np.isnan(found[0, 3]).all()
    assert np.isfinite(np.delete(found[0], 3, axis=0)).all()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.hidden_size=48"],
            "mxfp8 multiplies 32 numbers at a time, and model.hidden_size is 48: make it a multiple of 32",
        ),
        (["train.sequence_length=48"], "mxfp8 multiplies 32 tokens at a time, and a sequence has 48 on a rank"),
        (["parallel.context=2"], "mxfp8 multiplies 32 tokens at a time, and a chunk of parallel.context=2 has 8"),
    ],
)
def test_what_has_no_whole_blocks_is_refused(tiny_config, overrides, sentence):
    with pytest.raises(ConfigError) as error:
        tiny_config("model.matmul_dtype=mxfp8", "model.num_kv_heads=4", "train.sequence_length=32", *overrides)
    assert sentence in str(error.value)
