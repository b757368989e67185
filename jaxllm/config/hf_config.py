"""Translates between Hugging Face's config.json and the `model` section. Refuses unsupported networks by key.

There are two dialects. Folders of the hub and transformers 4 use `rope_theta`, `rope_scaling`, `torch_dtype`; transformers 5
uses `rope_parameters`, `dtype`. The output has both, with equal values, so either version loads it. This module is pure Python:
a recipe may name a folder, and reading its shape takes milliseconds.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import hf_kinds
from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_kinds import KINDS, MUST_BE, ROPE_SCALINGS, Windows
from jaxllm.config.hf_vision import llava_config, text_config, vision_section
from jaxllm.config.model_config import MOST_LAYERS, SHAPE_KEYS, VARIANTS, WINDOWS, ModelConfig, rotating
from jaxllm.config.types import divisors
from jaxllm.untrusted import INT32, RefusedInput, checked, read_json, shown

CONFIG, MODEL = "config.json", "model.json"
TOKENIZER = "tokenizer"
"""Folder of a tokenizer in run.dir and in a model of jaxllm's own format."""


def model_section(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Builds the shape keys of the `model` section from the content of a config.json.

    Args:
      where: the file, for error messages.

    Raises:
      ConfigError: a key is missing or has another type, or the network is not supported. The message names the key.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} does not hold a JSON object: give the config.json of a model.")
    vision, found = vision_section(found, where), text_config(found, where)
    kind = kind_of(found, where)
    defaults = KINDS[kind].defaults
    for key, allowed in MUST_BE.items():
        if (value := found.get(key)) not in allowed and key not in KINDS[kind].ignores:
            raise ConfigError(f"{where} says {key}={shown(value)}, which jaxllm does not support: use another model.")
    auto_map = found.get("auto_map") or {}
    if not isinstance(auto_map, Mapping):
        raise ConfigError(f"{where} says auto_map={shown(auto_map)}: it should be an object.")
    if "AutoModelForCausalLM" in auto_map:
        raise ConfigError(
            f"{where} says auto_map, so its network has its own code: use a model of a class that transformers has."
        )
    if found.get("max_position_embeddings") is not None:
        _integer(found, "max_position_embeddings", where)
    tops = {"num_layers": MOST_LAYERS}
    said, sizes = {**defaults, **_with_expert_count(found, kind, where)}, KINDS[kind].all_sizes
    section: dict[str, Any] = {ours: _integer(said, theirs, where, tops.get(ours, INT32)) for ours, theirs in sizes.items()}
    kv_heads = found.get("num_key_value_heads", defaults["num_key_value_heads"])
    kv_heads = section["num_heads"] if kv_heads is None else kv_heads
    section["num_kv_heads"] = _integer({"num_key_value_heads": kv_heads}, "num_key_value_heads", where)
    head_dim = found.get("head_dim", defaults.get("head_dim"))
    if head_dim is None and section["hidden_size"] % section["num_heads"]:
        raise ConfigError(f"{where} has no head_dim, and its hidden_size is not a multiple of its heads: add head_dim.")
    head_dim = section["hidden_size"] // section["num_heads"] if head_dim is None else head_dim
    section["head_dim"] = _integer({"head_dim": head_dim}, "head_dim", where)
    section["norm_eps"] = _number(found, "rms_norm_eps", where, defaults.get("rms_norm_eps", 1e-6))
    section["tie_embeddings"] = _switch(said, "tie_word_embeddings", where)
    section = VARIANTS | KINDS[kind].variants | section | {"vision": vision}
    if "normalize_expert_weights" in KINDS[kind].says:
        section["normalize_expert_weights"] = _switch(said, "norm_topk_prob", where)
    if "no_rope_every" in KINDS[kind].says:
        section["no_rope_every"] = _no_rope_every({**defaults, **found}, section["num_layers"], where)
        # Its class reads sliding_window only with use_sliding_window.
        found = {**found, "sliding_window": None}
    section |= read_window(found, defaults, KINDS[kind].windows, where)
    if "query_pre_attn_scalar" in KINDS[kind].says:
        scalar = _integer({**defaults, **found}, "query_pre_attn_scalar", where)
        section["query_pre_attn_scalar"] = None if scalar == section["head_dim"] else scalar
    local = None
    if "local_rope_theta" in KINDS[kind].says:
        found, local = _local_rope(found, defaults, where)
    section["rope_theta"], section["rope_scaling"] = _rope(found, kind, where)
    if "local_rope_theta" in KINDS[kind].says and section["sliding_window"] is not None:
        section["local_rope_theta"] = local or section["rope_theta"]
    return {key: section[key] for key in SHAPE_KEYS}


