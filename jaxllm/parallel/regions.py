"""The forward and backward pass of a step without a pipeline: gradient accumulation over microbatches.

A region is run by each rank of (replica, pipe, data, context) on its own weights and rows, with `tensor` left to XLA. Gradients
are added to running sums where they are made: of the layers in their loop (layer_loop.py) or, in an unrolled stack, in the
matmul that makes them (accumulate.py); with ZeRO 2 and 3 after they are reduced and scattered (zero.py). At ZeRO 0 and 1 the
first microbatch may gather the step's weights, and the last one reduce its gradients.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config.layer_stack import adds_in_matmuls
from jaxllm.config.remat_policy import policy_of
from jaxllm.mesh.axes import PIPE
from jaxllm.model.experts import Routes, spread
from jaxllm.model.layers import FULL_SEQUENCE, SHARDED_SEQUENCE, Losses, Ops, rotary_table, scaled_embeddings
from jaxllm.model.llama import BlockContext, BlockFunction, apply_block
from jaxllm.model.loss import token_losses
from jaxllm.parallel import accumulate
from jaxllm.parallel.context import ParallelContext
from jaxllm.parallel.expert_parallel import DeliverToRanks
from jaxllm.parallel.grad_square_norms import GradSquareNorms
from jaxllm.parallel.layer_loop import HostSums, LayerLoop, Pass, remat
from jaxllm.parallel.ordering import after, hidden_token, layer_by_layer, scalar_token, weights_token
from jaxllm.parallel.parameters import cut_layers, flatten_layers
from jaxllm.parallel.pipeline_executor import sum_over_stages
from jaxllm.parallel.types import (
    LAYER_ACTIVATION_NORM,
    UNSCALED,
    Accumulators,
    Batch,
    GradientRegion,
    LossRegion,
    LossScale,
    Params,
    Rows,
    TokenLossRegion,
    Tree,
)
from jaxllm.parallel.vjp_residuals import extract, restore
from jaxllm.parallel.zero import Phase, zeros_of_shard

Sums = Callable[..., tuple[jax.Array, tuple[jax.Array, Params | None]]]
"""(accumulators, weights, rows of one microbatch, scale, earlier) -> (objective, (loss, full weights that are kept)): sums of
losses times their `scale`. The objective is differentiated with respect to the accumulators. Without them there is no backward
pass. `earlier`: sums of gradients of the microbatches before, which are reduced with this one's; None: there are none."""


def gradient_region(ctx: ParallelContext, tap: GradSquareNorms | None = None) -> GradientRegion:
    """Gradients by autodiff, a microbatch at a time."""
    gradient = jax.value_and_grad(microbatch_sums(ctx, tap), has_aux=True)

    def region(weights: Params, batch: Batch):
        scale = ctx.loss_scale(batch)
        read = {**weights, "layers": ctx.rounded(weights["layers"])}

        def microbatch(carry, rows: Rows):
            sums, loss = carry
            (_, (part, _)), (sums, squares) = add_gradients(sums, read, rows, scale)
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
        start = (first_sums(ctx, weights, batch["tokens"].shape[0]), jnp.zeros(ctx.sums_shape, jnp.float32))
        (gradients, loss), squares_MT = jax.lax.scan(microbatch, start, batch)
        on_host = {"layers": gradients.pop("layers").rows} if ctx.layers_on_host else {}
        if ctx.zero is None:
            gradients = jax.tree.map(lambda g: g[None].astype(jnp.float32), gradients)
        parts = tap.parts(squares_MT, batch["mask"], ctx.loss_axes) if tap else None
        return jax.lax.psum(loss, ctx.loss_axes), {**gradients, **on_host}, parts

    return region


