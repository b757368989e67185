"""Compares the step-time model with the training speeds of dense decoders that others publish.

    python benchmarks/published_speeds.py          error, bias and coverage by convention, kind of GPU, ZeRO level, number of
                                                   GPUs, sequence length, attention kernel, year and source
    python benchmarks/published_speeds.py --rows   each row before that
    python benchmarks/published_speeds.py --fit    fits the constants of several GPUs (cost_model/step_parts.py: PUBLISHED) to
                                                   all programs of jaxllm's kind, and to all but those of one project, which it
                                                   then predicts; writes published/speeds-left-out.csv (five minutes)

Rows: published/speeds.csv, one a published figure. `convention` says whose program a row's is like: `jaxllm` for fully sharded
data parallelism by PyTorch or XLA, `megatron` for Megatron-LM and what is built on it. `note` says what its page leaves out and
was assumed. A two-matrix MLP is a gated one of as many FLOPs. Error: predicted / published - 1.

PUBLISHED has the attention that was measured on one GPU. Some programs have a kernel of 2022 or slower than FlashAttention-2;
they are fitted to up to OLD_LENGTH tokens, where attention takes little of a step.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxllm.config import Config, load_config
from jaxllm.cost_model.error_range import error_range
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import GPUS, Gpu
from jaxllm.cost_model.step_parts import FITTED, MEASURED, PUBLISHED, Fitted
from jaxllm.cost_model.step_time import estimate_step_time

FOLDER = Path(__file__).parent / "published"
SPEEDS, LEFT_OUT = FOLDER / "speeds.csv", FOLDER / "speeds-left-out.csv"
NO_MASKS = dataclasses.replace(FITTED, mask_bytes_per_s=math.inf, hopper_mask_bytes_per_s=math.inf)
"""Megatron's constants, for loaders that make no masks."""
OLD_LENGTH, LENGTH = 2048, 16384
"""Most tokens of a sequence of the fitted rows, with an old kernel and with another."""
CONSTANTS = ("matmul_share", "hopper_matmul_share", "overlap_cost")
"""What is fitted to several GPUs."""
ROUNDING = 0.02
"""Errors below this have little weight in a fit."""


@dataclass(frozen=True)
class Speed:
    """A speed that someone publishes of a program on a machine."""

    source: str
    convention: str
    year: int
    attention: str
    """Its kernel: cudnn, flash1, flash2, flash3, unfused or unknown."""
    precision: str
    config: Config
    gpu: Gpu
    gpus_per_host: int
    measured: float
    """Tokens/s per GPU."""
    power_w: int | None
    """Limit of a GPU, where it is published."""
    note: str

    @property
    def project(self) -> str:
        """The source without its version."""
        return self.source.split()[0]

    @property
    def gpus(self) -> int:
        return self.config.devices

    @cached_property
    def predicted(self) -> float:
        """By the constants in use, for jaxllm's own attention."""
        return self.by(NO_MASKS if self.convention == "megatron" else None)

    def by(self, fitted: Fitted | None) -> float:
        """Tokens/s per GPU by other constants than the convention's own."""
        return estimate_step_time(self.config, self.gpu, self.gpus_per_host, self.convention, fitted).tokens_per_s_per_gpu

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @cached_property
    def is_held(self) -> bool:
        """Whether the range of the prediction holds it."""
        low, high = error_range(self.config, self.gpu, self.gpus_per_host, self.convention).of(self.predicted)
        return low <= self.measured <= high


def speeds() -> list[Speed]:
    with SPEEDS.open(encoding="utf-8", newline="") as file:
        return [_speed(line) for line in csv.DictReader(file)]


def of_our_kind(rows: Iterable[Speed]) -> list[Speed]:
    """Those to which PUBLISHED is fitted: bfloat16 on several GPUs at their full power, with a published layout, fused
    attention, and sequences as most train on."""
    return [
        row
        for row in rows
        if row.convention == "jaxllm"
        and row.precision == "bf16"
        and row.gpus > 1
        and row.gpu.chip.compute_capability < (10, 0)
        and row.power_w in (None, 400, 700)
        and row.attention != "unfused"
        and row.config.train.sequence_length <= (OLD_LENGTH if row.attention == "flash1" else LENGTH)
        and "layout not published" not in row.note
    ]


