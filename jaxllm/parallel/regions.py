"""The forward and backward pass of a step without a pipeline: gradient accumulation over microbatches.

A region is run by each rank of (replica, pipe, data, context) on its own weights and rows, with `tensor` left to XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config.remat_policy import policy_of
from jaxllm.model.llama import scan_layers
from jaxllm.model.loss import cross_entropy
from jaxllm.parallel.context import ParallelContext
from jaxllm.parallel.grad_square_norms import GradSquareNorms
from jaxllm.parallel.layer_loop import LayerLoop, unrolling
from jaxllm.parallel.remat import remat
from jaxllm.parallel.types import Batch, GradientRegion, LossRegion, Params, Rows
from jaxllm.parallel.zero import Sinks, sink

Sums = Callable[[Sinks | None, Params, Rows, jax.Array], tuple[jax.Array, jax.Array]]
"""(sinks, weights, rows of one microbatch, scale) -> (objective, loss): sums of token losses times `scale`. Without sinks
(zero.py) the objective is differentiated with respect to the weights."""


def gradient_region(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> GradientRegion:
    """Gradients by autodiff, a microbatch at a time."""
    gradient = jax.value_and_grad(microbatch_sums(ctx, tap), argnums=0 if ctx.zero else 1, has_aux=True)

    def region(weights: Params, batch: Batch):
        scale = 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), ctx.loss_axes), 1).astype(jnp.float32)
        sinks = new_sinks(ctx, tap)
        zeros = sinks.gradients if sinks else jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)

        def microbatch(carry, rows: Rows):
            total, loss = carry
            (_, part), found = gradient(sinks, weights, rows, scale)
            new, squares = found if sinks else (found, tap.on_microbatch(found) if tap else None)
            with jax.named_scope("gradient_sums"):
                total = jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), total, new)
            return (total, loss + part), squares

        squares_MT: Any
        (gradients, loss), squares_MT = jax.lax.scan(microbatch, (zeros, jnp.zeros((), jnp.float32)), batch)
        if sinks is None:
            gradients = jax.tree.map(lambda g: g[None], gradients)
        parts = tap.parts(squares_MT, batch["mask"], ctx.loss_axes) if tap else None
        return jax.lax.psum(loss, ctx.loss_axes), gradients, parts

    return region


def loss_region(ctx: ParallelContext) -> LossRegion:
    """The forward pass alone."""
    sums = microbatch_sums(ctx)

    def region(weights: Params, batch: Batch):
        def microbatch(total, rows: Rows):
            return total + sums(new_sinks(ctx), weights, rows, jnp.ones((), jnp.float32))[1], None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), batch)
        return jax.lax.psum((total, batch["mask"].sum()), ctx.batch_axes)

    return region


def new_sinks(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> Sinks | None:
    """Sinks for one microbatch; None where gradients are those of the weights."""
    if ctx.zero is None:
        return None
    gradients = jax.tree.map(lambda p, layout: sink(p.shape, layout, ctx.zero_ranks), ctx.table, ctx.layouts)
    return Sinks(gradients, tap.zeros() if tap else None)


def microbatch_sums(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> Sums:
    """The forward pass of one microbatch, to be differentiated."""
    model, train, ops, zero = ctx.config.model, ctx.config.train, ctx.ops, ctx.zero
    policy, unroll = policy_of(ctx.config.parallel.remat), unrolling(model)

    def sums(sinks: Sinks | None, weights: Params, rows: Rows, scale: jax.Array) -> Any:
        if zero is not None:
            rest = {name: w for name, w in weights.items() if name != "layers"}
            weights = {**zero.read(rest, sinks, tap), "layers": weights["layers"]}

        def run_layers(block, layers, h_BSD, block_context):
            if zero is None and not policy.offload:
                rematted = remat(policy, block, in_loop=model.scan_layers and model.num_layers > 1)
                return scan_layers(rematted, layers, h_BSD, block_context, unroll=unroll)
            loop = LayerLoop(block, model.num_layers, policy, ctx.access, tap if zero else None, unroll=unroll)
            return loop.run(layers, sinks and Sinks(sinks.gradients["layers"], sinks.squares), h_BSD, block_context)

        network = nnx.merge(ctx.graph, weights)
        h_BSD = network.hidden(rows["tokens"], rows["positions"], rows.get("segments"), ops=ops, run_layers=run_layers)
        h_BSD = ops.constrain(h_BSD, ("batch", "sequence", "embed"))
        weights_BS = rows["mask"].astype(jnp.float32) * scale
        chunk, z = train.loss_chunk_tokens, train.z_loss_weight
        return cross_entropy(h_BSD, network.head_matrix(), rows["targets"], weights_BS, model.vocab_size, chunk, z)

    return sums
