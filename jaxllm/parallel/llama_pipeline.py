"""The Llama as a pipeline: what each rank does in a tick, and the forward and backward pass of a step made of it.

Runs in the region that is manual over (replica, pipe, data, context). Each rank of `pipe` has its stages' layers and a slice of
the vocabulary, of the embedding and of the head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.config.layer_stack import adds_in_matmuls
from jaxllm.config.remat_policy import policy_of
from jaxllm.mesh.axes import PIPE, TENSOR
from jaxllm.mesh.sharding import tensor_shard_map
from jaxllm.model.layers import FULL_SEQUENCE, SHARDED_SEQUENCE, rotary_table, scaled_embeddings
from jaxllm.model.llama import BlockContext
from jaxllm.model.loss import VocabularySlice, loss_sums, sums_and_gradients, token_losses
from jaxllm.parallel import accumulate
from jaxllm.parallel.context import ParallelContext
from jaxllm.parallel.grad_square_norms import GradSquareNorms, StageTap
from jaxllm.parallel.kernels import add_over_ranks
from jaxllm.parallel.layer_loop import LayerLoop, Pass, Ring, remat
from jaxllm.parallel.ordering import after, zero_of
from jaxllm.parallel.parameters import flatten_layers
from jaxllm.parallel.pipeline_executor import Microbatch, Unit, run_schedule, sum_over_stages
from jaxllm.parallel.types import (
    UNSCALED,
    Batch,
    GradientRegion,
    Loss,
    LossRegion,
    LossScale,
    Params,
    Rows,
    TokenLossRegion,
    Tree,
    WeightAccess,
)
from jaxllm.parallel.vjp_residuals import extract, restore
from jaxllm.pipeline_schedule import Schedule, forward_only, make_schedule


class StageSums(NamedTuple):
    """The sums that the ticks of a step carry."""

    gradients: Params
    """float32: of the rank's weights, or of its shard of them where ZeRO scatters."""
    squares: Any
    """StageSquares; None without a tap."""


