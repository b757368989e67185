"""The context that all strategies share: parameters, layouts, chosen functions and axes, for one config on one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxllm.config import Config
from jaxllm.config.checks import repeats
from jaxllm.config.layer_stack import adds_in_matmuls, has_own_layers, rings_tensor, sends_once
from jaxllm.cost_model.hardware import compute_capability, require_device_runs
from jaxllm.mesh.axes import CONTEXT, DATA, PIPE, TENSOR, ZERO_AXES, axis_sizes, batch_axes, batch_sharding, manual_axes
from jaxllm.mesh.sharding import (
    Parameter,
    constrainer,
    is_zero_sharded,
    layout,
    manual_spec,
    map_specs,
    named,
    unstack_layout,
    weight_rules,
)
from jaxllm.model.adapters import Frozen
from jaxllm.model.fp8 import RoundedMatrix
from jaxllm.model.layers import Ops
from jaxllm.model.llama import BlockFunction, apply_block, layer_kinds
from jaxllm.parallel.expert_parallel import choose_deliver
from jaxllm.parallel.kernels import (
    attend_per_tensor_rank,
    choose_attention,
    choose_grouped_matmul,
    choose_matmul,
    experts_per_tensor_rank,
    look_up_over_ranks,
    split_letters,
)
from jaxllm.parallel.layer_loop import from_host
from jaxllm.parallel.parameters import Stacking, cut_layers, freezes, parameter_table, stacking_of, trained
from jaxllm.parallel.tensor_ring import TensorRing
from jaxllm.parallel.types import Batch, Loss, LossScale, Params, WeightAccess
from jaxllm.parallel.zero import Zero

SpecTransform = Callable[[PartitionSpec], PartitionSpec]
"""PartitionSpec inside a replica -> PartitionSpec on the mesh with all replicas."""


def shared_by_replicas(spec: PartitionSpec) -> PartitionSpec:
    """The SpecTransform of arrays that are equal in all replicas."""
    return spec


def leading_dims(transform: SpecTransform) -> int:
    """Number of dims, of replicas, before those of an array's layout."""
    return len(transform(PartitionSpec()))


def master_specs(layouts: Any) -> Any:
    return jax.tree.map(lambda layout: layout.master, layouts)


