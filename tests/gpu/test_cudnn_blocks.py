"""Compares cuDNN's blocks, and a complete ring of them computed in turn, with the float32 xla kernel on one NVIDIA GPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.attention import HOPPER
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.model.attention import xla_attention
from jaxllm.model.blockwise_attention import NOTHING, Mask, Partial, merge, within_window, xla_kernel
from jaxllm.model.cudnn_attention import cudnn_kernel
from jaxllm.parallel.zigzag import blocks

pytestmark = pytest.mark.gpu

B = 2


def arrays(S, N, K, H):
    """Random bfloat16 arrays q, k, v and cotangent."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, S, heads, H)), jnp.bfloat16) for heads in (N, K, K, N)]


def documents(S, mean, seed=0):
    return jnp.asarray(np.cumsum(np.random.default_rng(seed).random((B, S)) < 1 / mean, axis=1), jnp.int32)


def assert_close(names, ours, theirs, tolerance=0.01):
    """All arrays are finite, with relative errors within the limits of bfloat16 (eps 2^-8 = 0.4%)."""
    for name, a, b in zip(names, ours, theirs, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(a).all(), name
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, f"{name}: {error}"


def run_block(kernel, dtype, arrays, mask, of_all):
    """(o, lse, dq, dk, dv). With `of_all`, another block's result, the backward gets the merged results."""
    q, k, v, cotangent = (x.astype(dtype) for x in arrays)

    @jax.jit
    def run(q, k, v, cotangent, of_all):
        own = kernel.forward(q, k, v, mask)
        o, lse = merge(own, of_all)
        return (*own, *kernel.backward(q, k, v, o, lse, cotangent, mask))

    with jax.default_matmul_precision("highest"):
        return run(q, k, v, cotangent, of_all)


@pytest.mark.parametrize(("N", "K", "H"), [(8, 8, 64), (8, 2, 128)])
@pytest.mark.parametrize("mean", [None, 30, 400])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 100), (False, 600), (False, 513), (False, 400)]
)
@pytest.mark.parametrize("most", [pytest.param(None, id="halves"), pytest.param(64, id="packed")])
def test_a_block_equals_the_float32_one(N, K, H, mean, causal, window, most):
    """With and without documents and windows, on and off the diagonal. The backward's lse is not the block's own."""
    if most and compute_capability(jax.devices()[0]) < HOPPER:
        pytest.skip("cuDNN packs documents from Hopper on")
    S = 512
    inputs = arrays(S, N, K, H)
    if mean is None:
        mask = Mask(causal)
    elif causal:
        mask = Mask(True, documents(S, mean), documents(S, mean))
    else:
        whole = documents(2 * S, mean)
        mask = Mask(False, whole[:, S:], whole[:, :S])
    mask = replace(mask, window=window, distance=0 if causal else S)
    others = Partial(inputs[3].astype(jnp.float32), jnp.full((B, S, N), 5.0))
    ours = run_block(within_window(cudnn_kernel(most)), jnp.bfloat16, inputs, mask, others)
    theirs = run_block(xla_kernel(), jnp.float32, inputs, mask, others)
    assert ours[1].dtype == jnp.float32
    # A bfloat16 log-sum-exp would be off by 0.02 here.
    np.testing.assert_allclose(ours[1], theirs[1], atol=5e-3)
    assert ((np.asarray(ours[1]) == np.float32(NOTHING)) == (np.asarray(theirs[1]) == np.float32(NOTHING))).all()
    assert_close(("o", "dq", "dk", "dv"), (ours[0], *ours[2:]), (theirs[0], *theirs[2:]))
    for a, b in zip((ours[0], *ours[2:]), (theirs[0], *theirs[2:]), strict=True):
        assert not np.asarray(a)[np.asarray(b) == 0].any()  # what nobody sees is exactly 0


def test_a_block_of_strangers_is_nothing():
    q, k, v, cotangent = arrays(256, 8, 2, 64)
    mask = Mask(False, documents(256, 30), documents(256, 30) + 1000)
    others = Partial(cotangent.astype(jnp.float32), jnp.zeros((B, 256, 8)))
    o, lse, *gradients = run_block(cudnn_kernel(), jnp.bfloat16, (q, k, v, cotangent), mask, others)
    assert (np.asarray(lse) == np.float32(NOTHING)).all()
    for x in (o, *gradients):
        assert not np.asarray(x, np.float32).any()  # nan counts as true


def play(kernel, c, q, k, v, cotangent, segments):
    """Computes all blocks of a ring of c, rank by rank and step by step: (output, dq, dk, dv), float32."""
    size = q.shape[1] // (2 * c)
    chunk = lambda x, i: None if x is None else x[:, i * size : (i + 1) * size]  # noqa: E731
    mask = lambda i, j: Mask(i == j, chunk(segments, i), chunk(segments, j))  # noqa: E731
    products = [product for steps in blocks(c) for step in steps for product in step]

    @jax.jit
    def run(q, k, v, cotangent):
        found = {}
        for i, j in products:
            block = kernel.forward(chunk(q, i), chunk(k, j), chunk(v, j), mask(i, j))
            found[i] = merge(found[i], block) if i in found else block
        o, lse = (jnp.concatenate([found[i][part] for i in range(2 * c)], axis=1) for part in (0, 1))
        sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        for i, j in products:
            of_queries = (chunk(x, i) for x in (o.astype(q.dtype), lse, cotangent))
            parts = kernel.backward(chunk(q, i), chunk(k, j), chunk(v, j), *of_queries, mask(i, j))
            sums = [
                total.at[:, at * size : (at + 1) * size].add(part)
                for total, at, part in zip(sums, (i, j, j), parts, strict=True)
            ]
        return o, *sums

    return run(q, k, v, cotangent)


@pytest.mark.parametrize(("N", "K", "H"), [(8, 8, 64), (8, 2, 128)])
@pytest.mark.parametrize("mean", [None, 30, 400])
def test_a_ring_of_blocks_is_attention_over_the_whole_sequence(N, K, H, mean):
    S = 2048
    inputs = arrays(S, N, K, H)
    segments = None if mean is None else documents(S, mean)
    ours = play(cudnn_kernel(), 4, *inputs, segments)
    q, k, v, cotangent = (x.astype(jnp.float32) for x in inputs)
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(jax.jit(lambda *x: xla_attention(*x, segments)), q, k, v)
        theirs = (out, *vjp(cotangent))
    assert_close(("out", "dq", "dk", "dv"), ours, theirs)
