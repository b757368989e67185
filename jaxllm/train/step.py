"""The train step and its state. The step branches on no config key: configs differ in the functions that it is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxllm.config import Config
from jaxllm.config.types import MASTER_ON_HOST
from jaxllm.mesh.axes import HOST, replicated
from jaxllm.parallel.types import NoiseParts, Parallelized
from jaxllm.train.instability import SkipPolicy, skip_not_finite

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------------------ state
# Step, master parameters, optimizer moments. All are float32 and created with their final sharding; but frozen parameters are
# in the compute dtype, and have no moments. Moments, and optionally master parameters, may be in pinned host memory
# (parallel.offload_state). Only their shardings show this.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: jax.Array
    """Number of steps done, int32."""
    params: Any
    """Master parameters, float32, and frozen ones in the compute dtype: a nested dict."""
    opt_state: Any
    recent: Any = None
    """The last losses and gradient norms (instability.Recent), with train.skip_spikes."""

    def with_recent(self, recent: Any) -> TrainState:
        return replace(self, recent=recent)


def state_shardings(
    parallelized: Parallelized, optimizer: optax.GradientTransformation, mesh: Mesh, offload: str = "none"
) -> TrainState:
    """Shardings of a TrainState: moments are sharded like their parameter; counters, and what has another shape than the
    parameter whose path it has, are replicated.

    Args:
      offload: the value of parallel.offload_state.
    """
    host = _in_host_memory if offload != "none" else lambda sharding: sharding
    params, trained = parallelized.master_shardings, parallelized.trained(parallelized.master)
    master = dict(jax.tree_util.tree_leaves_with_path(trained))

    # By path, because optax.tree_map_params (optax 0.2.8) cannot map optimizers whose parts are for some parameters.
    def sharding_of(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((master[path[at:]] for at in range(len(path)) if path[at:] in master), None)
        return host(found.sharding) if found is not None and found.shape == x.shape else replicated(mesh)

    moments = jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(optimizer.init, trained))
    # A tree of shardings, with the sharding of the step in its place.
    step: Any = replicated(mesh)
    if offload in MASTER_ON_HOST:
        params = jax.tree.map(lambda p, there: host(there) if p.trainable else there, parallelized.table, params)
    return TrainState(step, params, moments)


def what_to_offload(config: Config, mesh: Mesh) -> str:
    """The value of parallel.offload_state; none, with a log message, if the devices have no pinned host memory. GPUs have it,
    and so do CPUs in current JAX versions: there it is a label on the same memory.
    """
    offload, device = config.parallel.offload_state, mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    # Described devices (aot.py) and those of other hosts do not list memories.
    if offload == "none" or not kinds or HOST in kinds:
        return offload
    log.warning("This %s has no %s memory: parallel.offload_state=%s changes nothing here.", device.platform, HOST, offload)
    return "none"


def _in_host_memory(sharding: NamedSharding) -> NamedSharding:
    there = sharding.with_memory_kind(HOST)
    if there.memory_kind == HOST:
        return there
    # JAX drops the memory kind of merely described devices, unless the mesh has none.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def on_device(arrays: Any) -> Any:
    """Moves arrays from any memory to device memory."""

    def move(x: jax.Array) -> jax.Array:
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == HOST else x

    return jax.tree.map(move, arrays)


# ------------------------------------------------------------------------------------------------------------ noise scale
# One step's estimates for the gradient noise scale, made in the step. run/noise_scale.py has the formulas and averages them.

G2, S = "noise_g2", "noise_s"
"""Metrics of a step: |g|^2, and tr(S) in tokens."""


def estimates(parts: NoiseParts, grad_norm: Any) -> dict[str, Any]:
    """|g|^2 and tr(S) of one step, from its parts and the norm of its gradient before clipping. Both are NaN or infinite if the
    step has a single part.

    The arguments are arrays of JAX or numpy, or numbers.
    """
    whole = grad_norm * grad_norm
    noise = (parts.mean_square - whole) / (parts.count - 1)
    return {G2: whole - noise, S: noise * parts.tokens}


# --------------------------------------------------------------------------------------------------------------- clipping
# Limits the norm of gradients.


def clip_by_norm(gradients: Any, norm: jax.Array, limit: float | None) -> Any:
    """Scales gradients down so that their global norm, given as `norm`, is at most `limit`."""
    if limit is None:
        return gradients
    scale = clip_scale(norm, limit)
    return jax.tree.map(lambda g: g * scale, gradients)


def clip_scale(norm: jax.Array, limit: float) -> jax.Array:
    """What clip_by_norm multiplies gradients by."""
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))


# ------------------------------------------------------------------------------------------------------------- train step

Metrics = dict[str, jax.Array]
Update = Callable[[Any, Any, Any, jax.Array, jax.Array], tuple[Any, Any]]
"""(gradients, optimizer state, params, learning rate, whether to apply the update) -> (params, optimizer state)"""
Observe = Callable[[Any], Metrics]
"""gradients before clipping -> metrics"""


class Clipping(NamedTuple):
    """How the norm of all gradients is found and limited."""

    norm: Callable[[Any], jax.Array] = optax.tree.norm
    """gradients -> their global norm"""
    clip: Callable[[Any, jax.Array, float | None], Any] = clip_by_norm
    """(gradients, norm, limit) -> what the update takes as gradients"""


def make_update(optimizer: optax.GradientTransformation) -> Update:
    """The update of a state that is stored on the devices."""

    def update(gradients: Any, opt_state: Any, params: Any, rate: jax.Array, apply_update: jax.Array) -> tuple[Any, Any]:
        # Optax raises a float to an int32 power, which strict promotion (a user's choice, and that of all tests) refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, new_state = optimizer.update(gradients, opt_state, params)
        # Selected element by element, in the same pass over the state. A skipped step keeps every bit.
        params = jax.tree.map(lambda p, u: jnp.where(apply_update, p - rate * u, p), params, updates)
        return params, jax.tree.map(lambda new, old: jnp.where(apply_update, new, old), new_state, opt_state)

    return update


def make_train_step(
    value_and_grad: Callable[[Any, Any], tuple[Any, ...]],
    update: Update,
    learning_rate: Callable[[jax.Array], jax.Array],
    clip_norm: float | None,
    each: Callable[[Callable], Callable] = lambda apply: apply,
    should_apply: SkipPolicy = skip_not_finite,
    observe: Observe = lambda gradients: {},
    clipping: Clipping = Clipping(),
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """(state, batch) -> (state, metrics), a pure function to be jitted with the state donated. If `should_apply` rejects the
    step (not finite, or a spike), parameters and optimizer state are unchanged; only the step counter advances.

    Args:
      learning_rate: step -> learning rate.
      value_and_grad: (params, batch) -> (loss, gradients), or (loss, gradients, NoiseParts) to measure the noise scale too.
      each: maps the update over replicas, if each replica has its own state.
    """

    def apply(
        state: TrainState, loss: jax.Array, gradients: Any, parts: NoiseParts | None = None
    ) -> tuple[TrainState, Metrics]:
        with jax.named_scope("optimizer"):
            grad_norm = clipping.norm(gradients)
            apply_update, recent, verdict = should_apply(state.recent, loss, grad_norm)
            observed = observe(gradients) | ({} if parts is None else estimates(parts, grad_norm))
            gradients = clipping.clip(gradients, grad_norm, clip_norm)
            rate = learning_rate(state.step)
            params, opt_state = update(gradients, state.opt_state, state.params, rate, apply_update)
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": jnp.asarray(rate), **verdict, **observed}
        return TrainState(state.step + 1, params, opt_state, recent), metrics

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        return each(apply)(state, *value_and_grad(state.params, batch))

    return train_step