def hugging_face_config(
    model: Mapping[str, Any], *, dtype: str, max_position: int | None, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Builds the content of a config.json that transformers 5 loads as this network; and 4, from the version on that has its
    class (Llama: 4.43).

    Args:
      model: the `model` section. Only its shape keys are read.
      dtype: dtype of the weights beside it: float32, bfloat16 or float16.
      max_position: positions that the model was trained for. None: the value in `original`, or transformers' default.
      original: the config.json that the model came with. Its keys beyond the shape are kept.
    """
    original = dict(original or {})
    if (vision := model.get("vision")) is not None:
        of_text = text_config(original, "The original config.json")
        text = hugging_face_config({**model, "vision": None}, dtype=dtype, max_position=max_position, original=of_text)
        return llava_config(vision, text, {} if of_text is original else original)
    kind = kind_of(original, "The original config.json") if original else _kind_of(model)
    if not can_say(model, KINDS[kind].windows):
        raise ConfigError(
            f"{KINDS[kind].architecture} cannot have windows of {model.get('sliding_window')} positions on these layers: only "
            f"jaxllm can load this model."
        )
    if model.get("no_rope_every") and "no_rope_every" not in KINDS[kind].says:
        raise ConfigError(f"{KINDS[kind].architecture} rotates in all layers: only jaxllm can load this model.")
    if kind == "olmoe" and model["num_heads"] * model["head_dim"] != model["hidden_size"]:
        raise ConfigError(f"OlmoeForCausalLM has no head_dim={model['head_dim']} of its own: only jaxllm can load this model.")
    is_gemma = "hidden_act" in KINDS[kind].ignores
    config: dict[str, Any] = {
        "architectures": original.get("architectures") or [KINDS[kind].architecture],
        "model_type": kind,
        **{key: allowed[0] for key, allowed in MUST_BE.items() if key == ("hidden_activation" if is_gemma else "hidden_act")},
        **({"use_sliding_window": False} if "switched" in KINDS[kind].windows else {}),
        **({"attention_bias": False} if kind != "qwen2" else {}),
        **({"mlp_bias": False} if kind in ("llama", "mistral") else {}),
        **({} if original else {"attention_dropout": 0.0, "use_cache": True, **dict.fromkeys(hf_kinds.TOKEN_IDS)}),
        **original,
        **{theirs: model[ours] for ours, theirs in KINDS[kind].all_sizes.items()},
        **{key: model["num_experts"] for key in hf_kinds.EXPERT_COUNTS if key in original and KINDS[kind].sizes},
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "rms_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tie_embeddings"],
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if "normalize_expert_weights" in KINDS[kind].says:
        config["norm_topk_prob"] = model["normalize_expert_weights"]
    if "initializer_std" in model:
        config["initializer_range"] = model["initializer_std"]
    if max_position is not None:
        config["max_position_embeddings"] = max_position
    config |= window_keys(model, KINDS[kind].windows, {**KINDS[kind].defaults, **config})
    scaling: dict[str, Any] = {"rope_type": "default"}
    if (ours := model.get("rope_scaling")) is not None:
        rope_type = ours.get("rope_type", "llama3")
        scaling = {"rope_type": rope_type}
        scaling |= {theirs: ours[key] for key, theirs in ROPE_SCALINGS[rope_type].items() if ours.get(key) is not None}
    config["rope_theta"] = model["rope_theta"]
    config["rope_scaling"] = scaling if ours is not None else None
    config["rope_parameters"] = {**scaling, "rope_theta": model["rope_theta"]}
    if "no_rope_every" in KINDS[kind].says:
        config["no_rope_layers"] = [int(one) for one in rotating(model.get("no_rope_every"), model["num_layers"])]
    if "local_rope_theta" in KINDS[kind].says:
        local = model.get("local_rope_theta") or model["rope_theta"]
        if model.get("local_rope_theta") is None and model.get("sliding_window") and ours is not None:
            raise ConfigError(
                f"{KINDS[kind].architecture} does not scale the angles of layers with a window: set model.local_rope_theta."
            )
        if "query_pre_attn_scalar" in KINDS[kind].says:
            config["rope_local_base_freq"] = local
            config["query_pre_attn_scalar"] = model.get("query_pre_attn_scalar") or model["head_dim"]
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    config.pop("original_max_position_embeddings", None)
    return config


def folder_shape(path: Path) -> dict[str, Any] | None:
    """Shape keys of the model in a folder, Hugging Face's or jaxllm's own. None if it is neither.

    Raises:
      ConfigError: its description is damaged, or the network is not supported.
    """
    if (path / MODEL).is_file():
        section = stored_section(read_object(path / MODEL).get("model"), str(path / MODEL))
        return {key: section[key] for key in SHAPE_KEYS}
    if (path / CONFIG).is_file():
        return model_section(read_object(path / CONFIG), str(path / CONFIG))
    return None


def stored_section(section: Any, where: str) -> dict[str, Any]:
    """A `model` section that jaxllm wrote into a file, with all shape keys: earlier versions had fewer.

    Raises:
      ConfigError: it is no model of ours; the message names the key.
    """
    try:
        found = checked(section, dict[str, Any])
        shape = checked({key: found[key] for key in (*SHAPE_KEYS, "lora") if key in found}, ModelConfig).model_dump(mode="json")
    except RefusedInput as error:
        raise ConfigError(f"{where} does not describe a model ({error}): convert or export it again.") from None
    return {**{key: shape[key] for key in SHAPE_KEYS}, **{key: value for key, value in found.items() if value is not None}}


def read_object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
      ConfigError: the file cannot be read or holds no JSON object.
    """
    try:
        found = read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the folder.") from None
    except RefusedInput as error:
        raise ConfigError(f"{path} cannot be read ({error}): get the file again.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} does not hold a JSON object: get the file again.")
    return found


def kind_of(found: Mapping[str, Any], where: str) -> str:
    """The key of KINDS that a config.json names. ConfigError if there is none."""
    classes, kind = found.get("architectures"), found.get("model_type")
    if classes:
        name = shown(classes[0] if isinstance(classes, list) and len(classes) == 1 else classes)
        known = {kind.architecture: name for name, kind in KINDS.items()}
        if name not in known:
            raise ConfigError(f"{where} says architectures={shown(classes)}: jaxllm supports {_listed(known)}.")
        if kind not in (None, known[name]):
            raise ConfigError(f"{where} says architectures={name} and model_type={shown(kind)}, which do not match.")
        return known[name]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where} says model_type={shown(kind)}: jaxllm supports {_listed(KINDS)}.")
    return str(kind)


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def _kind_of(model: Mapping[str, Any]) -> str:
    """The kind of a network that came without a config.json."""
    variants = {key: model.get(key, value) for key, value in VARIANTS.items()}
    has_experts = variants["num_experts"] is not None
    for name, kind in KINDS.items():
        said = {key: variants[key] for key in (*WINDOWS, *kind.says, *kind.sizes) if key in variants}
        is_its = {**VARIANTS, **kind.variants, **said} == variants and bool(kind.sizes) == has_experts
        if is_its and can_say(model, kind.windows):
            return name
    said = " and ".join(f"model.{key}={value}" for key, value in variants.items() if value != VARIANTS[key])
    raise ConfigError(f"transformers has no network with {said}: only jaxllm can load this model.")


