"""The parameter table of a config on a mesh: each parameter's two layouts, and its bytes on one device."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxllm.config import Config
from jaxllm.mesh import axis_sizes
from jaxllm.sharding import Parameter, is_zero_sharded, layout, weight_rules


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

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


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