def once_gradient_region(ctx: ParallelContext) -> GradientRegion:
    """Gradients by autodiff. The first microbatch gathers weights and the last one reduces gradients, layer by layer."""
    zero, plain = ctx.zero, dataclasses.replace(ctx, zero=None)
    assert zero is not None, "ParallelContext.sending_once has it"

    def gradient(ctx: ParallelContext, phase: Phase, sums: Params, *inputs: Any) -> tuple[jax.Array, Params, Params]:
        """(loss, kept weights, gradients)"""
        one = jax.value_and_grad(microbatch_sums(ctx, phase=phase), has_aux=True)
        (_, (loss, kept)), (sums, _) = one(Accumulators(sums), *inputs)
        return loss, kept, sums

    def region(shards: Params, batch: Batch):
        scale = ctx.loss_scale(batch)
        batch = zero.in_turn(batch, lambda: scalar_token(scale.targets))
        rows = jax.tree.map(lambda x: x[-1], batch)
        if len(batch["tokens"]) == 1:
            phase = Phase(gathers=zero.level == 1, reduces=True)
            loss, _, gradients = gradient(ctx, phase, _zeros(shards, jnp.float32), shards, rows, scale)
        else:
            weights, earlier, loss = all_but_last(shards, jax.tree.map(lambda x: x[:-1], batch), scale)
            # Else XLA would begin the last microbatch early, and keep the activations of two.
            rows = after(rows, _sums_token(ctx, earlier["layers"]))
            rows = zero.in_turn(rows, lambda: weights_token(earlier, ctx.step_layouts))
            part, _, gradients = gradient(ctx, Phase(reduces=True), reducible(earlier, shards), weights, rows, scale, earlier)
            loss, gradients = loss + part, jax.tree.map(first_elements, gradients, shards)
        loss = zero.in_turn(loss, lambda: weights_token(gradients, ctx.step_layouts))
        return jax.lax.psum(loss, ctx.loss_axes), gradients, None

    def reducible(earlier: Params, shards: Params) -> Params:
        """Accumulators of reduced gradients. Those of a stack, and at level 0 all, take the place of a rank's own sums."""
        if zero.level == 0:
            return earlier
        new = _zeros(shards, jnp.float32)
        return new if ctx.has_own_layers else {**new, "layers": earlier["layers"]}

    def first_elements(gradient: jax.Array, shard: jax.Array) -> jax.Array:
        return jax.lax.slice(gradient, [0] * shard.ndim, shard.shape)

    def all_but_last(shards: Params, batch: Batch, scale: LossScale) -> tuple[Params, Params, jax.Array]:
        """(full weights, sums of gradients, loss)"""

        def microbatch(carry, rows: Rows):
            sums, loss = carry
            part, _, sums = gradient(plain, Phase(), sums, weights, rows, scale)
            return (sums, loss + part), None

        weights, loss, sums = shards, jnp.zeros(ctx.sums_shape, jnp.float32), _zeros(ctx.table, jnp.float32)
        sums = cut_layers(sums) if ctx.has_own_layers else sums
        if zero.level == 1:
            rows, batch = (jax.tree.map(lambda x, part=part: x[part], batch) for part in (0, slice(1, None)))
            loss, weights, sums = gradient(ctx, Phase(gathers=True), sums, shards, rows, scale)
        if len(batch["tokens"]):
            (sums, loss), _ = jax.lax.scan(microbatch, (sums, loss), batch)
        return weights, sums, loss

    return region


def loss_region(ctx: ParallelContext) -> LossRegion:
    """The forward pass alone."""
    sums = microbatch_sums(ctx)

    def region(weights: Params, batch: Batch):
        def microbatch(total, rows: Rows):
            return total + sums(None, weights, rows, UNSCALED)[1][0], None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), batch)
        return jax.lax.psum((total, batch["mask"].sum()), ctx.batch_axes)

    return region


def token_loss_region(ctx: ParallelContext) -> TokenLossRegion:
    """The forward pass alone, with the cross-entropy of each token."""
    options = (ctx.config.model.vocab_size, ctx.config.train.loss_chunk_tokens)

    def losses_of(h_BSD: jax.Array, head_VD: jax.Array, sum_VD: None, rows: Rows, *_: Any) -> tuple[jax.Array, ...]:
        return jnp.zeros((), jnp.float32), token_losses(h_BSD, head_VD, rows["targets"], *options)

    sums = microbatch_sums(ctx, losses_of=losses_of)

    def region(weights: Params, batch: Batch):
        return jax.lax.map(lambda rows: sums(None, weights, rows, UNSCALED)[1][0], batch)

    return region


