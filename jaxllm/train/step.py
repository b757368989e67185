"""The train step. It branches on no config key: configs differ in the functions that the step is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxllm.parallel.types import NoiseParts
from jaxllm.train.instability import SkipPolicy, skip_not_finite
from jaxllm.train.state import TrainState

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
