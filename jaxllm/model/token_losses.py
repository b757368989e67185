"""The cross-entropy of each token, for losses that are no sum over tokens. Logits exist for a chunk of positions at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.model.loss import VocabularySlice, cut_positions, joined_positions, scores, sums_and_gradients


def token_losses(
    h_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    vocab_size: int,
    chunk_tokens: int,
    part: VocabularySlice = VocabularySlice(),
) -> Float[Array, "B S"]:
    """-log p(target) of each position, float32, without gradients. The arguments are those of loss.sums_and_gradients."""
    B, S, _ = h_BSD.shape
    ids_V = jnp.arange(head_VD.shape[0]) + part.first(head_VD.shape[0])

    def chunk(inputs):
        h_BCD, targets_BC = inputs
        *_, log_z_BC, target_BC = scores(h_BCD, head_VD, targets_BC, ids_V, vocab_size, part)
        return log_z_BC - target_BC

    cut = partial(cut_positions, chunks=min(S, -(-B * S // chunk_tokens)))
    return joined_positions(jax.lax.map(chunk, (cut(h_BSD), cut(targets_BS))), S)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def differentiable_token_losses(
    h_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    vocab_size: int,
    chunk_tokens: int,
) -> Float[Array, "B S"]:
    """`token_losses`, with gradients. The backward pass makes the logits again: 4 matmuls of the head per token in all."""
    return token_losses(h_BSD, head_VD, targets_BS, vocab_size, chunk_tokens)


def _backward(vocab_size, chunk_tokens, kept, slopes_BS):
    h_BSD, head_VD, targets_BS = kept
    zeros_VD, options = jnp.zeros(head_VD.shape, jnp.float32), (vocab_size, chunk_tokens, 0.0)
    inputs = (h_BSD, head_VD, targets_BS, slopes_BS, *options)
    _, (dh_BSD, dhead_VD) = sums_and_gradients(*inputs, dhead_VD=zeros_VD, with_gradients=True)
    return dh_BSD, dhead_VD.astype(head_VD.dtype), None


differentiable_token_losses.defvjp(
    lambda h_BSD, head_VD, targets_BS, *options: (
        token_losses(h_BSD, head_VD, targets_BS, *options),
        (h_BSD, head_VD, targets_BS),
    ),
    _backward,
)
