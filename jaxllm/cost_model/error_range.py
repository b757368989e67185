"""How far predicted speeds may be off: ranges from published runs that were left out of the fit.

    found = error_range(config, GPUS["h100-80gb"], gpus_per_host=8)
    found.low * tokens_per_s, found.high * tokens_per_s
    found.beyond                               ("1,024 GPUs, beyond the 256 of the data",)

Two errors add up. The layout's: the constants were fitted to all published runs but one group (larger clusters, longer
sequences, another kind of host), and predicted that group; LAYOUT_ERRORS is what holds HELD of its rows, by kind of layout. It
alone decides between two layouts on one machine. The machine's: MACHINE_ERROR is what holds as many of the bfloat16 speeds that
other projects publish (benchmarks/published/others.csv), none of which was fitted. `python benchmarks/step_time.py --fit` and
`--ranges` print both. jaxllm itself has not been timed on GPUs, so that no range is of its own runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import Config
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.network import group_of

HELD = 0.8
"""Share of runs that a range should hold."""
LAYOUT_ERRORS: Mapping[str, float] = {
    "plain": 0.032,
    "pipeline": 0.051,
    "context": 0.054,
    "pipeline and context": 0.130,
    # Its left-out rows are within 0.053, but they wait for attention masks and not for the ring: taken as twice `context`.
    "context across hosts": 0.108,
}
"""Kind of layout -> largest absolute log(measured / predicted) of HELD of the left-out rows."""
MACHINE_ERROR = 0.236
"""The same of speeds by other projects."""
MOST_GPUS, MOST_GPUS_PER_HOST, LONGEST_SEQUENCE = 256, 8, 16384
GENERATIONS = ((8, 0), (9, 0))
"""Limits and compute capabilities of the fitted runs."""


@dataclass(frozen=True)
class ErrorRange:
    low: float
    """Factor on predicted tokens/s: HELD of measured runs should be between it and `high`."""
    high: float
    beyond: tuple[str, ...]
    """What the prediction is extrapolated by; () if it is within the data."""
    layout_error: float = 0.0
    """Two layouts on one machine whose predicted speeds differ by less than this share may be in the other order."""


def error_range(config: Config, gpu: Gpu, gpus_per_host: int) -> ErrorRange:
    """The range of a predicted speed of a resolved config."""
    layout = LAYOUT_ERRORS[kind_of_layout(config, gpu, gpus_per_host)]
    error = math.hypot(layout, MACHINE_ERROR)
    return ErrorRange(math.exp(-error), math.exp(error), tuple(extrapolations(config, gpu, gpus_per_host)), layout)


def range_lines(tokens_per_s_per_gpu: float, found: ErrorRange) -> Iterator[str]:
    """The range of a predicted speed in words, and what it is extrapolated by."""
    low, high = (factor * tokens_per_s_per_gpu for factor in (found.low, found.high))
    yield f"range {low:,.0f} to {high:,.0f} tokens/s/GPU, which should hold four of five runs (as of published ones)"
    if found.beyond:
        yield f"extrapolated: {'; '.join(found.beyond)}"


def range_json(tokens_per_s_per_gpu: float, found: ErrorRange) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "tokens_per_s_per_gpu_range": [factor * tokens_per_s_per_gpu for factor in (found.low, found.high)],
        "extrapolated": list(found.beyond),
        "layout_error": found.layout_error,
    }


def kind_of_layout(config: Config, gpu: Gpu, gpus_per_host: int) -> str:
    """The key of LAYOUT_ERRORS."""
    p = config.parallel
    if group_of(p.context, p.tensor, gpus_per_host).hosts > 1:
        return "context across hosts"
    names = [name for name, size in (("pipeline", p.pipe), ("context", p.context)) if size > 1]
    return " and ".join(names) or "plain"


def extrapolations(config: Config, gpu: Gpu, gpus_per_host: int) -> Iterator[str]:
    """What the fitted runs do not have, in words."""
    devices, length = config.devices, config.train.sequence_length
    if devices > MOST_GPUS:
        yield f"{devices:,} GPUs, beyond the {MOST_GPUS} of the data"
    if min(gpus_per_host, devices) > MOST_GPUS_PER_HOST:
        yield f"hosts of {gpus_per_host} GPUs, beyond the {MOST_GPUS_PER_HOST} of the data"
    if length > LONGEST_SEQUENCE:
        yield f"sequences of {length:,} tokens, beyond the {LONGEST_SEQUENCE:,} of the data"
    if gpu.chip.compute_capability not in GENERATIONS:
        yield f"{gpu.name}, whose generation the data do not have"
    if config.model.multiplies_fp8:
        yield f"model.matmul_dtype={config.model.matmul_dtype}, which the data do not have"
