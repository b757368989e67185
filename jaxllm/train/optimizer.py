"""AdamW and the learning-rate schedule, counted in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.config import Config

LearningRate = Callable[[jax.Array], jax.Array]


def make_optimizer(config: Config, table: Any) -> optax.GradientTransformation:
    """AdamW without the learning rate, which the step multiplies in. `table`: nested dict of Parameter.

    Weight decay applies only to matrices.
    """
    adamw = config.optimizer
    decayed = jax.tree.map(lambda p: p.is_matrix, table)
    return optax.chain(
        optax.scale_by_adam(adamw.beta1, adamw.beta2, adamw.epsilon),
        optax.add_decayed_weights(adamw.weight_decay, mask=decayed),
    )


def make_learning_rate(config: Config) -> LearningRate:
    """Makes the schedule: step (int, the first is 0) -> learning rate, from the tokens consumed at the end of that step.

    Warm-up is linear from 0. Let p be the fraction of the tokens after warm-up: cosine is f + (1-f)(1+cos(pi p))/2, linear is
    1-(1-f)p, wsd is constant and then linear to f over decay_tokens, with f = final_learning_rate_fraction. The result is
    multiplied by (batch / last batch of train.batch_schedule) to the power that train.batch_lr names.
    """
    o = config.optimizer
    # Floats, because int32 would overflow at 2 billion tokens.
    total, warmup_tokens = float(config.total_tokens), float(o.warmup_tokens)
    decay_tokens = float(o.decay_tokens if o.decay_tokens is not None else total / 5)
    final = o.final_learning_rate_fraction
    phases, power = config.phases, {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.train.batch_lr]
    # One entry per phase. float32 is exact to 1e-7 of the run.
    first_step = np.array([min(phase.first_step, 2**31 - 1) for phase in phases], np.int32)
    first_token = np.array([config.tokens_before(phase.first_step) for phase in phases], np.float32)
    step_tokens = np.array([phase.sequences * config.train.sequence_length for phase in phases], np.float32)
    factor = np.array([(phase.sequences / phases[-1].sequences) ** power for phase in phases], np.float32)

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


def clip_by_norm(gradients: Any, norm: jax.Array, limit: float | None) -> Any:
    """Scales gradients down so that their global norm, given as `norm`, is at most `limit`."""
    if limit is None:
        return gradients
    scale = clip_scale(norm, limit)
    return jax.tree.map(lambda g: g * scale, gradients)


def clip_scale(norm: jax.Array, limit: float) -> jax.Array:
    """What clip_by_norm multiplies gradients by."""
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
