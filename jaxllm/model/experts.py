"""Experts: a router sends each token to K of E feed-forwards (Shazeer et al., 2017). No row is dropped, but where tokens travel
(parallel/expert_parallel.py).

    routes, losses = route(model, x_BSD, router_DE, add) each token's experts and their weights
    order = sort_by_expert(ids_TK, E)
    rows_RD = dispatch(x_TD, order)                      K copies of each token, sorted by expert
    rows_RF = grouped_matmul(rows_RD, gate_EDF, sizes_E) each expert's rows times its matrix
    y_TD = combine(rows_RD, order)                       the sum of each token's rows

`dispatch` and `combine` are each other's transposes, and both gather. To add rows where they belong takes a GPU longer, in an
order of its own.

Letters as in layers.py; E experts, K of them for a token, T = B S tokens, R = T K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.config.types import EXPERT_CHOICE

EXPERT_LOAD_MAX, EXPERTS_USED, EXPERT_ROWS_DROPPED = "expert_load_max", "experts_used", "expert_rows_dropped"


class Routes(NamedTuple):
    ids_BSK: Int[Array, "B S K"]
    weights_BSK: Float[Array, "B S K"]

    def counts(self, experts: int) -> Float[Array, " E"]:
        """Rows of each expert."""
        return jax.nn.one_hot(self.ids_BSK, experts, dtype=jnp.float32).sum(axis=(0, 1, 2))


def spread(counts_LE: Float[Array, "L E"], dropped_L: Float[Array, " L"] | None = None) -> dict[str, Float[Array, " L"]]:
    """How evenly each layer spreads its rows: the largest expert's, of the mean (1 to E); how many experts with equal rows
    would have the same entropy (E to 1); and where rows may be dropped, their share."""
    shares_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(shares_LE, shares_LE), axis=1)
    found = {EXPERT_LOAD_MAX: shares_LE.shape[1] * shares_LE.max(axis=1), EXPERTS_USED: jnp.exp(entropy_L)}
    return found if dropped_L is None else found | {EXPERT_ROWS_DROPPED: dropped_L / counts_LE.sum(axis=1)}


@jax.named_scope("router")
def route(
    model: ModelConfig,
    x_BSD: Float[Array, "B S D"],
    router_DE: Float[Array, "D E"],
    add_over_ranks: Callable[[jax.Array], jax.Array],
) -> tuple[Routes, dict[str, jax.Array]]:
    """(routes, losses), in float32. The losses are sums over tokens, times their weights in the config.

    Args:
      add_over_ranks: adds the counts of all ranks that share a sequence. The balance of a sequence does not depend on the mesh;
        that of a microbatch would.
    """
    E, K = model.num_experts or 1, model.mlps_per_token
    logits_BSE = jnp.einsum("BSD,DE->BSE", x_BSD.astype(jnp.float32), router_DE)
    probabilities_BSE = jax.nn.softmax(logits_BSE, axis=-1)
    # Kept by every remat policy: computed again, a near tie could come out the other way.
    ids_BSK = checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(probabilities_BSE), K)[1], EXPERT_CHOICE)
    weights_BSK: Any = of_chosen(E, probabilities_BSE, ids_BSK)
    if model.normalize_expert_weights:
        weights_BSK = weights_BSK / weights_BSK.sum(axis=-1, keepdims=True)
    losses = {}
    if model.balance_loss_weight:
        counts_BE = add_over_ranks(jax.nn.one_hot(ids_BSK, E, dtype=jnp.float32).sum(axis=(1, 2)))
        share_BE = counts_BE / counts_BE.sum(axis=1, keepdims=True)
        losses["balance"] = model.balance_loss_weight * E * jnp.sum(share_BE * probabilities_BSE.sum(axis=1))
    if model.router_z_loss_weight:
        squares = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
        losses["router_z"] = model.router_z_loss_weight * jnp.sum(squares)
    return Routes(ids_BSK, weights_BSK), losses


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def of_chosen(E: int, x_BSE: Float[Array, "B S E"], ids_BSK: Int[Array, "B S K"]) -> Float[Array, "B S K"]:
    """The numbers of each token's experts. Its backward pass keeps the experts' numbers; autodiff would keep [B, S, K, E]."""
    return jnp.where(jax.nn.one_hot(ids_BSK, E, dtype=jnp.bool_), x_BSE[:, :, None], 0).sum(axis=-1)


of_chosen.defvjp(
    lambda E, x_BSE, ids_BSK: (of_chosen(E, x_BSE, ids_BSK), ids_BSK),
    lambda E, ids_BSK, dy_BSK: (jnp.where(jax.nn.one_hot(ids_BSK, E, dtype=jnp.bool_), dy_BSK[..., None], 0).sum(axis=2), None),
)


class ExpertOrder(NamedTuple):
    """Rows in the order of their experts, and in that of the tokens: row k of token t is number t K + k there."""

    of_sorted_R: Int[Array, " R"]
    """The tokens' number of each sorted row."""
    sorted_TK: Int[Array, "T K"]
    """Where each row of a token is among the sorted ones."""
    sizes_E: Int[Array, " E"]
    """Rows of each expert."""

    def of_copies(self) -> ExpertOrder:
        """The same order of rows that are given for each copy of a token."""
        return self._replace(sorted_TK=self.sorted_TK.reshape(-1, 1))


