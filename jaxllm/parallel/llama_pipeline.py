"""The Llama as a pipeline: what each rank does in a tick, and the forward and backward pass of a step made of it.

Runs in the region that is manual over (pipe, data, context). Each rank of `pipe` holds its stages' layers and a slice of the
vocabulary, of the embedding and of the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import Config
from jaxllm.cost_model.activations import policy_of
from jaxllm.mesh import PIPE
from jaxllm.model.layers import FULL_SEQUENCE, SHARDED_SEQUENCE, Ops, rotary_table
from jaxllm.model.llama import Llama, Side, apply_block
from jaxllm.model.loss import VocabularySlice, loss_alone, loss_and_gradients
from jaxllm.parallel.embedding import add_over_ranks
from jaxllm.parallel.grad_square_norms import NUMBER, SQUARES, SquaredNorms, StageSquares, parts_of
from jaxllm.parallel.layer_loop import LayerLoop, Pass, unrolling
from jaxllm.parallel.layer_stacking import flatten_layers, stacking_of
from jaxllm.parallel.pipeline import Stage, run_schedule, sum_over_stages
from jaxllm.parallel.types import Rows, Tree, WeightAccess
from jaxllm.pipeline_schedule import forward_only, make_schedule

Region = Callable[[Tree, Rows], Any]


def pipeline_regions(
    config: Config,
    graph: nnx.GraphDef,
    ops: Ops,
    access: WeightAccess,
    together: tuple[str, ...],
    everybody: tuple[str, ...],
    norms: SquaredNorms | None = None,
) -> tuple[Region, Region]:
    """(gradient region, loss region).

    The first: (weights, batch) -> (mean loss over the batch of the ranks along the axes `together`, float32 gradients).
    Gradients of layers are the rank's share of their sum if `access` scatters; all others are the rank's own part, with a
    leading dim of 1. With `norms` NoiseParts too. The second: (weights, batch) -> (sum of token losses over the batch
    of the ranks along the axes `everybody`, number of targets).
    """
    parallel, stacking = config.parallel, stacking_of(config)
    stack_dims = len(stacking.shape)
    if norms is not None:
        access = dataclasses.replace(access, square=norms.of_layer)

    def run(schedule, weights: Tree, batch: Rows, scale: jax.Array, sums: Tree, squares: StageSquares | None = None):
        B, S = batch["tokens"].shape[1:]
        zeros_BSD = ops.constrain(jnp.zeros((B, S, config.model.hidden_size), config.model.compute_dtype), SHARDED_SEQUENCE)
        network = nnx.merge(graph, weights)
        block = partial(apply_block, nnx.split(network.layers)[0], ops)
        loop = LayerLoop(block, stacking.chunk, policy_of(parallel.remat), access, unroll=unrolling(config.model))
        stage = llama_stage(config, ops, loop, network, weights, scale, squares)
        return run_schedule(schedule, stage, batch, zeros_BSD, sums)

    def gradient_region(weights: Tree, batch: Rows):
        scale = 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), together), 1).astype(jnp.float32)
        flat = flatten_layers(weights, stack_dims)
        sums = {name: new_sums(tree, access if name == "layers" else WeightAccess()) for name, tree in flat.items()}
        M, B, S = batch["tokens"].shape
        schedule = make_schedule(parallel.schedule, parallel.pipe, M, parallel.virtual_stages)
        squares = None
        if norms is not None:
            squares = StageSquares(norms, ops, schedule, config.model.tie_embeddings)
            sums, batch = sums | squares.new((B, S, config.model.hidden_size)), batch | {NUMBER: jnp.arange(M)}
        loss, sums = run(schedule, flat, batch, scale, sums, squares)

        def handed_out(name: str, g: jax.Array, w: jax.Array) -> jax.Array:
            if name == "layers":
                g = g.reshape(*w.shape[:stack_dims], *g.shape[1:])
            return g if name == "layers" and access.scatter else g[None]

        gradients = {name: jax.tree.map(partial(handed_out, name), sums[name], weights[name]) for name in weights}
        parts = () if norms is None else (parts_of(sums[SQUARES], batch["mask"], together),)
        return jax.lax.psum(loss, together), gradients, *parts

    def loss_region(weights: Tree, batch: Rows):
        schedule = forward_only(parallel.pipe, batch["tokens"].shape[0], parallel.virtual_stages)
        total, _ = run(schedule, flatten_layers(weights, stack_dims), batch, jnp.ones((), jnp.float32), None)
        return jax.lax.psum((total, batch["mask"].sum()), everybody)

    return gradient_region, loss_region


def llama_stage(
    config: Config,
    ops: Ops,
    loop: LayerLoop,
    network: Llama,
    weights: Tree,
    scale: jax.Array,
    squares: StageSquares | None = None,
) -> Stage:
    """A tick's work on `weights`, the rank's: layers [chunks x layers of a chunk, ...].

    Args:
      scale: of each token's loss in the sum.
      squares: where those of gradients are filed; None: they are not made.
    """
    model, parallel, train = config.model, config.parallel, config.train
    head_name = "embedding" if model.tie_embeddings else "head"
    part = VocabularySlice(
        first=lambda rows: jax.lax.axis_index(PIPE) * rows,
        total=lambda x: jax.lax.psum(x, PIPE),
        largest=lambda x: jax.lax.pmax(x, PIPE),
    )
    bounds = {"part": part, "vocab_size": model.vocab_size, "chunk_tokens": train.loss_chunk_tokens}
    norm_graph = nnx.split(network.final_norm)[0]

    def side(rows: Rows) -> Side:
        return rotary_table(model, rows["positions"]), rows.get("segments")

    def look_up(table_VD, rows: Rows):
        return ops.constrain(ops.look_up(table_VD, rows["tokens"]), SHARDED_SEQUENCE)

    def look_up_backward(dh_BSD, rows: Rows, sums: Tree) -> Tree:
        add = partial(add_over_ranks, ids_BS=rows["tokens"], dh_BSD=dh_BSD, tensor=parallel.tensor)
        if squares is None:
            return sums | {"embedding": add(sums["embedding"])}
        own_VD = add(jnp.zeros_like(sums["embedding"]))
        return squares.embedding(sums | {"embedding": sums["embedding"] + own_VD}, rows, own_VD, dh_BSD)

    def norm(scale_D, h_BSD):
        return ops.constrain(nnx.merge(norm_graph, scale_D)(h_BSD), FULL_SEQUENCE)

    def head(h_BSD, rows: Rows, sums: Tree, valid):
        weights_BS = jnp.where(valid, rows["mask"].astype(jnp.float32) * scale, 0)
        normed_BSD, norm_backward = jax.vjp(norm, weights["final_norm"], h_BSD)
        before_VD = sums[head_name] if squares is None else jnp.zeros_like(sums[head_name])
        inputs = (normed_BSD, weights[head_name], rows["targets"], weights_BS, before_VD)
        loss, dnormed_BSD, dhead_VD = loss_and_gradients(*inputs, z_loss_weight=train.z_loss_weight, **bounds)
        # Each stage goes back through the norm with its part: a linear map, so parts may be added after it.
        dnorm, dh_BSD = norm_backward(ops.constrain(dnormed_BSD, FULL_SEQUENCE))
        if squares is not None:
            sums = squares.head(sums, rows, dhead_VD, dnorm, valid)
            dhead_VD = sums[head_name] + dhead_VD
        dnorm = jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), sums["final_norm"], dnorm)
        return loss, sum_over_stages(ops.constrain(dh_BSD, SHARDED_SEQUENCE)), sums | {head_name: dhead_VD, "final_norm": dnorm}

    def head_loss(h_BSD, rows: Rows):
        weights_BS = rows["mask"].astype(jnp.float32) * scale
        return loss_alone(norm(weights["final_norm"], h_BSD), weights[head_name], rows["targets"], weights_BS, **bounds)

    def forward(chunk, h_BSD, rows: Rows, ring, slot, following):
        then = None if following is None else following * loop.length + loop.length - 1
        return loop.forward(weights["layers"], chunk, h_BSD, side(rows), ring, slot, then)

    def filed(found: tuple[jax.Array, Tree, Tree], rows: Rows, sums: Tree):
        dh_BSD, layers, of_layers = found
        sums = sums | {"layers": layers}
        if squares is not None:
            assert of_layers is not None, "with squares, access.square makes them"
            sums = squares.file(sums, rows, of_layers)
        return ops.constrain(dh_BSD, SHARDED_SEQUENCE), sums

    def backward(chunk, dh_BSD, rows: Rows, ring, slot, sums: Tree, last, valid):
        arguments = (weights["layers"], chunk, dh_BSD, side(rows), ring, slot, sums["layers"], last, valid)
        return filed(loop.backward(*arguments), rows, sums)

    def both(ahead, back, ring, sums: Tree, valid):
        one, other = (Pass(chunk, x_BSD, side(rows), slot) for chunk, x_BSD, rows, slot in (ahead, back))
        forward, backward = loop.both(weights["layers"], one, other, ring, sums["layers"], valid)
        return forward, filed(backward, back[2], sums)

    return Stage(
        look_up=partial(look_up, weights["embedding"]),
        look_up_backward=look_up_backward,
        forward=forward,
        backward=backward,
        both=both if parallel.overlap_passes else None,
        head=head,
        head_loss=head_loss,
        new_ring=lambda slots, h_BSD, rows: loop.new_ring(slots, weights["layers"], h_BSD, side(rows)),
    )


def new_sums(weights: Tree, access: WeightAccess) -> Tree:
    """Zeros for gradients: of the weights' shapes, or of a rank's share of them if `access` scatters."""
    gather, scatter = access.gather, access.scatter
    if scatter is None:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    layers = jax.tree.leaves(weights)[0].shape[0]

    def share(weights):
        layer = jax.tree.map(lambda w: w[0], weights)
        return scatter(gather(layer) if gather else layer)

    return jax.tree.map(lambda x: jnp.zeros((layers, *x.shape), jnp.float32), jax.eval_shape(share, weights))
