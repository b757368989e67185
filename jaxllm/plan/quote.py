"""The quote for a training run: days, money, energy, and goodput under failures, each with a range.

    terms = Terms(tokens="15T", price=2.5, mtbf_hours=50_000)
    offer = quote(config, gpu, gpus_per_host, tokens_per_s_per_gpu, terms)
    offer.seconds.expected, offer.money.low, offer.goodput.high
    print("\\n".join(offer.lines()))

The range of a speed comes from cost_model/error_range.py, that of a run's failures from their luck.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import AMPERE
from jaxllm.config.model_spec import parameter_count
from jaxllm.config.rounds import sends_codes
from jaxllm.cost_model.error_range import ErrorRange, error_range
from jaxllm.cost_model.flops import state_bytes, train_flops_per_token
from jaxllm.cost_model.hardware import Gpu, host_copy_bytes_per_s
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.display import readable
from jaxllm.plan import cost
from jaxllm.plan.cost import DAY_S, HOUR_S, OVERHEAD, WITH_RECOMPUTATION, YEAR_S, TrainingCost, parse_tokens, readable_count
from jaxllm.plan.estimate import Estimate

# ---------------------------------------------------------------------------------------------------------------- goodput
# Goodput of a run that failures interrupt, and the time between checkpoints that costs least.
#
#     stops = Interruptions(between_failures_s=86_400, save_s=300, write_s=0, restart_s=600)
#     stops.best_interval_s / 60             117 minutes
#     stops.goodput(stops.best_interval_s)
#
# Failures are a Poisson process: the time to the next one is exponential, whatever came before, also during a restart. Young
# 1974 ("A first order approximation to the optimum checkpoint interval") balances saves and lost work to sqrt(2 save_s M),
# where M is the time between failures. Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart
# dumps") gives the exact expected time under these assumptions, and a series for its minimum. Here the exact time is minimised,
# by bisection: that also holds where saves are not short beside M, and needs no cases. The series agrees with it to 1% up to
# save_s = M / 2.
#
# One thing is added to Daly's model, a save that is written while training continues: the loop waits save_s, and the checkpoint
# counts only write_s later. A failure then also undoes the write_s of work since the copy. In the exact expected time write_s
# adds to restart_s, and the best interval depends on neither. Steps are assumed to be as fast during a write as otherwise,
# which is not measured on GPUs.


@dataclass(frozen=True)
class Interruptions:
    """Saves and failures of a run on all its GPUs, in seconds."""

    between_failures_s: float
    """Mean time between failures of the job: that of one GPU over the number of GPUs."""
    save_s: float
    """Time that the loop waits for a save."""
    write_s: float
    """Time from then until the checkpoint is complete, while training continues."""
    restart_s: float
    """Time from a failure until training continues from the last checkpoint."""

    @property
    def best_interval_s(self) -> float:
        """Time of training between two saves that costs least, at least write_s: a save waits for the one before.

        The u = interval / M at which the derivative of the expected time is zero: -u - ln(1 - u) = save_s / M.
        """
        low, high, wanted = 0.0, 1.0, self.save_s / self.between_failures_s
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if middle == 1 or -middle - math.log1p(-middle) > wanted else (middle, high)
        return max(high * self.between_failures_s, self.write_s)

    def goodput(self, interval_s: float) -> float:
        """Expected share of the time that moves the run forward: training that no failure undoes.

        The expected time of one interval is M e^(R / M) (e^((interval + save) / M) - 1) (Daly 2006), with R = restart + write.
        """
        mean_s, period_s = self.between_failures_s, interval_s + self.save_s
        # Written so that nothing overflows.
        survives = math.exp(-(self.restart_s + self.write_s + period_s) / mean_s)
        return interval_s / mean_s * survives / -math.expm1(-period_s / mean_s)

    def lost_s(self, interval_s: float) -> float:
        """Time that a failure costs on average: restart, and the work since the last complete checkpoint."""
        return self.restart_s + self.write_s + (interval_s + self.save_s) / 2

    def wall_s(self, training_s: float, interval_s: float, deviations: float = 0.0) -> float:
        """Time until `training_s` of training is done: expected, or that many standard deviations of luck above it.

        The number of failures is Poisson's, and all moments of an interval are equally likely for each. It is never less than
        training and saves alone.
        """
        expected_s = training_s / self.goodput(interval_s)
        fixed_s, period_s = self.restart_s + self.write_s, interval_s + self.save_s
        squared = fixed_s**2 + fixed_s * period_s + period_s**2 / 3
        luck_s = math.sqrt(expected_s / self.between_failures_s * squared)
        return max(training_s * period_s / interval_s, expected_s + deviations * luck_s)


# ------------------------------------------------------------------------------------------------------------------ quote

RESTART_MINUTES = 10.0
"""Default time from a failure until training continues, without the reading of the checkpoint: the failure is noticed, a host
is replaced, processes start and compile. Chosen, not measured."""
CHECKPOINT_GB_PER_S = 1.0
"""Default rate between a host and the store of checkpoints, in 1e9 bytes per second. Llama 3's store sustained 2 TB/s (arXiv
2407.21783, section 3.3.1), which is this for each of 2,048 hosts. Chosen, not measured."""
SAVE_OVERHEAD_S = 1.0
"""Time that the loop waits for a save beside the copy to the host: the step's end, folders, a barrier of all processes. Chosen:
on one machine it was 0.01 s (benchmarks/RESULTS.md, "Checkpoints"), on many it was not measured."""
OUTER_BYTES = 8
"""Bytes more with DiLoCo: the weights after the last outer step, and their momentum."""
RESIDUAL_BYTES = 4
"""And for each replica with train.diloco_bits below 32."""
LUCK = 1.645
"""Standard deviations on both sides that hold 90% of a normal distribution."""
LEAST_GOODPUT = 0.01


@dataclass(frozen=True)
class Terms:
    """What a quote is asked for, as typed on the command line.

    Raises:
      ConfigError: a number is not above zero, or lacks the one that it counts with.
    """

    tokens: str | None = None
    """Tokens to train on, as in 15T; None: no quote."""
    price: float | None = None
    """Price of a GPU-hour, in any currency."""
    mtbf_hours: float | None = None
    """Mean time between failures of one GPU, with its share of host and network; None: nothing fails."""
    restart_minutes: float | None = None
    """None: RESTART_MINUTES."""
    checkpoint_gb_per_s: float | None = None
    """For each host; None: CHECKPOINT_GB_PER_S."""
    achieved_tflops: float | None = None
    """TFLOP/s of a GPU in place of the predicted speed, counted as 8 FLOPs per parameter and token."""

    def __post_init__(self):
        for field in fields(self)[1:]:
            value, option = getattr(self, field.name), _option(field.name)
            needed = "mtbf_hours" if field.name in ("restart_minutes", "checkpoint_gb_per_s") else "tokens"
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{option}={value:g} is not valid: it should be a number above 0.")
            if value is not None and getattr(self, needed) is None:
                raise ConfigError(f"{option} counts only with {_option(needed)}: add it, or leave {option} out.")

    @cached_property
    def number_of_tokens(self) -> int | None:
        return None if self.tokens is None else parse_tokens(self.tokens)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Span:
    """A prediction and its range."""

    expected: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Span:
        return Span(factor * self.expected, factor * self.low, factor * self.high)

    def text(self, unit: str = "", decimals: int = 1) -> str:
        """'308.7 days (286 to 351)'; without the range if it is a point."""
        value = f"{self.expected:,.{decimals if self.expected < 1000 else 0}f}{unit}"
        return value if self.low == self.high else f"{value} ({_rough(self.low)} to {_rough(self.high)})"


def _rough(value: float) -> str:
    """Three digits or more."""
    decimals = 2 - math.floor(math.log10(value))
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


@dataclass(frozen=True)
class Quote:
    config: Config
    """Resolved."""
    cost: TrainingCost
    """At the predicted or given speed, if nothing fails."""
    terms: Terms
    speed_range: ErrorRange | None
    """None: the speed was given."""
    stops: Interruptions | None
    """None: nothing is said of failures."""
    fits: bool

    @property
    def step_s(self) -> float:
        """Time of a step of the largest batch."""
        return self.cost.seconds / self.cost.tokens * self.config.at_largest_batch.step_tokens

    @property
    def interval_s(self) -> float:
        """Training between two saves that costs least: whole steps."""
        if self.stops is None:
            return math.inf
        return self.step_s * math.ceil(self.stops.best_interval_s / self.step_s)

    @cached_property
    def seconds(self) -> Span:
        """Time of the run."""
        training_s, speed = self.cost.seconds, self.speed_range
        low_s, high_s = (training_s / speed.high, training_s / speed.low) if speed else (training_s, training_s)
        return Span(self._wall_s(training_s), self._wall_s(low_s, -LUCK), self._wall_s(high_s, LUCK))

    @property
    def goodput(self) -> Span | None:
        """Share of the time that moves the run forward; its range is the luck of the failures."""
        if self.stops is None:
            return None
        training_s = self.cost.seconds
        return Span(*(training_s / self._wall_s(training_s, luck) for luck in (0.0, LUCK, -LUCK)))

    def _wall_s(self, training_s: float, deviations: float = 0.0) -> float:
        return training_s if self.stops is None else self.stops.wall_s(training_s, self.interval_s, deviations)

    @property
    def gpu_hours(self) -> Span:
        return self.seconds * (self.cost.gpus / HOUR_S)

    @property
    def energy_kwh(self) -> Span | None:
        """GPUs are counted at their maximum power, also while they wait for a restart."""
        energy = self.cost.energy_kwh
        return None if energy is None else self.seconds * (energy / self.cost.seconds)

    @property
    def money(self) -> Span | None:
        return None if self.terms.price is None else self.gpu_hours * self.terms.price

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, strings and numbers; null for what was not asked for."""
        spans = {"days": self.seconds * (1 / DAY_S), "gpu_hours": self.gpu_hours, "energy_kwh": self.energy_kwh}
        spans |= {"money": self.money, "goodput": self.goodput}
        return {
            **{name: None if span is None else asdict(span) for name, span in spans.items()},
            "undisturbed_days": self.cost.days,
            "interruptions": None if self.stops is None else asdict(self.stops),
            "checkpoint_every_minutes": None if self.stops is None else self.interval_s / 60,
            "terms": asdict(self.terms),
            "extrapolated": list(self.speed_range.beyond) if self.speed_range else [],
            "fits": self.fits,
        }

    def lines(self) -> Iterator[str]:
        """The quote as terminal text."""
        gpus, tokens, watts = self.cost.gpus, self.cost.tokens, self.cost.watts_per_gpu
        unit, length_s = ("days", DAY_S) if self.cost.seconds < 2 * YEAR_S else ("years", YEAR_S)
        took = self.seconds * (1 / length_s)
        where = f"on {gpus:,} GPU{'s' if gpus > 1 else ''}, {self.gpu_hours.text(' GPU-hours')}"
        yield f"{readable_count(tokens)} tokens: {took.text(f' {unit}')} {where}"
        if (money := self.money) is not None:
            yield f"  price       {money.text()} at {self.terms.price:g} a GPU-hour"
        if (energy := self.energy_kwh) is None:
            yield "  energy      not known: the power of such a GPU is not known"
        else:
            used = energy.text(" kWh") if energy.expected < 1e4 else (energy * 1e-3).text(" MWh")
            yield f"  energy      {used}: at most {watts:.0f} W a board (data sheet, of that GPU or one of its"
            yield f"              generation) x {OVERHEAD} for hosts, network, cooling"
        if self.stops is not None:
            yield from self._failure_lines(self.stops)
        yield from self._range_lines()

    def _failure_lines(self, stops: Interruptions) -> Iterator[str]:
        interval_s, goodput = self.interval_s, self.goodput
        assert goodput is not None
        failures = self.seconds.expected / stops.between_failures_s
        yield (
            f"  goodput     {(goodput * 100).text('%')}: a failure every {_rough(stops.between_failures_s / HOUR_S)} h, "
            f"{_rough(failures)} in all; each costs"
        )
        again_s = stops.lost_s(interval_s) - stops.restart_s
        yield f"              {stops.restart_s / 60:,.1f} minutes to restart and {again_s / 60:,.1f} of work done again"
        keys = f"checkpoint.every_minutes={float(f'{interval_s / 60:.3g}'):g}"
        if self.config.checkpoint.every_steps is not None:
            keys += " checkpoint.every_steps=null"
        steps = round(interval_s / self.step_s)
        yield f"  interval    {keys} costs least: {steps:,} step{'s' if steps > 1 else ''}"
        every, minutes = self.config.checkpoint.every_steps, self.config.checkpoint.every_minutes
        if every or minutes:
            own_s = min(every * self.step_s if every else math.inf, 60 * minutes if minutes else math.inf)
            lower = 1 - stops.goodput(max(own_s, stops.write_s)) / stops.goodput(interval_s)
            yield f"              (goodput is {max(0.0, lower):.2%} lower with the config's {_rough(own_s / 60)} minutes)"
        written = f", {stops.write_s:,.1f} s of writing beside training" if stops.write_s else ""
        yield f"  checkpoint  {readable(checkpoint_bytes(self.config))}: the loop waits {stops.save_s:,.1f} s{written}"

    def _range_lines(self) -> Iterator[str]:
        if (achieved := self.terms.achieved_tflops) is not None:
            yield (
                f"  at {achieved:g} TFLOP/s a GPU as given, {WITH_RECOMPUTATION:.0f} FLOPs for each parameter and token "
                f"(recomputation counted)"
            )
        if self.speed_range is not None:
            luck = ", and the luck of nine in ten with failures" if self.stops else ""
            speed = self.speed_range
            share = f"{speed.low:.2f} to {speed.high:.2f}"
            yield f"  range       four of five runs should reach {share} of the predicted speed{luck}"
            if speed.beyond:
                yield f"  extrapolated: {'; '.join(speed.beyond)}"
        if not self.fits:
            yield "  It does not fit into the memory: this is arithmetic, no run that could start"


