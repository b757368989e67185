"""Maps named dims to mesh axes. A strategy is data: a table of rules, matched strictly.

Every parameter declares its dims once, in the model. The rules here give each dim name the mesh axis that shards it. A name
without a rule, an axis used twice in one parameter and a size that does not divide are errors that name the parameter.

A parameter has two layouts. `compute` is its sharding in the train step: over pipe and tensor only. `master` is the sharding of
the fp32 weight and its moments: from ZeRO 1 on also over data x context, with zeros at the end of a dim that does not divide.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ConfigError, ModelConfig, ParallelConfig
from jaxllm.config.model_spec import EXPERTS, LORA_RANK, ROUTES, TOWER_LAYERS
from jaxllm.config.types import zero_shard
from jaxllm.mesh.axes import MANUAL, PIPE, REPLICA, TENSOR, ZERO_AXES, axis_sizes

Rules = Mapping[str, tuple[str, ...]]
Dims = tuple[str, ...]

STACK_DIMS = ("layers", "virtual_stages", "stages", "stage_layers")
"""Dims that count layers (parallel/parameters.py). They are the leading dims of every parameter of the layer stack."""


@dataclass(frozen=True)
class Parameter:
    """An entry of the parameter table, as the model declared it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dims: Dims
    is_matrix: bool
    """False: a norm's scale or a bias."""
    trainable: bool = True
    inputs: int = 0
    """Dims that a matmul sums over, the first ones of a layer's matrix."""

    @property
    def is_lora(self) -> bool:
        """Whether it is a matrix of an adapter."""
        return LORA_RANK in self.dims

    @property
    def of_mixture(self) -> bool:
        """Whether it is a router or has a matrix for each expert: no matmul of a block multiplies by it."""
        return bool({ROUTES, EXPERTS} & set(self.dims))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """PartitionSpecs of a parameter (`compute` in the train step, `master` in the state) and the dim that ZeRO shards."""

    compute: PartitionSpec
    master: PartitionSpec
    zero_dim: int | None
    """None: replicated."""
    padding: int = 0
    """Zeros that `master` has at the end of that dim, so that it divides. The train step computes without them."""
    expert_ranks: int = 1
    """Neighbouring data ranks that share the experts in the step (parallel/expert_parallel.py)."""

    def padded(self, x: jax.Array, leading: int = 0) -> jax.Array:
        """`x` with the padding. `leading`: its dims before those of the layout."""
        if not self.padding:
            return x
        return jnp.pad(x, [(0, self.padding if at == self._dim(leading) else 0) for at in range(x.ndim)])

    def cut(self, x: jax.Array, leading: int = 0) -> jax.Array:
        """`x` without the padding."""
        if not self.padding:
            return x
        dim = self._dim(leading)
        return jax.lax.slice_in_dim(x, 0, x.shape[dim] - self.padding, axis=dim)

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size + self.padding if at == self.zero_dim else size for at, size in enumerate(shape))

    def _dim(self, leading: int) -> int:
        assert self.zero_dim is not None, "only what ZeRO shards is padded"
        return leading + self.zero_dim


def weight_rules(model: ModelConfig, parallel: ParallelConfig) -> dict[str, tuple[str, ...]]:
    """Rules for parameters.

    With fewer key-value heads than tensor ranks, their projections are replicated over tensor, and each rank uses the one head
    of its query heads, as Megatron-LM does. The config refuses numbers that divide neither way.
    """
    return {
        "layers": (PIPE,),
        "virtual_stages": (),
        "stages": (PIPE,),
        "stage_layers": (),
        "vocab": (PIPE, TENSOR),
        "embed": (),
        "heads": (TENSOR,),
        "kv_heads": (TENSOR,) if model.num_kv_heads % parallel.tensor == 0 else (),
        "head_dim": (),
        "mlp": (TENSOR,),
        EXPERTS: (),
        ROUTES: (),
        LORA_RANK: (),
        **dict.fromkeys((TOWER_LAYERS, "channels", "patch_rows", "patch_columns", "tower_positions", "tower_embed"), ()),
        **{"tower_heads": (TENSOR,), "tower_head_dim": (), "tower_mlp": (TENSOR,), "projector": (TENSOR,)},
    }


ACTIVATION_RULES: Rules = {
    # Batch and context are manual axes, split before the model runs.
    "batch": (),
    "sequence": (),
    # Between blocks the sequence is sharded over tensor too (Korthikanti et al., 2022: sequence parallelism).
    "sequence_shard": (TENSOR,),
    "embed": (),
    "heads": (TENSOR,),
    "mlp": (TENSOR,),
    LORA_RANK: (),
}


def match(path: str, shape: tuple[int, ...], dims: Dims, rules: Rules, sizes: Mapping[str, int]) -> PartitionSpec:
    """The PartitionSpec of one array.

    Raises:
      ConfigError: a dim has no rule, an axis is unknown or shards two dims, or a size does not divide. The message names
        parameter, shape and axis.
    """
    where = f"Parameter {path} with dims {dims} and shape {shape}"
    if len(dims) != len(shape):
        raise ConfigError(f"{where}: {len(dims)} dims are declared for {len(shape)}; name every dim.")
    used: dict[str, str] = {}
    for dim, size in zip(dims, shape, strict=True):
        if dim not in rules:
            raise ConfigError(f"{where}: there is no sharding rule for {dim!r}; add one, or use one of {', '.join(rules)}.")
        for axis in rules[dim]:
            if axis not in sizes:
                raise ConfigError(
                    f"{where}: {axis!r} in the rule for {dim!r} is not a mesh axis; use one of {', '.join(sizes)}."
                )
            if axis in used:
                raise ConfigError(f"{where}: dims {used[axis]!r} and {dim!r} are both sharded over {axis!r}; change one rule.")
            used[axis] = dim
        ways = math.prod(sizes[axis] for axis in rules[dim])
        if size % ways:
            axes = " x ".join(f"{axis}={sizes[axis]}" for axis in rules[dim])
            raise ConfigError(
                f"{where}: {dim}={size} does not divide over {axes}; change parallel.{rules[dim][-1]} or the size."
            )
    return PartitionSpec(*[rules[dim] for dim in dims])