def layer_norms_region(ctx: ParallelContext) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """(weights, batch) -> float32 [num_layers] by name: the root mean square of each layer's output, and with experts how its
    rows are spread over them (experts.spread). Over all positions of the first microbatch, with or without a target, on all
    ranks along batch_axes.

    It is a forward pass apart from the train step. The stages of a pipeline take turns without a schedule: all stages compute
    in each turn, and only the result of the turn's stage is used. So it takes pipe times as long as without a pipeline.
    """
    model, stacking, zero = ctx.config.model, ctx.stacking, ctx.zero
    stages, gather, counts = stacking.stages, ctx.access.gather, []

    def run_experts(function: Any, x_BSD: jax.Array, routes: Routes, *weights: jax.Array) -> jax.Array:
        counts.append([routes.counts(model.num_experts or 1)])
        if isinstance(ctx.ops.deliver, DeliverToRanks):
            counts[-1].append(ctx.ops.deliver.rows_dropped(routes.ids_BSK))
        return ctx.ops.run_experts(function, x_BSD, routes, *weights)

    ops = dataclasses.replace(ctx.ops, run_experts=run_experts)

    def region(weights: Params, batch: Batch) -> dict[str, jax.Array]:
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
            return h_BSD, (jnp.sum(jnp.square(h_BSD.astype(jnp.float32))), [counts.pop()] if counts else [])

        def turn(h_BSD, number):
            h_BSD, found = jax.lax.scan(layer, h_BSD, number // stages * stacking.chunk + jnp.arange(stacking.chunk))
            if stages > 1:
                is_mine = jax.lax.axis_index(PIPE) == number % stages
                h_BSD = sum_over_stages(jnp.where(is_mine, h_BSD, 0))
                found = jax.lax.psum(jax.tree.map(lambda x: jnp.where(is_mine, x, 0), found), PIPE)
            return h_BSD, found

        h_BSD = scaled_embeddings(model, ops.look_up(weights["embedding"], rows["tokens"]))
        h_BSD = images_in_places(ctx, weights, h_BSD, rows) if "images" in rows else h_BSD
        h_BSD = ops.constrain(h_BSD, SHARDED_SEQUENCE)
        _, found = jax.lax.scan(turn, h_BSD, jnp.arange(stages * stacking.virtual_stages))
        # The turns go through the layers in order; identity layers come last.
        of_layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: model.num_layers], found)
        squares, counted = jax.lax.psum(of_layers, ctx.batch_axes)
        positions = jax.lax.psum(jnp.float32(rows["tokens"].size), ctx.batch_axes)
        norms = {LAYER_ACTIVATION_NORM: jnp.sqrt(squares / (positions * model.hidden_size))}
        return norms | (spread(*counted[0]) if counted else {})

    return region


def images_in_places(ctx: ParallelContext, weights: Params, h_BSD: jax.Array, rows: Rows) -> jax.Array:
    """Embeddings with the features of a microbatch's images in their places."""
    network = nnx.merge(ctx.graph, ctx.table)
    vision, projector = (nnx.merge(nnx.split(getattr(network, name))[0], weights[name]) for name in ("vision", "projector"))
    return vision.in_places(projector, h_BSD, rows["tokens"], rows["images"])


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
        dtypes = {name: layers if name == "layers" else jnp.float32 for name in weights}
        return {name: _zeros(tree, dtypes[name]) for name, tree in ctx.trained(weights).items()}
    table, layouts = ctx.trained(ctx.table), ctx.trained(ctx.layouts)
    zeros = jax.tree.map(lambda p, layout: zeros_of_shard(p.shape, layout, ctx.zero_ranks), table, layouts)
    return cut_layers(zeros) if ctx.has_own_layers else zeros


def _zeros(weights: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), weights)


