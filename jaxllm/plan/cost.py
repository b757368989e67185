"""Cost of a training run: days, GPU-hours and energy, from tokens, their FLOPs and achieved FLOP/s."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.hardware import BOARD_WATTS, GPUS, Gpu

WITH_RECOMPUTATION = 8.0
"""FLOPs for each parameter and token if the forward pass runs twice, as in Narayanan et al. 2021 ("Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM"): time = 8 T P / (n X). Two for each forward pass, four backward."""

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
YEAR_S = 365.25 * DAY_S

OVERHEAD = 1.5
"""Factor for a GPU's share of the host (processors, memory, network cards, fans), of switches and of cooling. By data sheets a
complete host may take more, 10.2 kW for eight H100s of 0.7 kW, but training GPUs do not stay at their limit either. Chosen, not
measured."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class TrainingCost:
    tokens: float
    gpus: int
    seconds: float
    gpu_hours: float
    watts_per_gpu: float | None
    """Power of the board, before OVERHEAD; None if it is not known."""
    energy_kwh: float | None
    """Energy of all GPUs, with OVERHEAD."""

    @property
    def days(self) -> float:
        return self.seconds / DAY_S

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "days": self.days, "overhead": OVERHEAD}


def training_cost(
    tokens: float, flops_per_token: float, flops_per_s: float, gpus: int = 1, watts_per_gpu: float | None = None
) -> TrainingCost:
    """seconds = FLOPs per token x tokens / (gpus x FLOP/s), and what follows from that.

    FLOP/s, of each GPU, and FLOPs per token must be counted in the same way. With 8 per parameter and token (the forward pass
    twice), 175e9 parameters and 300e9 tokens take 34 days on 1,024 GPUs at 140e12 FLOP/s, and 288 years on one at 46.2e12; with
    6, those 288 years need 34.7e12 FLOP/s.

    Args:
      tokens: trained on; repeated tokens count each time.
      watts_per_gpu: of a board; None: the energy is not computed.
    """
    seconds = flops_per_token * tokens / (gpus * flops_per_s)
    gpu_hours = gpus * seconds / HOUR_S
    energy = None if watts_per_gpu is None else gpu_hours * watts_per_gpu * OVERHEAD / 1e3
    return TrainingCost(tokens, gpus, seconds, gpu_hours, watts_per_gpu, energy)


def board_watts(gpu: Gpu) -> float | None:
    """Maximum power of a board: by its name, else that of its compute capability; None if neither is known."""
    capability = gpu.chip.compute_capability
    alike = (watts for name, watts in BOARD_WATTS.items() if GPUS[name].chip.compute_capability == capability)
    return BOARD_WATTS.get(gpu.name, next(alike, None))


def parse_tokens(text: str) -> int:
    """Parses "15T" into 15_000_000_000_000; also K, M, B (decimal), plain and decimal numbers, and commas between thousands.

    Raises:
      ConfigError: the text is not such a number, or is below one token.
    """
    # A comma in another position may be a decimal comma: 1,5T is not 15T.
    integer = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*"
    match = re.fullmatch(rf"((?:{integer})(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([KMBTkmbt]?)", text.strip())
    # The exponent of a float has no limit.
    number = float(re.sub("[_,]", "", match[1])) * _SUFFIXES[match[2].upper()] if match else 0.0
    if not 1 <= number < math.inf:
        raise ConfigError(f"--tokens={text} is not a number of tokens: write one such as 300B or 15T (K, M, B or T).")
    return round(number)


def readable_count(number: float) -> str:
    """'15T', '1.5B', '12,345T': the inverse of parse_tokens, to four digits or more."""
    for suffix in ("T", "B", "M", "K"):
        if number >= _SUFFIXES[suffix]:
            units = number / _SUFFIXES[suffix]
            # Above four digits, the format g switches to exponents.
            return f"{units:.4g}{suffix}" if units < 1000 else f"{units:,.0f}{suffix}"
    return f"{number:.0f}"
