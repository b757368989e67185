"""Sliding windows in Hugging Face's config.json: which layers have one, read and written. No JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_kinds import WINDOWS, Windows
from jaxllm.config.types import divisors
from jaxllm.untrusted import shown

SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(found: Mapping[str, Any], defaults: Mapping[str, Any], windows: Windows, where: str) -> dict[str, Any]:
    """WINDOWS of the `model` section. A window that is as long as the context is none.

    Args:
      found: the content of a config.json.
      defaults: transformers' values of missing keys.
      windows: what the class can say.

    Raises:
      ConfigError: a layer is of another kind than attention, or the kinds are in an order that WINDOWS cannot say.
    """
    said = {**defaults, **found}
    window, longest, layers = said.get("sliding_window"), said["max_position_embeddings"], said.get("num_hidden_layers")
    types = _layer_types(found, windows, where)
    if windows == "switched" and not said.get("use_sliding_window"):
        window = None
    if window is None or not isinstance(layers, int):
        return _nothing_slides(types, where)
    _require_whole("sliding_window", window, 1, where)
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
    """Keys of a config.json for the windows of a `model` section.

    Args:
      config: the other keys; those of a network without windows are changed only if they would give it some.
    """
    window = model.get("sliding_window")
    every, first = model.get("full_attention_every"), model.get("full_attention_first") or 0
    layers = model["num_layers"]
    if window is None and windows == "pattern":
        # The class reads sliding_window even where no layer has one.
        return {"layer_types": [FULL] * layers}
    if window is None:
        is_on = windows == "all" or (windows == "switched" and config.get("use_sliding_window"))
        longest, theirs = config.get("max_position_embeddings"), config.get("sliding_window")
        if not is_on or theirs is None or (isinstance(longest, int) and theirs >= longest):
            return {}
        off = {"sliding_window": None, **({"use_sliding_window": False} if windows == "switched" else {})}
        return {**off, **({"layer_types": [FULL] * layers} if config.get("layer_types") else {})}
    found: dict[str, Any] = {"sliding_window": window}
    types = [FULL if n < first or (every and (n + 1) % every == 0) else SLIDING for n in range(layers)]
    if windows in ("switched", "pattern"):
        found["layer_types"] = types
    if windows == "switched":
        found |= {"use_sliding_window": True, "max_window_layers": first}
    return found


def can_say(model: Mapping[str, Any], windows: Windows) -> bool:
    """Whether a class can say the windows of a `model` section."""
    if model.get("sliding_window") is None:
        return True
    has_full = bool(model.get("full_attention_every") or model.get("full_attention_first"))
    return windows in ("switched", "pattern") or (windows == "all" and not has_full)


def _layer_types(found: Mapping[str, Any], windows: Windows, where: str) -> list[str]:
    types = found.get("layer_types") or []
    if not isinstance(types, list):
        raise ConfigError(f"{where} says layer_types={shown(types)}: it should be a list of names.")
    allowed = {FULL, *([SLIDING] if windows in ("switched", "pattern") else [])}
    if other := [of_layer for of_layer in types if not isinstance(of_layer, str) or of_layer not in allowed]:
        raise ConfigError(f"{where} says layer_types with {shown(other[0])}, which jaxllm does not support: use another model.")
    return types


def _nothing_slides(types: list[str], where: str) -> dict[str, Any]:
    if SLIDING in types:
        raise ConfigError(f"{where} says layer_types with {SLIDING} and no sliding_window: get the file again.")
    return dict(WINDOWS)


def _require_whole(key: str, value: Any, least: int, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where} says {key}={shown(value)}: it should be a whole number of at least {least}.")


def _default_types(said: Mapping[str, Any], windows: Windows, layers: int, where: str) -> list[str]:
    """layer_types as transformers fills them in."""
    if windows == "pattern":
        every = said["sliding_window_pattern"]
        _require_whole("sliding_window_pattern", every, 1, where)
        return [FULL if (number + 1) % every == 0 else SLIDING for number in range(layers)]
    first = said["max_window_layers"] if windows == "switched" else 0
    _require_whole("max_window_layers", first, 0, where)
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
