"""A vision tower: the ViT of CLIP or SigLIP (Dosovitskiy et al., 2021), and the projector of LLaVA (Liu et al., 2023).

Letters: I images, C channels, T positions in the tower, D its width, N its heads, H their size, F its feed-forward width; E the
width of the network behind it. Norms and softmax are computed in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.model.layers import add_parameters

ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class Parameters(nnx.Module):
    """Those declared directly under a path of the table."""

    def __init__(self, model: ModelConfig, path: str, *, rngs: nnx.Rngs):
        assert model.vision is not None, "only a model with a tower has these"
        self.config = model.vision
        add_parameters(self, model, path, rngs)


class VisionTower(Parameters):
    """Images to hidden states: patches, then layers of attention without a mask and feed-forwards, both after a norm."""

    class_token: nnx.Param
    patch: nnx.Param
    patch_bias: nnx.Param
    position: nnx.Param
    norm_before: nnx.Param
    norm_before_bias: nnx.Param

    def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(model, "vision", rngs=rngs)
        self.blocks = Parameters(model, "vision.blocks", rngs=rngs)

    @jax.named_scope("vision")
    def __call__(self, pixels_ICXY: Float[Array, "I C X Y"], dtype: Any) -> Float[Array, "I T D"]:
        """The output of the last layer that is used, of the positions that make features.

        Args:
          pixels_ICXY: normalised as the tower was trained with.
          dtype: the compute dtype.
        """
        config, p = self.config, self.config.patch_size
        (images, C), side = pixels_ICXY.shape[:2], config.image_size // p
        patches_ITCXY = pixels_ICXY[:, :, : side * p, : side * p].reshape(images, C, side, p, side, p)
        patches_ITCXY = patches_ITCXY.transpose(0, 2, 4, 1, 3, 5).reshape(images, side * side, C, p, p).astype(dtype)
        h_ITD = jnp.einsum("ITCXY,CXYD->ITD", patches_ITCXY, self.patch[...].astype(dtype))
        if config.kind == "clip":
            first_ID = jnp.broadcast_to(self.class_token[...].astype(dtype), (images, 1, h_ITD.shape[-1]))
            h_ITD = jnp.concatenate([first_ID, h_ITD], axis=1)
        else:
            h_ITD = h_ITD + self.patch_bias[...].astype(dtype)[None, None]
        h_ITD = h_ITD + self.position[...].astype(dtype)[None]
        if config.kind == "clip":
            h_ITD = layer_norm(h_ITD, self.norm_before[...], self.norm_before_bias[...], config.norm_eps)
        stack = {name: w[...][: config.used_layers] for name, w in nnx.to_pure_dict(nnx.state(self.blocks)).items()}
        # Of a layer only the input is kept for the backward pass.
        layer = jax.checkpoint(partial(tower_layer, ACTIVATIONS[config.activation], config.norm_eps))
        h_ITD, _ = jax.lax.scan(lambda h_ITD, weights: (layer(h_ITD, weights), None), h_ITD, stack)
        return h_ITD[:, int(config.drop_first) :]

    def in_places(
        self,
        projector: Projector,
        h_BSE: Float[Array, "B S E"],
        tokens_BS: Int[Array, "B S"],
        images: Float[Array, "... C X Y"],
    ) -> Float[Array, "B S E"]:
        """Embeddings with the features of images in the places of image tokens. Images are [I, C, X, Y] in order of their
        places in the batch, or [B, I, C, X, Y] in that of the places in each sequence."""
        rows, width = len(tokens_BS) if images.ndim == 5 else 1, h_BSE.shape[-1]
        features = projector(self(images.reshape(-1, *images.shape[-3:]), h_BSE.dtype)).reshape(rows, -1, width)
        is_image = (tokens_BS == self.config.image_token_id).reshape(rows, -1)
        number, count = jnp.cumsum(is_image, axis=1) - 1, features.shape[1]
        chosen = jnp.take_along_axis(features, jnp.clip(number, 0, count - 1)[..., None], axis=1)
        # Without enough features the last places keep their embeddings.
        takes = is_image & (number < count)
        return jnp.where(takes[..., None], chosen, h_BSE.reshape(rows, -1, width)).reshape(h_BSE.shape)


def layer_norm(x: Float[Array, "... D"], scale_D, bias_D, eps: float) -> Float[Array, "... D"]:
    """(x - mean) / deviation * scale + bias, over the last dim."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale_D, bias_D = (w.astype(jnp.float32)[(None,) * (x.ndim - 1)] for w in (scale_D, bias_D))
    return (x32 * scale_D + bias_D).astype(x.dtype)


def tower_layer(activation, eps: float, h_ITD: Float[Array, "I T D"], weights: dict[str, jax.Array]) -> Float[Array, "I T D"]:
    """h + attention(norm(h)), then h + down(activation(up(norm(h))))."""

    def normed(x, name: str):
        return layer_norm(x, weights[name], weights[name + "_bias"], eps)

    def times(spec: str, x, name: str):
        w, bias = (weights[key].astype(x.dtype) for key in (name, name + "_bias"))
        return jnp.einsum(spec, x, w) + bias[None, None]

    x_ITD = normed(h_ITD, "attention_norm")
    q_ITNH, k_ITNH, v_ITNH = (times("ITD,DNH->ITNH", x_ITD, name) for name in ("query", "key", "value"))
    attended_ITNH = jax.nn.dot_product_attention(q_ITNH, k_ITNH, v_ITNH, implementation="xla")
    h_ITD = h_ITD + times("ITNH,NHD->ITD", attended_ITNH, "out")
    x_ITF = times("ITD,DF->ITF", normed(h_ITD, "mlp_norm"), "up")
    return h_ITD + times("ITF,FD->ITD", activation(x_ITF), "down")


class Projector(Parameters):
    """second(activation(first(x))): the tower's hidden states to hidden states of the network."""

    def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(model, "projector", rngs=rngs)

    @jax.named_scope("projector")
    def __call__(self, x_ITD: Float[Array, "I T D"]) -> Float[Array, "I T E"]:
        def times(spec: str, x, name: str):
            y = jnp.einsum(spec, x, getattr(self, name)[...].astype(x.dtype))
            return y + getattr(self, name + "_bias")[...].astype(x.dtype)[None, None] if self.config.projector_bias else y

        activation = ACTIVATIONS[self.config.projector_activation]
        return times("ITP,PE->ITE", activation(times("ITD,DP->ITP", x_ITD, "first")), "second")
