"""The state of a run beside that of the checkpoint which it resumes from: what the checkpoint may lack."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.train import diloco
from jaxllm.train.build import State

log = logging.getLogger(__name__)


def layout_in(meta: Mapping[str, Any], layout: State) -> State:
    """What to read from the checkpoint with this metadata.

    Args:
      layout: the state of the run, as ShapeDtypeStructs.
    """
    if not meta["config"]["train"].get("skip_spikes", False):
        layout = layout.with_recent(None)
    return diloco.as_saved(layout, meta) if isinstance(layout, diloco.DilocoState) else layout


def completed(state: State, layout: State, meta: Mapping[str, Any]) -> State:
    """A state that was read from the checkpoint with this metadata, with what that lacks. The usual level of losses is learnt
    again, nothing waits to be sent, and replicas join that were not there (`joined`)."""
    if state.recent is None and layout.recent is not None:
        state = state.with_recent(_zeros(layout.recent))
    if not isinstance(state, diloco.DilocoState) or not isinstance(layout, diloco.DilocoState):
        return state
    if state.residual is None and layout.residual is not None:
        state = dataclasses.replace(state, residual=_zeros(layout.residual))
    saved, replicas = meta["config"]["parallel"]["replica"], layout.islands.step.shape[0]
    if saved == replicas:
        return state
    rest = f"{replicas - saved} begin from the weights of the last outer step" if replicas > saved else "the others leave"
    log.warning(
        "The checkpoint has %d DiLoCo replicas and the run %d: the first %d continue, %s.",
        saved,
        replicas,
        min(saved, replicas),
        rest,
    )
    return joined(state, saved) if replicas > saved else state


def joined(state: diloco.DilocoState, saved: int) -> diloco.DilocoState:
    """`state`, which has replicas of zeros from number `saved` on. Each of these begins with the weights of the last outer
    step, the moments of the first replica, and nothing to send."""

    def begin(state: diloco.DilocoState) -> diloco.DilocoState:
        was_there = jnp.arange(state.islands.step.shape[0]) < saved
        islands = jax.tree.map(lambda x: diloco.where_replica(was_there, x, x[:1]), state.islands)
        params = jax.tree.map(lambda x, t: diloco.where_replica(was_there, x, t[None]), state.islands.params, state.params)
        return dataclasses.replace(state, islands=dataclasses.replace(islands, params=params))

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(state)


def _zeros(layout: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), layout)
