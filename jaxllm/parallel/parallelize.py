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
from jaxllm.mesh import CONTEXT, DATA, MANUAL, TENSOR, ZERO_AXES, axis_sizes, batch_sharding
from jaxllm.model.attention import Attend, choose_attention
from jaxllm.model.layers import Ops, look_up
from jaxllm.model.llama import Llama, scan_layers
from jaxllm.model.loss import cross_entropy
from jaxllm.parallel.remat import POLICIES
from jaxllm.parallel.zero import Zero, manual_spec, sink
from jaxllm.sharding import Parameter, constrainer, layout, named, vocab_rows, weight_rules

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


def parallelize(config: Config, mesh: Mesh) -> Parallelized:
    """Builds the functions of a resolved config for a mesh. Raises ConfigError if a parameter does not fit the mesh."""
    model, parallel = config.model, config.parallel
    graph, table = parameter_table(config)
    rules = weight_rules(model, parallel)
    layouts = jax.tree.map(lambda p: layout(p, rules, parallel), table)
    master_shardings = named(mesh, jax.tree.map(lambda spot: spot.master, layouts))
    compute_shardings = named(mesh, jax.tree.map(lambda spot: spot.compute, layouts))

    sizes = axis_sizes(parallel)
    ranks = sizes[DATA] * sizes[CONTEXT]
    attend = attend_per_tensor_rank(choose_attention(model, mesh.devices.flat[0]), model.num_kv_heads, sizes[TENSOR])
    ops = Ops(attend=attend, look_up=look_up_over_tensor(sizes[TENSOR]), constrain=constrainer(sizes))
    remat = partial(POLICIES[parallel.remat], in_loop=model.scan_layers and model.num_layers > 1)
    # On one data rank there is nothing to shard: levels 2 and 3 are then the plain path.
    level = parallel.zero if ranks > 1 else 0
    unroll = 1 if model.scan_layers else True
    zero = Zero(level, layouts, unroll) if level >= 2 else None

    def plain_layers(block, layers, h_BSD, side):
        return scan_layers(remat(block), layers, h_BSD, side, unroll=unroll)

    def sums(sinks: Params | None, weights: Params, rows: Batch, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(objective, loss) of one microbatch: sums of token losses times `scale`. `sinks`: see zero.py."""
        run_layers = plain_layers
        if zero is not None:
            rest = {name: w for name, w in weights.items() if name != "layers"}
            rest = zero.read(rest, {name: sinks[name] for name in rest})
            weights = {**rest, "layers": weights["layers"]}
            run_layers = lambda block, *inputs: zero.run_layers(sinks["layers"], remat(block), *inputs)  # noqa: E731
        network = nnx.merge(graph, weights)
        h_BSD = network.hidden(rows["tokens"], rows["positions"], rows.get("segments"), ops=ops, run_layers=run_layers)
        weights_BS = rows["mask"].astype(jnp.float32) * scale
        chunk, z = config.train.loss_chunk_tokens, config.train.z_loss_weight
        h_BSD = ops.constrain(h_BSD, ("batch", "sequence", "embed"))
        return cross_entropy(h_BSD, network.head_matrix(), rows["targets"], weights_BS, model.vocab_size, chunk, z)

    def compute_copy(params: Params) -> Params:
        # Cast first, gather then: the gather carries the compute dtype. ZeRO 3 leaves each rank its share.
        cast = jax.tree.map(lambda p: p.astype(model.compute_dtype), params)
        return jax.lax.with_sharding_constraint(cast, master_shardings if level == 3 else compute_shardings)

    # ------------------------------------------------------ inside: per rank of (pipe, data, context), tensor left to XLA

    def gradient_region(weights: Params, batch: Batch):
        scale = 1.0 / jnp.maximum(jax.lax.psum(batch["mask"].sum(), ZERO_AXES), 1).astype(jnp.float32)
        if zero is None:
            zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
            gradient = lambda rows: jax.value_and_grad(sums, 1, has_aux=True)(None, weights, rows, scale)  # noqa: E731
        else:
            zeros = jax.tree.map(lambda p, spot: sink(p.shape, spot, ranks), table, layouts)
            gradient = lambda rows: jax.value_and_grad(sums, 0, has_aux=True)(zeros, weights, rows, scale)  # noqa: E731

        def microbatch(carry, rows):
            gradients, loss = carry
            (_, part), new = gradient(rows)
            return (jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), gradients, new), loss + part), None

        (gradients, loss), _ = jax.lax.scan(microbatch, (zeros, jnp.zeros((), jnp.float32)), batch)
        if zero is None:
            gradients = jax.tree.map(lambda g: g[None], gradients)
        return jax.lax.psum(loss, ZERO_AXES), gradients

    def loss_region(weights: Params, batch: Batch):
        def microbatch(total, rows):
            sinks = jax.tree.map(lambda p, spot: sink(p.shape, spot, ranks), table, layouts) if zero else None
            return total + sums(sinks, weights, rows, jnp.ones((), jnp.float32))[1], None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((), jnp.float32), batch)
        return jax.lax.psum((total, batch["mask"].sum()), ZERO_AXES)

    # ------------------------------------------------------------------------------------------------------------- outside

    per_rank = P(None, *batch_sharding(mesh).spec[1:])
    share = jax.tree.map(manual_spec, layouts)
    region = partial(
        jax.shard_map,
        mesh=mesh,
        axis_names=set(MANUAL),
        in_specs=(share if level == 3 else P(), per_rank),
        check_vma=False,
    )

    def value_and_grad(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        out_specs = (P(), P(ZERO_AXES) if zero is None else share)
        loss, gradients = region(gradient_region, out_specs=out_specs)(compute_copy(params), batch)
        if zero is None:
            with jax.named_scope("reduce_gradients"):
                gradients = jax.tree.map(lambda g: g.sum(0), gradients)
        return loss, jax.lax.with_sharding_constraint(gradients, master_shardings)

    def loss_sum(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return region(loss_region, out_specs=P())(compute_copy(params), batch)

    return Parallelized(value_and_grad, loss_sum, partial(initial_params, config), master_shardings, table, layouts)


def build_model(config: Config, key: jax.Array) -> Llama:
    return Llama(config.model, rngs=nnx.Rngs(params=key), vocab_rows=vocab_rows(config.model, config.parallel))


def initial_params(config: Config, key: jax.Array) -> Params:
    """Master parameters as a nested dict: a function of the key alone, whatever the mesh."""
    return nnx.to_pure_dict(nnx.state(build_model(config, key)))


def merge_model(config: Config, params: Params) -> Llama:
    """The network that holds these arrays."""
    return nnx.merge(parameter_table(config)[0], params)


def parameter_table(config: Config) -> tuple[nnx.GraphDef, Any]:
    """The network's structure and its parameters as a nested dict of Parameter; nothing is computed."""
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
    return graph, nnx.to_pure_dict(jax.tree_util.tree_map_with_path(line, state, is_leaf=is_variable))


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

    def split(q_BSNH, k_BTKH, v_BTKH, segments_BS=None):
        kv = heads if split_kv else P()
        mapped = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            axis_names={TENSOR},
            in_specs=(heads, kv, kv, P()),
            out_specs=heads,
            check_vma=False,
        )
        return mapped(q_BSNH, k_BTKH, v_BTKH, segments_BS)

    return split


def look_up_over_tensor(tensor: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The embedding with its rows split over `tensor` by hand: left to it, the compiler may gather the whole table.

    Each rank looks up the ids that are its own; the sum over ranks is scattered along the sequence, as blocks want it.
    """
    if tensor == 1:
        return look_up

    def local(rows_VD, ids_BS):
        own = ids_BS - jax.lax.axis_index(TENSOR) * rows_VD.shape[0]
        is_mine = (own >= 0) & (own < rows_VD.shape[0])
        found_BSD = jnp.where(is_mine[..., None], look_up(rows_VD, jnp.where(is_mine, own, 0)), 0)
        # All but one rank add zero: exact in any dtype.
        return jax.lax.psum_scatter(found_BSD, TENSOR, scatter_dimension=1, tiled=True)

    def split(table_VD, ids_BS):
        return jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            axis_names={TENSOR},
            in_specs=(P(TENSOR), P()),
            out_specs=P(None, TENSOR),
            check_vma=False,
        )(table_VD, ids_BS)

    return split
