"""DiLoCo (Douillard et al., 2023, arXiv 2311.08105): replicas train independently and are synchronised once per round.

K replicas (mesh axis `replica`) begin a round with the same weights t. Each takes train.diloco_steps ordinary inner steps on
its 1/K of every global batch, with AdamW moments that it keeps from round to round. Replicas do not communicate during a
round. With t_k the weights of replica k, the round ends with one outer step with Nesterov momentum:

    D = mean over k of (t - t_k)        v <- m v + D        t <- t - r (D + m v)

with r = train.diloco_lr and m = train.diloco_momentum. All replicas continue from t. With r = 1 and m = 0, t is the mean of
the replicas. The last step of a run always ends a round, even a shorter one.

The loss of a replica is the mean over its own targets, and its gradients are clipped by its own norm. The inner step is the
train step over arrays with a leading replica dim, [replica, ...]. parallelize.py returns gradients in this form; the rest is
vmapped. Each device stores its part of t and v in addition to its replica's state: 8 bytes per parameter, sharded by ZeRO.
With train.diloco_bits below 32 replicas send codes, and keep what these leave out in a residual of 4 more (outer_codes.py).

A replica whose change is not finite is left out of D. It continues from t like the others, with its moments if they are all
finite, and otherwise with moments of 0. Without any change D is unknown, and t and v stay.

With train.diloco_fragments=F the weights are cut into F fragments, and each has an outer step of its own once a
round: fragment f after step f H / F of the round. An outer step sends a fragment, F times as often.
Metrics and state keys call a replica an island.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import Config, ConfigError
from jaxllm.config.rounds import EXCHANGE_SCOPE as SCOPE
from jaxllm.config.rounds import are_codes, exchanges_beside_steps, fragments_of, sends_codes
from jaxllm.mesh.axes import REPLICA
from jaxllm.mesh.sharding import replica_spec
from jaxllm.parallel.parameters import stacking_of
from jaxllm.train.outer_codes import coded_mean, own_square
from jaxllm.train.step import TrainState

Metrics = dict[str, Any]

ISLANDS, OUTER = "islands", "outer"
"""Keys of the inner step's metrics, each [replica, ...], and of the list of those of the outer steps after it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DilocoState:
    """Training state of a run with DiLoCo rounds."""

    step: jax.Array
    """Number of inner steps done, int32."""
    params: Any
    """t, float32: the weights after the last outer step. Evaluation uses them, and so do readers of a checkpoint."""
    momentum: Any
    """v, float32, with the shapes of `params`."""
    islands: TrainState
    """State of each replica, [replica, ...]."""
    residual: Any = None
    """What each replica has not sent yet, float32, [replica, ...]; None if they send float32."""

    @property
    def recent(self) -> Any:
        return self.islands.recent

    def with_recent(self, recent: Any) -> DilocoState:
        return dataclasses.replace(self, islands=self.islands.with_recent(recent))


# ------------------------------------------------------------------------------------------------------- what build.py takes


def begin(state: TrainState, replicas: int, codes: bool = False) -> DilocoState:
    """The state at the start of the first round: each replica has a copy of `state`, and v is 0.

    Args:
      codes: whether replicas will send codes. Residuals begin at 0.
    """
    own = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (replicas, *x.shape)), state)
    residual = jax.tree.map(jnp.zeros_like, own.params) if codes else None
    return DilocoState(state.step, state.params, jax.tree.map(jnp.zeros_like, state.params), own, residual)


def state_shardings(shardings: TrainState, replicas: int, codes: bool = False) -> DilocoState:
    """Shardings of a DilocoState from those of a TrainState. t and v are sharded like weights and equal in all replicas; the
    state of a replica is on its own devices only."""
    own = jax.tree.map(lambda s: NamedSharding(s.mesh, replica_spec(s.spec, replicas)), shardings)
    return DilocoState(shardings.step, shardings.params, shardings.params, own, own.params if codes else None)


def metrics_sharding(mesh: Mesh) -> dict[str, NamedSharding]:
    """Shardings of the inner step's metrics. Replicating them would need a collective between replicas."""
    return {ISLANDS: NamedSharding(mesh, replica_spec(PartitionSpec(), mesh.shape.get(REPLICA, 1)))}


def vmap_over_replicas(replicas: int) -> Callable[[Callable], Callable]:
    """Makes a vmap over replicas. Sharding constraints inside the function then apply to one replica."""
    return partial(jax.vmap, spmd_axis_name=REPLICA if replicas > 1 else None)


