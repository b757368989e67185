"""FP8 matmuls: rounding with one power of two per array, E4M3 forward and E5M2 gradients; otherwise an ordinary matmul."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.cost_model.hardware import require_device_runs
from jaxllm.model import fp8

fp8_matmul = jax.jit(fp8.fp8_matmul, static_argnums=0)
SPECS = {
    "BSD,DNH->BSNH": ((2, 16, 32), (32, 4, 8)),
    "BSNH,NHD->BSD": ((2, 16, 4, 8), (4, 8, 32)),
    "BSD,DF->BSF": ((2, 16, 32), (32, 48)),
}


def arrays(spec):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in SPECS[spec])
    return x, 0.02 * w, rng.normal(size=np.einsum(spec, x, w).shape).astype(np.float32)


def rounded(x, dtype):
    """The rounding by NumPy, from its definition."""
    scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()))
    return (x * scale).astype(dtype).astype(np.float32) / scale


@pytest.mark.parametrize("spec", SPECS)
def test_inputs_are_rounded_and_sums_are_not(spec):
    x, w, dy = arrays(spec)
    y, vjp = jax.vjp(lambda x, w: fp8_matmul(spec, x, w), x, w)
    dx, dw = vjp(dy)
    inputs, result = spec.split("->")
    of_x, of_w = inputs.split(",")
    x8, w8, dy8 = rounded(x, ml_dtypes.float8_e4m3fn), rounded(w, ml_dtypes.float8_e4m3fn), rounded(dy, ml_dtypes.float8_e5m2)
    for found, expected in (
        (y, np.einsum(spec, x8, w8)),
        (dx, np.einsum(f"{result},{of_w}->{of_x}", dy8, w8)),
        (dw, np.einsum(f"{of_x},{result}->{of_w}", x8, dy8)),
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    # Rounding is visible: E4M3 has 3 bits of mantissa, so a product is off by some 2%.
    exact = np.einsum(spec, x, w)
    assert 1e-3 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.1


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e8, 1e30])
def test_gradients_of_any_size_are_as_exact(size):
    spec = "BSD,DF->BSF"
    x, w, dy = arrays(spec)
    _, vjp = jax.vjp(lambda x, w: fp8_matmul(spec, x, w), x, w)
    one, other = vjp(dy), vjp(np.float32(size) * dy)
    for a, b in zip(one, other, strict=True):
        assert np.linalg.norm(b / size - a) / np.linalg.norm(a) < 0.1


def test_bfloat16_stays_bfloat16():
    spec = "BSD,DF->BSF"
    x, w, dy = (jnp.asarray(x, jnp.bfloat16) for x in arrays(spec))
    y, vjp = jax.vjp(lambda x, w: fp8_matmul(spec, x, w), x, w)
    assert {a.dtype for a in (y, *vjp(dy))} == {jnp.dtype(jnp.bfloat16)}


def test_zeros_are_zeros_and_one_number_that_is_not_finite_is_told():
    x, w, _ = arrays("BSD,DF->BSF")
    assert (fp8_matmul("BSD,DF->BSF", 0 * x, w) == 0).all()
    for told in (np.inf, np.nan):
        x[0, 0, 0] = told
        assert np.isnan(fp8_matmul("BSD,DF->BSF", x, w)).all()


def test_chips_without_it_are_refused(tiny_config):
    def chip(capability, kind):
        return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)

    fp8 = tiny_config("model.matmul_dtype=fp8", "model.head_dim=16", "train.sequence_length=32").model
    require_device_runs(fp8, chip("8.9", "NVIDIA L40S"))
    require_device_runs(fp8, jax.devices()[0])
    a100 = "NVIDIA A100-SXM4-40GB"
    # A described GPU, without hardware, has only a name.
    for device in (chip("8.0", a100), SimpleNamespace(platform="cuda", device_kind=a100)):
        with pytest.raises(ConfigError, match=rf"8\.9\), and {a100} has 8\.0: set model\.matmul_dtype=compute_dtype"):
            require_device_runs(fp8, device)
    with pytest.raises(ConfigError, match=r"fp8 needs an NVIDIA GPU, and this is tpu: set model\.matmul_dtype=compute_dtype"):
        require_device_runs(fp8, SimpleNamespace(platform="tpu", device_kind="TPU v5e"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.hidden_size=40"], "and model.hidden_size is 40: make it a multiple of 16"),
        (["parallel.tensor=8", "model.num_heads=8"], "model.intermediate_size over parallel.tensor=8 is 8"),
        (
            ["parallel.tensor=4", "model.num_heads=8", "model.num_kv_heads=1", "model.head_dim=8"],
            "num_kv_heads x head_dim is 8",
        ),
        (["parallel.tensor=2"], "model.num_kv_heads x head_dim over parallel.tensor=2 is 8"),
        (["model.matmul_dtype=fp4"], "matmul_dtype"),
    ],
)
def test_dims_that_it_does_not_multiply_are_refused(tiny_config, overrides, sentence):
    with pytest.raises(ConfigError) as error:
        tiny_config("model.matmul_dtype=fp8", *overrides)
    assert sentence in str(error.value)
