"""What a config means on a mesh: every parameter, its two layouts, its bytes on one device, and where the mesh wastes work.

    report = inspect_config(config, gpus=16)
    Console().print(render(report))

Everything follows from the config and the parameter table. No device of the mesh is started, so any mesh can be looked at
anywhere. Counted are weights, gradients and moments; activations are not.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxllm import distributed
from jaxllm.config import ATTENTION_RESULTS, Config, ModelConfig
from jaxllm.html_tables import preformatted
from jaxllm.mesh import CONTEXT, TENSOR, ZERO_AXES, axis_sizes
from jaxllm.model.layers import Block, Ops, rotary_table
from jaxllm.model.llama import apply_block
from jaxllm.parallel.parameters import parameter_table
from jaxllm.parallel.residuals import extract
from jaxllm.parallel.stacking import stacking_of
from jaxllm.parallel.zigzag import table_text
from jaxllm.plan.activations import Held, bytes_per_token_and_layer, is_blockwise, policy_of
from jaxllm.plan.cluster import hosts_of, named_devices
from jaxllm.plan.flops import parameter_count, train_flops_per_token
from jaxllm.plan.hardware import GPUS, readable
from jaxllm.plan.precision import Row, precision_table
from jaxllm.sharding import STACK_DIMS, Parameter, is_zero_sharded, layout, vocab_rows, weight_rules

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of the output tile that cuBLAS's fastest bfloat16 kernels compute on Hopper."""
MULTIPROCESSORS, MULTIPROCESSORS_OF = 132, "an H100"
"""Each computes one output tile at a time, so a matmul of fewer tiles leaves some idle."""
REFERENCE_GPU = "h100-80gb"
"""Whose link and speed the times are of."""
REACHED = 0.5
"""Of its peak, what a well-shaped layer's forward pass computes at; a rule of thumb."""
IDLE_PERCENT = 5
"""A shard that wastes no more than this is not worth a warning."""
WIDTH = 80
"""Characters a line may take."""