def inner_step(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
) -> Callable[[DilocoState, Any], tuple[DilocoState, Metrics]]:
    """Wraps a train step over the replicas' arrays as a step of a DilocoState. t and v pass through."""

    def take(state: DilocoState, batch: Any) -> tuple[DilocoState, Metrics]:
        own, metrics = step(state.islands, batch)
        return dataclasses.replace(state, step=state.step + 1, islands=own), {ISLANDS: metrics}

    return take


# ------------------------------------------------------------------------------------------------------------ what a loop does


Sums = dict[str, jax.Array]
Mean = Callable[[Any, Any, jax.Array, Sums], tuple[Any, Any, Sums]]
"""(changes, residuals, the replicas that count, other numbers), each [replica, ...] -> (D, the next residuals, the sums of the
others over replicas). "number" of the others is that of replicas that count; without any D is 0."""


def mean_in_float32(changes: Any, residual: None, counts: jax.Array, others: Sums) -> tuple[Any, None, Sums]:
    sums = jax.tree.map(lambda x: x.sum(0), others)
    number = jnp.maximum(sums["number"], 1)
    return jax.tree.map(lambda d: where_replica(counts, d, 0).sum(0) / number, changes), residual, sums


def mean_at_once(mesh: Mesh, shared: Any, own: Any) -> Mean:
    """mean_in_float32 by a single all-reduce: XLA by default keeps one in flight, and of several would hide the last.

    Args:
      shared, own: trees of PartitionSpecs, of D and of the changes.
    """

    def of_device(changes: Any, residual: None, counts: jax.Array, others: Sums) -> tuple[Any, None, Sums]:
        own_changes = jax.tree.map(lambda d: jnp.where(counts[0], d[0], 0), changes)
        flat, unflatten = ravel_pytree((own_changes, jax.tree.map(lambda x: x[0], others)))
        sums, others = unflatten(jax.lax.psum(flat, REPLICA))
        return jax.tree.map(lambda x: x / jnp.maximum(others["number"], 1), sums), residual, others

    each, none = PartitionSpec(REPLICA), PartitionSpec()
    specs: Any = {"in_specs": (own, none, each, each), "out_specs": (shared, none, none)}
    return jax.shard_map(of_device, mesh=mesh, check_vma=False, **specs)


