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

The API is public: `lax.dot_general` takes FP8 arrays, and XLA makes the multiplication by the inverse scales the matmul's
epilogue. XLA times Triton's kernel and cuBLASLt's (`__cublas$lt$matmul$f8`) and takes the faster one; with Triton disabled it
takes cuBLASLt for all three. Patterns that are slower: benchmarks/RESULTS.md,
"FP8, by kernel account".

Every rank of a mesh scales its own parts (parallel/kernels.py), so that no maximum is sent. Losses on two meshes therefore
differ by FP8's rounding, not by float32's.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config.types import FP8_ROUNDING

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST_SCALE = 2.0**100
"""Near 2^127 a scale's inverse would leave float32. Arrays whose largest number is below 448 / 2^100 lose digits."""
EXPONENT_BITS = 0x7F800000
"""The exponent bits of a float32."""


def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """An einsum of two arrays of one dtype, on one device. The result has that dtype.

    `spec` is for jnp.einsum, as in "BSD,DNH->BSNH". Every letter is in exactly two of the three, so that the gradients are
    einsums too.
    """
    return _multiply(spec, *_rounded(x, FORWARD), *_rounded(w, FORWARD), x.dtype)


def gradients(spec: str, x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients (dx, dw), from the gradient dy of the result.

    HIGHEST turns cuBLASLt's fast accumulation off, as Flax's FP8 and Transformer Engine do for gradients. On Hopper fast
    accumulation keeps some 14 bits of a running sum.
    """
    of_x, of_w, result = letters(spec)
    rounded = _rounded(dy, GRADIENT)
    dx = _multiply(f"{result},{of_w}->{of_x}", *rounded, *_rounded(w, FORWARD), x.dtype, jax.lax.Precision.HIGHEST)
    dw = _multiply(f"{of_x},{result}->{of_w}", *_rounded(x, FORWARD), *rounded, w.dtype, jax.lax.Precision.HIGHEST)
    return dx, dw


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
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)))
    room = jnp.minimum(float(jnp.finfo(dtype).max) / jnp.where(largest == 0, 1.0, largest), LARGEST_SCALE)
    # The exponent bits alone are the value rounded down to a power of two. exp2 and log2 are not exact on all devices.
    bits = jax.lax.bitcast_convert_type(room, jnp.int32) & EXPONENT_BITS
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return (x.astype(jnp.float32) * scale).astype(dtype), jnp.where(jnp.isfinite(largest), 1.0 / scale, jnp.nan)


def _multiply(
    spec: str, x: jax.Array, from_x: jax.Array, w: jax.Array, from_w: jax.Array, dtype: Any, precision: Any = None
) -> jax.Array:
    # The matmul's result has `dtype`, or cuBLASLt would write float32 for another kernel to read. Multiplying by a power of two
    # afterwards changes no digit. One inverse at a time: their product may leave float32.
    y = jnp.einsum(spec, x, w, precision=precision, preferred_element_type=dtype)
    return y * from_x.astype(dtype) * from_w.astype(dtype)
