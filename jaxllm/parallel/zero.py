"""Weights that are gathered and gradients that are reduced a layer at a time, behind the compute of other layers.

    ZeRO 0     gradients of all microbatches are summed, and reduced by the last one's backward pass
    ZeRO 1     the same; weights are gathered by the first one's forward pass and kept for the whole step
    ZeRO 2     weights are full; gradients are reduced in each microbatch
    ZeRO 3     weights are gathered forward and backward, and gradients reduced, in each microbatch

Some steps of levels 0 and 1, a pipeline's among them, gather before their first microbatch and reduce after their last instead
(parallelize.py, layer_stack.sends_once).

At levels 2 and 3 a custom VJP gathers a weight where it is used, and reduces its gradient over ranks, scatters it, and adds it
to the weight's accumulator (accumulate.py), which has the shape of a rank's shard. The weight itself gets no cotangent. So no
full gradient outlives its layer.

    forward     weight (shard or full, bf16) --- gather ---> layer       accumulator (shard, float32)   not read
    backward    weight <--- None                           layer --- reduce-scatter, + ---> cotangent of the accumulator

Layers (layer_loop.py, regions.ShardedLayers) are written by hand in both directions, so that transfers hide behind matmuls. XLA
by itself leaves the backward's transfers bare. All of it runs inside the region that is manual over (pipe, data, context).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.config import ParallelConfig
from jaxllm.mesh.axes import DATA, ZERO_AXES
from jaxllm.mesh.sharding import Layout, tensor_shard_map, tensor_specs, unstack_layout
from jaxllm.parallel.expert_parallel import alike
from jaxllm.parallel.grad_square_norms import GradSquareNorms
from jaxllm.parallel.ordering import after, weights_token
from jaxllm.parallel.types import Accumulators, Tree, WeightAccess
from jaxllm.private_jax import in_row_major


class Phase(NamedTuple):
    """What one microbatch sends, in a step that sends each layer once."""

    gathers: bool = False
    """It is the first one at ZeRO 1: weights are gathered, and kept for the step."""
    reduces: bool = False
    """It is the last one: gradients are reduced, together with the sums of the microbatches before."""


class Zero:
    """How weights are gathered and their gradients reduced.

    Args:
      parallel: its `zero` and `reduce_dtype`. With ZeRO 0 and 1 each layer is sent once in a step, in phases.
      layouts: nested dict of Layout; under "layers" they count the stack's leading dims, which the layer loop strips.
      stack_dims: how many those are.
      trained: the part of `layouts` that has gradients; None: all.
      in_order: no transfer outside the loops over layers is on its way while a loop runs. CPU devices need that: XLA orders the
        transfers of one computation, but two devices may start a loop and a transfer beside it in different orders, and then
        wait for each other forever.
    """

    def __init__(self, parallel: ParallelConfig, layouts: Tree, stack_dims: int = 1, in_order=False, trained: Any = None):
        of_layer = partial(jax.tree.map, partial(unstack_layout, stack_dims=stack_dims))
        layer, given = of_layer(layouts["layers"]), trained or layouts
        rest = {name: tree for name, tree in layouts.items() if name != "layers"}
        self.level, self.once = parallel.zero, parallel.zero < 2
        self._in_order, self.layouts = in_order, {**rest, "layer": layer}
        self._rest, self._trained = rest, [name for name in rest if name in given]
        self.gather_layer, self._scatter = _gather(layer, self.once), partial(_scatter, parallel.reduce_dtype)
        self._scatter_layer = self._scatter(of_layer(given["layers"]), self.once)

    def access(self, phase: Phase = Phase()) -> WeightAccess:
        """To one layer, for a loop over layers: in a phase, or in every microbatch of levels 2 and 3."""
        gathers, reduces = phase if self.once else (self.level == 3, True)
        return WeightAccess(self.gather_layer if gathers else None, self.once, self._scatter_layer if reduces else None)

    def gather_rest(self, shards: Tree, rows: Tree) -> tuple[Tree, Tree]:
        """(full weights of the entries outside the layer stack, rows). `in_order` the rows, which the layers' loop needs, wait
        for the weights."""
        full = self._rest_gather(shards)
        return full, self.in_turn(rows, lambda: weights_token(full, self._rest))

    def _rest_gather(self, shards: Tree) -> Tree:
        layouts = {name: self._rest[name] for name in shards}
        return _gather(layouts, self.once)(shards) if self.level != 2 else shards

    def in_turn(self, x: Tree, token: Callable[[], jax.Array]) -> Tree:
        """`x`, `in_order` once what is behind the token is there."""
        return after(x, token()) if self._in_order else x

    def reduced(self, name: str, x: Tree, shards: Tree, sums: Tree, token: Any = 0.0) -> tuple[Tree, Tree, jax.Array]:
        """(x, sums, token): `sums` are accumulators of the full gradients of an entry or of one "layer". Their new values are
        reduced into the cotangents of the accumulators `shards`.

        In the backward pass x's gradient waits for the new sums, and for the transfer before theirs, which `token` hands on.
        So this transfer has the time until the next. Otherwise XLA's scheduler would make the gradients of all weights after
        those of all activations, and reduce them at the end.
        """
        layouts = self.layouts[name]

        @jax.custom_vjp
        def enter(x, shards, token):
            return x, sums, token

        def backward(_, cotangents):
            dx, new_sums, before = cotangents
            reduced = self._scatter(layouts)(new_sums)
            done = weights_token(reduced, layouts)
            tokens = weights_token(new_sums, layouts), before, *([done] if self._in_order else [])
            return after(dx, *tokens), reduced, done

        enter.defvjp(lambda x, shards, token: (enter(x, shards, token), None), backward)
        return enter(x, shards, jnp.asarray(token, jnp.float32))

    def read(self, weights: Tree, accumulators: Accumulators | None, tap: GradSquareNorms | None = None) -> Tree:
        """Full weights of the entries outside the layer stack, at levels 2 and 3. Their gradients are added to
        accumulators.sums. The squares that `tap` takes of them before they are reduced are the cotangent of
        accumulators.squares. Without accumulators there is no backward pass.
        """

        @jax.custom_vjp
        def take(weights, own):
            return self._rest_gather(weights)

        def backward(sums, g):
            with jax.named_scope("gradient_sums"):
                sums = jax.tree.map(jnp.add, sums, self._scatter({name: self._rest[name] for name in g})(g))
            return None, Accumulators(sums, tap.on_microbatch(g) if tap else None)

        take.defvjp(lambda weights, own: (take(weights, own), own.sums), backward)
        if accumulators is None:
            return self._rest_gather(weights)
        own = {name: weights[name] for name in self._trained}
        frozen = {name: w for name, w in weights.items() if name not in own}
        full = take(own, accumulators._replace(sums={name: accumulators.sums[name] for name in own}))
        return {**full, **self._rest_gather(frozen)} if frozen else full


def zeros_of_shard(shape: tuple[int, ...], layout: Layout, ranks: int) -> jax.Array:
    """Zeros in the shape of one rank's shard of a gradient."""
    stored = layout.padded_shape(shape)
    local = [size // ranks if dim == layout.zero_dim else size for dim, size in enumerate(stored)]
    return jnp.zeros(local, jnp.float32)


def _gather(layouts: Tree, keeps: bool = False) -> Callable[[Tree], Tree]:
    """With `keeps` a gathered weight is one array of the layout in which both passes read it. XLA would keep each matrix as it
    arrives, and copy whole stacks into another layout between the passes: 8.8 GiB of 43 for 70B's layers on 64 H100s. Or it
    would keep a matrix of unrolled layers in both layouts: 4.5 GiB of 77 for 8B (JAX 0.10.2)."""

    @jax.named_scope("zero_gather")
    def local(weights):
        def one(w, layout):
            if layout.zero_dim is None:
                return w
            w = layout.cut(_among(jax.lax.all_gather, w, layout, axis=layout.zero_dim))
            return jax.lax.optimization_barrier(in_row_major(w)) if keeps else w

        return jax.tree.map(one, weights, layouts)

    return partial(_per_tensor_rank, local, layouts)


def _scatter(sent: Any, layouts: Tree, in_place: bool = False) -> Callable[[Tree], Tree]:
    """Float32 sums over the ranks, of terms in the dtype `sent`. Each rank keeps its shard, or the full sum, always of float32,
    of what ZeRO does not shard. With `in_place` a shard has the layout of the sums whose place it takes. XLA would copy their
    whole stacks into its own: 3.4 GiB of 41 for 8B at tensor 2."""

    @jax.named_scope("zero_scatter")
    def local(gradients):
        def one(g, layout):
            g = layout.padded(g.astype(jnp.float32 if layout.zero_dim is None else sent))
            if layout.zero_dim is None:
                return jax.lax.psum(g, ZERO_AXES)
            shard = _among(jax.lax.psum_scatter, g, layout, scatter_dimension=layout.zero_dim).astype(jnp.float32)
            return in_row_major(shard) if in_place else shard

        return jax.tree.map(one, gradients, layouts)

    return partial(_per_tensor_rank, local, layouts)


def _among(collective: Callable[..., jax.Array], x: jax.Array, layout: Layout, **dim: int) -> jax.Array:
    """The collective over the ranks among which a weight is sharded: for experts those that hold the same ones."""
    if layout.expert_ranks == 1:
        return collective(x, ZERO_AXES, tiled=True, **dim)
    groups = alike(jax.lax.axis_size(DATA), layout.expert_ranks)
    return collective(x, DATA, axis_index_groups=groups, tiled=True, **dim) if groups[0][1:] else x


def _per_tensor_rank(function: Callable[[Tree], Tree], layouts: Tree, tree: Tree) -> Tree:
    """Runs `function` on each tensor rank's part. Left to XLA, a gather over data would first gather over tensor."""
    specs = tensor_specs(layouts)
    return tensor_shard_map(function, in_specs=(specs,), out_specs=specs)(tree)