def squares_of(changes: Any) -> jax.Array:
    """Squared lengths [replica] of changes [replica, ...]."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda d: jnp.square(d).sum(tuple(range(1, d.ndim))), changes))


def squares_apart(mesh: Mesh, own: Any) -> Callable[[Any], jax.Array]:
    """squares_of with a collective that XLA leaves alone. It would combine a sum of floats with those of the gradients' norms,
    and the exchange, which waits for the squares, would wait for the inner step.

    Args:
      own: a tree of PartitionSpecs, of the changes.
    """
    axes = tuple(name for name in mesh.axis_names if name != REPLICA)
    devices = mesh.size // mesh.shape[REPLICA]

    def of_device(changes: Any) -> jax.Array:
        square = own_square(mesh, changes, own)
        # Each number has one writer, and the others bring 0.
        bits = jnp.zeros(devices, jnp.uint32).at[jax.lax.axis_index(axes)].set(square.view(jnp.uint32))
        return jax.lax.pmax(bits, axes).view(jnp.float32).sum()[None]

    return jax.shard_map(of_device, mesh=mesh, in_specs=(own,), out_specs=PartitionSpec(REPLICA), check_vma=False)


def outer_step(
    state: DilocoState,
    rate: float,
    momentum: float,
    mean: Mean = mean_in_float32,
    squares: Callable[[Any], jax.Array] = squares_of,
    after: TrainState | None = None,
) -> tuple[DilocoState, Metrics]:
    """Synchronises the replicas. It is a pure function, to be jitted with the state donated. Its mean over replicas is the only
    communication of DiLoCo between replicas.

    Args:
      after: the replicas after an inner step that runs at the same time. Each keeps its change in that step, on top of t.

    Metrics, without the replicas that are left out: outer_grad_norm, |D|. island_drift, the distance of a replica from t, as
    root mean square over replicas. With several replicas also island_cosine, the mean product of two replicas' changes divided
    by the mean square of one; where codes are sent, of those. islands_left_out is their number.
    """
    own = state.islands.params
    with jax.named_scope(SCOPE):
        # Subtract before the mean: the differences are small, so their sum keeps more digits.
        changes = jax.tree.map(lambda t, own_t: t[None] - own_t, state.params, own)
        lengths = squares(changes)
        counts = jnp.isfinite(lengths)
        others = {"number": counts.astype(jnp.float32), "square": jnp.where(counts, lengths, 0)}
        change, residual, sums = mean(changes, state.residual, counts, others)
        is_known, number = sums["number"] > 0, jnp.maximum(sums["number"], 1)
        # `counts`, and for XLA a result of the exchange: it computes `counts` itself with all that asks for it, after the inner
        # step too, and then the exchange would wait for that.
        used = counts & is_known
        velocity = jax.tree.map(lambda v, d: jnp.where(is_known, momentum * v + d, v), state.momentum, change)
        moved = jax.tree.map(lambda t, d, v: t - rate * (d + momentum * v), state.params, change, velocity)
        params = jax.tree.map(lambda t, new: jnp.where(is_known, new, t), state.params, moved)
        if after is None:
            synced = jax.tree.map(lambda t, own_t: jnp.broadcast_to(t[None], own_t.shape), params, own)
        else:
            # The change of a replica that is left out is of no use. `old` is a result of the exchange for XLA: it would compute
            # `changes` in one kernel with all that reads `own`, after the inner step.
            keep = lambda t, old, new: where_replica(used, t[None] + (new - jnp.where(is_known, old, 0)), t[None])  # noqa: E731
            synced = jax.tree.map(keep, params, own, after.params)
        norm, square = optax.tree.norm(change), sums["square"] / number
        left_out = counts.size - sums["number"].astype(jnp.int32)
        metrics = {"outer_grad_norm": norm, "island_drift": jnp.sqrt(square), "islands_left_out": left_out}
        if counts.size > 1:
            # |sum of d|^2 = K^2 |D|^2 is K squares and K (K - 1) products. Of codes, both are those of what was sent.
            of_mean, of_one = sums.get("mean_square", jnp.square(norm)), sums.get("coded_square", sums["square"]) / number
            products = (number * of_mean - of_one) / jnp.maximum(number - 1, 1)
            metrics["island_cosine"] = products / jnp.maximum(of_one, jnp.finfo(jnp.float32).tiny)
    islands = state.islands if after is None else after
    islands = dataclasses.replace(islands, params=synced, opt_state=_repaired(islands.opt_state, used))
    return DilocoState(state.step, params, velocity, islands, residual), metrics


def where_replica(of_replica: jax.Array, x: jax.Array, otherwise: Any) -> jax.Array:
    """`x` [replica, ...] for the replicas of a mask, and `otherwise` for the others."""
    return jnp.where(jnp.expand_dims(of_replica, tuple(range(1, x.ndim))), x, otherwise)


def _repaired(opt_state: Any, counts: jax.Array) -> Any:
    """Moments [replica, ...], all 0 in a replica that does not count and has any that is not finite. A 0 for single numbers
    would leave a first moment without its second, and the next step would divide by almost 0. A single number of each replica
    is no moment, but perhaps a rate of the caller's optimizer.
    """

    def is_moment(x: jax.Array) -> bool:
        return x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)

    moments = [x for x in jax.tree.leaves(opt_state) if is_moment(x)]
    finite = [jnp.isfinite(x).all(tuple(range(1, x.ndim))) for x in moments]
    keeps = counts | jnp.stack([jnp.ones_like(counts), *finite]).all(0)
    return jax.tree.map(lambda x: where_replica(keeps, x, 0) if is_moment(x) else x, opt_state)


# -------------------------------------------------------------------------------------------------------------- fragments
# Fragments of the weights, of which DiLoCo synchronises one at a time (train.diloco_fragments). As in Streaming DiLoCo
# (Douillard et al., 2025, arXiv 2501.18512) fragment f of F has the layers f, f + F, f + 2 F, ... Here it also has those rows
# of the embedding and the head, and those numbers of the last norm, so each fragment has a share of 1 / F of everything. The
# outer optimizer works on each number by itself, so any cut is allowed. The number of the fragment is an argument of the
# compiled program, so one program serves all fragments.
#
# Each device cuts the part that it holds, by the place in that part, so a cut sends nothing. A pipeline's chunk, and the rows
# of a tensor rank and of a ZeRO rank, then belong to the same fragments as on one device if F divides their number.


@dataclass(frozen=True)
class Fragments:
    """How trees of weights are cut.

    Attributes:
      count: F.
      specs: the tree's PartitionSpecs.
      dims: for each array the dim that is cut.
    """

    count: int
    mesh: Mesh
    specs: Any
    dims: Any

    def cut(self, tree: Any, number: jax.Array) -> Any:
        """Fragment `number` of `tree`: arrays with a share of the rows, sharded as before. Where F does not divide the rows of
        a device, rows of zeros fill the last group of F."""

        def own(number: jax.Array, x: jax.Array, dim: int) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(self._in_groups(x, dim), number, dim + 1, keepdims=False)

        return self._on_each_device(own, number, tree)

    def put(self, tree: Any, fragment: Any, number: jax.Array) -> Any:
        """`tree` with fragment `number` in its place: the inverse of `cut`."""

        def own(number: jax.Array, x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
            groups = jax.lax.dynamic_update_index_in_dim(self._in_groups(x, dim), part, number, dim + 1)
            rows = groups.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
            return jax.lax.slice_in_dim(rows, 0, x.shape[dim], axis=dim)

        return self._on_each_device(own, number, tree, fragment)

    def _in_groups(self, x: jax.Array, dim: int) -> jax.Array:
        """[..., rows, ...] -> [..., rows / F, F, ...]"""
        gaps = [(0, 0)] * x.ndim
        gaps[dim] = (0, -x.shape[dim] % self.count)
        return jnp.pad(x, gaps).reshape(*x.shape[:dim], -1, self.count, *x.shape[dim + 1 :])

    def _on_each_device(self, function: Callable, number: jax.Array, *trees: Any) -> Any:
        def run(number: jax.Array, *parts: Any) -> Any:
            return jax.tree.map(lambda dim, *arrays: function(number, *arrays, dim), self.dims, *parts)

        specs = (PartitionSpec(), *(self.specs,) * len(trees))
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=self.specs, check_vma=False)(number, *trees)


OuterStep = Callable[..., tuple[DilocoState, Metrics]]
"""(state, number of the fragment, int32, after=None) -> (state, metrics); `after` as outer_step has it."""


def of_fragment(step: Callable[..., tuple[DilocoState, Metrics]], shared: Fragments, own: Fragments) -> OuterStep:
    """`step` of one fragment of the weights. All others stay as they are.

    Args:
      step: (state, after=) -> (state, metrics)
      shared, own: how t and v are cut, and arrays of [replica, ...].
    """

    def take(state: DilocoState, number: jax.Array, after: TrainState | None = None) -> tuple[DilocoState, Metrics]:
        def part_of(islands: TrainState) -> TrainState:
            return dataclasses.replace(islands, params=own.cut(islands.params, number))

        with jax.named_scope("fragment"):
            residual = None if state.residual is None else own.cut(state.residual, number)
            t, v = (shared.cut(tree, number) for tree in (state.params, state.momentum))
            cut = DilocoState(state.step, t, v, part_of(state.islands), residual)
            part, metrics = step(cut, after=None if after is None else part_of(after))
            t, v = (shared.put(a, b, number) for a, b in ((state.params, part.params), (state.momentum, part.momentum)))
            residual = None if state.residual is None else own.put(state.residual, part.residual, number)
            params = own.put((state.islands if after is None else after).params, part.islands.params, number)
        return DilocoState(state.step, t, v, dataclasses.replace(part.islands, params=params), residual), metrics

    return take


def beside(
    step: Callable[[DilocoState, Any], tuple[DilocoState, Metrics]], outer: OuterStep
) -> Callable[[DilocoState, Any, jax.Array], tuple[DilocoState, Metrics]]:
    """(state, batch, number of a fragment) -> (state, metrics): an inner step, and at the same time the outer step of a
    fragment, from the state before. Neither needs the other's result until both are done."""

    def take(state: DilocoState, batch: Any, number: jax.Array) -> tuple[DilocoState, Metrics]:
        after, metrics = step(state, batch)
        synced, found = outer(state, number, after.islands)
        return dataclasses.replace(synced, step=after.step), {**metrics, OUTER: [found]}

    return take


