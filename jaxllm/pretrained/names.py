"""Between Hugging Face's tensors and our parameters.

They keep one tensor a layer where we stack layers in front, write every projection [out, in], and merge heads with head size.
So each of their matrices is one of ours transposed, once ours is seen as a matrix: `columns` of its dims are its rows here and
their columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BUFFERS = (".rotary_emb.inv_freq",)
"""Ends of the names of tensors that are no weights: old folders hold the rotary frequencies, which follow from the config."""

# Ours; theirs; our dims in the letters of the design, those before the bar being their columns. No bar: the same order.
TABLE = (
    ("embedding", EMBEDDING, "VD"),
    ("layers.attention_norm.scale", "model.layers.{}.input_layernorm.weight", "D"),
    ("layers.attention.query", "model.layers.{}.self_attn.q_proj.weight", "D|NH"),
    ("layers.attention.key", "model.layers.{}.self_attn.k_proj.weight", "D|KH"),
    ("layers.attention.value", "model.layers.{}.self_attn.v_proj.weight", "D|KH"),
    ("layers.attention.out", "model.layers.{}.self_attn.o_proj.weight", "NH|D"),
    ("layers.mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "D"),
    ("layers.mlp.gate", "model.layers.{}.mlp.gate_proj.weight", "D|F"),
    ("layers.mlp.up", "model.layers.{}.mlp.up_proj.weight", "D|F"),
    ("layers.mlp.down", "model.layers.{}.mlp.down_proj.weight", "F|D"),
    ("final_norm.scale", "model.norm.weight", "D"),
    ("head", HEAD, "VD"),
)


@dataclass(frozen=True)
class Entry:
    """One of our parameters, and what it is called over there."""

    path: tuple[str, ...]
    template: str
    layers: int | None
    """L for a stack, whose tensors are template.format(layer); None for a parameter that is one tensor."""
    dims: tuple[int, ...]
    """Sizes of one layer's array, or of the whole where there are no layers."""
    columns: int
    """How many of these dims, from the first, are the columns of their matrix; 0: the same order on both sides."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of our parameter."""
        return self.dims if self.layers is None else (self.layers, *self.dims)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Their names, in the order of the layers."""
        return (self.template,) if self.layers is None else tuple(self.template.format(i) for i in range(self.layers))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one layer's array as a matrix, with `columns` above 0."""
        return math.prod(self.dims[: self.columns]), math.prod(self.dims[self.columns :])

    @property
    def their_dims(self) -> tuple[int, ...]:
        """Their tensor's dims with heads and head size apart, as ours are."""
        return self.dims[self.columns :] + self.dims[: self.columns]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Of each of their tensors."""
        return self.matrix[::-1] if self.columns else self.dims


def entries(model: Mapping[str, Any]) -> list[Entry]:
    """Every parameter of the network that a `model` section describes."""
    sizes = {
        "V": model["vocab_size"],
        "D": model["hidden_size"],
        "F": model["intermediate_size"],
        "N": model["num_heads"],
        "K": model["num_kv_heads"],
        "H": model["head_dim"],
    }
    found = []
    for ours, theirs, letters in TABLE:
        if ours == "head" and model["tie_embeddings"]:
            continue
        dims = tuple(sizes[letter] for letter in letters if letter != "|")
        layers = model["num_layers"] if "{}" in theirs else None
        found.append(Entry(tuple(ours.split(".")), theirs, layers, dims, max(0, letters.find("|"))))
    return found
