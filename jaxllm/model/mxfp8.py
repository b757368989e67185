"""Matmuls of a block in MXFP8 (OCP Microscaling Formats, version 1.0): `model.matmul_dtype=mxfp8`, from Blackwell on.

As model/fp8.py, but each block of 32 numbers along the dim that is summed has a scale of its own, a power of two. So E4M3 is
wide enough for gradients too, and an outlier costs 32 numbers their small digits, not the array. The price: an array is rounded
once for each of the two matmuls that sum it along different dims.

The multiplication is public: jax.nn.scaled_matmul, which XLA gives to cuDNN on Blackwell (`__cudnn$blockScaledDot`; compiled
with JAX 0.10.2). jax.nn.scaled_dot_general would round too, but only with autodiff's own residuals. A CPU multiplies the
rounded numbers in float32, for tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config.types import FP8_ROUNDING
from jaxllm.model.fp8 import Formula, letters

BLOCK = 32
"""Numbers that share a scale."""
LARGEST = 448.0
"""The largest number of E4M3."""
NOT_FINITE = 255
"""The exponent that E8M0 has for nan."""


def mxfp8(on_gpu: bool) -> Formula:
    """(product, gradients) of an einsum of two arrays. Every letter of its spec is in exactly two of the three."""
    multiply = partial(_multiply, on_gpu)

    def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
        of_x, of_w, result = letters(spec)
        return multiply((of_x, of_w, result), x, w, x.dtype)

    def gradients(spec: str, x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_x, of_w, result = letters(spec)
        return multiply((result, of_w, of_x), dy, w, x.dtype), multiply((of_x, result, of_w), x, dy, w.dtype)

    return Formula(product, gradients)


def _multiply(on_gpu: bool, spec: tuple[str, str, str], a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """The einsum of a and b, both rounded in blocks along the letters that they share."""
    of_a, of_b, of_y = spec
    summed = "".join(letter for letter in of_a if letter in of_b)
    sizes = dict(zip(of_a + of_b, a.shape + b.shape, strict=True))
    rows = [("".join(letter for letter in of if letter not in summed), of, x) for of, x in ((of_a, a), (of_b, b))]
    K = int(np.prod([sizes[letter] for letter in summed]))
    (a_MK, a_scales), (b_NK, b_scales) = (_rounded(jnp.einsum(f"{of}->{own}{summed}", x).reshape(-1, K)) for own, of, x in rows)
    if on_gpu:
        operands = (x[None] for x in (a_MK, b_NK, a_scales, b_scales))
        y_MN = jax.nn.scaled_matmul(*operands, preferred_element_type=dtype)[0]
    else:
        y_MN = jnp.einsum("MK,NK->MN", _exact(a_MK, a_scales), _exact(b_NK, b_scales)).astype(dtype)
    found = "".join(own for own, _, _ in rows)
    return jnp.einsum(f"{found}->{of_y}", y_MN.reshape([sizes[letter] for letter in found]))


@jax.named_scope(FP8_ROUNDING)
def _rounded(x_MK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(E4M3 [M, K], E8M0 [M, K / 32]): the number is their product. With a number that is not finite a block's scale is nan."""
    M, K = x_MK.shape
    blocks = x_MK.astype(jnp.float32).reshape(M, K // BLOCK, BLOCK)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=-1) / LARGEST, jnp.uint32)
    # The next power of two from there on: its exponent, as float32 and E8M0 have it. The least is that of float32's normal
    # numbers: with 0 a number that is not divided exactly could be multiplied beyond E4M3.
    exponents = jnp.clip((bits >> 23) + ((bits & 0x7FFFFF) > 0).astype(jnp.uint32), 1, NOT_FINITE)
    # 2^(127 - e) has the exponent 254 - e.
    inverse = jax.lax.bitcast_convert_type((254 - jnp.minimum(exponents, 254)) << 23, jnp.float32)
    rounded = (blocks * inverse[..., None]).astype(jnp.float8_e4m3fn).reshape(M, K)
    return rounded, jax.lax.bitcast_convert_type(exponents.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _exact(x_MK: jax.Array, scales: jax.Array) -> jax.Array:
    return x_MK.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), BLOCK, axis=1)
