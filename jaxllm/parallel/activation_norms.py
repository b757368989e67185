"""The root mean square of each layer's output in one microbatch: a forward pass of its own, unknown to the train step.

Runs in the region that is manual over (pipe, data, context), on each rank's layers. The stages of a pipeline take turns without
a schedule: all compute in each turn, and the one whose layers they are is heard. So it takes pipe times as long as a
microbatch's forward pass without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import Config
from jaxllm.mesh import PIPE
from jaxllm.model.layers import SHARDED_SEQUENCE, Ops, rotary_table
from jaxllm.model.llama import apply_block
from jaxllm.parallel.layer_stacking import flatten_layers, stacking_of
from jaxllm.parallel.pipeline import sum_over_stages
from jaxllm.parallel.types import Batch, Tree, WeightAccess
from jaxllm.parallel.zero import Zero


def layer_norms_region(
    config: Config, graph: nnx.GraphDef, ops: Ops, zero: Zero | None, everybody: tuple[str, ...]
) -> Callable[[Tree, Batch], jax.Array]:
    """(weights, batch) -> float32 [num_layers]: over all positions of the first microbatch, those without a target too, on all
    ranks along the axes `everybody`.
    """
    model, stages, virtual = config.model, config.parallel.pipe, config.parallel.virtual_stages
    stacking = stacking_of(config)
    access = WeightAccess() if zero is None else zero.access

    def region(weights: Tree, batch: Batch) -> jax.Array:
        rows = jax.tree.map(lambda x: x[0], batch)
        if zero is not None and stages == 1:
            rest = {name: w for name, w in weights.items() if name != "layers"}
            weights = {**zero.read(rest, None), "layers": weights["layers"]}
        weights = flatten_layers(weights, len(stacking.shape))
        block = partial(apply_block, nnx.split(nnx.merge(graph, weights).layers)[0], ops)
        side = (rotary_table(model, rows["positions"]), rows.get("segments"))

        def layer(h_BSD, number):
            read = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False), weights["layers"])
            h_BSD = block(access.gather(read) if access.gather else read, h_BSD, side)
            return h_BSD, jnp.sum(jnp.square(h_BSD.astype(jnp.float32)))

        def turn(h_BSD, number):
            h_BSD, squares = jax.lax.scan(layer, h_BSD, number // stages * stacking.chunk + jnp.arange(stacking.chunk))
            if stages > 1:
                is_mine = jax.lax.axis_index(PIPE) == number % stages
                h_BSD = sum_over_stages(jnp.where(is_mine, h_BSD, 0))
                squares = jax.lax.psum(jnp.where(is_mine, squares, 0), PIPE)
            return h_BSD, squares

        h_BSD = ops.constrain(ops.look_up(weights["embedding"], rows["tokens"]), SHARDED_SEQUENCE)
        _, squares = jax.lax.scan(turn, h_BSD, jnp.arange(stages * virtual))
        # In the order of layers; identity layers are the last.
        squares = jax.lax.psum(squares.reshape(-1)[: model.num_layers], everybody)
        positions = jax.lax.psum(jnp.float32(rows["tokens"].size), everybody)
        return jnp.sqrt(squares / (positions * model.hidden_size))

    return region
