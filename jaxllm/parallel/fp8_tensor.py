"""FP8 matmuls (model/fp8.py, model/mxfp8.py) on a mesh: each tensor rank rounds and multiplies its own parts.

Left to XLA, a matmul over split heads would be summed over ranks before its scales are taken off. The multiplication between
the all-reduce and the slice behind it then keeps XLA from making one reduce-scatter of both. The largest magnitude of every
array would be a collective too. So each rank takes its scales off first, and partial sums leave the region with a leading rank
dim: outside, XLA sees a sum of parts, as without FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxllm.mesh import TENSOR
from jaxllm.model.fp8 import Formula, letters
from jaxllm.model.layers import Matmul
from jaxllm.sharding import split_spec, tensor_shard_map


def fp8_per_tensor_rank(formula: Formula, split: str) -> Matmul:
    """fp8.matmul_of for arrays with dims that are split over tensor.

    Args:
      split: the letters of these dims, in every spec that has them.
    """

    spec_of = partial(split_spec, split=split)

    def run(function: Callable[..., Sequence[jax.Array]], inputs: Sequence[str], results: Sequence[str], *arrays: Any):
        """Runs `function` on each rank's part. A result that lacks a split letter of the inputs is a partial sum."""
        multiplied = {letter for letters in inputs for letter in letters if letter in split}
        is_part = [not multiplied <= set(letters) for letters in results]

        def local(*arrays):
            return tuple(x[None] if part else x for x, part in zip(function(*arrays), is_part, strict=True))

        out_specs = tuple(P(TENSOR, *spec_of(x)) if part else spec_of(x) for x, part in zip(results, is_part, strict=True))
        found = tensor_shard_map(local, in_specs=tuple(map(spec_of, inputs)), out_specs=out_specs)(*arrays)
        # Summed in the parts' own dtype: with jnp.sum float32 would be sent.
        return tuple(jax.lax.reduce_sum(x, (0,)) if part else x for x, part in zip(found, is_part, strict=True))

    def forward(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
        of_x, of_w, result = letters(spec)
        return run(lambda x, w: (formula.product(spec, x, w),), (of_x, of_w), (result,), x, w)[0]

    def backward(spec: str, kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_x, of_w, result = letters(spec)
        # One region for both, so that dy is gathered and rounded once.
        dx, dw = run(lambda *arrays: formula.gradients(spec, *arrays), (of_x, of_w, result), (of_x, of_w), *kept, dy)
        return dx, dw

    matmul = jax.custom_vjp(forward, nondiff_argnums=(0,))
    matmul.defvjp(lambda spec, x, w: (forward(spec, x, w), (x, w)), backward)
    return matmul
