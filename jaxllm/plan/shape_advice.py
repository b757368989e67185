"""The one change of shapes that gains most: a padded vocabulary, another tensor size, other chunks of layers. No JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxllm.config import Config, divisors
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.shape_waste import shape_waste
from jaxllm.plan.advice import Change, changed
from jaxllm.plan.plan_result import FIT_SHARE

TILE = 128
"""Edge of a tile, to which a vocabulary is padded on each rank."""
LEAST_GAIN = 0.005
"""Share of the step from which a change is worth a line."""


def better_shape(config: Config, gpu: Gpu, gpus_per_host: int, convention: str = "jaxllm") -> Change | None:
    """The change of a resolved config on the same GPUs that shortens the step most, if it also wastes fewer seconds on shapes
    and fits or takes no more memory. None below LEAST_GAIN. The planner looks further: this tries a few neighbours."""
    now, bytes_now = shape_waste(config, gpu, gpus_per_host, convention), estimate_memory(config, gpu).peak_bytes
    best, most = None, 1 - LEAST_GAIN
    for keys in _neighbours(config, gpus_per_host):
        if (new := changed(config, keys)) is None:
            continue
        then, memory = shape_waste(new, gpu, gpus_per_host, convention), estimate_memory(new, gpu)
        ratio = then.step_s / now.step_s
        if ratio <= most and then.total_s < now.total_s and memory.peak_bytes <= max(bytes_now, FIT_SHARE * gpu.capacity_bytes):
            best, most = Change(keys, new, memory.peak_bytes, memory.host_bytes, then.step_s, ratio), ratio
    return best


def better_shape_line(change: Change) -> str:
    """'model.vocab_size=50304 would make the step 2.1% shorter'."""
    assert change.step_ratio is not None, "better_shape knows the step"
    return f"{change.overrides} would make the step {1 - change.step_ratio:.1%} shorter"


def _neighbours(config: Config, gpus_per_host: int) -> Iterator[dict[str, Any]]:
    """Key -> value of each."""
    p, vocab_size = config.parallel, config.model.vocab_size
    multiple = TILE * p.pipe * p.tensor
    if vocab_size % multiple and config.train.init_from is None:
        yield {"model.vocab_size": -(-vocab_size // multiple) * multiple}
    ranks = p.tensor * int(p.data)
    for tensor in (p.tensor // 2, p.tensor * 2):
        if tensor and ranks % tensor == 0 and tensor <= gpus_per_host:
            yield {"parallel.tensor": tensor, "parallel.data": ranks // tensor}
    if p.pipe == 1:
        return
    if p.virtual_stages > 1:
        yield from ({"parallel.virtual_stages": v} for v in range(2, config.chunk_layers * p.virtual_stages + 1))
    stages = p.pipe * int(p.data)
    yield from ({"parallel.pipe": n, "parallel.data": stages // n} for n in divisors(stages) if n != p.pipe)
