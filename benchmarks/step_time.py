"""Compares the step-time model with published measurements: Megatron-LM, Llama 3.1 8B, S 8192, 1024 sequences, A100s and H100s.

    python benchmarks/step_time.py            measured and predicted TFLOP/s per GPU for each row, and their agreement
    python benchmarks/step_time.py --fit      fits the four constants (cost_model/step_time.py), to all rows and to parts of
    them

Rows: those of benchmarks/published/llama-3.1-8b.csv with a number (lab table of 22 Oct 2024 by arXiv:2411.06465's first author;
plain 1F1B, distributed optimizer, no recomputation). Agreement for each kind of GPU: Spearman's rank correlation, median error,
and the measured loss of the model's first choice against the best layout for each number of GPUs. For comparison, a one-line
rule: -log2(tensor context pipe) + log2(microbatch) / 2.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import Config, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.step_parts import FITTED, Fitted
from jaxllm.cost_model.step_time import estimate_step_time

PUBLISHED = Path(__file__).parent / "published" / "llama-3.1-8b.csv"
ROUNDING = 0.01
"""Errors below this have little weight in a fit, because repeated runs differ by as much."""
Predict = Callable[["Row"], float]


@dataclass(frozen=True)
class Row:
    """One published run."""

    gpu: str
    gpus_per_host: int
    gpus: int
    layout: tuple[int, int, int]
    """Number of tensor, context and pipe ranks."""
    microbatch_sequences: int
    tflops_per_gpu: float
    config: Config


def published_rows() -> list[Row]:
    """Rows with a number."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file) if line["tflops_per_gpu"]]


def _row(line: dict[str, str]) -> Row:
    tensor, context, pipe, gpus, microbatch = (
        int(line[name]) for name in ("tensor", "context", "pipe", "gpus", "microbatch_sequences")
    )
    train = {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 1024, "microbatch_sequences": microbatch}
    parallel = {"tensor": tensor, "context": context, "pipe": pipe, "zero": 1}
    config = load_config({"model": {"name": "llama-3.1-8b"}, "parallel": parallel, "train": train}).resolve(gpus)
    measured, per_host = float(line["tflops_per_gpu"]), int(line["gpus_per_host"])
    return Row(line["gpu"], per_host, gpus, (tensor, context, pipe), microbatch, measured, config)


def predict(row: Row, fitted: Fitted = FITTED) -> float:
    """Predicted TFLOP/s per GPU, as Megatron-LM counts FLOPs."""
    return estimate_step_time(row.config, GPUS[row.gpu], row.gpus_per_host, "megatron", fitted).tflops_per_gpu


def one_line_rule(row: Row) -> float:
    """Score without a unit."""
    return -math.log2(math.prod(row.layout)) + math.log2(row.microbatch_sequences) / 2


# ------------------------------------------------------------------------------------------------------------- agreement


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation. Equal values share a rank."""
    return statistics.correlation(ranks(xs), ranks(ys))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 for the smallest value. Equal values get their mean rank."""
    order = sorted(values)
    first = {value: number for number, value in reversed(list(enumerate(order, 1)))}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]


def median_error(rows: Iterable[Row], predicted: Predict) -> float:
    return statistics.median(abs(predicted(row) / row.tflops_per_gpu - 1) for row in rows)


def first_choice_losses(rows: Sequence[Row], predicted: Predict) -> dict[int, float]:
    """Number of GPUs -> relative loss of the layout that `predicted` prefers against the best measured; of ties, the worst."""
    losses = {}
    for gpus in sorted({row.gpus for row in rows}):
        there = [row for row in rows if row.gpus == gpus]
        top = max(predicted(row) for row in there)
        chosen = min(row.tflops_per_gpu for row in there if predicted(row) == top)
        losses[gpus] = 1 - chosen / max(row.tflops_per_gpu for row in there)
    return losses


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {kind: [row for row in rows if row.gpu == kind] for kind in dict.fromkeys(row.gpu for row in rows)}


def agreement(rows: Sequence[Row], predicted: Predict, with_errors: bool = True) -> str:
    measured = [row.tflops_per_gpu for row in rows]
    losses = first_choice_losses(rows, predicted)
    error = f"median error {median_error(rows, predicted):.1%}, " if with_errors else ""
    correlation = f"Spearman {spearman([predicted(row) for row in rows], measured):.3f}, " if len(rows) > 2 else ""
    return f"{len(rows)} rows: {correlation}{error}first choices lose at most {max(losses.values()):.1%}"


# --------------------------------------------------------------------------------------------------------------- fitting

CONSTANTS = tuple(field.name for field in dataclasses.fields(Fitted))


