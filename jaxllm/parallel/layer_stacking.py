"""How the layer stack lies in memory when it is cut into pipeline stages.

The model stacks its L layers in one leading dim, `layers`. Over P stages of one chunk each that dim is simply split. With V
virtual stages, stage i holds the chunks i, P + i, 2P + i, ...: the stack is then stored as [virtual stage, stage, layer of the
chunk], so that a split of the second dim puts every layer where it runs.

Layers that do not divide are filled up with identity layers: all their weights are zero, so a block adds nothing to its input.
Zero is a fixed point too. Every gradient of such a layer is exactly zero, since each weight's gradient has another of its
weights, or the output of one, as a factor; and weight decay leaves zero alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Config
from jaxllm.sharding import Parameter


@dataclass(frozen=True)
class Stacking:
    layers: int
    """L, the model's."""
    stages: int
    virtual_stages: int
    chunk: int
    """Layers of one chunk."""

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
        """[L, ...] as it is stored."""
        padded = jnp.pad(x, [(0, self.identity_layers)] + [(0, 0)] * (x.ndim - 1)) if self.identity_layers else x
        return padded.reshape(*self.shape, *x.shape[1:])

    def plain(self, x: jax.Array) -> jax.Array:
        """A stored array as [L, ...]."""
        return x.reshape(-1, *x.shape[len(self.shape) :])[: self.layers]

    def describe(self, parameter: Parameter) -> Parameter:
        """The line of a stacked parameter, as it is stored."""
        return Parameter(
            parameter.path, (*self.shape, *parameter.shape[1:]), parameter.dtype, (*self.dims, *parameter.dims[1:])
        )


def stacking_of(config: Config) -> Stacking:
    return Stacking(config.model.num_layers, config.parallel.pipe, config.parallel.virtual_stages, config.chunk_layers)


def flatten_layers(weights: dict[str, Any], stack_dims: int) -> dict[str, Any]:
    """`weights` with the layers' leading dims, `stack_dims` of them, merged into one."""
    flat = jax.tree.map(lambda w: w.reshape(-1, *w.shape[stack_dims:]), weights["layers"])
    return {**weights, "layers": flat}


def over_layers(function: Any, params: Any) -> Any:
    """`function` of every leaf under "layers"; the others as they are."""
    return {name: jax.tree.map(function, tree) if name == "layers" else tree for name, tree in params.items()}
