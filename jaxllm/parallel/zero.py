"""ZeRO 2 and 3: gradients (and weights) that are whole only one layer at a time.

Everything here runs inside the region that is manual over (pipe, data, context). Gradients are handed out by *sinks*: zeros in
the shape of a rank's share, float32. Nothing reads them; each weight's use is written so that the gradient with respect to its
sink is that weight's gradient, reduced and scattered. So a gradient can have another layout and dtype than its weight.

The layer loop is written by hand, both ways, so that transfers hide behind matmuls. Forward, layer i is computed while the
weights of layer i+1 are gathered. Backward, layer i is computed while those of layer i-1 are gathered and the gradients of
layer i+1 are scattered. XLA by itself leaves the backward's transfers bare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.mesh import TENSOR, ZERO_AXES
from jaxllm.model.llama import BlockFunction, Side
from jaxllm.parallel.residuals import keep, rebuild
from jaxllm.sharding import Layout, over_tensor

Tree = Any


class Zero:
    """How weights are read and their gradients scattered, at level 2 or 3.

    Args:
      level: 2: weights are whole on each rank; 3: each rank has its share.
      layouts: nested dict of Layout; under "layers" they count the layer dim, which the loop strips.
      unroll: layers per turn of the loop; True: all.
    """

    def __init__(self, level: int, layouts: Tree, unroll: int | bool = 1):
        self._unroll = unroll
        layer = jax.tree.map(_without_layer_dim, layouts["layers"])
        rest = {name: spots for name, spots in layouts.items() if name != "layers"}
        self._layer_scatter, self._rest_scatter = _scatter(layer), _scatter(rest)
        identity = lambda weights: weights  # noqa: E731
        self._layer_gather, self._rest_gather = (_gather(layer), _gather(rest)) if level == 3 else (identity, identity)

    def read(self, weights: Tree, sinks: Tree) -> Tree:
        """Whole weights, for those outside the layer stack. The gradient goes to the sinks."""

        @jax.custom_vjp
        def take(weights, sinks):
            return self._rest_gather(weights)

        take.defvjp(lambda weights, sinks: (take(weights, sinks), None), lambda _, g: (None, self._rest_scatter(g)))
        return take(weights, sinks)

    def run_layers(self, sinks: Tree, block: BlockFunction, layers: Tree, h_BSD: jax.Array, side: Side) -> jax.Array:
        """The layer loop, with gradients going to `sinks`. `block` with its remat already applied."""
        gather, scatter = self._layer_gather, self._layer_scatter
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        layer_numbers = jnp.arange(num_layers)

        def weights_of(layers: Tree, number: jax.Array) -> Tree:
            return gather(jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False), layers))

        def forward(layers, h_BSD, side, keep_residuals: bool):
            def body(carry, number):
                h_BSD, weights = carry
                # After the last layer comes the last again: the backward pass begins with it.
                following = weights_of(layers, jnp.minimum(number + 1, num_layers - 1))
                if not keep_residuals:
                    return (block(weights, h_BSD, side), following), None
                h_BSD, vjp = jax.vjp(block, weights, h_BSD, side)
                return (h_BSD, following), keep(vjp)

            start = (h_BSD, weights_of(layers, jnp.zeros((), layer_numbers.dtype)))
            (h_BSD, last), kept = jax.lax.scan(body, start, layer_numbers, unroll=self._unroll)
            return h_BSD, (layers, last, side, kept)

        @jax.custom_vjp
        def stack(layers, sinks, h_BSD, side):
            return forward(layers, h_BSD, side, False)[0]

        def stack_forward(layers, sinks, h_BSD, side):
            return forward(layers, h_BSD, side, True)

        def stack_backward(saved, dh_BSD):
            layers, last, side, kept = saved
            template = jax.eval_shape(lambda w, h: jax.vjp(block, w, h, side)[1], last, dh_BSD)
            pending = jax.tree.map(jnp.zeros_like, last)

            def body(carry, inputs):
                dh_BSD, weights, pending = carry
                number, kept = inputs
                before = weights_of(layers, jnp.maximum(number - 1, 0))
                scattered = scatter(pending)
                dweights, dh_BSD, _ = rebuild(template, weights, side, kept)(dh_BSD)
                return (dh_BSD, before, dweights), scattered

            carry = (dh_BSD, last, pending)
            (dh_BSD, _, first), later = jax.lax.scan(body, carry, (layer_numbers, kept), reverse=True, unroll=self._unroll)
            # The turn of layer i scattered the gradients of layer i+1; those of layer 0 are left over.
            gradients = jax.tree.map(lambda g, rest: jnp.concatenate([g[None], rest[:-1]]), scatter(first), later)
            return None, gradients, dh_BSD, None

        stack.defvjp(stack_forward, stack_backward)
        return stack(layers, sinks, h_BSD, side)


def sink(shape: tuple[int, ...], spot: Layout, ranks: int) -> jax.Array:
    """Zeros in the shape of one rank's share of a gradient."""
    local = [size // ranks if dim == spot.zero_dim else size for dim, size in enumerate(shape)]
    return jnp.zeros(local, jnp.float32)


def manual_spec(spot: Layout) -> P:
    """The master layout as the region sees it: without the axes left to the compiler."""
    entries = [None] * len(spot.compute)
    if spot.zero_dim is not None:
        entries[spot.zero_dim] = ZERO_AXES
    return P(*entries)


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
    specs = jax.tree.map(lambda spot: P(*[TENSOR if _has_tensor(entry) else None for entry in spot.compute]), layouts)
    return over_tensor(function, in_specs=(specs,), out_specs=specs)(tree)


def _has_tensor(entry: Any) -> bool:
    return entry == TENSOR or (isinstance(entry, tuple) and TENSOR in entry)


def _without_layer_dim(spot: Layout) -> Layout:
    zero_dim = None if spot.zero_dim is None else spot.zero_dim - 1
    return Layout(P(*spot.compute[1:]), P(*spot.master[1:]), zero_dim)