def loss(rows: Sequence[Row], fitted: Fitted) -> float:
    """Mean of sqrt(log(predicted / measured)^2 + ROUNDING^2)."""
    errors = (math.log(predict(row, fitted) / row.tflops_per_gpu) for row in rows)
    return statistics.fmean(math.hypot(error, ROUNDING) for error in errors)


START = Fitted(matmul_share=0.8, hopper_matmul_share=0.6, sync_s=50e-6, loader_tokens_per_s=40_000)
"""Round initial guesses; the last is from the 0.2 s per sequence of 8192 tokens of the slowest runs. From a loader that no run
waits for, a fit does not reach the best."""


def fit(rows: Sequence[Row], start: Fitted = START, names: Sequence[str] = CONSTANTS) -> Fitted:
    """Constants with the least loss(), by pattern search (Hooke and Jeeves 1961): each is tried a step up and down, then the
    combined move is repeated. If nothing helps, the step is halved, from a factor of 2 to 0.1%."""
    best, least, step = start, loss(rows, start), 1.0
    while step > 0.001:
        found, lower = best, least
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                tried = _scaled(found, {name: factor})
                if (value := loss(rows, tried)) < lower:
                    found, lower = tried, value
        if lower == least:
            step /= 2
            continue
        further = _scaled(found, {name: getattr(found, name) / getattr(best, name) for name in names})
        best, least = found, lower
        if (value := loss(rows, further)) < least:
            best, least = further, value
    return best


def _scaled(fitted: Fitted, factors: dict[str, float]) -> Fitted:
    return dataclasses.replace(fitted, **{name: getattr(fitted, name) * factor for name, factor in factors.items()})


def parts_fitted(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row], Predict]]:
    """Yields (description of the fit, rows left out of it, their prediction)."""
    few, more = [row for row in rows if row.gpus <= 16], [row for row in rows if row.gpus > 16]
    fitted = fit(few)
    yield "fitted to at most 16 GPUs, more predicted", more, lambda row: predict(row, fitted)

    by_layout = {}
    for layout in sorted({row.layout for row in rows}):
        by_layout[layout] = fit([row for row in rows if row.layout != layout])
    yield "each layout predicted by constants fitted to the others", list(rows), lambda row: predict(row, by_layout[row.layout])

    for known, new in (("a100-40gb", "h100-94gb"), ("h100-94gb", "a100-40gb")):
        share = "hopper_matmul_share" if new.startswith("h100") else "matmul_share"
        kinds = by_kind(rows)
        one_host = [row for row in kinds[new] if row.gpus == row.gpus_per_host]
        # A loader that never waits, unless the fitted rows include one that does.
        start = START if known.startswith("a100") else dataclasses.replace(START, loader_tokens_per_s=math.inf)
        names = [name for name in CONSTANTS if name != share and math.isfinite(getattr(start, name))]
        other = fit(one_host, fit(kinds[known], start, names), [share])
        rest = [row for row in kinds[new] if row not in one_host]
        how = f"fitted to {known}, matmuls of {new} to the {len(one_host)} of one host, more predicted"
        yield how, rest, lambda row, other=other: predict(row, other)


# -------------------------------------------------------------------------------------------------------------- printing


def table(rows: Sequence[Row]) -> Iterable[str]:
    yield f"{'gpu':<10}{'gpus':>5}{'tensor':>8}{'context':>8}{'pipe':>6}{'microbatch':>11}{'measured':>10}{'predicted':>10}"
    for row in rows:
        tensor, context, pipe = row.layout
        predicted = predict(row)
        yield (
            f"{row.gpu:<10}{row.gpus:>5}{tensor:>8}{context:>8}{pipe:>6}{row.microbatch_sequences:>11}"
            f"{row.tflops_per_gpu:>10.1f}{predicted:>10.1f}{predicted / row.tflops_per_gpu - 1:>+8.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants to all rows and to parts of them (a minute)")
    options = parser.parse_args()
    rows = published_rows()
    if options.fit:
        print(f"as they are            {FITTED}")
        print(f"fitted to all rows     {fit(rows)}")
        for how, others, predicted in parts_fitted(rows):
            print(f"\n{how}")
            for kind, there in by_kind(others).items():
                print(f"  {kind:<10} {agreement(there, predicted)}")
        return
    print("\n".join(table(rows)))
    for kind, there in by_kind(rows).items():
        print(f"\n{kind}\n  model     {agreement(there, predict)}")
        print(f"  one line  {agreement(there, one_line_rule, with_errors=False)}")
        losses = first_choice_losses(there, predict)
        print("  first choice below the best at so many GPUs: " + ", ".join(f"{n}: {loss:.1%}" for n, loss in losses.items()))


if __name__ == "__main__":
    main()
