"""Searches over several numbers of GPUs or sequence lengths."""

import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from jaxllm.config import Config, ConfigError
from jaxllm.config.model_spec import parameter_count
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import gpus_beside
from jaxllm.cost_model.network import ALL_REDUCES, group_of, links_of
from jaxllm.plan.cost import DAY_S
from jaxllm.plan.fastest_remat import silent
from jaxllm.plan.plan_result import Candidate, Plan, ranked
from jaxllm.plan.search import SearchOptions, any_fits, search, why_nothing

Objective = Literal["speed", "gpus", "sequence", "microbatch"]
"""Objective of a plan; see objective_line()."""
OBJECTIVES = get_args(Objective)
PAYS = 0.5
"""Share of the added GPUs' speed that must be gained for them to pay in time: twice the GPUs, 1.5 times the tokens/s."""
STEPS_BETWEEN = 16
"""Maximum numbers of GPUs tried between two powers of 2."""
SEQUENCE_UNIT = 1024
"""Longest sequences are multiples of this."""
MOST_TOKENS = 2**26
"""No longer sequence is tried."""


@dataclass(frozen=True)
class SweepRow:
    """The best config on one number of GPUs by prediction, also where schedules are known, so that rows can be compared. A plan
    that was confirmed may have another winner; what its compilations refused is left out here too."""

    gpus: int
    gpus_per_host: int
    best: Candidate | None
    """None: nothing fits or divides."""
    efficiency: float | None
    """tokens/s/GPU relative to the smallest number of GPUs that fits."""
    days: float | None
    """For the requested tokens."""
    reduction_s: dict[str, float]
    """Seconds of one sum of the float32 gradients over data x context, in closed form, without overlap: ring, tree and
    hierarchical."""

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.best is None else self.best.tokens_per_s_per_gpu * self.gpus

    def to_json(self) -> dict[str, Any]:
        best, exposed = self.best and self.best.to_json(), self.best and self.best.time.exposed_communication_share
        return {**vars(self), "best": best, "tokens_per_s": self.tokens_per_s, "exposed_communication_share": exposed}