def layout(parameter: Parameter, rules: Rules, parallel: ParallelConfig) -> Layout:
    """The compute and master PartitionSpec of one parameter."""
    sizes = axis_sizes(parallel)
    compute = match(parameter.path, parameter.shape, parameter.dims, rules, sizes)
    ranks = math.prod(sizes[axis] for axis in ZERO_AXES)
    # Below level 3 ZeRO shards what only the optimizer reads, and it does not read what is frozen.
    if parallel.zero == 0 or ranks == 1 or not (parameter.trainable or is_zero_sharded(parameter.path, parallel, 3)):
        return Layout(compute, compute, None)
    split = {dim: math.prod(sizes[axis] for axis in rules[dim]) for dim in parameter.dims}
    found = zero_shard(dict(zip(parameter.dims, parameter.shape, strict=True)), split, ranks, parameter.is_matrix)
    if found is None:
        return Layout(compute, compute, None)
    name, zeros = found
    dim = parameter.dims.index(name)
    master = [ZERO_AXES if at == dim else entry for at, entry in enumerate(compute)]
    return Layout(compute, PartitionSpec(*master), dim, zeros, parallel.expert if name == EXPERTS else 1)


def stack_dims(dims: Dims) -> int:
    """Number of leading dims of a parameter that count layers."""
    return sum(dim in STACK_DIMS for dim in dims)


def is_zero_sharded(path: str, parallel: ParallelConfig, level_from: int) -> bool:
    """Whether ZeRO shards the gradient (level_from=2) of a parameter, or its copy in the train step (3). In a pipeline it does
    so only for the layers, because every tick uses the other parameters.
    """
    return parallel.zero >= level_from and (parallel.pipe == 1 or path.split(".")[0] == "layers")


def vocab_rows(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Rows of the embedding and the head: vocab_size padded to a multiple of the axes that shard it.

    The added rows are zero, do not enter the loss and are removed on export.
    """
    ways = parallel.pipe * parallel.tensor
    return -(-model.vocab_size // ways) * ways


def named(mesh: Mesh, specs: Any) -> Any:
    """Converts a tree of PartitionSpecs to NamedShardings."""
    return map_specs(lambda spec: NamedSharding(mesh, spec), specs)


def map_specs(function: Callable[[PartitionSpec], Any], specs: Any) -> Any:
    """Applies `function` to each PartitionSpec of a tree."""
    return jax.tree.map(function, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def replica_spec(spec: PartitionSpec, replicas: int) -> PartitionSpec:
    """Adds a leading replica dim to `spec`. Each replica holds its own copy, sharded within the replica by `spec`."""
    return PartitionSpec(REPLICA if replicas > 1 else None, *spec)


def tensor_specs(layouts: Any) -> Any:
    """PartitionSpecs of parameters in the train step over the tensor axis only. `layouts`: a tree of Layout."""
    return jax.tree.map(lambda x: PartitionSpec(*[TENSOR if _has(TENSOR, axes) else None for axes in x.compute]), layouts)


def manual_spec(layout: Layout, share: bool) -> PartitionSpec:
    """PartitionSpec of a parameter over the manual axes only: of a rank's ZeRO shard with `share`, else of the full weight in
    the train step.
    """
    entries: list[Any] = [PIPE if _has(PIPE, axes) else None for axes in layout.compute]
    if share and layout.zero_dim is not None:
        entries[layout.zero_dim] = ZERO_AXES
    return PartitionSpec(*entries)


def partial_sum_spec(weight: PartitionSpec) -> PartitionSpec:
    """PartitionSpec of per-rank partial gradients. The new leading dim is sharded over every manual axis that does not already
    shard the weight.
    """
    return PartitionSpec(tuple(axis for axis in MANUAL if axis not in weight), *weight)


def unstack_layout(layout: Layout, stack_dims: int) -> Layout:
    """Layout of one layer, from the layout of the layer stack with `stack_dims` leading dims."""
    zero_dim = None if layout.zero_dim is None else layout.zero_dim - stack_dims
    compute, master = (PartitionSpec(*spec[stack_dims:]) for spec in (layout.compute, layout.master))
    return Layout(compute, master, zero_dim, layout.padding, layout.expert_ranks)


def split_spec(letters: str, split: str) -> PartitionSpec:
    """PartitionSpec over tensor of an array with these dims, a letter each, of which those in `split` are split."""
    return PartitionSpec(*[TENSOR if letter in split else None for letter in letters])


def tensor_shard_map(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Runs `function` on the part of each tensor rank, inside a region that is manual over the other axes. All axes are then
    manual. Specs name only the tensor axis.
    """

    def mapped(*inputs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=mesh, axis_names={TENSOR}, **specs, check_vma=False)(*inputs)

    return mapped


def constrainer(sizes: Mapping[str, int]) -> Callable[[jax.Array, Dims], jax.Array]:
    """Returns constrain(x, dims), which fixes the sharding of an activation over the axes that the compiler handles."""
    if sizes[TENSOR] == 1:
        return lambda x, dims: x

    def constrain(x: jax.Array, dims: Dims) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, match("activation", x.shape, dims, ACTIVATION_RULES, sizes))

    return constrain


def _has(axis: str, axes: Any) -> bool:
    return axis == axes or (isinstance(axes, tuple) and axis in axes)