@dataclass(frozen=True)
class Bytes:
    """Bytes on one device."""

    master: int
    """The fp32 weights."""
    moments: int
    """AdamW's two, fp32."""
    compute_copy: int
    """In the compute dtype; 0 where the master weights serve as they are."""
    gradients: int
    """The fp32 accumulator."""

    @property
    def total(self) -> int:
        return self.master + self.moments + self.compute_copy + self.gradients

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class ParameterLine:
    """One parameter. The layer stack counts as its first dim, `layers`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]
    compute: tuple[tuple[str, ...], ...]
    """For each dim the mesh axes that split it in the train step."""
    master: tuple[tuple[str, ...], ...]
    """The same for the fp32 weight and its moments."""
    bytes_per_device: Bytes


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
class Warned:
    """Something that runs, and wastes."""

    kind: str
    """tiles | small | network"""
    parameter: str | None
    axis: str | None
    message: str


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

    def _repr_html_(self) -> str:
        return preformatted(in_columns(render(self)))


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


def describe(parameter: Parameter, config: Config) -> ParameterLine:
    """Layouts and bytes on one device of one parameter."""
    parallel, sizes = config.parallel, axis_sizes(config.parallel)
    own_layout = layout(parameter, weight_rules(config.model, parallel), parallel)
    compute = elements_per_device(parameter.shape, own_layout.compute, sizes)
    master = elements_per_device(parameter.shape, own_layout.master, sizes)
    gradients, copy = (master if is_zero_sharded(parameter.path, parallel, level) else compute for level in (2, 3))
    dtype = np.dtype(config.model.compute_dtype)
    # Casting to the dtype and layout it already has makes no array.
    is_master = dtype == parameter.dtype and copy == master
    return ParameterLine(
        path=parameter.path,
        shape=parameter.shape,
        dtype=str(np.dtype(parameter.dtype)),
        dims=parameter.dims,
        compute=axes_by_dim(own_layout.compute),
        master=axes_by_dim(own_layout.master),
        bytes_per_device=Bytes(4 * master, 8 * master, 0 if is_master else dtype.itemsize * copy, 4 * gradients),
    )


def elements_per_device(shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]) -> int:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return math.prod(NamedSharding(mesh, spec).shard_shape(shape))


def axes_by_dim(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    return tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec)


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


# -------------------------------------------------------------------------------------------------------------- warnings


def network_warnings(sizes: dict[str, int], gpus: int, per_host: int) -> Iterator[Warned]:
    together = sizes[CONTEXT] * sizes[TENSOR]
    if per_host % together and per_host < gpus:
        message = (
            f"context x tensor = {together} devices do not lie within hosts of {per_host}: every layer waits for the network"
        )
        yield Warned("network", None, TENSOR if sizes[TENSOR] > 1 else CONTEXT, message)


def matmul_warnings(config: Config, lines: tuple[ParameterLine, ...]) -> Iterator[Warned]:
    """Matmuls whose share is an awkward size for the GPU: one warning each for tiles and for size, where due.

    The split side of a weight is judged even where the forward pass contracts it: in the backward pass it is the output's.
    """
    sizes = axis_sizes(config.parallel)
    for line in lines:
        # An embedding that is not also the head is looked up, not multiplied.
        if "norm" in line.path or (line.path == "embedding" and not config.model.tie_embeddings):
            continue
        wide = [i for i, dim in enumerate(line.dims) if dim not in (*STACK_DIMS, "embed")]
        whole = math.prod(line.shape[i] for i in wide)
        axes = [axis for i in wide for axis in line.compute[i] if sizes[axis] > 1]
        ways = math.prod(sizes[axis] for axis in axes)
        columns, axis = whole // ways, " x ".join(axes) or None
        tiles = -(-columns // TILE_COLUMNS)
        idle = tiles * TILE_COLUMNS - columns
        if ways > 1 and 100 * idle > IDLE_PERCENT * tiles * TILE_COLUMNS:
            of = f"each {TILE_COLUMNS}-wide tile" if tiles == 1 else f"{tiles} {TILE_COLUMNS}-wide tiles"
            percent = 100 * idle // (tiles * TILE_COLUMNS)
            yield Warned("tiles", line.path, axis, f"{whole}/{ways} = {columns} columns: {percent}% of {of} idle")

        is_head = "vocab" in line.dims
        output = config.model.hidden_size if line.dims[-1] == "embed" and not is_head else columns
        rows = head_rows(config) if is_head else matmul_rows(config)
        work = -(-rows // TILE_ROWS) * -(-output // TILE_COLUMNS)
        if work < MULTIPROCESSORS:
            message = (
                f"{rows} tokens x {output} columns becomes too small to fill a GPU: {work} output "
                f"tile{'s' if work > 1 else ''} of {TILE_ROWS}x{TILE_COLUMNS} for the {MULTIPROCESSORS} multiprocessors of "
                f"{MULTIPROCESSORS_OF}"
            )
            yield Warned("small", line.path, axis, message)


def matmul_rows(config: Config) -> int:
    """Tokens that one device multiplies at once: a microbatch's, over context. Tensor ranks gather the sequence first."""
    return config.microbatch_sequences * config.train.sequence_length // config.parallel.context


