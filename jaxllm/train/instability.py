"""Instability, in the step: skipped steps, spikes, and the norms of each layer. run/step_metrics.py has the part on the host.

If the loss or the gradient norm of a step is not finite, or the norm is 0 because its batch has no target, the step itself
skips the update, on all devices alike: weights and moments stay the same bit for bit, the step counts, and its samples are not
read again. A spike is a loss or gradient norm more than train.spike_deviations standard deviations above the mean of the last
WINDOW steps (the rule of OLMo-core's SkipStepAdamW). The host marks spikes as metrics arrive. With train.skip_spikes the step
detects and skips them too; the last losses and norms are then part of the state, so that a resumed run skips the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.mesh.sharding import stack_dims

WINDOW = 128
"""Number of past steps that define the usual level."""
FEWEST = WINDOW // 2
"""Number of steps before which no step counts as a spike."""
LAYER_GRAD_NORM = "layer_grad_norm"


class Recent(NamedTuple):
    """Loss and gradient norm of the last steps in which both were finite, including spikes: after a permanent change of level,
    former spikes soon become usual. Arrays of numpy or JAX."""

    values: Any
    """[2, WINDOW], a ring buffer."""
    count: Any
    """Number of steps written so far."""

    @staticmethod
    def empty(xp: Any = jnp, dtype: Any = jnp.float32) -> Recent:
        return Recent(xp.zeros((2, WINDOW), dtype), xp.zeros((), xp.int32))

    def is_spike(self, new_2: Any, deviations: float, xp: Any = jnp) -> Any:
        """Whether loss or gradient norm is far above the usual level. False if not finite, and before FEWEST steps."""
        known = xp.arange(WINDOW) < self.count
        number = known.sum().astype(self.values.dtype)
        mean_2 = xp.where(known[None], self.values, 0).sum(axis=1) / xp.maximum(number, 1)
        squares = xp.where(known[None], xp.square(self.values - mean_2[:, None]), 0)
        deviation_2 = xp.sqrt(squares.sum(axis=1) / xp.maximum(number - 1, 1))
        above = (new_2 > mean_2 + deviations * deviation_2).any()
        return above & xp.isfinite(new_2).all() & (self.count >= FEWEST)

    def after(self, new_2: Any, xp: Any = jnp) -> Recent:
        finite = xp.isfinite(new_2).all()
        here = (xp.arange(WINDOW) == self.count % WINDOW) & finite
        return Recent(xp.where(here[None], new_2[:, None], self.values), self.count + finite.astype(xp.int32))


# ------------------------------------------------------------------------------------------------------------ in the step

SkipPolicy = Callable[[Recent | None, jax.Array, jax.Array], tuple[jax.Array, Recent | None, dict[str, jax.Array]]]
"""(recent losses and norms, loss, gradient norm) -> (whether to apply the update, recent losses and norms now, metrics)"""


def skip_not_finite(recent: Recent | None, loss: jax.Array, grad_norm: jax.Array):
    """The SkipPolicy of a run that skips no spikes."""
    apply_update = jnp.isfinite(loss) & (grad_norm > 0) & (grad_norm < jnp.inf)
    return apply_update, recent, {"skipped": ~apply_update}


def skip_spikes(deviations: float) -> SkipPolicy:
    """The SkipPolicy that skips spikes too."""

    def should_apply(recent: Recent | None, loss: jax.Array, grad_norm: jax.Array):
        assert recent is not None, "part of the state with train.skip_spikes"
        new_2 = jnp.where(grad_norm > 0, jnp.stack([loss, grad_norm]).astype(jnp.float32), jnp.nan)
        spike = recent.is_spike(new_2, deviations)
        apply_update = jnp.isfinite(new_2).all() & ~spike
        return apply_update, recent.after(new_2), {"skipped": ~apply_update, "loss_spike": spike}

    return should_apply


def layer_grad_norms(table: Any, num_layers: int) -> Callable[[Any], jax.Array]:
    """Makes a function: gradients -> norm of each layer, float32 [num_layers].

    Args:
      table: nested dict of Parameter. The parameters of layers are stacked (parallel/parameters.py).
    """

    def squares(parameter: Any, gradient: jax.Array) -> jax.Array:
        axes = tuple(range(stack_dims(parameter.dims), gradient.ndim))
        return jnp.sum(jnp.square(gradient), axis=axes).reshape(-1)

    def norms(gradients: Any) -> jax.Array:
        # Flattened chunk stacks are in the order of layers, with identity layers at the end.
        total: Any = sum(jax.tree.leaves(jax.tree.map(squares, table["layers"], gradients["layers"])))
        return jnp.sqrt(total[:num_layers])

    return norms
