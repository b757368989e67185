"""Loads a model from disk onto the local devices, with the functions of a mesh. Evaluation and generation start here.

loaded = open_model("smollm2", ["parallel.tensor=3", "model.compute_dtype=float32"], sequence_length=1024)
loss, tokens = jax.jit(loaded.functions.loss_sum)(loaded.params, batch)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.cluster import distributed
from jaxllm.config import AUTO, Config, ConfigError, load_config, with_overrides
from jaxllm.config.hf_config import SHAPE_KEYS, VARIANTS
from jaxllm.data.stores import is_address
from jaxllm.machine.host import require_host_memory
from jaxllm.mesh.placement import mesh_on_hosts
from jaxllm.mesh.sharding import layout, weight_rules
from jaxllm.model.llama import Llama
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import merge_model, parameter_table
from jaxllm.parallel.types import Parallelized
from jaxllm.terminal import saying
from jaxllm.weights.safetensors import DTYPES
from jaxllm.weights.weights import Adapters, WeightsSource, find_weights, read_weights, without_lora

KEY = "--model"


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to compute."""

    config: Config
    """Resolved config: the folder's model section, and the mesh."""
    mesh: Mesh
    functions: Parallelized
    params: Any
    """Nested dict of arrays with the sharding that `functions` expects, in their stored dtype."""
    tokenizer: Path | None
    """The folder with tokenizer.json, if the model came with one."""
    generation: dict[str, Any]
    """The content of generation_config.json; {} without one."""
    description: str
    """Origin of the weights, for messages."""

    def __repr__(self) -> str:
        return f"<LoadedModel {self.description}, on {self.mesh.size} devices>"

    @property
    def model(self) -> Llama:
        return merge_model(self.config, self.params)


