"""Puts the strategies together: the only file that knows them all.

The forward and backward pass of a step run in one shard_map over (pipe, data, context); the compiler handles `tensor` alone.
Left to the compiler, the data axis would be reduced in every layer of every microbatch. By hand, each rank sums its own
gradients over its microbatches in float32 and hands them out with a leading rank dim; they are summed once, outside, under the
sharding they are wanted in, which XLA turns into one all-reduce (ZeRO 0) or reduce-scatter (ZeRO 1) per parameter and step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxllm.config import Config
from jaxllm.mesh import CONTEXT, DATA, MANUAL, PIPE, TENSOR, ZERO_AXES, axis_sizes, batch_sharding
from jaxllm.model.attention import Attend, choose_kernel, fused_attention, xla_attention
from jaxllm.model.attention_blocks import xla_kernel
from jaxllm.model.cudnn_attention import cudnn_kernel
from jaxllm.model.layers import Ops
from jaxllm.model.llama import Llama, scan_layers
from jaxllm.model.loss import cross_entropy
from jaxllm.parallel.embedding import look_up_over_ranks
from jaxllm.parallel.layer_loop import Access, LayerLoop, unrolling
from jaxllm.parallel.remat import remat
from jaxllm.parallel.ring_attention import all_gather_attention, ring_attention
from jaxllm.parallel.stacking import over_layers, stacking_of
from jaxllm.parallel.stages import pipeline_regions
from jaxllm.parallel.zero import Zero, manual_spec, sink
from jaxllm.plan.activations import context_method, policy_of
from jaxllm.sharding import Parameter, constrainer, is_shared_out, layout, named, over_tensor, vocab_rows, weight_rules

Params = Any
"""Nested dict of arrays."""
Batch = dict[str, jax.Array]
"""Arrays [microbatch, sequence, position]: tokens, targets, positions int32, mask bool, and segments int32 if packed."""


@dataclass(frozen=True)
class Parallelized:
    """What training needs of the model, on one mesh."""

    value_and_grad: Callable[[Params, Batch], tuple[jax.Array, Params]]
    """(master params, batch) -> (loss, float32 gradients in the master layout). Loss: nats, mean over valid targets."""
    loss_sum: Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
    """(master params, batch) -> (sum of -log p over valid targets, their number): no gradient."""
    initialize: Callable[[jax.Array], Params]
    """key -> master params; to be jitted with master_shardings, so that no device ever holds more than its share."""
    master_shardings: Any
    table: Any
    """Nested dict of Parameter."""
    layouts: Any
    """Nested dict of Layout."""
    attention: str
    """How it is computed: xla or cudnn, and over several context ranks by ring or all_gather."""


def parallelize(config: Config, mesh: Mesh) -> Parallelized:
    """Builds the functions of a resolved config for a mesh. Raises ConfigError if a parameter does not fit the mesh."""
    model, parallel, sizes = config.model, config.parallel, axis_sizes(config.parallel)
    graph, table = parameter_table(config)
    rules = weight_rules(model, parallel)
    layouts = jax.tree.map(lambda p: layout(p, rules, parallel), table)
    master_shardings = named(mesh, jax.tree.map(lambda spot: spot.master, layouts))
    compute_shardings = named(mesh, jax.tree.map(lambda spot: spot.compute, layouts))

    attention, attend = choose_attention(config, mesh.devices.flat[0])
    attend = attend_per_tensor_rank(attend, model.num_kv_heads, sizes[TENSOR])
    ops = Ops(attend=attend, look_up=look_up_over_ranks(sizes[PIPE], sizes[TENSOR]), constrain=constrainer(sizes))
    ranks = sizes[DATA] * sizes[CONTEXT]
    # On one data rank there is nothing to shard: levels 2 and 3 are then the plain path.
    level = parallel.zero if ranks > 1 else 0
    zero = Zero(level, layouts, len(stacking_of(config).shape)) if level >= 2 else None
    if sizes[PIPE] > 1:
        regions = pipeline_regions(config, graph, ops, zero.access if zero else Access())
    else:
        sums = microbatch_sums(config, graph, ops, zero)

        def new_sinks() -> Params | None:
            return jax.tree.map(lambda p, spot: sink(p.shape, spot, ranks), table, layouts) if zero else None

        regions = gradient_region(sums, new_sinks), loss_region(sums, new_sinks)

    def shares(name: str, level_from: int) -> bool:
        return level > 0 and is_shared_out(name, parallel, level_from)

    def by_name(level_from: int, share: Any, whole: Any) -> Any:
        """Of each top-level entry, the one for what ZeRO shares out from this level on, or the other."""
        return {name: share[name] if shares(name, level_from) else whole[name] for name in table}

    def compute_copy(params: Params) -> Params:
        # Cast first, gather then: the gather carries the compute dtype. Unless the cast is pinned to where the weights lie, XLA
        # gathers them in float32 for a pipeline. ZeRO 3 leaves each rank its share.
        cast = jax.tree.map(lambda p: p.astype(model.compute_dtype), params)
        cast = jax.lax.with_sharding_constraint(cast, master_shardings)
        return jax.lax.with_sharding_constraint(cast, by_name(3, master_shardings, compute_shardings))

    share, whole = (jax.tree.map(partial(manual_spec, share=share), layouts) for share in (True, False))
    summed = jax.tree.map(over_ranks, whole)
    per_rank = P(None, *batch_sharding(mesh).spec[1:])
    in_specs = (by_name(3, share, whole), per_rank)
    region = partial(jax.shard_map, mesh=mesh, axis_names=set(MANUAL), in_specs=in_specs, check_vma=False)

    def value_and_grad(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        loss, gradients = region(regions[0], out_specs=(P(), by_name(2, share, summed)))(compute_copy(params), batch)
        with jax.named_scope("reduce_gradients"):
            total = lambda tree: jax.tree.map(lambda g: g.sum(0), tree)  # noqa: E731
            gradients = {name: g if shares(name, 2) else total(g) for name, g in gradients.items()}
        return loss, jax.lax.with_sharding_constraint(gradients, master_shardings)

    def loss_sum(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return region(regions[1], out_specs=P())(compute_copy(params), batch)

    return Parallelized(value_and_grad, loss_sum, partial(initial_params, config), master_shardings, table, layouts, attention)


Sums = Callable[[Params | None, Params, Batch, jax.Array], tuple[jax.Array, jax.Array]]
"""(sinks, weights, rows of one microbatch, scale) -> (objective, loss): sums of token losses times `scale`. Sinks: see zero.py;
None where the gradients are those of the weights."""


def microbatch_sums(config: Config, graph: nnx.GraphDef, ops: Ops, zero: Zero | None) -> Sums:
    """The forward pass of one microbatch, as differentiated."""
    model, train = config.model, config.train
    policy, unroll = policy_of(config.parallel.remat), unrolling(model)

    def sums(sinks, weights, rows, scale):
        if zero is not None:
            rest = {name: w for name, w in weights.items() if name != "layers"}
            weights = {**zero.read(rest, {name: sinks[name] for name in rest}), "layers": weights["layers"]}

        def run_layers(block, layers, h_BSD, side):
            if zero is None and not policy.offload:
                rematted = remat(policy, block, in_loop=model.scan_layers and model.num_layers > 1)
                return scan_layers(rematted, layers, h_BSD, side, unroll=unroll)
            loop = LayerLoop(block, model.num_layers, policy, zero.access if zero else Access(), unroll=unroll)
            return loop.run(layers, sinks["layers"] if zero else None, h_BSD, side)

        network = nnx.merge(graph, weights)
        h_BSD = network.hidden(rows["tokens"], rows["positions"], rows.get("segments"), ops=ops, run_layers=run_layers)
        h_BSD = ops.constrain(h_BSD, ("batch", "sequence", "embed"))
        weights_BS = rows["mask"].astype(jnp.float32) * scale
        chunk, z = train.loss_chunk_tokens, train.z_loss_weight
        return cross_entropy(h_BSD, network.head_matrix(), rows["targets"], weights_BS, model.vocab_size, chunk, z)

    return sums


def over_ranks(whole: P) -> P:
    """The layout of ranks' own gradients with a leading dim: over all axes along which a rank's weight is not split."""
    return P(tuple(axis for axis in MANUAL if axis not in whole), *whole)


# Regions: run by each rank of (pipe, data, context) on its own weights and rows, with `tensor` left to XLA.


def gradient_region(sums: Sums, new_sinks: Callable[[], Params | None]) -> Callable[[Params, Batch], tuple[jax.Array, Params]]:
    """Mean loss over the global batch, and float32 gradients summed over the rank's microbatches: those of the sinks, reduced
    already, or without sinks the rank's own part with a leading dim of 1.
    """

    def region(weights: Params, batch: Batch):
        scale = 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), ZERO_AXES), 1).astype(jnp.float32)
        sinks = new_sinks()
        zeros = sinks or jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        gradient = jax.value_and_grad(sums, argnums=1 if sinks is None else 0, has_aux=True)

        def microbatch(carry, rows):
            gradients, loss = carry
            (_, part), new = gradient(sinks, weights, rows, scale)
            return (jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), gradients, new), loss + part), None

        (gradients, loss), _ = jax.lax.scan(microbatch, (zeros, jnp.zeros((), jnp.float32)), batch)
        if sinks is None:
            gradients = jax.tree.map(lambda g: g[None], gradients)
        return jax.lax.psum(loss, ZERO_AXES), gradients

    return region


def loss_region(sums: Sums, new_sinks: Callable[[], Params | None]) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """Sum of token losses over the global batch, and the number of targets."""

    def region(weights: Params, batch: Batch):
        def microbatch(total, rows):
            return total + sums(new_sinks(), weights, rows, jnp.ones((), jnp.float32))[1], None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), batch)
        return jax.lax.psum((total, batch["mask"].sum()), ZERO_AXES)

    return region


def build_model(config: Config, key: jax.Array) -> Llama:
    return Llama(config.model, rngs=nnx.Rngs(params=key), vocab_rows=vocab_rows(config.model, config.parallel))


def initial_params(config: Config, key: jax.Array) -> Params:
    """Master parameters as a nested dict: a function of the key alone, whatever the mesh."""
    return over_layers(stacking_of(config).stored, nnx.to_pure_dict(nnx.state(build_model(config, key))))


def merge_model(config: Config, params: Params) -> Llama:
    """The network that holds these arrays."""
    return nnx.merge(parameter_table(config)[0], over_layers(stacking_of(config).plain, params))


def parameter_table(config: Config) -> tuple[nnx.GraphDef, Any]:
    """The network's structure and its parameters, as they are stored, as a nested dict of Parameter; nothing is computed."""
    graph = None

    def build():
        nonlocal graph
        graph, state = nnx.split(build_model(config, jax.random.key(0)))
        return state

    # Not nnx.eval_shape: inside a mesh it takes our dim names for mesh axes.
    state = jax.eval_shape(build)

    def line(path, variable: nnx.Param) -> Parameter:
        return Parameter(
            path=".".join(str(getattr(key, "key", key)) for key in path),
            shape=tuple(variable.shape),
            dtype=variable.dtype,
            dims=tuple(variable.get_metadata("out_sharding")),
        )

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    table = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(line, state, is_leaf=is_variable))
    return graph, over_layers(stacking_of(config).describe, table)


