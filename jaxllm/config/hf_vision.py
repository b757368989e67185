"""What the config.json of LLaVA says, and the names of tensors in its folders. No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxllm.config.errors import ConfigError
from jaxllm.config.model_config import VisionConfig
from jaxllm.config.types import Count, PositiveFloat, PositiveInt, Switch
from jaxllm.untrusted import RefusedInput, checked, shown

LLAVA, ARCHITECTURE = "llava", "LlavaForConditionalGeneration"
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_Act = Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class _Clip:
    """What is read of `vision_config`, with the defaults of transformers' class."""

    num_hidden_layers: PositiveInt = 12
    hidden_size: PositiveInt = 768
    intermediate_size: PositiveInt = 3072
    num_attention_heads: PositiveInt = 12
    num_channels: Literal[3] = 3
    image_size: PositiveInt = 224
    patch_size: PositiveInt = 32
    hidden_act: _Act = "quick_gelu"
    layer_norm_eps: PositiveFloat = 1e-5


@dataclass(frozen=True)
class _Siglip(_Clip):
    patch_size: PositiveInt = 16
    hidden_act: _Act = "gelu_pytorch_tanh"
    layer_norm_eps: PositiveFloat = 1e-6


_KEYS = {
    **{key: key for key in ("hidden_size", "intermediate_size", "image_size", "patch_size")},
    **{"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps"},
}
"""Names in `model.vision` and in `vision_config`."""
_TOWERS = {"clip_vision_model": _Clip, "siglip_vision_model": _Siglip}
_NO_TOWER = {
    **{"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    **{"image_size": 336, "patch_size": 14},
}
"""transformers' tower of a config.json without vision_config."""


@dataclass(frozen=True)
class _Llava:
    image_token_index: Count | None = None
    image_token_id: Count | None = None
    projector_hidden_act: _Act = "gelu"
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    vision_feature_layer: Annotated[int, Field(strict=True)] = -2
    multimodal_projector_bias: Switch = True


_TEXT_SIZES = {
    "llama": {"intermediate_size": 11008, "vocab_size": 32000},
    "mistral": {"intermediate_size": 14336, "vocab_size": 32000},
}
"""Sizes of transformers' classes, beside width 4096, 32 layers and 32 heads, which `text_config` may leave out."""


def text_config(found: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config.json of the network behind a vision tower, or `found` itself where there is no tower.

    Raises:
      ConfigError: LLaVA's has no such part.
    """
    if found.get("model_type") != LLAVA and found.get("architectures") != [ARCHITECTURE]:
        return found
    text = found.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where} says text_config={shown(text)}: it should be an object, the config of the text model.")
    text = {"model_type": "llama", **text}
    if isinstance(kind := text["model_type"], str) and kind in _TEXT_SIZES:
        sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, **_TEXT_SIZES[kind]}
        text = {**sizes, "rms_norm_eps": 1e-6, **text}
    whole = {key: found[key] for key in ("quantization_config", "auto_map") if key in found}
    # Either may say it.
    tied = found.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    return {**text, **whole, **({} if tied is None else {"tie_word_embeddings": tied})}


def vision_section(found: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The `model.vision` section of a config.json; None if there is no vision tower.

    Raises:
      ConfigError: a key has another type, or the tower is not supported.
    """
    if text_config(found, where) is found:
        return None
    tower = found.get("vision_config") or {"model_type": "clip_vision_model", **_NO_TOWER}
    kind = tower.get("model_type") if isinstance(tower, Mapping) else None
    if not isinstance(kind, str) or kind not in _TOWERS:
        raise ConfigError(f"{where} says vision_config of model_type={shown(kind)}: jaxllm supports {' and '.join(_TOWERS)}.")
    try:
        return _section(kind, checked(dict(tower), _TOWERS[kind]), checked(dict(found), _Llava)).model_dump(mode="json")
    except RefusedInput as error:
        raise ConfigError(f"{where} has a vision tower that is not supported ({error}): use another model.") from None


def _section(kind: str, its: _Clip, said: _Llava) -> VisionConfig:
    tokens = {token for token in (said.image_token_index, said.image_token_id) if token is not None}
    if len(tokens) > 1:
        raise RefusedInput("image_token_index and image_token_id disagree")
    layer, layers = said.vision_feature_layer, its.num_hidden_layers
    section = {
        **{ours: getattr(its, theirs) for ours, theirs in _KEYS.items()},
        "kind": kind.split("_")[0],
        "image_token_id": tokens.pop() if tokens else 32000,
        "used_layers": layer if layer >= 0 else layers + 1 + layer,
        "activation": _ACTIVATIONS[its.hidden_act],
        "drop_first": said.vision_feature_select_strategy == "default",
        "projector_activation": _ACTIVATIONS[said.projector_hidden_act],
        "projector_bias": said.multimodal_projector_bias,
    }
    return checked(section, VisionConfig)


def llava_config(vision: Mapping[str, Any], text: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """The content of LLaVA's config.json.

    Args:
      vision: the `model.vision` section.
      text: the config.json of the network behind the tower.
      original: the config.json that the model came with. Its keys beyond the shape are kept.
    """
    section, theirs = VisionConfig.model_validate(vision), {ours: name for name, ours in _ACTIVATIONS.items()}
    tower: dict[str, Any] = {
        **(original.get("vision_config") or {}),
        **{name: getattr(section, ours) for ours, name in _KEYS.items()},
        "model_type": f"{section.kind}_vision_model",
        "num_channels": section.channels,
        "hidden_act": theirs[section.activation],
        # Its pooling head makes none of the features.
        **({"vision_use_head": False} if section.kind == "siglip" else {}),
    }
    return {
        **{key: value for key, value in original.items() if key != "image_token_id"},
        "architectures": [ARCHITECTURE],
        "model_type": LLAVA,
        "text_config": dict(text),
        "vision_config": tower,
        "image_token_index": section.image_token_id,
        "image_seq_length": section.tokens_per_image,
        "projector_hidden_act": theirs[section.projector_activation],
        "vision_feature_select_strategy": "default" if section.drop_first else "full",
        "vision_feature_layer": section.used_layers - section.num_layers - 1,
        "multimodal_projector_bias": section.projector_bias,
        **{key: text[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype")},
    }


# ------------------------------------------------------------------------------------------------------------ tensors' names

_TO_OURS = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
_TO_THEIRS = (
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("vision_tower.", "vision_tower.vision_model."),
)


def without_prefix(name: str) -> str:
    """A tensor's name in the table of parameters, from one in a LLaVA folder: those of the Hub, or transformers 5 in memory."""
    return _replaced(name, _TO_OURS).replace("vision_tower.vision_model.", "vision_tower.", 1)


def with_prefix(name: str) -> str:
    """A tensor's name in a LLaVA folder, as the Hub has it."""
    return _replaced(name, _TO_THEIRS)


def _replaced(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    found = next((pair for pair in prefixes if name.startswith(pair[0])), None)
    return name if found is None else found[1] + name.removeprefix(found[0])