def outer_step_of(config: Config, mesh: Mesh, shardings: DilocoState) -> OuterStep:
    """The outer step of a config, of a fragment of the weights or of all; then the number has no effect."""
    train, count = config.train, fragments_of(config)
    step = partial(outer_step, rate=train.diloco_lr, momentum=train.diloco_momentum)
    shared, own = (jax.tree.map(lambda s: s.spec, tree) for tree in (shardings.params, shardings.islands.params))
    if exchanges_beside_steps(config):
        step = partial(step, mean=mean_at_once(mesh, shared, own), squares=squares_apart(mesh, own))
    if sends_codes(config):
        step = partial(step, mean=coded_mean(train.diloco_bits, mesh, shared, own))
    if count == 1:
        return lambda state, number, after=None: step(state, after=after)
    cuts = []
    for first, tree in enumerate((shared, own)):
        # The last dim that counts layers, or the first dim of what is outside the layers; of a replica's both are one later.
        of_part = {name: first + (len(stacking_of(config).shape) - 1 if name == "layers" else 0) for name in tree}
        dims = {name: jax.tree.map(lambda _, dim=dim: dim, tree[name]) for name, dim in of_part.items()}
        cuts.append(Fragments(count, mesh, tree, dims))
    return of_fragment(step, *cuts)