def _with_expert_count(found: Mapping[str, Any], kind: str, where: str) -> Mapping[str, Any]:
    """The config.json with the number of experts under the name of its kind."""
    if not (given := {key: found[key] for key in hf_kinds.EXPERT_COUNTS if KINDS[kind].sizes and key in found}):
        return found
    _refuse_disagreement(given, where)
    return {**found, KINDS[kind].sizes["num_experts"]: next(iter(given.values()))}


def _no_rope_every(said: Mapping[str, Any], layers: int, where: str) -> int | None:
    """model.no_rope_every by a config.json and transformers' values of missing keys."""
    if said.get("use_sliding_window"):
        raise ConfigError(f"{where} says use_sliding_window=true, which jaxllm does not support here: use another model.")
    if (rotates := said.get("no_rope_layers")) is None:
        rotates = rotating(_integer(said, "no_rope_layer_interval", where), layers)
    if not isinstance(rotates, list) or len(rotates) < layers or any(one not in (0, 1) for one in rotates):
        raise ConfigError(f"{where} says no_rope_layers={shown(rotates)}: it should be a list of 0 and 1 for {layers} layers.")
    if all(rotates := rotates[:layers]):
        return None
    if rotates != rotating(every := [*map(bool, rotates)].index(False) + 1, layers):
        raise ConfigError(
            f"{where} says no_rope_layers in an order that jaxllm does not support: it takes a 0 in every so many layers."
        )
    return every


