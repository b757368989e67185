"""Matmuls with weights that are not plain arrays: frozen ones, and those with LoRA's adapters (Hu et al., 2021).

    x W + scale (x A) B         A [in, rank], B [rank, out]; the scale is alpha / rank

Over tensor ranks A of a matmul whose result is split is replicated and B is split; where the input is split, A is split and B
replicated. x A, of `rank` numbers a token, is summed over ranks where x is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.config.model_spec import LORA_A, LORA_B
from jaxllm.model.fp8 import letters


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=[])
@dataclass(frozen=True)
class Frozen:
    """A matrix that is not trained, in the place of the matrix in a network. Only `multiply` can use it."""

    weight: jax.Array

    def __getitem__(self, key: Any) -> Frozen:
        """What the network reads of a parameter: all of it."""
        assert key is Ellipsis, key
        return self

    def astype(self, dtype: Any) -> Frozen:
        return Frozen(self.weight.astype(dtype))


class Adapted(NamedTuple):
    """A matrix with its adapter."""

    weight: jax.Array | Frozen
    a: jax.Array
    b: jax.Array
    scale: float


def without_adapter(module: nnx.Module, name: str, dtype: Any) -> jax.Array:
    """A matrix of `module` in `dtype` that has no adapter, for any use. One that is not trained gets no gradient."""
    weight = getattr(module, name)[...]
    weight = jax.lax.stop_gradient(weight.weight) if isinstance(weight, Frozen) else weight
    return weight.astype(dtype)


def lora_scale(model: ModelConfig) -> float:
    return 1.0 if model.lora is None else model.lora.scale


def matrix_of(module: nnx.Module, name: str, dtype: Any, scale: float) -> Any:
    """A matrix of `module` in `dtype`, with its adapter if it has one."""
    weight, a, b = (getattr(module, name + end, None) for end in ("", LORA_A, LORA_B))
    assert weight is not None, name
    if a is None or b is None:
        return weight[...].astype(dtype)
    return Adapted(weight[...].astype(dtype), a[...].astype(dtype), b[...].astype(dtype), scale)


def multiply(
    matmul: Callable[[str, jax.Array, jax.Array], jax.Array],
    constrain: Callable[[jax.Array], jax.Array],
    spec: str,
    x: jax.Array,
    weight: Any,
) -> jax.Array:
    """x times a weight: an array, Frozen or Adapted.

    Args:
      matmul: of two arrays.
      constrain: fixes the sharding of x A.
    """
    if isinstance(weight, Adapted):
        of_x, of_w, result = letters(spec)
        summed = "".join(letter for letter in of_w if letter in of_x)
        down_BSR = constrain(jnp.einsum(f"{of_x},{summed}R->BSR", x, weight.a))
        up = jnp.einsum(f"BSR,R{of_w.removeprefix(summed)}->{result}", down_BSR, weight.b)
        return multiply(matmul, constrain, spec, x, weight.weight) + up * jnp.asarray(weight.scale, up.dtype)
    return _frozen_matmul(matmul, spec, x, weight.weight) if isinstance(weight, Frozen) else matmul(spec, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _frozen_matmul(matmul: Any, spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(spec, x, w)


def _frozen_matmul_backward(matmul: Any, spec: str, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    of_x, of_w, result = letters(spec)
    if matmul is jnp.einsum:
        return matmul(f"{result},{of_w}->{of_x}", dy, w), None
    # FP8 rounds gradients in another way. Its formula makes both gradients, and XLA removes the one that nothing reads.
    sizes = dict(zip(result + of_w, dy.shape + w.shape, strict=True))
    x = jnp.zeros([sizes[letter] for letter in of_x], dy.dtype)
    return jax.vjp(lambda x: matmul(spec, x, w), x)[1](dy)[0], None


# x is not kept: without the weight's gradient nothing reads it.
_frozen_matmul.defvjp(lambda matmul, spec, x, w: (matmul(spec, x, w), w), _frozen_matmul_backward)
