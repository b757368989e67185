"""Precision on NVIDIA GPUs: FP8 rounding by the hardware, and two deterministic runs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import outside
import pytest
from run_files import steps_of

from jaxllm.config import config_folder
from jaxllm.config.attention import FIRST_WITH
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.model.fp8 import fp8_matmul

pytestmark = pytest.mark.gpu
STEPS = 20


def rounded(x, dtype):
    scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()))
    return (x * scale).astype(dtype).astype(np.float32) / scale


def test_fp8_products_and_gradients_are_those_of_the_definition():
    """Errors are within bfloat16's last bits, plus the loss of Hopper's accumulation in the forward pass."""
    capability = compute_capability(jax.devices()[0])
    if capability is None or capability < FIRST_WITH["fp8"]:
        pytest.skip(f"compute capability {capability} has no FP8")
    rng = np.random.default_rng(0)
    spec, (B, S, D, F) = "BSD,DF->BSF", (2, 512, 1024, 2048)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((B, S, D), (D, F), (B, S, F)))

    def all_three(x, w, dy):
        y, pullback = jax.vjp(lambda x, w: fp8_matmul(spec, x, w), x, w)
        return y, *pullback(dy)

    y, dx, dw = jax.jit(all_three)(x, w, dy)
    x8, w8 = (rounded(np.asarray(a, np.float32), ml_dtypes.float8_e4m3fn) for a in (x, w))
    dy8 = rounded(np.asarray(dy, np.float32), ml_dtypes.float8_e5m2)
    expected = (np.einsum(spec, x8, w8), np.einsum("BSF,DF->BSD", dy8, w8), np.einsum("BSD,BSF->DF", x8, dy8))
    for name, found, wanted in zip(("y", "dx", "dw"), (y, dx, dw), expected, strict=True):
        error = np.linalg.norm(np.asarray(found, np.float32) - wanted) / np.linalg.norm(wanted)
        assert error < 0.01, f"{name}: {error}"


def test_two_deterministic_runs_have_the_same_bits(tmp_path):
    """Runs in new processes, because the flag is set before JAX starts."""
    short = (f"train.steps={STEPS}", "train.eval_every_steps=null", "log.sample_tokens=0", "log.baselines=false")
    chosen = ("run.deterministic=true", "model.compute_dtype=bfloat16", *short)
    losses = []
    for name in ("one", "two"):
        recipe = str(config_folder() / "quickstart.yaml")
        command = [sys.executable, "-m", "jaxllm.cli", "train", recipe, *chosen, f"run.dir={tmp_path / name}"]
        # This process holds most of the GPU's memory.
        room = outside.environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")
        subprocess.run(command, env=room, check=True, capture_output=True, timeout=600)
        losses.append([(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(tmp_path / name)])
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
