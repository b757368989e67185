"""Compares cuDNN attention with the float32 reference, forward and backward. Needs an NVIDIA GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.mesh.axes import CONTEXT
from jaxllm.model.attention import xla_attention
from jaxllm.model.cudnn_attention import cudnn_kernel
from jaxllm.parallel.ring_attention import ring_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("N", "K", "H"), [(8, 8, 64), (8, 2, 128)])
def test_cudnn_equals_the_float32_reference(N, K, H):
    """Relative error of output and gradients is within the limits of bfloat16 inputs (eps 2^-8 = 0.4%)."""
    rng = np.random.default_rng(0)
    B, S = 2, 512
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=(B, S, heads, H)), jnp.bfloat16) for heads in (N, K, K, N))

    def run(attend, dtype):
        inputs = [x.astype(dtype) for x in (q, k, v)]
        out, vjp = jax.vjp(attend, *inputs)
        return [np.asarray(x, np.float32) for x in (out, *vjp(cotangent.astype(dtype)))]

    with jax.default_matmul_precision("highest"):
        expected = run(xla_attention, jnp.float32)
    cudnn = ring_attention(cudnn_kernel(), CONTEXT, 1)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), run(cudnn, jnp.bfloat16), expected, strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 0.01, f"{name}: {error}"
