"""How far measured speeds are from predicted ones. Provisional: the factors are chosen, until they come from residuals."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import Config
from jaxllm.cost_model.hardware import Gpu

MOST_GPUS = 128
"""The most GPUs of a published run that the step-time model was compared with."""


@dataclass(frozen=True)
class ErrorRange:
    low: float
    """Factor on the predicted tokens/s below which measured runs rarely fall, such as 0.88."""
    high: float
    """Factor above which they rarely rise."""
    beyond: tuple[str, ...]
    """Why the prediction is extrapolated, in words, such as "1,024 GPUs, beyond the 256 of the data"; () if it is not."""


def error_range(config: Config, gpu: Gpu, gpus_per_host: int) -> ErrorRange:
    """The range of a resolved config's predicted speed."""
    many = config.devices > MOST_GPUS
    return ErrorRange(0.88, 1.05, (f"{config.devices:,} GPUs, beyond the {MOST_GPUS} of the data",) if many else ())