def _sums_token(ctx: ParallelContext, layers: Tree) -> jax.Array:
    """The token of the layers' sums of gradients."""
    if ctx.has_own_layers:
        return weights_token(layers, ctx.step_layouts["layers"])
    # Of the smallest stack: XLA copies a large one that is read here and added to later. A loop makes all of them.
    pairs = zip(jax.tree.leaves(layers), jax.tree.leaves(ctx.step_layouts["layers"]), strict=True)
    return weights_token(*min(pairs, key=lambda pair: pair[0].size))


def microbatch_sums(
    ctx: ParallelContext,
    tap: GradSquareNorms | None = None,
    phase: Phase = Phase(),
    losses_of: Callable[..., Any] | None = None,
) -> Sums:
    """The forward pass of one microbatch, to be differentiated.

    Args:
      losses_of: in the place of accumulate.losses_of.
    """
    model, ops, zero = ctx.config.model, ctx.ops, ctx.zero
    network = nnx.merge(ctx.graph, ctx.table)
    norm, head = nnx.split(network.final_norm)[0], "embedding" if model.tie_embeddings else "head"
    losses_of = losses_of or accumulate.losses_of(ctx.config, ctx.loss)
    is_full = ctx.has_own_layers and (zero is None or zero.once)
    of_layers = _own_layers if is_full else partial(_looped_layers, tap=tap if zero else None)
    run_layers: Callable[..., tuple[jax.Array, Losses, Any]] = partial(of_layers, ctx, nnx.split(network.layers)[0], phase)

    def sums(
        accumulators: Accumulators | None, weights: Params, rows: Rows, scale: LossScale, earlier: Params | None = None
    ) -> Any:
        rest = {name: w for name, w in weights.items() if name != "layers"}
        own: Any = accumulators and accumulators.sums
        if zero and not zero.once:
            # Where ZeRO reads the weights of each microbatch, it adds their gradients too.
            rest, own = zero.read(rest, accumulators, tap), None
        elif zero and phase.gathers:
            rest, rows = zero.gather_rest(rest, rows)
        weights = {**rest, "layers": weights["layers"]}

        def own_sum(name: str, x: Any = ()) -> tuple[Any, jax.Array]:
            """(x, the accumulator of an entry's full gradients), with x where these are complete in the backward pass."""
            if zero is None or not phase.reduces:
                return x, own[name]
            return zero.reduced(name, x, own[name], earlier[name] if earlier else _zeros(rest[name], jnp.float32))[:2]

        def owned(name: str) -> Any:
            """An entry whose gradients are made, and then added to its accumulator."""
            return weights[name] if own is None or name not in own else accumulate.accumulated(weights[name], own_sum(name)[1])

        tokens, final_norm, head_sum = rows["tokens"], weights["final_norm"], None
        with jax.named_scope("embedding"):
            if own is None or "embedding" not in own:
                h_BSD = ops.look_up(weights["embedding"], tokens)
            else:
                look_up = partial(accumulate.look_up, ops, ctx.config.parallel.tensor, is_head=model.tie_embeddings)
                h_BSD, head_sum = look_up(weights["embedding"], own_sum("embedding")[1], tokens)
            h_BSD = scaled_embeddings(model, h_BSD)
            if "images" in rows:
                h_BSD = images_in_places(ctx, {name: owned(name) for name in ("vision", "projector")}, h_BSD, rows)
            h_BSD = ops.constrain(h_BSD, SHARDED_SEQUENCE)
        block_context = BlockContext(rotary_table(model, rows["positions"]), rows.get("segments"), ctx.kinds_here())
        h_BSD, own_losses, kept = run_layers(weights["layers"], accumulators, earlier, h_BSD, block_context)
        if own is not None and "final_norm" in own:
            h_BSD, norm_sum = own_sum("final_norm", h_BSD)
            final_norm = accumulate.accumulated(final_norm, norm_sum)
        h_BSD = ops.constrain(nnx.merge(norm, final_norm)(h_BSD), FULL_SEQUENCE)
        is_frozen = accumulators is not None and head not in accumulators.sums
        if own is not None and head_sum is None and not is_frozen:
            h_BSD, head_sum = own_sum("head", h_BSD)
        objective, loss = losses_of(h_BSD, weights[head], head_sum, rows, scale.targets, is_frozen)
        objective = sum((scale.positions * x for x in own_losses.values()), start=objective)
        return objective, (loss, {**rest, "layers": kept} if kept is not None else None)

    return sums