def _local_rope(found: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], float | None]:
    """(the config.json with the angles of full attention alone, theta of the layers with a window; None: that of all)"""
    thetas, rope = {}, found.get("rope_parameters")
    if "rope_local_base_freq" in found:
        thetas["rope_local_base_freq"] = found["rope_local_base_freq"]
    if isinstance(rope, Mapping) and any(isinstance(part, Mapping) for part in rope.values()):
        full, local = (rope.get(key) or {} for key in ("full_attention", "sliding_attention"))
        if not isinstance(full, Mapping) or not isinstance(local, Mapping):
            raise ConfigError(f"{where} says rope_parameters={shown(rope)}: it should have an object for each kind of layer.")
        if local.get("rope_type", "default") != "default":
            raise ConfigError(f"{where} scales the angles of layers with a window, which jaxllm does not: use another model.")
        if "rope_theta" in local:
            thetas["rope_parameters"] = local["rope_theta"]
        found = {**found, "rope_parameters": full}
    _refuse_disagreement(thetas, where)
    theta = next(iter(thetas.values()), defaults.get("rope_local_base_freq"))
    return found, None if theta is None else _number({"rope_local_base_freq": theta}, "rope_local_base_freq", where)


def _rope(found: Mapping[str, Any], kind: str, where: str) -> tuple[float, dict[str, Any] | None]:
    """Reads (theta, rope_scaling section or None) from either dialect, or from both if they agree."""
    dialects = {key: found[key] for key in ("rope_scaling", "rope_parameters") if found.get(key)}
    for key, value in dialects.items():
        if not isinstance(value, Mapping) or any(isinstance(part, Mapping) for part in value.values()):
            raise ConfigError(f"{where} says {key}={shown(value)}: it should be an object with the angles of all layers.")
    thetas = {key: value["rope_theta"] for key, value in dialects.items() if "rope_theta" in value}
    if "rope_theta" in found:
        thetas["rope_theta"] = found["rope_theta"]
    _refuse_disagreement(thetas, where)
    default = KINDS[kind].defaults.get("rope_theta", 10000.0)
    theta = _number({"rope_theta": next(iter(thetas.values()), default)}, "rope_theta", where)
    scalings = {key: _scaling(value, found, kind, f"{where}: {key}") for key, value in dialects.items()}
    _refuse_disagreement(scalings, where)
    return theta, next(iter(scalings.values()), None)


