"""Experts: a router sends each token to K of E feed-forwards (Shazeer et al., 2017). No token is dropped.

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.config.types import EXPERT_CHOICE

EXPERT_LOAD_MAX, EXPERTS_USED = "expert_load_max", "experts_used"


class Routes(NamedTuple):
    ids_BSK: Int[Array, "B S K"]
    weights_BSK: Float[Array, "B S K"]

    def counts(self, experts: int) -> Float[Array, " E"]:
        """Rows of each expert."""
        return jax.nn.one_hot(self.ids_BSK, experts, dtype=jnp.float32).sum(axis=(0, 1, 2))


def spread(counts_LE: Float[Array, "L E"]) -> dict[str, Float[Array, " L"]]:
    """How evenly each layer spreads its rows: the largest expert's, of the mean (1 to E); and how many experts with equal rows
    would have the same entropy (E to 1)."""
    shares_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(shares_LE, shares_LE), axis=1)
    return {EXPERT_LOAD_MAX: shares_LE.shape[1] * shares_LE.max(axis=1), EXPERTS_USED: jnp.exp(entropy_L)}


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
    chosen_BSKE = jax.nn.one_hot(ids_BSK, E, dtype=jnp.bool_)
    weights_BSK = jnp.where(chosen_BSKE, probabilities_BSE[:, :, None], 0).sum(axis=-1)
    if model.normalize_expert_weights:
        weights_BSK = weights_BSK / weights_BSK.sum(axis=-1, keepdims=True)
    losses = {}
    if model.balance_loss_weight:
        counts_BE = add_over_ranks(chosen_BSKE.sum(axis=(1, 2), dtype=jnp.float32))
        share_BE = counts_BE / counts_BE.sum(axis=1, keepdims=True)
        losses["balance"] = model.balance_loss_weight * E * jnp.sum(share_BE * probabilities_BSE.sum(axis=1))
    if model.router_z_loss_weight:
        squares = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
        losses["router_z"] = model.router_z_loss_weight * jnp.sum(squares)
    return Routes(ids_BSK, weights_BSK), losses


class ExpertOrder(NamedTuple):
    """Rows in the order of their experts, and in that of the tokens: row k of token t is number t K + k there."""

    of_sorted_R: Int[Array, " R"]
    """The tokens' number of each sorted row."""
    sorted_TK: Int[Array, "T K"]
    """Where each row of a token is among the sorted ones."""
    sizes_E: Int[Array, " E"]
    """Rows of each expert."""


def sort_by_expert(ids_TK: Int[Array, "T K"], experts: int) -> ExpertOrder:
    ids_R = ids_TK.reshape(-1)
    numbers_R = jnp.arange(ids_R.size, dtype=jnp.int32)
    _, of_sorted_R = jax.lax.sort((ids_R, numbers_R), num_keys=1, is_stable=True)
    sorted_R = jnp.zeros_like(numbers_R).at[of_sorted_R].set(numbers_R, unique_indices=True, mode="promise_in_bounds")
    sizes_E = jax.nn.one_hot(ids_R, experts, dtype=jnp.int32).sum(axis=0)
    return ExpertOrder(*(checkpoint_name(x, EXPERT_CHOICE) for x in (of_sorted_R, sorted_R.reshape(ids_TK.shape), sizes_E)))


@jax.custom_vjp
def dispatch(x_TD: Float[Array, "T D"], order: ExpertOrder) -> Float[Array, "R D"]:
    """Copies of each token, sorted by expert."""
    return x_TD[order.of_sorted_R // order.sorted_TK.shape[1]]


@jax.custom_vjp
def combine(x_RD: Float[Array, "R D"], order: ExpertOrder) -> Float[Array, "T D"]:
    """The sum of each token's rows, added in float32."""
    return x_RD[order.sorted_TK].sum(axis=1, dtype=jnp.float32).astype(x_RD.dtype)


dispatch.defvjp(lambda x_TD, order: (dispatch(x_TD, order), order), lambda order, dx_RD: (combine(dx_RD, order), None))
combine.defvjp(lambda x_RD, order: (combine(x_RD, order), order), lambda order, dy_TD: (dispatch(dy_TD, order), None))


GroupedMatmul = Callable[[Float[Array, "R D"], Float[Array, "E D F"], Int[Array, " E"]], Float[Array, "R F"]]
"""(rows, matrices, rows of each expert) -> rows: the first sizes_E[0] rows times the first matrix, and so on."""


def grouped_matmul(x_RD: Float[Array, "R D"], w_EDF: Float[Array, "E D F"], sizes_E: Int[Array, " E"]) -> Float[Array, "R F"]:
    """By XLA: exact on CPUs. On GPUs it would multiply each row by all matrices."""
    return jax.lax.ragged_dot(x_RD, w_EDF, sizes_E)


def expert_mlp(
    activation: Callable[[jax.Array], jax.Array],
    matmul: GroupedMatmul,
    x_BSD: Float[Array, "B S D"],
    routes: Routes,
    gate_EDF: Float[Array, "E D F"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
) -> Float[Array, "B S D"]:
    """The weighted sum of what a token's experts make of it."""
    K = routes.ids_BSK.shape[-1]
    order = sort_by_expert(routes.ids_BSK.reshape(-1, K), len(gate_EDF))
    rows_RD = dispatch(x_BSD.reshape(-1, x_BSD.shape[-1]), order)
    gate_RF = checkpoint_name(matmul(rows_RD, gate_EDF, order.sizes_E), "mlp_gate")
    up_RF = checkpoint_name(matmul(rows_RD, up_EDF, order.sizes_E), "mlp_up")
    # Before the last matmul, whose result the backward pass then does not read. The broadcast is in float32, so that the
    # gradient of a weight is summed in float32.
    weights_RF = jnp.broadcast_to(dispatch_weights(routes.weights_BSK, order), up_RF.shape).astype(up_RF.dtype)
    product_RF = activation(gate_RF) * up_RF * weights_RF
    return combine(matmul(product_RF, down_EFD, order.sizes_E), order).reshape(x_BSD.shape)


def dispatch_weights(weights_BSK: Float[Array, "B S K"], order: ExpertOrder) -> Float[Array, "R 1"]:
    """The weight of each sorted row: the same as `dispatch`, with a row for each expert of a token."""
    of_rows = order._replace(sorted_TK=order.sorted_TK.reshape(-1, 1))
    return dispatch(weights_BSK.reshape(-1, 1), of_rows)