def _looped_layers(
    ctx: ParallelContext,
    graph: nnx.GraphDef,
    phase: Phase,
    layers: Tree,
    accumulators: Accumulators | None,
    earlier: Params | None,
    h_BSD: jax.Array,
    block_context: BlockContext,
    *,
    tap: GradSquareNorms | None,
) -> tuple[jax.Array, Losses, Tree | None]:
    """(h, sums of the layers' own losses, the layers' full weights if the phase keeps them)"""
    access = ctx.zero.access(phase) if ctx.zero and ctx.zero.once else ctx.access
    if ctx.has_own_layers:
        loop: LayerLoop = ShardedLayers(ctx, graph, tap)
    else:
        loop = LayerLoop(ctx.block(graph), ctx.config.model.num_layers, ctx.config, access, tap, ctx.trained_layer)
    own = accumulators and accumulators._replace(sums=accumulators.sums["layers"])
    return loop.run(layers, own, h_BSD, block_context, adds=earlier is not None)


def _own_layers(
    ctx: ParallelContext,
    graph: nnx.GraphDef,
    phase: Phase,
    layers: list[Tree],
    accumulators: Accumulators | None,
    earlier: Params | None,
    h_BSD: jax.Array,
    block_context: BlockContext,
) -> tuple[jax.Array, Losses, list[Tree] | None]:
    """(h, sums of the layers' own losses, the layers' full weights if the phase keeps them)"""
    model, ops, zero = ctx.config.model, ctx.ops, ctx.zero
    # Where matmuls add to what is reduced next, XLA's scheduler starts the transfers too late to hide them.
    in_matmuls = accumulators is not None and earlier is None and adds_in_matmuls(ctx.config)
    if in_matmuls:
        ops = dataclasses.replace(ops, matmul=accumulate.matmul)
    block_of, token = _blocks(ctx, graph, ops), 0.0
    full, inputs, losses = [], [], {}
    for number, layer in enumerate(layers):
        inputs.append(h_BSD)
        if zero and phase.gathers:
            # One transfer at a time, and at most two layers ahead of its use. If it waited for the input of the layer before,
            # XLA's scheduler would start every second one too late.
            if number > 1:
                layer = after(layer, weights_token(full[-1], zero.layouts["layer"]), hidden_token(inputs[number - 2]))
            layer = zero.gather_layer(layer)
            full.append(layer)
        if accumulators is not None:
            total = accumulators.sums["layers"][number]
            if zero and phase.reduces:
                before = earlier["layers"][number] if earlier else _zeros(layer, model.compute_dtype)
                h_BSD, total, token = zero.reduced("layer", h_BSD, total, before, token)
            else:
                h_BSD, total = layer_by_layer(ctx.layer_layouts, h_BSD, total)
            (layer,) = ctx.rounded([layer]) if in_matmuls else [layer]
            layer = accumulate.with_sums(layer, total, ctx.table["layers"], in_matmuls)
        h_BSD, own = block_of(number)(layer, h_BSD, block_context)
        losses = {name: x + losses.get(name, 0.0) for name, x in own.items()}
    return h_BSD, losses, full or None


def _blocks(ctx: ParallelContext, graph: nnx.GraphDef, ops: Ops) -> Callable[[int], BlockFunction]:
    """number of a layer -> its block under the config's remat policy, outside a loop."""
    model = ctx.config.model
    policy, several = policy_of(ctx.config.parallel.remat, model), len(model.kinds) > 1

    def block_of(number: int) -> BlockFunction:
        # A number, so that the program has no conditional.
        kind = model.layer_kinds[number] if several else None
        here = dataclasses.replace(ops, attend=partial(ops.attend, kind=kind)) if several else ops
        run = remat(policy, partial(apply_block, graph, here), in_loop=False)
        return lambda layer, h_BSD, context: run(layer, h_BSD, context.of_kind(kind)._replace(kinds_L=None))

    return block_of