def head_rows(config: Config) -> int:
    """The same for the head, which takes the sequence in chunks (model/loss.py)."""
    S = config.train.sequence_length // config.parallel.context
    chunks = min(S, -(-matmul_rows(config) // config.train.loss_chunk_tokens))
    return config.microbatch_sequences * -(-S // chunks)


# ------------------------------------------------------------------------------------------------------------- rendering


def render(report: Report) -> Group:
    """The report for a terminal of at least 80 columns."""
    padded = f", {report.vocabulary_padding_rows} padding rows of the vocabulary not counted"
    total = report.bytes_per_device.total
    parts = [
        Text(f"Mesh of {report.gpus} devices, slow network to fast:\n  {axes_line(report.mesh)}"),
        Text(f"{report.hosts} {'host' if report.hosts == 1 else 'hosts'} of {report.gpus_per_host} ({report.hosts_because})"),
        *mesh_drawing(report),
        *zigzag_drawing(report),
        Text(f"\n{report.parameter_count:,} parameters{padded if report.vocabulary_padding_rows else ''}"),
        Text("Axes that split each dim: `compute` in the train step, `master` at rest"),
        layout_table(report),
        Text(f"\nOn each device with ZeRO {report.zero}, compute in {report.compute_dtype}; activations not counted"),
        bytes_table(report),
        Text(f"Total {readable(total)} per device ({total:,} bytes)"),
        *activation_lines(report),
        Text("\nPrecision on a GPU: as multiplied or added, of sums inside, of the result"),
        precision_lines(report),
        *(Text(f"\nNote: {note}") for note in report.notes),
    ]
    if report.warnings:
        parts.append(Text("\nWarnings"))
        parts += [Padding(line, (0, 0, 0, 2)) for line in warning_lines(report)]
    return Group(*parts)


def precision_lines(report: Report) -> Padding:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "inputs", "sums", "result"):
        table.add_column(heading, overflow="fold")
    for row in report.precision:
        table.add_row(row.what, row.inputs, row.sums, row.result)
    return Padding(table, (0, 0, 0, 2))


def in_columns(rendered: Group) -> str:
    """What rich makes of it on WIDTH columns, without colours."""
    # In a notebook rich would show an empty output of its own besides.
    file = io.StringIO()
    console = Console(width=WIDTH, file=file, color_system=None, force_jupyter=False, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(rendered)
    return captured.get()


def axes_line(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def mesh_drawing(report: Report) -> Iterator[Padding]:
    """Device ids in rows along the fastest axis; each host a box if there are several."""
    for host in elided(list(range(report.hosts)), 4):
        if host is None:
            yield Padding("...", (0, 0, 0, 4))
            continue
        rows = "\n".join("..." if row is None else row for row in elided(host_rows(report, host), 8))
        box = Text(rows) if report.hosts == 1 else Panel(Text(rows), title=f"host {host}", title_align="left", expand=False)
        yield Padding(box, (0, 0, 0, 2), expand=False)


def zigzag_drawing(report: Report) -> Iterator[Text]:
    """Which chunks of a sequence each context rank holds, and the blocks of a ring; long tables are for --picture."""
    if 1 < (c := report.mesh[CONTEXT]) <= 4:
        yield Text(
            f"\nA sequence is cut into {2 * c} chunks; context rank r holds r and {2 * c - 1}-r. Blocks of attention at each "
            f"ring step, as query chunk < key chunk:"
        )
        yield Text("  " + table_text(c).replace("\n", "\n  ") + "\n")


def host_rows(report: Report, host: int) -> list[str]:
    """'data 0, tensor 0..7: 0 1 2 3 4 5 6 7' for each row of devices of a host, at most as wide as a box may be.

    mesh.make_mesh lays ids out in this order: by host, the fastest axis first.
    """
    used = {axis: size for axis, size in report.mesh.items() if size > 1} or {TENSOR: 1}
    *slow, fast = used
    length = used[fast]
    ids = range(host * report.gpus_per_host, (host + 1) * report.gpus_per_host)
    rows = []
    for number, group in itertools.groupby(ids, lambda i: i // length):
        row = list(group)
        places = np.unravel_index(number, [used[axis] for axis in slow]) if slow else ()
        label = [f"{axis} {place}" for axis, place in zip(slow, places, strict=True)]
        label = ", ".join([*label, f"{fast} {row[0] % length}..{row[-1] % length}"]) + ": "
        devices = " ".join(map(str, row))
        # Eight for the box and its margin.
        if len(label + devices) > WIDTH - 8:
            devices = f"{row[0]} {row[1]} ... {row[-1]}"
        rows.append(label + devices)
    return rows


def elided(items: list[Any], most: int) -> list[Any]:
    """At most so many of the items, with None for those left out of the middle."""
    return items if len(items) <= most else [*items[: most - 2], None, items[-1]]


def layout_table(report: Report) -> Table:
    """A row for each dim of each parameter; stacked layers show one layer."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("parameter", "dim", "size", "compute", "master"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "size" else "left")
    for line in report.parameters:
        stacked = line.dims[0] == "layers"
        shape = line.shape[1:] if stacked else line.shape
        times = f" x {line.shape[0]}" if stacked else ""
        if stacked and report.mesh[line.compute[0][0]] > 1:
            times += f" over {line.compute[0][0]}"
        under = f"  {line.dtype} [{', '.join(map(str, shape))}]{times}"
        rows = list(zip(line.dims, line.shape, line.compute, line.master, strict=True))[stacked:]
        for left, row in itertools.zip_longest([line.path, under], rows):
            dim, size, *specs = row or ("", "", None, None)
            split = ["" if spec is None else " x ".join(a for a in spec if report.mesh[a] > 1) or "-" for spec in specs]
            table.add_row(*map(Text, (left or "", dim, str(size), *split)))
    return table


def bytes_table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("parameter", overflow="fold")
    for heading in ("master", "moments", "copy", "gradients"):
        table.add_column(heading, justify="right")
    for line in report.parameters:
        table.add_row(Text(line.path), *map(readable, asdict(line.bytes_per_device).values()))
    table.add_row("total", *(readable(size) for size in asdict(report.bytes_per_device).values()), style="bold")
    return table


def activation_lines(report: Report) -> Iterator[Text]:
    """What remat keeps, and what the host's link has to carry."""
    found, state = report.activations, report.state_offload
    yield Text(f"\nRemat {found.policy}: bytes for each token of a sequence and each layer, on one device")
    for label, sizes in (("kept", found.kept), ("offloaded", found.offloaded)):
        if sizes:
            listed = ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items())
            yield Text(f"  {label} {sum(sizes.values()):,.0f}: {listed}")
    if found.recomputed:
        yield Text(f"  recomputed: {', '.join(found.recomputed)}")
    if found.unnamed:
        yield Text(f"  kept {found.unnamed:,.0f}, whatever autodiff wants, with plain XLA attention")
    link = f"{GPUS[REFERENCE_GPU].host_bandwidth_bytes_per_s / 1e9:.0f} GB/s each way of {REFERENCE_GPU}'s link"
    if found.offloaded:
        yield Text(
            f"  {found.link_s * 1e9:,.0f} ns to the host at {link}, behind {found.compute_s * 1e9:,.0f} ns of compute "
            f"({REACHED:.0%} of the bfloat16 peak)" + (": the link is the slower" if found.link_s > found.compute_s else "")
        )
    if state.what != "none":
        yield Text(
            f"\noffload_state {state.what}: {readable(state.host)} of the total lie in the host's memory. Each step brings "
            f"{readable(state.to_device)} in and {readable(state.to_host)} out: {state.link_s:.2g} s at {link}"
        )


def warning_lines(report: Report) -> Iterator[Text]:
    """One paragraph for all parameters that share a warning."""
    shared: dict[tuple[str | None, str], list[str]] = {}
    for warned in report.warnings:
        shared.setdefault((warned.axis, warned.message), []).extend([warned.parameter] if warned.parameter else [])
    for (axis, message), names in shared.items():
        over = " x ".join(f"{name}={report.mesh[name]}" for name in axis.split(" x ")) if axis else "not split"
        yield Text(f"{', '.join(names) or 'mesh'} ({over}): {message}")
