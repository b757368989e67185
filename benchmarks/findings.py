"""The 80% rule, and what its author's runs say of layouts and full GPUs, counted in the published rows, the step-time model and
compiled steps.

    python benchmarks/findings.py            prints the tables
    python benchmarks/findings.py --write    writes them into docs/findings.md and benchmarks/RESULTS.md

A pair is two published runs that differ in one setting; `gain` is how much faster the one is that the finding calls faster. The
rule itself is in published_rule.py, the rows and the model's prediction in step_time.py. Needs no GPU and compiles nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from markdown_sections import write_between
from memory_accuracy import TABLE, case_of, read_table
from published_rule import MODEL, SEQUENCE_LENGTH, megatron_fits, read_rows, record_of, rule_by_gpu, safety
from step_time import Row, predict, published_rows, spearman

from jaxllm.config import layer_stack, load_config
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.megatron import (
    SAFE_SHARE,
    RuleRecord,
    megatron_flops_per_token,
    megatron_memory,
    nominal_bytes,
)
from jaxllm.plan.estimate import estimate

CHECKOUT = Path(__file__).parents[1]
PAGE, RESULTS = CHECKOUT / "docs" / "findings.md", CHECKOUT / "benchmarks" / "RESULTS.md"
GIB = 2**30
NOISE = 0.01
"""Repeated runs differ by as much."""
AS_FULL = 0.01
"""Runs whose shares of the GPU's memory differ by less count as equally full."""
Setting = tuple[int, int, int, int]
"""Tensor, context and pipe ranks, and sequences of a microbatch."""


# ----------------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Finding:
    text: str
    factors: tuple[float, float, float, float]
    """By which the setting of the faster run differs from that of the slower."""
    holds_for: Callable[[Row], bool] = lambda row: True
    """Whether a slower run counts."""


def crosses_hosts(row: Row) -> bool:
    """Whether tensor x context ranks are more than a host has GPUs."""
    tensor, context, _ = row.layout
    return tensor * context > row.gpus_per_host


def from_tensor(ranks: int) -> Callable[[Row], bool]:
    return lambda row: row.layout[0] == ranks


HALF_TENSOR, HALF_CONTEXT, HALF_PIPE = (0.5, 1, 1, 1), (1, 0.5, 1, 1), (1, 1, 0.5, 1)
FINDINGS = (
    Finding("microbatch 2x as large", (1, 1, 1, 2)),
    Finding("tensor halved", HALF_TENSOR),
    Finding("context halved", HALF_CONTEXT),
    Finding("pipe halved", HALF_PIPE),
    Finding("tensor halved, microbatch halved too", (0.5, 1, 1, 0.5)),
    Finding("tensor halved, tensor x context wider than a host", HALF_TENSOR, crosses_hosts),
    Finding("context halved, tensor x context wider than a host", HALF_CONTEXT, crosses_hosts),
    Finding("context in place of tensor, 4 to 2", (0.5, 2, 1, 1), from_tensor(4)),
    Finding("context in place of tensor, 2 to 1", (0.5, 2, 1, 1), from_tensor(2)),
    Finding("pipe in place of tensor", (0.5, 1, 2, 1)),
    Finding("pipe in place of context", (1, 0.5, 2, 1)),
)


@dataclass(frozen=True)
class Pair:
    slower: Row
    faster: Row
    """As the finding says."""
    gain: float
    predicted: float
    """Gain by the step-time model."""

    @property
    def is_clear(self) -> bool:
        return abs(self.gain) > NOISE

    @property
    def model_agrees(self) -> bool:
        return (self.gain > 0) == (self.predicted > 0)


def setting_of(row: Row) -> Setting:
    return *row.layout, row.microbatch_sequences


def machine_of(row: Row) -> tuple[str, int, int]:
    return row.gpu, row.sequence_length, row.gpus


