"""Hugging Face's config.json and our `model` section: one network in two spellings, and a refusal by name of what is not ours.

Two dialects are read. Folders of the hub and transformers 4 say `rope_theta`, `rope_scaling`, `torch_dtype`; transformers 5
says `rope_parameters`, `dtype`. What is written says both, alike, so that either version loads it. Pure Python: a recipe may
name a folder, and reading its shape costs milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config_errors import ConfigError

CONFIG, MODEL = "config.json", "model.json"
SHAPE_KEYS = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("rope_theta", "rope_scaling", "tie_embeddings", "norm_eps"),
)
"""Of the `model` section: what says which network it is, not how it is run."""
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Our names of the sizes that a config.json always has, and theirs."""
ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}
CLASSES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
}
"""What transformers takes where config.json is silent, as far as the two classes differ."""
MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "is_encoder_decoder": (None, False),
}
"""Keys that change the network, and the values with which it is ours."""


def model_section(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The shape keys of our `model` section, from the content of a config.json.

    Args:
      where: the file, for errors.

    Raises:
      ConfigError: a key is missing or of another type, or the network is one that ours cannot express; names the key.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} holds no JSON object: give the config.json of a Llama model.")
    kind = _kind(found, where)
    for key, allowed in MUST_BE.items():
        if (value := found.get(key)) not in allowed:
            raise ConfigError(f"{where} says {key}={_plain(value)}, which jaxllm's Llama cannot express: use another model.")
    if "AutoModelForCausalLM" in (found.get("auto_map") or {}):
        raise ConfigError(
            f"{where} says auto_map, so its network is code of its own: use a model of transformers' Llama class."
        )
    if found.get("max_position_embeddings") is not None:
        _integer(found, "max_position_embeddings", where)
    _refuse_window(found, kind, where)
    section: dict[str, Any] = {ours: _integer(found, theirs, where) for ours, theirs in SIZES.items()}
    kv_heads = found.get("num_key_value_heads", DEFAULTS[kind]["num_key_value_heads"])
    kv_heads = section["num_heads"] if kv_heads is None else kv_heads
    section["num_kv_heads"] = _integer({"num_key_value_heads": kv_heads}, "num_key_value_heads", where)
    if found.get("head_dim") is None and section["hidden_size"] % section["num_heads"]:
        raise ConfigError(f"{where} says no head_dim, and its hidden_size is no multiple of its heads: add head_dim.")
    given = found.get("head_dim") is not None
    section["head_dim"] = _integer(found, "head_dim", where) if given else section["hidden_size"] // section["num_heads"]
    section["norm_eps"] = _number(found, "rms_norm_eps", where, 1e-6)
    if (tied := found.get("tie_word_embeddings")) not in (True, False, None):
        raise ConfigError(f"{where} says tie_word_embeddings={_plain(tied)}: it should be true or false.")
    section["tie_embeddings"] = bool(tied)
    section["rope_theta"], section["rope_scaling"] = _rope(found, kind, where)
    return {key: section[key] for key in SHAPE_KEYS}


