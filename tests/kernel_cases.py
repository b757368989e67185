"""Inputs of attention's blocks for tests, and the comparison of two kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.model.blockwise_attention import NOTHING, Partial, merge

B = 2


def kernel_inputs(heads, length=64, dtype=jnp.float32, head_size=8):
    """q, k, v and a cotangent of the output."""
    rng = np.random.default_rng(0)
    N, K = heads
    return [jnp.asarray(rng.normal(size=(B, length, n, head_size)), dtype) for n in (N, K, K, N)]


def documents(length=64, mean=10, seed=0):
    """Lengths as they fall: some of one token, some over many chunks, none where the others' borders are."""
    return jnp.asarray(np.cumsum(np.random.default_rng(seed).random((B, length)) < 1 / mean, axis=1), jnp.int32)


def compare_kernels(ours, theirs, q, k, v, cotangent, mask, tolerance=1e-5):
    """One block, its backward with an lse that is not its own, as where other blocks hold half of the probability."""

    @jax.jit
    def run(q, k, v, cotangent):
        forward, expected = ours.forward(q, k, v, mask), theirs.forward(q, k, v, mask)
        others = jnp.where(expected.lse_BSN == NOTHING, 0.0, expected.lse_BSN)
        o, lse = merge(expected, Partial(cotangent, others))
        return [
            (*first, *kernel.backward(q, k, v, o, lse, cotangent, mask))
            for kernel, first in ((ours, forward), (theirs, expected))
        ]

    for a, b in zip(*run(q, k, v, cotangent), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