def _refuse_disagreement(said: Mapping[str, Any], where: str) -> None:
    (first, *others) = said.items() or [("", None)]
    for other in others:
        if other[1] != first[1]:
            raise ConfigError(
                f"{where}: {first[0]} and {other[0]} disagree ({shown(first[1])} and {shown(other[1])}): keep the correct one."
            )


def _scaling(rope: Mapping[str, Any], found: Mapping[str, Any], kind: str, where: str) -> dict[str, Any] | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"{where} says partial_rotary_factor={shown(rope['partial_rotary_factor'])}: jaxllm supports only 1.")
    if rope_type == "default":
        return None
    if not isinstance(rope_type, str) or rope_type not in ROPE_SCALINGS:
        raise ConfigError(f"{where} says rope_type={shown(rope_type)}: jaxllm supports {_listed(['default', *ROPE_SCALINGS])}.")
    for key, allowed in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if rope.get(key) is not None and rope[key] is not allowed:
            raise ConfigError(f"{where} says {key}={shown(rope[key])}, which jaxllm does not support: use another model.")
    longest = found.get("max_position_embeddings", KINDS[kind].defaults["max_position_embeddings"])
    original = "original_max_position_embeddings"
    _refuse_disagreement(
        {key: said[original] for key, said in (("it", rope), ("the config", found)) if original in said}, where
    )
    given = {key: value for key, value in rope.items() if value is not None}
    filled = {**hf_kinds.YARN_DEFAULTS, original: found.get(original, longest), **given}
    pairs = ROPE_SCALINGS[rope_type].items()
    names = {ours: theirs for ours, theirs in pairs if theirs in filled or theirs != "attention_factor"}
    section: dict[str, Any] = {ours: _number(filled, theirs, where) for ours, theirs in names.items()}
    if (positions := section.get("original_max_position")) is not None:
        whole = {original: int(positions) if positions == int(positions) else positions}
        section["original_max_position"] = _integer(whole, original, where)
    return section if rope_type == "llama3" else {"rope_type": rope_type, **section}


def _integer(found: Mapping[str, Any], key: str, where: str, at_most: int = INT32, at_least: int = 1) -> int:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{where} says {key}={shown(value)}: it should be a whole number of at least {at_least}.")
    if value > at_most:
        raise ConfigError(f"{where} says {key}={shown(value)}: it should be at most {at_most:,}.")
    return value


def _switch(found: Mapping[str, Any], key: str, where: str) -> bool:
    if (value := found.get(key)) not in (True, False, None):
        raise ConfigError(f"{where} says {key}={shown(value)}: it should be true or false.")
    return bool(value)


