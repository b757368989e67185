"""Gain of a larger batch: steps and tokens to a held-out loss, losses at equal tokens and at equal steps, and the noise scale.

python benchmarks/batch_study.py RESULTS.jsonl [--workers 2] [--picture FILE.png]      on CPUs; resumes
python benchmarks/batch_study.py RESULTS.jsonl --seconds                               times a step of each batch, alone
python benchmarks/batch_study.py RESULTS.jsonl --table                                 prints the results as Markdown
python benchmarks/batch_study.py RESULTS.jsonl --table --write                         writes the seconds to the target into
                                                                                       docs/why-many-gpus.md
python benchmarks/batch_study.py RESULTS.jsonl --dry-run                               a trial at tiny sizes

A Llama of about a million parameters reads the Python standard library, byte by byte. For each batch the learning rate is swept
by factors of two with one seed until the best rate is inside the swept range; two more seeds then repeat the best. The kinds of
runs:

    target    five batches over 16x, the rate constant after ten steps, until the held-out loss reaches the target; every step
              measures the gradient noise scale with four parts
    tokens    nine batches over 256x, all with the same tokens; the rate falls to zero
    steps     four of these batches, all with the same number of steps: what differs is the noise of a step
    ramp      as many tokens as `tokens`, half of them with a small batch, then a jump to a large one; the rate is proportional
              to the square root of the batch
    grows     the same between the same batches by train.batch_grows_to, which follows the measured noise scale
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from markdown_sections import write_between

from jaxllm.config import Config, load_config
from jaxllm.cost_model.flops import parameter_count
from jaxllm.plan.data_ranks import steps_to_loss
from jaxllm.plots.schedule import new_figure, save

PAGE = Path(__file__).parents[1] / "docs" / "why-many-gpus.md"
SEQUENCE = 64
PARTS = 4
SEEDS = (0, 1, 2)
LARGEST_MICROBATCH = 32
TIMED_STEPS = 30
GIVEN_UP = 1.5
"""Limit of a run as a multiple of the fewest tokens at the same batch so far: a rate that needs more is not the best."""
SPACING = 1.04
"""Ratio of tokens between two evaluations."""
NEAR = 0.25
"""Distance of the mean training loss from the target, in nats, at which evaluation starts."""
ENDS = (8, 128)
"""First and last batch of the kinds ramp and grows, in sequences."""


@dataclass(frozen=True)
class Size:
    """Sizes of the study."""

    model: tuple[str, ...]
    batches: tuple[int, ...]
    """Sequences; of the kind target."""
    at_equal_tokens: tuple[int, ...]
    at_equal_steps: tuple[int, ...]
    target: float
    """Held-out loss in nats per byte."""
    most_tokens: int
    """Number of tokens after which a run counts as not reaching the target."""
    equal_tokens: int
    equal_steps: int
    held_out: int
    """Sequences in an evaluation."""


FULL = Size(
    ("model.num_layers=5", "model.hidden_size=128", "model.intermediate_size=352", "model.num_heads=4"),
    (8, 16, 32, 64, 128),
    at_equal_tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    at_equal_steps=(2, 8, 32, 128),
    target=2.2,
    most_tokens=4_000_000,
    equal_tokens=2**19,
    equal_steps=128,
    held_out=256,
)
TINY = Size(
    ("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=32", "model.num_heads=2"),
    (8, 32),
    at_equal_tokens=(4, 16),
    at_equal_steps=(4, 16),
    target=4.6,
    most_tokens=40_000,
    equal_tokens=2**15,
    equal_steps=16,
    held_out=16,
)


@dataclass(frozen=True)
class Run:
    batch: int
    """Number of sequences; of a batch that changes, the last one's."""
    rate: int
    """The learning rate is 2**rate / 1000; of a batch that changes, the last one's."""
    seed: int
    kind: str = "target"

    @property
    def changes(self) -> bool:
        return self.kind in ("ramp", "grows")

    @property
    def measures(self) -> bool:
        """Whether every step measures the noise scale."""
        return self.kind == "target" or self.changes

    @property
    def learning_rate(self) -> float:
        return 2.0**self.rate * 1e-3


