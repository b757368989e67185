"""Parts of the step-time model: its constants, the share of a matmul's speed that its shape permits, and overlapped transfers.
step_time.py explains the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

# Python's own sum of floats rounds otherwise from 3.12 on: a prediction would depend on the version in its last digit.
from math import fsum as sum
from typing import NamedTuple

BETWEEN_GPUS = ("tensor", "context", "expert", "pipe", "data", "replica")
"""Terms of transfers over a mesh axis."""
OUTER_STEP = "outer_step"
"""The term of DiLoCo's transfers between replicas: a step's share of them."""
BETWEEN_REPLICAS = ("replica", OUTER_STEP)
SCHEDULED = "transfers"
"""The term that takes their place in StepTime.as_scheduled."""
COMMUNICATION = (*BETWEEN_GPUS, OUTER_STEP, SCHEDULED, "tensor_skew", "overlap", "slowest_gpu", "offload", "offload_state")
"""Terms that wait for other GPUs or for the host."""


@dataclass(frozen=True)
class Fitted:
    """Constants of one convention's programs, fitted to published runs (FITTED) or measured (MEASURED)."""

    matmul_share: float
    """Share of the dense peak that a large matmul reaches if its tiles fill the GPU: before Hopper."""
    hopper_matmul_share: float
    """The same from Hopper on, whose power limit does not permit the data sheet's clock."""
    sync_s: float
    """Time that tensor ranks wait for each other at each of their collectives, for any number of bytes."""
    spread: float
    """Standard deviation of the speed of GPUs of one kind, as a share of it: all wait for the slowest."""
    mask_bytes_per_s: float
    """Bytes of attention masks that one loader makes: before Hopper. A mask has S x S bytes. Megatron-LM makes them unless told
    not to (--no-create-attention-mask-in-dataloader), and the published runs let it."""
    hopper_mask_bytes_per_s: float
    """The same of the hosts with H100s, whose processors are faster."""
    mask_jitter: float
    """Standard deviation of the time for the mask of a microbatch of one sequence, as a share of it, for each loader of a host.
    That of b sequences is 1/b of it, which fits better than 1/sqrt(b). These three are of Megatron's convention only."""
    hopper_fp8_share: float = 0.600
    """As hopper_matmul_share, of the dense peak of FP8."""
    hopper_memory_share: float = 0.8
    """Share of the memory bandwidth that memory-bound kernels reach, from Hopper on; a rule of thumb."""
    hopper_rounding_share: float = 0.8
    """The same of kernels that round to FP8, which also store arrays in another order."""
    attention_shares: tuple[float, float] = (0.60, 0.50)
    """Share of the dense peak that fused causal attention reaches forward and backward with heads of 128 and long sequences,
    before Hopper: Dao 2023, "FlashAttention-2", for A100s; rounded."""
    hopper_attention_shares: tuple[float, float] = (0.60, 0.50)
    """The same from Hopper on."""
    hopper_small_head_shares: tuple[float, float] = (0.60, 0.50)
    """The same with smaller heads."""
    hopper_kernel_s: float = 5e-6
    """KERNEL_S from Hopper on."""
    overlap_cost: float = 0.0
    """Seconds by which compute is longer for each second of a transfer beside it: NCCL's kernels take multiprocessors."""

    def share_of_matmuls(self, is_hopper: bool, is_fp8: bool) -> float:
        """Share of the dense peak of their precision that large matmuls reach."""
        if not is_hopper:
            return self.matmul_share
        return self.hopper_fp8_share if is_fp8 else self.hopper_matmul_share


FITTED = Fitted(
    matmul_share=0.879,
    hopper_matmul_share=0.600,
    sync_s=73e-6,
    spread=0.011,
    mask_bytes_per_s=443e6,
    hopper_mask_bytes_per_s=686e6,
    mask_jitter=0.705,
)

MEASURED = replace(
    FITTED,
    hopper_matmul_share=0.765,
    hopper_fp8_share=0.725,
    hopper_memory_share=0.90,
    hopper_rounding_share=0.59,
    hopper_attention_shares=(0.52, 0.426),
    hopper_small_head_shares=(0.426, 0.355),
    hopper_kernel_s=1e-6,
)
"""Constants of jaxllm's own programs on one GPU from Hopper on: of profiles of three steps on one H100 SXM of 700 W, whose
power limit lowers its clock (benchmarks/RESULTS.md, "On one H100"). Shares are of large matmuls: Llama 3.2 1B's reach 0.80 and
ten layers of 8B 0.745. XLA runs a step's kernels in CUDA graphs, with 1 microsecond between two."""