def choose_attention(config: Config, device: jax.Device) -> tuple[str, Attend]:
    """What `model.attention` and `parallel.context_method` mean on this kind of device: (its name, the function)."""
    model, c, masks = config.model, config.parallel.context, config.data.mask_documents
    in_blocks = c > 1 or masks
    kernel = choose_kernel(model, device, in_blocks)
    if c > 1:
        method = context_method(config)
        make = {"ring": ring_attention, "all_gather": all_gather_attention}[method]
        return f"{kernel} {method}", make(cudnn_kernel() if kernel == "cudnn" else xla_kernel(), CONTEXT, c)
    if kernel == "xla":
        return kernel, xla_attention
    # A ring of one rank is its local block alone.
    return kernel, ring_attention(cudnn_kernel(), CONTEXT, 1) if in_blocks else fused_attention


def attend_per_tensor_rank(attend: Attend, num_kv_heads: int, tensor: int) -> Attend:
    """Attention with the heads split over `tensor` by hand: fused kernels compile only where every axis is manual, also one
    of size 1."""
    heads = P(None, None, TENSOR, None)
    split_kv = num_kv_heads % tensor == 0

    def local(q_BSNH, k_BTKH, v_BTKH, segments_BS):
        if not split_kv:
            # Keys of all heads are here; this rank's query heads all belong to one of them.
            head = jax.lax.axis_index(TENSOR) * num_kv_heads // tensor
            k_BTKH, v_BTKH = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k_BTKH, v_BTKH))
        return attend(q_BSNH, k_BTKH, v_BTKH, segments_BS)

    kv = heads if split_kv else P()
    return over_tensor(local, in_specs=(heads, kv, kv, P()), out_specs=heads)
