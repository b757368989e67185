"""The networks of transformers that jaxllm computes, and what their config.json means. No JAX."""

from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "all", "all switched", "switched", "pattern"]
"""What a class of transformers can say: nothing; one window for all layers; the same, if use_sliding_window is true; if it is,
one for the layers that layer_types names or from max_window_layers on; or one for layer_types, by default with a full layer
every sliding_window_pattern."""

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""jaxllm's and Hugging Face's names of the sizes that each config.json has."""
EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Names of the number of experts: classes of transformers take both, and which one they write changed."""
_ORIGINAL = {"original_max_position": "original_max_position_embeddings"}
ROPE_SCALINGS: dict[str, dict[str, str]] = {
    "llama3": {**{key: key for key in ("factor", "low_freq_factor", "high_freq_factor")}, **_ORIGINAL},
    "linear": {"factor": "factor"},
    "yarn": {**{key: key for key in ("factor", "beta_slow", "beta_fast", "attention_factor")}, **_ORIGINAL},
}
"""Names in the `rope_scaling` section and in config.json, by rope_type."""
YARN_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}
"""What transformers takes for missing keys."""


@dataclass(frozen=True)
class Kind:
    """A network of transformers, by its model_type."""

    architecture: str
    defaults: dict[str, Any]
    """transformers' defaults for keys that are missing in config.json, where the classes differ."""
    variants: dict[str, Any] = field(default_factory=dict)
    """VARIANTS of its class."""
    windows: Windows = "none"
    """How it says which layers have a sliding window."""
    ignores: tuple[str, ...] = ()
    """Keys of MUST_BE that its class does not read, or that jaxllm does."""
    says: tuple[str, ...] = ()
    """VARIANTS, beside WINDOWS and sizes, that its config.json says. The others are those of its class."""
    sizes: dict[str, str] = field(default_factory=dict)
    """Names of the sizes that SIZES lacks, or that differ there. Only networks with experts have any."""
    names: dict[str, str] = field(default_factory=dict)
    """Parts of tensors' names in the table of parameters, and what its class writes instead."""

    @property
    def all_sizes(self) -> dict[str, str]:
        return SIZES | self.sizes


_EXPERTS = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
KINDS = {
    "llama": Kind("LlamaForCausalLM", {"num_key_value_heads": None, "max_position_embeddings": 2048}),
    "mistral": Kind(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": Kind("Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}, windows="switched", ignores=("attention_bias",)),
    "qwen3": Kind("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, {"qk_norm": "head"}, windows="switched"),
    "olmo2": Kind(
        "Olmo2ForCausalLM",
        {"num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        {"qk_norm": "width", "block_norms": "after"},
    ),
    "olmo3": Kind(
        "Olmo3ForCausalLM",
        {
            **{"num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
            **{"sliding_window": 4096, "sliding_window_pattern": 4},
        },
        {"qk_norm": "width", "block_norms": "after"},
        windows="pattern",
        says=("local_rope_theta",),
    ),
    "smollm3": Kind(
        "SmolLM3ForCausalLM",
        {
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
            **{"no_rope_layer_interval": 4},
        },
        says=("no_rope_every",),
    ),
    "gemma3_text": Kind(
        "Gemma3ForCausalLM",
        {
            **{"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True},
            **{"sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256},
            **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        },
        {"qk_norm": "head", "block_norms": "both", "norm_plus_one": True, "activation": "gelu_tanh", "scale_embeddings": True},
        windows="pattern",
        ignores=("hidden_act",),
        says=("local_rope_theta", "query_pre_attn_scalar"),
    ),
    "qwen3_moe": Kind(
        "Qwen3MoeForCausalLM",
        {
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        },
        {"qk_norm": "head"},
        windows="all switched",
        ignores=EXPERT_COUNTS,
        says=("normalize_expert_weights",),
        sizes={**_EXPERTS, "intermediate_size": "moe_intermediate_size"},
    ),
    "olmoe": Kind(
        "OlmoeForCausalLM",
        {
            **{"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
            **{"num_experts": 64, "num_experts_per_tok": 8},
        },
        {"qk_norm": "width"},
        ignores=EXPERT_COUNTS,
        says=("normalize_expert_weights",),
        sizes=_EXPERTS,
    ),
    "mixtral": Kind(
        "MixtralForCausalLM",
        {
            **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        },
        {"normalize_expert_weights": True},
        windows="all",
        ignores=EXPERT_COUNTS,
        sizes={**_EXPERTS, "num_experts": "num_local_experts"},
        names={".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
    ),
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""OLMo 2's class has defaults for them, and gives the padding id's embedding no gradient."""
MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    **dict.fromkeys(EXPERT_COUNTS, (None, 0)),
    # Layers without experts among those with; what OLMoE does to queries, keys and values; what Mixtral does to activations.
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "clip_qkv": (None,),
    "router_jitter_noise": (None, 0),
    "partial_rotary_factor": (None, 1),
    "is_encoder_decoder": (None, False),
}
"""Keys that change the network, with the values that jaxllm supports."""
