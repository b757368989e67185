"""LoRA adapters in PEFT's folder format, and models with adapters merged into them. No JAX.

PEFT's folder has adapter_config.json and adapter_model.safetensors, with A as [rank, in] and B as [out, rank]:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_config import read_object
from jaxllm.config.hub import is_hub_name
from jaxllm.config.model_spec import LORA_A, LORA_B, LORA_TARGETS
from jaxllm.config.types import PositiveFloat, PositiveInt
from jaxllm.untrusted import RefusedInput, checked, shown
from jaxllm.weights.folder import Entry, Folder, HuggingFaceFolder, Index, require_shape, tensors_in
from jaxllm.weights.safetensors import FOR_TORCH, Elements, new_file
from jaxllm.weights.streaming import Move, stream, total_bytes

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNUSED: dict[str, Sequence[Any]] = {
    "bias": ("none", None),
    # Others change the base model's matrices, as PEFT does again when it loads the adapter, or say what jaxllm does not know.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Keys of PEFT's LoraConfig (0.21) that say what A and B mean, with the values of a plain LoRA. Of every other key, also one
that a later PEFT has, those are OFF."""
CONVERTED = ("pissa", "olora", "corda")
"""Starts whose adapters PEFT converts."""
OFF = (None, False, "", [], {})
NO_PART = {
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "peft_version", "runtime_config"),
    # A and B are there for the modules that are adapted, and their names say which; the rest is of training.
    *(
        "target_modules",
        "exclude_modules",
        "layers_pattern",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "ensure_weight_tying",
    ),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Keys that have no part in what A and B mean."""


@dataclass(frozen=True)
class AdapterFile:
    """What of adapter_config.json jaxllm applies."""

    peft_type: Literal["LORA"]
    r: PositiveInt
    lora_alpha: PositiveFloat
    use_rslora: bool | None = None


@dataclass
class AdapterFolder(HuggingFaceFolder):
    """An adapter for the model of the `model` section, which says its rank, alpha and targets in `lora`."""

    def __post_init__(self):
        super().__post_init__()
        self.entries = {path: entry for path, entry in self.entries.items() if entry.is_lora}


def open_adapter(key: str, text: str, model: Mapping[str, Any]) -> AdapterFolder:
    """Opens an adapter in PEFT's format and checks it. It does not read values. ConfigError if the folder is no adapter, uses
    what jaxllm does not support, or is for another network.

    Args:
      key: the option or key that the user set to `text`, for error messages.
      model: the `model` section of the network that it is for.
    """
    path = Path(text)
    if not (path / ADAPTER_CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise ConfigError(f"{key}={text} is no adapter: give a folder with {ADAPTER_CONFIG} and {WEIGHTS}, as PEFT saves it.")
    content, where = read_object(path / ADAPTER_CONFIG), path / ADAPTER_CONFIG
    try:
        said = checked({name: content[name] for name in AdapterFile.__dataclass_fields__ if name in content}, AdapterFile)
    except RefusedInput as error:
        raise ConfigError(f"{where} is not the config of a LoRA adapter ({error}): use another adapter.") from None
    for name in sorted(content.keys() - NO_PART - AdapterFile.__dataclass_fields__.keys()):
        value = content[name]
        if (value.lower() if isinstance(value, str) else value) not in UNUSED.get(name, OFF):
            converts = name == "init_lora_weights" and str(value).lower().startswith(CONVERTED)
            way = ", or let PEFT save it as a plain LoRA (path_initial_model_for_weight_conversion)" if converts else ""
            raise ConfigError(
                f"{where} says {shown(name)}={shown(value)}, which jaxllm does not support: use another adapter{way}."
            )
    tensors = tensors_in(path, [WEIGHTS], "get the file again")
    # The names of the tensors, because target_modules may be a pattern.
    targets = [target for target in LORA_TARGETS if any(f".{target}.lora_A." in name for name in tensors)]
    if model.get("num_experts") and (on := {"gate_proj", "up_proj", "down_proj"} & {*targets}):
        raise ConfigError(f"{path} adapts {min(on)}, and adapters of experts are not supported: use one of attention alone.")
    if not targets:
        raise ConfigError(f"{path / WEIGHTS} holds no adapter of {', '.join(LORA_TARGETS)}: use another adapter.")
    alpha = said.lora_alpha * math.sqrt(said.r) if said.use_rslora else said.lora_alpha
    section = {**model, "lora": {"rank": said.r, "alpha": alpha, "targets": targets}}
    folder = AdapterFolder(path, str(path), section, tensors=tensors)
    expected = {name: entry for entry in folder.entries.values() for name in entry.tensors}
    for name, entry in expected.items():
        if name not in tensors:
            raise ConfigError(f"{path} has no tensor {name}: it is an adapter of another network, or of some layers only.")
        require_shape(tensors[name], entry.their_shape)
    if extra := sorted(tensors.keys() - expected.keys()):
        raise ConfigError(f"{path} holds {extra[0]}, which jaxllm has no place for: it is an adapter of another network.")
    return folder


def write_adapter(folder: Folder, aside: Path, dtype: np.dtype | None, base: str | None) -> tuple[list[Move], int]:
    """Writes the adapter of a folder whose `model` section has `lora`: (the tensors written, their bytes).

    Args:
      aside: an existing folder to write into.
      base: path of the base model, or its name on the Hub, for PEFT.
    """
    moves, tensors = [], {}
    for entry in folder.entries.values():
        if entry.is_lora:
            stored = dtype or folder.dtype(entry.path)
            for number, name in enumerate(entry.tensors):
                moves.append(Move(name, folder.array(entry, number), entry.matrix, stored, name))
                tensors[name] = (stored, entry.their_shape)
    layout = {WEIGHTS: tensors}
    stream(moves, layout, aside, "to PEFT", partial(new_file, metadata=FOR_TORCH))
    lora = folder.model["lora"]
    # PEFT has the commit in a key of its own: huggingface.co/docs/peft/package_reference/config.
    name, _, revision = base.partition("@") if base and is_hub_name(base) and not Path(base).exists() else (base, "", "")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": lora["rank"],
        "lora_alpha": int(lora["alpha"]) if float(lora["alpha"]).is_integer() else lora["alpha"],
        "target_modules": list(lora["targets"]),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (aside / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return moves, total_bytes(layout)


@dataclass
class MergedFolder(Folder):
    """A model with adapters merged into its matrices: W + alpha / rank A B for each, added in float32 and rounded once."""

    base: Folder = field(kw_only=True)
    adapters: Sequence[tuple[Folder, float]] = field(kw_only=True)
    """Folders with the matrices of adapters, and their scales."""

    def __post_init__(self):
        super().__post_init__()
        self._factors: tuple[tuple[str, ...], list[tuple[np.ndarray, np.ndarray, float]]] = ((), [])

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        return self.base.dtype(path)

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        index, factors = [slice(*span) for span in self.box(path, index)], self._factors_of(path)
        weight, columns, (layers, *dims) = self.base.read(path, index), self.entries[path].columns, index
        merged = weight
        for a, b, scale in factors:
            a, b = a[(layers, *dims[:columns])], b[(layers, slice(None), *dims[columns:])]
            product = a.reshape(len(a), -1, a.shape[-1]) @ b.reshape(*b.shape[:2], -1)
            merged = merged.astype(np.float32) + np.float32(scale) * product.reshape(weight.shape)
        return merged.astype(weight.dtype)

    def _factors_of(self, path: tuple[str, ...]) -> list[tuple[np.ndarray, np.ndarray, float]]:
        """A and B of all layers, float32, and the scale, of each adapter. A run's are read before its matrix: it keeps the
        last parameter read."""
        if self._factors[0] != path:
            of_a, of_b = ((*path[:-1], path[-1] + end) for end in (LORA_A, LORA_B))
            found = [(f.read(of_a), f.read(of_b), scale) for f, scale in self.adapters if of_a in f.entries]
            self._factors = path, [(a.astype(np.float32), b.astype(np.float32), scale) for a, b, scale in found]
        return self._factors[1]

    def slab(self, entry: Entry, number: int) -> Elements:
        return self.array(entry, number) if entry.columns else self.base.slab(entry, number)