def pairs(finding: Finding, rows: Sequence[Row]) -> list[Pair]:
    by_setting = {(machine_of(row), setting_of(row)): row for row in rows}
    found = []
    for row in filter(finding.holds_for, rows):
        setting = tuple(size * factor for size, factor in zip(setting_of(row), finding.factors, strict=True))
        if other := by_setting.get((machine_of(row), setting)):
            gain = other.tflops_per_gpu / row.tflops_per_gpu - 1
            found.append(Pair(row, other, gain, predict(other) / predict(row) - 1))
    return found


def fewest_ranks_losses(rows: Iterable[Row]) -> list[float]:
    """For each GPU, length and number of GPUs, how much slower than the fastest run is the fastest of those with the fewest
    tensor x context x pipe ranks."""
    losses = []
    for there in by_machine(rows).values():
        fewest = min(math.prod(row.layout) for row in there)
        best = max(row.tflops_per_gpu for row in there if math.prod(row.layout) == fewest)
        losses.append(1 - best / max(row.tflops_per_gpu for row in there))
    return losses


# --------------------------------------------------------------------------------------------------------------- memory


def is_covered(row: dict) -> bool:
    """Whether the rule speaks of such a step (a row of memory_accuracy.csv)."""
    is_plain = row["remat"] in ("none", "selective") and row["offload_state"] == "none"
    return is_plain and row["zero"] <= 1 and row["schedule"] != "gpipe"


def rule_on_compiled(rows: Iterable[dict]) -> RuleRecord:
    """The rule's record on compiled steps; "ran" means that XLA's bytes are at most the capacity."""
    return record_of(
        (megatron_fits(case_of(row).config, find_gpu(row["gpu"])), row["total_bytes"] <= row["capacity_bytes"]) for row in rows
    )


def rule_table() -> Iterator[str]:
    """The published rule on runs and on compiled steps, and the same line on jaxllm's own estimate."""
    yield "| | called safe | of these it ran or fits | called unsafe | of these it ran or fits |"
    yield "|---|---|---|---|---|"
    for gpu, counts in rule_by_gpu(read_rows()).items():
        yield _table_row(f"published runs, {gpu}", *counts)
    compiled = [row for row in read_table(TABLE) if not row["error"]]
    covered = [row for row in compiled if is_covered(row)]
    yield _table_row(f"compiled steps that the rule covers, {len(covered)}", *rule_on_compiled(covered))
    yield _table_row(f"all compiled steps, {len(compiled)}", *rule_on_compiled(compiled))
    counts = safety(compiled)
    for way, text in (
        ("published", "80% of the GPU by jaxllm's estimate"),
        ("ours", "95% of the capacity by jaxllm's estimate"),
    ):
        safe, above = counts[way], counts[f"{way}_above_capacity"]
        unsafe = counts["compiled"] - safe
        yield _table_row(f"the same steps, {text}", safe, safe - above, unsafe, counts["fit"] - safe + above)
    yield ""
    yield from published_lines()
    yield from compiled_lines(covered)


def published_lines() -> Iterator[str]:
    """Where the rule errs on the published runs."""
    rows = read_rows()
    for gpu in dict.fromkeys(row.mesh.gpu for row in rows):
        there = [row for row in rows if row.mesh.gpu == gpu]
        ran = max(row.percent for row in there if row.tflops_per_gpu)
        failed = min(row.percent for row in there if not row.tflops_per_gpu)
        yield f"- {gpu}: the highest figure that ran is {ran:.0f}%, the lowest without a result {failed:.0f}%."
    failed_on: dict[str, list[int]] = {}
    for row in rows:
        if row.tflops_per_gpu is None and megatron_fits(row.config, find_gpu(row.mesh.gpu)):
            mesh = row.mesh
            layout = f"tensor {mesh.tensor}, context {mesh.context}, pipe {mesh.pipe}, microbatch {row.microbatch_sequences}"
            failed_on.setdefault(f"{mesh.gpu}, {layout}", []).append(mesh.gpus)
    for layout, sizes in failed_on.items():
        yield f"- Called safe without a result: {layout} on {', '.join(map(str, sizes))} GPUs."


