"""Waste on a mesh: matmuls of unsuitable or small shapes, and layers that wait for the network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.compile.inspect_table import ParameterRow
from jaxllm.config import Config
from jaxllm.config.model_spec import parameters as model_parameters
from jaxllm.cost_model.hardware import Gpu
from jaxllm.mesh import CONTEXT, TENSOR, axis_sizes
from jaxllm.sharding import STACK_DIMS

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Output tile of cuBLAS's fastest bfloat16 kernels on Hopper."""
MULTIPROCESSORS, MULTIPROCESSORS_OF = 132, "an H100"
"""The default GPU's. Each multiprocessor computes one output tile at a time, so a matmul of fewer tiles leaves
some idle."""
IDLE_PERCENT = 5
"""A shard that wastes no more than this gets no warning."""


@dataclass(frozen=True)
class ConfigWarning:
    """A setting that works, but wastes time."""

    kind: str
    """tiles | small | network"""
    parameter: str | None
    axis: str | None
    message: str


def network_warnings(sizes: dict[str, int], gpus: int, per_host: int) -> Iterator[ConfigWarning]:
    together = sizes[CONTEXT] * sizes[TENSOR]
    if per_host % together and per_host < gpus:
        message = (
            f"context x tensor = {together} devices do not fit within hosts of {per_host}: every layer waits for the network"
        )
        yield ConfigWarning("network", None, TENSOR if sizes[TENSOR] > 1 else CONTEXT, message)


def matmul_warnings(config: Config, parameters: tuple[ParameterRow, ...], gpu: Gpu | None = None) -> Iterator[ConfigWarning]:
    """Warnings for matmuls whose shard has an unsuitable size for the GPU: at most one each for tiles and for size.

    The sharded dim of a weight is checked even if the forward pass contracts it: in the backward pass it is an output dim.
    """
    available, of = (gpu.chip.multiprocessors, gpu.name) if gpu else (MULTIPROCESSORS, MULTIPROCESSORS_OF)
    sizes, matrices = axis_sizes(config.parallel), {spec.path for spec in model_parameters(config.model) if spec.is_matrix}
    for row in parameters:
        # An embedding that is not also the head is looked up, not multiplied.
        if row.path not in matrices or (row.path == "embedding" and not config.model.tie_embeddings):
            continue
        wide = [i for i, dim in enumerate(row.dims) if dim not in (*STACK_DIMS, "embed")]
        whole = math.prod(row.shape[i] for i in wide)
        axes = [axis for i in wide for axis in row.compute[i] if sizes[axis] > 1]
        ways = math.prod(sizes[axis] for axis in axes)
        columns, axis = whole // ways, " x ".join(axes) or None
        tiles = -(-columns // TILE_COLUMNS)
        idle = tiles * TILE_COLUMNS - columns
        if ways > 1 and 100 * idle > IDLE_PERCENT * tiles * TILE_COLUMNS:
            which = f"each {TILE_COLUMNS}-wide tile" if tiles == 1 else f"{tiles} {TILE_COLUMNS}-wide tiles"
            percent = 100 * idle // (tiles * TILE_COLUMNS)
            yield ConfigWarning("tiles", row.path, axis, f"{whole}/{ways} = {columns} columns: {percent}% of {which} idle")

        is_head = "vocab" in row.dims
        output = config.model.hidden_size if row.dims[-1] == "embed" and not is_head else columns
        rows = head_rows(config) if is_head else matmul_rows(config)
        work = -(-rows // TILE_ROWS) * -(-output // TILE_COLUMNS)
        if work < available:
            message = (
                f"{rows} tokens x {output} columns becomes too small to fill a GPU: {work} output "
                f"tile{'s' if work > 1 else ''} of {TILE_ROWS}x{TILE_COLUMNS} for the {available} multiprocessors of "
                f"{of}"
            )
            yield ConfigWarning("small", row.path, axis, message)


def matmul_rows(config: Config) -> int:
    """Tokens that one device multiplies at once: a microbatch's, divided over context. Tensor ranks gather the sequence
    first."""
    return config.microbatch_sequences * config.train.sequence_length // config.parallel.context


def head_rows(config: Config) -> int:
    """The same for the head, which processes the sequence in chunks (model/loss.py)."""
    S = config.train.sequence_length // config.parallel.context
    chunks = min(S, -(-matmul_rows(config) // config.train.loss_chunk_tokens))
    return config.microbatch_sequences * -(-S // chunks)
