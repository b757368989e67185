"""What a config means on a mesh: every parameter, its two layouts, its bytes on one device, and where the mesh wastes work.

    report = inspect_config(config, gpus=16)
    Console().print(render(report))                 # inspect_text.py

Everything follows from the config and the parameter table. No device of the mesh is started, so any mesh can be looked at
anywhere. Counted are weights, gradients and moments; activations are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.compile.inspect_table import Bytes, ParameterLine, describe
from jaxllm.compile.inspect_warnings import Warned, matmul_warnings, network_warnings
from jaxllm.config import ATTENTION_RESULTS, Config, ModelConfig
from jaxllm.cost_model.activations import Held, bytes_per_token_and_layer, is_blockwise, policy_of
from jaxllm.cost_model.flops import parameter_count, train_flops_per_token
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.hosts import hosts_of, named_devices
from jaxllm.cost_model.precision import Row, precision_table
from jaxllm.display import readable
from jaxllm.mesh import TENSOR, ZERO_AXES, axis_sizes
from jaxllm.model.layers import Block, Ops, rotary_table
from jaxllm.model.llama import apply_block
from jaxllm.parallel.layer_stacking import stacking_of
from jaxllm.parallel.parameters import parameter_table
from jaxllm.parallel.vjp_residuals import extract
from jaxllm.runtime import distributed
from jaxllm.sharding import vocab_rows

REFERENCE_GPU = "h100-80gb"
"""Whose link and speed the times are of."""
REACHED = 0.5
"""Of its peak, what a well-shaped layer's forward pass computes at; a rule of thumb."""


@dataclass(frozen=True)
class Activations:
    """What remat leaves for the backward pass of one block, on one device."""

    policy: str
    kept: dict[str, float]
    """Bytes for each token and layer, on the device."""
    offloaded: dict[str, float]
    """The same, in the host's memory."""
    recomputed: tuple[str, ...]
    unnamed: float
    """Bytes of what has no name: policy `none` alone, and then all of it."""
    link_s: float
    """Time that the offloaded bytes of one token and layer take to the host; as much back."""
    compute_s: float
    """Time of the layer's forward pass for one token; the backward takes twice that."""


@dataclass(frozen=True)
class StateOffload:
    """parallel.offload_state, in bytes of one device and step."""

    what: str
    host: int
    """Lying in the host's memory."""
    to_device: int
    to_host: int
    link_s: float
    """Both ways one after the other; nothing hides it."""