def configured(run: Run, size: Size) -> Config:
    tokens = run.batch * SEQUENCE
    overrides = [
        *(*size.model, "model.vocab_size=256", "model.compute_dtype=float32", "model.scan_layers=false"),
        *(
            "parallel.data=1",
            "parallel.remat=none",
            "data.source=python_stdlib",
            "data.held_out_fraction=0.03",
            "run.cpu_devices=1",
        ),
        *(f"train.sequence_length={SEQUENCE}", f"train.seed={run.seed}", f"optimizer.learning_rate={run.learning_rate}"),
        *(f"optimizer.warmup_tokens={10 * tokens}", "train.spike_deviations=null"),
    ]
    first, microbatch = ENDS[0] if run.changes else run.batch, min(run.batch, LARGEST_MICROBATCH)
    if run.measures:
        # The microbatches of a batch that changes are those of the first one.
        microbatch = first // PARTS
        overrides.append("log.noise_scale_every=1")
    if run.kind == "target":
        steps = math.ceil(size.most_tokens / tokens)
        overrides.append("optimizer.schedule=constant")
    else:
        steps = size.equal_steps if run.kind == "steps" else size.equal_tokens // (first * SEQUENCE)
        overrides += ["optimizer.schedule=linear", "optimizer.final_learning_rate_fraction=0.0"]
    if run.changes:
        overrides += ["train.batch_lr=sqrt", f"optimizer.warmup_tokens={10 * first * SEQUENCE}"]
    if run.kind == "ramp":
        half = size.equal_tokens // 2
        steps = half // (first * SEQUENCE) + half // tokens
        overrides.append(f"train.batch_schedule=[[{half}, {run.batch}]]")
    if run.kind == "grows":
        overrides.append(f"train.batch_grows_to={run.batch}")
    overrides += [f"train.global_batch_sequences={first}", f"train.microbatch_sequences={microbatch}"]
    return load_config({}, [*overrides, f"train.steps={steps}"])