def _speed(line: dict[str, str]) -> Speed:
    is_fp8, gpus, gpu = line["precision"] == "fp8", int(line["gpus"]), GPUS[line["gpu"]]
    if line["network_gbit_per_s"]:
        gpu = dataclasses.replace(gpu, network_bandwidth_bytes_per_s=float(line["network_gbit_per_s"]) / 8 * 1e9)
    parallel = {axis: int(line[axis]) for axis in ("tensor", "context", "pipe", "virtual_stages", "zero")}
    parallel |= {"remat": line["remat"], "schedule": "interleaved" if parallel["virtual_stages"] > 1 else "1f1b"}
    sizes = ("sequence_length", "global_batch_sequences", "microbatch_sequences")
    train = {"steps": 1, **{size: int(line[size]) for size in sizes}}
    model = {**_model(line["model"]), **({"matmul_dtype": "fp8"} if is_fp8 else {})}
    config = load_config({"model": model, "parallel": parallel, "train": train}).resolve(gpus)
    full, causal = (train_flops_per_token(config.model, config.train.sequence_length, causal) for causal in (False, True))
    peak = (is_fp8 and gpu.float8_flops) or gpu.dense_flops["bfloat16"]
    step_tokens = config.step_tokens / gpus
    measured = {
        "tokens_per_s": float,
        "mfu_full_square": lambda figure: float(figure) / 100 * peak / full,
        "tflops_full_square": lambda figure: float(figure) * 1e12 / full,
        "tflops_causal": lambda figure: float(figure) * 1e12 / causal,
        "step_s": lambda figure: step_tokens / float(figure),
    }[line["unit"]](line["figure"])
    own = {name: line[name] for name in ("source", "convention", "attention", "precision", "note")}
    power_w = int(line["power_w"]) if line["power_w"] else None
    of_machine = {"gpu": gpu, "gpus_per_host": min(gpus, int(line["gpus_per_host"])), "power_w": power_w}
    return Speed(**own, **of_machine, year=int(line["year"]), config=config, measured=measured)


def _model(text: str) -> dict[str, object]:
    """A shape of jaxllm, or sizes: L32-H4096-F11008-A32-K32-V32000."""
    if not text.startswith("L"):
        return {"name": text}
    sizes = {part[0]: int(part[1:]) for part in text.split("-")}
    names = {"L": "num_layers", "H": "hidden_size", "F": "intermediate_size", "A": "num_heads", "K": "num_kv_heads"}
    found = {name: sizes[letter] for letter, name in names.items()}
    return found | {"vocab_size": sizes["V"], "head_dim": sizes["H"] // sizes["A"], "tie_embeddings": True}


# ---------------------------------------------------------------------------------------------------------------- fitting


START = dataclasses.replace(MEASURED, matmul_share=0.8, hopper_matmul_share=0.6, overlap_cost=0.3)
"""Round initial guesses."""


def loss(rows: Sequence[Speed], fitted: Fitted) -> float:
    """Mean of sqrt(log(predicted / measured)^2 + ROUNDING^2), a row by the root of its project's number of rows: one page with
    a hundred rows shall not decide alone."""
    counts = {project: len(there) for project, there in by(rows, lambda row: row.project).items()}
    weights = [counts[row.project] ** -0.5 for row in rows]
    errors = [math.hypot(math.log(row.by(fitted) / row.measured), ROUNDING) for row in rows]
    return sum(weight * error for weight, error in zip(weights, errors, strict=True)) / sum(weights)


def fit(rows: Sequence[Speed], start: Fitted = START) -> Fitted:
    """The least loss by steps up and down, each constant in turn, halved from 30% to 0.5%."""
    best, least, step = start, loss(rows, start), 0.3
    while step > 0.005:
        before = least
        for name in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                tried = dataclasses.replace(best, **{name: factor * getattr(best, name)})
                if (value := loss(rows, tried)) < least:
                    best, least = tried, value
        if least == before:
            step /= 2
    return best


def write_left_out(rows: Sequence[Speed]) -> Iterator[str]:
    """Writes published/speeds-left-out.csv: each project predicted by a fit to all others."""
    with LEFT_OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("project", "row", "measured", "predicted"))
        for project, there in by(rows, lambda row: row.project).items():
            found = fit([row for row in rows if row.project != project])
            errors = []
            for number, row in enumerate(there):
                predicted = row.by(found)
                errors.append(predicted / row.measured - 1)
                writer.writerow((project, number, f"{row.measured:.6g}", f"{predicted:.6g}"))
            yield f"{project:<28}{len(there):>4} rows, left out: median error {statistics.median(errors):+.1%}"


