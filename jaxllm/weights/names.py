"""Maps Hugging Face's tensors to jaxllm's parameters.

Hugging Face stores one tensor per layer, each projection as [out, in], with heads and head size merged. jaxllm stacks layers in
a leading dim. Each Hugging Face matrix is the transpose of a jaxllm parameter that is viewed as a matrix: the first `columns`
dims of the parameter are the matrix's columns in Hugging Face, and the other dims are its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.config.hf_config import VARIANTS
from jaxllm.config.model_config import LoraConfig
from jaxllm.config.model_spec import LORA_A, LORA_B, parameters

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BUFFERS = (".rotary_emb.inv_freq",)
"""Name suffixes of tensors that are not weights: old folders store the rotary frequencies, which follow from the config."""
REQUIRED = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "tie_embeddings",
)


@dataclass(frozen=True)
class Entry:
    """One jaxllm parameter and its Hugging Face tensors."""

    path: tuple[str, ...]
    template: str
    layers: int | None
    """L for a stack, whose tensors are template.format(layer). None for a parameter that is one tensor."""
    dims: tuple[int, ...]
    """Sizes of one layer's array, or of the complete array if there are no layers."""
    columns: int
    """Number of leading dims that are the columns of Hugging Face's matrix. 0: both sides have the same order."""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_lora(self) -> bool:
        """Whether it is a matrix of an adapter."""
        return self.path[-1].endswith((LORA_A, LORA_B))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of jaxllm's parameter."""
        return self.dims if self.layers is None else (self.layers, *self.dims)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Hugging Face's names, in the order of the layers."""
        return (self.template,) if self.layers is None else tuple(self.template.format(i) for i in range(self.layers))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one layer's array as a matrix, if `columns` is above 0."""
        return math.prod(self.dims[: self.columns]), math.prod(self.dims[self.columns :])

    @property
    def their_dims(self) -> tuple[int, ...]:
        """Dims of Hugging Face's tensor, with heads and head size separate."""
        return self.dims[self.columns :] + self.dims[: self.columns]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of each Hugging Face tensor."""
        if self.columns:
            return self.matrix[::-1]
        return self.dims if self.template in (EMBEDDING, HEAD) else (math.prod(self.dims),)


def entries(model: Mapping[str, Any]) -> list[Entry]:
    """All parameters of the network that a `model` section describes.

    Raises:
      KeyError: the section lacks a size.
    """
    # Not validated: the file may be damaged, and its reader says so.
    more = {key: model[key] for key in VARIANTS if key in model}
    if model.get("lora") is not None:
        more["lora"] = LoraConfig.model_validate(model["lora"])
    shape = ModelConfig.model_construct(**{key: model[key] for key in REQUIRED}, **more)
    return [
        Entry(
            path=tuple(spec.path.split(".")),
            template=spec.hugging_face,
            layers=shape.num_layers if spec.in_layer else None,
            dims=spec.shape,
            columns=spec.inputs,
        )
        for spec in parameters(shape)
    ]
