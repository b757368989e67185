"""The loop over a chunk of layers, forward and backward, with what the backward needs kept in a ring the caller owns.

    loop = LayerLoop(block, length, access)
    ring = loop.new_ring(slots, layers, h, side)
    h, ring, _ = loop.forward(layers, chunk, h, side, ring, slot)
    dh, sums, _ = loop.backward(layers, chunk, dh, side, ring, slot, sums)

Autodiff of a scan would stack a chunk's residuals and leave it to the caller to copy them in and out of a buffer, and would
make a chunk's gradients before they are added. Here each layer writes its residuals into the ring and adds its gradients into
`sums` in place. Weights are never among the residuals: they are at hand, and are hung into the VJP again (residuals.py).

What a policy offloads lies in a part of the ring that is in the host's pinned memory. It is moved explicitly: written as a
layer makes it, read one layer before it is used. The library's offload policies would have the ring read by the host.

Shapes: `layers` holds the rank's layers, [chunks x length, ...]; `chunk` and `slot` are traced integers; the leaves of the ring
are [slots x length, ...]; `sums` are float32 and lie as `access` reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.model.llama import BlockFunction, Side
from jaxllm.parallel.remat import remat
from jaxllm.parallel.residuals import keep, kept_names, rebuild, waits_on_host
from jaxllm.plan.activations import Policy

Tree = Any
Square = Callable[[Tree], jax.Array]
"""Gradients as they lie on a rank -> their squares, float32 (squares.py)."""


@dataclass(frozen=True)
class Access:
    """How a layer's weights are read, and its gradients handed out. The default: they are here, and stay here."""

    gather: Callable[[Tree], Tree] | None = None
    """A rank's share of one layer -> its whole weights; started one layer ahead."""
    scatter: Callable[[Tree], Tree] | None = None
    """One layer's gradients -> the rank's share of their sum over ranks, float32; done behind the next layer's compute."""
    square: Square | None = None
    """Of one layer's gradients, before they are scattered."""


@partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["on_host"])
@dataclass(frozen=True)
class Ring:
    """Residuals of the layers of several chunks."""

    kept: Tree
    """As keep() gives them, with a leading dim."""
    on_host: tuple[bool, ...]
    """Of each leaf."""

    def write(self, number, kept: Tree) -> Ring:
        kept = self._moved(kept, jax.memory.Space.Host)
        update = lambda r, x: jax.lax.dynamic_update_index_in_dim(r, x, number, 0)  # noqa: E731
        return Ring(jax.tree.map(update, self.kept, kept), self.on_host)

    def read(self, number) -> Tree:
        kept = jax.tree.map(lambda r: jax.lax.dynamic_index_in_dim(r, number, keepdims=False), self.kept)
        return self._moved(kept, jax.memory.Space.Device)

    def _moved(self, tree: Tree, space: Any) -> Tree:
        """`tree` with the leaves that are not to stay on the device moved to `space`."""
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(
            [jax.device_put(x, space) if away else x for x, away in zip(leaves, self.on_host, strict=True)]
        )