def trained(run: Run, size: Size, limit_tokens: float) -> dict[str, Any]:
    """Trains one run in this process. `tokens` is null if the target was not reached within limit_tokens. Of the kind "seconds"
    it only times a step."""
    config = configured(run, size)
    # Slow to import, and needed only by the child processes.
    from jaxllm.run.trainer import Trainer

    trainer = Trainer(config)
    if run.kind == "seconds":
        ends_s = [time.perf_counter() for _ in trainer.steps(min(config.train.steps, TIMED_STEPS + 1))]
        trainer.close()
        return {**asdict(run), "step_s": (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)}

    def held_out_loss() -> float:
        return trainer.evaluate(size.held_out // config.microbatch_rows).loss

    batches, scales, smooth = [], [], math.inf
    found: dict[str, Any] = {"tokens": None, "steps": None}
    next_tokens, before = 0.0, None

    def remember(line: dict[str, Any]) -> None:
        batches.append(trainer.config.phase_at(line["step"] - 1).sequences * SEQUENCE)
        scales.append(trainer.metrics.noise.found.tokens if trainer.metrics.noise.found else math.inf)

    for line in trainer.steps(config.train.steps):
        loss, tokens = line["loss"], line["tokens"]
        smooth = loss if math.isinf(smooth) else 0.9 * smooth + 0.1 * loss
        remember(line)
        if run.kind != "target":
            # A batch that grows needs fewer steps.
            if trainer.step >= trainer.config.train.steps:
                break
            continue
        if tokens > limit_tokens or not math.isfinite(loss):
            break
        if smooth < size.target + NEAR and tokens >= next_tokens:
            # If a step is running, the state is its result.
            if (under_way := trainer.finish()) is not None:
                remember(under_way)
            now, next_tokens = (math.log(trainer.step * batches[-1]), held_out_loss()), tokens * SPACING
            if now[1] <= size.target:
                share = 0.0 if before is None else (before[1] - size.target) / (before[1] - now[1])
                reached = math.exp(now[0] if before is None else before[0] + share * (now[0] - before[0]))
                found = {"tokens": reached, "steps": reached / batches[-1]}
                break
            before = now
    if run.kind != "target":
        tokens = trainer.config.tokens_before(trainer.step)
        found = {"tokens": tokens, "steps": trainer.step, "loss": trainer.evaluate().loss}
    if run.kind == "grows":
        found["batch_schedule"] = trainer.config.train.batch_schedule
    noise = trainer.metrics.noise.found
    trainer.close()
    model = {}
    if run.measures:
        needed = steps_to_loss(batches, filled(scales))
        model = {"least_steps": needed.least_steps, "least_tokens": needed.least_tokens}
    # JSON has no infinity.
    figures = None if noise is None else [x if math.isfinite(x) else None for x in noise]
    return {**asdict(run), **found, "noise": figures, **model, "parameters": parameter_count(config.model)}


def filled(scales: list[float]) -> list[float]:
    """Replaces infinite values (not known yet) by the previous ones, and at the start by the first finite one."""
    known = next((scale for scale in scales if math.isfinite(scale)), 1.0)
    return [known := scale if math.isfinite(scale) else known for scale in scales]


class Study:
    """The results, and the runs to do next."""

    def __init__(self, path: Path, size: Size):
        self.path, self.size = path, size
        lines = path.read_text().splitlines() if path.exists() else []
        self.results = {self.run_of(line): line for line in map(json.loads, lines)}

    @staticmethod
    def run_of(line: dict[str, Any]) -> Run:
        return Run(line["batch"], line["rate"], line["seed"], line["kind"])

    def add(self, line: dict[str, Any]) -> None:
        self.results[self.run_of(line)] = line
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)

    def score(self, run: Run) -> float:
        """The value to minimise: tokens to the target, or the loss at equal tokens."""
        line = self.results[run]
        value = line["tokens"] if run.kind == "target" else line["loss"]
        return math.inf if value is None or not math.isfinite(value) else value

    def groups(self) -> list[tuple[int, str]]:
        of_kinds = {"target": self.size.batches, "tokens": self.size.at_equal_tokens, "steps": self.size.at_equal_steps}
        of_kinds |= {"ramp": ENDS[1:], "grows": ENDS[1:]}
        return [(batch, kind) for kind, batches in of_kinds.items() for batch in batches]

    def rates(self, batch: int, kind: str) -> dict[int, float]:
        """Learning rate -> score of the first seed."""
        return {run.rate: self.score(run) for run in self.results if (run.batch, run.kind, run.seed) == (batch, kind, SEEDS[0])}

    def best(self, batch: int, kind: str) -> int | None:
        """The best rate, if there is a worse one on each side of it."""
        rates = self.rates(batch, kind)
        if not rates:
            return None
        best = min(rates, key=rates.__getitem__)
        return best if {best - 1, best + 1} <= rates.keys() and math.isfinite(rates[best]) else None

    def wanted(self) -> Iterator[Run]:
        """Runs that are not done yet and are needed whatever the results of the others."""
        for batch, kind in self.groups():
            rates, best = self.rates(batch, kind), self.best(batch, kind)
            if best is not None:
                wanted = [Run(batch, best, seed, kind) for seed in SEEDS[1:]]
            elif not rates:
                # For Adam the square root of the batch is a good first guess; with a rate that falls, at fewer steps, less.
                doublings = math.log2(batch / self.size.batches[0])
                guess = {"target": 1 + round(doublings / 2), "tokens": round(doublings / 4)}.get(kind, 1)
                wanted = [Run(batch, guess, SEEDS[0], kind)]
            else:
                # All infinite, so all rates are too low or too high. Try both sides.
                least = min(rates, key=rates.__getitem__)
                wanted = [Run(batch, rate, SEEDS[0], kind) for rate in (least - 1, least + 1)]
            yield from (run for run in wanted if run not in self.results)

    def limit(self, run: Run) -> float:
        if run.seed != SEEDS[0] or run.kind != "target":
            return self.size.most_tokens
        return min([self.size.most_tokens, *(GIVEN_UP * tokens for tokens in self.rates(run.batch, "target").values())])

    def seeds_of(self, batch: int, kind: str) -> list[dict[str, Any]]:
        """Results of all seeds at the best rate."""
        best = self.best(batch, kind)
        runs = [] if best is None else [Run(batch, best, seed, kind) for seed in SEEDS]
        return [self.results[run] for run in runs if run in self.results]

    def step_seconds(self) -> dict[int, float]:
        """Batch -> seconds of a step, where they were measured."""
        return {run.batch: line["step_s"] for run, line in self.results.items() if run.kind == "seconds"}