def pipeline_gradient_region(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> GradientRegion:
    """Gradients by a pipeline schedule."""
    parallel, stack_dims, scatter = ctx.config.parallel, ctx.stack_dims, ctx.access.scatter

    def finalize(name: str, g: jax.Array, w: jax.Array) -> jax.Array:
        if name == "layers":
            g = g.reshape(*w.shape[:stack_dims], *g.shape[0 if ctx.has_own_layers else 1 :])
        return g if name == "layers" and scatter else g[None]

    def region(weights: Params, batch: Batch):
        scale = ctx.loss_scale(batch)
        flat = flatten_layers(weights, stack_dims)
        zeros = {name: new_sums(tree, WeightAccess()) for name, tree in ctx.trained(flat).items() if name != "layers"}
        zeros["layers"] = new_sums(flat["layers"], ctx.access, ctx.trained_layer)
        M, B, S = batch["tokens"].shape
        schedule = make_schedule(parallel.schedule, parallel.pipe, M, parallel.virtual_stages)
        stage_tap = StageTap(tap, ctx.ops, schedule, ctx.config.model.tie_embeddings) if tap else None
        squares = stage_tap.new((B, S, ctx.config.model.hidden_size)) if stage_tap else None
        stage = LlamaStage(ctx, {**flat, "layers": ctx.rounded(flat["layers"])}, scale, tap, stage_tap)
        loss, sums = _run(ctx, schedule, stage, batch, StageSums(zeros, squares))
        own = ctx.trained(weights)
        gradients = {name: jax.tree.map(partial(finalize, name), sums.gradients[name], own[name]) for name in own}
        parts = tap.parts(sums.squares.by_microbatch, batch["mask"], ctx.loss_axes) if tap else None
        return jax.lax.psum(loss, ctx.loss_axes), gradients, parts

    return region


def pipeline_loss_region(ctx: ParallelContext) -> LossRegion:
    """The forward pass of a pipeline alone."""

    def region(weights: Params, batch: Batch):
        total = _forward_only(ctx, LlamaStage, weights, batch, ())
        return jax.lax.psum((total, batch["mask"].sum()), ctx.batch_axes)

    return region


def pipeline_token_loss_region(ctx: ParallelContext) -> TokenLossRegion:
    """The forward pass of a pipeline alone, with the cross-entropy of each token."""
    return lambda weights, batch: _forward_only(ctx, TokenLossStage, weights, batch, batch["tokens"].shape)


def _forward_only(ctx: ParallelContext, stage_of: type[LlamaStage], weights: Params, batch: Batch, shape: tuple[int, ...]):
    """The sum, of this shape, of what `head_loss` returns for each microbatch."""
    parallel = ctx.config.parallel
    schedule = forward_only(parallel.pipe, batch["tokens"].shape[0], parallel.virtual_stages)
    stage = stage_of(ctx, flatten_layers(weights, ctx.stack_dims), UNSCALED)
    stage.sums_shape = shape
    return _run(ctx, schedule, stage, batch, None)[0]


def _run(ctx: ParallelContext, schedule: Schedule, stage: LlamaStage, batch: Batch, sums: StageSums | None):
    model, shape = ctx.config.model, batch["tokens"].shape[1:]
    zeros_BSD = ctx.ops.constrain(jnp.zeros((*shape, model.hidden_size), model.compute_dtype), SHARDED_SEQUENCE)
    return run_schedule(schedule, stage, batch, zeros_BSD, sums)


class LlamaStage:
    """A rank's work in a tick. pipeline_executor.py calls the methods where `pipe` is manual. Hidden states are [B, S, D].
    `ring` holds the residuals of several passes. Methods add gradients to `sums` and return it.

    Args:
      weights: the rank's; layers [chunks x layers of a chunk, ...].
      scale: factors of losses in the sum.
      tap, stage_tap: take the squares of gradients; None: nothing is measured.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        weights: Params,
        scale: LossScale,
        tap: GradSquareNorms | None = None,
        stage_tap: StageTap | None = None,
    ):
        model, parallel, train = ctx.config.model, ctx.config.parallel, ctx.config.train
        self._model, self._pipe, self._tensor, self._ops = model, parallel.pipe, parallel.tensor, ctx.ops
        self._weights, self._scale, self._tap = weights, scale.targets, stage_tap
        self._kinds = ctx.kinds_here()
        # An identity layer has no losses of its own.
        scales = scale.positions * ctx.rows_here(jnp.ones(model.num_layers, jnp.float32))
        self._losses_scale = defaultdict(lambda: scales)
        self._head = "embedding" if model.tie_embeddings else "head"
        self._z_loss_weight = train.z_loss_weight
        network = nnx.merge(ctx.graph, ctx.table)
        self._norm_graph = nnx.split(network.final_norm)[0]
        self._loop: Any = stage_layers(ctx, nnx.split(network.layers)[0], tap)
        part = VocabularySlice(
            first=lambda rows: jax.lax.axis_index(PIPE) * rows,
            total=lambda x: jax.lax.psum(x, PIPE),
            largest=lambda x: jax.lax.pmax(x, PIPE),
        )
        self._bounds = {"part": part, "vocab_size": model.vocab_size, "chunk_tokens": train.loss_chunk_tokens}
        self._loss, self.sums_shape = ctx.loss, ctx.sums_shape
        """Shape of what `head` returns as the loss."""
        self._whole_head: Any = None if ctx.loss is None else gather_over_stages(weights[self._head])

    @jax.named_scope("embedding")
    def look_up(self, microbatch: Microbatch) -> jax.Array:
        """The embeddings of a microbatch, on every rank."""
        found_BSD = self._ops.look_up(self._weights["embedding"], microbatch.rows["tokens"])
        return self._ops.constrain(scaled_embeddings(self._model, found_BSD), SHARDED_SEQUENCE)

    @jax.named_scope("embedding_backward")
    def look_up_backward(self, dh_BSD: jax.Array, microbatch: Microbatch, sums: StageSums) -> StageSums:
        """`sums` with the gradient of the embedding added. dh_BSD is zero except on the first stage."""
        if "embedding" not in sums.gradients:
            return sums
        dh_BSD = scaled_embeddings(self._model, dh_BSD)
        add = partial(add_over_ranks, ids_BS=microbatch.rows["tokens"], dh_BSD=dh_BSD, pipe=self._pipe, tensor=self._tensor)
        before_VD = sums.gradients["embedding"]
        if self._tap is None:
            return StageSums(sums.gradients | {"embedding": add(before_VD)}, None)
        own_VD = add(jnp.zeros_like(before_VD))
        squares = self._tap.on_embedding(sums.squares, microbatch.number, own_VD, dh_BSD)
        return StageSums(sums.gradients | {"embedding": before_VD + own_VD}, squares)

    @jax.named_scope("stage_forward")
    def forward(self, unit: Unit, h_BSD: jax.Array, ring: Ring | None, following: jax.Array | None):
        """(h, ring, gathered weights for the backward pass of chunk `following`). Without a ring nothing is kept."""
        then = None if following is None else following * self._loop.length + self._loop.length - 1
        h_BSD, _, ring, handed_over = self._loop.forward(self._weights["layers"], self._pass(unit, h_BSD), ring, then)
        return h_BSD, ring, handed_over

    @jax.named_scope("stage_backward")
    def backward(self, unit: Unit, dh_BSD: jax.Array, ring: Ring, sums: StageSums, handed_over: Tree, valid: jax.Array):
        """(dh, sums). `handed_over` is what `forward` returned last. If not `valid`, nothing is added."""
        layers, back = self._weights["layers"], self._pass(unit, dh_BSD)
        dh_BSD, layers, new = self._loop.backward(layers, back, ring, sums.gradients["layers"], handed_over, valid)
        squares = self._tap.add(sums.squares, unit.microbatch.number, new) if self._tap and new is not None else sums.squares
        return self._ops.constrain(dh_BSD, SHARDED_SEQUENCE), StageSums(sums.gradients | {"layers": layers}, squares)

    def head(self, h_BSD: jax.Array, microbatch: Microbatch, sums: StageSums, valid: jax.Array):
        """(loss, dh, sums) of a microbatch that has left the last stage, computed by all ranks."""
        rows, gradients = microbatch.rows, sums.gradients
        normed_BSD, norm_backward = jax.vjp(self._norm, self._weights["final_norm"], h_BSD)
        before_VD = gradients.get(self._head) if self._tap is None else jnp.zeros_like(gradients[self._head])
        loss, dnormed_BSD, dhead_VD = self._loss_gradients(normed_BSD, rows, before_VD, valid)
        # Each stage runs the norm's backward on its part. The map is linear, so the parts are added after it.
        dnorm, dh_BSD = norm_backward(self._ops.constrain(dnormed_BSD, FULL_SEQUENCE))
        squares = sums.squares
        if self._tap is not None:
            assert dhead_VD is not None, "nothing is frozen where squares are taken"
            squares = self._tap.on_head(squares, microbatch.number, rows["tokens"], dhead_VD, dnorm, valid)
            dhead_VD = gradients[self._head] + dhead_VD
        new = {self._head: dhead_VD}
        if "final_norm" in gradients:
            new["final_norm"] = jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), gradients["final_norm"], dnorm)
        dh_BSD = sum_over_stages(self._ops.constrain(dh_BSD, SHARDED_SEQUENCE))
        return loss, dh_BSD, StageSums(gradients | {name: new[name] for name in new if name in gradients}, squares)

    def _loss_gradients(self, normed_BSD: jax.Array, rows: Rows, before_VD: jax.Array | None, valid: jax.Array):
        """(loss, the stage's part of dnormed_BSD, before_VD with the head's gradient added; None if the head is frozen)"""
        if self._loss is not None:
            assert self._whole_head is not None, "gathered for this loss"
            inputs = (normed_BSD, self._whole_head, rows, valid)
            sums, dnormed_BSD, dhead_VD = stage_gradients(self._loss, self._model.vocab_size, *inputs)
            return sums, dnormed_BSD, None if before_VD is None else before_VD + dhead_VD.astype(jnp.float32)
        weights_BS = jnp.where(valid, rows["mask"].astype(jnp.float32) * self._scale, 0)
        inputs = (normed_BSD, self._weights[self._head], rows["targets"], weights_BS)
        options = {**self._bounds, "z_loss_weight": self._z_loss_weight, "dhead_VD": before_VD, "with_gradients": True}
        (_, loss), (dnormed_BSD, dhead_VD) = sums_and_gradients(*inputs, **options)
        return loss, dnormed_BSD, dhead_VD

    def head_loss(self, h_BSD: jax.Array, microbatch: Microbatch) -> jax.Array:
        """The loss alone."""
        rows, head_VD = microbatch.rows, self._weights[self._head]
        weights_BS = rows["mask"].astype(jnp.float32) * self._scale
        normed_BSD = self._norm(self._weights["final_norm"], h_BSD)
        return sums_and_gradients(normed_BSD, head_VD, rows["targets"], weights_BS, z_loss_weight=0.0, **self._bounds)[0][1]

    def new_ring(self, slots: int, h_BSD: jax.Array, microbatch: Microbatch) -> Ring:
        """Room for `slots` residuals. Only shapes of the arguments matter."""
        return self._loop.new_ring(slots, self._weights["layers"], h_BSD, self._block_context(microbatch.rows))

    def _norm(self, scale: Tree, h_BSD: jax.Array) -> jax.Array:
        return self._ops.constrain(nnx.merge(self._norm_graph, scale)(h_BSD), FULL_SEQUENCE)

    def _block_context(self, rows: Rows) -> BlockContext:
        return BlockContext(rotary_table(self._model, rows["positions"]), rows.get("segments"), self._kinds)

    def _pass(self, unit: Unit, x_BSD: jax.Array) -> Pass:
        return Pass(unit.chunk, x_BSD, self._block_context(unit.microbatch.rows), unit.slot, self._losses_scale)


class TokenLossStage(LlamaStage):
    """A rank's work in a tick of a forward pass whose sum is an array of each token's loss."""

    def head_loss(self, h_BSD: jax.Array, microbatch: Microbatch) -> jax.Array:
        normed_BSD = self._norm(self._weights["final_norm"], h_BSD)
        found_BS = token_losses(normed_BSD, self._weights[self._head], microbatch.rows["targets"], **self._bounds)
        return jnp.zeros(self.sums_shape, jnp.float32).at[microbatch.number].set(found_BS)


def new_sums(weights: Tree, access: WeightAccess, trained: Callable[[Tree], Tree] = lambda tree: tree) -> Tree:
    """Zeros for gradients of the trained weights: of their shapes, or of a rank's shard of them if `access` scatters."""
    gather, scatter = access.gather, access.scatter
    if scatter is None:
        return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained(weights))
    layers = jax.tree.leaves(weights)[0].shape[0]

    def shard(weights):
        layer = jax.tree.map(lambda w: w[0], weights)
        return scatter(trained(gather(layer) if gather else layer))

    return jax.tree.map(lambda x: jnp.zeros((layers, *x.shape), jnp.float32), jax.eval_shape(shard, weights))


