"""Reads the description of a kind of GPU that is not in the table: `--gpu FILE.yaml`."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import RefusedInput, read_yaml, reason_of

Gpu = TypeVar("Gpu")


def gpu_from_file(path: Path, known_gpus: Mapping[str, Gpu]) -> Gpu:
    """The GPU that a file describes; find_gpu says how. `known_gpus`: those that it may be like, by name."""
    try:
        given = read_yaml(path)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{path} cannot be read as the description of a GPU: {reason_of(error)}.") from None
    if not isinstance(given, dict) or not isinstance(given.get("like"), str) or given["like"] not in known_gpus:
        raise ConfigError(f"{path} does not say which GPU it is like: write like: and one of {', '.join(known_gpus)}.")
    base: Any = known_gpus[given.pop("like")]
    on_chip = {field.name for field in dataclasses.fields(base.chip)}
    known = on_chip | {field.name for field in dataclasses.fields(base)} - {"chip"}
    for key, value in given.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it may have {', '.join(sorted(known))}."
            raise ConfigError(f"Unknown key {key} in {path}: {hint}")
        _check_value(path, key, value, getattr(base.chip if key in on_chip else base, key))
    chip = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key in on_chip}
    rest = {key: value for key, value in given.items() if key not in on_chip}
    if "dense_flops" in rest:
        rest["dense_flops"] = MappingProxyType({**base.dense_flops, **rest["dense_flops"]})
    named = {"name": path.stem, "source": str(path), "device_kind": ""}
    gpu = dataclasses.replace(base, **{**named, **rest, "chip": dataclasses.replace(base.chip, **chip)})
    if gpu.capacity_bytes <= 0:
        raise ConfigError(f"memory_bytes={gpu.memory_bytes} in {path} leaves no memory for a step: it should be above 1.1 GiB.")
    return gpu


def _check_value(path: Path, key: str, value: Any, example: Any) -> None:
    """Raises ConfigError unless the value has the example's type: text, numbers above zero, or several of them."""
    is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf  # noqa: E731
    is_whole = lambda x: isinstance(x, int) and is_number(x)  # noqa: E731
    if isinstance(example, str):
        right, should = isinstance(value, str), "text"
    elif isinstance(example, Mapping):
        right = isinstance(value, dict) and all(dtype in example and is_number(x) for dtype, x in value.items())
        should = f"numbers above zero for any of {', '.join(example)}"
    elif isinstance(example, tuple):
        right = (
            isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value) and value[0] > 0 <= value[1] < 10
        )
        should = "two whole numbers, such as [9, 0]"
    elif isinstance(example, int):
        right, should = is_whole(value), "a whole number above zero"
    else:
        # YAML 1.1 reads 3.35e12 as text, because the exponent has no sign.
        right, should = is_number(value), "a number above zero; with an exponent, write 1.0e+12"
    if not right:
        raise ConfigError(f"{key}={value} in {path} is not valid: it should be {should}.")
