"""Matmuls of a block in FP8 (Micikevicius et al., 2022, "FP8 formats for deep learning"): `model.matmul_dtype=fp8`.

    ops = Ops(matmul=fp8_matmul)
    y_BSF = ops.matmul("BSD,DF->BSF", x_BSD, w_DF)

Inputs and weights are rounded to E4M3 (4 bits of exponent, 3 of mantissa, up to 448), gradients of outputs to E5M2 (up to
57,344). Each array has one scale. Products are summed in float32. All three matmuls are FP8: forward, gradient of the input,
gradient of the weight.

Scaling is current: an array's scale comes from its own largest magnitude. So there is no state, no history that a jump in the
gradients outruns, and nothing for checkpoints, accumulation, a pipeline's ring or DiLoCo to carry. The price is a pass over the
array before it is rounded. Scales are powers of two, so that FP8 changes values by rounding alone. That costs no precision,
only up to a bit of range, and a block's tensors need little range.

A product is written in the pattern of which XLA makes one call of cuBLASLt (`__cublas$lt$matmul$f8`), with Triton disabled: the
FP8 arrays are cast back, scaled and multiplied. The call scales, and adds what the product is added to. Slower patterns:
benchmarks/RESULTS.md, "FP8, by kernel account".

Every rank of a mesh scales its own parts (parallel/kernels.py), so that no maximum is sent. Losses on two meshes therefore
differ by FP8's rounding, not by float32's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config.types import FP8_ROUNDING
from jaxllm.private_jax import in_row_major

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST_SCALE = 2.0**100
"""Near 2^127 a scale's inverse would leave float32. Arrays whose largest number is below 448 / 2^100 lose digits."""
EXPONENT_BITS = 0x7F800000
"""The exponent bits of a float32."""


@partial(jax.tree_util.register_dataclass, data_fields=["array", "turned", "inverse"], meta_fields=[])
@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix in FP8, in the place of the matrix in a network where it is rounded once for all microbatches of a step.

    Hopper's FP8 matmuls read both operands along the dims that they sum over. So it is there twice, which takes the bytes of
    one in bfloat16: `array` as the matrix was, for gradients of inputs; `turned` with its inputs last, for the forward pass.
    """

    array: jax.Array
    turned: jax.Array
    inverse: jax.Array
    """The scale's."""

    @classmethod
    def of(cls, w: jax.Array, inputs: int) -> RoundedMatrix:
        """`inputs`: how many of the first dims the forward pass sums over."""
        array, inverse = _rounded(w, FORWARD)
        return cls(array, jnp.moveaxis(array, range(inputs), range(-inputs, 0)), inverse)

    def astype(self, dtype: Any) -> RoundedMatrix:
        """Itself: products have the dtype of the activations."""
        return self


def product(spec: str, x: jax.Array, w: jax.Array | RoundedMatrix) -> jax.Array:
    """An einsum of two arrays of one dtype, on one device. The result has that dtype.

    `spec` is for jnp.einsum, as in "BSD,DNH->BSNH". Every letter is in exactly two of the three, so that the gradients are
    einsums too. The first dims of w are those that are summed over.
    """
    of_x, of_w, result = letters(spec)
    outputs = of_w.lstrip(of_x)
    w = w if isinstance(w, RoundedMatrix) else RoundedMatrix.of(w, len(of_w) - len(outputs))
    spec = f"{of_x},{outputs}{of_w.removesuffix(outputs)}->{result}"
    return _multiply(spec, _rounded(x, FORWARD), (w.turned, w.inverse), x.dtype)


def gradients(spec: str, x: jax.Array, w: jax.Array | RoundedMatrix, dy: jax.Array, dtype: Any = None) -> Any:
    """Gradients (dx, dw), from the gradient dy of the result. dw has `dtype`, or x's.

    HIGHEST turns cuBLASLt's fast accumulation off, as Flax's FP8 and Transformer Engine do for gradients. On Hopper fast
    accumulation keeps some 14 bits of a running sum.
    """
    of_x, of_w, result = letters(spec)
    x8, dy8, high = _rounded(x, FORWARD), _rounded(dy, GRADIENT), jax.lax.Precision.HIGHEST
    w8 = (w.array, w.inverse) if isinstance(w, RoundedMatrix) else _rounded(w, FORWARD)
    dx = _multiply(f"{result},{of_w}->{of_x}", dy8, w8, x.dtype, high)
    # With their tokens last. One kernel rounds and writes both layouts.
    x_last, dy_last = ("".join(sorted(part, key=lambda letter: letter not in of_w)) for part in (of_x, result))
    with jax.named_scope(FP8_ROUNDING):
        x8, dy8 = (
            (array.transpose([part.index(letter) for letter in last]), inverse)
            for (array, inverse), part, last in ((x8, of_x, x_last), (dy8, result, dy_last))
        )
    return dx, _multiply(f"{x_last},{dy_last}->{of_w}", x8, dy8, dtype or x.dtype, high)


fp8_matmul = jax.custom_vjp(product, nondiff_argnums=(0,))
"""`product` with its gradients. For arrays split over tensor: parallel/kernels.py."""
# x and w are kept unrounded, as for a bfloat16 matmul: x is a named tensor or follows from one, and the backward pass has w. A
# rounded w among the residuals would fill every slot of a pipeline's ring.
fp8_matmul.defvjp(
    lambda spec, x, w: (product(spec, x, w), (x, w)), lambda spec, kept, dy: gradients(spec, kept[0], kept[1], dy)
)


def letters(spec: str) -> tuple[str, str, str]:
    """The letters of the two inputs and of the result."""
    inputs, result = spec.split("->")
    of_x, of_w = inputs.split(",")
    return of_x, of_w, result


@jax.named_scope(FP8_ROUNDING)
def _rounded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(x times a scale in an FP8 dtype, the inverse of that scale: a power of two, float32).

    If one number is not finite, the inverse is NaN, and so is the whole product, whether or not a kernel's rounding saturates.
    The step is then skipped.
    """
    # In another layout XLA would transpose in kernels of their own, and whole stacks of weights in each microbatch.
    x = in_row_major(x)
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)))
    room = jnp.minimum(float(jnp.finfo(dtype).max) / jnp.where(largest == 0, 1.0, largest), LARGEST_SCALE)
    # The exponent bits alone are the value rounded down to a power of two. exp2 and log2 are not exact on all devices.
    bits = jax.lax.bitcast_convert_type(room, jnp.int32) & EXPONENT_BITS
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return in_row_major((x.astype(jnp.float32) * scale).astype(dtype)), jnp.where(jnp.isfinite(largest), 1.0 / scale, jnp.nan)


def _multiply(spec: str, x: tuple[jax.Array, ...], w: tuple[jax.Array, ...], dtype: Any, precision: Any = None) -> jax.Array:
    # Without the barrier XLA would take the casts to and from FP8 together, and multiply bfloat16. No digit is lost in it: an
    # FP8 number has 4, and an inverse is a power of two.
    with jax.named_scope(FP8_ROUNDING):
        arrays = jax.lax.optimization_barrier((in_row_major(x[0]), in_row_major(w[0])))
    scaled = [a.astype(jnp.bfloat16) * inverse.astype(jnp.bfloat16) for a, inverse in zip(arrays, (x[1], w[1]), strict=True)]
    return jnp.einsum(spec, *scaled, precision=precision, preferred_element_type=dtype)
