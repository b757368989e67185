"""The network's parameters as training stores them: initial values, the table of their dims, and the way back to a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import Config
from jaxllm.config.model_spec import parameters
from jaxllm.mesh.sharding import Parameter, vocab_rows
from jaxllm.model.llama import Llama
from jaxllm.parallel.layer_stacking import over_layers, stacking_of
from jaxllm.parallel.types import Params


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

    matrices = {spec.path for spec in parameters(config.model) if spec.is_matrix}

    def describe(keys, variable: nnx.Param) -> Parameter:
        path, dims = ".".join(str(getattr(key, "key", key)) for key in keys), tuple(variable.get_metadata("out_sharding"))
        dtype = config.model.compute_dtype if path in config.frozen else variable.dtype
        return Parameter(path, tuple(variable.shape), np.dtype(dtype), dims, path in matrices, path not in config.frozen)

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    table = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(describe, state, is_leaf=is_variable))
    return graph, over_layers(stacking_of(config).describe, table)