def quote(
    config: Config, gpu: Gpu, gpus_per_host: int, tokens_per_s_per_gpu: float, terms: Terms, fits: bool = True
) -> Quote | None:
    """The quote for a resolved config; None if terms.tokens is.

    Args:
      tokens_per_s_per_gpu: predicted; terms.achieved_tflops replaces it.

    Raises:
      ConfigError: failures are so frequent that the run would not end, or the given speed is above the chip's peak.
    """
    if (tokens := terms.number_of_tokens) is None:
        return None
    achieved = terms.achieved_tflops
    flops = train_flops_per_token(config.model, config.train.sequence_length, frozen=config.frozen)
    rate = flops * tokens_per_s_per_gpu
    if achieved is not None:
        peak = max(gpu.dense_flops["bfloat16"], gpu.float8_flops or 0.0) / 1e12
        # Before Ampere the peak is not known: jaxllm does not use those tensor cores.
        if gpu.chip.compute_capability >= AMPERE and achieved > peak:
            raise ConfigError(
                f"--achieved-tflops={achieved:g} is above the {peak:,.0f} TFLOP/s that a {gpu.name} can reach: give what a run "
                f"reached."
            )
        flops, rate = WITH_RECOMPUTATION * parameter_count(config.model), achieved * 1e12
    training = cost.training_cost(tokens, flops, rate, config.devices, cost.board_watts(gpu))
    speed = error_range(config, gpu, gpus_per_host) if achieved is None else None
    stops = interruptions(config, gpu, config.devices, gpus_per_host, terms)
    offer = Quote(config, training, terms, speed, stops, fits)
    if stops is not None:
        _require_progress(stops, offer.interval_s, terms)
    return offer