@dataclass(frozen=True)
class Sweep:
    rows: tuple[SweepRow, ...]
    stops_paying: int | None
    """The first number of GPUs from which the next gains less than PAYS of what it could; None: all pay."""
    because: str
    """The step after it, in words."""
    interrupted: bool = False
    """Whether the last search was cut short and the later ones never ran."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.to_json() for row in self.rows]}


def sweep_gpus(
    config: Config,
    gpu: Gpu,
    gpus: int,
    gpus_per_host: int | None = None,
    options: SearchOptions = SearchOptions(),
    *,
    known: Plan | None = None,
    tokens: float | None = None,
) -> Sweep:
    """The best config of 1, 2, 4 ... up to `gpus`, or of so many for each replica, all with the config's global batch.

    Args:
      known: a plan of the same config and options, confirmed or not, to use for its number of GPUs.
    """
    of_known, fastest = {} if known is None else {known.gpus: known}, replace(options, best=1, progress=silent)
    plans, counts = [], sorted({*_doubling(gpus, config), *of_known})
    for number, count in enumerate(counts):
        host = host_size(count, gpus_per_host, config)
        plans.append(of_known.get(count) or search(config, gpu, count, host, fastest))
        options.progress("numbers of GPUs", number + 1, len(counts))
        if plans[-1].interrupted:
            break
    return sweep_of(plans, tokens)


def sweep_of(plans: list[Plan], tokens: float | None = None) -> Sweep:
    """Plans of one config for ascending numbers of GPUs, side by side."""
    shown = [plan for plan in plans if plan.candidates or not plan.interrupted]
    # By prediction, without the figures of a compilation.
    predicted = ([replace(one, compiled_bytes=None, scheduled_transfers_s=None) for one in plan.candidates] for plan in shown)
    best = [next(iter(ranked(some, plan.largest_microbatch)), None) for some, plan in zip(predicted, shown, strict=True)]
    least = next((one for one in best if one is not None), None)
    rows = [_row(plan, one, least, tokens) for plan, one in zip(shown, best, strict=True)]
    # An interrupted search's best candidate says nothing about the best one.
    whole = [row for row, plan in zip(rows, shown, strict=True) if not plan.interrupted]
    return Sweep(tuple(rows), *_stops_paying(whole), interrupted=any(plan.interrupted for plan in plans))


def _row(plan: Plan, best: Candidate | None, least: Candidate | None, tokens: float | None) -> SweepRow:
    if best is None or least is None:
        return SweepRow(plan.gpus, plan.gpus_per_host, None, None, None, {})
    speed, first = best.tokens_per_s_per_gpu, least.tokens_per_s_per_gpu
    days = None if tokens is None else tokens / (speed * plan.gpus) / DAY_S
    reduction_s = gradient_reduction_s(best.config, plan.gpu, plan.gpus_per_host)
    return SweepRow(plan.gpus, plan.gpus_per_host, best, speed / first, days, reduction_s)


def _stops_paying(rows: list[SweepRow]) -> tuple[int | None, str]:
    fitting = [row for row in rows if row.best is not None]
    for row in fitting:
        later: Any = next((other for other in rows if other.gpus > row.gpus), None)
        if later is None:
            break
        times = later.gpus / row.gpus
        if later.tokens_per_s is None:
            return row.gpus, f"no mesh of {later.gpus} GPUs divides the batch and the model, and fits"
        gain = later.tokens_per_s / row.tokens_per_s
        if gain - 1 < PAYS * (times - 1):
            return row.gpus, f"{later.gpus} GPUs are {times:.3g} times as many and {gain:.2f} times as fast"
    return None, ""


def gradient_reduction_s(config: Config, gpu: Gpu, gpus_per_host: int) -> dict[str, float]:
    """Seconds to sum the float32 gradients of a stage's tensor rank over data x context, by algorithm, at the data sheet's
    bandwidths."""
    p = config.parallel
    ranks = int(p.data) * p.context
    size_bytes = 4 * parameter_count(config.model) / (p.pipe * p.tensor)
    group, links = group_of(ranks, p.tensor, gpus_per_host), links_of(gpu)
    return {name: way(size_bytes, group, links) for name, way in ALL_REDUCES.items()}


def smallest_cluster(
    config: Config, gpu: Gpu, gpus: int, gpus_per_host: int | None = None, options: SearchOptions = SearchOptions()
) -> Plan:
    """The plan of the smallest number of GPUs, up to `gpus`, on which any config fits: among 1, 2, 4 ... for each replica, and
    among complete hosts between the last power that fails and the first that fits. A KeyboardInterrupt after that first one
    returns the smallest so far.

    Raises:
      ConfigError: nothing fits on any of them.
      KeyboardInterrupt: interrupted before one was found.
    """

    def fits(count: int, left: int) -> bool:
        found = any_fits(config, gpu, count, host_size(count, gpus_per_host, config), options)
        options.progress("numbers of GPUs", len(counts) - left, len(counts))
        return found

    counts, replicas = _doubling(gpus, config), config.parallel.replica
    enough = next((count for number, count in enumerate(counts, 1) if fits(count, len(counts) - number)), None)
    if enough is None:
        most = max(counts, default=gpus)
        last = search(config, gpu, most, host_size(most, gpus_per_host, config), options)
        raise ConfigError(why_nothing(last, options))
    below = counts[counts.index(enough) - 1] if enough > replicas else 0
    # For each replica as many.
    hosts = replicas * (gpus_per_host or gpu.gpus_per_host)
    step = replicas if enough <= hosts else hosts * max(1, math.ceil((enough - below) / hosts / STEPS_BETWEEN))
    between, smallest, interrupted = range(below + step, enough, step), enough, False
    try:
        smallest = next((count for number, count in enumerate(between, 1) if fits(count, len(between) - number)), enough)
    except KeyboardInterrupt:
        interrupted = True
    plan = search(config, gpu, smallest, host_size(smallest, gpus_per_host, config), options)
    return replace(plan, interrupted=plan.interrupted or interrupted)


def longest_sequence(
    config: Config, gpu: Gpu, gpus: int, gpus_per_host: int | None = None, options: SearchOptions = SearchOptions()
) -> Plan:
    """The plan of the longest sequence with which any config fits, a multiple of SEQUENCE_UNIT (or of a power of 2, if the
    config's own is shorter), with the config's global batch in sequences. It doubles the length, then halves the interval. Once
    one length fits, a KeyboardInterrupt stops the search, not the program: the longest so far is planned.

    Raises:
      ConfigError: not even the shortest fits.
      KeyboardInterrupt: interrupted before one was found.
    """
    tries = itertools.count(1)
    start, unit = config.train.sequence_length, length_unit(config)

    def of(units: int) -> Config:
        return config.model_copy(update={"train": config.train.model_copy(update={"sequence_length": units * unit})})

    def fits(units: int, left: int) -> bool:
        found = any_fits(of(units), gpu, gpus, gpus_per_host, options)
        options.progress("sequence lengths", number := next(tries), number + left)
        return found

    low = start // unit
    while low and not fits(low, low.bit_length() - 1):
        low //= 2
    if not low:
        last = search(of(1), gpu, gpus, gpus_per_host, options)
        raise ConfigError(why_nothing(last, options))
    high, interrupted = 2 * low, False
    try:
        while high * unit <= MOST_TOKENS and fits(high, low.bit_length()):
            low, high = high, 2 * high
        high = min(high, MOST_TOKENS // unit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, (high - low - 1).bit_length() - 1) else (low, middle)
    except KeyboardInterrupt:
        interrupted = True
    plan = search(of(low), gpu, gpus, gpus_per_host, options)
    return replace(plan, interrupted=plan.interrupted or interrupted)


def length_unit(config: Config) -> int:
    """The longest sequence is a multiple of this many tokens."""
    return min(SEQUENCE_UNIT, 2 ** (config.train.sequence_length.bit_length() - 1))


def objective_line(objective: Objective, config: Config, gpus: int) -> str:
    """The objective in words.

    Args:
      config: as given.
      gpus: the present GPUs; for objective=gpus, the upper limit.
    """
    return {
        "speed": "The fastest of all that fit",
        "gpus": f"The fewest GPUs, up to {gpus:,}, on which anything fits, and the fastest there",
        "sequence": f"The longest sequence that fits, in multiples of {length_unit(config):,}, and the fastest of it",
        "microbatch": "The largest microbatch that fits, and the fastest with it",
    }[objective]


def host_size(gpus: int, gpus_per_host: int | None, config: Config) -> int | None:
    """The given GPUs per host for another number of GPUs, or its largest divisor that divides them; None if not given."""
    return None if gpus_per_host is None else math.gcd(gpus_beside(gpus, config.parallel), gpus_per_host)


def _doubling(most: int, config: Config) -> list[int]:
    """1, 2, 4 ... GPUs for each replica, and the largest number for which `most` are enough; none if that is 0."""
    replicas = config.parallel.replica
    each = most // replicas
    return [replicas * count for count in sorted({*(2**power for power in range(each.bit_length())), each}) if count]