class ShardedLayers(LayerLoop):
    """Layers of ZeRO 2 and 3 with arrays of their own, in lists with a tree for each layer. Residuals are values like others,
    without a stack, and matmuls make the gradients in the dtype in which ranks add them.

        forward     gather, at most two layers ahead    layer n
        backward    gather of layer n - 1               layer n      reduce-scatter of layer n + 1
    """

    def __init__(self, ctx: ParallelContext, graph: nnx.GraphDef, tap: GradSquareNorms | None):
        super().__init__(ctx.block(graph), ctx.config.model.num_layers, ctx.config, ctx.access, tap, ctx.trained_layer)
        self._table, self._token = ctx.table["layers"], partial(weights_token, layouts=ctx.layer_layouts)
        dtypes = ctx.config.parallel.reduce_dtype, ctx.config.model.compute_dtype
        self._made = "float32" if "float32" in dtypes else "bfloat16"
        matmul = partial(accumulate.matmul, adds=False)
        self._block_of = _blocks(ctx, graph, dataclasses.replace(ctx.ops, matmul=matmul))

    def new_ring(self, *_: Any) -> list[Tree]:
        return []

    def forward(self, layers: list[Tree], ahead: Pass, ring: list[Tree] | None = None, then: Any = None) -> tuple[Any, ...]:
        """(h, none, residuals of each layer, full weights of the last one)"""
        h_BSD, inputs, full = ahead.x_BSD, [], None
        for number, layer in enumerate(layers):
            inputs.append(h_BSD)
            full = self._gathered(layer, [self._token(full), *map(hidden_token, inputs[-3:-2])] if number else [])
            block, weights = self._layer(number, full)
            if ring is None:
                h_BSD, _ = block(weights, h_BSD, ahead.block_context)
            else:
                (h_BSD, _), vjp = jax.vjp(block, weights, h_BSD, ahead.block_context)
                ring = [*ring, extract(vjp)]
        return h_BSD, {}, ring, full

    def backward(
        self, layers: list[Tree], back: Pass, ring: list[Tree], sums: list[Tree], weights: Tree = None, *_: Any, **__: Any
    ) -> tuple[jax.Array, list[Tree], Any]:
        dh_BSD, full, new, inputs, done = back.x_BSD, weights, list(sums), [], []
        scatter: Any = self._access.scatter
        squares: Any = self._tap.zeros() if self._tap else None
        for number in reversed(range(self.length)):
            inputs.append(dh_BSD)
            if number < self.length - 1:
                full = self._gathered(layers[number], [self._token(full), *map(hidden_token, inputs[-3:-2])])
            block, weights = self._layer(number, full)
            template = jax.eval_shape(lambda *x, block=block: jax.vjp(block, *x)[1], weights, dh_BSD, back.block_context)
            (_, gradients), dh_BSD, _ = restore(template, weights, back.block_context, ring[number])((dh_BSD, {}))
            squares = squares + self._tap.on_layer(gradients) if self._tap else None
            due = scatter(gradients)
            # XLA's scheduler would put off what nothing waits for, and keep the gradients of many layers.
            dh_BSD, done = after(dh_BSD, self._token(gradients), *done), [self._token(due)]
            with jax.named_scope("gradient_sums"):
                new[number] = jax.tree.map(jnp.add, sums[number], due)
        return dh_BSD, new, squares

    def _gathered(self, layer: Tree, tokens: list[jax.Array]) -> Tree:
        if not self._access.gather:
            return layer
        return self._access.gather(after(layer, *tokens) if tokens else layer)

    def _layer(self, number: int, full: Tree) -> tuple[BlockFunction, Tree]:
        """(block, its full weights and zeros, whose cotangents are the gradients)"""
        block, with_sums = self._block_of(number), partial(accumulate.with_sums, table=self._table, in_matmuls=True)
        return lambda pair, h_BSD, context: block(with_sums(*pair), h_BSD, context), (full, _zeros(full, self._made))
