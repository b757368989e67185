"""Order between computations that do not need each other's values.

XLA removes optimization barriers before it schedules. So a *token*, a zero that is made of one array, is added to another.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxllm.mesh import TENSOR
from jaxllm.parallel.types import Tree
from jaxllm.sharding import tensor_shard_map, tensor_specs


def after(x: Tree, *tokens: jax.Array) -> Tree:
    """`x`, available once the arrays behind these tokens are."""
    zero = sum(tokens[1:], tokens[0])
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), x)


def weights_token(arrays: Tree, layouts: Tree) -> jax.Array:
    """The token of weights or their gradients."""
    return _token(arrays, tensor_specs(layouts))


def hidden_token(h_BSD: jax.Array) -> jax.Array:
    """The token of hidden states between two blocks."""
    return _token(h_BSD, PartitionSpec(None, TENSOR))


def scalar_token(x: jax.Array) -> jax.Array:
    """The token of a number that all tensor ranks share."""
    return _token(x, PartitionSpec())


def _token(arrays: Tree, specs: Any) -> jax.Array:
    """A float32 zero that waits for `arrays`, whatever they hold. Each tensor rank reads an element of its own part: XLA would
    gather the arrays for one that all ranks share."""

    return tensor_shard_map(zero_of, in_specs=(specs,), out_specs=PartitionSpec())(jax.lax.stop_gradient(arrays))


def zero_of(arrays: Tree) -> jax.Array:
    """The token of a rank's own arrays, where all axes are manual."""

    def bits(array: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(array.reshape(-1)[0].astype(jnp.float32), jnp.uint32)

    found = functools.reduce(jnp.bitwise_or, map(bits, jax.tree.leaves(arrays)))
    return (found >> 31 >> 1).astype(jnp.float32)
