"""ZeRO 2 and 3: gradients (and weights) that are whole only one layer at a time.

Everything here runs inside the region that is manual over (pipe, data, context). Gradients are handed out by *sinks*: zeros in
the shape of a rank's share, float32. Nothing reads them; each weight's use is written so that the gradient with respect to its
sink is that weight's gradient, reduced and scattered. So a gradient can have another layout and dtype than its weight.

The layer loop is written by hand (layer_loop.py), both ways, so that transfers hide behind matmuls. Forward, layer i is
computed while the weights of layer i+1 are gathered. Backward, layer i is computed while those of layer i-1 are gathered and
the gradients of layer i+1 are scattered. XLA by itself leaves the backward's transfers bare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.mesh import ZERO_AXES
from jaxllm.parallel.types import Square, Tree, WeightAccess
from jaxllm.sharding import Layout, over_tensor, tensor_specs, unstack_layout


class Zero:
    """How weights are read and their gradients scattered, at level 2 or 3.

    Args:
      level: 2: weights are whole on each rank; 3: each rank has its share.
      layouts: nested dict of Layout; under "layers" they count the stack's leading dims, which the loop strips.
      stack_dims: how many those are.
    """

    def __init__(self, level: int, layouts: Tree, stack_dims: int = 1):
        layer = jax.tree.map(partial(unstack_layout, stack_dims=stack_dims), layouts["layers"])
        rest = {name: spots for name, spots in layouts.items() if name != "layers"}
        self._rest_scatter, self._rest_gather = _scatter(rest), _gather(rest) if level == 3 else lambda weights: weights
        self.access = WeightAccess(_gather(layer) if level == 3 else None, _scatter(layer))
        """To the layers, for a loop over them."""

    def read(self, weights: Tree, sinks: Tree, squares: jax.Array | None = None, square: Square | None = None) -> Tree:
        """Whole weights, for those outside the layer stack. The gradient goes to the sinks, and `square` of it, before it is
        reduced, to the sink `squares`.
        """

        @jax.custom_vjp
        def take(weights, sinks, squares):
            return self._rest_gather(weights)

        def backward(_, g):
            return None, self._rest_scatter(g), square(g) if square else None

        take.defvjp(lambda *inputs: (take(*inputs), None), backward)
        return take(weights, sinks, squares)


def sink(shape: tuple[int, ...], spot: Layout, ranks: int) -> jax.Array:
    """Zeros in the shape of one rank's share of a gradient."""
    local = [size // ranks if dim == spot.zero_dim else size for dim, size in enumerate(shape)]
    return jnp.zeros(local, jnp.float32)


def _gather(layouts: Tree) -> Callable[[Tree], Tree]:
    def local(weights):
        def one(w, spot):
            return w if spot.zero_dim is None else jax.lax.all_gather(w, ZERO_AXES, axis=spot.zero_dim, tiled=True)

        return jax.tree.map(one, weights, layouts)

    return partial(_per_tensor_rank, local, layouts)


def _scatter(layouts: Tree) -> Callable[[Tree], Tree]:
    """Sums over the ranks in float32; each keeps its share, or all of what is not shared out."""

    def local(gradients):
        def one(g, spot):
            if spot.zero_dim is None:
                return jax.lax.psum(g.astype(jnp.float32), ZERO_AXES)
            return jax.lax.psum_scatter(g.astype(jnp.float32), ZERO_AXES, scatter_dimension=spot.zero_dim, tiled=True)

        return jax.tree.map(one, gradients, layouts)

    return partial(_per_tensor_rank, local, layouts)


def _per_tensor_rank(function: Callable[[Tree], Tree], layouts: Tree, tree: Tree) -> Tree:
    """Runs `function` on each tensor rank's part. Left to the compiler, a gather over data would first gather over tensor."""
    specs = tensor_specs(layouts)
    return over_tensor(function, in_specs=(specs,), out_specs=specs)(tree)
