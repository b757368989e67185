"""Parts of the step-time model: its constants, the share of a matmul's speed that its shape leaves, and transfers
behind compute. step_time.py says what is made of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

COMMUNICATION = ("tensor", "tensor_skew", "context", "pipe", "data", "replica", "offload", "offload_state")
"""Terms that wait for other GPUs or for the host."""


@dataclass(frozen=True)
class Fitted:
    """The four constants that were fitted."""

    matmul_share: float
    """Of the dense peak, what a large matmul reaches whose tiles fill the GPU: before Hopper."""
    hopper_matmul_share: float
    """From Hopper on, whose power does not allow the data sheet's clock."""
    sync_s: float
    """What ranks of tensor wait for each other at each of their collectives, whatever its bytes."""
    loader_tokens_per_s: float
    """Megatron's convention alone: what a data rank's input delivers. The published runs on 16 GPUs a data rank take 185 to 215
    ms a sequence of 8192, whatever their layout and microbatch, where others take 260 and more."""


FITTED = Fitted(matmul_share=0.773, hopper_matmul_share=0.557, sync_s=63e-6, loader_tokens_per_s=41_450)

BANDWIDTH_SHARE = 0.8
"""Of a data sheet's link or network bandwidth, what collectives reach: 230 to 240 of 300 GB/s on eight A100s and 360 to 370 of
450 on H100s are what NCCL's own tests usually print."""
MEMORY_SHARE = 0.8
"""Of the memory's bandwidth, what kernels that only move bytes reach; a rule of thumb."""
KERNEL_S = 5e-6
"""To start a kernel, fill the GPU and empty it again; a rule of thumb."""
STEP_KERNELS = 400
"""Of one update."""
ATTENTION_SHARES = (0.60, 0.50)
"""Of the dense peak, what fused causal attention reaches forward and backward with heads of 128 and long sequences: Dao 2023,
"FlashAttention-2", for A100s, and Shah et al. 2024, "FlashAttention-3", for cuDNN on H100s; rounded."""
ATTENTION_ROWS = 128
"""Queries of one thread block."""
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 64, 0.5))
"""Rows and columns of a matmul's output tiles, and how fast each kind is beside the largest: a small one reads its inputs more
often. Rules of thumb."""
SHORTEST_SUM, SPLIT_SHARE = 1024, 0.95
"""A long sum may be split over multiprocessors, in parts of no less, that are added in the end (split-K); a rule of thumb."""


@dataclass(frozen=True)
class StepTime:
    terms_s: dict[str, float]
    """What the step waits for, by name, in seconds; axes of size 1 have no term. They sum to step_s."""
    hidden_s: dict[str, float]
    """Transfers behind compute, by the same names."""
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs: causal, or in Megatron's convention as that counts them."""

    @property
    def step_s(self) -> float:
        return sum(self.terms_s.values())

    @property
    def exposed_communication_share(self) -> float:
        """Of the step, what waits for other GPUs and the host; what lies in the bubble is not counted."""
        return sum(self.terms_s.get(name, 0.0) for name in COMMUNICATION) / self.step_s


@lru_cache(maxsize=65536)
def tile_share(rows: int, columns: int, length: int, multiprocessors: int) -> float:
    """What a matmul's shape leaves of a GPU's speed.

    The output's tiles are dealt to the multiprocessors in waves. The last may be nearly empty, and tiles at the edges reach
    beyond the output. The best of TILES, with the sum over `length` whole or in 2, 4 or 8 parts.
    """
    splits = [ways for ways in (1, 2, 4, 8) if ways == 1 or length >= ways * SHORTEST_SUM]
    best = 0.0
    for tile_rows, tile_columns, speed in TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        for ways in splits:
            places = -(-tiles * ways // multiprocessors) * multiprocessors
            filled = rows * columns * ways / (places * tile_rows * tile_columns)
            best = max(best, filled * speed * (SPLIT_SHARE if ways > 1 else 1.0))
    return best


class Transfers:
    """Adds up what shows of transfers and what lies behind compute."""

    def __init__(self):
        self.exposed_s: dict[str, float] = {}
        self.hidden_s: dict[str, float] = {}

    def add(self, name: str, transfer_s: float, behind_s: float = 0.0, times: float = 1) -> None:
        """`times` transfers of so many seconds, each behind so much compute."""
        hidden_s = min(transfer_s, behind_s)
        self.exposed_s[name] = self.exposed_s.get(name, 0.0) + times * (transfer_s - hidden_s)
        if times * hidden_s > 0:
            self.hidden_s[name] = self.hidden_s.get(name, 0.0) + times * hidden_s

    def add_together(self, transfers_s: dict[str, float], behind_s: float) -> None:
        """Transfers over different links, all behind the same compute: the longest alone may show."""
        longest = max(transfers_s, key=transfers_s.__getitem__, default="")
        for name, transfer_s in transfers_s.items():
            self.add(name, transfer_s, behind_s if name == longest else math.inf)

    @property
    def total_s(self) -> float:
        """Of what shows."""
        return sum(self.exposed_s.values())


def add_times(sums: dict[str, float], found: dict[str, float], times: float = 1) -> None:
    for name, time_s in found.items():
        sums[name] = sums.get(name, 0.0) + times * time_s