def finished(command: list[str]) -> dict[str, Any]:
    """The line that a process prints last."""
    # One thread per process: two small programs side by side are faster than one after the other with two threads.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def carry_out(study: Study, workers: int, command: Callable[[Run, float], list[str]]) -> None:
    with ThreadPoolExecutor(workers) as pool:
        under_way: dict[Any, Run] = {}
        while True:
            for run in study.wanted():
                if len(under_way) < workers and run not in under_way.values():
                    under_way[pool.submit(finished, command(run, study.limit(run)))] = run
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                del under_way[future]
                study.add(line := future.result())
                print(json.dumps(line), file=sys.stderr, flush=True)


def table(study: Study) -> str:
    lines = [
        f"| batch, tokens | best rate | steps to {study.size.target} nats | tokens | seeds apart | noise scale there (95%) |",
        "|---|---|---|---|---|---|",
    ]
    for batch in study.size.batches:
        if not (of_seeds := study.seeds_of(batch, "target")):
            continue
        tokens = [line["tokens"] or math.inf for line in of_seeds]
        noise = ", ".join("-" if line["noise"] is None else _interval(line["noise"]) for line in of_seeds)
        rate = f"{Run(batch, of_seeds[0]['rate'], 0).learning_rate:g}"
        steps = mean(tokens) / (batch * SEQUENCE)
        apart = f"{(max(tokens) - min(tokens)) / mean(tokens):.0%}"
        lines.append(f"| {batch * SEQUENCE:,} | {rate} | {steps:,.0f} | {mean(tokens):,.0f} | {apart} | {noise} |")
    lines += ["", law(study), "", seconds_table(study)]
    seconds = study.step_seconds()
    for title, kinds in (("equal tokens", ("tokens", "ramp", "grows")), ("equal steps", ("steps",))):
        head = f"| at {title} | best rate | steps | held-out loss, each seed | mean | seconds of a core |"
        lines += ["", head, "|---|---|---|---|---|---|"]
        for batch, kind in study.groups():
            if kind not in kinds or not (of_seeds := study.seeds_of(batch, kind)):
                continue
            losses, steps = ([line[key] for line in of_seeds] for key in ("loss", "steps"))
            name = f"{batch * SEQUENCE:,}" if kind in ("tokens", "steps") else kind
            rate, taken = f"{Run(batch, of_seeds[0]['rate'], 0).learning_rate:g}", "-"
            if name != kind and batch in seconds:
                taken = f"{seconds[batch] * mean(steps):,.0f}"
            each = ", ".join(f"{loss:.3f}" for loss in losses)
            lines.append(f"| {name} | {rate} | {_range(steps)} | {each} | {mean(losses):.3f} | {taken} |")
    schedules = [line["batch_schedule"] for line in study.seeds_of(ENDS[1], "grows")]
    if schedules:
        lines += ["", f"Growths as [tokens, sequences]: {'; '.join(map(str, schedules))}."]
    return "\n".join(lines)