# ------------------------------------------------------------------------------------------- layers with arrays of their own
# No weight is cut out of a stack, and matmuls add their gradients to the sums (accumulate.py). The stage has one chunk. A tick
# without work takes the gradient of its output as zero, so that it adds zeros: its residuals are those of its microbatch.
#
# Without a loop only tokens keep XLA from taking several layers at once: it would read the rows of all layers in one kernel,
# put off the gradients of weights, and write residuals at the end of a pass. 8B in two stages with `selective` would take 85.0
# GiB of temporaries instead of 70.6, and 6,279 ms instead of 6,178 by the kernel account (JAX 0.12.0.1).


class StageLayers:
    """A stage's layers under the config's remat policy, with the interface of LayerLoop. `layers` and `sums` are lists with a
    tree for each layer."""

    def __init__(self, ctx: ParallelContext, graph: nnx.GraphDef):
        in_matmuls, table, parallel = adds_in_matmuls(ctx.config), ctx.table["layers"], ctx.config.parallel
        ops = replace(ctx.ops, matmul=accumulate.matmul) if in_matmuls else ctx.ops
        # Forward and backward pass of a microbatch are in different ticks, which XLA does not merge.
        run = remat(policy_of(parallel.remat, ctx.config.model), replace(ctx, ops=ops).block(graph), in_loop=True)
        with_sums = partial(accumulate.with_sums, table=table, in_matmuls=in_matmuls)
        self._block = lambda pair, h_BSD, block_context: run(with_sums(*pair), h_BSD, block_context)
        self._evaluated = ctx.block(graph)
        self.length = ctx.stacking.chunk
        # In the place of the sums in a forward pass, which does not read them.
        self._no_sums = jax.tree.map(lambda p: jnp.zeros(p.shape[ctx.stack_dims :], jnp.float32), table)
        # Tensor ranks share what tokens are made of: XLA would gather it.
        self._after = after if parallel.tensor == 1 else lambda x, *tokens: x

    def new_ring(self, slots: int, layers: list[Tree], h_BSD: jax.Array, block_context: BlockContext) -> list[Ring]:
        """Room for `slots` residuals of each layer, in a ring of its own: XLA compiles a kernel once for all layers if none of
        its indices says which layer it is. No stage reads a slot that it has not written, not even in ticks without work
        (pipeline_schedule.py); there it multiplies what it reads by zero."""

        def residuals(*inputs: Any) -> Any:
            return extract(jax.vjp(self._block, *inputs)[1])

        kept = jax.eval_shape(residuals, (layers[0], self._no_sums), h_BSD, block_context.of_layer(0))
        on_host = (False,) * len(jax.tree.leaves(kept))
        return [Ring(jax.tree.map(lambda x: jax.lax.empty((slots, *x.shape), x.dtype), kept), on_host) for _ in layers]

    def forward(self, layers: list[Tree], ahead: Pass, ring: list[Ring] | None = None, then: Any = None) -> tuple[Any, ...]:
        """(h, None, ring, None)"""
        h_BSD, ring = ahead.x_BSD, ring and list(ring)
        for number, layer in enumerate(layers):
            inputs = h_BSD, ahead.block_context.of_layer(number)
            if ring is None:
                h_BSD, _ = self._evaluated(layer, *inputs)
                continue
            (h_BSD, _), vjp = jax.vjp(self._block, (layer, self._no_sums), *inputs)
            ring[number] = ring[number].write(ahead.slot, extract(vjp))
            h_BSD = self._after(h_BSD, zero_of(ring[number].kept))
        return h_BSD, None, ring, None

    def backward(
        self, layers: list[Tree], back: Pass, ring: list[Ring], sums: list[Tree], weights: Tree = None, valid: Any = True
    ) -> tuple[jax.Array, list[Tree], None]:
        """(dh, sums, None)"""
        dh_BSD, new = jnp.where(valid, back.x_BSD, 0), list(sums)
        template = jax.eval_shape(
            lambda *inputs: jax.vjp(self._block, *inputs)[1], (layers[0], sums[0]), dh_BSD, back.block_context.of_layer(0)
        )
        for number in reversed(range(self.length)):
            kept = ring[number].read(self._after(back.slot, zero_of(dh_BSD)))
            inputs = (layers[number], sums[number]), back.block_context.of_layer(number)
            (_, new[number]), dh_BSD, _ = restore(template, *inputs, kept)((dh_BSD, {}))
            dh_BSD = self._after(dh_BSD, zero_of(new[number]))
        return dh_BSD, new, None


