"""Chooses the next token from logits: greedy, or sampled from all tokens, the top k, or the top p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.config.errors import ConfigError

GREEDY, ALL, CUT = "greedy", "all", "cut"
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature is applied first, then top_k, then top_p to the rest."""

    temperature: float = 0.0
    """Divides the logits. 0 selects the likeliest token (greedy)."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens whose total probability reaches this value (Holtzman et al.,
    2020)."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens. None: from all."""
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} is not valid: use 0 for the likeliest token, or a positive value."
            )
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            raise ConfigError(
                f"temperature={self.temperature} is so small that logits overflow: use 0 for the likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is not a probability: use a number above 0, up to 1.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token to sample: use 1 or more.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed} is not in 0 .. 2^31 - 1: choose one in this range.")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k is not None):
            raise ConfigError("top_p and top_k limit sampling, but temperature=0 does not sample: set temperature.")

    @property
    def kind(self) -> str:
        """The static part, for which a program is compiled. The numbers are its inputs."""
        if self.temperature == 0:
            return GREEDY
        return ALL if self.top_p == 1 and self.top_k is None else CUT

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "temperature": np.float32(self.temperature),
            "top_p": np.float32(self.top_p),
            "top_k": np.int32(np.iinfo(np.int32).max if self.top_k is None else self.top_k),
            "seed": np.int32(self.seed),
        }


def next_ids(logits_BV: Float[Array, "B V"], kind: str, numbers: dict[str, Any], step: Int[Array, ""]) -> Int[Array, " B"]:
    """Chooses one id per row. A sample depends on the seed, the step and the row's number.

    Args:
      kind, numbers: of a Sampling.
      step: number of ids chosen before.
    """
    if kind == GREEDY:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(numbers["seed"]), step)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits_BV.shape[0]))
    scaled_BV = logits_BV / numbers["temperature"]
    if kind == ALL:
        return jax.vmap(jax.random.categorical)(keys_B, scaled_BV).astype(jnp.int32)
    ids_BV = jnp.argsort(scaled_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, ids_BV, axis=-1)
    sorted_BV = jnp.where(jnp.arange(sorted_BV.shape[1])[None] < numbers["top_k"], sorted_BV, -jnp.inf)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    sorted_BV = jnp.where(before_BV < numbers["top_p"], sorted_BV, -jnp.inf)
    ranks_B = jax.vmap(jax.random.categorical)(keys_B, sorted_BV)
    return jnp.take_along_axis(ids_BV, ranks_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
