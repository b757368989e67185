"""The network's parameters as training stores them: initial values, the table of their dims, and the way back to a network."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import Config
from jaxllm.model.llama import Llama
from jaxllm.parallel.layer_stacking import over_layers, stacking_of
from jaxllm.parallel.types import Params
from jaxllm.sharding import Parameter, vocab_rows


def build_model(config: Config, key: jax.Array) -> Llama:
    """The network with initial values, on one device."""
    return Llama(config.model, rngs=nnx.Rngs(params=key), vocab_rows=vocab_rows(config.model, config.parallel))


def initial_params(config: Config, key: jax.Array) -> Params:
    """Master parameters as a nested dict. They depend on the key alone, not on the mesh."""
    return over_layers(stacking_of(config).stored, nnx.to_pure_dict(nnx.state(build_model(config, key))))


def merge_model(config: Config, params: Params) -> Llama:
    """The network with these arrays as its parameters, without the padding of ZeRO and of the layer stack."""
    graph, table = parameter_table(config)
    params = jax.tree.map(lambda p, w: w if w.shape == p.shape else without_padding(w, p.shape), table, params)
    return nnx.merge(graph, over_layers(stacking_of(config).plain, params))


def without_padding(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first elements of each dim. A dim that is cut is replicated, because it need not divide over the devices."""
    sharding: Any = array.sharding
    entries = zip([*sharding.spec, *[None] * array.ndim], shape, array.shape, strict=False)
    spec = PartitionSpec(*[axes if size == stored else None for axes, size, stored in entries])
    cut = jax.jit(lambda x: x[tuple(slice(size) for size in shape)], out_shardings=NamedSharding(sharding.mesh, spec))
    return cut(array)


def parameter_table(config: Config) -> tuple[nnx.GraphDef, Any]:
    """The network's structure, and its stored parameters as a nested dict of Parameter. Nothing is computed."""
    # Not nnx.eval_shape: inside a mesh it reads our dim names as mesh axes.
    graph, state = jax.eval_shape(lambda: nnx.split(build_model(config, jax.random.key(0))))

    def describe(path, variable: nnx.Param) -> Parameter:
        return Parameter(
            path=".".join(str(getattr(key, "key", key)) for key in path),
            shape=tuple(variable.shape),
            dtype=variable.dtype,
            dims=tuple(variable.get_metadata("out_sharding")),
        )

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    table = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(describe, state, is_leaf=is_variable))
    return graph, over_layers(stacking_of(config).describe, table)