def left_out_errors(rows: Sequence[Speed]) -> dict[str, list[tuple[Speed, float]]]:
    """Project -> (row, log(measured / predicted by a fit to other sources))."""
    by_project, found = by(rows, lambda row: row.project), {}
    with LEFT_OUT.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            row = by_project[line["project"]][int(line["row"])]
            error = math.log(float(line["measured"]) / float(line["predicted"]))
            found.setdefault(line["project"], []).append((row, error))
    return found


# --------------------------------------------------------------------------------------------------------------- printing


def by(rows: Iterable[Speed], key: Callable[[Speed], object]) -> dict[str, list[Speed]]:
    found: dict[str, list[Speed]] = {}
    for row in rows:
        found.setdefault(str(key(row)), []).append(row)
    return found


def _class(value: int, limits: Sequence[int]) -> str:
    below = [limit for limit in limits if limit < value]
    return f"{below[-1] + 1:,} and more" if len(below) == len(limits) else f"to {limits[len(below)]:,}"


GROUPS: Mapping[str, Callable[[Speed], object]] = {
    "convention": lambda row: row.convention,
    "kind of GPU": lambda row: f"{row.convention}, {row.gpu.name}, {row.precision}",
    "ZeRO": lambda row: f"{row.convention}, {row.config.parallel.zero}",
    "number of GPUs": lambda row: f"{row.convention}, {_class(row.gpus, (1, 8, 64, 512))}",
    "sequence length": lambda row: f"{row.convention}, {_class(row.config.train.sequence_length, (2048, 8192, 16384))}",
    "attention": lambda row: f"{row.convention}, {row.attention}",
    "year of the program": lambda row: f"{row.convention}, {row.year}",
    "source": lambda row: f"{row.convention}, {row.source}",
}


def group_lines(rows: Sequence[Speed]) -> Iterator[str]:
    for title, key in GROUPS.items():
        yield f"\n{title:<44}{'rows':>5}{'median error':>14}{'mean of |error|':>17}{'in the range':>14}"
        for name, there in sorted(by(rows, key).items()):
            errors = [row.error for row in there]
            held = sum(row.is_held for row in there)
            yield (
                f"  {name:<42}{len(there):>5}{statistics.median(errors):>+14.1%}{statistics.fmean(map(abs, errors)):>17.1%}"
                f"{f'{held} ({held / len(there):.0%})':>14}"
            )


def row_lines(rows: Iterable[Speed]) -> Iterator[str]:
    for row in rows:
        train, size, outside = row.config.train, row.config.model, "" if row.is_held else "  outside"
        yield (
            f"{row.source:<24}{size.num_layers:>4} x {size.hidden_size:<6}{row.gpu.name:<11}{row.gpus:>6}"
            f"{train.sequence_length:>8} {row.precision}{row.measured:>9,.0f}{row.predicted:>9,.0f}{row.error:>+8.1%}{outside}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="each row")
    parser.add_argument("--fit", action="store_true", help="fit the constants of several GPUs")
    options = parser.parse_args()
    rows = speeds()
    if options.fit:
        print(f"as they are    {PUBLISHED}\nfitted to all  {fit(of_our_kind(rows))}", flush=True)
        for line in write_left_out(of_our_kind(rows)):
            print(line, flush=True)
        return
    if options.rows:
        print("\n".join(row_lines(rows)))
    print("\n".join(group_lines(rows)))


if __name__ == "__main__":
    main()