def combine_replicas(metrics: Metrics) -> dict[str, np.ndarray]:
    """Reads metrics from the devices and combines those of replicas: the mean of numbers, and the logical or of booleans, over
    the replicas on this process's devices. With several replicas, loss_spread is the largest loss minus the smallest. Those of
    several fragments become those of all their weights.
    """
    own = metrics.get(ISLANDS, {})
    values = jax.device_get({name: x for name, x in metrics.items() if name not in (ISLANDS, OUTER)})
    values |= combine_fragments(jax.device_get(metrics.get(OUTER, [])))
    # A replica whose batch has no target has no loss (train/instability.py).
    had = _addressable_rows(own["grad_norm"]) != 0 if own else np.ones(1, bool)
    for name, x in own.items():
        rows = _addressable_rows(x)
        rows = rows[had] if had.any() else rows
        values[name] = rows.any(0) if rows.dtype == bool else rows.mean(0)
        if name == "loss" and len(rows) > 1:
            values["loss_spread"] = rows.max(0) - rows.min(0)
    return values


def combine_fragments(outer: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The metrics of one outer step of all the weights, from those of fragments."""
    if len(outer) < 2:
        return dict(*outer)
    rows = {name: np.array([np.float64(metrics[name]) for metrics in outer]) for name in outer[0]}
    drifts = np.square(rows["island_drift"])
    found: dict[str, Any] = {"islands_left_out": rows["islands_left_out"].max()}
    found |= {name: np.sqrt(np.square(rows[name]).sum()) for name in ("outer_grad_norm", "island_drift")}
    if "island_cosine" in rows:
        found["island_cosine"] = (rows["island_cosine"] * drifts).sum() / max(drifts.sum(), np.finfo(np.float32).tiny)
    return found


def _addressable_rows(x: jax.Array) -> np.ndarray:
    """The rows of [replica, ...] on this process's devices, each once."""
    rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(rows[first]) for first in sorted(rows)])


# ---------------------------------------------------------------------------------------------------------------- checkpoints


def in_rounds(meta: Mapping[str, Any]) -> bool:
    """Whether the checkpoint with this metadata holds a DilocoState."""
    train = meta["config"]["train"]
    # Older checkpoints lack these keys. The first round begins with the next step.
    return train.get("diloco_steps") is not None and meta["step"] > train.get("diloco_after_steps", 0)


def as_saved(state: DilocoState, meta: Mapping[str, Any]) -> DilocoState:
    """A layout without the residuals, if the checkpoint with this metadata holds none."""
    train, parallel = meta["config"]["train"], meta["config"]["parallel"]
    has_residual = are_codes(train.get("diloco_bits", 32), parallel["replica"])
    return state if has_residual else dataclasses.replace(state, residual=None)


def require_rounds(meta: Mapping[str, Any], config: Config) -> None:
    """Refuses to resume inside the rounds without rounds. Their length and the number of replicas may change."""
    if not in_rounds(meta):
        return
    step, parallel, train = meta["step"], meta["config"]["parallel"], meta["config"]["train"]
    where = f"Step {step} of this run was saved"
    if config.train.diloco_steps is None:
        raise ConfigError(
            f"{where} by {parallel['replica']} DiLoCo replicas: set train.diloco_steps={train['diloco_steps']}, or start a new "
            f"run.dir from its weights with train.init_from."
        )
    if config.train.diloco_after_steps >= step:
        raise ConfigError(
            f"{where} during a DiLoCo round: set train.diloco_after_steps={train['diloco_after_steps']}, "
            f"not {config.train.diloco_after_steps}."
        )
