"""A config on a mesh: every parameter, its two layouts, its bytes on one device, and where the mesh wastes work.

    report = inspect_config(config, gpus=16)
    Console().print(render_inspect(report))         # text.py

Everything follows from the config and the parameter table. No device of the mesh is started, so this works for any mesh on any
machine. Weights, gradients and moments are counted; activations are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxllm.cluster import distributed
from jaxllm.config import ATTENTION_RESULTS, Config, ModelConfig
from jaxllm.config.layer_stack import host_sum_itemsize
from jaxllm.config.model_spec import has_experts, parameter_count
from jaxllm.config.model_spec import parameters as model_parameters
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.types import MASTER_ON_HOST
from jaxllm.cost_model.activations import ActivationBytes, bytes_per_token_and_layer, is_blockwise
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import GPUS, Gpu
from jaxllm.cost_model.hosts import HOST_GPUS, choose_gpus_per_host, named_devices
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import TileParts, tile_parts
from jaxllm.cost_model.step_sizes import StepSizes
from jaxllm.display import readable
from jaxllm.mesh.axes import CONTEXT, DATA, TENSOR, ZERO_AXES, axis_sizes
from jaxllm.mesh.sharding import STACK_DIMS, Parameter, is_zero_sharded, layout, vocab_rows, weight_rules
from jaxllm.model.attention import plain_attention
from jaxllm.model.layers import Block, Ops, rotary_table
from jaxllm.model.llama import BlockContext, apply_block, layer_kinds
from jaxllm.parallel.parameters import parameter_table, stacking_of
from jaxllm.parallel.vjp_residuals import extract

# -------------------------------------------------------------------------------------------------------------- precision


@dataclass(frozen=True)
class PrecisionRow:
    what: str
    inputs: str
    """Precision of the operands."""
    sums: str
    """Precision of the accumulation inside the operation."""
    result: str


def precision_table(config: Config) -> tuple[PrecisionRow, ...]:
    """The precisions of the config's train step on an NVIDIA GPU.

    XLA multiplies float32 in TF32 there (10 bits of mantissa) unless jax_default_matmul_precision changes it.
    """
    dtype = config.model.compute_dtype
    product = "TF32" if dtype == "float32" else dtype
    fp8 = config.model.multiplies_fp8
    rows = [
        PrecisionRow("weights, moments, update", "float32", "float32", "float32"),
        PrecisionRow("norms, angles, softmax, loss", "float32", "float32", "float32"),
        PrecisionRow("block matmuls", "E4M3" if fp8 else product, "float32, fast" if fp8 else "float32", dtype),
        PrecisionRow("their gradients", "E5M2 x E4M3" if fp8 else product, "float32", dtype),
        PrecisionRow("attention", product, "float32", dtype),
        PrecisionRow("head", product, "float32", "float32"),
        PrecisionRow("gradient of the head", product, "float32", "float32"),
        PrecisionRow("gradient of its input", product, "float32", dtype),
        PrecisionRow("gradients over microbatches", dtype, "float32", "float32"),
        PrecisionRow("gradients over data, context", (sent := config.parallel.reduce_dtype), sent, "float32"),
    ]
    if has_experts(config.model):
        # Exact: what it multiplies was rounded to the compute dtype.
        rows.insert(2, PrecisionRow("router", "TF32", "float32", "float32"))
    parallel, rounded = config.parallel, dtype != "float32"
    beside = (
        (rounded and config.optimizer.name == "muon", "Muon's orthogonal matrices", "float32"),
        (rounded and parallel.zero, "weights gathered over data", "-"),
        (parallel.expert > 1, "tokens between ranks with experts", "-"),
        (parallel.tensor > 1, "hidden states over tensor", dtype),
        (parallel.pipe > 1, "hidden states over pipe", dtype),
        (parallel.context > 1, "attention over context, merged", "float32"),
    )
    return (*rows, *(PrecisionRow(what, dtype, sums, dtype) for holds, what, sums in beside if holds))


# ------------------------------------------------------------------------------------------------------------------ waste

LEAST_WASTE = 0.09
"""Share of a matmul that is worth a warning."""


@dataclass(frozen=True)
class ConfigWarning:
    """A setting that works, but wastes time."""

    kind: str
    """tiles | small | network"""
    parameter: str | None
    axis: str | None
    message: str


def network_warnings(sizes: dict[str, int], expert: int, gpus: int, per_host: int) -> Iterator[ConfigWarning]:
    inner = sizes[CONTEXT] * sizes[TENSOR]
    found = (
        ("context x tensor", inner, TENSOR if sizes[TENSOR] > 1 else CONTEXT, "every layer waits for the network"),
        ("expert x tensor", expert * inner, DATA, "tokens wait for the network"),
    )
    for what, together, axis, wait in found[: 1 if expert == 1 else 2]:
        if per_host % together and per_host < gpus:
            text = f"{what} = {together} devices do not fit within hosts of {per_host}: {wait}"
            yield ConfigWarning("network", None, axis, text)


def matmul_parts(config: Config, gpu: Gpu, gpus_per_host: int) -> dict[tuple[int, ...], TileParts]:
    """Rows, columns and length of the sum of every matmul in a resolved config's step -> what its tiles permit."""
    found = {}

    class Noting(StepModel):
        def tile_share(self, rows: int, columns: int, length: int) -> float:
            parts = found[rows, columns, length] = tile_parts(rows, columns, length, gpu.chip.multiprocessors)
            return math.prod(parts)

    Noting(config, gpu, gpus_per_host).time()
    return found