def sort_by_expert(ids_TK: Int[Array, "T K"], experts: int) -> ExpertOrder:
    ids_R = ids_TK.reshape(-1)
    numbers_R = jnp.arange(ids_R.size, dtype=jnp.int32)
    _, of_sorted_R = jax.lax.sort((ids_R, numbers_R), num_keys=1, is_stable=True)
    sorted_R = jnp.zeros_like(numbers_R).at[of_sorted_R].set(numbers_R, unique_indices=True, mode="promise_in_bounds")
    sizes_E = jax.nn.one_hot(ids_R, experts, dtype=jnp.int32).sum(axis=0)
    return ExpertOrder(*(checkpoint_name(x, EXPERT_CHOICE) for x in (of_sorted_R, sorted_R.reshape(ids_TK.shape), sizes_E)))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch(x_TD: Float[Array, "T D"], order: ExpertOrder, has_gaps: bool = False) -> Float[Array, "R D"]:
    """Copies of each token, sorted by expert. has_gaps: places that are out of range are read as zeros."""
    return _rows(x_TD, order.of_sorted_R // order.sorted_TK.shape[1], has_gaps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(x_RD: Float[Array, "R D"], order: ExpertOrder, has_gaps: bool = False) -> Float[Array, "T D"]:
    """The sum of each token's rows, added in float32. has_gaps: as there."""
    return _rows(x_RD, order.sorted_TK, has_gaps).sum(axis=1, dtype=jnp.float32).astype(x_RD.dtype)


def _rows(x: jax.Array, at: jax.Array, has_gaps: bool) -> jax.Array:
    return x.at[at].get(mode="fill", fill_value=0) if has_gaps else x[at]


for moves, back in ((dispatch, combine), (combine, dispatch)):
    moves.defvjp(
        lambda x, order, has_gaps, moves=moves: (moves(x, order, has_gaps), order),
        lambda has_gaps, order, dy, back=back: (back(dy, order, has_gaps), None),
    )


GroupedMatmul = Callable[[Float[Array, "R D"], Float[Array, "E D F"], Int[Array, " E"]], Float[Array, "R F"]]
"""(rows, matrices, rows of each expert) -> rows: the first sizes_E[0] rows times the first matrix, and so on. What it makes of
rows that no expert has, at the end, is undefined."""


def grouped_matmul(x_RD: Float[Array, "R D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, " E"]) -> Float[Array, "R F"]:
    """By XLA: exact on CPUs. On GPUs it would multiply each row by all matrices."""
    return jax.lax.ragged_dot(x_RD, w_EDF, sizes_E)


ComputeRows = Callable[[Float[Array, "R D"], Float[Array, "R 1"], Int[Array, " E"]], Float[Array, "R D"]]
"""(rows sorted by expert, their weights, rows of each expert) -> what their experts make of them."""

Deliver = Callable[[ComputeRows, int, Float[Array, "T D"], Int[Array, "T K"], Float[Array, "T K"]], Float[Array, "T D"]]
"""(compute, experts that this rank computes, tokens, their experts, their weights) -> the sum of each token's rows."""


def deliver_here(compute: ComputeRows, experts: int, x_TD: jax.Array, ids_TK: jax.Array, weights_TK: jax.Array) -> jax.Array:
    """A Deliver for a rank that computes all experts."""
    order = sort_by_expert(ids_TK, experts)
    weights_R1: Any = dispatch(weights_TK.reshape(-1, 1), order.of_copies())
    return combine(compute(dispatch(x_TD, order), weights_R1, order.sizes_E), order)


def _weighted_product(
    activation: Callable[[jax.Array], jax.Array],
    gate_RF: Float[Array, "R F"],
    up_RF: Float[Array, "R F"],
    weights_R1: Float[Array, "R 1"],
) -> Float[Array, "R F"]:
    """activation(gate) * up * weights. Its backward pass keeps these alone; autodiff would keep five arrays more."""
    # The broadcast is in float32, so that the gradient of a weight is summed in float32.
    return activation(gate_RF) * up_RF * jnp.broadcast_to(weights_R1, up_RF.shape).astype(up_RF.dtype)


weighted_product = jax.custom_vjp(_weighted_product, nondiff_argnums=(0,))
weighted_product.defvjp(
    lambda *inputs: (_weighted_product(*inputs), inputs[1:]),
    lambda activation, inputs, dy_RF: jax.vjp(partial(_weighted_product, activation), *inputs)[1](dy_RF),
)


def expert_mlp(
    activation: Callable[[jax.Array], jax.Array],
    matmul: GroupedMatmul,
    deliver: Deliver,
    x_BSD: Float[Array, "B S D"],
    routes: Routes,
    gate_EDF: Float[Array, "E D F"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
) -> Float[Array, "B S D"]:
    """The weighted sum of what a token's experts make of it. The matrices are those of the experts that this rank computes."""

    def compute(rows_RD: jax.Array, weights_R1: jax.Array, sizes_E: jax.Array) -> jax.Array:
        gate_RF = checkpoint_name(matmul(rows_RD, gate_EDF, sizes_E), "mlp_gate")
        up_RF = checkpoint_name(matmul(rows_RD, up_EDF, sizes_E), "mlp_up")
        # Weighted before the last matmul, whose result the backward pass then does not read.
        return matmul(weighted_product(activation, gate_RF, up_RF, weights_R1), down_EFD, sizes_E)

    tokens = (x.reshape(-1, x.shape[-1]) for x in (x_BSD, *routes))
    return deliver(compute, len(gate_EDF), *tokens).reshape(x_BSD.shape)