class LayerLoop:
    """`block` under a remat policy, over chunks of `length` layers.

    Args:
      unroll: layers per turn of the loop; True: all.
    """

    def __init__(self, block: BlockFunction, length: int, policy: Policy, access: Access = Access(), *, unroll: int | bool = 1):
        self.length = length
        self._block = remat(policy, block, in_loop=unroll == 1 and length > 1)
        self._policy, self._access, self._unroll = policy, access, unroll

    def new_ring(self, slots: int, layers: Tree, h_BSD: jax.Array, side: Side) -> Ring:
        """Room for the residuals of `slots` chunks; shapes alone of the arguments matter. What is on the device is zero."""
        weights = self._weights_shape(layers)
        kept = jax.eval_shape(lambda w, h, s: keep(jax.vjp(self._block, w, h, s)[1]), weights, h_BSD, side)
        on_host = (False,) * len(jax.tree.leaves(kept))
        if self._policy.offload:
            on_host = waits_on_host(kept_names(self._block, weights, h_BSD, side, self._policy), self._policy)
        leaves, structure = jax.tree.flatten(kept)
        shapes = [((slots * self.length, *x.shape), x.dtype) for x in leaves]
        room = [host_room(*shape) if away else jnp.zeros(*shape) for shape, away in zip(shapes, on_host, strict=True)]
        return Ring(structure.unflatten(room), on_host)

    def forward(self, layers, chunk, h_BSD, side: Side, ring: Ring | None = None, slot=0, then=None):
        """(h, ring, weights): the chunk's output; the ring with its residuals (None: nothing is kept); and, where weights are
        gathered, those of layer `then` of the rank's, ready for what comes next.
        """
        first, gather, last = chunk * self.length, self._access.gather, self.length - 1

        def turn(carry, number):
            h_BSD, weights, ring = carry
            if gather is None:
                weights, following = self._read(layers, first + number), None
            else:
                at = first + jnp.minimum(number + 1, last)
                following = self._read(layers, at if then is None else jnp.where(number < last, at, then))
            if ring is None:
                return (self._block(weights, h_BSD, side), following, None), None
            h_BSD, vjp = jax.vjp(self._block, weights, h_BSD, side)
            return (h_BSD, following, ring.write(slot * self.length + number, keep(vjp))), None

        weights = None if gather is None else self._read(layers, first)
        numbers = jnp.arange(self.length)
        (h_BSD, weights, ring), _ = jax.lax.scan(turn, (h_BSD, weights, ring), numbers, unroll=self._unroll)
        return h_BSD, ring, weights

    def backward(self, layers, chunk, dh_BSD, side: Side, ring: Ring, slot, sums: Tree, weights: Tree = None, valid=True):
        """(dh, sums, squares): the gradient of the chunk's input; `sums` with the gradients of its weights added if `valid`;
        and the sum of their squares, 0 if not `valid`, None if `access` makes none.

        Args:
          weights: of the chunk's last layer, if they are gathered already.
        """
        first, n = chunk * self.length, self.length
        gather, scatter, square = self._access.gather, self._access.scatter, self._access.square
        fetches = any(ring.on_host)
        shapes = self._weights_shape(layers)
        template = jax.eval_shape(lambda w, h: jax.vjp(self._block, w, h, side)[1], shapes, dh_BSD)

        def add(sums, number, gradients):
            return jax.tree.map(lambda sum, g: _add_at(sum, first + number, jnp.where(valid, g, 0)), sums, gradients)

        def turn(carry, number):
            dh_BSD, weights, kept, pending, sums, squares = carry
            before = jnp.maximum(number - 1, 0)
            here, ahead = (
                (weights, self._read(layers, first + before)) if gather else (self._read(layers, first + number), None)
            )
            kept, kept_ahead = (kept, ring.read(slot * n + before)) if fetches else (ring.read(slot * n + number), None)
            if scatter:
                # The gradients of the layer after this one; in the first turn zeros.
                sums = add(sums, jnp.minimum(number + 1, n - 1), scatter(pending))
            gradients, dh_BSD, _ = rebuild(template, here, side, kept)(dh_BSD)
            if square:
                squares = squares + square(gradients)
            if not scatter:
                sums = add(sums, number, gradients)
            return (dh_BSD, ahead, kept_ahead, gradients if scatter else None, sums, squares), None

        if gather and weights is None:
            weights = self._read(layers, first + n - 1)
        kept = ring.read(slot * n + n - 1) if fetches else None
        pending = jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), shapes) if scatter else None
        squares = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(square, shapes)) if square else None
        carry = (dh_BSD, weights if gather else None, kept, pending, sums, squares)
        (dh_BSD, _, _, pending, sums, squares), _ = jax.lax.scan(turn, carry, jnp.arange(n), reverse=True, unroll=self._unroll)
        sums = add(sums, 0, scatter(pending)) if scatter else sums
        return dh_BSD, sums, None if squares is None else jnp.where(valid, squares, 0.0)

    def _read(self, layers: Tree, number) -> Tree:
        weights = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False), layers)
        return self._access.gather(weights) if self._access.gather else weights

    def _weights_shape(self, layers: Tree) -> Tree:
        return jax.eval_shape(lambda layers: self._read(layers, 0), layers)

    def run(self, layers: Tree, sinks: Tree | None, h_BSD: jax.Array, side: Side, squares: jax.Array | None = None):
        """All layers, as one function with gradients of its own: those of the layers go to `sinks` (zero.py), or without sinks
        to the layers; their squares, if `access` makes them, go to the sink `squares`.
        """

        @jax.custom_vjp
        def stack(layers, sinks, squares, h_BSD, side):
            return self.forward(layers, 0, h_BSD, side)[0]

        def stack_forward(layers, sinks, squares, h_BSD, side):
            h_BSD, ring, last = self.forward(layers, 0, h_BSD, side, self.new_ring(1, layers, h_BSD, side))
            return h_BSD, (layers, sinks, side, ring, last)

        def stack_backward(saved, dh_BSD):
            layers, sinks, side, ring, last = saved
            sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), layers if sinks is None else sinks)
            dh_BSD, sums, squares = self.backward(layers, 0, dh_BSD, side, ring, 0, sums, last)
            if sinks is None:
                return jax.tree.map(lambda sum, w: sum.astype(w.dtype), sums, layers), None, squares, dh_BSD, None
            return None, sums, squares, dh_BSD, None

        stack.defvjp(stack_forward, stack_backward)
        return stack(layers, sinks, squares, h_BSD, side)


def unrolling(model: ModelConfig) -> int | bool:
    """How many layers a turn of the layer loop holds, as `lax.scan` wants it; True: all."""
    return 1 if model.scan_layers else True


def host_room(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array in the host's memory whose content means nothing.

    As `lax.scan` makes the room for its results. Zeros moved there would first lie on the device, whole, and cross the link in
    every step; that is what is left if a JAX has another way.
    """
    try:
        from jax._src.lax.lax import empty2

        return jax.lax.broadcast(empty2(dtype, memory_space=jax.memory.Space.Host), shape)
    except (ImportError, TypeError):
        return jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)


def _add_at(sums: jax.Array, index, x: jax.Array) -> jax.Array:
    here = jax.lax.dynamic_index_in_dim(sums, index, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(sums, here + x.astype(sums.dtype), index, 0)
