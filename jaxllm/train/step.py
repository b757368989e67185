"""The train step. Everything it does was chosen before: what differs between configs are the functions it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxllm.train.optimizer import LearningRate, clip_by_norm
from jaxllm.train.state import TrainState

Metrics = dict[str, jax.Array]
Update = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]
"""(gradients, optimizer state, params, learning rate) -> (params, optimizer state)"""


def make_update(optimizer: optax.GradientTransformation) -> Update:
    def update(gradients: Any, opt_state: Any, params: Any, rate: jax.Array) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), opt_state

    return update


def make_train_step(
    value_and_grad: Callable[[Any, Any], tuple[jax.Array, Any]],
    update: Update,
    learning_rate: LearningRate,
    clip_norm: float | None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """(state, batch) -> (state, metrics), a pure function to be jitted with the state donated."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        loss, gradients = value_and_grad(state.params, batch)
        with jax.named_scope("optimizer"):
            grad_norm = optax.global_norm(gradients)
            gradients = clip_by_norm(gradients, grad_norm, clip_norm)
            rate = learning_rate(state.step)
            params, opt_state = update(gradients, state.opt_state, state.params, rate)
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": jnp.asarray(rate)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