def compiled_lines(covered: Sequence[dict]) -> Iterator[str]:
    """Where the rule errs on the compiled steps that it covers, and what it leaves unused."""
    safe = [row for row in covered if megatron_fits(case_of(row).config, find_gpu(row["gpu"]))]
    shares = [(row["total_bytes"] / row["capacity_bytes"], row["remat"]) for row in safe]
    above = [remat for share, remat in shares if share > 1]
    yield (
        f"- Of the {len(safe)} compiled steps that it covers and calls safe, {len(above)} do not fit: {above.count('none')} of "
        f"them keep every activation (`none`). The fullest takes {max(shares)[0]:.0%} of the capacity, the median "
        f"{statistics.median(share for share, _ in shares):.0%}."
    )
    limits = " and ".join(
        f"{SAFE_SHARE * nominal_bytes(gpu) / GIB:.0f} of {gpu.capacity_bytes / GIB:.1f} GiB ({gpu.name})"
        for gpu in map(find_gpu, ("a100-40gb", "h100-80gb"))
    )
    yield f"- The rule's limit is {limits} that a step of jaxllm may take."


# --------------------------------------------------------------------------------------------------------------- tables


def _table_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):+.1%}"


def findings_table(rows: Sequence[Row]) -> Iterator[str]:
    head = ("one setting differs", "pairs", "faster", "slower by over 1%", "gain, mean (least to most)", "model: gain, mean")
    head = (*head, "model: same sign", "of pairs over 1%")
    yield _table_row(*head)
    yield "|---" * len(head) + "|"
    for finding in FINDINGS:
        there = pairs(finding, rows)
        gains, clear = [pair.gain for pair in there], [pair for pair in there if pair.is_clear]
        yield _table_row(
            finding.text,
            len(there),
            sum(gain > 0 for gain in gains),
            sum(gain < -NOISE for gain in gains),
            f"{_mean(gains)} ({min(gains):+.1%} to {max(gains):+.1%})",
            _mean(pair.predicted for pair in there),
            f"{sum(pair.model_agrees for pair in there)} of {len(there)}",
            f"{sum(pair.model_agrees for pair in clear)} of {len(clear)}",
        )
    losses = fewest_ranks_losses(rows)
    yield ""
    yield (
        f"In {losses.count(0)} of {len(losses)} combinations of GPU, length and number of GPUs, the fastest run is among those "
        f"with the fewest tensor x context x pipe ranks. In the others these lose at most {max(losses):.1%}."
    )


def by_cluster_table(rows: Sequence[Row]) -> Iterator[str]:
    """Where a finding turns: faster / pairs, and the mean gain, by number of GPUs."""
    sizes = sorted({row.gpus for row in rows})
    yield _table_row("", "GPU, length", *(f"{gpus} GPUs" for gpus in sizes))
    yield "|---" * (len(sizes) + 2) + "|"
    for finding in FINDINGS:
        found = pairs(finding, rows)
        for gpu, length in sorted({machine_of(pair.slower)[:2] for pair in found}):
            cells = []
            for gpus in sizes:
                gains = [pair.gain for pair in found if machine_of(pair.slower) == (gpu, length, gpus)]
                cells.append(f"{sum(gain > 0 for gain in gains)}/{len(gains)} {_mean(gains)}" if gains else "")
            yield _table_row(finding.text, f"{gpu}, {length}", *cells)


def share_of_memory(row: Row) -> float:
    """The rule's figure for a run, as a share of the GPU's memory."""
    return megatron_memory(row.config).peak_bytes / nominal_bytes(find_gpu(row.gpu))


def by_machine(rows: Iterable[Row]) -> dict[tuple[str, int, int], list[Row]]:
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        found.setdefault(machine_of(row), []).append(row)
    return found


def losses_of_fullest(rows: Sequence[Row]) -> list[float]:
    """How much slower than the fastest run each of the fullest is, ascending."""
    most, best = max(map(share_of_memory, rows)), max(row.tflops_per_gpu for row in rows)
    return sorted(1 - row.tflops_per_gpu / best for row in rows if share_of_memory(row) > most - AS_FULL)


