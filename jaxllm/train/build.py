"""Builds training on a mesh from one config: the same parts for a run, a test and a compilation without devices."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxllm.config import Config, ConfigError
from jaxllm.config.rounds import sends_codes
from jaxllm.config.types import GIVEN, MASTER_ON_HOST
from jaxllm.mesh.axes import replicated
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import freezes, with_part
from jaxllm.parallel.types import Loss, Parallelized
from jaxllm.train import diloco
from jaxllm.train.dpo import dpo_loss
from jaxllm.train.instability import LAYER_GRAD_NORM, Recent, layer_grad_norms, skip_not_finite, skip_spikes
from jaxllm.train.offload import loading_params, streamed_clipping, streamed_update
from jaxllm.train.optimizer import make_learning_rate, make_optimizer
from jaxllm.train.step import (
    Clipping,
    Metrics,
    Observe,
    TrainState,
    Update,
    make_train_step,
    make_update,
    state_shardings,
    what_to_offload,
)

Arrays = Mapping[str, np.ndarray]
Batches = Callable[[int], Arrays] | Iterable[Arrays]


class Given(NamedTuple):
    """What a Python program gives a Trainer in the place of what the config names (run/given.py)."""

    batches: Batches | None = None
    loss: Loss | None = None
    optimizer: optax.GradientTransformation | None = None
    documents: Iterable[Any] | None = None


State = TrainState | diloco.DilocoState
"""The training state: a DilocoState with train.diloco_steps, else a TrainState."""


@dataclass(frozen=True)
class Training:
    """The parts of training for one config on one mesh."""

    functions: Parallelized
    shardings: State
    """Sharding of every array in the training state."""
    create: Callable[[jax.Array | int], State]
    """seed -> the state of step 0. Jit it with `shardings` (jit_create does)."""
    step: Callable[[State, Any], tuple[State, Metrics]]
    """(state, batch) -> (state, metrics). Jit it with the state donated."""
    measuring_step: Callable[[State, Any], tuple[State, Metrics]] | None
    """`step` with the noise scale's estimates among the metrics. None if no step measures it, or every step does."""
    metrics_sharding: Any
    """Sharding of the metrics: replicated, so that every process can read them; with DiLoCo on each replica's own devices."""
    outer: diloco.OuterStep | None = None
    """With train.diloco_overlap the outer step of a fragment, which some steps make too."""

    def layout(self) -> State:
        """The state as ShapeDtypeStructs with shardings."""
        shapes = jax.eval_shape(self.create, 0)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def jit_step(self, step: Callable, exchanges: bool = False) -> Any:
        """`step` or `measuring_step`, jitted with the state donated. exchanges: with the outer step of a fragment beside it,
        whose number is one more argument."""
        metrics = self.metrics_sharding
        if exchanges:
            assert self.outer is not None, "the config has no overlap"
            step, metrics = diloco.beside(step, self.outer), {**metrics, diloco.OUTER: replicated(self.mesh)}
        return jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, metrics))

    @property
    def mesh(self) -> Mesh:
        step: Any = self.shardings.step
        return step.mesh

    def jit_create(self) -> Any:
        """`create`, jitted with its shardings, so no device ever holds more than its shard."""
        # LLVM needs ten seconds to compile the unrolled rounds of the random number generator, and one second without
        # optimisation. They run only once.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        return jax.jit(self.create, out_shardings=self.shardings, compiler_options=options)

    def create_state(self, seed: int) -> State:
        """The state of step 0."""
        return self.jit_create()(seed)


def build_training(config: Config, mesh: Mesh, given: Given = Given()) -> Training:
    """The parts for a resolved config, with what the caller gives in the place of the usual. Raises ConfigError if a parameter
    does not fit the mesh, or if the config names something that is not given."""
    if given.loss is None and config.train.loss == GIVEN:
        raise ConfigError("train.loss=given needs a loss: call jaxllm.Trainer or jaxllm.fit with loss=, or set cross_entropy.")
    offload = what_to_offload(config, mesh)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload_state": offload})})
    functions = parallelize(config, mesh, dpo_loss(config) if config.train.loss == "dpo" else given.loss)
    table = functions.trained(functions.table)
    optimizer = make_optimizer(config, table, given.optimizer, mesh)

    def create(seed: jax.Array | int) -> TrainState:
        params = functions.initialize(jax.random.key(seed))
        recent = Recent.empty() if config.train.skip_spikes else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(functions.trained(params)), recent)

    shardings, should_apply = state_shardings(functions, optimizer, mesh, offload), skip_not_finite
    if config.train.skip_spikes:
        assert config.train.spike_deviations is not None, "refused by the config"
        should_apply = skip_spikes(config.train.spike_deviations)
        shardings = dataclasses.replace(shardings, recent=Recent(replicated(mesh), replicated(mesh)))
    if offload == "none":
        update = make_update(optimizer)
    else:
        of_trained = dataclasses.replace(shardings, params=functions.trained(shardings.params))
        update = streamed_update(config, table, of_trained, mesh)
    if freezes(functions.table):
        update = _update_of_trained(update, functions.trained)
    if offload in MASTER_ON_HOST:
        functions = loading_params(config, functions, mesh)
    is_diloco, replicas = config.train.diloco_steps is not None, config.parallel.replica

    def make_step(value_and_grad: Callable) -> Callable[[Any, Any], tuple[State, Metrics]]:
        step = make_train_step(
            value_and_grad,
            update,
            make_learning_rate(config),
            config.optimizer.clip_norm,
            each=diloco.vmap_over_replicas(replicas) if is_diloco else lambda apply: apply,
            should_apply=should_apply,
            observe=_observer(config, table),
            clipping=streamed_clipping(functions, mesh) if offload == "all" else Clipping(),
        )
        return diloco.inner_step(step) if is_diloco else step

    every = config.log.noise_scale_every
    step = make_step(functions.value_grad_and_parts if every == 1 else functions.value_and_grad)
    measuring_step = None if every in (None, 1) else make_step(functions.value_grad_and_parts)
    state: dict[str, Any] = {"shardings": shardings, "create": create, "metrics_sharding": replicated(mesh)}
    if is_diloco:
        codes = sends_codes(config)
        state = {
            "shardings": diloco.state_shardings(shardings, replicas, codes),
            "create": lambda seed: diloco.begin(create(seed), replicas, codes),
            "metrics_sharding": diloco.metrics_sharding(mesh),
        }
        if config.train.diloco_overlap:
            state["outer"] = diloco.outer_step_of(config, mesh, state["shardings"])
    return Training(functions=functions, step=step, measuring_step=measuring_step, **state)


def build_trainings(config: Config, mesh: Mesh, given: Given = Given()) -> dict[int, Training]:
    """{parts that train.length_schedule cuts sequences into: the training of such steps}. The whole sequences come first. All
    have the same state."""
    return {
        parts: build_training(config.cut(parts) if parts > 1 else config, mesh, given)
        for parts in sorted({1, *(phase.parts for phase in config.phases)})
    }


def _update_of_trained(update: Update, trained: Callable[[Any], Any]) -> Update:
    """`update` of the trained part of the parameters. The others stay as they are."""

    def run(gradients: Any, opt_state: Any, params: Any, *how: jax.Array) -> tuple[Any, Any]:
        part, opt_state = update(gradients, opt_state, trained(params), *how)
        return with_part(params, part), opt_state

    return run


def _observer(config: Config, table: Any) -> Observe:
    if config.layer_norms_every is None:
        return lambda gradients: {}
    norms = layer_grad_norms(table, config.model.num_layers)
    return lambda gradients: {LAYER_GRAD_NORM: norms(gradients)}
