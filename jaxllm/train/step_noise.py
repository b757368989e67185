"""One step's estimates for the gradient noise scale, made in the step. noise_scale.py has the formulas and averages them."""

from __future__ import annotations

from typing import Any

from jaxllm.parallel.types import NoiseParts

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