def open_model(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    sequence_length: int = 1024,
    step: int | None = None,
    adapter: Adapters = (),
) -> LoadedModel:
    """Opens a Hugging Face folder, a jaxllm folder, a run directory or one of its checkpoints, here or in a store, on the local
    devices.

    Without an override of parallel.*, the weights are sharded (ZeRO 3) over as many devices as divide them; with several
    processes over all. The default compute dtype is that of the training run or the stored dtype, with float32 for float16.
    Without an override of train.*, a microbatch is one sequence per data rank, and a batch has as many microbatches as the
    pipeline has stages.

    Args:
      overrides: `section.key=value` strings.
      sequence_length: length of the sequences to compute, unless train.sequence_length is overridden.
      step: the checkpoint of a run directory; default: the newest.
      adapter: a folder with a LoRA adapter in PEFT's format, or several, to be merged into the weights. A run with model.lora
        has its own merged in any case.

    Raises:
      ConfigError: there is no model, or it does not fit the mesh of the overrides.
    """
    source = find_weights(KEY, path, step, adapter)
    config = config_of(source, overrides, sequence_length)
    distributed.start(config.run)
    if is_address(str(path)):
        # Each host has listed the store for itself.
        distributed.require_same(source.description, f"found different checkpoints in {path}: give the address of one.")
    devices = jax.devices()
    if not _sets(overrides, "parallel."):
        config, devices = shared_out(config, devices)
    elif jax.process_count() == 1:
        # The mesh may have fewer devices than exist. Training refuses that as waste; here it is harmless. Too few for one data
        # rank are all kept, which resolving the config reports.
        others = _beside_data(config)
        devices = devices[: config.devices if config.parallel.data != AUTO else len(devices) // others * others or None]
    return load(source, config, devices, follows=not _sets(overrides, "train.global_batch_sequences"))


def config_of(source: WeightsSource, overrides: Sequence[str], sequence_length: int) -> Config:
    """Makes a config for using weights: the model of the weights, with the overrides applied. Uses no device."""
    # The matmul dtype is for training. FP8 would be refused on devices without FP8 that can run the model.
    model = {name: value for name, value in without_lora(source.model).items() if name not in ("name", "matmul_dtype")}
    if source.checkpoint is None:
        stored = "bfloat16" if source.outline.common_dtype == DTYPES["BF16"] else "float32"
        model = {"compute_dtype": stored, **model}
    train = {"steps": 1, "sequence_length": sequence_length, "microbatch_sequences": 1}
    # This config reads no text: the caller supplies token ids, one document per sequence.
    data = {"source": "given", "mask_documents": False}
    values = with_overrides({"model": model, "train": train, "data": data}, overrides)
    _require_its_shape(source, values["model"])
    sizes, micro = values.get("parallel") or {}, values["train"]["microbatch_sequences"]
    factors = (micro, sizes.get("data"), sizes.get("pipe"), sizes.get("replica"))
    batch = math.prod(size for size in factors if isinstance(size, int) and size > 0)
    values["train"].setdefault("global_batch_sequences", batch)
    return load_config(values)


def _require_its_shape(source: WeightsSource, model: Mapping[str, Any]) -> None:
    """Overrides may change how a model computes, but not its shapes: rows of zeros would be counted as tokens, for example."""
    for key in ("name", "lora", *SHAPE_KEYS):
        has = None if key in ("name", "lora") else source.model.get(key, VARIANTS.get(key))
        if model.get(key, VARIANTS.get(key)) != has:
            weights = "is a model already" if key == "name" else f"has model.{key}={has}"
            raise ConfigError(
                f"model.{key}={model[key]} cannot be changed here, as {source.description} {weights}: leave it out."
            )


def load(source: WeightsSource, config: Config, devices: list[jax.Device], follows: bool) -> LoadedModel:
    """Args: follows: the global batch is one microbatch per data rank and stage, for any number of them."""
    p, train = config.parallel, config.train
    others = _beside_data(config)
    if follows and p.data == AUTO and len(devices) % others == 0:
        batch = (train.microbatch_sequences or 1) * (len(devices) // others) * p.pipe * p.replica
        config = config.model_copy(update={"train": train.model_copy(update={"global_batch_sequences": batch})})
    config = config.resolve(len(devices))
    mesh = mesh_on_hosts(config.parallel, devices)
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
    like = functions.master
    if source.merges or source.checkpoint is None:
        dtype_of = source.merged().dtype
        like = jax.tree.map(lambda p, x: x.update(dtype=dtype_of(tuple(p.path.split(".")))), functions.table, like)
    if devices[0].platform == "cpu":
        size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        require_host_memory(size_bytes * jax.local_device_count() // jax.device_count(), f"The weights of {source.description}")
    outline = source.outline
    with saying(lambda: f"still reading {outline.description}" if jax.process_index() == 0 else None):
        params = read_weights(source, like, functions.table)
    return LoadedModel(config, mesh, functions, params, outline.tokenizer, outline.generation, outline.description)


def _beside_data(config: Config) -> int:
    """Number of devices per data rank."""
    p = config.parallel
    return p.pipe * p.context * p.tensor * p.replica


def shared_out(config: Config, devices: list[jax.Device]) -> tuple[Config, list[jax.Device]]:
    """Config of a mesh along `data` only, with ZeRO 3 weights, over as many devices as divide them: a network without padding
    keeps its shards. Devices of other processes cannot be left out.
    """
    parallel = config.parallel.model_copy(update={"data": AUTO, "zero": 3})
    if len({device.process_index for device in devices}) == 1:
        table = jax.tree.leaves(parameter_table(config)[1])

        def is_even(ranks: int) -> bool:
            of_ranks = parallel.model_copy(update={"data": ranks})
            return not any(layout(p, weight_rules(config.model, of_ranks), of_ranks).padding for p in table)

        devices = devices[: max(filter(is_even, range(1, len(devices) + 1)))]
    return config.model_copy(update={"parallel": parallel}), devices


def _sets(overrides: Sequence[str], key: str) -> bool:
    return any(override.strip().startswith(key) for override in overrides)