def matmul_warnings(
    config: Config, rows: tuple[ParameterRow, ...], parts: dict[tuple[int, ...], TileParts]
) -> Iterator[ConfigWarning]:
    """At most one warning each for tiles and for size: of the slowest of a parameter's matmuls, in both passes.

    Args:
      parts: of matmul_parts.
    """
    sizes = axis_sizes(config.parallel)
    specs = {spec.path: spec for spec in model_parameters(config.model) if spec.is_matrix and not spec.of_experts}
    for row in rows:
        # An embedding that is not also the head is looked up, not multiplied.
        if row.path not in specs or (row.path == "embedding" and not config.model.tie_embeddings):
            continue
        cut = [(size, axes) for size, axes, dim in zip(row.shape, row.compute, row.dims, strict=True) if dim not in STACK_DIMS]
        shard, inputs = [size // math.prod(sizes[axis] for axis in axes) for size, axes in cut], specs[row.path].inputs or 1
        edges = Counter((math.prod(shard[:inputs]), math.prod(shard[inputs:])))
        # In a tensor ring queries, keys and values are one matmul, of none of these edges.
        if not (its := [shape for shape in parts if not edges - Counter(shape)]):
            continue
        m, n, k = min(its, key=lambda shape: math.prod(parts[shape]))
        found, axis = parts[m, n, k], " x ".join(axis for _, axes in cut for axis in axes if sizes[axis] > 1) or None
        if 1 - found.edges > LEAST_WASTE:
            text = f"an output of {m} x {n}: {1 - found.edges:.0%} of its tiles are beyond its edge"
            yield ConfigWarning("tiles", row.path, axis, text)
        if 1 - found.kind > LEAST_WASTE:
            text = f"an output of {m} x {n} is too small for the largest tiles: others have {found.kind:.0%} of their speed"
            yield ConfigWarning("small", row.path, axis, text)


# -------------------------------------------------------------------------------------------------------- parameter table


@dataclass(frozen=True)
class Bytes:
    """Bytes on one device."""

    master: int
    """fp32 weights."""
    moments: int
    """AdamW's two moments, fp32."""
    compute_copy: int
    """Copy in the compute dtype; 0 if the master weights are used directly."""
    gradients: int
    """fp32 accumulator."""

    @property
    def total(self) -> int:
        return self.master + self.moments + self.compute_copy + self.gradients


@dataclass(frozen=True)
class ParameterRow:
    """One parameter. The layer stack counts as its first dim, `layers`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]
    compute: tuple[tuple[str, ...], ...]
    """For each dim, the mesh axes that shard it in the train step."""
    master: tuple[tuple[str, ...], ...]
    """The same for the fp32 weight and its moments."""
    zeros: tuple[int, ...]
    """Zeros that the fp32 weight and its moments have at the end of each dim, so that ZeRO's ranks divide it."""
    bytes_per_device: Bytes


def describe(parameter: Parameter, config: Config) -> ParameterRow:
    """Layouts of one parameter, and its bytes on one device."""
    parallel, sizes = config.parallel, axis_sizes(config.parallel)
    spot = layout(parameter, weight_rules(config.model, parallel), parallel)
    compute = elements_per_device(parameter.shape, spot.compute, sizes)
    stored = spot.padded_shape(parameter.shape)
    master = elements_per_device(stored, spot.master, sizes)
    gradients, copy = (master if is_zero_sharded(parameter.path, parallel, level) else compute for level in (2, 3))
    dtype = np.dtype(config.model.compute_dtype)
    # A cast to the dtype and layout that it has already makes no array.
    is_master = dtype == parameter.dtype and copy == master
    return ParameterRow(
        path=parameter.path,
        shape=parameter.shape,
        dtype=str(np.dtype(parameter.dtype)),
        dims=parameter.dims,
        compute=axes_by_dim(spot.compute),
        master=axes_by_dim(spot.master),
        zeros=tuple(there - here for there, here in zip(stored, parameter.shape, strict=True)),
        bytes_per_device=Bytes(4 * master, 8 * master, 0 if is_master else dtype.itemsize * copy, 4 * gradients),
    )


def elements_per_device(shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]) -> int:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return math.prod(NamedSharding(mesh, spec).shard_shape(shape))


