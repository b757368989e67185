"""The state of a run beside that of the checkpoint which it resumes from: what the checkpoint may lack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.train import diloco
from jaxllm.train.build import State


def layout_in(meta: Mapping[str, Any], layout: State) -> State:
    """What to read from the checkpoint with this metadata.

    Args:
      layout: the state of the run, as ShapeDtypeStructs.
    """
    if not meta["config"]["train"].get("skip_spikes", False):
        layout = layout.with_recent(None)
    return diloco.as_saved(layout, meta) if isinstance(layout, diloco.DilocoState) else layout


def completed(state: State, layout: State) -> State:
    """A state that was read, with zeros for what the checkpoint lacks: the usual level of losses is learnt again, and nothing
    waits to be sent."""
    if state.recent is None and layout.recent is not None:
        state = state.with_recent(_zeros(layout.recent))
    if not isinstance(state, diloco.DilocoState) or not isinstance(layout, diloco.DilocoState):
        return state
    if state.residual is None and layout.residual is not None:
        state = dataclasses.replace(state, residual=_zeros(layout.residual))
    return state


def _zeros(layout: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), layout)
