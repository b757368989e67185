"""The optimizers, and the learning-rate schedule, counted in tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from jaxllm.config import Config, ConfigError
from jaxllm.config.model_spec import parameters
from jaxllm.config.types import GIVEN

LearningRate = Callable[[jax.Array], jax.Array]
MUON_RMS = 0.2
"""Root mean square of Muon's updates, that of AdamW's (Liu et al., 2025, arXiv 2502.16982), as both have one learning rate."""


def make_optimizer(
    config: Config, table: Any, given: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """The optimizer of optimizer.name without the learning rate, which the step multiplies in; weight decay applies only to
    matrices. Or the one that is given, which has both: its updates come out negated, for a learning rate of 1.

    Args:
      table: nested dict of Parameter.
    """
    o = config.optimizer
    if o.name == GIVEN:
        if given is None:
            raise ConfigError("optimizer.name=given needs an optimizer: call Trainer or fit with optimizer=, or name another.")
        return optax.chain(given, optax.scale(-1.0))
    momentum = optax.trace(o.momentum) if o.momentum else optax.identity()
    scale = {
        "adamw": lambda: optax.scale_by_adam(o.beta1, o.beta2, o.epsilon),
        "muon": lambda: _muon(config, table),
        "lion": lambda: optax.scale_by_lion(o.beta1, o.beta2),
        "sgd": lambda: momentum,
    }[o.name]()
    decayed = jax.tree.map(lambda p: p.is_matrix, table)
    return optax.chain(scale, optax.add_decayed_weights(o.weight_decay, mask=decayed))


def _muon(config: Config, table: Any) -> optax.GradientTransformation:
    """Muon for the blocks' matrices, each for itself, and Adam for all else."""
    o, specs = config.optimizer, {spec.path: spec for spec in parameters(config.model) if spec.inputs}

    def dims(parameter: Any) -> Any:
        if (spec := specs.get(parameter.path)) is None:
            return optax.MaskedNode()
        # The dims before those of the spec count layers.
        first, end = len(parameter.shape) - len(spec.shape), len(parameter.shape)
        return MuonDimensionNumbers(tuple(range(first, first + spec.inputs)), tuple(range(first + spec.inputs, end)))

    def size(parameter: Any) -> Any:
        if (spec := specs.get(parameter.path)) is None:
            return optax.MaskedNode()
        # By the spec: stored shapes have ZeRO's padding, with which the update would depend on the mesh.
        return MUON_RMS * math.sqrt(max(math.prod(spec.shape[: spec.inputs]), math.prod(spec.shape[spec.inputs :])))

    of_dims, sizes = jax.tree.map(dims, table), jax.tree.map(size, table)
    orthogonal = optax.contrib.scale_by_muon(beta=o.momentum, weight_dimension_numbers=lambda updates: of_dims)
    scaled = optax.stateless(lambda updates, params: jax.tree.map(lambda size, u: size * u, sizes, updates))
    kinds: Any = {"muon": optax.chain(orthogonal, scaled), "adam": optax.scale_by_adam(o.beta1, o.beta2, o.epsilon)}
    return optax.partition(kinds, jax.tree.map(lambda p: "muon" if p.path in specs else "adam", table))


def make_learning_rate(config: Config) -> LearningRate:
    """Makes the schedule: step (int, the first is 0) -> learning rate, from the tokens consumed at the end of that step.

    Warm-up is linear from 0. Let p be the fraction of the tokens after warm-up: cosine is f + (1-f)(1+cos(pi p))/2, linear is
    1-(1-f)p, wsd is constant and then linear to f over decay_tokens, with f = final_learning_rate_fraction. The result is
    multiplied by (batch / last batch of train.batch_schedule, or train.batch_grows_to) to the power that train.batch_lr names.
    """
    o = config.optimizer
    if o.name == GIVEN:
        return lambda step: jnp.ones((), jnp.float32)
    # Floats, because int32 would overflow at 2 billion tokens.
    total, warmup_tokens = float(config.total_tokens), float(o.warmup_tokens)
    decay_tokens = float(o.decay_tokens if o.decay_tokens is not None else total / 5)
    final = o.final_learning_rate_fraction
    phases, power = config.phases, {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.train.batch_lr]
    # One entry per phase. float32 is exact to 1e-7 of the run.
    first_step = np.array([min(phase.first_step, 2**31 - 1) for phase in phases], np.int32)
    first_token = np.array([config.tokens_before(phase.first_step) for phase in phases], np.float32)
    step_tokens = np.array([phase.sequences * config.train.sequence_length for phase in phases], np.float32)
    last = config.train.batch_grows_to or phases[-1].sequences
    factor = np.array([(phase.sequences / last) ** power for phase in phases], np.float32)

    def learning_rate(step: jax.Array) -> jax.Array:
        phase = (step >= first_step).sum() - 1
        done = (step - jnp.asarray(first_step)[phase]).astype(jnp.float32) + 1.0
        tokens = jnp.asarray(first_token)[phase] + done * jnp.asarray(step_tokens)[phase]
        progress = jnp.clip((tokens - warmup_tokens) / max(total - warmup_tokens, 1.0), 0.0, 1.0)
        decay = {
            "cosine": final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "linear": 1 - (1 - final) * progress,
            "wsd": 1 - (1 - final) * jnp.clip((tokens - (total - decay_tokens)) / max(decay_tokens, 1.0), 0.0, 1.0),
            "constant": jnp.ones_like(progress),
        }[o.schedule]
        warmup = jnp.minimum(tokens / max(warmup_tokens, 1.0), 1.0)
        return o.learning_rate * warmup * decay * jnp.asarray(factor)[phase]

    return learning_rate