def axes_by_dim(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    return tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec)


# ---------------------------------------------------------------------------------------------------------------- inspect

REFERENCE_GPU = "h100-80gb"
"""The GPU whose link and speed the times use, unless one is named."""
REACHED = 0.5
"""Share of the peak that a well-shaped layer's forward pass reaches; a rule of thumb."""


@dataclass(frozen=True)
class Activations:
    """Tensors that remat keeps for the backward pass of one block, on one device."""

    policy: str
    kept: dict[str, float]
    """Bytes per token and layer on the device."""
    offloaded: dict[str, float]
    """Bytes per token and layer in host memory."""
    recomputed: tuple[str, ...]
    unnamed: float
    """Bytes of tensors without a name: only for policy `none`, and then all of them."""
    link_s: float
    """Time to send the offloaded bytes of one token and layer to the host; fetching them takes as long."""
    compute_s: float
    """Time of the layer's forward pass for one token; the backward takes twice that."""


@dataclass(frozen=True)
class StateOffload:
    """parallel.offload_state, in bytes of one device and step."""

    what: str
    host: int
    """Bytes stored in host memory."""
    to_device: int
    to_host: int
    link_s: float
    """Time of both directions, one after the other. Nothing hides it, but for what `all` moves in a microbatch."""


@dataclass(frozen=True)
class Report:
    """The complete result of `jaxllm inspect`."""

    mesh: dict[str, int]
    """Axis -> size, slow network to fast."""
    gpus: int
    gpus_per_host: int
    hosts: int
    hosts_because: str
    zero: int
    """The configured level."""
    compute_dtype: str
    parameter_count: int
    """Without the rows that pad the vocabulary."""
    vocabulary_padding_rows: int
    gpu: str
    """The kind whose link and speed the times use."""
    link_bytes_per_s: float
    """Each way, to the host's memory."""
    parameters: tuple[ParameterRow, ...]
    bytes_per_device: Bytes
    activations: Activations
    state_offload: StateOffload
    precision: tuple[PrecisionRow, ...]
    notes: tuple[str, ...]
    warnings: tuple[ConfigWarning, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes_per_device": self.bytes_per_device.total}

    def __repr__(self) -> str:
        return f"<Report of {self.parameter_count:,} parameters on {axes_line(self.mesh)}>"


def inspect_config(
    config: Config, gpus: int | None = None, gpus_per_host: int | None = None, gpu: Gpu | str | None = None
) -> Report:
    """Reports on a config on a number of GPUs, with train.batch_schedule at the largest batch that the run reaches.

    Args:
      gpus: default: run.cpu_devices, else the size of the config's mesh, else (parallel.data=auto) the present devices.
      gpus_per_host: default: the largest divisor of gpus not above the kind's host size, or 8.
      gpu: a kind, by name, by a YAML file that describes it, or as a Gpu, whose waste is shown. None: no waste, and times on
        REFERENCE_GPU.

    Raises:
      ConfigError: the mesh has another size, a parameter cannot be sharded, hosts do not divide, or the GPU does not exist.
    """
    if (wanted := named_devices(config, gpus)) is None:
        # Only for parallel.data=auto without a given number.
        distributed.start(config.run)
    gpus = jax.device_count() if wanted is None else wanted
    config = config.resolve(gpus).at_largest_batch
    named = find_gpu(gpu) if isinstance(gpu, str) else gpu
    largest = named.gpus_per_host if named else HOST_GPUS
    per_host, because = choose_gpus_per_host(gpus, gpus_per_host, largest, parallel=config.parallel)
    kind = named or GPUS[REFERENCE_GPU]
    sizes = axis_sizes(config.parallel)
    rows = tuple(describe(parameter, config) for parameter in jax.tree.leaves(parameter_table(config)[1]))
    padding = vocab_rows(config.model, config.parallel) - config.model.vocab_size
    held = Bytes(*map(sum, zip(*(astuple(row.bytes_per_device) for row in rows), strict=True)))
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
        gpu=kind.name,
        link_bytes_per_s=kind.host_bandwidth_bytes_per_s,
        parameters=rows,
        bytes_per_device=held,
        activations=activations(config, kind),
        state_offload=state_offload(config, held, kind),
        precision=precision_table(config),
        notes=tuple(notes(config, rows, padding)),
        warnings=(
            *network_warnings(sizes, config.parallel.expert, gpus, per_host),
            *matmul_warnings(config, rows, matmul_parts(config, kind, per_host)),
        ),
    )


