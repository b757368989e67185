"""Seconds of a step that shapes waste on a kind of GPU: what the step would gain if they divided evenly. No JAX.

    waste = shape_waste(config, GPUS["h100-80gb"], gpus_per_host=8)
    waste.lost_s["waves"], waste.shares["waves"]

Each part is the step by the step-time model less the same step without that cause, from which the next part is counted: the
parts sum to the gain without all of them. So a loss that nothing feels counts as none, such as a smaller tile in a matmul that
waits for memory. The tile of a matmul stays the one that the model chooses, also where another would be best without a cause.

    identity_layers    layers of zeros that fill up the chunks of a pipeline, and compute like others
    waves              multiprocessors without a tile in the last wave of a matmul
    tiles              parts of a matmul's tiles beyond the edge of its output
    small_tiles        tiles below the largest, and sums in parts, where a matmul is too small for others
    attention_waves    multiprocessors without a thread block in the last wave of fused attention
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxllm.config import Config
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import TileParts, tile_parts
from jaxllm.cost_model.step_time import step_model

PARTS = ("identity_layers", "waves", "tiles", "small_tiles", "attention_waves")


@dataclass(frozen=True)
class ShapeWaste:
    lost_s: dict[str, float]
    """Seconds of the step by cause (PARTS)."""
    step_s: float

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the step by cause."""
        return {name: lost_s / self.step_s for name, lost_s in self.lost_s.items()}

    @property
    def total_s(self) -> float:
        """Seconds of all causes."""
        return sum(self.lost_s.values())

    def to_json(self) -> dict[str, Any]:
        return {"lost_s": dict(self.lost_s), "shares": self.shares}

    def line(self) -> str:
        """'Of these, lost to: tiles and waves 3.1%, identity layers 4.8%'."""
        shares = self.shares
        together = {
            "tiles and waves": shares["tiles"] + shares["waves"],
            "small tiles": shares["small_tiles"],
            "attention's last wave": shares["attention_waves"],
            "identity layers": shares["identity_layers"],
        }
        listed = [f"{name} {share:.1%}" for name, share in together.items() if share >= 0.0005]
        return f"of these, lost to: {', '.join(listed) or 'no shape, to 0.05%'}"


def matmul_parts(config: Config, gpu: Gpu, gpus_per_host: int) -> dict[tuple[int, ...], TileParts]:
    """Rows, columns and length of the sum of every matmul in a resolved config's step -> what its tiles permit."""
    found = {}

    class Noting(StepModel):
        def tile_share(self, rows: int, columns: int, length: int) -> float:
            parts = found[rows, columns, length] = tile_parts(rows, columns, length, gpu.chip.multiprocessors)
            return math.prod(parts)

    Noting(config, gpu, gpus_per_host).time()
    return found


def shape_waste(config: Config, gpu: Gpu, gpus_per_host: int, convention: str = "jaxllm") -> ShapeWaste:
    """Waste of a resolved config's step; arguments and errors as in estimate_step_time."""
    base = step_model(convention)

    class Without(base):
        """The step without some of PARTS."""

        def __init__(self, removed: tuple[str, ...]):
            super().__init__(config, gpu, gpus_per_host)
            self.removed = removed
            if "identity_layers" in removed:
                self.chunk_layers = config.model.num_layers / (self.P * self.V)

        def tile_share(self, rows: int, columns: int, length: int) -> float:
            parts = tile_parts(rows, columns, length, gpu.chip.multiprocessors)
            named = {"tiles": parts.edges, "waves": parts.waves, "small_tiles": parts.kind}
            return math.prod(share for name, share in named.items() if name not in self.removed)

        def attention_share(self, blocks: int) -> float:
            return 1.0 if "attention_waves" in self.removed else super().attention_share(blocks)

    steps_s = [Without(PARTS[:count]).time().step_s for count in range(len(PARTS) + 1)]
    return ShapeWaste({name: steps_s[at] - steps_s[at + 1] for at, name in enumerate(PARTS)}, steps_s[0])
