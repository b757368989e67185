"""Limits the norm of gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def clip_by_norm(gradients: Any, norm: jax.Array, limit: float | None) -> Any:
    """Scales gradients down so that their global norm, given as `norm`, is at most `limit`."""
    if limit is None:
        return gradients
    scale = clip_scale(norm, limit)
    return jax.tree.map(lambda g: g * scale, gradients)


def clip_scale(norm: jax.Array, limit: float) -> jax.Array:
    """What clip_by_norm multiplies gradients by."""
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
