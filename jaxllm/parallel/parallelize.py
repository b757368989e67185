"""Puts the strategies together: the only file that knows them all.

The forward and backward pass of a step run in one shard_map over (pipe, data, context). XLA partitions `tensor` alone. If XLA
partitioned the data axis too, it would reduce over it in every layer of every microbatch. So each rank sums its own gradients
over its microbatches in float32 and returns them with a leading rank dim. They are summed once, outside, under the sharding in
which they are needed. XLA turns that into one all-reduce (ZeRO 0) or reduce-scatter (ZeRO 1) per parameter and step, which no
compute hides. So it does only in pipelines, and in a few other steps (layer_stack.sends_once). All others gather and reduce by
layer inside the region (zero.py).

With several replicas (mesh axis `replica`, also manual in the region) each replica first sums and scatters its own gradients.
Each device then has a shard of its replica's sum, and these are summed across replicas: one all-reduce per parameter and step.
DiLoCo skips that sum. Every replica has its own weights, gradients and loss, in arrays with a leading replica dim, and nothing
crosses between replicas.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import Config
from jaxllm.mesh.axes import PIPE
from jaxllm.mesh.sharding import Layout, Parameter, manual_spec, map_specs, partial_sum_spec, replica_spec
from jaxllm.model.loss import mean_of_sums
from jaxllm.parallel.context import ParallelContext, SpecTransform, leading_dims, master_specs, shared_by_replicas
from jaxllm.parallel.grad_square_norms import GradSquareNorms
from jaxllm.parallel.llama_pipeline import pipeline_gradient_region, pipeline_loss_region, pipeline_token_loss_region
from jaxllm.parallel.parameters import initial_params, join_layers
from jaxllm.parallel.regions import gradient_region, layer_norms_region, loss_region, once_gradient_region, token_loss_region
from jaxllm.parallel.types import Batch, GradientRegion, Loss, NoiseParts, Parallelized, Params


def parallelize(config: Config, mesh: Mesh, loss: Loss | None = None) -> Parallelized:
    """Builds the functions of a resolved config for a mesh.

    Args:
      loss: what is trained on; None: cross-entropy. `loss_sum` is always cross-entropy.

    Raises:
      ConfigError: a parameter does not fit the mesh.
    """
    ctx = ParallelContext.of(config, mesh, loss)
    scored = replace(ctx, loss=None)
    is_pipeline = ctx.sizes[PIPE] > 1
    make_gradient = pipeline_gradient_region if is_pipeline else gradient_region
    loss_of = pipeline_loss_region(scored) if is_pipeline else loss_region(scored)
    token_loss_of = pipeline_token_loss_region(scored) if is_pipeline else token_loss_region(scored)
    # Where a stage's matmuls add to the sums, no gradient is there to be measured.
    measured = ctx.in_stacks if is_pipeline and ctx.has_own_layers else ctx
    tap = GradSquareNorms(ctx.trained(measured.step_layouts), ctx.trained_layer(ctx.layer_layouts), ctx.sizes)
    plain, measuring = make_gradient(ctx), make_gradient(measured, tap)
    reduction, measured_reduction, norms = GradientReduction(ctx), GradientReduction(measured), layer_norms_region(ctx)

    def value_and_grad(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        if (once := ctx.sending_once(len(batch["tokens"]))) is not None:
            return GradientReduction(once).run(once_gradient_region(once), params, batch)[:2]
        return reduction.run(plain, params, batch)[:2]

    def value_grad_and_parts(params: Params, batch: Batch) -> tuple[Any, ...]:
        return measured_reduction.run(measuring, params, batch)

    def without_gradients(region: Any, layouts: Any, params: Params, batch: Batch, like: str | None = None) -> Any:
        """`like`: the array of the batch that the result is sharded as."""
        specs = ctx.batch_specs(batch)
        on_ranks = ctx.on_ranks(
            region, in_specs=(ctx.weight_specs(layouts), specs), out_specs=specs[like] if like else PartitionSpec()
        )
        return on_ranks(ctx.compute_copy(params, layouts), batch)

    return Parallelized(
        value_and_grad=value_and_grad,
        value_grad_and_parts=value_grad_and_parts,
        loss_sum=partial(without_gradients, loss_of, ctx.step_layouts),
        token_losses=partial(without_gradients, token_loss_of, ctx.step_layouts, like="tokens"),
        layer_norms=partial(without_gradients, norms, ctx.layouts),
        initialize=lambda key: jax.tree.map(lambda w, layout: layout.padded(w), initial_params(config, key), ctx.layouts),
        master=jax.tree.map(partial(_master, mesh), ctx.table, ctx.layouts),
        table=ctx.table,
        trained=ctx.trained,
        attention=ctx.attention,
    )


def _master(mesh: Mesh, parameter: Parameter, layout: Layout) -> jax.ShapeDtypeStruct:
    """A parameter as it is stored."""
    shape = layout.padded_shape(parameter.shape)
    return jax.ShapeDtypeStruct(shape, parameter.dtype, sharding=NamedSharding(mesh, layout.master))


class GradientReduction:
    """Runs a gradient region on the mesh, and sums the gradients of its ranks and replicas into the master layout."""

    def __init__(self, ctx: ParallelContext):
        self._ctx = ctx
        per_replica: SpecTransform = partial(replica_spec, replicas=ctx.config.parallel.replica)
        # Gradients of several replicas leave the region apart. With DiLoCo weights, gradients and loss are all per replica.
        self._has_replicas = ctx.is_diloco or ctx.config.parallel.replica > 1
        self._weight_transform = per_replica if ctx.is_diloco else shared_by_replicas
        self._gradient_transform = per_replica if self._has_replicas else shared_by_replicas

    def run(self, region: GradientRegion, params: Params, batch: Batch) -> tuple[jax.Array, Params, NoiseParts | None]:
        """(loss, float32 gradients in the master layout, NoiseParts if the region has them)"""
        ctx, layouts, numbers = self._ctx, self._ctx.step_layouts, self._weight_transform(PartitionSpec())
        on_ranks = ctx.on_ranks(
            partial(self._in_replica, region) if self._has_replicas else region,
            in_specs=(map_specs(self._weight_transform, ctx.weight_specs(layouts)), ctx.batch_specs(batch)),
            out_specs=(numbers, map_specs(self._gradient_transform, self._gradient_specs()), numbers),
        )
        loss, gradients, parts = on_ranks(ctx.compute_copy(params, layouts, self._weight_transform), batch)
        with jax.named_scope("reduce_gradients"):
            gradients = ctx.pin(self._reduce(gradients), master_specs(ctx.trained(layouts)), self._weight_transform)
        if ctx.has_own_layers:
            joined = join_layers(gradients, leading_dims(self._weight_transform), ctx.stacking.stages)
            gradients = ctx.pin(joined, master_specs(ctx.layouts), self._weight_transform)
        if ctx.loss is not None:
            loss, gradients = mean_of_sums(loss, gradients)
        return loss, gradients, parts

    def _gradient_specs(self) -> Any:
        """PartitionSpecs over the manual axes of the gradients that a region returns."""
        layouts = self._ctx.trained(self._ctx.step_layouts)
        shard, full = (jax.tree.map(partial(manual_spec, share=share), layouts) for share in (True, False))
        return self._ctx.by_zero_level(2, shard, jax.tree.map(partial_sum_spec, full))

    def _in_replica(self, region: GradientRegion, weights: Params, batch: Batch) -> tuple[Any, ...]:
        """`region` with a leading replica dim of 1 on its gradients, and with DiLoCo on everything but the batch."""
        if self._ctx.is_diloco:
            return jax.tree.map(lambda x: x[None], region(jax.tree.map(lambda w: w.squeeze(0), weights), batch))
        loss, gradients, parts = region(weights, batch)
        return loss, jax.tree.map(lambda g: g[None], gradients), parts

    def _reduce(self, gradients: Params) -> Params:
        """The sum over ranks, and over replicas that share weights."""
        rank_dim, layouts = 1 if self._has_replicas else 0, self._ctx.trained(self._ctx.step_layouts)
        # Padded before the sum, or XLA would all-reduce it.
        total = partial(jax.tree.map, lambda g, layout: layout.padded(g, rank_dim + 1).sum(rank_dim))
        gradients = {
            name: g if self._ctx.is_zero_sharded(name, 2) else total(g, layouts[name]) for name, g in gradients.items()
        }
        if self._has_replicas and not self._ctx.is_diloco:
            # Pinned first, or XLA would all-reduce full gradients over all replicas and scatter them afterwards.
            gradients = self._ctx.pin(gradients, master_specs(layouts), self._gradient_transform)
            gradients = jax.tree.map(lambda g: g.sum(0), gradients)
        return gradients
