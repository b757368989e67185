"""The forward and backward pass of a step without a pipeline: gradient accumulation over microbatches.

A region is run by each rank of (replica, pipe, data, context) on its own weights and rows, with `tensor` left to XLA. Gradients
are added to running sums where they are made: of the layers in their loop (layer_loop.py) or, in an unrolled stack, in the
matmul that makes them (accumulate.py); with ZeRO 2 and 3, and with ZeRO 1 and one microbatch, after they are reduced and
scattered (zero.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config.layer_stack import adds_in_matmuls
from jaxllm.config.remat_policy import policy_of
from jaxllm.model.layers import FULL_SEQUENCE, SHARDED_SEQUENCE, rotary_table
from jaxllm.model.llama import BlockContext, apply_block
from jaxllm.model.loss import cross_entropy
from jaxllm.parallel import accumulate
from jaxllm.parallel.context import ParallelContext
from jaxllm.parallel.grad_square_norms import GradSquareNorms
from jaxllm.parallel.host_layers import HostSums
from jaxllm.parallel.layer_loop import LayerLoop, unrolling
from jaxllm.parallel.ordering import after, hidden_token, weights_token
from jaxllm.parallel.remat import remat
from jaxllm.parallel.types import Accumulators, Batch, GradientRegion, LossRegion, Params, Rows, Tree
from jaxllm.parallel.zero import zeros_of_shard

Sums = Callable[[Accumulators | None, Params, Rows, jax.Array], tuple[jax.Array, jax.Array]]
"""(accumulators, weights, rows of one microbatch, scale) -> (objective, loss): sums of token losses times `scale`. The
objective is differentiated with respect to the accumulators. Without them there is no backward pass."""


def gradient_region(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> GradientRegion:
    """Gradients by autodiff, a microbatch at a time."""
    gradient = jax.value_and_grad(microbatch_sums(ctx, tap), has_aux=True)

    def region(weights: Params, batch: Batch):
        scale = _loss_scale(ctx, batch)

        def microbatch(carry, rows: Rows):
            sums, loss = carry
            (_, part), (sums, squares) = add_gradients(sums, weights, rows, scale)
            return (sums, loss + part), squares

        def add_gradients(sums: Params, *inputs: Any):
            if tap is None or ctx.zero is not None:
                return gradient(Accumulators(sums, tap.zeros() if tap else None), *inputs)
            # The squares are taken of a microbatch's gradients, so these are made apart.
            loss, (own, _) = gradient(Accumulators(first_sums(ctx, weights, 1)), *inputs)
            squares = tap.on_microbatch(own)
            with jax.named_scope("gradient_sums"):
                return loss, Accumulators(jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, own), squares)

        squares_MT: Any
        start = (first_sums(ctx, weights, batch["tokens"].shape[0]), jnp.zeros((), jnp.float32))
        (gradients, loss), squares_MT = jax.lax.scan(microbatch, start, batch)
        on_host = {"layers": gradients.pop("layers").rows} if ctx.layers_on_host else {}
        if ctx.zero is None:
            gradients = jax.tree.map(lambda g: g[None].astype(jnp.float32), gradients)
        parts = tap.parts(squares_MT, batch["mask"], ctx.loss_axes) if tap else None
        return jax.lax.psum(loss, ctx.loss_axes), {**gradients, **on_host}, parts

    return region


def single_gradient_region(ctx: ParallelContext) -> GradientRegion:
    """Gradients of one microbatch, whose weights are gathered and whose gradients are reduced by layer."""
    gradient, zero = jax.value_and_grad(microbatch_sums(ctx), has_aux=True), ctx.zero
    assert zero is not None, "ParallelContext.single has it"

    def region(shards: Params, batch: Batch):
        sums, rows = _zeros(shards, jnp.float32), jax.tree.map(lambda x: x[0], batch)
        (_, loss), (gradients, _) = gradient(Accumulators(sums), shards, rows, _loss_scale(ctx, batch))
        return jax.lax.psum(zero.last(loss, gradients, ctx.step_layouts), ctx.loss_axes), gradients, None

    return region


def loss_region(ctx: ParallelContext) -> LossRegion:
    """The forward pass alone."""
    sums = microbatch_sums(ctx)

    def region(weights: Params, batch: Batch):
        def microbatch(total, rows: Rows):
            return total + sums(None, weights, rows, jnp.ones((), jnp.float32))[1], None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), batch)
        return jax.lax.psum((total, batch["mask"].sum()), ctx.batch_axes)

    return region


def _loss_scale(ctx: ParallelContext, batch: Batch) -> jax.Array:
    """The share of each token's loss in the mean."""
    return 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), ctx.loss_axes), 1).astype(jnp.float32)


def first_sums(ctx: ParallelContext, weights: Params, microbatches: int) -> Params:
    """Zeros for the sums of a rank's gradients: of the weights' shapes, or of its shards of them. They are float32, but for
    full layers with a single microbatch: nothing is added to their gradients, which stay as the matmuls make them. With
    `layers_on_host` those of the layers are HostSums."""
    if ctx.layers_on_host:
        sums = jax.eval_shape(partial(_sums_on_device, ctx, microbatches=microbatches), weights)
        rest = {name: tree for name, tree in sums.items() if name != "layers"}
        return {**_zeros(rest, jnp.float32), "layers": HostSums.empty(sums["layers"], microbatches)}
    return _sums_on_device(ctx, weights, microbatches)