@dataclass(frozen=True)
class ParallelContext:
    """One resolved config on one mesh. `of` builds it."""

    config: Config
    mesh: Mesh
    graph: nnx.GraphDef
    """The network's structure."""
    table: Any
    """Nested dict of Parameter."""
    layouts: Any
    """Nested dict of Layout."""
    attention: str
    """How attention is computed: xla or cudnn, over several context ranks ring or all_gather, and how documents are masked."""
    ops: Ops
    zero: Zero | None
    """What a region gathers and reduces itself, over several ranks; None: each rank has full weights and its own sum of
    gradients."""
    loss: Loss | None = None
    """None: cross-entropy (model/loss.py)."""

    @classmethod
    def of(cls, config: Config, mesh: Mesh, loss: Loss | None = None) -> ParallelContext:
        """Raises ConfigError if a parameter does not fit the mesh, or the devices cannot run the model."""
        model, parallel, sizes, device = config.model, config.parallel, axis_sizes(config.parallel), mesh.devices.flat[0]
        require_device_runs(model, device)
        graph, table = parameter_table(config)
        rules = weight_rules(model, parallel)
        layouts = jax.tree.map(lambda p: layout(p, rules, parallel), table)
        attention, attend = choose_attention(config, device)
        rings = rings_tensor(config, compute_capability(device))
        ops = Ops(
            attend=attend_per_tensor_rank(attend, model.num_kv_heads, sizes[TENSOR]),
            matmul=choose_matmul(model, sizes[TENSOR]),
            look_up=look_up_over_ranks(sizes[PIPE], sizes[TENSOR]),
            constrain=constrainer(sizes),
            grouped_matmul=choose_grouped_matmul(config, device),
            run_experts=experts_per_tensor_rank,
            deliver=choose_deliver(config),
            add_over_sequence=partial(jax.lax.psum, axis_name=CONTEXT),
            ring=TensorRing(sizes[TENSOR], split_letters(model, sizes[TENSOR])) if rings else None,
        )
        shards_gradients = parallel.zero >= 2 and sizes[DATA] * sizes[CONTEXT] > 1
        of_gradients, dims = trained(layouts, table), len(stacking_of(config).shape)
        zero = Zero(parallel, layouts, dims, trained=of_gradients) if shards_gradients else None
        return cls(config, mesh, graph, table, layouts, attention, ops, zero, loss)

    def sending_once(self, microbatches: int) -> ParallelContext | None:
        """The context of a step that gathers and reduces each layer once, behind the compute of others; None if steps with so
        many microbatches do not."""
        device = self.mesh.devices.flat[0]
        if not sends_once(self.config, microbatches, compute_capability(device)):
            return None
        return replace(self, zero=Zero(self.config.parallel, self.layouts, in_order=device.platform == "cpu"))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return axis_sizes(self.config.parallel)

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.sizes[DATA] * self.sizes[CONTEXT]

    @cached_property
    def stacking(self) -> Stacking:
        return stacking_of(self.config)

    @property
    def stack_dims(self) -> int:
        """Leading dims of a stored parameter of the layers."""
        return len(self.stacking.shape)

    def kinds_here(self) -> jax.Array | None:
        """Number of the kind of each of the rank's layers; None if there is one kind. Call it in a region."""
        kinds = layer_kinds(self.config.model)
        if kinds is None:
            return None
        is_same = repeats(self.config.model.layer_kinds, self.stacking.chunk)
        return self.rows_here(kinds, 0 if is_same else None)

    def rows_here(self, values_L: jax.Array, stage: int | None = None) -> jax.Array:
        """The values of the rank's layers, 0 for identity layers; or those of a stage. Call it in a region."""
        by_stage = self.stacking.stored(values_L).reshape(self.stacking.virtual_stages, self.stacking.stages, -1)
        return by_stage[:, jax.lax.axis_index(PIPE) if stage is None else stage].reshape(-1)

    @property
    def access(self) -> WeightAccess:
        """To one layer's weights and gradients."""
        access = self.zero.access() if self.zero else WeightAccess()
        return from_host(access, self.layer_layouts) if self.layers_on_host else access

    @property
    def layers_on_host(self) -> bool:
        """Whether the layers' weights and the sums of their gradients are in the host's memory."""
        return self.config.parallel.offload_state == "all"

    @cached_property
    def has_own_layers(self) -> bool:
        """Whether each layer has arrays of its own in the step; else all layers are one stack."""
        return has_own_layers(self.config, compute_capability(self.mesh.devices.flat[0]))

    @property
    def in_stacks(self) -> ParallelContext:
        """This context with layers in stacks in any case."""
        model = self.config.model.model_copy(update={"scan_layers": True})
        return replace(self, config=self.config.model_copy(update={"model": model}))

    @property
    def is_diloco(self) -> bool:
        """Each replica has its own weights and loss."""
        return self.config.train.diloco_steps is not None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes whose ranks read different tokens."""
        return batch_axes(self.config.parallel)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Mesh axes over whose tokens the loss of a step is the mean."""
        return ZERO_AXES if self.is_diloco else self.batch_axes

    # How weights reach the region that is manual over (replica, pipe, data, context).

    def on_ranks(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` run by each rank on its own arrays, with `tensor` left to XLA."""
        mesh, axes = self.mesh, manual_axes(self.mesh)
        return jax.shard_map(function, mesh=mesh, axis_names=axes, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def batch_specs(self, batch: Batch) -> dict[str, PartitionSpec]:
        """PartitionSpecs of a batch's arrays, whose dims begin with microbatch, sequence and mostly position."""
        spec = batch_sharding(self.mesh).spec
        return {name: PartitionSpec(None, *spec[1 : x.ndim]) for name, x in batch.items()}

    def loss_scale(self, batch: Batch) -> LossScale:
        """With a loss of the caller's 1 for targets, as its count divides later (model/loss.py). Call it in a region."""
        positions = batch["tokens"].size * math.prod(self.mesh.shape[axis] for axis in self.loss_axes)
        return LossScale(self._of_targets(batch), jnp.float32(1 / positions))

    def _of_targets(self, batch: Batch) -> jax.Array:
        if self.loss is not None:
            return jnp.ones((), jnp.float32)
        return 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), self.loss_axes), 1).astype(jnp.float32)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of what the microbatches add up to a step's loss: a sum, or with a loss of the caller's (sum, count)."""
        return () if self.loss is None else (2,)

    @cached_property
    def layer_layouts(self) -> Any:
        """Layouts of one layer."""
        return jax.tree.map(partial(unstack_layout, stack_dims=self.stack_dims), self.layouts["layers"])

    @cached_property
    def step_layouts(self) -> Any:
        """Layouts of weights and gradients in the train step: with `has_own_layers` of each layer in a list, else as stored.
        Those of a stage's layers have the stages in the place of a stack's layers."""
        if not self.has_own_layers:
            return self.layouts
        of_layer = self.layer_layouts if self.stacking.stages == 1 else self.layouts["layers"]
        return {**self.layouts, "layers": [of_layer] * self.stacking.chunk}

    def weight_specs(self, layouts: Any) -> Any:
        """PartitionSpecs of the weights over the manual axes, as a region reads them in `layouts`."""
        shard, full = (jax.tree.map(partial(manual_spec, share=share), layouts) for share in (True, False))
        return self.by_zero_level(3, shard, full)

    def is_zero_sharded(self, name: str, level_from: int) -> bool:
        """Whether gradients (level_from=2) or weights (3) of a top-level entry leave or enter a region as ZeRO's shards. On the
        host they do: at level 3, or on the only rank (checks.check_all_on_host)."""
        if self.layers_on_host and name == "layers":
            return True
        return self.zero is not None and (self.zero.once or is_zero_sharded(name, self.config.parallel, level_from))

    def by_zero_level(self, level_from: int, sharded: Any, full: Any) -> Any:
        """For each top-level entry its value in `sharded` if ZeRO shards it from this level on, else its value in `full`."""
        return {name: (sharded if self.is_zero_sharded(name, level_from) else full)[name] for name in full}

    def rounded(self, layers: Any) -> Any:
        """The layers, with rounded matrices where matmuls in FP8 add to the sums of layers with arrays of their own."""
        if not (self.has_own_layers and self.config.model.multiplies_fp8 and adds_in_matmuls(self.config)):
            return layers

        def one(parameter: Parameter, w: Any) -> Any:
            return RoundedMatrix.of(w, parameter.inputs) if parameter.inputs and isinstance(w, jax.Array) else w

        return [jax.tree.map(one, self.table["layers"], layer) for layer in layers]

    def trained(self, tree: Params) -> Params:
        """The trained part of a tree with an entry for each parameter."""
        return trained(tree, self.table)

    def trained_layer(self, tree: Params) -> Params:
        """The trained part of one layer, or of the stack of layers."""
        return trained(tree, self.table["layers"])

    def block(self, graph: nnx.GraphDef) -> BlockFunction:
        """One block as a function of its parameters. Its frozen matrices have no gradients. `graph`: of the layers."""
        block, table = partial(apply_block, graph, self.ops), self.table["layers"]
        if not freezes(table):
            return block

        def marked(w: jax.Array, parameter: Parameter) -> Any:
            return Frozen(w) if parameter.is_matrix and not parameter.trainable else w

        return lambda layer, h_BSD, block_context: block(jax.tree.map(marked, layer, table), h_BSD, block_context)

    def pin(self, tree: Params, specs: Any, transform: SpecTransform) -> Params:
        """`tree` constrained to `specs`, which `transform` extends to replicas. Layers on the host are left as they are."""
        left = {"layers": tree["layers"]} if self.layers_on_host else {}
        tree, specs = ({name: x for name, x in each.items() if name not in left} for each in (tree, specs))
        return jax.lax.with_sharding_constraint(tree, named(self.mesh, map_specs(transform, specs))) | left

    @jax.named_scope("compute_copy")
    def compute_copy(self, params: Params, layouts: Any, transform: SpecTransform = shared_by_replicas) -> Params:
        """The weights that a region reads in `layouts`, in the compute dtype."""
        # Cast, then gather: the gather then carries the compute dtype. The cast is pinned to the master layout, or XLA gathers
        # in float32 for a pipeline. With ZeRO 3 each rank keeps its shard.
        master, compute = master_specs(layouts), jax.tree.map(lambda layout: layout.compute, layouts)
        if isinstance(layouts["layers"], list):
            params = cut_layers(params, leading_dims(transform), self.stacking.stages)
        cast = self.pin(jax.tree.map(lambda p: p.astype(self.config.model.compute_dtype), params), master, transform)
        copy = self.pin(cast, self.by_zero_level(3, master, compute), transform)
        cut = partial(jax.tree.map, lambda w, layout: layout.cut(w, leading_dims(transform)))
        return {name: w if self.is_zero_sharded(name, 3) else cut(w, layouts[name]) for name, w in copy.items()}
