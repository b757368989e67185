"""Compares the step-time model's convention of Megatron-LM with one published table; published_speeds.py has all others.

    python benchmarks/step_time.py            measured and predicted TFLOP/s per GPU for each row, and their agreement
    python benchmarks/step_time.py --fit      fits the constants (cost_model/step_parts.py) to all rows, and to all but one
                                              group, which it then predicts; writes published/left-out.csv (four minutes)
    python benchmarks/step_time.py --ranges   the ranges of error (cost_model/error_range.py), from that file

Rows: those of published/llama-3.1-8b.csv with a number and without a doubt (lab table of 22 Oct 2024 by the first author of
arXiv:2411.06465: Megatron-LM, Llama 3.1 8B, 1024 sequences, plain 1F1B, distributed optimizer, no recomputation). A row in
doubt repeats the cells beside it. Agreement: Spearman's rank correlation, median error, and the measured loss of the model's
first choice against the best layout for each number of GPUs. Beside each correlation stands that of a one-line rule:
-log2(tensor context pipe) + log2(microbatch) / 2.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import Config, load_config
from jaxllm.cost_model.error_range import HELD, kind_of_layout
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.step_parts import FITTED, Fitted
from jaxllm.cost_model.step_time import estimate_step_time

FOLDER = Path(__file__).parent / "published"
PUBLISHED, LEFT_OUT = FOLDER / "llama-3.1-8b.csv", FOLDER / "left-out.csv"
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

    @property
    def sequence_length(self) -> int:
        return self.config.train.sequence_length


def published_rows() -> list[Row]:
    """Rows with a number and without a doubt."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file) if line["tflops_per_gpu"] and not line["doubt"]]


def _row(line: dict[str, str]) -> Row:
    tensor, context, pipe, gpus, microbatch, length = (
        int(line[name]) for name in ("tensor", "context", "pipe", "gpus", "microbatch_sequences", "sequence_length")
    )
    train = {"steps": 1, "sequence_length": length, "global_batch_sequences": 1024, "microbatch_sequences": microbatch}
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


def first_choice_losses(rows: Sequence[Row], predicted: Predict) -> dict[tuple[int, int], float]:
    """(GPUs, sequence length) -> relative loss of the layout that `predicted` prefers against the best measured; of ties, the
    worst."""
    losses = {}
    for cluster in sorted({(row.gpus, row.sequence_length) for row in rows}):
        there = [row for row in rows if (row.gpus, row.sequence_length) == cluster]
        top = max(predicted(row) for row in there)
        chosen = min(row.tflops_per_gpu for row in there if predicted(row) == top)
        losses[cluster] = 1 - chosen / max(row.tflops_per_gpu for row in there)
    return losses


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {kind: [row for row in rows if row.gpu == kind] for kind in dict.fromkeys(row.gpu for row in rows)}


def agreement(rows: Sequence[Row], predicted: Predict) -> str:
    measured = [row.tflops_per_gpu for row in rows]
    losses = first_choice_losses(rows, predicted)
    by_model, by_rule = (spearman([way(row) for row in rows], measured) for way in (predicted, one_line_rule))
    return (
        f"{len(rows)} rows: Spearman {by_model:.3f} (one line: {by_rule:.3f}), median error "
        f"{median_error(rows, predicted):.1%}, first choices lose at most {max(losses.values()):.1%}"
    )


# --------------------------------------------------------------------------------------------------------------- fitting

CONSTANTS = tuple(field.name for field in dataclasses.fields(Fitted) if field.default is dataclasses.MISSING)


def loss(rows: Sequence[Row], fitted: Fitted) -> float:
    """Mean of sqrt(log(predicted / measured)^2 + ROUNDING^2)."""
    errors = (math.log(predict(row, fitted) / row.tflops_per_gpu) for row in rows)
    return statistics.fmean(math.hypot(error, ROUNDING) for error in errors)


START = Fitted(
    matmul_share=0.8,
    hopper_matmul_share=0.6,
    sync_s=50e-6,
    spread=0.02,
    mask_bytes_per_s=400e6,
    hopper_mask_bytes_per_s=400e6,
    mask_jitter=0.5,
)
"""Round initial guesses. A mask of 8192 x 8192 bytes takes about 0.2 s in the slowest runs."""
OF_MACHINE = {
    "a100-40gb": ("matmul_share", "mask_bytes_per_s"),
    "h100-94gb": ("hopper_matmul_share", "hopper_mask_bytes_per_s"),
}
"""Constants of one kind of GPU and its hosts."""


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


