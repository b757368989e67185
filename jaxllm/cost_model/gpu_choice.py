"""The GPU that a user names: one of the table, or one that a YAML file describes."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxllm.config.errors import ConfigError, nearest
from jaxllm.cost_model.hardware import GPUS, Gpu
from jaxllm.untrusted import RefusedInput, one_line, read_yaml, reason_of


def find_gpu(name: str) -> Gpu:
    """The GPU for a value of `--gpu`: one of GPUS, or a YAML file (ends in .yaml or .yml) that describes another.

    In such a file, `like: NAME` gives the default of every field; any field of Gpu and Chip may follow by its name, and any
    entries of dense_flops. Bytes, seconds and FLOP/s are plain numbers:

        like: h100-80gb
        name: h20-96gb
        memory_bytes: 102_625_181_696
        dense_flops: {bfloat16: 148.0e+12}
        multiprocessors: 78

    Raises:
      ConfigError: the name, file or field does not exist, or a value is invalid.
    """
    if name.endswith((".yaml", ".yml")):
        return _gpu_from_file(Path(name))
    if name not in GPUS:
        near = [known for known in GPUS if name and known.startswith(name.lower())] or difflib.get_close_matches(name, GPUS)
        choose = f"did you mean {near[0]}? Choose" if near else "choose"
        raise ConfigError(
            f"There is no GPU {name or repr(name)}: {choose} one of {', '.join(GPUS)}, or a YAML file of your own."
        )
    return GPUS[name]


def _gpu_from_file(path: Path) -> Gpu:
    try:
        given = read_yaml(path)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{path} cannot be read as the description of a GPU: {reason_of(error)}.") from None
    if not isinstance(given, dict) or not isinstance(given.get("like"), str) or given["like"] not in GPUS:
        raise ConfigError(f"{path} does not say which GPU it is like: write like: and one of {', '.join(GPUS)}.")
    base = GPUS[given.pop("like")]
    on_chip, on_gpu = vars(base.chip), {name: value for name, value in vars(base).items() if name != "chip"}
    known = on_chip | on_gpu
    for key, value in given.items():
        if key not in known:
            hint = nearest(key, known, f"it may have {', '.join(sorted(known))}.")
            raise ConfigError(f"Unknown key {key} in {path}: {hint}")
        _check_value(path, key, value, known[key])
    chip = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key in on_chip}
    named = {"name": one_line(path.stem), "source": str(path), "device_kind": ""}
    rest = named | {key: given[key] for key in given if key in on_gpu}
    if "dense_flops" in given:
        rest["dense_flops"] = MappingProxyType({**base.dense_flops, **given["dense_flops"]})
    gpu = dataclasses.replace(base, **rest, chip=dataclasses.replace(base.chip, **chip))
    if gpu.capacity_bytes <= 0:
        raise ConfigError(f"memory_bytes={gpu.memory_bytes} in {path} leaves no memory for a step: it should be above 1.1 GiB.")
    return gpu


def _check_value(path: Path, key: str, value: Any, example: Any) -> None:
    """Raises ConfigError unless the value has the example's type: text, numbers above zero, or several of them."""
    is_number = lambda x: type(x) in (int, float) and 0 < x < 1e30  # noqa: E731
    if isinstance(example, str):
        right, should = isinstance(value, str) and value.isprintable(), "text on one line"
    elif isinstance(example, Mapping):
        right = isinstance(value, dict) and all(dtype in example and is_number(x) for dtype, x in value.items())
        should = f"numbers above zero for any of {', '.join(example)}"
    elif isinstance(example, tuple):
        right = isinstance(value, list) and [type(x) for x in value] == [int, int] and value[0] > 0 <= value[1] < 10
        should = "two whole numbers, such as [9, 0]"
    elif isinstance(example, int):
        right, should = type(value) is int and is_number(value), "a whole number above zero"
    else:
        # YAML 1.1 reads 3.35e12 as text, because the exponent has no sign.
        right, should = is_number(value), "a number above zero; with an exponent, write 1.0e+12"
    if not right:
        raise ConfigError(f"{key}={value} in {path} is not valid: it should be {should}.")
