"""jaxllm.load_model: the network of a folder or a run, and its way back to a disk.

model = load_model("smollm2", compute_dtype="float32")     # an NNX Llama
logits_BSV = model(token_ids_BS)
model.save_pretrained("smollm2-changed")
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxllm.checkpoint.arrays import names_of
from jaxllm.cluster import distributed
from jaxllm.config import AUTO, ConfigError
from jaxllm.model.llama import Llama
from jaxllm.weights.folder import Folder, Index
from jaxllm.weights.hf_convert import write_hf
from jaxllm.weights.load_model import config_of, load, shared_out
from jaxllm.weights.safetensors import CODES
from jaxllm.weights.streaming import Conversion
from jaxllm.weights.weights import Adapters, about, dtype_named, find_weights, without_lora


class Origin:
    """What came with the weights. All are equal, so that models of two folders have one structure for JAX."""

    def __init__(self, outline: Folder):
        self.outline = outline

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


class PretrainedLlama(Llama):
    """A Llama that was read from a disk."""

    origin: Origin

    def save_pretrained(self, folder: str | Path, *, dtype: str | None = None, force: bool = False) -> Conversion:
        """Writes the present parameters as a Hugging Face folder, with the tokenizer and the other files of the model that was
        read. Needs all parameters in this process.

        Args:
          dtype: float32, bfloat16 or float16; default: that of the arrays.
          force: move an existing folder aside, to FOLDER.before-<n>.

        Raises:
          ConfigError: the folder exists or cannot be written, the files beside the weights are gone, or the parameters are
            those of another network, as with adapters beside the layers.
        """
        outline = self.origin.outline
        if outline.companions is not None and not outline.companions.is_dir():
            raise ConfigError(f"{outline.companions} is gone, which has the tokenizer of {outline.description}: put it back.")
        arrays = {names_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(self)))}
        # The dtypes that it was converted from do not hold for values that may have changed.
        names = {key: value for key, value in outline.hugging_face.items() if key != "dtypes"}
        said: dict[str, Any] = about(outline) | {"model": without_lora(outline.model), "hugging_face": names}
        present = _ArraysFolder(**said)
        if unlike := sorted(arrays.keys() ^ present.entries.keys()):
            name = ".".join(unlike[0])
            raise ConfigError(f"The model has other parameters than {outline.description}: {name} is one of them.")
        for path, array in arrays.items():
            if array.shape != (shape := present.entries[path].shape) or np.dtype(array.dtype) not in CODES:
                found = f"{'.'.join(path)} is {array.dtype} of shape {list(array.shape)}"
                raise ConfigError(f"{found}: only {list(shape)} of float32, bfloat16 or float16 can be written.")
        present.arrays = arrays
        return write_hf(present, str(folder), None if dtype is None else dtype_named(dtype), force=force)


class _ArraysFolder(Folder):
    """Arrays in this process."""

    arrays: dict[tuple[str, ...], jax.Array]

    def dtype(self, path: tuple[str, ...]) -> np.dtype:
        return np.dtype(self.arrays[path].dtype)

    def read(self, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        return np.asarray(self.arrays[path] if index is None else self.arrays[path][tuple(index)])


def load_model(
    path: str | Path,
    compute_dtype: str | None = None,
    parallel: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    adapter: Adapters = (),
) -> PretrainedLlama:
    """Loads the network of a folder or a run on this process's devices: an NNX module, called with token ids [B, S]. Its
    `save_pretrained(folder)` writes it for transformers.

    Args:
      compute_dtype: float32 or bfloat16; default: that of the training run, or the stored dtype (float32 for float16).
      parallel: keys of the config's parallel section, such as {"tensor": 2, "data": 4}; default: weights sharded over as
        many devices as divide them, as with ZeRO 3.
      step, adapter: as in open_model.

    Raises:
      ConfigError: there is no model, or it does not fit the mesh.
    """
    source = find_weights("load_model", path, step, adapter)
    sizes = {"data": 1, **(parallel or {})}
    overrides = [f"parallel.{key}={value}" for key, value in sizes.items()]
    if compute_dtype is not None:
        overrides.append(f"model.compute_dtype={compute_dtype}")
    # Any length works that the mesh can divide.
    config = config_of(source, overrides, 2 * math.prod(size for size in sizes.values() if isinstance(size, int)))
    distributed.start(config.run)
    devices = jax.local_devices()
    if parallel is None:
        config, devices = shared_out(config, devices)
    elif config.parallel.data != AUTO:
        devices = devices[: config.devices]
    model: Any = load(source, config, devices, follows=True).model
    model.__class__ = PretrainedLlama
    model.origin = Origin(source.outline)
    return model