@dataclass(frozen=True)
class Report:
    """The whole of `jaxllm inspect`."""

    mesh: dict[str, int]
    """Axis -> size, slow network to fast."""
    gpus: int
    gpus_per_host: int
    hosts: int
    hosts_because: str
    zero: int
    """The level asked for."""
    compute_dtype: str
    parameter_count: int
    """Without the rows that pad the vocabulary."""
    vocabulary_padding_rows: int
    parameters: tuple[ParameterLine, ...]
    bytes_per_device: Bytes
    activations: Activations
    state_offload: StateOffload
    precision: tuple[Row, ...]
    notes: tuple[str, ...]
    warnings: tuple[Warned, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {**asdict(self), "total_bytes_per_device": self.bytes_per_device.total}

    def __repr__(self) -> str:
        return f"<Report of {self.parameter_count:,} parameters on {axes_line(self.mesh)}>"


def inspect_config(config: Config, gpus: int | None = None, gpus_per_host: int | None = None) -> Report:
    """Works out a config on so many GPUs.

    Args:
      gpus: default: run.cpu_devices, else what the mesh in the config names, else (parallel.data=auto) the devices here.
      gpus_per_host: default: the largest divisor of gpus not above 8.

    Raises:
      ConfigError: the mesh is not that many devices, a parameter does not fit it, or hosts do not divide.
    """
    gpus = count_devices(config, gpus)
    config = config.resolve(gpus)
    per_host, because = hosts_of(gpus, gpus_per_host)
    sizes = axis_sizes(config.parallel)
    _, tree = parameter_table(config)
    table = jax.tree.leaves(tree)
    lines = tuple(describe(parameter, config) for parameter in table)
    padding = vocab_rows(config.model, config.parallel) - config.model.vocab_size
    held = sum((line.bytes_per_device for line in lines), Bytes(0, 0, 0, 0))
    return Report(
        mesh=sizes,
        gpus=gpus,
        gpus_per_host=per_host,
        hosts=gpus // per_host,
        hosts_because=because,
        zero=config.parallel.zero,
        compute_dtype=config.model.compute_dtype,
        parameter_count=parameter_count(config.model),
        vocabulary_padding_rows=padding,
        parameters=lines,
        bytes_per_device=held,
        activations=activations(config),
        state_offload=state_offload(config, held),
        precision=precision_table(config),
        notes=tuple(notes(config, lines, padding)),
        warnings=(*network_warnings(sizes, gpus, per_host), *matmul_warnings(config, lines)),
    )


def count_devices(config: Config, gpus: int | None) -> int:
    """How many devices to inspect for. Only parallel.data=auto, with no number given, asks JAX which are here."""
    named = named_devices(config, gpus)
    if named is None:
        distributed.start(config.run)
        return jax.device_count()
    return named


# ------------------------------------------------------------------------------------------------------------ parameters


def notes(config: Config, lines: tuple[ParameterLine, ...], padding: int) -> Iterator[str]:
    """What the numbers do not say by themselves."""
    model, parallel, sizes = config.model, config.parallel, axis_sizes(config.parallel)
    if padding:
        yield f"{padding} rows of zeros pad the vocabulary from {model.vocab_size} to {model.vocab_size + padding}."
    if extra := stacking_of(config).identity_layers:
        yield f"{extra} identity layers (zero weights) fill up the {model.num_layers} for the pipeline; the bytes count them."
    if parallel.zero and math.prod(sizes[axis] for axis in ZERO_AXES) == 1:
        yield f"parallel.zero={parallel.zero} shards nothing here: data x context is 1."
    if config.train.diloco_steps is not None:
        outer = readable(sum(line.bytes_per_device.moments for line in lines))
        yield f"DiLoCo holds {outer} more on each device: the weights of the last outer step and its momentum."
    if all(line.bytes_per_device.compute_copy == 0 for line in lines):
        yield f"No compute copy: the master weights are {model.compute_dtype} already and lie where they are used."
    if model.num_kv_heads % sizes[TENSOR]:
        held = sum(line.bytes_per_device.total for line in lines if "kv_heads" in line.dims)
        cost = held - held // sizes[TENSOR]
        yield (
            f"Key-value heads are replicated: {model.num_kv_heads} of them do not split over tensor={sizes[TENSOR]}, so each "
            f"tensor rank holds all {model.num_kv_heads} and uses one. Beside an even split that costs {cost:,} bytes "
            f"({readable(cost)}) more on each device."
        )


# ----------------------------------------------------------------------------------------------- activations and offload


def activations(config: Config) -> Activations:
    """Of a block under parallel.remat, with attention as it is on a GPU: in blocks over context ranks or between documents."""
    policy, model, parallel = policy_of(config.parallel.remat), config.model, config.parallel
    c, t, S = parallel.context, parallel.tensor, config.train.sequence_length
    blockwise = is_blockwise(config)
    unnamed, held = 0.0, Held({}, {})
    if policy.everything:
        unnamed = bytes_without_remat(model, S) / (c * t)
    else:
        held = bytes_per_token_and_layer(policy, model, context=c, tensor=t, blockwise=blockwise)
    there = [name for name in policy.recompute if blockwise or name not in ATTENTION_RESULTS]
    # Embedding and head are no layer's.
    head = 6 * model.vocab_size * model.hidden_size
    flops = (train_flops_per_token(model, S) - head) / 3 / model.num_layers / (c * t)
    return Activations(
        policy=policy.name,
        kept=held.kept,
        offloaded=held.offloaded,
        recomputed=tuple(there),
        unnamed=unnamed,
        link_s=sum(held.offloaded.values()) / GPUS[REFERENCE_GPU].host_bandwidth_bytes_per_s,
        compute_s=flops / (GPUS[REFERENCE_GPU].dense_flops["bfloat16"] * REACHED),
    )


def bytes_without_remat(model: ModelConfig, sequence_length: int) -> float:
    """Per token and layer, all that autodiff keeps of a block with plain XLA attention on one device. From the traced program:
    there is no closed form.
    """

    def kept():
        graph, weights = nnx.split(Block(model, rngs=nnx.Rngs(0)))
        weights = jax.tree.map(lambda w: w.astype(model.compute_dtype), nnx.to_pure_dict(weights))
        positions_BS = jnp.zeros((1, sequence_length), jnp.int32)
        h_BSD = jnp.zeros((1, sequence_length, model.hidden_size), model.compute_dtype)
        side = (rotary_table(model, positions_BS), None)
        return extract(jax.vjp(partial(apply_block, graph, Ops()), weights, h_BSD, side)[1])

    with nnx.use_eager_sharding(False):
        leaves = jax.tree.leaves(jax.eval_shape(kept))
    return sum(x.size * x.dtype.itemsize for x in leaves) / sequence_length


def state_offload(config: Config, held: Bytes) -> StateOffload:
    """Moments cross the link once each way; master weights also at the step's beginning, to be cast."""
    what = config.parallel.offload_state
    moments = held.moments if what != "none" else 0
    master = held.master if what == "optimizer_and_master" else 0
    to_device, to_host = moments + 2 * master, moments + master
    link_s = (to_device + to_host) / GPUS[REFERENCE_GPU].host_bandwidth_bytes_per_s
    return StateOffload(what, moments + master, to_device, to_host, link_s)


def axes_line(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
