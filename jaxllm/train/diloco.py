"""DiLoCo (Douillard et al., 2023, arXiv 2311.08105): islands that train on their own, and are brought together once a round.

K islands (mesh axis `replica`) begin a round with the same weights t. Each takes train.diloco_steps inner steps, ordinary ones,
on its 1/K of every global batch, with AdamW moments that it keeps from round to round. Nothing crosses between islands
meanwhile. Then, with t_k the weights of island k, one outer step with Nesterov momentum:

    D = mean over k of (t - t_k)        v <- m v + D        t <- t - r (D + m v)

with r = train.diloco_lr and m = train.diloco_momentum, and all go on from t. With r = 1 and m = 0 that is the mean of the
islands. The last step of a run ends a round, whole or not.

An island's loss is the mean over its own targets, and its gradients are clipped by its own norm. The inner step is the train
step over arrays with a leading dim that counts islands, [island, ...]: gradients come so from parallelize.py, the rest is
vmapped. On each device lie, beside the island's state, its share of t and v: 8 bytes for each parameter, cut as ZeRO cuts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm import progress
from jaxllm.config import Config, ConfigError
from jaxllm.mesh import REPLICA, replicated
from jaxllm.sharding import replica_spec
from jaxllm.train.state import TrainState

Metrics = dict[str, Any]

ISLANDS = "islands"
"""Of metrics: those of the inner step, each [island, ...]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DilocoState:
    """The state of a run in rounds."""

    step: jax.Array
    """Inner steps done, int32."""
    params: Any
    """t, float32: the weights of the last outer step. They are what is evaluated, and what others read in a checkpoint."""
    momentum: Any
    """v, float32, like `params`."""
    islands: TrainState
    """Each island's own, [island, ...]."""

    @property
    def recent(self) -> Any:
        return self.islands.recent

    def with_recent(self, recent: Any) -> DilocoState:
        return dataclasses.replace(self, islands=self.islands.with_recent(recent))


# ------------------------------------------------------------------------------------------------------- what build.py takes


def without(config: Config) -> Config:
    """The config of the steps before the first round, which all islands take together."""
    return config.model_copy(update={"train": config.train.model_copy(update={"diloco_steps": None})})


def begin(state: TrainState, replicas: int) -> DilocoState:
    """The state at the beginning of the first round: every island has a copy of `state`, and v is 0."""
    islands = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (replicas, *x.shape)), state)
    return DilocoState(state.step, state.params, jax.tree.map(jnp.zeros_like, state.params), islands)


def state_shardings(shardings: TrainState, replicas: int) -> DilocoState:
    """Shardings of a DilocoState, from those of a TrainState: t and v like the weights, equal in all replicas; each replica's
    own state on its own devices."""
    own = jax.tree.map(lambda s: NamedSharding(s.mesh, replica_spec(s.spec, replicas)), shardings)
    return DilocoState(shardings.step, shardings.params, shardings.params, own)


def metrics_sharding(mesh: Mesh) -> dict[str, NamedSharding]:
    """Sharding of the inner step's metrics. To replicate them would take a collective between replicas."""
    return {ISLANDS: NamedSharding(mesh, replica_spec(PartitionSpec(), mesh.shape.get(REPLICA, 1)))}


def vmap_over_replicas(replicas: int) -> Callable[[Callable], Callable]:
    """jax.vmap over the leading replica dim. Sharding constraints inside the function hold within each replica."""
    return partial(jax.vmap, spmd_axis_name=REPLICA if replicas > 1 else None)


def inner_step(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
) -> Callable[[DilocoState, Any], tuple[DilocoState, Metrics]]:
    """A train step over islands' arrays, as one of a DilocoState; t and v pass through."""

    def take(state: DilocoState, batch: Any) -> tuple[DilocoState, Metrics]:
        islands, metrics = step(state.islands, batch)
        return dataclasses.replace(state, step=state.step + 1, islands=islands), {ISLANDS: metrics}

    return take


# ------------------------------------------------------------------------------------------------------------ what a loop does