def memory_table(rows: Sequence[Row]) -> Iterator[str]:
    """Whether runs that take more memory are faster, on the same GPUs and at the same length."""
    head = ("GPU", "length", "GPUs", "runs", "rank correlation of speed with memory", "memory of the fastest", "of the fullest")
    head = (*head, "the fullest are slower by")
    yield _table_row(*head)
    yield "|---" * len(head) + "|"
    groups = {machine: there for machine, there in by_machine(rows).items() if len(there) > 1}
    for (gpu, length, gpus), there in sorted(groups.items()):
        shares, speeds = [share_of_memory(row) for row in there], [row.tflops_per_gpu for row in there]
        losses = [f"{loss:.1%}" for loss in losses_of_fullest(there)]
        yield _table_row(
            *(gpu, f"{length:,}", gpus, len(there), f"{spearman(shares, speeds):.2f}"),
            *(f"{shares[speeds.index(max(speeds))]:.0%}", f"{max(shares):.0%}", ", ".join(losses)),
        )
    yield ""
    for gpu in sorted({row.gpu for row in rows}):
        yield memory_line(gpu, [row for row in rows if row.gpu == gpu])


def memory_line(gpu: str, rows: Sequence[Row]) -> str:
    """What the runs of one kind of GPU say together."""
    losses = [losses_of_fullest(there)[0] for there in by_machine(rows).values() if len(there) > 1]
    behind = [f"{loss:.1%}" for loss in sorted(losses) if loss]
    elsewhere = f" (elsewhere these are {behind[0]} to {behind[-1]} slower)" if behind else ""
    larger = pairs(FINDINGS[0], rows)
    against = sorted(f"{share_of_memory(pair.faster):.0%}" for pair in larger if pair.gain < 0)
    where = f", and slower where it took {' and '.join(against)}" if against else ""
    fullest, second = sorted(map(share_of_memory, rows), reverse=True)[:2]
    return (
        f"- {gpu}: the fastest run is among the fullest in {losses.count(0)} of {len(losses)} groups{elsewhere}. On one mesh "
        f"the larger of two microbatches, which takes more memory, is faster in {len(larger) - len(against)} of {len(larger)} "
        f"pairs{where}. The fullest run took {fullest:.0%}, the next {second:.0%}."
    )


