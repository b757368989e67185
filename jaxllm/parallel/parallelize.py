"""Puts the strategies together: the only file that knows them all.

The forward and backward pass of a step run in one shard_map over (pipe, data, context); the compiler handles `tensor` alone.
Left to the compiler, the data axis would be reduced in every layer of every microbatch. By hand, each rank sums its own
gradients over its microbatches in float32 and hands them out with a leading rank dim; they are summed once, outside, under the
sharding they are wanted in, which XLA turns into one all-reduce (ZeRO 0) or reduce-scatter (ZeRO 1) per parameter and step.

Of several islands (mesh axis `replica`, one more of the region's) each sums, and scatters, its own gradients first. What is
left is a share of them for each island; these are summed across, one all-reduce per parameter and step. With DiLoCo they are
not: every island has its own weights, gradients and loss, arrays with a leading dim, and nothing crosses between islands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxllm.config import Config
from jaxllm.cost_model.activations import policy_of
from jaxllm.mesh import (
    CONTEXT,
    DATA,
    PIPE,
    TENSOR,
    ZERO_AXES,
    axis_sizes,
    batch_axes,
    batch_sharding,
    manual_axes,
)
from jaxllm.model.layers import Ops
from jaxllm.model.llama import scan_layers
from jaxllm.model.loss import cross_entropy
from jaxllm.parallel.activation_norms import layer_norms_region
from jaxllm.parallel.embedding import look_up_over_ranks
from jaxllm.parallel.grad_square_norms import SQUARES, SquaredNorms, parts_of
from jaxllm.parallel.kernels import attend_per_tensor_rank, choose_attention, choose_matmul
from jaxllm.parallel.layer_loop import LayerLoop, unrolling
from jaxllm.parallel.layer_stacking import stacking_of
from jaxllm.parallel.llama_pipeline import pipeline_regions
from jaxllm.parallel.parameters import initial_params, parameter_table
from jaxllm.parallel.remat import remat
from jaxllm.parallel.types import Batch, Parallelized, Params, WeightAccess
from jaxllm.parallel.zero import Zero, sink
from jaxllm.sharding import (
    constrainer,
    is_shared_out,
    layout,
    manual_spec,
    named,
    of_islands,
    over_specs,
    partial_sum_spec,
    weight_rules,
)


def parallelize(config: Config, mesh: Mesh) -> Parallelized:
    """Builds the functions of a resolved config for a mesh. Raises ConfigError if a parameter does not fit the mesh."""
    model, parallel, sizes = config.model, config.parallel, axis_sizes(config.parallel)
    graph, table = parameter_table(config)
    rules = weight_rules(model, parallel)
    layouts = jax.tree.map(lambda p: layout(p, rules, parallel), table)
    master, compute = (jax.tree.map(lambda spot, name=name: getattr(spot, name), layouts) for name in ("master", "compute"))

    attention, attend = choose_attention(config, mesh.devices.flat[0])
    attend = attend_per_tensor_rank(attend, model.num_kv_heads, sizes[TENSOR])
    look_up, matmul = look_up_over_ranks(sizes[PIPE], sizes[TENSOR]), choose_matmul(model, sizes[TENSOR], mesh.devices.flat[0])
    ops = Ops(attend=attend, matmul=matmul, look_up=look_up, constrain=constrainer(sizes))
    ranks = sizes[DATA] * sizes[CONTEXT]
    # On one data rank there is nothing to shard: levels 2 and 3 are then the plain path.
    level = parallel.zero if ranks > 1 else 0
    zero = Zero(level, layouts, len(stacking_of(config).shape)) if level >= 2 else None
    # With DiLoCo an island's loss is its own affair.
    own_weights = config.train.diloco_steps is not None
    everybody = batch_axes(parallel)
    together = ZERO_AXES if own_weights else everybody
    norms = SquaredNorms(layouts, len(stacking_of(config).shape), sizes[CONTEXT], sizes[TENSOR])

    def regions(norms: SquaredNorms | None = None):
        """(of gradients, of the loss alone); with `norms` that of gradients gives NoiseParts too."""
        if sizes[PIPE] > 1:
            return pipeline_regions(config, graph, ops, zero.access if zero else WeightAccess(), together, everybody, norms)
        sums = microbatch_sums(config, graph, ops, zero, norms)

        def new_sinks() -> Params | None:
            if zero is None:
                return None
            sinks = jax.tree.map(lambda p, spot: sink(p.shape, spot, ranks), table, layouts)
            return sinks if norms is None else sinks | {SQUARES: norms.zeros()}

        return gradient_region(sums, new_sinks, together, norms), loss_region(sums, new_sinks, everybody)

    (gradient, loss_alone), (measuring, _) = regions(), regions(norms)

    def shares(name: str, level_from: int) -> bool:
        return level > 0 and is_shared_out(name, parallel, level_from)

    def by_name(level_from: int, share: Any, whole: Any) -> Any:
        """Of each top-level entry, the one for what ZeRO shares out from this level on, or the other."""
        return {name: share[name] if shares(name, level_from) else whole[name] for name in table}

    def pinned(tree: Params, specs: Any, lies: Lies) -> Params:
        return jax.lax.with_sharding_constraint(tree, named(mesh, over_specs(lies, specs)))

    def compute_copy(params: Params, lies: Lies) -> Params:
        # Cast first, gather then: the gather carries the compute dtype. Unless the cast is pinned to where the weights lie, XLA
        # gathers them in float32 for a pipeline. ZeRO 3 leaves each rank its share.
        cast = pinned(jax.tree.map(lambda p: p.astype(model.compute_dtype), params), master, lies)
        return pinned(cast, by_name(3, master, compute), lies)

    share, whole = (jax.tree.map(partial(manual_spec, share=share), layouts) for share in (True, False))
    summed = jax.tree.map(partial_sum_spec, whole)
    per_rank = P(None, *batch_sharding(mesh).spec[1:])
    region = partial(jax.shard_map, mesh=mesh, axis_names=manual_axes(mesh), check_vma=False)
    weights_lie, gradients_lie = by_name(3, share, whole), by_name(2, share, summed)
    # How what islands have of their own lies: gradients where there are several, and with DiLoCo weights and loss.
    each_island: Lies = partial(of_islands, replicas=parallel.replica)
    own_gradients = own_weights or parallel.replica > 1
    of_weights = each_island if own_weights else as_it_is
    of_gradients = each_island if own_gradients else as_it_is

    def of_island(function: Callable, weights: Params, batch: Batch) -> tuple[Any, ...]:
        """A region of gradients, with what is the island's own under a leading dim of 1."""
        if own_weights:
            return jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda w: w.squeeze(0), weights), batch))
        loss, gradients, *parts = function(weights, batch)
        return loss, jax.tree.map(lambda g: g[None], gradients), *parts

    def differentiate(function: Callable, params: Params, batch: Batch) -> tuple[Any, ...]:
        numbers = of_weights(P())
        of_ranks = region(
            partial(of_island, function) if own_gradients else function,
            in_specs=(over_specs(of_weights, weights_lie), per_rank),
            out_specs=(numbers, over_specs(of_gradients, gradients_lie), *[numbers] * (function is measuring)),
        )
        loss, gradients, *parts = of_ranks(compute_copy(params, of_weights), batch)
        with jax.named_scope("reduce_gradients"):
            over_rank = 1 if own_gradients else 0
            total = lambda tree: jax.tree.map(lambda g: g.sum(over_rank), tree)  # noqa: E731
            gradients = {name: g if shares(name, 2) else total(g) for name, g in gradients.items()}
            if own_gradients and not own_weights:
                # Pinned, or XLA would reduce whole gradients over all islands and scatter them then.
                gradients = pinned(gradients, master, each_island)
                gradients = jax.tree.map(lambda g: g.sum(0), gradients)
        return loss, pinned(gradients, master, of_weights), *parts

    def loss_sum(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        of_all = region(loss_alone, in_specs=(weights_lie, per_rank), out_specs=P())
        return of_all(compute_copy(params, as_it_is), batch)

    def layer_norms(params: Params, batch: Batch) -> jax.Array:
        norms = layer_norms_region(config, graph, ops, zero, everybody)
        return region(norms, in_specs=(weights_lie, per_rank), out_specs=P())(compute_copy(params, as_it_is), batch)

    initialize, shardings = partial(initial_params, config), named(mesh, master)
    value_and_grad, with_parts = partial(differentiate, gradient), partial(differentiate, measuring)
    return Parallelized(value_and_grad, with_parts, loss_sum, layer_norms, initialize, shardings, table, layouts, attention)


Lies = Callable[[P], P]
"""From how an array lies in an island to how it lies on the whole mesh."""


def as_it_is(spec: P) -> P:
    """For arrays that all islands have alike."""
    return spec


Sums = Callable[[Params | None, Params, Batch, jax.Array], tuple[jax.Array, jax.Array]]
"""(sinks, weights, rows of one microbatch, scale) -> (objective, loss): sums of token losses times `scale`. Sinks: see zero.py;
None where the gradients are those of the weights."""


def microbatch_sums(
    config: Config, graph: nnx.GraphDef, ops: Ops, zero: Zero | None, norms: SquaredNorms | None = None
) -> Sums:
    """The forward pass of one microbatch, as differentiated. With `norms` and sinks one of these is for the squares."""
    model, train = config.model, config.train
    policy, unroll = policy_of(config.parallel.remat), unrolling(model)
    access, square = zero.access if zero else WeightAccess(), None
    if zero is not None and norms is not None:
        access, square = dataclasses.replace(access, square=norms.of_layer), norms.of

    def sums(sinks, weights, rows, scale):
        if zero is not None:
            rest = {name: w for name, w in weights.items() if name != "layers"}
            rest_sinks = {name: sinks[name] for name in rest}
            weights = {**zero.read(rest, rest_sinks, sinks.get(SQUARES), square), "layers": weights["layers"]}

        def run_layers(block, layers, h_BSD, side):
            if zero is None and not policy.offload:
                rematted = remat(policy, block, in_loop=model.scan_layers and model.num_layers > 1)
                return scan_layers(rematted, layers, h_BSD, side, unroll=unroll)
            loop = LayerLoop(block, model.num_layers, policy, access, unroll=unroll)
            if zero is None:
                return loop.run(layers, None, h_BSD, side)
            return loop.run(layers, sinks["layers"], h_BSD, side, sinks.get(SQUARES))

        network = nnx.merge(graph, weights)
        h_BSD = network.hidden(rows["tokens"], rows["positions"], rows.get("segments"), ops=ops, run_layers=run_layers)
        h_BSD = ops.constrain(h_BSD, ("batch", "sequence", "embed"))
        weights_BS = rows["mask"].astype(jnp.float32) * scale
        chunk, z = train.loss_chunk_tokens, train.z_loss_weight
        return cross_entropy(h_BSD, network.head_matrix(), rows["targets"], weights_BS, model.vocab_size, chunk, z)

    return sums  # pyright: ignore[reportReturnType]  # partial(jax.custom_vjp) loses what cross_entropy returns


# Regions: run by each rank of (pipe, data, context) on its own weights and rows, with `tensor` left to XLA.


def gradient_region(
    sums: Sums, new_sinks: Callable[[], Params | None], together: tuple[str, ...], norms: SquaredNorms | None
) -> Callable[[Params, Batch], tuple[Any, ...]]:
    """Mean loss over the batch of all ranks along the axes `together`, and float32 gradients summed over the rank's
    microbatches: those of the sinks, reduced already, or without sinks the rank's own part with a leading dim of 1. With
    `norms` NoiseParts too.
    """

    def squared(gradients: Params) -> tuple[Params, jax.Array | None]:
        """A microbatch's gradients and their squares, which are among those of sinks."""
        if norms is None:
            return gradients, None
        if SQUARES in gradients:
            return {name: g for name, g in gradients.items() if name != SQUARES}, gradients[SQUARES]
        return gradients, norms.of(gradients)

    def region(weights: Params, batch: Batch):
        scale = 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), together), 1).astype(jnp.float32)
        sinks = new_sinks()
        zeros = squared(sinks)[0] if sinks else jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        gradient = jax.value_and_grad(sums, argnums=1 if sinks is None else 0, has_aux=True)

        def microbatch(carry, rows):
            gradients, loss = carry
            (_, part), new = gradient(sinks, weights, rows, scale)
            new, squares = squared(new)
            return (jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), gradients, new), loss + part), squares

        (gradients, loss), squares = jax.lax.scan(microbatch, (zeros, jnp.zeros((), jnp.float32)), batch)
        if sinks is None:
            gradients = jax.tree.map(lambda g: g[None], gradients)
        parts = () if squares is None else (parts_of(squares, batch["mask"], together),)
        return jax.lax.psum(loss, together), gradients, *parts

    return region


def loss_region(
    sums: Sums, new_sinks: Callable[[], Params | None], everybody: tuple[str, ...]
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """Sum of token losses over the batch of all ranks along the axes `everybody`, and the number of targets."""

    def region(weights: Params, batch: Batch):
        def microbatch(total, rows):
            return total + sums(new_sinks(), weights, rows, jnp.ones((), jnp.float32))[1], None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), batch)
        return jax.lax.psum((total, batch["mask"].sum()), everybody)

    return region