def seconds_table(study: Study) -> str:
    """Seconds to the target on one core, and on as many devices as it takes for each to have the smallest batch, with transfers
    that cost nothing."""
    head = ("batch, tokens", "tokens", "steps", "seconds a step", "seconds on one core", "devices", "seconds on them")
    lines = [_table_row(*head, "device-seconds"), "|---" * (len(head) + 1) + "|"]
    step_s = study.step_seconds()
    reached = {batch: study.seeds_of(batch, "target") for batch in study.size.batches if batch in step_s}
    for batch, of_seeds in reached.items():
        if not of_seeds or not all_reached(of_seeds):
            continue
        tokens, steps = (mean(line[key] for line in of_seeds) for key in ("tokens", "steps"))
        devices, on_many_s = batch / min(reached), steps * step_s[min(reached)]
        lines.append(
            _table_row(
                *(f"{batch * SEQUENCE:,}", f"{tokens:,.0f}", f"{steps:,.0f}", f"{step_s[batch]:.3f}"),
                *(f"{steps * step_s[batch]:.0f}", f"{devices:.0f}", f"{on_many_s:.0f}", f"{devices * on_many_s:.0f}"),
            )
        )
    return "\n".join(lines)


def _table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _range(values: list[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def law(study: Study) -> str:
    """The law fitted to the tokens of all batches, and the measured noise scale."""
    of_batches = {batch * SEQUENCE: study.seeds_of(batch, "target") for batch in study.size.batches}
    found = {x: mean(line["tokens"] for line in lines) for x, lines in of_batches.items() if lines and all_reached(lines)}
    if len(found) < 3:
        return "There are too few batches for a fit."
    least_tokens, least_steps = fitted(found)
    off = max(abs((least_tokens + least_steps * x) / tokens - 1) for x, tokens in found.items())
    scales = sorted(line["noise"][0] for lines in of_batches.values() for line in lines if line["noise"] and line["noise"][0])
    x, lines = list(of_batches.items())[len(of_batches) // 2]
    steps, tokens = (mean(line[key] for line in lines) for key in ("least_steps", "least_tokens"))
    errors = ", ".join(f"{(tokens + steps * x) / there - 1:+.0%}" for x, there in found.items())
    return (
        f"tokens = {least_tokens:,.0f} + {least_steps:.0f} x batch, off by at most {off:.1%}: a critical batch of "
        f"{least_tokens / least_steps:,.0f} tokens. Noise scale at the target: {median(scales):,.0f} in the median of "
        f"{len(scales)} runs ({scales[0]:,.0f} to {scales[-1]:,.0f}). Predicted from {x:,} alone, tokens are off by {errors}."
    )


def all_reached(lines: list[dict[str, Any]]) -> bool:
    return all(line["tokens"] is not None for line in lines)


def fitted(tokens: dict[int, float]) -> tuple[float, float]:
    """Fits (least tokens, least steps) of tokens = least tokens + least steps x batch, by least squares of relative errors."""
    rows = np.array([[1 / found, x / found] for x, found in tokens.items()])
    least_tokens, least_steps = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return float(least_tokens), float(least_steps)


def _interval(noise: list[float | None]) -> str:
    scale, low, high = (math.inf if x is None else x for x in noise)
    return f"{scale:,.0f} ({low:,.0f} to {high:,.0f})"


def picture(study: Study, path: str) -> None:
    """Tokens and steps to the target with the middle batch's prediction; losses at equal tokens and at equal steps."""
    figure = new_figure(12, 8, dpi=110)
    (tokens_axes, steps_axes), (equal_tokens_axes, equal_steps_axes) = figure.subplots(2, 2)
    done = [batch for batch in study.size.batches if study.seeds_of(batch, "target")]
    batch_tokens = [batch * SEQUENCE for batch in done]
    middle = study.seeds_of(done[len(done) // 2], "target")
    least_steps, least_tokens = (mean(line[key] for line in middle) for key in ("least_steps", "least_tokens"))
    predicted = {"tokens": [least_steps * x + least_tokens for x in batch_tokens]}
    predicted["steps"] = [tokens / x for tokens, x in zip(predicted["tokens"], batch_tokens, strict=True)]
    scales = [line["noise"][0] for batch in done for line in study.seeds_of(batch, "target") if line["noise"][0]]
    for axes, what in ((tokens_axes, "tokens"), (steps_axes, "steps")):
        _draw_seeds(axes, study, "target", what)
        label = "predicted by the noise scale of the middle batch"
        axes.plot(batch_tokens, predicted[what], "--", color="#b3401a", label=label)
        label = "noise scale at the target, all runs"
        axes.axvspan(min(scales), max(scales), color="#b3401a", alpha=0.12, label=label)
        axes.set_yscale("log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(lambda x, _: f"{x / 1e3:,.0f}k" if x >= 1e4 else f"{x:,.0f}")
        axes.set_ylabel(f"{what} to {study.size.target} nats per byte")
        axes.legend(fontsize=8, frameon=False)
    _draw_seeds(equal_tokens_axes, study, "tokens", "loss")
    for kind, color in (("ramp", "#b3401a"), ("grows", "#2e7d32")):
        if of_seeds := study.seeds_of(ENDS[1], kind):
            losses, steps = ([line[key] for line in of_seeds] for key in ("loss", "steps"))
            to = f" to {ENDS[1] * SEQUENCE:,}" if kind == "ramp" else ""
            label = f"{kind}, from {ENDS[0] * SEQUENCE:,}{to}: {_range(steps)} steps"
            equal_tokens_axes.axhline(mean(losses), linestyle="--", color=color, label=label)
            equal_tokens_axes.axhspan(min(losses), max(losses), color=color, alpha=0.12)
    equal_tokens_axes.set_ylabel(f"held-out loss after {study.size.equal_tokens:,} tokens")
    equal_tokens_axes.legend(fontsize=8, frameon=False)
    if any(kind == "steps" and study.seeds_of(batch, kind) for batch, kind in study.groups()):
        _draw_seeds(equal_steps_axes, study, "steps", "loss")
    else:
        equal_steps_axes.set_axis_off()
    equal_steps_axes.set_ylabel(f"held-out loss after {study.size.equal_steps:,} steps")
    save(figure, path)


def _draw_seeds(axes: Any, study: Study, kind: str, what: str) -> None:
    """Each seed at the best rate over the batch, and their mean."""
    points = {
        batch * SEQUENCE: [line[what] for line in study.seeds_of(batch, kind) if line[what]]
        for batch, other in study.groups()
        if other == kind
    }
    points = {x: values for x, values in points.items() if values}
    axes.plot(points.keys(), list(map(mean, points.values())), "-", color="#1f5fa6", alpha=0.4)
    for x, values in points.items():
        axes.plot([x] * len(values), values, "o", color="#1f5fa6", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(points), [f"{x:,}" for x in points])
    axes.set_xlabel("tokens of a batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--picture", metavar="FILE.png")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = TINY if options.dry_run else FULL
    if options.one:
        wanted = json.loads(options.one)
        limit_tokens = wanted.pop("limit_tokens")
        print(json.dumps(trained(Run(**wanted), size, limit_tokens)))
        return
    study = Study(options.results, size)

    def command(run: Run, limit_tokens: float) -> list[str]:
        one = json.dumps(asdict(run) | {"limit_tokens": limit_tokens})
        return [sys.executable, __file__, str(options.results), *(["--dry-run"] if options.dry_run else []), "--one", one]

    if options.seconds:
        for batch in size.at_equal_tokens:
            study.add(finished(command(Run(batch, 0, 0, "seconds"), 0)))
    elif not options.table:
        carry_out(study, options.workers, command)
    print(table(study))
    if options.write:
        write_between(PAGE, "seconds", seconds_table(study))
    if options.picture:
        picture(study, options.picture)


if __name__ == "__main__":
    main()
