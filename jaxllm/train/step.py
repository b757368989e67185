"""The train step. It branches on no config key: configs differ in the functions that the step is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxllm.parallel.types import NoiseParts
from jaxllm.train.clipping import clip_by_norm
from jaxllm.train.instability import SkipPolicy, skip_not_finite
from jaxllm.train.state import TrainState
from jaxllm.train.step_noise import estimates

Metrics = dict[str, jax.Array]
Update = Callable[[Any, Any, Any, jax.Array, jax.Array], tuple[Any, Any]]
"""(gradients, optimizer state, params, learning rate, whether to apply the update) -> (params, optimizer state)"""
Observe = Callable[[Any], Metrics]
"""gradients before clipping -> metrics"""


class Clipping(NamedTuple):
    """How the norm of all gradients is found and limited."""

    norm: Callable[[Any], jax.Array] = optax.global_norm
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