PUBLISHED = replace(
    MEASURED,
    matmul_share=0.709,
    hopper_matmul_share=0.578,
    # As much less as bfloat16's. Other programs gain more by FP8 than jaxllm did on one H100, with kernels that it has not.
    hopper_fp8_share=MEASURED.hopper_fp8_share * 0.578 / MEASURED.hopper_matmul_share,
    overlap_cost=0.155,
)
"""Constants of jaxllm's own programs where it has not run: on several GPUs, and before Hopper. They are fitted to what programs
of its kind reach by the public record (`python benchmarks/published_speeds.py --fit`): clocks under load, kernels that share a
GPU with NCCL's, and all that this model leaves out are in them."""

BANDWIDTH_SHARE = 0.8
"""Share of a data sheet's link or network bandwidth that collectives reach: NCCL's own tests usually print 230 to 240 of 300
GB/s on eight A100s and 360 to 370 of 450 on H100s."""
MEMORY_SHARE = 0.8
"""Share of the memory bandwidth that memory-bound kernels reach before Hopper; a rule of thumb."""
KERNEL_S = 5e-6
"""Time to start a kernel, fill the GPU and drain it; a rule of thumb."""
STEP_KERNELS = 400
"""Kernels of one update."""
LARGE_HEAD = 128
"""Head size from which attention reaches the faster shares."""
ATTENTION_ROWS = 128
"""Queries per thread block."""
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 64, 0.5))
"""Rows and columns of a matmul's output tiles, and the speed of each kind relative to the largest: a small tile reads its
inputs more often. Rules of thumb."""
SHORTEST_SUM, SPLIT_SHARE = 1024, 0.95
"""Shortest part, and relative speed, of a long sum that is split over multiprocessors and added at the end (split-K); rules of
thumb."""


def largest_deviation(count: int) -> float:
    """Expected largest of `count` normally distributed values above their mean, in standard deviations: about sqrt(2 ln n)
    (Cramer 1946, "Mathematical Methods of Statistics", section 28.6). 0 for one value."""
    return math.sqrt(2 * math.log(count))


