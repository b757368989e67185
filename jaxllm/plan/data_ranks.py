"""Hours to a loss against data ranks. The noise scale gives the number of steps per batch size, the step-time model their
length.

    needed = steps_to_loss(batch_tokens, noise_tokens)           of a run, one value per step up to that loss
    needed.steps(2**20), needed.tokens(2**20)                 if every batch had 2**20 tokens
    sweep = over_data_ranks(config, needed, gpu=GPUS["h100-80gb"])
    sweep.stops_paying, sweep.because

A step of batch B makes the progress of 1 / (1 + N / B) steps without noise, where N is the noise scale at that time (McCandlish
et al. 2018, arXiv 1812.06162, sections 2.2 and 2.3, and appendix D, which follows a changing N). A run with batches B_i
therefore made the progress of least_steps = sum of 1 / (1 + N_i / B_i) noiseless steps. At another batch B it would have taken

    steps   least_steps + least_tokens / B          least_tokens = sum of N_i / (1 + N_i / B_i)
    tokens  least_steps B + least_tokens

Both are twice their minimum at B = least_tokens / least_steps. The law assumes that the learning rate is well chosen at every
batch, and that gradients are equally noisy in all directions that matter. The result is an order of magnitude: experiments with
branched runs found critical batches far above the noise scale (Merrill et al. 2025, "Critical Batch Size Revisited").
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from jaxllm.config import Config
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.cost import HOUR_S
from jaxllm.plan.sweep import PAYS

MOST_RANKS = 8192
MOST_MICROBATCHES = 256
"""Largest number of microbatches tried per rank, in powers of 2."""
ROWS_BEYOND = 2
"""Doublings shown after the first that does not pay, and beyond the run's own ranks."""


@dataclass(frozen=True)
class StepsToLoss:
    """Steps and tokens needed to reach a loss, for any batch size."""

    least_steps: float
    """Steps with batches so large that gradients have no noise."""
    least_tokens: float
    """Tokens with batches so small that no token is wasted."""

    def steps(self, batch_tokens: float) -> float:
        return self.least_steps + self.least_tokens / batch_tokens

    def tokens(self, batch_tokens: float) -> float:
        return self.steps(batch_tokens) * batch_tokens


def steps_to_loss(batch_tokens: Sequence[float] | np.ndarray, noise_tokens: Sequence[float] | np.ndarray) -> StepsToLoss:
    """Computes the needed steps from the steps of a run up to the loss.

    Args:
      batch_tokens: tokens of each step.
      noise_tokens: noise scale at each step, above 0.
    """
    batch, noise = np.asarray(batch_tokens, float), np.asarray(noise_tokens, float)
    worth = 1 / (1 + noise / batch)
    return StepsToLoss(float(worth.sum()), float((noise * worth).sum()))


@dataclass(frozen=True)
class RankRow:
    """The fastest way to the loss on one number of data ranks."""

    data_ranks: int
    gpus: int
    microbatches: int
    """Microbatches per rank, of the config's size: the chosen accumulation."""
    batch_tokens: int
    steps: float
    tokens: float
    step_s: float
    fits: bool | None
    """Whether the closed form of memory fits; None without a GPU."""

    @property
    def hours(self) -> float:
        return self.steps * self.step_s / HOUR_S

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "hours": self.hours, "gpu_hours": self.gpu_hours}


@dataclass(frozen=True)
class OverRanks:
    rows: tuple[RankRow, ...]
    """Sorted by ranks; each row has twice the ranks of the one before."""
    stops_paying: int | None
    """Data ranks from which doubling is less than 1 + PAYS times as fast; None: all doublings pay, or none fits."""
    because: str
    """The reason, in one sentence."""

    def to_json(self) -> dict[str, Any]:
        return {"rows": [row.to_json() for row in self.rows], "stops_paying": self.stops_paying, "because": self.because}


