"""Converts between jaxllm's nested dict of parameters and Hugging Face's state dict, for the reference tests.

Hugging Face keeps one array per layer where jaxllm stacks layers in front, writes every projection as [out, in], and merges
heads with head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig

# jaxllm's path, Hugging Face's name, the letters of jaxllm's dims; and what a network must have to have it, where not all do. L
# becomes one name per layer, LX one per layer and expert; dims on a side of D merge.
TABLE = (
    ("embedding", "model.embed_tokens.weight", "VD"),
    ("layers.attention_norm.scale", "model.layers.{}.input_layernorm.weight", "LD", "norms before"),
    ("layers.attention.query", "model.layers.{}.self_attn.q_proj.weight", "LDNH"),
    ("layers.attention.key", "model.layers.{}.self_attn.k_proj.weight", "LDKH"),
    ("layers.attention.value", "model.layers.{}.self_attn.v_proj.weight", "LDKH"),
    ("layers.attention.query_bias", "model.layers.{}.self_attn.q_proj.bias", "LNH", "bias"),
    ("layers.attention.key_bias", "model.layers.{}.self_attn.k_proj.bias", "LKH", "bias"),
    ("layers.attention.value_bias", "model.layers.{}.self_attn.v_proj.bias", "LKH", "bias"),
    ("layers.attention.query_norm.scale", "model.layers.{}.self_attn.q_norm.weight", "LH", "norms of heads"),
    ("layers.attention.key_norm.scale", "model.layers.{}.self_attn.k_norm.weight", "LH", "norms of heads"),
    ("layers.attention.query_norm.scale", "model.layers.{}.self_attn.q_norm.weight", "LNH", "norms of all heads"),
    ("layers.attention.key_norm.scale", "model.layers.{}.self_attn.k_norm.weight", "LKH", "norms of all heads"),
    ("layers.attention.out", "model.layers.{}.self_attn.o_proj.weight", "LNHD"),
    ("layers.mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "LD", "norms before"),
    ("layers.attention_post_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "LD", "norms after"),
    ("layers.mlp_post_norm.scale", "model.layers.{}.post_feedforward_layernorm.weight", "LD", "norms after"),
    ("layers.attention_norm.scale", "model.layers.{}.input_layernorm.weight", "LD", "norms both"),
    ("layers.attention_post_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "LD", "norms both"),
    ("layers.mlp_norm.scale", "model.layers.{}.pre_feedforward_layernorm.weight", "LD", "norms both"),
    ("layers.mlp_post_norm.scale", "model.layers.{}.post_feedforward_layernorm.weight", "LD", "norms both"),
    ("layers.mlp.gate", "model.layers.{}.mlp.gate_proj.weight", "LDF", "one mlp"),
    ("layers.mlp.up", "model.layers.{}.mlp.up_proj.weight", "LDF", "one mlp"),
    ("layers.mlp.down", "model.layers.{}.mlp.down_proj.weight", "LFD", "one mlp"),
    ("layers.mlp.router", "model.layers.{}.mlp.gate.weight", "LDX", "experts"),
    ("layers.mlp.gate", "model.layers.{}.mlp.experts.{}.gate_proj.weight", "LXDF", "experts"),
    ("layers.mlp.up", "model.layers.{}.mlp.experts.{}.up_proj.weight", "LXDF", "experts"),
    ("layers.mlp.down", "model.layers.{}.mlp.experts.{}.down_proj.weight", "LXFD", "experts"),
    ("final_norm.scale", "model.norm.weight", "D"),
    ("head", "lm_head.weight", "VD", "head"),
)


def rows(model: ModelConfig) -> Iterator[tuple[str, list[str], str]]:
    """(jaxllm's path, Hugging Face's names, jaxllm's dims without those that become names) of every parameter."""
    has = {
        "head": not model.tie_embeddings,
        "bias": model.qkv_bias,
        "norms of heads": model.qk_norm == "head",
        "norms of all heads": model.qk_norm == "width",
        "norms before": model.block_norms == "before",
        "norms after": model.block_norms == "after",
        "norms both": model.block_norms == "both",
        "one mlp": model.num_experts is None,
        "experts": model.num_experts is not None,
    }
    for ours, theirs, dims, *needs in TABLE:
        if not all(has[need] for need in needs):
            continue
        stack = [model.num_layers] * dims.startswith("L") + [model.num_experts] * dims.startswith("LX")
        yield ours, [theirs.format(*where) for where in np.ndindex(*stack)], dims.removeprefix("LX").removeprefix("L")


def shapes_of_theirs(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes: vectors [D], vocabulary matrices [V, D], projections [out, in]."""
    sizes = letter_sizes(model)
    shapes = {}
    for _, names, dims in rows(model):
        merged = [sizes["D"] if group == "D" else int(np.prod([sizes[d] for d in group])) for group in groups(dims)]
        shapes |= dict.fromkeys(names, tuple(merged if dims == "VD" else reversed(merged)))
    return shapes


def to_ours(theirs: Mapping[str, np.ndarray], model: ModelConfig) -> dict[str, Any]:
    """State dict -> nested dict of arrays with stacked layers."""
    sizes = letter_sizes(model)
    params: dict[str, Any] = {}
    for path, names, dims in rows(model):
        shape = [sizes[dim] for dim in dims]
        arrays = [(theirs[name] if dims == "VD" else theirs[name].T).reshape(shape) for name in names]
        *parents, leaf = path.split(".")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        stacked = np.stack(arrays)
        experts = len(arrays) // model.num_layers
        place[leaf] = (
            stacked.reshape(-1, experts, *shape) if experts > 1 else stacked if path.startswith("layers.") else stacked[0]
        )
    return params


def to_theirs(params: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
    """Nested dict of arrays -> state dict: the inverse of to_ours."""
    shapes = shapes_of_theirs(model)
    theirs = {}
    for path, names, dims in rows(model):
        array: Any = params
        for key in path.split("."):
            array = array[key]
        for name, one in zip(names, np.asarray(array).reshape(len(names), -1), strict=True):
            shape = shapes[name]
            theirs[name] = one.reshape(shape) if dims == "VD" else one.reshape(shape[::-1]).T
    return theirs


def letter_sizes(model: ModelConfig) -> dict[str, int]:
    return {
        "V": model.vocab_size,
        "D": model.hidden_size,
        "F": model.intermediate_size,
        "N": model.num_heads,
        "K": model.num_kv_heads,
        "H": model.head_dim,
        "X": model.num_experts or 0,
    }


def groups(dims: str) -> list[str]:
    """jaxllm's dims as matrix dims: "DNH" -> D, NH; "NHD" -> NH, D."""
    return [group for group in dims.partition("D") if group]
