"""The training state: step, master parameters, optimizer moments. All float32, born in the layout they live in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxllm.config import Config
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


def create_state(
    config: Config, parallelized: Parallelized, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """The state of step 0. Compiled with its shardings, so no device ever holds more than its share."""

    def create(seed):
        params = parallelized.initialize(jax.random.key(seed))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    # LLVM spends ten seconds on the unrolled rounds of the random numbers; unoptimised they compile in one and run once.
    on_cpu = shardings.step.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(create, out_shardings=shardings, compiler_options=options)(config.train.seed)
