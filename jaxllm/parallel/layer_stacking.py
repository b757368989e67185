"""How the layer stack is stored when it is cut into pipeline stages.

The model stacks its L layers in one leading dim, `layers`. Over P stages of one chunk each, that dim is sharded. With V virtual
stages, stage i holds the chunks i, P + i, 2P + i, ... The stack is then stored as [virtual stage, stage, layer of the chunk],
so that sharding the second dim puts every layer on its stage.

If the layers do not divide, identity layers fill the last chunks. All their weights are zero, so a block adds nothing to its
input. They stay zero: every gradient of such a layer is exactly zero, because each weight's gradient has another of the layer's
weights, or the output of one, as a factor. Weight decay leaves zero unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Config
from jaxllm.mesh.sharding import Parameter


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
    flat = jax.tree.map(lambda w: w.reshape(-1, *w.shape[stack_dims:]), weights["layers"])
    return {**weights, "layers": flat}


def cut_layers(params: dict[str, Any], dim: int = 0) -> dict[str, Any]:
    """`params` with a list of layers in the place of their stack, whose leaves have the layers in `dim`."""
    number = jax.tree.leaves(params["layers"])[0].shape[dim]
    one = partial(jax.lax.index_in_dim, axis=dim, keepdims=False)
    return {**params, "layers": [jax.tree.map(partial(one, index=at), params["layers"]) for at in range(number)]}


def join_layers(params: dict[str, Any], dim: int = 0) -> dict[str, Any]:
    """The inverse of cut_layers."""
    return {**params, "layers": jax.tree.map(lambda *layers: jnp.stack(layers, dim), *params["layers"])}


def over_layers(function: Any, params: Any) -> Any:
    """`params` with `function` applied to every leaf under "layers"."""
    return {name: jax.tree.map(function, tree) if name == "layers" else tree for name, tree in params.items()}
