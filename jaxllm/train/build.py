"""What training on a mesh is made of, from one config: the same parts for a run, a test and a compilation without devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.mesh import replicated
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.types import Parallelized
from jaxllm.train import diloco
from jaxllm.train.instability import LAYER_GRAD_NORM, Recent, layer_grad_norms, skip_not_finite, skip_spikes
from jaxllm.train.offload import loading_params, streamed_update
from jaxllm.train.optimizer import make_learning_rate, make_optimizer
from jaxllm.train.state import TrainState, state_shardings, what_to_offload
from jaxllm.train.step import Metrics, make_train_step, make_update, observe_nothing

State = TrainState | diloco.DilocoState
"""The second with train.diloco_steps."""


@dataclass(frozen=True)
class Training:
    functions: Parallelized
    shardings: State
    """Where each array of the state lies."""
    create: Callable[[jax.Array | int], State]
    """seed -> the state of step 0; to be jitted with `shardings` (create_state does)."""
    step: Callable[[State, Any], tuple[State, Metrics]]
    """(state, batch) -> (state, metrics); to be jitted with the state donated."""
    measuring_step: Callable[[State, Any], tuple[State, Metrics]] | None
    """The same, with what the noise scale is made of among the metrics; None if no step measures it, or all do."""
    metrics_lie: Any
    """Where the metrics are to lie: everywhere, so that every process can read them; of islands, where the island is."""

    def layout(self) -> State:
        """The state as ShapeDtypeStructs, where it lies."""
        shapes = jax.eval_shape(self.create, 0)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def create_state(self, seed: int) -> State:
        """The state of step 0. Compiled with its shardings, so no device ever holds more than its share."""
        # LLVM spends ten seconds on the unrolled rounds of the random numbers; unoptimised they compile in one and run once.
        step: Any = self.shardings.step
        on_cpu = step.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        return jax.jit(self.create, out_shardings=self.shardings, compiler_options=options)(seed)


def build_training(config: Config, mesh: Mesh) -> Training:
    """The parts for a resolved config. Raises ConfigError if a parameter does not fit the mesh."""
    functions = parallelize(config, mesh)
    optimizer = make_optimizer(config, functions.table)

    def create(seed: jax.Array | int) -> TrainState:
        params = functions.initialize(jax.random.key(seed))
        recent = Recent.empty() if config.train.skip_spikes else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), recent)

    offload = what_to_offload(config, mesh)
    shardings = state_shardings(functions, optimizer, mesh, offload)
    if config.train.skip_spikes:
        shardings = dataclasses.replace(shardings, recent=Recent(replicated(mesh), replicated(mesh)))
    if offload == "none":
        update = make_update(optimizer)
    else:
        update = streamed_update(config, functions.table, shardings, mesh)
    if offload == "optimizer_and_master":
        functions = loading_params(config, functions, mesh)
    judge = skip_not_finite
    if config.train.skip_spikes:
        assert config.train.spike_deviations is not None, "refused by the config"
        judge = skip_spikes(config.train.spike_deviations)
    observe = observe_nothing
    if config.log.layer_norms_every is not None:
        norms = layer_grad_norms(functions.table, config.model.num_layers)
        observe = lambda gradients: {LAYER_GRAD_NORM: norms(gradients)}  # noqa: E731
    chosen: dict[str, Any] = {"judge": judge, "observe": observe}
    in_rounds, islands = config.train.diloco_steps is not None, config.parallel.replica
    if in_rounds:
        chosen["each"] = diloco.vmap_over_replicas(islands)

    def make_step(value_and_grad: Callable) -> Callable[[Any, Any], tuple[State, Metrics]]:
        step = make_train_step(value_and_grad, update, make_learning_rate(config), config.optimizer.clip_norm, **chosen)
        return diloco.inner_step(step) if in_rounds else step

    step: Any = make_step(functions.value_and_grad)
    measuring_step: Any = None
    if config.log.noise_scale_every is not None:
        measuring_step = make_step(functions.value_grad_and_parts)
    if config.log.noise_scale_every == 1:
        step, measuring_step = measuring_step, None
    if in_rounds:
        lies, begin = diloco.state_shardings(shardings, islands), lambda seed: diloco.begin(create(seed), islands)
        return Training(functions, lies, begin, step, measuring_step, diloco.metrics_sharding(mesh))
    return Training(functions, shardings, create, step, measuring_step, replicated(mesh))