def over_data_ranks(
    config: Config,
    needed: StepsToLoss,
    gpu: Gpu | None = None,
    gpus_per_host: int | None = None,
    *,
    tokens_per_s_per_device: float | None = None,
    slower: float = 1.0,
) -> OverRanks:
    """Hours and GPU-hours to a loss on 1, 2, 4 ... times as many data ranks, with pipe, context, tensor and the microbatch of
    the config. Each number of ranks uses the accumulation that reaches the loss soonest: less accumulation needs fewer tokens,
    more accumulation exchanges gradients less often. Data ranks are counted over all replicas; the number of replicas is
    constant.

    Args:
      config: resolved.
      gpu: the kind to predict steps for. None: any number of devices keeps tokens_per_s_per_device, as if no device ever waited
        for another. This is an upper bound.
      gpus_per_host: default: that of the kind.
      slower: factor on predicted times: measured over predicted time of the run itself.
    """

    def row(ranks: int, microbatches: int) -> RankRow:
        trial = with_ranks(config, ranks, microbatches)
        batch, devices = trial.step_tokens, trial.devices
        if gpu is None:
            step_s = batch / (tokens_per_s_per_device * devices)  # type: ignore[operator]
        else:
            per_host, _ = choose_gpus_per_host(devices, None, gpus_per_host or gpu.gpus_per_host, trial.parallel)
            step_s = slower * estimate_step_time(trial, gpu, per_host).step_s
        return RankRow(ranks, devices, microbatches, batch, needed.steps(batch), needed.tokens(batch), step_s, None)

    def best(ranks: int) -> RankRow:
        fastest = min((row(ranks, M) for M in accumulations(config)), key=lambda one: one.hours)
        peak_bytes = estimate_memory(with_ranks(config, ranks, fastest.microbatches), gpu).peak_bytes
        return fastest if gpu is None else replace(fastest, fits=peak_bytes <= gpu.capacity_bytes)

    replicas, own = config.parallel.replica, config.data_ranks
    rows = [best(replicas * data) for data in doublings(int(config.parallel.data))]
    stops, because = verdict(rows)
    last = 2**ROWS_BEYOND * max(own, stops) if stops else MOST_RANKS
    return OverRanks(tuple(one for one in rows if one.data_ranks <= max(own, last)), stops, because)


def with_ranks(config: Config, ranks: int, microbatches: int) -> Config:
    """The config with `ranks` data ranks, in as many replicas as before, and `microbatches` microbatches per step on each. It
    is not validated: it serves for computations, not for a run."""
    microbatch = config.microbatch_sequences
    batch: dict[str, Any] = {"global_batch_sequences": ranks * microbatches * microbatch, "microbatch_sequences": microbatch}
    # The same batch size in all steps, and a single optimizer.
    batch |= {"batch_schedule": (), "batch_grows_to": None, "length_schedule": (), "batch_lr": "none", "diloco_steps": None}
    parallel = config.parallel.model_copy(update={"data": ranks // config.parallel.replica})
    return config.model_copy(update={"parallel": parallel, "train": config.train.model_copy(update=batch)})


def accumulations(config: Config) -> list[int]:
    """Numbers of microbatches that a step may have; an interleaved pipeline needs complete rounds."""
    unit = config.parallel.pipe if config.parallel.virtual_stages > 1 else 1
    return [unit * 2**power for power in range(max(1, (MOST_MICROBATCHES // unit).bit_length()))]


def doublings(own: int) -> Iterator[int]:
    """Half of `own`, half of that ... in ascending order, `own`, and its doublings up to MOST_RANKS."""
    ranks = own // (own & -own)
    while ranks <= max(own, MOST_RANKS):
        yield ranks
        ranks *= 2


def verdict(rows: Sequence[RankRow]) -> tuple[int | None, str]:
    """(number of ranks at which doubling stops paying, reason). Each row has twice the ranks of the one before; rows that do
    not fit are skipped."""
    fitting = [row for row in rows if row.fits is not False]
    if not fitting:
        return None, f"Nothing fits, on up to {rows[-1].gpus:,} GPUs: the microbatch or the model is too large for them."
    for fewer, more in pairwise(fitting):
        gain = fewer.hours / more.hours
        if gain < 1 + PAYS:
            times = "no sooner" if gain <= 1 else f"{gain:.2f} times sooner"
            return fewer.data_ranks, (
                f"Doubling stops paying at {fewer.data_ranks:,} data rank{'s' if fewer.data_ranks > 1 else ''} "
                f"({_gpus(fewer.gpus)}): twice as many reach the loss {times}, for "
                f"{more.gpu_hours / fewer.gpu_hours:.2f} times the GPU-hours; to pay it takes {1 + PAYS:.1f} times."
            )
    return None, f"Every doubling pays, up to {fitting[-1].data_ranks:,} data ranks ({_gpus(fitting[-1].gpus)})."


def _gpus(count: int) -> str:
    return f"{count:,} GPU{'s' if count > 1 else ''}"