def groups_left_out(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], Predict]]:
    """Yields (group, its rows, their prediction by constants fitted to the other rows)."""

    def without(name: str, group: list[Row], known: list[Row], start: Fitted = START, names: Sequence[str] = CONSTANTS):
        fitted = fit(known, start, names)
        return name, group, lambda row: predict(row, fitted)

    few, more = [row for row in rows if row.gpus <= 32], [row for row in rows if row.gpus > 32]
    yield without("more than 32 GPUs", more, few)
    for length in (8192, 16384):
        there = [row for row in rows if row.sequence_length == length]
        # Of A100s there are runs of one length only.
        there = [row for row in there if row.gpu == "h100-94gb"]
        yield without(f"sequences of {length:,}", there, [row for row in rows if row not in there])
    kinds = by_kind(rows)
    for kind, machine in OF_MACHINE.items():
        smallest = sorted({row.gpus for row in kinds[kind]})[:2]
        known = [row for row in kinds[kind] if row.gpus in smallest]
        others = fit([row for row in rows if row.gpu != kind], START, [name for name in CONSTANTS if name not in machine])
        name = f"{kind}, its own two constants fitted to {len(known)} rows of {smallest[0]} and {smallest[1]} GPUs"
        yield without(name, [row for row in kinds[kind] if row not in known], known, others, machine)


# ------------------------------------------------------------------------------------------------------------- left out


def write_left_out(groups: Iterable[tuple[str, list[Row], Predict]]) -> Iterator[str]:
    """Writes published/left-out.csv and yields the agreement of each group."""
    with LEFT_OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("group", "gpu", "gpus", "kind_of_layout", "measured", "predicted"))
        for name, rows, predicted in groups:
            for row in rows:
                kind = kind_of_layout(row.config, row.gpus_per_host)
                found = round(predicted(row), 2)
                writer.writerow((name, row.gpu, row.gpus, kind, row.tflops_per_gpu, found))
            yield name
            yield from (f"  {kind:<10} {agreement(there, predicted)}" for kind, there in by_kind(rows).items())


def left_out_errors() -> dict[str, dict[tuple[str, str], list[float]]]:
    """Kind of layout -> (group, kind of GPU) -> log(measured / predicted) of each left-out row."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    with LEFT_OUT.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            error = math.log(float(line["measured"]) / float(line["predicted"]))
            groups = found.setdefault(line["kind_of_layout"], {})
            groups.setdefault((line["group"], line["gpu"]), []).append(error)
    return found


def quantile(errors: Sequence[float], share: float = HELD) -> float:
    """The least of the absolute errors below which are `share` of them."""
    return sorted(map(abs, errors))[math.ceil(share * len(errors)) - 1]


# -------------------------------------------------------------------------------------------------------------- printing


def table(rows: Sequence[Row]) -> Iterable[str]:
    yield (
        f"{'gpu':<10}{'gpus':>5}{'sequence':>9}{'tensor':>8}{'context':>8}{'pipe':>6}{'microbatch':>11}{'measured':>10}"
        f"{'predicted':>10}"
    )
    for row in rows:
        tensor, context, pipe = row.layout
        predicted = predict(row)
        yield (
            f"{row.gpu:<10}{row.gpus:>5}{row.sequence_length:>9}{tensor:>8}{context:>8}{pipe:>6}{row.microbatch_sequences:>11}"
            f"{row.tflops_per_gpu:>10.1f}{predicted:>10.1f}{predicted / row.tflops_per_gpu - 1:>+8.1%}"
        )


def agreement_lines(rows: Sequence[Row]) -> Iterator[str]:
    for kind, there in by_kind(rows).items():
        for length in sorted({row.sequence_length for row in there}):
            of_length = [row for row in there if row.sequence_length == length]
            yield f"{kind}, sequences of {length:,}\n  {agreement(of_length, predict)}"
            losses = first_choice_losses(of_length, predict)
            yield "  first choice below the best at so many GPUs: " + ", ".join(f"{n}: {x:.1%}" for (n, _), x in losses.items())


def range_lines() -> Iterator[str]:
    for kind, groups in left_out_errors().items():
        yield kind
        for (group, gpu), errors in groups.items():
            mean = statistics.fmean(errors)
            yield f"  {len(errors):>3} rows of {gpu}: {HELD:.0%} within {quantile(errors):.3f}, the mean {mean:+.3f}  ({group})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants to all rows, and to all but one group")
    parser.add_argument("--ranges", action="store_true", help="ranges of error, from published/left-out.csv")
    options = parser.parse_args()
    rows = published_rows()
    if options.fit:
        print(f"as they are            {FITTED}\nfitted to all rows     {fit(rows)}", flush=True)
        for line in write_left_out(groups_left_out(rows)):
            print(line, flush=True)
    elif options.ranges:
        print("\n".join(range_lines()))
    else:
        print("\n".join([*table(rows), "", *agreement_lines(rows)]))


if __name__ == "__main__":
    main()
