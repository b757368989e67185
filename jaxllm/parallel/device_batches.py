"""Puts rows of token arrays on the mesh, in the layout that the functions of parallelize.py take."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import Config
from jaxllm.mesh.axes import CONTEXT, batch_sharding
from jaxllm.parallel.zigzag import order

Read = Callable[[Any], Mapping[str, np.ndarray]]
"""row numbers -> arrays [len(numbers), S], or [len(numbers), ...] of the caller's"""


def evaluated_microbatches(config: Config) -> int:
    """Microbatches that an evaluation scores at a time: 1 without a pipeline. A pipeline of P stages gets P, with which a stage
    works in half of the ticks, up to 4 P (four fifths) where a step of the first phase and train.eval_batches have as many."""
    stages, most = config.parallel.pipe, config.train.eval_batches or 4
    return stages * max(1, min(config.num_microbatches // stages, most, 4)) if stages > 1 else 1


def put_global_batch(mesh: Mesh, read: Read, rows: np.ndarray, sequence_length: int) -> dict[str, jax.Array]:
    """Arrays [microbatch, sequence, position] on the mesh, from row numbers [microbatch, sequence]. Each process reads only the
    rows of its own devices. Arrays with more dims, or without positions, are sharded by those that they have.
    """
    (M, R), S = rows.shape, sequence_length
    sharding = batch_sharding(mesh)
    indices: Any = sharding.addressable_devices_indices_map((M, R, S)).values()
    mine = np.unique(np.concatenate([np.arange(R)[index[1]] for index in indices]))
    # Context ranks hold an early and a late chunk of each sequence (zigzag.py). Later code does not see the order.
    dealt = order(S, mesh.shape[CONTEXT]) if mesh.shape[CONTEXT] > 1 else np.arange(S)
    local = {name: array.reshape(M, len(mine), *array.shape[1:]) for name, array in read(rows[:, mine].reshape(-1)).items()}
    local = {name: array[:, :, dealt] if array.shape[2:3] == (S,) else array for name, array in local.items()}

    def put(array: np.ndarray) -> jax.Array:
        def callback(index):
            held = np.searchsorted(mine, np.arange(R)[index[1]])
            return array[index[0]][:, held][(slice(None), slice(None), *index[2:])]

        sharded = NamedSharding(mesh, PartitionSpec(*sharding.spec[: array.ndim]))
        return jax.make_array_from_callback((M, R, *array.shape[2:]), sharded, callback)

    return {name: put(array) for name, array in local.items()}
