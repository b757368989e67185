"""The network's parameters as training stores them: the stack of layers, initial values, the table of their dims, the way back
to a network, and the part that is trained.

The model stacks its L layers in one leading dim, `layers`. Over P stages of one chunk each, that dim is sharded. With V virtual
stages, stage i holds the chunks i, P + i, 2P + i, ... The stack is then stored as [virtual stage, stage, layer of the chunk],
so that sharding the second dim puts every layer on its stage.

If the layers do not divide, identity layers fill the last chunks. All their weights are zero, so a block adds nothing to its
input. They stay zero: every gradient of such a layer is exactly zero, because each weight's gradient has another of the layer's
weights, or the output of one, as a factor. Weight decay leaves zero unchanged.

Gradients, moments and updates are of trained parameters alone. Frozen weights are stored in the compute dtype, below ZeRO 3 in
the layout of the train step. Matmuls make no gradients for them (ParallelContext.block).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import Config
from jaxllm.config.model_spec import parameters
from jaxllm.mesh.sharding import Parameter, vocab_rows
from jaxllm.model.llama import Llama
from jaxllm.parallel.types import Params, Tree


@dataclass(frozen=True)
class Stacking:
    """How many layers, stages and chunks there are."""

    layers: int
    """L, the layers of the model."""
    stages: int
    virtual_stages: int
    chunk: int
    """Layers per chunk."""

    @property
    def identity_layers(self) -> int:
        """Zero layers at the end that fill the last chunks."""
        return self.chunk * self.stages * self.virtual_stages - self.layers

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dims of a stored parameter."""
        if self.virtual_stages == 1:
            return (self.layers + self.identity_layers,)
        return self.virtual_stages, self.stages, self.chunk

    @property
    def dims(self) -> tuple[str, ...]:
        return ("layers",) if self.virtual_stages == 1 else ("virtual_stages", "stages", "stage_layers")

    def stored(self, x: jax.Array) -> jax.Array:
        """The stored form of an array [L, ...]."""
        padded = jnp.pad(x, [(0, self.identity_layers)] + [(0, 0)] * (x.ndim - 1)) if self.identity_layers else x
        return padded.reshape(*self.shape, *x.shape[1:])

    def plain(self, x: jax.Array) -> jax.Array:
        """The array [L, ...] of its stored form."""
        return x.reshape(-1, *x.shape[len(self.shape) :])[: self.layers]

    def describe(self, parameter: Parameter) -> Parameter:
        """A parameter of the layers with the shape and dims that are stored."""
        return replace(parameter, shape=(*self.shape, *parameter.shape[1:]), dims=(*self.dims, *parameter.dims[1:]))


def stacking_of(config: Config) -> Stacking:
    return Stacking(config.model.num_layers, config.parallel.pipe, config.parallel.virtual_stages, config.chunk_layers)


def flatten_layers(weights: dict[str, Any], stack_dims: int) -> dict[str, Any]:
    """`weights` with the layers' leading dims, `stack_dims` of them, merged into one."""
    rows = () if isinstance(weights["layers"], list) else (-1,)
    flat = jax.tree.map(lambda w: w.reshape(*rows, *w.shape[stack_dims:]), weights["layers"])
    return {**weights, "layers": flat}


def cut_layers(params: dict[str, Any], dim: int = 0, stages: int = 1) -> dict[str, Any]:
    """`params` with a list of layers in the place of their stack, whose leaves have the layers in `dim`. With several stages a
    list of a stage's layers, whose leaves have the stages in `dim`."""
    stacks, at = params["layers"], dim
    if stages > 1:
        stacks, at = jax.tree.map(lambda x: x.reshape(*x.shape[:dim], stages, -1, *x.shape[dim + 1 :]), stacks), dim + 1
    one = partial(jax.lax.index_in_dim, axis=at, keepdims=False)
    numbers = range(jax.tree.leaves(stacks)[0].shape[at])
    return {**params, "layers": [jax.tree.map(partial(one, index=number), stacks) for number in numbers]}


def join_layers(params: dict[str, Any], dim: int = 0, stages: int = 1) -> dict[str, Any]:
    """The inverse of cut_layers."""

    def join(*layers: jax.Array) -> jax.Array:
        if stages == 1:
            return jnp.stack(layers, dim)
        return jnp.stack(layers, dim + 1).reshape(*layers[0].shape[:dim], -1, *layers[0].shape[dim + 1 :])

    return {**params, "layers": jax.tree.map(join, *params["layers"])}


