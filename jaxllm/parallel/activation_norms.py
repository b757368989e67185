"""The root mean square of each layer's output in one microbatch, by a forward pass apart from the train step.

It runs in the region that is manual over (pipe, data, context), on each rank's layers. The stages of a pipeline take turns
without a schedule: all stages compute in each turn, and only the result of the turn's stage is used. So it takes pipe times as
long as a microbatch's forward pass without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.mesh.axes import PIPE
from jaxllm.model.layers import SHARDED_SEQUENCE, rotary_table, scaled_embeddings
from jaxllm.model.llama import BlockContext, apply_block
from jaxllm.parallel.context import ParallelContext
from jaxllm.parallel.layer_stacking import flatten_layers
from jaxllm.parallel.pipeline_executor import sum_over_stages
from jaxllm.parallel.types import Batch, Params


def layer_norms_region(ctx: ParallelContext) -> Callable[[Params, Batch], jax.Array]:
    """(weights, batch) -> float32 [num_layers]: over all positions of the first microbatch, with or without a target, on all
    ranks along batch_axes.
    """
    model, ops, stacking, zero = ctx.config.model, ctx.ops, ctx.stacking, ctx.zero
    stages, gather = stacking.stages, ctx.access.gather

    def region(weights: Params, batch: Batch) -> jax.Array:
        rows = jax.tree.map(lambda x: x[0], batch)
        if zero is not None and stages == 1:
            rest = {name: w for name, w in weights.items() if name != "layers"}
            weights = {**zero.read(rest, None), "layers": weights["layers"]}
        weights = flatten_layers(weights, ctx.stack_dims)
        block = partial(apply_block, nnx.split(nnx.merge(ctx.graph, weights).layers)[0], ops)
        block_context = BlockContext(rotary_table(model, rows["positions"]), rows.get("segments"), ctx.kinds_here())

        def layer(h_BSD, number):
            read = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False), weights["layers"])
            h_BSD, _ = block(gather(read) if gather else read, h_BSD, block_context.of_layer(number))
            return h_BSD, jnp.sum(jnp.square(h_BSD.astype(jnp.float32)))

        def turn(h_BSD, number):
            h_BSD, squares = jax.lax.scan(layer, h_BSD, number // stages * stacking.chunk + jnp.arange(stacking.chunk))
            if stages > 1:
                is_mine = jax.lax.axis_index(PIPE) == number % stages
                h_BSD = sum_over_stages(jnp.where(is_mine, h_BSD, 0))
                squares = jax.lax.psum(jnp.where(is_mine, squares, 0), PIPE)
            return h_BSD, squares

        h_BSD = scaled_embeddings(model, ops.look_up(weights["embedding"], rows["tokens"]))
        h_BSD = ops.constrain(h_BSD, SHARDED_SEQUENCE)
        _, squares = jax.lax.scan(turn, h_BSD, jnp.arange(stages * stacking.virtual_stages))
        # The turns go through the layers in order; identity layers come last.
        squares = jax.lax.psum(squares.reshape(-1)[: model.num_layers], ctx.batch_axes)
        positions = jax.lax.psum(jnp.float32(rows["tokens"].size), ctx.batch_axes)
        return jnp.sqrt(squares / (positions * model.hidden_size))

    return region