def zero_table(gpus: int = 64) -> Iterator[str]:
    """Why data parallelism with ZeRO 3 comes first: bytes and speeds of `jaxllm estimate`."""
    head = (f"{gpus} GPUs", "mesh", "by the rule, GiB", "verdict", "ZeRO", "jaxllm's estimate, GiB", "of the capacity")
    yield _table_row(*head, "tokens/s a GPU, predicted")
    yield "|---" * (len(head) + 1) + "|"
    train = {"steps": 1, "sequence_length": SEQUENCE_LENGTH, "global_batch_sequences": 1024, "microbatch_sequences": 1}
    meshes = {"data only": {}, "tensor 2": {"tensor": 2}, "tensor 4, pipe 2": {"tensor": 4, "pipe": 2}}
    for gpu in map(find_gpu, ("a100-40gb", "h100-80gb")):
        for mesh, zero in (*((mesh, 1) for mesh in meshes), ("data only", 3)):
            config = load_config({"model": {"name": MODEL}, "parallel": {**meshes[mesh], "zero": zero}, "train": train})
            # As the compiled steps of these pages, whichever JAX is here.
            with patch.object(layer_stack, "has_older_xla", lambda: False):
                found = estimate(config, gpu, gpus, convention="megatron")
            rule, own = found.by_convention["megatron"], found.by_convention["jaxllm"].memory.peak_bytes
            # Megatron-LM's distributed optimizer is ZeRO 1; of ZeRO 3 its rule has no figure.
            by_rule = f"{rule.memory.peak_bytes / GIB:.1f}", "safe" if rule.fits else "not safe"
            speed = estimate(config, gpu, gpus).speed.tokens_per_s_per_gpu
            yield _table_row(
                *(gpu.name, mesh, *(by_rule if zero == 1 else ("", "")), zero),
                *(f"{own / GIB:.1f}", f"{own / gpu.capacity_bytes:.1%}", f"{speed:,.0f}" if own <= gpu.capacity_bytes else ""),
            )
    rows = [row for row in read_rows() if row.tflops_per_gpu]
    ranks = [(row.mesh.gpu, row.mesh.gpus // row.mesh.data) for row in rows]
    fewest = " and ".join(f"{min(n for kind, n in ranks if kind == gpu)} on {gpu}" for gpu in sorted(dict(ranks)))
    yield ""
    yield (
        f"Weights and float32 gradients alone take {6 * parameter_count(rows[0].config.model) / GIB:.1f} GiB on a GPU without "
        f"model parallelism. The fewest tensor x context x pipe ranks of a published run are {fewest}."
    )


# ---------------------------------------------------------------------------------------------------------------- masks


def microbatch_s(row: Row, tflops_per_gpu: float) -> float:
    """Seconds of a step at a speed, over its microbatches and the ticks of the bubble."""
    tokens = row.config.step_tokens
    step_s = megatron_flops_per_token(row.config.model, row.sequence_length) * tokens / (tflops_per_gpu * 1e12 * row.gpus)
    return step_s / (row.config.num_microbatches + row.layout[2] - 1)


def masks_table(rows: Sequence[Row], few: int = 8, many: int = 64) -> Iterator[str]:
    """How a microbatch slows down as data ranks are added, on H100s without a pipeline."""
    head = ("length", "tensor", "context", "microbatch", "loaders a host", f"ms at {few} GPUs", f"more at {many}, ms")
    head = (*head, "more by the model, ms", f"more a step at {many}, s", "one exchange over data, s")
    yield _table_row(*head)
    yield "|---" * len(head) + "|"
    by_setting = {(row.sequence_length, setting_of(row), row.gpus): row for row in rows if row.gpu == "h100-94gb"}
    for (length, setting, gpus), row in sorted(by_setting.items()):
        large = by_setting.get((length, setting, many))
        tensor, context, pipe, microbatch = setting
        if gpus != few or not large or pipe > 1:
            continue
        measured = [microbatch_s(there, there.tflops_per_gpu) for there in (row, large)]
        predicted = [microbatch_s(there, predict(there)) for there in (row, large)]
        more_s = measured[1] - measured[0]
        # Float32 gradients and bfloat16 weights, not hidden.
        exchange_s = 6 * parameter_count(row.config.model) / tensor / find_gpu(row.gpu).network_bandwidth_bytes_per_s
        yield _table_row(
            *(f"{length:,}", tensor, context, microbatch, row.gpus_per_host // tensor),
            *(f"{1000 * measured[0]:,.0f}", f"{1000 * more_s:+,.0f}", f"{1000 * (predicted[1] - predicted[0]):+,.0f}"),
            *(f"{more_s * large.config.num_microbatches:+.1f}", f"{exchange_s:.1f}"),
        )


# ----------------------------------------------------------------------------------------------------------------- main


def sections() -> dict[tuple[Path, str], str]:
    """(file, marker) -> Markdown."""
    rows = published_rows()
    tables = {
        (PAGE, "rule"): rule_table(),
        (RESULTS, "pairs"): findings_table(rows),
        (RESULTS, "findings"): by_cluster_table(rows),
        (RESULTS, "memory"): memory_table(rows),
        (RESULTS, "masks"): masks_table(rows),
        (RESULTS, "zero-3"): zero_table(),
    }
    return {place: "\n".join(lines) for place, lines in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/findings.md and benchmarks/RESULTS.md")
    write = parser.parse_args().write
    for (file, name), text in sections().items():
        if write:
            write_between(file, name, text)
        print(text, end="\n\n")


if __name__ == "__main__":
    main()
