"""llama.cpp's words for a network: its architecture, the keys of a GGUF file, and the names of tensors.

llama.cpp computes some networks otherwise than transformers. What it would compute otherwise is refused by name, as read in its
source (src/models/*.cpp, src/llama-model.cpp). The values of a file are written and read here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
)

from jaxllm.config import ConfigError, ModelConfig
from jaxllm.config.model_config import RopeScaling
from jaxllm.weights.safetensors import CODES, Described, Tensor, ValuesFile
from jaxllm.weights.streaming import nbytes

# ------------------------------------------------------------------------------------------------------- values in a file
# The values of a GGUF file, whose header the library gguf writes. They are written and read in pieces, as those of safetensors:
# the library's writer needs a tensor whole, and pages of its reader's memory map count as the process's own memory.
#
# Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

TYPES = {code: GGMLQuantizationType[code] for code in CODES.values()}
"""ggml's types, by the names that safetensors has for dtypes."""


def new_gguf(header: GGUFWriter, path: Path, tensors: Described) -> dict[str, Tensor]:
    """Creates a file of full length for these tensors, whose values are still to be written.

    Args:
      header: with all keys, and without tensors.
    """
    for name, (dtype, shape) in tensors.items():
        raw = TYPES[CODES[dtype]]
        header.add_tensor_info(name, shape, np.dtype(np.float32), nbytes(dtype, shape), raw_dtype=raw)
    header.write_header_to_file(path)
    header.write_kv_data_to_file()
    header.write_ti_data_to_file()
    header.close()
    file, found = ValuesFile(path, os.O_RDWR), {}
    end = file.size
    for name, (dtype, shape) in tensors.items():
        begin = GGUFWriter.ggml_pad(end, header.data_alignment)
        end = begin + nbytes(dtype, shape)
        found[name] = Tensor(name, CODES[dtype], shape, file, begin, end)
    os.truncate(path, GGUFWriter.ggml_pad(end, header.data_alignment))
    return found


# ------------------------------------------------------------------------------------------------------------- parameters

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "olmo2": MODEL_ARCH.OLMO2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
}
"""By transformers' model_type."""
FILE_TYPES = {"F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16}
ROPE_FREQS = "rope_freqs.weight"
"""By what the frequency of each rotary pair is divided (Llama 3)."""
GEMMA_27B_LAYERS = 62
"""So many layers are Gemma 3 27B for llama.cpp, which then divides scores by the square root of hidden_size / num_heads."""


def architecture(kind: str, model: ModelConfig) -> MODEL_ARCH:
    """llama.cpp's architecture of a network.

    Args:
      kind: transformers' model_type.

    Raises:
      ConfigError: llama.cpp computes it otherwise. The message says what.
    """
    found = ARCHITECTURES[kind]
    for reason in _differences(found, model):
        raise ConfigError(f"llama.cpp's {MODEL_ARCH_NAMES[found]} has no {reason}: use --to hf and another server.")
    return found


def _differences(arch: MODEL_ARCH, model: ModelConfig) -> Iterator[str]:
    scaling = model.rope_scaling
    if model.sliding_window is not None and arch != MODEL_ARCH.GEMMA3:
        yield f"model.sliding_window={model.sliding_window}"
    if model.num_heads * model.head_dim != model.hidden_size and arch in (MODEL_ARCH.QWEN2, MODEL_ARCH.OLMO2):
        yield f"model.head_dim={model.head_dim} that is not hidden_size / num_heads"
    if model.tie_embeddings and arch == MODEL_ARCH.OLMO2:
        yield "model.tie_embeddings=true"
    if arch == MODEL_ARCH.GEMMA3:
        usual = model.hidden_size // model.num_heads if model.num_layers == GEMMA_27B_LAYERS else model.head_dim
        if (scalar := model.query_pre_attn_scalar or model.head_dim) != usual:
            yield f"model.query_pre_attn_scalar={scalar} but {usual} for {model.num_layers} layers"
    if scaling is None:
        return
    if (scaling.rope_type == "llama3" and arch != MODEL_ARCH.LLAMA) or (
        scaling.rope_type == "yarn" and arch == MODEL_ARCH.GEMMA3
    ):
        yield f"model.rope_scaling.rope_type={scaling.rope_type}"
    for name in ("beta_slow", "beta_fast", "attention_factor"):
        if (value := getattr(scaling, name)) != (default := RopeScaling.model_fields[name].default):
            yield f"model.rope_scaling.{name}={value} but {default or 'its default'}"


def describe_network(writer: GGUFWriter, model: ModelConfig, positions: int, dtype: np.dtype) -> None:
    """Writes the keys of a network.

    Args:
      positions: how many the model was trained for.
      dtype: of most tensors.
    """
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[CODES[dtype]])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_context_length(positions)
    writer.add_vocab_size(model.vocab_size)
    writer.add_block_count(model.num_layers)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)
        writer.add_sliding_window_pattern([window is not None for window in model.windows])
        writer.add_rope_freq_base_swa(model.local_rope_theta or model.rope_theta)
    if (scaling := model.rope_scaling) is None or scaling.rope_type == "llama3":
        # Llama 3's scaling is a tensor: ROPE_FREQS.
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.rope_type))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)


def tensor_names(arch: MODEL_ARCH, layers: int, theirs: list[str]) -> dict[str, str]:
    """GGUF's names, by Hugging Face's."""
    names = get_tensor_name_map(arch, layers)
    found = {name: names.get_name(name, (".weight", ".bias")) for name in theirs}
    return {name: ours for name, ours in found.items() if ours is not None}