def over_layers(function: Any, params: Any) -> Any:
    """`params` with `function` applied to every leaf under "layers"."""
    return {name: jax.tree.map(function, tree) if name == "layers" else tree for name, tree in params.items()}


# --------------------------------------------------------------------------------------------------------- values and the table


def build_model(config: Config, key: jax.Array) -> Llama:
    """The network with initial values, on one device."""
    return Llama(config.model, rngs=nnx.Rngs(params=key), vocab_rows=vocab_rows(config.model, config.parallel))


def initial_params(config: Config, key: jax.Array) -> Params:
    """Master parameters as a nested dict, frozen ones in the compute dtype. They depend on the key alone, not on the mesh."""
    params = over_layers(stacking_of(config).stored, nnx.to_pure_dict(nnx.state(build_model(config, key))))
    return jax.tree.map(lambda w, parameter: w.astype(parameter.dtype), params, parameter_table(config)[1])


def merge_model(config: Config, params: Params) -> Llama:
    """The network with these arrays as its parameters, without the padding of ZeRO and of the layer stack."""
    graph, table = parameter_table(config)
    params = jax.tree.map(lambda p, w: w if w.shape == p.shape else without_padding(w, p.shape), table, params)
    return nnx.merge(graph, over_layers(stacking_of(config).plain, params))


def without_padding(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first elements of each dim. The axes of a dim that is cut shard another dim that they divide, if there is one, as the
    dim itself does not divide over them. Else each device has the whole array.
    """
    sharding: Any = array.sharding
    spec = [*sharding.spec, *[None] * array.ndim][: array.ndim]
    for dim, (size, stored) in enumerate(zip(shape, array.shape, strict=True)):
        if size != stored and spec[dim] is not None:
            axes, spec[dim] = spec[dim], None
            ways = math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
            home = next((d for d, other in enumerate(shape) if spec[d] is None and d != dim and other % ways == 0), None)
            if home is not None:
                spec[home] = axes
    return _cut_to(shape, NamedSharding(sharding.mesh, PartitionSpec(*spec)))(array)


@lru_cache(maxsize=256)
def _cut_to(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x[tuple(slice(size) for size in shape)], out_shardings=sharding)


def parameter_table(config: Config) -> tuple[nnx.GraphDef, Any]:
    """The network's structure, and its stored parameters as a nested dict of Parameter. Nothing is computed."""
    # Not nnx.eval_shape: inside a mesh it reads our dim names as mesh axes.
    graph, state = jax.eval_shape(lambda: nnx.split(build_model(config, jax.random.key(0))))

    specs = {spec.path: spec for spec in parameters(config.model)}

    def describe(keys, variable: nnx.Param) -> Parameter:
        path, dims = ".".join(str(getattr(key, "key", key)) for key in keys), tuple(variable.get_metadata("out_sharding"))
        dtype = config.model.compute_dtype if path in config.frozen else variable.dtype
        trainable, spec = path not in config.frozen, specs[path]
        return Parameter(path, tuple(variable.shape), np.dtype(dtype), dims, spec.is_matrix, trainable, spec.inputs)

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    table = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(describe, state, is_leaf=is_variable))
    return graph, over_layers(stacking_of(config).describe, table)


# ------------------------------------------------------------------------------------------------------------- the trained part


def freezes(table: Tree) -> bool:
    """Whether some parameter is frozen. `table`: nested dict of Parameter."""
    return not all(parameter.trainable for parameter in jax.tree.leaves(table))


def trained(tree: Tree, table: Tree) -> Tree:
    """The trained part of a nested dict with an entry for each parameter; all of it if nothing is frozen."""
    return chosen(tree, table, lambda parameter: parameter.trainable) if freezes(table) else tree


def chosen(tree: Tree, table: Tree, which: Callable[[Any], bool]) -> Tree:
    """The part of a nested dict whose Parameters `which` chooses. Its "layers" may be empty, but are there."""
    found = {}
    for name, entry in table.items():
        if isinstance(entry, dict):
            part = chosen(tree[name], entry, which)
            if part or name == "layers":
                found[name] = part
        elif which(entry):
            found[name] = tree[name]
    return found


def with_part(tree: Tree, part: Tree) -> Tree:
    """`tree` with the leaves that are in `part`, a part of it, replaced by these."""
    if not isinstance(tree, dict):
        return part
    return {name: with_part(entry, part[name]) if name in part else entry for name, entry in tree.items()}
