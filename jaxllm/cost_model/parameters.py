"""Elements of each parameter on one device, in the train step's sharding and in the sharding between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

from jaxllm.config import ModelConfig, ParallelConfig, model_spec
from jaxllm.config.types import zero_shard


@dataclass(frozen=True)
class Elements:
    """Elements of one or several parameters on one device."""

    compute: int
    """In the train step's sharding."""
    master: int
    """In the sharding between steps, with the zeros that ZeRO pads."""

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.compute + other.compute, self.master + other.master)

    def times(self, count: int) -> Elements:
        return Elements(count * self.compute, count * self.master)


def parameters(model: ModelConfig, parallel: ParallelConfig, frozen: frozenset[str] = frozenset()) -> Mapping[str, Elements]:
    """Elements of each parameter on one device, by path; for a layer's parameter, those of one layer.

    Args:
      frozen: paths of parameters that are not trained, which are sharded between steps as in the step.
    """
    ranks = int(parallel.data) * parallel.context
    # Type checkers do not know that a frozen model of pydantic is hashable.
    found = _parameters(cast(Any, model), parallel.pipe, parallel.tensor, ranks if parallel.zero else 1)
    if not frozen:
        return found

    def of(path: str, elements: Elements) -> Elements:
        shards = parallel.zero == 3 and (parallel.pipe == 1 or path.startswith(model_spec.LAYERS))
        return elements if shards or path not in frozen else Elements(elements.compute, elements.compute)

    return {path: of(path, elements) for path, elements in found.items()}


@lru_cache(maxsize=4096)
def _parameters(model: Any, pipe: int, tensor: int, ranks: int) -> Mapping[str, Elements]:
    """The same, sharded over so many ranks between steps."""
    ways = pipe * tensor
    split = {"vocab": ways, "heads": tensor, "mlp": tensor}
    if model.num_kv_heads % tensor == 0:
        split["kv_heads"] = tensor
    found = {}
    for spec in model_spec.parameters(model):
        shape = dict(zip(spec.dims, spec.shape, strict=True))
        if "vocab" in shape:
            shape["vocab"] = -(-shape["vocab"] // ways) * ways
        found[spec.path] = _elements(shape, split, ranks, spec.is_matrix)
    return MappingProxyType(found)


def layer_parameters(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Elements]:
    """Elements of each parameter of one layer on one device."""
    return {path: elements for path, elements in parameters(model, parallel).items() if path.startswith(model_spec.LAYERS)}


def _elements(shape: dict[str, int], split: dict[str, int], ranks: int, is_matrix: bool) -> Elements:
    compute = math.prod(size // split.get(dim, 1) for dim, size in shape.items())
    if ranks == 1:
        return Elements(compute, compute)
    found = zero_shard(shape, split, ranks, is_matrix)
    if found is None:
        return Elements(compute, compute)
    dim, zeros = found
    return Elements(compute, compute // shape[dim] * (shape[dim] + zeros) // ranks)