def _number(found: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = found.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e15:
        raise ConfigError(f"{where} says {key}={shown(value)}: it should be a number above 0, and at most 1e15.")
    return float(value)


# -------------------------------------------------------------------------------------------------------- sliding windows

SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(found: Mapping[str, Any], defaults: Mapping[str, Any], windows: Windows, where: str) -> dict[str, Any]:
    """WINDOWS of the `model` section, by a config.json and transformers' values of missing keys. A window that is as long as
    the context is none.

    Raises:
      ConfigError: a layer is of another kind than attention, or the kinds are in an order that WINDOWS cannot say.
    """
    said = {**defaults, **found}
    window, longest, layers = said.get("sliding_window"), said["max_position_embeddings"], said.get("num_hidden_layers")
    types = _layer_types(found, windows, where)
    if "switched" in windows and not said.get("use_sliding_window"):
        window = None
    if window is None or not isinstance(layers, int):
        if SLIDING in types:
            raise ConfigError(f"{where} says layer_types with {SLIDING} and no sliding_window: get the file again.")
        return dict(WINDOWS)
    window = _integer(said, "sliding_window", where)
    if windows == "none":
        raise ConfigError(f"{where} says sliding_window={window}, which its class does not read: remove it.")
    if isinstance(longest, int) and window >= longest and windows != "pattern":
        return dict(WINDOWS)
    if not types:
        types = _default_types(said, windows, layers, where)
    if len(types) != layers:
        raise ConfigError(f"{where} says num_hidden_layers={layers} and layer_types for {len(types)}: get the file again.")
    if SLIDING not in types:
        return dict(WINDOWS)
    every, first = _order(types, where)
    return {"sliding_window": window, "full_attention_every": every, "full_attention_first": first}


def window_keys(model: Mapping[str, Any], windows: Windows, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a config.json for the windows of a `model` section. Those of `config`, the other keys, are changed only if they
    would give a network without windows some.
    """
    window = model.get("sliding_window")
    every, first = model.get("full_attention_every"), model.get("full_attention_first") or 0
    layers = model["num_layers"]
    if window is None and windows == "pattern":
        # The class reads sliding_window even where no layer has one.
        return {"layer_types": [FULL] * layers}
    if window is None:
        is_on = windows == "all" or ("switched" in windows and config.get("use_sliding_window"))
        longest, theirs = config.get("max_position_embeddings"), config.get("sliding_window")
        if not is_on or theirs is None or (isinstance(longest, int) and theirs >= longest):
            return {}
        off = {"sliding_window": None, **({"use_sliding_window": False} if "switched" in windows else {})}
        return {**off, **({"layer_types": [FULL] * layers} if config.get("layer_types") else {})}
    found: dict[str, Any] = {"sliding_window": window}
    types = [FULL if n < first or (every and (n + 1) % every == 0) else SLIDING for n in range(layers)]
    if windows in ("switched", "pattern"):
        found["layer_types"] = types
    if "switched" in windows:
        found["use_sliding_window"] = True
    if windows == "switched":
        found["max_window_layers"] = first
    return found


def can_say(model: Mapping[str, Any], windows: Windows) -> bool:
    """Whether a class can say the windows of a `model` section."""
    if model.get("sliding_window") is None:
        return True
    has_full = bool(model.get("full_attention_every") or model.get("full_attention_first"))
    return windows in ("switched", "pattern") or ("all" in windows and not has_full)


def _layer_types(found: Mapping[str, Any], windows: Windows, where: str) -> list[str]:
    types = found.get("layer_types") or []
    if not isinstance(types, list):
        raise ConfigError(f"{where} says layer_types={shown(types)}: it should be a list of names.")
    allowed = {FULL, *([SLIDING] if windows in ("switched", "pattern") else [])}
    if other := [of_layer for of_layer in types if not isinstance(of_layer, str) or of_layer not in allowed]:
        raise ConfigError(f"{where} says layer_types with {shown(other[0])}, which jaxllm does not support: use another model.")
    return types


def _default_types(said: Mapping[str, Any], windows: Windows, layers: int, where: str) -> list[str]:
    """layer_types as transformers fills them in."""
    if windows == "pattern":
        every = _integer(said, "sliding_window_pattern", where)
        return [FULL if (number + 1) % every == 0 else SLIDING for number in range(layers)]
    first = _integer(said, "max_window_layers", where, at_least=0) if windows == "switched" else 0
    return [FULL if number < first else SLIDING for number in range(layers)]


def _order(types: list[str], where: str) -> tuple[int | None, int]:
    """(full_attention_every, full_attention_first)"""
    is_full, layers = [of_layer == FULL for of_layer in types], range(len(types))
    first = is_full.index(False)
    later = [number + 1 for number in layers[first:] if is_full[number]]
    for every in divisors(math.gcd(*later))[1:] if later else (None,):
        if is_full == [number < first or bool(every and (number + 1) % every == 0) for number in layers]:
            return every, first
    raise ConfigError(
        f"{where} says layer_types in an order that jaxllm does not support: it takes a full layer every so many layers, or "
        f"full layers at the start."
    )
