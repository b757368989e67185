"""What training on a mesh is made of, from one config: the same parts for a run, a test and a compilation without devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.parallel.parallelize import Parallelized, parallelize
from jaxllm.train.offload import loading_params, streamed_update
from jaxllm.train.optimizer import make_learning_rate, make_optimizer
from jaxllm.train.state import TrainState, state_shardings, what_to_offload
from jaxllm.train.step import Metrics, make_train_step, make_update


@dataclass(frozen=True)
class Training:
    functions: Parallelized
    shardings: TrainState
    """Where each array of the state lies."""
    create: Callable[[jax.Array | int], TrainState]
    """seed -> the state of step 0; to be jitted with `shardings` (create_state does)."""
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    """(state, batch) -> (state, metrics); to be jitted with the state donated."""

    def create_state(self, seed: int) -> TrainState:
        """The state of step 0. Compiled with its shardings, so no device ever holds more than its share."""
        # LLVM spends ten seconds on the unrolled rounds of the random numbers; unoptimised they compile in one and run once.
        on_cpu = self.shardings.step.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        return jax.jit(self.create, out_shardings=self.shardings, compiler_options=options)(seed)


def build_training(config: Config, mesh: Mesh) -> Training:
    """The parts for a resolved config. Raises ConfigError if a parameter does not fit the mesh."""
    functions = parallelize(config, mesh)
    optimizer = make_optimizer(config, functions.table)

    def create(seed: jax.Array | int) -> TrainState:
        params = functions.initialize(jax.random.key(seed))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    offload = what_to_offload(config, mesh)
    shardings = state_shardings(functions, optimizer, mesh, offload)
    if offload == "none":
        update = make_update(optimizer)
    else:
        update = streamed_update(config, functions.table, shardings, mesh)
    if offload == "optimizer_and_master":
        functions = loading_params(config, functions, mesh)
    step = make_train_step(functions.value_and_grad, update, make_learning_rate(config), config.optimizer.clip_norm)
    return Training(functions, shardings, create, step)
