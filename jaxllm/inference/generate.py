"""Sampling a continuation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.model.llama import Llama


def sample(
    model: Llama, prompt: np.ndarray, new_tokens: int, *, window: int, temperature: float = 0.8, seed: int = 0
) -> np.ndarray:
    """Continues `prompt` (ids [T], T >= 1) by `new_tokens` sampled ids; returns those alone.

    Each token costs a whole forward pass over the last `window` ids: for short samples, one compilation whatever the length.
    """
    graph, params = nnx.split(model)

    @jax.jit
    def next_token(params, ids_S, length, key):
        logits_V = nnx.merge(graph, params)(ids_S[None])[0, length - 1]
        return jax.random.categorical(key, logits_V / temperature)

    ids, keys = list(map(int, prompt)), jax.random.split(jax.random.key(seed), new_tokens)
    for key in keys:
        recent = ids[-window:]
        padded = np.zeros(window, np.int32)
        padded[: len(recent)] = recent
        ids.append(int(next_token(params, jnp.asarray(padded), len(recent), key)))
    return np.array(ids[-new_tokens:], np.int32)