def notes(config: Config, rows: tuple[ParameterRow, ...], padding: int) -> Iterator[str]:
    """Yields remarks that the numbers do not show."""
    model, parallel, sizes = config.model, config.parallel, axis_sizes(config.parallel)
    if padding:
        yield f"{padding} rows of zeros pad the vocabulary from {model.vocab_size} to {model.vocab_size + padding}."
    if extra := stacking_of(config).identity_layers:
        yield f"{extra} identity layers (zero weights) fill up the {model.num_layers} for the pipeline; the bytes count them."
    if padded := [row for row in rows if any(row.zeros)]:
        whole = sum(math.prod(row.shape) for row in rows)
        extra = sum(math.prod(map(sum, zip(row.shape, row.zeros, strict=True))) - math.prod(row.shape) for row in padded)
        yield (
            f"Zeros at the end of a dim of {len(padded)} parameters make data x context = "
            f"{sizes[DATA] * sizes[CONTEXT]} divide it: {extra / whole:.1%} more is stored and sent."
        )
    if parallel.zero and math.prod(sizes[axis] for axis in ZERO_AXES) == 1:
        yield f"parallel.zero={parallel.zero} shards nothing here: data x context is 1."
    if config.train.diloco_steps is not None:
        outer = readable(sum(row.bytes_per_device.moments for row in rows))
        yield f"DiLoCo holds {outer} more on each device: the weights of the last outer step and its momentum."
    if all(row.bytes_per_device.compute_copy == 0 for row in rows):
        yield f"No compute copy: the master weights are {model.compute_dtype} already and are used in place."
    if model.num_kv_heads % sizes[TENSOR]:
        held = sum(row.bytes_per_device.total for row in rows if "kv_heads" in row.dims)
        cost = held - held // sizes[TENSOR]
        yield (
            f"Key-value heads are replicated: {model.num_kv_heads} of them do not split over tensor={sizes[TENSOR]}, so each "
            f"tensor rank holds all {model.num_kv_heads} and uses one. Compared with an even split this costs {cost:,} bytes "
            f"({readable(cost)}) more on each device."
        )