def stage_layers(ctx: ParallelContext, graph: nnx.GraphDef, tap: GradSquareNorms | None) -> LayerLoop | StageLayers:
    """What runs a stage's layers. `graph`: of the layers."""
    if ctx.has_own_layers:
        return StageLayers(ctx, graph)
    return LayerLoop(ctx.block(graph), ctx.stacking.chunk, ctx.config, ctx.access, tap, ctx.trained_layer)


# --------------------------------------------------------------------------------------------------- a loss of the caller's


def gather_over_stages(head_VD: jax.Array) -> jax.Array:
    """[stage, rows of a stage, width] on every stage, from the rows of each. Call it where `pipe` is manual."""
    gather = lambda x: jax.lax.all_gather(x, PIPE)  # noqa: E731
    return tensor_shard_map(gather, in_specs=(P(TENSOR),), out_specs=P(None, TENSOR))(head_VD)


def stage_gradients(
    loss: Loss, vocab_size: int, h_BSD: jax.Array, head_PVD: jax.Array, rows: Rows, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums, dh_BSD, dhead_VD) of a microbatch in a pipeline: dh is this stage's part of a sum over stages, and dhead has this
    stage's rows. All stages compute the same, as none has other work then. If not `valid`, gradients are 0.

    Args:
      head_PVD: of gather_over_stages.
    """

    def of(h_BSD: jax.Array, head_PVD: jax.Array) -> jax.Array:
        return loss_sums(loss, vocab_size, h_BSD, head_PVD.reshape(-1, head_PVD.shape[-1]), rows)

    sums, backward = jax.vjp(of, h_BSD, head_PVD)
    dh_BSD, dhead_PVD = backward(jnp.array([1.0, 0.0], jnp.float32))
    stage = jax.lax.axis_index(PIPE)
    dhead_VD = jax.lax.dynamic_index_in_dim(dhead_PVD, stage, keepdims=False)
    return sums, jnp.where(valid & (stage == 0), dh_BSD, 0), jnp.where(valid, dhead_VD, 0)