def _sums_on_device(ctx: ParallelContext, weights: Params, microbatches: int) -> Params:
    if ctx.zero is None:
        layers = jnp.float32 if microbatches > 1 else ctx.config.model.compute_dtype
        return {name: _zeros(tree, layers if name == "layers" else jnp.float32) for name, tree in weights.items()}
    return jax.tree.map(lambda p, layout: zeros_of_shard(p.shape, layout, ctx.zero_ranks), ctx.table, ctx.layouts)


def _zeros(weights: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), weights)


def microbatch_sums(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> Sums:
    """The forward pass of one microbatch, to be differentiated."""
    model, train, ops, zero = ctx.config.model, ctx.config.train, ctx.ops, ctx.zero
    network = nnx.merge(ctx.graph, ctx.table)
    norm, head = nnx.split(network.final_norm)[0], "embedding" if model.tie_embeddings else "head"
    run_layers = _own_layers if ctx.has_own_layers else partial(_stacked_layers, tap=tap if zero else None)
    run_layers = partial(run_layers, ctx, nnx.split(network.layers)[0])
    loss_options = (model.vocab_size, train.loss_chunk_tokens, train.z_loss_weight)
    once = zero if zero and zero.once else None

    def sums(accumulators: Accumulators | None, weights: Params, rows: Rows, scale: jax.Array) -> Any:
        rest = {name: w for name, w in weights.items() if name != "layers"}
        if once:
            rest, rows = once.gather_rest(rest, rows, scale)
        elif zero is not None:
            rest = zero.read(rest, accumulators, tap)
        weights = {**rest, "layers": weights["layers"]}
        # Where ZeRO reads the weights of each microbatch, it adds their gradients too.
        own: Any = accumulators.sums if accumulators and (zero is None or once) else None

        def own_sum(name: str, x: Any = ()) -> tuple[Any, jax.Array]:
            """(x, the accumulator of an entry's full gradients), with x where these are complete in the backward pass."""
            return once.reduced(name, x, own[name], _zeros(rest[name], jnp.float32))[:2] if once else (x, own[name])

        tokens, final_norm, head_sum = rows["tokens"], weights["final_norm"], None
        with jax.named_scope("embedding"):
            if own is None:
                h_BSD = ops.look_up(weights["embedding"], tokens)
            else:
                look_up = partial(accumulate.look_up, ops, ctx.config.parallel.tensor, is_head=model.tie_embeddings)
                h_BSD, head_sum = look_up(weights["embedding"], own_sum("embedding")[1], tokens)
            h_BSD = ops.constrain(h_BSD, SHARDED_SEQUENCE)
        block_context = (rotary_table(model, rows["positions"]), rows.get("segments"))
        h_BSD = run_layers(weights["layers"], accumulators, h_BSD, block_context)
        if own is not None:
            h_BSD, norm_sum = own_sum("final_norm", h_BSD)
            final_norm = accumulate.accumulated(final_norm, norm_sum)
        h_BSD = ops.constrain(nnx.merge(norm, final_norm)(h_BSD), FULL_SEQUENCE)
        targets_BS, weights_BS = rows["targets"], rows["mask"].astype(jnp.float32) * scale
        if own is None:
            return cross_entropy(h_BSD, weights[head], targets_BS, weights_BS, *loss_options)
        if head_sum is None:
            h_BSD, head_sum = own_sum("head", h_BSD)
        return accumulate.cross_entropy(h_BSD, weights[head], head_sum, targets_BS, weights_BS, *loss_options)

    return sums


def _stacked_layers(
    ctx: ParallelContext,
    graph: nnx.GraphDef,
    layers: Tree,
    accumulators: Accumulators | None,
    h_BSD: jax.Array,
    block_context: BlockContext,
    *,
    tap: GradSquareNorms | None,
) -> jax.Array:
    model, block = ctx.config.model, partial(apply_block, graph, ctx.ops)
    policy = policy_of(ctx.config.parallel.remat)
    loop = LayerLoop(block, model.num_layers, policy, ctx.access, tap, unroll=unrolling(model))
    own = accumulators and accumulators._replace(sums=accumulators.sums["layers"])
    return loop.run(layers, own, h_BSD, block_context)


def _own_layers(
    ctx: ParallelContext,
    graph: nnx.GraphDef,
    layers: list[Tree],
    accumulators: Accumulators | None,
    h_BSD: jax.Array,
    block_context: BlockContext,
) -> jax.Array:
    model, ops, zero = ctx.config.model, ctx.ops, ctx.zero
    in_matmuls = accumulators is not None and adds_in_matmuls(model)
    if in_matmuls:
        ops = dataclasses.replace(ops, matmul=accumulate.matmul)
    block = remat(policy_of(ctx.config.parallel.remat), partial(apply_block, graph, ops), in_loop=False)
    token: Any = 0.0
    full, inputs = [], []
    for number, layer in enumerate(layers):
        inputs.append(h_BSD)
        if zero is not None:
            # One transfer at a time, and at most two layers ahead of its use. If it waited for the input of the layer before,
            # XLA's scheduler would start every second one too late.
            if number > 1:
                layer = after(layer, weights_token(full[-1], zero.layouts["layer"]), hidden_token(inputs[number - 2]))
            layer = zero.gather_layer(layer)
            full.append(layer)
        if accumulators is not None:
            total = accumulators.sums["layers"][number]
            if zero is not None:
                zeros = _zeros(layer, model.compute_dtype)
                h_BSD, total, token = zero.reduced("layer", h_BSD, total, zeros, token)
            layer = accumulate.with_sums(layer, total, in_matmuls)
        h_BSD = block(layer, h_BSD, block_context)
    return h_BSD
