"""The Llama network in Flax NNX. It names its dims and knows nothing about devices.

    model = Llama(config.model, rngs=nnx.Rngs(0))
    logits_BSV = model(token_ids_BS)

Layers are one stacked module: every parameter has a leading `layers` dim, and `run_layers` loops over it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.config.model_spec import parameter_count, parameters
from jaxllm.display import table
from jaxllm.model.attention import plain_attention
from jaxllm.model.layers import (
    SHARDED_SEQUENCE,
    Block,
    Losses,
    Ops,
    RMSNorm,
    Rotary,
    parameter,
    rotary_table,
    scaled_embeddings,
)


class BlockContext(NamedTuple):
    """What layers read beside their input. None changes it."""

    rotary: Rotary
    segments_BS: Any
    kinds_L: Any = None
    """Number of each layer's kind (ModelConfig.kinds), or of one layer's kind; None if all are of the same."""

    def of_layer(self, number) -> BlockContext:
        return self if self.kinds_L is None else self.of_kind(self.kinds_L[number])

    def of_kind(self, kind) -> BlockContext:
        """What a layer of this kind reads; None if there is one kind."""
        if kind is None:
            return self
        rotary = self.rotary
        if rotary[0].ndim > 3:
            rotary = rotary[0][kind], rotary[1][kind]
        return self._replace(rotary=rotary, kinds_L=kind)


Images = Float[Array, "I C height width"]
BlockFunction = Callable[[Any, Float[Array, "B S D"], BlockContext], tuple[Float[Array, "B S D"], Losses]]
RunLayers = Callable[[BlockFunction, Any, Float[Array, "B S D"], BlockContext], Float[Array, "B S D"]]


def scan_layers(
    block: BlockFunction, layers: Any, h_BSD: Float[Array, "B S D"], block_context: BlockContext, *, unroll: int | bool = 1
):
    """h after block(layer, h, block_context) for each layer in turn; `layers` is a tree of arrays with a leading layer dim."""

    def turn(h_BSD, layer):
        weights, kind = layer
        return block(weights, h_BSD, block_context.of_kind(kind))[0], None

    return jax.lax.scan(turn, h_BSD, (layers, block_context.kinds_L), unroll=unroll)[0]


class Llama(nnx.Module):
    """Parameters: embedding [V, D], layers (stacked), final_norm, and head [V, D] unless tied.

    Args:
      config: the shape.
      rngs: its stream `params` alone determines the initial values.
      vocab_rows: rows of embedding and head, at least vocab_size. Rows beyond vocab_size are zero.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, vocab_rows: int | None = None):
        self.config = config
        specs = {spec.path: spec for spec in parameters(config)}
        zero_rows = (vocab_rows or config.vocab_size) - config.vocab_size
        with nnx.use_eager_sharding(False):
            self.embedding = parameter(rngs, config, specs["embedding"], zero_rows)
            self.layers = self._stack(rngs)
            self.final_norm = RMSNorm(config, "final_norm", rngs=rngs)
            if "head" in specs:
                self.head = parameter(rngs, config, specs["head"], zero_rows)
            if config.vision is not None:
                from jaxllm.model.vision import Projector, VisionTower

                self.vision, self.projector = VisionTower(config, rngs=rngs), Projector(config, rngs=rngs)

    def _stack(self, rngs: nnx.Rngs) -> Block:
        @nnx.split_rngs(splits=self.config.num_layers)
        @partial(nnx.vmap, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(self.config, rngs=rngs)

        return stack(rngs)

    def hidden(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"] | None = None,
        segments_BS: Int[Array, "B S"] | None = None,
        *,
        images: Images | None = None,
        ops: Ops | None = None,
        run_layers: RunLayers = scan_layers,
    ) -> Float[Array, "B S D"]:
        """The final hidden states, normalised, in the compute dtype.

        Args:
          tokens_BS: ids below vocab_size.
          positions_BS: default 0 .. S-1 in every sequence.
          segments_BS: document of each position; default: one document.
          images: pixels, normalised as the processor says, in order of their places: model.vision.tokens_per_image image tokens
            each, sequence after sequence.
          ops, run_layers: functions for attention, matmuls, layouts and the layer loop; default: plain XLA.
        """
        ops = ops or Ops(attend=plain_attention(self.config))
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1])[None], tokens_BS.shape)
        block_context = BlockContext(rotary_table(self.config, positions_BS), segments_BS, layer_kinds(self.config))
        with jax.named_scope("embedding"):
            h_BSD = ops.look_up(self.embedding[...].astype(self.config.compute_dtype), tokens_BS)
            h_BSD = scaled_embeddings(self.config, h_BSD)
            if images is not None:
                h_BSD = self.vision.in_places(self.projector, h_BSD, tokens_BS, images)
            h_BSD = ops.constrain(h_BSD, SHARDED_SEQUENCE)
        graph, layers = nnx.split(self.layers)
        h_BSD = run_layers(partial(apply_block, graph, ops), nnx.to_pure_dict(layers), h_BSD, block_context)
        return self.final_norm(h_BSD)

    def head_matrix(self) -> Float[Array, "V D"]:
        matrix = self.embedding if self.config.tie_embeddings else self.head
        return matrix[...].astype(self.config.compute_dtype)

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS=None, segments_BS=None, *, images: Images | None = None, ops=None
    ) -> Float[Array, "B S V"]:
        """Logits, float32 [B, S, vocab_size]; the arguments are those of `hidden`. Training computes them a chunk at a time
        (loss.py)."""
        h_BSD = self.hidden(tokens_BS, positions_BS, segments_BS, images=images, ops=ops)
        with jax.named_scope("head"):
            logits_BSV = jnp.einsum("BSD,VD->BSV", h_BSD, self.head_matrix(), preferred_element_type=jnp.float32)
        return logits_BSV[..., : self.config.vocab_size]

    def __repr__(self) -> str:
        return f"<Llama of {parameter_count(self.config):,} parameters in {self.config.num_layers} layers>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Table of the parameters with the names of their dims and their sharding over devices."""
        rows = []
        for path, variable in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            # Arrays on one device, and shapes without arrays, have no spec.
            spec = getattr(getattr(variable[...], "sharding", None), "spec", None) or ()
            dims = variable.get_metadata("out_sharding")
            split = [f"{dim} over {_joined(axes)}" for dim, axes in zip(dims, spec, strict=False) if axes]
            sizes = " x ".join(f"{dim} {size}" for dim, size in zip(dims, variable.shape, strict=True))
            rows.append((".".join(map(str, path)), sizes, ", ".join(split) or "-", variable.dtype, f"{variable.size:,}"))
        return table(rows, ("parameter", "dims", "split", "dtype", "numbers"), left=4, caption=repr(self).strip("<>"))


def _joined(axes: str | tuple[str, ...]) -> str:
    return axes if isinstance(axes, str) else " x ".join(axes)


def apply_block(graph: nnx.GraphDef, ops: Ops, layer: Any, h_BSD: Float[Array, "B S D"], block_context: BlockContext):
    """One block as a plain function of its parameters."""
    rotary, segments_BS, kind = block_context
    if kind is not None:
        ops = dataclasses.replace(ops, attend=partial(ops.attend, kind=kind))
    return nnx.merge(graph, layer)(h_BSD, rotary, segments_BS, ops)


def layer_kinds(model: ModelConfig) -> jax.Array | None:
    """Number of each layer's kind, int32 [L]; None if there is one kind."""
    return jnp.array(model.layer_kinds, jnp.int32) if len(model.kinds) > 1 else None
