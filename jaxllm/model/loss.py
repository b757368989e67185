"""Token cross-entropy, a chunk of positions at a time: the float32 logits of a full batch never exist. At the end of
the file a caller's loss in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ConfigError


@dataclass(frozen=True)
class VocabularySlice:
    """The rows of the vocabulary that a rank's head holds, and the reductions over ranks. Default: one rank with all rows."""

    first: Callable[[int], Array | int] = lambda rows: 0
    """number of rows per rank -> this rank's first row"""
    total: Callable[[Array], Array] = lambda x: x
    """The sum over ranks."""
    largest: Callable[[Array], Array] = lambda x: x
    """The maximum over ranks."""


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 8))
def cross_entropy(
    h_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    vocab_size: int,
    chunk_tokens: int,
    z_loss_weight: float,
    sum_VD: Float[Array, "V D"] | None = None,
    is_frozen: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(objective, loss): weighted sums over tokens of -log p(target), the objective with z-loss added.

    Weights are 0 where a target does not count, else 1 / (number of targets in the global batch), so that sums over
    microbatches and ranks are the mean. Gradients flow from the objective alone. They are computed in the forward pass, which
    has the logits. So the head needs 3 matmuls per token instead of 4.

    Args:
      head_VD: rows from vocab_size on are padding and get no probability.
      chunk_tokens: logits exist for about this many of the B S tokens at once (at least one position of each sequence).
      z_loss_weight: factor of log(Z)^2 (PaLM, section 5).
      sum_VD: the head's accumulator (parallel/accumulate.py), to which its gradient is added in the forward pass.
      is_frozen: the head has no gradient.
    """
    return sums_and_gradients(h_BSD, head_VD, targets_BS, weights_BS, vocab_size, chunk_tokens, z_loss_weight)[0]


def sums_and_gradients(
    h_BSD,
    head_VD,
    targets_BS,
    weights_BS,
    vocab_size,
    chunk_tokens,
    z_loss_weight,
    *,
    dhead_VD=None,
    with_gradients=None,
    part: VocabularySlice = VocabularySlice(),
) -> tuple[Any, Any]:
    """((objective, loss), (dh_BSD, dhead_VD)): cross_entropy's sums and the objective's gradients, for a head with a `part` of
    the vocabulary. dh_BSD is this rank's part of a sum over ranks. The float32 dhead_VD is the argument with the gradient
    added. Without it there are no gradients: None; or `with_gradients` that of h alone, and None for the head's.
    """
    with_gradients = dhead_VD is not None or bool(with_gradients)
    B, S, _ = h_BSD.shape
    # The padding has weight 0.
    cut = partial(cut_positions, chunks=min(S, -(-B * S // chunk_tokens)))
    ids_V = jnp.arange(head_VD.shape[0]) + part.first(head_VD.shape[0])

    def chunk(carry, inputs):
        objective, loss, dhead_VD = carry
        h_BCD, targets_BC, weights_BC = inputs
        logits_BCV, is_target_BCV, log_z_BC, target_BC = scores(h_BCD, head_VD, targets_BC, ids_V, vocab_size, part)
        with jax.named_scope("loss"):
            loss_BC = (log_z_BC - target_BC) * weights_BC
            loss += jnp.sum(loss_BC)
            objective += jnp.sum(loss_BC + z_loss_weight * jnp.square(log_z_BC) * weights_BC)
        if not with_gradients:
            return (objective, loss, dhead_VD), None
        with jax.named_scope("head_backward"):
            probability_BCV = jnp.exp(logits_BCV - log_z_BC[..., None])
            z_slope_BC = 1.0 + 2.0 * z_loss_weight * log_z_BC
            dlogits_BCV = (probability_BCV * z_slope_BC[..., None] - is_target_BCV.astype(jnp.float32)) * weights_BC[..., None]
            dlogits_BCV = dlogits_BCV.astype(h_BCD.dtype)
            dh_BCD = jnp.einsum("BCV,VD->BCD", dlogits_BCV, head_VD)
            if dhead_VD is not None:
                dhead_VD += jnp.einsum("BCV,BCD->VD", dlogits_BCV, h_BCD, preferred_element_type=jnp.float32)
        return (objective, loss, dhead_VD), dh_BCD

    zero = jnp.zeros((), jnp.float32)
    inputs = (cut(h_BSD), cut(targets_BS), cut(weights_BS))
    (objective, loss, dhead_VD), dh = jax.lax.scan(chunk, (zero, zero, dhead_VD), inputs)
    if dh is None:
        return (objective, loss), None
    return (objective, loss), (joined_positions(dh, S), dhead_VD)


def scores(
    h_BCD: Array, head_VD: Array, targets_BC: Array, ids_V: Array, vocab_size: int, part: VocabularySlice
) -> tuple[Array, Array, Array, Array]:
    """(logits, which of them are the target's, log Z, the target's logit) of a chunk, float32 but for the second."""
    with jax.named_scope("head"):
        logits_BCV = jnp.einsum("BCD,VD->BCV", h_BCD, head_VD, preferred_element_type=jnp.float32)
    with jax.named_scope("loss"):
        logits_BCV = jnp.where((ids_V < vocab_size)[None, None], logits_BCV, -jnp.inf)
        top_BC = part.largest(jnp.max(logits_BCV, axis=-1))
        # A comparison, not a gather: where the vocabulary is sharded, each device reads only its own rows.
        is_target_BCV = targets_BC[..., None] == ids_V[None, None]
        target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
        z_BC, target_BC = part.total(jnp.stack([jnp.sum(jnp.exp(logits_BCV - top_BC[..., None]), axis=-1), target_BC]))
        return logits_BCV, is_target_BCV, top_BC + jnp.log(z_BC), target_BC


def cut_positions(x: Array, chunks: int) -> Array:
    """[B, S, ...] -> [chunks, B, C, ...], padded at the end."""
    B, S, *rest = x.shape
    C = -(-S // chunks)
    x = jnp.pad(x, [(0, 0), (0, chunks * C - S)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(B, chunks, C, *rest), 1, 0)


def joined_positions(x: Array, S: int) -> Array:
    """The inverse of cut_positions: [chunks, B, C, ...] -> [B, S, ...]."""
    chunks, B, C, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(B, chunks * C, *rest)[:, :S]


def _forward(h_BSD, head_VD, targets_BS, weights_BS, vocab_size, chunk_tokens, z_loss_weight, sum_VD, is_frozen):
    before_VD = jnp.zeros(head_VD.shape, jnp.float32) if sum_VD is None and not is_frozen else sum_VD
    inputs = (h_BSD, head_VD, targets_BS, weights_BS, vocab_size, chunk_tokens, z_loss_weight)
    sums, (dh_BSD, dhead_VD) = sums_and_gradients(*inputs, dhead_VD=before_VD, with_gradients=True)
    return sums, (dh_BSD, None, dhead_VD) if is_frozen or sum_VD is not None else (dh_BSD, dhead_VD.astype(head_VD.dtype), None)


def _backward(vocab_size, chunk_tokens, z_loss_weight, is_frozen, kept, cotangents):
    dh_BSD, dhead_VD = jax.tree.map(lambda gradient: gradient * cotangents[0].astype(gradient.dtype), kept[:2])
    return dh_BSD, dhead_VD, None, None, kept[2]


cross_entropy.defvjp(_forward, _backward)


# -------------------------------------------------------------------------------------------------- the loss of each token
# For losses that are no sum over tokens.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def token_losses(
    h_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    vocab_size: int,
    chunk_tokens: int,
    part: VocabularySlice = VocabularySlice(),
) -> Float[Array, "B S"]:
    """-log p(target) of each position, float32. The arguments are those of loss.sums_and_gradients. The backward pass makes the
    logits again: 4 matmuls of the head per token in all."""
    B, S, _ = h_BSD.shape
    ids_V = jnp.arange(head_VD.shape[0]) + part.first(head_VD.shape[0])

    def chunk(inputs):
        h_BCD, targets_BC = inputs
        *_, log_z_BC, target_BC = scores(h_BCD, head_VD, targets_BC, ids_V, vocab_size, part)
        return log_z_BC - target_BC

    cut = partial(cut_positions, chunks=min(S, -(-B * S // chunk_tokens)))
    return joined_positions(jax.lax.map(chunk, (cut(h_BSD), cut(targets_BS))), S)


def _backward_of_token_losses(vocab_size, chunk_tokens, part, kept, slopes_BS):
    h_BSD, head_VD, targets_BS = kept
    zeros_VD, options = jnp.zeros(head_VD.shape, jnp.float32), (vocab_size, chunk_tokens, 0.0)
    inputs = (h_BSD, head_VD, targets_BS, slopes_BS, *options)
    _, (dh_BSD, dhead_VD) = sums_and_gradients(*inputs, part=part, dhead_VD=zeros_VD, with_gradients=True)
    return dh_BSD, dhead_VD.astype(head_VD.dtype), None


token_losses.defvjp(lambda *arguments: (token_losses(*arguments), arguments[:3]), _backward_of_token_losses)


# --------------------------------------------------------------------------------------------------- a loss of the caller's
# In the place of cross-entropy (parallel/types.py: Loss). The count of the whole batch divides after the backward pass, when
# all ranks and microbatches have added theirs: so a loss is called once for a microbatch, and its count may depend on anything.
# Cross-entropy, whose count is known before, weights tokens first.


def loss_sums(loss: Callable, vocab_size: int, h_BSD: jax.Array, head_VD: jax.Array, rows: dict[str, Array]) -> jax.Array:
    """float32 [2]: sum and count of one microbatch.

    Args:
      head_VD: rows from vocab_size on are padding, which `loss` does not see.

    Raises:
      ConfigError: the loss returned something else than two scalars.
    """
    found: Any = loss(h_BSD, head_VD[:vocab_size], rows)
    if not (isinstance(found, tuple) and [jnp.shape(x) for x in found] == [(), ()]):
        shapes = jax.tree.map(jnp.shape, found)
        raise ConfigError(f"loss= must return (sum, count), two scalars of a microbatch, and returned shapes {shapes}.")
    total, count = found
    return jnp.stack([jnp.asarray(total, jnp.float32), jax.lax.stop_gradient(jnp.asarray(count, jnp.float32))])


def mean_of_sums(sums: jax.Array, gradients: Any) -> tuple[jax.Array, Any]:
    """(loss, gradients of it), from sums over the whole batch [..., 2] and the gradients of the first of them; 0 if nothing was
    counted. Leading dims, of replicas, are those of the gradients too."""
    total, count = sums[..., 0], sums[..., 1]
    share = jnp.where(count == 0, 0.0, 1.0 / jnp.where(count == 0, 1.0, count))
    return total * share, jax.tree.map(lambda g: g * jnp.expand_dims(share, range(share.ndim, g.ndim)), gradients)


def chunked(loss: Callable, chunk_tokens: int) -> Callable:
    """A loss (parallel/types.py: Loss) that calls `loss` for a chunk of positions at a time and adds up what it returns. Logits
    exist for at most `chunk_tokens` of the tokens, or for one position of each sequence; the backward pass computes them again.

    Args:
      loss: takes each position for itself. Arrays [sequence] are whole in every chunk.
    """

    def run(h_BSD: Array, head_VD: Array, rows: dict[str, Array]) -> tuple[Array, Array]:
        B, S, _ = h_BSD.shape
        chunks = next(n for n in range(1, S + 1) if S % n == 0 and (n == S or B * S // n <= chunk_tokens))
        cut = lambda x: jnp.moveaxis(x.reshape(B, chunks, S // chunks, *x.shape[2:]), 1, 0)  # noqa: E731
        by_position = {name: cut(x) for name, x in rows.items() if x.ndim > 1}
        # Float32 outside, so that the gradients of chunks are added in float32.
        head32_VD = head_VD.astype(jnp.float32)

        @jax.checkpoint
        def add(sums, inputs):
            h_BCD, here = inputs
            total, count = loss(h_BCD, head32_VD.astype(head_VD.dtype), {**rows, **here})
            return (sums[0] + jnp.asarray(total, jnp.float32), sums[1] + jnp.asarray(count, jnp.float32)), None

        zero = jnp.zeros((), jnp.float32)
        (total, count), _ = jax.lax.scan(add, (zero, zero), (cut(h_BSD), by_position))
        return total, count

    return run
