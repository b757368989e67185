"""`jaxllm report RUN`: results of a run, and a prediction for more GPUs.

report = report_on("runs/quickstart", gpu="h100-80gb", gpus_per_host=8)
print("\\n".join(report.lines()))
write(page(report), "report.html")          (run_report/page.py)

Everything comes from metrics.jsonl and config.yaml (history.py) and closed forms (plan/). The report names values that the
run did not measure. `jaxllm inspect` is about a config, this module about a run. No JAX.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.config.named import title_of
from jaxllm.config.types import zero_text
from jaxllm.cost_model.flops import mfu, parameter_words
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.noise_reading import NoiseEstimate, reading, wasted_share
from jaxllm.cost_model.step_parts import StepTime
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.display import readable
from jaxllm.plan.cost import DAY_S, HOUR_S
from jaxllm.plan.data_ranks import OverRanks, StepsToLoss, over_data_ranks, steps_to_loss, with_ranks
from jaxllm.plan.quote import Span
from jaxllm.run_report.history import DOWN, TRAINING, History, read_run
from jaxllm.run_report.svg import number

ESTIMATE, COMPILED, IN_USE, CAPACITY = "estimate, of a GPU", "compiled, by XLA", "in use at most", "capacity"
"""Sources of memory sizes."""


@dataclass(frozen=True)
class RunReport:
    """The complete result of `jaxllm report`."""

    history: History
    gpu: Gpu | None
    target_loss: float | None
    """Smoothed loss that `over_ranks` aims at; None if no loss was finite."""
    reached_at: int | None
    """Index of the metrics line at which it was reached."""
    needed: StepsToLoss | None = None
    """Steps and tokens to reach it. None: see why_not."""
    over_ranks: OverRanks | None = None
    by_interval: tuple[OverRanks, ...] = ()
    """The same for the known ends of the noise scale's interval."""
    predicted: StepTime | None = None
    """The run's last steps as predicted; None if the two cannot be compared."""
    why_not: str = ""
    """The reason why over_ranks is None; else ''."""

    # ------------------------------------------------------------------------------------------------------------- numbers

    @property
    def mfu(self) -> float | None:
        """MFU with causal attention; None if the device's peak is not known."""
        peak, rate, config = self.history.last("device_peak_flops"), self.history.tokens_per_s_per_device, self.history.config
        return mfu(rate, config.model, config.train.sequence_length, peak, config.frozen) if peak and rate else None

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the fullest device by source. An estimate that the run did not log is computed."""
        sizes = {
            ESTIMATE: self.history.last("memory_estimate_bytes"),
            COMPILED: self.history.most("memory_compiled_bytes"),
            IN_USE: self.history.most("memory_peak_bytes"),
            CAPACITY: self.history.last("memory_capacity_bytes"),
        }
        if sizes[ESTIMATE] is None:
            sizes[ESTIMATE] = estimate_memory(self.history.config.at_largest_batch, self.gpu).peak_bytes
        return {name: int(size) for name, size in sizes.items() if size is not None}

    @cached_property
    def predicted_speed(self) -> Span | None:
        """Tokens/s of a device, as the last start predicted them for the largest batch; None: not logged (as on CPU), or that
        batch was not reached."""
        history = self.history
        logged = [history.last(f"predicted_tokens_per_s_per_device{end}") for end in ("", "_low", "_high")]
        known = [value for value in logged if value is not None and value > 0]
        at_largest = np.isclose(history.batch_tokens[-1], history.config.at_largest_batch.step_tokens)
        return Span(*known) if len(known) == len(logged) and at_largest else None

    @property
    def noise(self) -> tuple[float, float] | None:
        """(noise scale, batch) at the last step, in tokens. For a replica that trains alone, the batch is its share."""
        noise, config = self.history.noise_tokens, self.history.config
        alone = config.train.diloco_steps is not None and self.history.steps[-1] > config.train.diloco_after_steps
        share = config.parallel.replica if alone else 1
        return None if noise is None else (float(noise[-1]), float(self.history.batch_tokens[-1]) / share)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; null for unknown values."""
        history, noise = self.history, self.noise
        return {
            "run": str(history.folder),
            **history.numbers,
            "predicted_tokens_per_s_per_device": None if self.predicted_speed is None else asdict(self.predicted_speed),
            "mfu": self.mfu,
            "times_s": dict(history.times_s),
            "last_start_s": history.last_start_s,
            "saves": len(history.saves),
            "steps_done_again": len(history.lost),
            "skipped_steps": skipped_steps(history),
            "memory_bytes": dict(self.memory_bytes),
            "wasted_share": wasted_share(noise[1], noise[0]) if noise else None,
            "target_loss": self.target_loss,
            "reached_at_step": None if self.reached_at is None else int(history.steps[self.reached_at]),
            "least_steps": self.needed.least_steps if self.needed else None,
            "least_tokens": self.needed.least_tokens if self.needed else None,
            "gpu": self.gpu.name if self.gpu else None,
            "slower_than_predicted": self.slower,
            "data_ranks": self.over_ranks.to_json() if self.over_ranks else None,
            "stops_paying_by_interval": [over.stops_paying for over in self.by_interval],
            "why_no_data_ranks": self.why_not or None,
        }

    @property
    def slower(self) -> float | None:
        """Measured over predicted step time; None if they cannot be compared."""
        rate = self.history.tokens_per_s_per_device
        return None if self.predicted is None or rate is None else self.predicted.tokens_per_s_per_gpu / rate

    # --------------------------------------------------------------------------------------------------------------- words

    def lines(self) -> Iterator[str]:
        """The report as terminal text."""
        yield from (f"{name:<18}{value}" for name, value in self.facts())
        yield from self.notes()
        yield ""
        yield from self.verdict()

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yields (name, value as text)."""
        history, config = self.history, self.history.config
        p = config.parallel
        axes = {name: int(getattr(p, name)) for name in ("replica", "pipe", "data", "context", "tensor")}
        mesh = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        yield "model", f"{title_of(config.model, 'a model')}, {parameter_words(config.model)}"
        yield "devices", f"{history.devices}{f': {mesh}' if mesh else ''}; {zero_text(p.zero, p.expert)}"
        yield "trained", f"{int(history.steps[-1]):,} of {config.train.steps:,} steps, {number(history.tokens[-1])} tokens"
        yield "loss", f"{history.smoothed_loss[-1]:.4f} (mean of the last steps)"
        _, evaluated = history.evaluated()
        if evaluated.size:
            yield "held-out loss", f"{evaluated[-1]:.4f}"
        if (rate := self.history.tokens_per_s_per_device) is not None:
            utilisation = f"; MFU {self.mfu:.1%} (causal)" if self.mfu is not None else ""
            yield "speed", f"{number(rate)} tokens/s/device{utilisation}"
            if (speed := self.predicted_speed) is not None:
                where = "inside" if speed.low <= rate <= speed.high else "outside"
                off = f"measured {rate:,.0f}: {rate / speed.expected - 1:+.1%}, {where} the range"
                yield "predicted", f"{speed.text(' tokens/s/GPU', 0)}, {off}"
            if (step := self.predicted) is not None:
                shares = (f"{name} {time_s / step.step_s:.0%}" for name, time_s in step.phases_s.items())
                yield "of a step", f"{', '.join(shares)}, as predicted"
        if (busy_s := history.busy_s) is not None:
            yield "time", f"{duration(busy_s)}, {busy_s * history.devices / HOUR_S:,.4g} device-hours"
            # Causes below a thousandth are left out.
            all_s = sorted(history.times_s.items(), key=lambda part: -part[1])
            lost = ((name, s) for name, s in all_s if name not in (TRAINING, DOWN) and s > 1e-3 * busy_s > 0)
            yield "of it lost", ", ".join(f"{name} {duration(s)} ({s / busy_s:.1%})" for name, s in lost) or "nothing"
            if history.restarts and busy_s > 0:
                share = history.times_s[TRAINING] / sum(history.times_s.values())
                yield "goodput", f"{share:.1%} of the time since the first start was training that stayed"
        if parts_s := history.last_start_s:
            whole_s = sum(parts_s.values())
            shown = (f"{name} {duration(s)}" for name, s in parts_s.items() if s > 1e-2 * whole_s)
            yield "last start", f"{duration(whole_s)} to the first line: {', '.join(shown)}"
        yield "memory", ", ".join(f"{name} {readable(size)}" for name, size in self.memory_bytes.items())

    def notes(self) -> Iterator[str]:
        """Yields one sentence for each notable event."""
        history = self.history
        if not history.times_s:
            yield "Where the time went is not known: this run's lines have no times."
        if restarts := history.restarts:
            again = f"; {_count(len(history.lost), 'step')} had to be done again" if history.lost else ""
            yield f"{_count(len(restarts), 'restart')}, after step {', '.join(map(str, restarts[:8]))}{again}."
        yield from shrunk(history)
        if skipped := skipped_steps(history):
            yield f"{_count(skipped, 'step')} skipped: {'its' if skipped == 1 else 'their'} gradients were not used."
        if (empty := int(np.nansum(history.column("no_targets")))) > 0:
            yield f"{_count(empty, 'step')} had no target, and so no loss."
        if (spikes := int(np.nansum(history.column("loss_spike")))) > 0:
            yield f"{_count(spikes, 'spike')} of the loss or the gradient norm."
        if self.noise is not None:
            scale, batch = self.noise
            low, high = history.noise_factors
            estimate = NoiseEstimate(scale, 0.0 if low is None else low * scale, math.inf if high is None else high * scale)
            yield f"At the end: {reading(estimate, batch)}."

    def verdict(self) -> list[str]:
        """Where more data ranks stop paying, and how certain that is."""
        if self.over_ranks is None or self.target_loss is None:
            return [f"The effect of more data ranks is not known: {self.why_not}"]
        sentences = [f"To a loss of {self.target_loss:.4f}: {self.over_ranks.because}"]
        ends = [end for end, factor in zip(("lower", "upper"), self.history.noise_factors, strict=True) if factor is not None]
        stops = [over.stops_paying for over in self.by_interval]
        if not stops:
            sentences.append("The noise scale has no interval, so this may be far off: measure it over more steps.")
        elif any(ranks != self.over_ranks.stops_paying for ranks in stops):
            named = ("none of those tried" if ranks is None else f"{ranks:,}" for ranks in stops)
            at_ends = " and ".join(f"{ranks} at the {end} end" for ranks, end in zip(named, ends, strict=True))
            sentences.append(f"It would be {at_ends} of the noise scale's interval.")
        if self.gpu is None:
            sentences.append(
                "Steps are assumed to be as fast on any number of devices as they were here, which is an upper bound: with "
                "--gpu they are predicted, and the network counts."
            )
        elif self.slower is None:
            sentences.append(f"Steps on {self.gpu.name} are predicted, because this run was not on such GPUs.")
        else:
            sentences.append(
                f"Steps are predicted for {self.gpu.name} and multiplied by {self.slower:.2f}, the ratio of measured to "
                f"predicted time in this run."
            )
        return sentences


def shrunk(history: History) -> Iterator[str]:
    """Yields one sentence for each start that trained without some hosts (launch.least_hosts)."""
    usual = max((lines for lines in history.starts if not lines[0].get("absent_hosts")), key=len, default=None)
    for lines in history.starts:
        if not (absent := lines[0].get("absent_hosts")):
            continue
        sentence = f"Steps {lines[0]['step']} to {lines[-1]['step']}: without {_count(int(absent), 'host')}"
        if usual is not None:
            own, all_devices = (int(start[0].get("devices") or 0) for start in (lines, usual))
            sentence += f", on {own} of {all_devices} devices"
            own_s, usual_s = _step_s(lines), _step_s(usual)
            if own_s > 0 and usual_s > 0:
                sentence += f", {own_s / usual_s:.2f} times as long a step"
        yield f"{sentence}."


def _step_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """Median time between two lines; not-a-number for a single line."""
    seconds = np.array([line.get("unix_s") for line in lines], float)
    return float(np.median(np.diff(seconds))) if len(lines) > 1 else math.nan


def report_on(
    folder: str | Path, *, gpu: Gpu | str | None = None, gpus_per_host: int | None = None, loss: float | None = None
) -> RunReport:
    """Reads a run directory and predicts the effect of more data ranks.

    Args:
      gpu: a kind, by name, by a YAML file that describes it, or as a Gpu: the kind to predict steps for on other numbers of
        ranks. None: steps are assumed to be as fast as they were.
      gpus_per_host: default: that of the kind.
      loss: target in nats, smoothed. Default: the smallest smoothed loss of the run.

    Raises:
      ConfigError: there is no such run directory or GPU, or the loss was never reached.
    """
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    history = read_run(folder)
    target, line = reach(history, loss)
    rate = history.tokens_per_s_per_device
    report = RunReport(history, kind, target, line, predicted=predicted_steps(history, kind, gpus_per_host))
    if line is None:
        return replace(report, why_not="no step's loss was finite.")
    if history.noise_tokens is None:
        why = "the noise scale was not measured; set log.noise_scale_every."
        if "noise_scale_tokens" in {key for one in history.lines for key in one}:
            why = "the noise scale that was measured is never above 0; average over more steps."
        return replace(report, why_not=why)
    if history.config.train.diloco_steps is not None:
        why = "with DiLoCo, replicas step independently; the law holds for ranks that take every step together."
        return replace(report, why_not=why)
    if not (history.batch_tokens > 0).all():
        return replace(report, why_not="the tokens in its lines do not grow from step to step.")
    if kind is None and rate is None:
        return replace(report, why_not="no step's speed is known; name a GPU with --gpu.")
    batch, noise = history.batch_tokens[: line + 1], history.noise_tokens[: line + 1]
    slower = report.slower or 1.0

    def over(factor: float) -> OverRanks:
        needed = steps_to_loss(batch, factor * noise)
        return over_data_ranks(history.config, needed, kind, gpus_per_host, tokens_per_s_per_device=rate, slower=slower)

    ends = tuple(over(factor) for factor in history.noise_factors if factor is not None)
    return replace(report, needed=steps_to_loss(batch, noise), over_ranks=over(1.0), by_interval=ends)


def reach(history: History, loss: float | None) -> tuple[float | None, int | None]:
    """(the loss, index of the first metrics line with a smoothed loss at or below it).

    Raises:
      ConfigError: the run never reached the loss.
    """
    smoothed = history.smoothed_loss
    if not np.isfinite(smoothed).any():
        if loss is not None:
            raise ConfigError(f"--loss={loss:g} was not reached: no step of {history.folder} has a finite loss.")
        return None, None
    least = int(np.nanargmin(smoothed))
    if loss is None:
        return float(smoothed[least]), least
    if (there := history.reached(loss)) is None:
        raise ConfigError(
            f"--loss={loss:g} was not reached: the least smoothed loss of {history.folder} is {smoothed[least]:.4f}, at step "
            f"{int(history.steps[least])}; give that or more."
        )
    return loss, there


def predicted_steps(history: History, gpu: Gpu | None, gpus_per_host: int | None) -> StepTime | None:
    """The run's last steps as predicted; None if the run was on other GPUs, as far as it logged them, or in DiLoCo's rounds."""
    config, peak = history.config, history.last("device_peak_flops")
    if (
        gpu is None
        or peak is None
        or peak != gpu.peak_flops(config.model.compute_dtype)
        or config.train.diloco_steps is not None
    ):
        return None
    ranks = config.data_ranks
    sequences = config.phase_at(int(history.steps[-1]) - 1).sequences
    as_run = with_ranks(config, ranks, sequences // (ranks * config.microbatch_sequences))
    per_host, _ = choose_gpus_per_host(as_run.devices, None, gpus_per_host or gpu.gpus_per_host, config.parallel)
    return estimate_step_time(as_run, gpu, per_host)


def skipped_steps(history: History) -> int:
    """Skipped steps so far: the run's own count over all starts, else the number of marked lines."""
    counted = history.last("skipped_steps")
    return int(counted) if counted is not None else int(np.nansum(history.column("skipped")))


def duration(seconds: float) -> str:
    """'12.3 ms', '4.1 s', '3.5 min', '7.2 h', '2.1 days'."""
    for size, unit in ((DAY_S, "days"), (HOUR_S, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size * (2 if unit != "s" else 1):
            return f"{seconds / size:.1f} {unit}"
    return f"{1e3 * seconds:.1f} ms"


def _count(number_of: int, what: str) -> str:
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"