def hugging_face_config(
    model: Mapping[str, Any],
    *,
    dtype: str,
    max_position: int | None,
    original: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of a config.json that transformers 4.43 and later, 5 included, load as this network.

    Args:
      model: our `model` section; other keys than the shape's are not read.
      dtype: of the weights beside it: float32, bfloat16 or float16.
      max_position: positions it was trained for; None: what `original` says, or leaves to transformers.
      original: the config.json the model came with; what it says beyond the shape is kept.
      tokens: bos_token_id, eos_token_id and the like, for a model that came with no config.json.
    """
    original = dict(original or {})
    kind = _kind(original, "The original config.json") if original else "llama"
    config: dict[str, Any] = {
        "architectures": original.get("architectures") or ["LlamaForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **({} if original else {"attention_dropout": 0.0, "use_cache": True, "bos_token_id": None, "eos_token_id": None}),
        **original,
        **({} if original else dict(tokens or {})),
        **{theirs: model[ours] for ours, theirs in SIZES.items()},
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "rms_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tie_embeddings"],
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if "initializer_std" in model:
        config["initializer_range"] = model["initializer_std"]
    if max_position is not None:
        config["max_position_embeddings"] = max_position
    window = {**DEFAULTS[kind], **config}.get("sliding_window")
    if window is not None and max_position is not None and window < max_position:
        # It was as wide as the context, which has become longer.
        config["sliding_window"] = None
    scaling: dict[str, Any] = {"rope_type": "default"}
    if (ours := model.get("rope_scaling")) is not None:
        scaling = {"rope_type": "llama3"} | {theirs: ours[key] for key, theirs in ROPE_SCALING.items()}
    config["rope_theta"] = model["rope_theta"]
    config["rope_scaling"] = scaling if ours is not None else None
    config["rope_parameters"] = {**scaling, "rope_theta": model["rope_theta"]}
    config.pop("original_max_position_embeddings", None)
    return config


def folder_shape(path: Path) -> dict[str, Any] | None:
    """The shape keys of the model in a folder, Hugging Face's or jaxllm's own; None if it is neither.

    Raises:
      ConfigError: its description is damaged, or of a network that ours cannot express.
    """
    if (path / MODEL).is_file():
        section = read_json(path / MODEL).get("model")
        if not isinstance(section, dict) or not set(SIZES) <= section.keys():
            raise ConfigError(f"{path / MODEL} says nothing of the model's shape: convert or export it again.")
        return {key: section[key] for key in SHAPE_KEYS if key in section}
    if (path / CONFIG).is_file():
        return model_section(read_json(path / CONFIG), str(path / CONFIG))
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ConfigError: there is none that can be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the folder.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({' '.join(str(error).split())}): get the file again.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object: get the file again.")
    return found


def _kind(found: Mapping[str, Any], where: str) -> str:
    """llama or mistral."""
    classes, kind = found.get("architectures"), found.get("model_type")
    if classes:
        name = classes[0] if isinstance(classes, list) and len(classes) == 1 else str(classes)
        if name not in CLASSES:
            raise ConfigError(f"{where} says architectures={_plain(classes)}: jaxllm takes {' and '.join(CLASSES)}.")
        if kind not in (None, CLASSES[name]):
            raise ConfigError(f"{where} says architectures={name} and model_type={kind}, which do not go together.")
        return CLASSES[name]
    if kind not in CLASSES.values():
        raise ConfigError(f"{where} says model_type={_plain(kind)}: jaxllm takes {' and '.join(CLASSES.values())}.")
    return str(kind)


def _refuse_window(found: Mapping[str, Any], kind: str, where: str) -> None:
    window = found.get("sliding_window", DEFAULTS[kind].get("sliding_window"))
    longest = found.get("max_position_embeddings", DEFAULTS[kind]["max_position_embeddings"])
    if window is None or (isinstance(window, int) and isinstance(longest, int) and window >= longest):
        return
    silent = "" if "sliding_window" in found else ", as transformers takes it where the key is missing"
    raise ConfigError(
        f"{where} says sliding_window={_plain(window)}{silent}, shorter than max_position_embeddings={_plain(longest)}: jaxllm "
        f"attends to all positions, so set sliding_window to null if only contexts that short matter, or use another model."
    )


def _rope(found: Mapping[str, Any], kind: str, where: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, our rope_scaling section or None) from either dialect, or from both where they agree."""
    dialects = {key: found[key] for key in ("rope_scaling", "rope_parameters") if found.get(key)}
    for key, value in dialects.items():
        if not isinstance(value, Mapping) or any(isinstance(part, Mapping) for part in value.values()):
            raise ConfigError(f"{where} says {key}={_plain(value)}: jaxllm takes one rotary embedding for all layers.")
    thetas = {key: value["rope_theta"] for key, value in dialects.items() if "rope_theta" in value}
    if "rope_theta" in found:
        thetas["rope_theta"] = found["rope_theta"]
    _refuse_disagreement(thetas, where)
    theta = _number({"rope_theta": next(iter(thetas.values()), 10000.0)}, "rope_theta", where)
    scalings = {key: _scaling(value, found, kind, f"{where}: {key}") for key, value in dialects.items()}
    _refuse_disagreement(scalings, where)
    return theta, next(iter(scalings.values()), None)


def _refuse_disagreement(said: Mapping[str, Any], where: str) -> None:
    (first, *others) = said.items() or [("", None)]
    for other in others:
        if other[1] != first[1]:
            raise ConfigError(f"{where}: {first[0]} and {other[0]} disagree ({first[1]} and {other[1]}): keep the true one.")


def _scaling(rope: Mapping[str, Any], found: Mapping[str, Any], kind: str, where: str) -> dict[str, Any] | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"{where} says partial_rotary_factor={_plain(rope['partial_rotary_factor'])}, which jaxllm's Llama cannot express."
        )
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise ConfigError(f"{where} says rope_type={_plain(rope_type)}: jaxllm's Llama knows default and llama3.")
    longest = found.get("max_position_embeddings", DEFAULTS[kind]["max_position_embeddings"])
    original = "original_max_position_embeddings"
    _refuse_disagreement(
        {key: said[original] for key, said in (("it", rope), ("the config", found)) if original in said}, where
    )
    filled = {original: found.get(original, longest), **rope}
    section = {ours: _number(filled, theirs, where) for ours, theirs in ROPE_SCALING.items()}
    return section | {"original_max_position": int(section["original_max_position"])}


def _integer(found: Mapping[str, Any], key: str, where: str) -> int:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} says {key}={_plain(value)}, which is no size: it should be a whole number of at least 1.")
    return value


def _number(found: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = found.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where} says {key}={_plain(value)}: it should be a number above 0.")
    return float(value)


def _plain(value: Any) -> str:
    """As JSON spells it, and not longer than a line."""
    text = json.dumps(value, default=str).strip('"')
    return text if len(text) <= 80 else text[:77] + "..."