@dataclass(frozen=True)
class StepTime:
    terms_s: dict[str, float]
    """Exposed time by name, in seconds; axes of size 1 have no term. The terms sum to step_s."""
    hidden_s: dict[str, float]
    """Overlapped time of transfers, by the same names."""
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs: causal, or in Megatron's convention as Megatron-LM counts them."""
    bubble_transfers_s: float = 0.0
    """The part of the term `bubble` that is exposed transfers between GPUs."""
    forward_share: float = 1 / 3
    """The forward pass's share of both passes. What is not of one of them, such as the bubble, counts for both alike."""

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of the forward pass, the backward pass and the update; they sum to step_s."""
        update_s = sum(self.terms_s.get(name, 0.0) for name in ("optimizer", "offload_state"))
        forward_s = self.forward_share * (self.step_s - update_s)
        return {"forward": forward_s, "backward": self.step_s - update_s - forward_s, "update": update_s}

    @property
    def step_s(self) -> float:
        return sum(self.terms_s.values())

    @property
    def transfers_s(self) -> float:
        """Exposed time of transfers between GPUs, those in the bubble too."""
        return sum(self.terms_s.get(name, 0.0) for name in BETWEEN_GPUS) + self.bubble_transfers_s

    def as_scheduled(self, transfers_s: float) -> StepTime:
        """The same step with the exposed transfers of its compiled schedule (compile/overlap.py) in place of the model's.

        Replaced: `transfers_s`, which is the exposed time of collectives and messages over every mesh axis. The bubble loses
        its part, because the compiled loop sends in the ticks of the bubble too, and the simulation counts them.

        Kept: all compute, with the bubble's; `tensor_skew`, because one device's schedule does not show how long ranks wait
        for each other; `overlap`, as predicted; `outer_step`, which is not in each step; `offload` and `offload_state`, because
        the simulation leaves out copies to and from the host.

        Both sides take a transfer's time from cost_model/network.py. They differ in what hides it: the simulation counts
        matmuls and attention alone, at one speed. A doubt: copies to the host and transfers that wait at the same time count
        one after the other.

        Args:
          transfers_s: exposed time of all transfers of a step on one device, in seconds.
        """
        kept = {name: time_s for name, time_s in self.terms_s.items() if name not in BETWEEN_GPUS}
        if self.bubble_transfers_s:
            kept["bubble"] -= self.bubble_transfers_s
        terms = {**kept, SCHEDULED: transfers_s}
        hidden = {name: time_s for name, time_s in self.hidden_s.items() if name not in BETWEEN_GPUS}
        faster = self.step_s / sum(terms.values())
        speeds = faster * self.tokens_per_s_per_gpu, faster * self.tflops_per_gpu
        return StepTime(terms, hidden, *speeds, forward_share=self.forward_share)

    @property
    def between_replicas_s(self) -> float:
        """Predicted exposed time of transfers between replicas, in the mean step."""
        return sum(self.terms_s.get(name, 0.0) for name in BETWEEN_REPLICAS)

    @property
    def exposed_communication_share(self) -> float:
        """Share of the step that waits for other GPUs and the host. Transfers in the bubble count only as_scheduled."""
        return sum(self.terms_s.get(name, 0.0) for name in COMMUNICATION) / self.step_s


class TileParts(NamedTuple):
    """Shares of a matmul's speed that its output's tiles permit; 1 each at best."""

    edges: float
    """Elements of the output, of all elements of its tiles: those at the edges extend beyond it."""
    waves: float
    """Tiles, of the places for them on the multiprocessors: the last wave may be nearly empty."""
    kind: float
    """Speed of this size of tile, and of a sum in parts, relative to the largest tile."""


def tile_parts(rows: int, columns: int, length: int, multiprocessors: int) -> TileParts:
    """The parts of tile_share for the tile, and the parts of the sum over `length` (1, 2, 4 or 8), with the largest product."""
    splits = [ways for ways in (1, 2, 4, 8) if ways == 1 or length >= ways * SHORTEST_SUM]
    best, parts = 0.0, TileParts(1.0, 1.0, 1.0)
    for tile_rows, tile_columns, speed in TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        for ways in splits:
            places = -(-tiles * ways // multiprocessors) * multiprocessors
            kind = speed * (SPLIT_SHARE if ways > 1 else 1.0)
            share = rows * columns * ways / (places * tile_rows * tile_columns) * kind
            if share > best:
                best, parts = share, TileParts(rows * columns / (tiles * tile_rows * tile_columns), tiles * ways / places, kind)
    return parts


@lru_cache(maxsize=65536)
def tile_share(rows: int, columns: int, length: int, multiprocessors: int) -> float:
    """Share of a GPU's speed that a matmul's shape permits: its output's tiles are assigned to the multiprocessors in waves."""
    return math.prod(tile_parts(rows, columns, length, multiprocessors))


class Transfers:
    """Sums exposed and hidden times of transfers."""

    def __init__(self):
        self.exposed_s: dict[str, float] = {}
        self.hidden_s: dict[str, float] = {}

    def add(self, name: str, transfer_s: float, behind_s: float = 0.0, times: float = 1) -> None:
        """Adds `times` transfers of transfer_s, each overlapped with behind_s of compute."""
        hidden_s = min(transfer_s, behind_s)
        self.exposed_s[name] = self.exposed_s.get(name, 0.0) + times * (transfer_s - hidden_s)
        if times * hidden_s > 0:
            self.hidden_s[name] = self.hidden_s.get(name, 0.0) + times * hidden_s

    def add_together(self, transfers_s: dict[str, float], behind_s: float) -> None:
        """Adds transfers over different links that overlap with the same compute: only the longest can be exposed."""
        longest = max(transfers_s, key=transfers_s.__getitem__, default="")
        for name, transfer_s in transfers_s.items():
            self.add(name, transfer_s, behind_s if name == longest else math.inf)

    @property
    def total_s(self) -> float:
        """Total exposed time."""
        return sum(self.exposed_s.values())


def add_times(sums: dict[str, float], times_s: dict[str, float], times: float = 1) -> None:
    for name, time_s in times_s.items():
        sums[name] = sums.get(name, 0.0) + times * time_s