def outer_step(state: DilocoState, rate: float, momentum: float) -> tuple[DilocoState, Metrics]:
    """Brings the islands together. A pure function, to be jitted with the state donated; its sum over islands, float32, is all
    that DiLoCo sends between them.

    Metrics: outer_grad_norm, |D|; island_drift, how far an island has gone from t, the root of the mean square over islands;
    of several islands also island_cosine, between the ways that two of them went: mean product of two over mean square of one.
    """
    own = state.islands.params
    with jax.named_scope("outer_step"):
        # Less the island's own first: what is summed is small, and keeps more of its digits.
        changes = jax.tree.map(lambda t, of_island: t[None] - of_island, state.params, own)
        change = jax.tree.map(lambda d: d.mean(0), changes)
        velocity = jax.tree.map(lambda v, d: momentum * v + d, state.momentum, change)
        params = jax.tree.map(lambda t, d, v: t - rate * (d + momentum * v), state.params, change, velocity)
        islands = jax.tree.map(lambda t, of_island: jnp.broadcast_to(t[None], of_island.shape), params, own)
        count = jax.tree.leaves(own)[0].shape[0]
        norm, square = optax.global_norm(change), jnp.square(optax.global_norm(changes)) / count
        metrics = {"outer_grad_norm": norm, "island_drift": jnp.sqrt(square)}
        if count > 1:
            # |sum of d|^2 = K^2 |D|^2 is K squares and K (K - 1) products.
            products = (count * jnp.square(norm) - square) / (count - 1)
            metrics["island_cosine"] = products / jnp.maximum(square, jnp.finfo(jnp.float32).tiny)
    moved = dataclasses.replace(state.islands, params=islands)
    return DilocoState(state.step, params, velocity, moved), metrics


class Rounds:
    """When islands are brought together, and the program that does it.

    Args:
      shardings: where the state lies.
    """

    def __init__(self, config: Config, mesh: Mesh, shardings: DilocoState):
        train = config.train
        assert train.diloco_steps is not None, "there are no rounds"
        self._first, self._every, self._last = train.diloco_after_steps, train.diloco_steps, train.steps
        step = partial(outer_step, rate=train.diloco_lr, momentum=train.diloco_momentum)
        self.jitted_step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
        self._compiled_step: Any = None

    def end_with(self, step: int) -> bool:
        """Whether a round ends with this step (the first is 1): a function of the step alone, so a run that is taken up again
        goes on with the round it was in."""
        return step == self._last or (step - self._first) % self._every == 0

    def bring_together(self, state: DilocoState) -> tuple[DilocoState, Metrics]:
        """The outer step; `state` is used up. Compiled with the first."""
        if self._compiled_step is None:
            with progress.phase("compile"):
                self._compiled_step = self.jitted_step.lower(state).compile()
        return self._compiled_step(state)


def joined(metrics: Metrics) -> dict[str, np.ndarray]:
    """Metrics read from the devices; those of islands as of one run: the mean of numbers, and of truths whether any holds, over
    the islands that this process has devices of. Of several islands, loss_spread is the largest loss less the smallest.
    """
    own = metrics.get(ISLANDS, {})
    values = jax.device_get({name: x for name, x in metrics.items() if name != ISLANDS})
    for name, x in own.items():
        rows = _here(x)
        values[name] = rows.any(0) if rows.dtype == bool else rows.mean(0)
        if name == "loss" and len(rows) > 1:
            values["loss_spread"] = rows.max(0) - rows.min(0)
    return values


def _here(x: jax.Array) -> np.ndarray:
    """The rows of [island, ...] that lie on this process's devices, each once."""
    if x.is_fully_addressable:
        return np.asarray(x)
    rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(rows[first]) for first in sorted(rows)])


# ---------------------------------------------------------------------------------------------------------------- checkpoints


def in_rounds(meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds a DilocoState, by what it says of itself."""
    train = meta["config"]["train"]
    # Older ones know nothing of it. The first round begins with the step after.
    return train.get("diloco_steps") is not None and meta["step"] > train.get("diloco_after_steps", 0)


def require_same_islands(meta: Mapping[str, Any], config: Config) -> None:
    """Refuses a checkpoint of other islands: their moments and weights are theirs alone. A round's length may change.

    Raises:
      ConfigError: names what to set.
    """
    if not in_rounds(meta):
        return
    step, parallel, train = meta["step"], meta["config"]["parallel"], meta["config"]["train"]
    where, islands = f"Step {step} of this run was saved", parallel["replica"]
    if config.train.diloco_steps is None or config.parallel.replica != islands:
        raise ConfigError(
            f"{where} by {islands} islands of DiLoCo: set train.diloco_steps={train['diloco_steps']} and "
            f"parallel.replica={islands}, or begin anew from its weights with train.init_from and another run.dir."
        )
    if config.train.diloco_after_steps >= step:
        raise ConfigError(
            f"{where} when islands trained on their own already: set train.diloco_after_steps={train['diloco_after_steps']}, "
            f"not {config.train.diloco_after_steps}."
        )
