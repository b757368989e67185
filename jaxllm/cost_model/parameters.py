"""Elements of each parameter on one device, in the train step's sharding and in the sharding between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.config import ModelConfig, ParallelConfig, zero_shard


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


def parameters(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Elements]:
    """Elements of each parameter on one device; for a layer's parameter, those of one layer."""
    D, N, K, H, F = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size
    ways = parallel.pipe * parallel.tensor
    rows = -(-model.vocab_size // ways) * ways
    shapes = {
        "embedding": {"vocab": rows, "embed": D},
        "final_norm": {"embed": D},
        "head": {"vocab": rows, "embed": D},
        "attention_norm": {"embed": D},
        "query": {"embed": D, "heads": N, "head_dim": H},
        "key": {"embed": D, "kv_heads": K, "head_dim": H},
        "value": {"embed": D, "kv_heads": K, "head_dim": H},
        "attention_out": {"heads": N, "head_dim": H, "embed": D},
        "mlp_norm": {"embed": D},
        "mlp_gate": {"embed": D, "mlp": F},
        "mlp_up": {"embed": D, "mlp": F},
        "mlp_down": {"mlp": F, "embed": D},
    }
    if model.tie_embeddings:
        del shapes["head"]
    split = {"vocab": ways, "heads": parallel.tensor, "mlp": parallel.tensor}
    if K % parallel.tensor == 0:
        split["kv_heads"] = parallel.tensor
    return {name: _elements(shape, split, parallel) for name, shape in shapes.items()}


def layer_parameters(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Elements]:
    """Elements of each parameter of one layer on one device."""
    outside = ("embedding", "final_norm", "head")
    return {name: elements for name, elements in parameters(model, parallel).items() if name not in outside}


def _elements(shape: dict[str, int], split: dict[str, int], parallel: ParallelConfig) -> Elements:
    compute = math.prod(size // split.get(dim, 1) for dim, size in shape.items())
    ranks = int(parallel.data) * parallel.context
    if parallel.zero == 0 or ranks == 1:
        return Elements(compute, compute)
    found = zero_shard(shape, split, ranks)
    if found is None:
        return Elements(compute, compute)
    dim, zeros = found
    return Elements(compute, compute // shape[dim] * (shape[dim] + zeros) // ranks)