# ----------------------------------------------------------------------------------------------- activations and offload


def activations(config: Config, gpu: Gpu) -> Activations:
    """Activations of a block under parallel.remat, with attention as on a GPU."""
    policy, model, parallel = policy_of(config.parallel.remat, config.model), config.model, config.parallel
    c, t, S = parallel.context, parallel.tensor, config.train.sequence_length
    blockwise = is_blockwise(config, gpu.chip.compute_capability)
    unnamed, held = 0.0, ActivationBytes({}, {})
    if policy.everything:
        unnamed = bytes_without_remat(model, S) / (c * t)
    else:
        held = bytes_per_token_and_layer(policy, config, blockwise=blockwise)
    there = [name for name in policy.recompute if blockwise or name not in ATTENTION_RESULTS]
    # Embedding and head do not belong to a layer.
    head = 6 * model.vocab_size * model.hidden_size
    flops = (train_flops_per_token(model, S) - head) / 3 / model.num_layers / (c * t)
    return Activations(
        policy=policy.name,
        kept=held.kept,
        offloaded=held.offloaded,
        recomputed=tuple(there),
        unnamed=unnamed,
        link_s=sum(held.offloaded.values()) / gpu.host_bandwidth_bytes_per_s,
        compute_s=flops / (gpu.dense_flops["bfloat16"] * REACHED),
    )


def bytes_without_remat(model: ModelConfig, sequence_length: int) -> float:
    """Bytes per token and layer of all residuals that autodiff keeps of a block with plain XLA attention on one device. They
    come from the traced program, because there is no closed form."""

    def kept():
        graph, weights = nnx.split(Block(model, rngs=nnx.Rngs(0)))
        weights = jax.tree.map(lambda w: w.astype(model.compute_dtype), nnx.to_pure_dict(weights))
        positions_BS = jnp.zeros((1, sequence_length), jnp.int32)
        h_BSD = jnp.zeros((1, sequence_length, model.hidden_size), model.compute_dtype)
        side = BlockContext(rotary_table(model, positions_BS), None, layer_kinds(model)).of_layer(0)
        block = partial(apply_block, graph, Ops(attend=plain_attention(model)))
        return extract(jax.vjp(block, weights, h_BSD, side)[1])

    with nnx.use_eager_sharding(False):
        leaves = jax.tree.leaves(jax.eval_shape(kept))
    return sum(x.size * x.dtype.itemsize for x in leaves) / sequence_length


def state_offload(config: Config, held: Bytes, gpu: Gpu) -> StateOffload:
    """Moments cross the link once each way. Master weights do too, and once more at the step's start, to be cast. With `all`
    the cast layers return. In each microbatch they come in twice, and their gradient sums go in and out; in the end these come
    in for the norm and for the update."""
    what = config.parallel.offload_state
    moments = held.moments if what != "none" else 0
    master = held.master if what in MASTER_ON_HOST else 0
    to_device, to_host, host = moments + 2 * master, moments + master, moments + master
    if what == "all":
        sizes, microbatches = StepSizes(config, gpu), config.num_microbatches
        weights, sums = sizes.itemsize * sizes.layers.master, host_sum_itemsize(config) * sizes.layers.master
        host += weights + sums
        to_device += 2 * microbatches * weights + (microbatches if microbatches > 1 else 0) * sums + 2 * sums
        to_host += weights + microbatches * sums
    link_s = (to_device + to_host) / gpu.host_bandwidth_bytes_per_s
    return StateOffload(what, host, to_device, to_host, link_s)


def axes_line(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
