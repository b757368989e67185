"""Gradients that are added to running sums where they are made.

An *accumulator* is an input of the forward pass whose value its results do not depend on: the sum of a weight's gradients so
far. Where the weight is used, a custom VJP returns that sum with the new gradient added as the accumulator's cotangent. So
jax.grad with respect to the accumulators gives the new sums, and no gradient exists beside its sum: on a GPU the matmul that
makes a gradient adds it, in float32 (beta = 1), and rows of an embedding are added in place. The head's are added in the
forward pass already, which has the logits.

    forward     weight ------------------> matmul                  accumulator (sum so far)    not read
    backward    weight <--- None           x, dy  --- x' dy + ---> cotangent of the accumulator (the new sum)

A cotangent is then no gradient, so two rules hold. The objective is differentiated with cotangent 1. And an accumulator is used
once: a weight with two uses hands it from one to the other (`look_up`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Config
from jaxllm.mesh.sharding import Parameter
from jaxllm.model import loss
from jaxllm.model.fp8 import RoundedMatrix, gradients, letters, product
from jaxllm.model.layers import Ops
from jaxllm.parallel.kernels import add_over_ranks
from jaxllm.parallel.types import Loss, Rows, Tree


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "sum"], meta_fields=[])
@dataclass(frozen=True)
class Accumulating:
    """A matrix and its accumulator, in the place of the matrix in a network. Only `matmul` can use it."""

    weight: Any
    """An array, or a RoundedMatrix."""
    sum: jax.Array

    def __getitem__(self, key: Any) -> Accumulating:
        """What the network reads of a parameter: all of it."""
        assert key is Ellipsis, key
        return self

    def astype(self, dtype: Any) -> Accumulating:
        return Accumulating(self.weight.astype(dtype), self.sum)


def _product(spec: str, adds: bool, x: jax.Array, w: jax.Array | RoundedMatrix, total: jax.Array) -> jax.Array:
    return product(spec, x, w) if isinstance(w, RoundedMatrix) else jnp.einsum(spec, x, w)


def _matmul_backward(spec: str, adds: bool, kept: tuple[Any, ...], dy: jax.Array):
    x, w, total = kept
    if isinstance(w, RoundedMatrix):
        dx, dw = gradients(spec, x, w, dy, total.dtype)
        return dx, None, total + dw
    of_x, of_w, result = letters(spec)
    dx = jnp.einsum(f"{result},{of_w}->{of_x}", dy, w)
    with jax.named_scope("gradient_sums"):
        # The order of the operands is that of autodiff, so that results are the same to the bit.
        dw = jnp.einsum(f"{result},{of_x}->{of_w}", dy, x, preferred_element_type=total.dtype)
        return dx, None, total + dw if adds else dw


_matmul = jax.custom_vjp(_product, nondiff_argnums=(0, 1))
_matmul.defvjp(lambda spec, adds, x, w, total: (_product(spec, adds, x, w, total), (x, w, total)), _matmul_backward)


def matmul(spec: str, x: jax.Array, w: Accumulating, adds: bool = True) -> jax.Array:
    """The einsum of two arrays of one dtype, as Ops.matmul. The gradient of w is added to its accumulator.

    Args:
      spec: every letter is in exactly two of the three, so that the gradients are einsums too.
      adds: if not, the gradient alone, in the accumulator's dtype, is the accumulator's cotangent.
    """
    return _matmul(spec, adds, x, w.weight, w.sum)


@jax.custom_vjp
def accumulated(weights: Tree, sums: Tree) -> Tree:
    """`weights`, for any use. Their gradients are made, and then added to the accumulators `sums`."""
    return weights


def _accumulated_backward(sums: Tree, made: Tree):
    with jax.named_scope("gradient_sums"):
        return None, jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, made)


accumulated.defvjp(lambda weights, sums: (weights, sums), _accumulated_backward)


def look_up(
    ops: Ops, tensor: int, table_VD: jax.Array, sum_VD: jax.Array, ids_BS: jax.Array, is_head: bool
) -> tuple[jax.Array, jax.Array | None]:
    """(h_BSD, sum_VD): the rows of the ids; and the accumulator for the table's other use, if it is the head too."""

    @jax.custom_vjp
    def run(table_VD, sum_VD):
        return ops.look_up(table_VD, ids_BS), sum_VD if is_head else None

    def backward(sum_VD, cotangents):
        dh_BSD, head_sum_VD = cotangents
        with jax.named_scope("embedding_backward"):
            return None, add_over_ranks(head_sum_VD if is_head else sum_VD, ids_BS, dh_BSD, 1, tensor)

    run.defvjp(lambda table_VD, sum_VD: (run(table_VD, sum_VD), None if is_head else sum_VD), backward)
    return run(table_VD, sum_VD)


def losses_of(config: Config, own_loss: Loss | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(h_BSD, head_VD, the head's accumulator or None, rows, scale, whether the head is frozen) -> (objective, loss): sums over
    the tokens of a microbatch. With a loss of the caller's `loss` is (sum, count)."""
    model, train = config.model, config.train
    options = (model.vocab_size, train.loss_chunk_tokens, train.z_loss_weight)

    def default(h_BSD: jax.Array, head_VD: jax.Array, sum_VD: Any, rows: Rows, scale: jax.Array, is_frozen: bool) -> Any:
        targets_BS, weights_BS = rows["targets"], rows["mask"].astype(jnp.float32) * scale
        return loss.cross_entropy(h_BSD, head_VD, targets_BS, weights_BS, *options, sum_VD, is_frozen)

    if own_loss is None:
        return default

    def own(h_BSD: jax.Array, head_VD: jax.Array, sum_VD: Any, rows: Rows, *_: Any) -> Any:
        head_VD = head_VD if sum_VD is None else accumulated(head_VD, sum_VD)
        sums = loss.loss_sums(own_loss, model.vocab_size, h_BSD, head_VD, rows)
        return sums[0], sums

    return own


def with_sums(weights: Tree, sums: Tree, table: Tree, in_matmuls: bool) -> Tree:
    """One layer's weights with their accumulators: matrices as `matmul` takes them with `in_matmuls`, all others as arrays.

    Args:
      table: their entries in the parameter table.
    """

    def one(parameter: Parameter, w: Any, total: jax.Array) -> Any:
        is_multiplied = parameter.is_matrix and not parameter.of_mixture
        return Accumulating(w, total) if in_matmuls and is_multiplied else accumulated(w, total)

    return jax.tree.map(one, table, weights, sums)
