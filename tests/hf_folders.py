"""Small Hugging Face folders of random weights. They are written and read by hand, so that the code under test is not used to
test itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from golden.weights import shapes_of_theirs

from jaxllm.config import ModelConfig

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
HUB: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    **SIZES,
    "rope_theta": 20000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A config.json as in the hub's folders."""
GEMMA3: dict[str, Any] = {
    **HUB,
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
    **{"head_dim": 10, "sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 7},
    **{"rope_local_base_freq": 50.0, "tie_word_embeddings": True, "pad_token_id": None},
}
OLMO3: dict[str, Any] = {
    **{**HUB, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 9},
    **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "pad_token_id": None},
    **{"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}
"""With the published theta: in the hub's dialect transformers 5 takes another one for full layers only (its Olmo3Config)."""
SMOLLM3: dict[str, Any] = {
    **{**HUB, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 2},
    **{"tie_word_embeddings": True, "pad_token_id": None},
}
QWEN3_MOE: dict[str, Any] = {
    **{**HUB, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 10, "num_experts": 6},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None, "max_window_layers": 3},
}
OLMOE: dict[str, Any] = {
    **{**HUB, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    **{"norm_topk_prob": False, "clip_qkv": None, "pad_token_id": None},
}
MIXTRAL: dict[str, Any] = {
    **{**HUB, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "sliding_window": 9, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0},
}
MIXTRALS_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def in_new_dialect(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the dialect of transformers 5."""
    config = dict(config)
    rope = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta", 10000.0)}
    if "rope_local_base_freq" in config:
        local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    if config["model_type"] == "olmo3":
        local = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    if config["model_type"] == "qwen3_moe":
        config["num_local_experts"] = config.pop("num_experts")
    config["dtype"] = config.pop("torch_dtype", "float32")
    return config


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The sizes that determine the shapes of weights."""
    return ModelConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config.get("moe_intermediate_size", config["intermediate_size"]),
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        vocab_size=config["vocab_size"],
        tie_embeddings=config["tie_word_embeddings"],
        qkv_bias=config["model_type"] == "qwen2",
        qk_norm={
            **{"qwen3": "head", "gemma3_text": "head", "qwen3_moe": "head"},
            **{"olmo2": "width", "olmo3": "width", "olmoe": "width"},
        }.get(config["model_type"]),
        block_norms={"olmo2": "after", "olmo3": "after", "gemma3_text": "both"}.get(config["model_type"], "before"),
        num_experts=config.get("num_experts", config.get("num_local_experts")),
        experts_per_token=config.get("num_experts_per_tok"),
    )


def name_of(config: Mapping[str, Any], name: str) -> str:
    """A tensor's name in the folder of this network, by its name in most folders."""
    if config["model_type"] != "mixtral":
        return name
    return ".".join(MIXTRALS_NAMES.get(part, part) for part in name.split("."))


def random_weights(config: Mapping[str, Any], code: str = "F32", seed: int = 0) -> dict[str, np.ndarray]:
    """Weights large enough that a wrong layout shows in the logits."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes_of_theirs(model_of(config)).items():
        values = rng.standard_normal(shape) / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.2 * rng.standard_normal(shape)
        # Far from ties: rounding sends no token to another expert.
        values = 3 * values if name.endswith("mlp.gate.weight") else values
        weights[name_of(config, name)] = values.astype(DTYPES[code])
    return weights


def write_file(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def read_file(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(content[start:][slice(*line["data_offsets"])], DTYPES[line["dtype"]]).reshape(line["shape"])
        for name, line in header.items()
    }


def write_folder(path: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(weights)
    if shards == 1:
        write_file(path / "model.safetensors", weights, {"format": "pt"})
        return path
    weight_map = {name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        write_file(path / file, {name: weights[name] for name in names if weight_map[name] == file}, {"format": "pt"})
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder. With an index, each is read from the file it names."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return read_file(path / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: read_file(path / name) for name in set(weight_map.values())}
    assert {(name, file) for file, tensors in files.items() for name in tensors} == set(weight_map.items())
    return {name: files[file][name] for name, file in weight_map.items()}
