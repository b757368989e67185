"""The training state: step, master parameters, optimizer moments. All float32, born in the layout they live in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxllm.mesh import replicated
from jaxllm.parallel.parallelize import Parallelized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: jax.Array
    """Steps done, int32."""
    params: Any
    """Master parameters, float32, a nested dict."""
    opt_state: Any


def state_shardings(parallelized: Parallelized, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The layout of a TrainState: moments lie as their parameter does, counters everywhere."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parallelized.table)
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        parallelized.master_shardings,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(replicated(mesh), parallelized.master_shardings, moments)