def quote_estimate(report: Estimate, terms: Terms) -> Quote | None:
    """The quote for an estimated config, also if it does not fit.

    Raises:
      ConfigError: see quote(); or the estimate was made without a GPU.
    """
    if terms.tokens is not None and report.speed is None:
        raise ConfigError(f"--tokens={terms.tokens} has no cost without a kind of GPU: name one, such as --gpu h100-80gb.")
    if report.gpu is None or report.speed is None:
        return None
    fits = report.fits is not False
    return quote(report.config, report.gpu, report.gpus_per_host, report.speed.tokens_per_s_per_gpu, terms, fits)


def interruptions(config: Config, gpu: Gpu, gpus: int, gpus_per_host: int, terms: Terms) -> Interruptions | None:
    """Times of failures, saves and restarts on a number of GPUs; None if terms.mtbf_hours is.

    Every GPU copies an equal share of the checkpoint to its host, and every host writes and reads an equal share: Orbax divides
    replicated arrays among the replicas. The loop waits for the whole write if the state is in host memory, or with
    checkpoint.asynchronous=false (checkpoint/manager.py).

    Raises:
      ConfigError: failures are so frequent that no run would end.
    """
    if terms.mtbf_hours is None:
        return None
    size = checkpoint_bytes(config)
    store_s = size / (gpus // gpus_per_host * (terms.checkpoint_gb_per_s or CHECKPOINT_GB_PER_S) * 1e9)
    copy_s = size / gpus / host_copy_bytes_per_s(gpu, min(gpus, gpus_per_host), both_ways=False)
    beside = config.checkpoint.asynchronous and config.parallel.offload_state == "none"
    stops = Interruptions(
        between_failures_s=terms.mtbf_hours * HOUR_S / gpus,
        save_s=SAVE_OVERHEAD_S + (copy_s if beside else store_s),
        write_s=store_s if beside else 0.0,
        restart_s=60 * (terms.restart_minutes or RESTART_MINUTES) + store_s,
    )
    _require_progress(stops, stops.best_interval_s, terms)
    return stops


def _require_progress(stops: Interruptions, interval_s: float, terms: Terms) -> None:
    if stops.goodput(interval_s) < LEAST_GOODPUT:
        raise ConfigError(
            f"--mtbf-hours={terms.mtbf_hours:g} means a failure every {_rough(stops.between_failures_s / 60)} minutes, and a "
            f"restart takes {_rough(stops.restart_s / 60)}: such a run does not get ahead. Use fewer GPUs, or more hours."
        )


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint on the disk; with DiLoCo each replica's state, and that of the outer step."""
    if config.train.diloco_steps is None:
        return state_bytes(config)
    of_replica = state_bytes(config) + RESIDUAL_BYTES * sends_codes(config) * parameter_count(config.model)
    return of_replica * config.parallel.replica + OUTER_BYTES * parameter_count(config.model)


def predicted_speed(config: Config, gpu: Gpu, gpus_per_host: int) -> Span:
    """Predicted tokens/s/GPU of a resolved config, with its range."""
    expected = estimate_step_time(config, gpu, gpus_per_host).tokens_per_s_per_gpu
    return Span(expected, *error_range(config, gpu, gpus_per_host).of(expected))
