"""Compares the published 80% rule with its own measurements, and with what jaxllm's rule admits.

python benchmarks/published_rule.py [--remat full] [--json]        (needs no GPU and compiles nothing)

The rows of benchmarks/published are Llama 3.1 8B, S 8192 and 16384, global batch 1024 sequences, ZeRO 1, 1F1B, no
recomputation, by Megatron-LM. A row without a speed did not run. The published rule: the figure of jaxllm.cost_model.megatron
is at most 80% of the GPU's memory. jaxllm's rule: its own estimate for its own program is at most 95% of gpu.capacity_bytes.
For each mesh of the rows, the script prints the largest microbatch that each rule admits at S 8192, and the most layers at
microbatch 1. Of the configurations that memory_accuracy.py compiled, it prints how many each limit admits by the same estimate,
and how many of those do not fit.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_accuracy import TABLE, read_table

from jaxllm.config import Config, load_config
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.megatron import SAFE_SHARE, RuleRecord, megatron_memory, nominal_bytes
from jaxllm.cost_model.memory import estimate_memory

PUBLISHED = Path(__file__).parent / "published" / "llama-3.1-8b.csv"
MODEL, SEQUENCE_LENGTH, BATCH_SEQUENCES = "llama-3.1-8b", 8192, 1024
OUR_SHARE = 0.95
"""Fraction of gpu.capacity_bytes."""


@dataclass(frozen=True)
class Mesh:
    gpu: str
    gpus_per_host: int
    gpus: int
    tensor: int
    context: int
    pipe: int

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.context * self.pipe)


@dataclass(frozen=True)
class Row:
    mesh: Mesh
    sequence_length: int
    microbatch_sequences: int
    tflops_per_gpu: float | None
    """Megatron's count. None if the run failed."""
    estimate_percent: int | None
    """Figure of the author's code, in percent of 40 or 94 GiB. None if it was not published."""

    @property
    def config(self) -> Config:
        return config_of(self.mesh, self.microbatch_sequences, sequence_length=self.sequence_length)

    @property
    def percent(self) -> float:
        """The same figure by jaxllm.cost_model.megatron."""
        return 100 * megatron_memory(self.config).peak_bytes / nominal_bytes(find_gpu(self.mesh.gpu))


def read_rows(path: Path = PUBLISHED) -> list[Row]:
    """Rows without a doubt, of meshes that the GPUs can hold."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            sizes = {key: int(line[key]) for key in ("gpus_per_host", "gpus", "tensor", "context", "pipe")}
            mesh = Mesh(gpu=line["gpu"], **sizes)
            if line["doubt"] or not mesh.data:
                continue
            ran = float(line["tflops_per_gpu"]) if line["tflops_per_gpu"] else None
            percent = int(line["estimate_percent"]) if line["estimate_percent"] else None
            rows.append(Row(mesh, int(line["sequence_length"]), int(line["microbatch_sequences"]), ran, percent))
    return rows


def config_of(
    mesh: Mesh,
    microbatch: int,
    layers: int | None = None,
    remat: str = "selective",
    sequence_length: int = SEQUENCE_LENGTH,
) -> Config:
    """A row's run as a jaxllm config. If the microbatch does not divide 1024 sequences, the batch is the nearest multiple."""
    per_microbatch = mesh.data * microbatch
    microbatches = max(mesh.pipe, round(BATCH_SEQUENCES / per_microbatch))
    train = {"steps": 1, "sequence_length": sequence_length, "global_batch_sequences": microbatches * per_microbatch}
    sizes = {"tensor": mesh.tensor, "context": mesh.context, "pipe": mesh.pipe, "data": mesh.data}
    return load_config(
        {
            "model": {"name": MODEL, **({"num_layers": layers} if layers else {})},
            "train": {**train, "microbatch_sequences": microbatch},
            "parallel": {**sizes, "zero": 1, "schedule": "1f1b", "remat": remat},
            "data": {"mask_documents": False},
        }
    )


def record_of(verdicts: Iterable[tuple[bool, bool]]) -> RuleRecord:
    """The record of pairs (called safe, ran)."""
    counts = Counter(verdicts)
    ran, unsafe_ran = counts[True, True], counts[False, True]
    return RuleRecord(ran + counts[True, False], ran, unsafe_ran + counts[False, False], unsafe_ran)


def megatron_fits(config: Config, gpu: Gpu) -> bool:
    """Whether the published rule calls the config safe: megatron_memory is at most SAFE_SHARE of nominal_bytes."""
    return megatron_memory(config).peak_bytes <= SAFE_SHARE * nominal_bytes(gpu)


def rule_by_gpu(rows: Iterable[Row]) -> dict[str, RuleRecord]:
    """The rule's record on each kind of GPU."""
    verdicts: dict[str, list[tuple[bool, bool]]] = {}
    for row in rows:
        safe = megatron_fits(row.config, find_gpu(row.mesh.gpu))
        verdicts.setdefault(row.mesh.gpu, []).append((safe, row.tflops_per_gpu is not None))
    return {gpu: record_of(of_gpu) for gpu, of_gpu in verdicts.items()}


def largest(admits: Callable[[int], bool]) -> int:
    """Largest n from 1 on such that all up to n are admitted, assuming that admission is monotonic. 0 if none is."""
    over = 1
    while admits(over):
        over *= 2
    admitted = over // 2
    while over - admitted > 1:
        middle = (admitted + over) // 2
        if admits(middle):
            admitted = middle
        else:
            over = middle
    return admitted


def ours_fits(config: Config, gpu: str) -> bool:
    return estimate_memory(config, find_gpu(gpu)).peak_bytes <= OUR_SHARE * find_gpu(gpu).capacity_bytes


@dataclass(frozen=True)
class Admitted:
    """Limits by the published rule and by jaxllm's; 0 if none is admitted."""

    mesh: Mesh
    published_microbatch: int
    our_microbatch: int
    published_layers: int
    our_layers: int


def admitted(mesh: Mesh, remat: str = "selective") -> Admitted:
    """Counts layers in multiples of a stage."""
    gpu, p = find_gpu(mesh.gpu), mesh.pipe
    return Admitted(
        mesh,
        published_microbatch=largest(lambda b: megatron_fits(config_of(mesh, b), gpu)),
        our_microbatch=largest(lambda b: ours_fits(config_of(mesh, b, remat=remat), mesh.gpu)),
        published_layers=p * largest(lambda n: megatron_fits(config_of(mesh, 1, p * n), gpu)),
        our_layers=p * largest(lambda n: ours_fits(config_of(mesh, 1, p * n, remat), mesh.gpu)),
    )


def safety(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Counts for compiled configurations (rows of memory_accuracy.csv): how many fit by XLA's figure, how many jaxllm's
    estimate admits by its own limit and by the published one, and how many of those are above capacity.
    """
    result = dict.fromkeys(("compiled", "fit", "ours", "ours_above_capacity", "published", "published_above_capacity"), 0)
    for row in rows:
        if row["error"]:
            continue
        fits = row["total_bytes"] <= row["capacity_bytes"]
        lines = {"ours": OUR_SHARE * row["capacity_bytes"], "published": SAFE_SHARE * nominal_bytes(find_gpu(row["gpu"]))}
        result["compiled"] += 1
        result["fit"] += fits
        for name, line in lines.items():
            if row["estimate_bytes"] <= line:
                result[name] += 1
                result[f"{name}_above_capacity"] += not fits
    return result


def gain(meshes: Iterable[Admitted], of: str) -> dict[str, Any]:
    """Ratios on meshes where both rules admit something; otherwise which one does. Args: of: microbatch or layers."""
    pairs = [(getattr(mesh, f"published_{of}"), getattr(mesh, f"our_{of}")) for mesh in meshes]
    ratios = [our / published for published, our in pairs if our and published]
    return {
        "meshes": len(pairs),
        "both": len(ratios),
        "ours_alone": sum(our > 0 and not published for published, our in pairs),
        "published_alone": sum(published > 0 and not our for published, our in pairs),
        "ours_larger": sum(our > published for published, our in pairs),
        "ours_smaller": sum(our < published for published, our in pairs),
        "geometric_mean_ratio": math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None,
        "median_ratio": statistics.median(ratios) if ratios else None,
        "least_ratio": min(ratios, default=None),
        "most_ratio": max(ratios, default=None),
    }


def report(rows: list[Row], remat: str = "selective") -> dict[str, Any]:
    by_gpu = rule_by_gpu(rows)
    meshes = [admitted(mesh, remat) for mesh in dict.fromkeys(row.mesh for row in rows)]
    differences = [abs(row.percent - row.estimate_percent) for row in rows if row.estimate_percent is not None]
    return {
        "rows": len(differences),
        "largest_difference_percent": max(differences),
        "rule": {gpu: counts._asdict() for gpu, counts in by_gpu.items()},
        "safe": sum(counts.safe for counts in by_gpu.values()),
        "safe_and_ran": sum(counts.safe_and_ran for counts in by_gpu.values()),
        "published_share": SAFE_SHARE,
        "our_share": {gpu: OUR_SHARE * find_gpu(gpu).capacity_bytes / nominal_bytes(find_gpu(gpu)) for gpu in by_gpu},
        "remat": remat,
        "microbatch": gain(meshes, "microbatch"),
        "layers": gain(meshes, "layers"),
        "safety": safety(read_table(TABLE)),
        "meshes": [{**vars(found.mesh), **{k: v for k, v in vars(found).items() if k != "mesh"}} for found in meshes],
    }


def lines(result: dict[str, Any]) -> Iterable[str]:
    yield f"Of {result['safe']} runs that the published rule calls safe, {result['safe_and_ran']} ran:"
    for gpu, counts in result["rule"].items():
        yield (
            f"  {gpu}: {counts['safe_and_ran']} of {counts['safe']}; and {counts['unsafe_and_ran']} of {counts['unsafe']} "
            f"that it calls unsafe"
        )
    yield (
        f"Its percentages, printed without decimals, are reproduced within {result['largest_difference_percent']:.2f} on "
        f"{result['rows']} rows."
    )
    yield ""
    shares = ", ".join(f"{100 * share:.0f}% of {gpu}" for gpu, share in result["our_share"].items())
    yield f"The published rule admits {100 * result['published_share']:.0f}% of the GPU's memory, jaxllm's {shares}."
    yield f"Largest microbatch, and most layers at microbatch 1: published rule, and jaxllm's with remat={result['remat']}"
    yield ""
    yield "| GPU | GPUs | tensor | context | pipe | data | microbatch | jaxllm's | layers | jaxllm's |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    figures = ("published_microbatch", "our_microbatch", "published_layers", "our_layers")
    for mesh in result["meshes"]:
        sizes = [mesh[key] for key in ("gpu", "gpus", "tensor", "context", "pipe")]
        data = mesh["gpus"] // (mesh["tensor"] * mesh["context"] * mesh["pipe"])
        yield f"| {' | '.join(map(str, [*sizes, data, *(mesh[key] or 'none' for key in figures)]))} |"
    yield ""
    for of in ("microbatch", "layers"):
        found = result[of]
        if not found["both"]:
            yield f"{of}: no mesh on which both rules admit one"
            continue
        yield (
            f"{of}: jaxllm's is larger on {found['ours_larger']} of {found['meshes']} meshes and smaller on "
            f"{found['ours_smaller']}; alone on {found['ours_alone']}, missing on {found['published_alone']}; times "
            f"{found['geometric_mean_ratio']:.2f} (geometric mean), {found['least_ratio']:.2f} to {found['most_ratio']:.2f}"
        )
    result = result["safety"]
    if result["compiled"]:
        yield ""
        yield (
            f"Of {result['compiled']} configurations compiled by memory_accuracy.py {result['fit']} fit. By the same estimate, "
            f"jaxllm's line admits {result['ours']}, of which {result['ours_above_capacity']} do not fit; the published one "
            f"{result['published']}, of which {result['published_above_capacity']} do not."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--remat", default="selective", choices=["none", "selective", "full", "offload"], help="policy of jaxllm's side"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    result = report(read_rows(), arguments.remat)
    print(json.dumps(result) if arguments.json else "\n".join(lines(result)))


if __name__ == "__main__":
    main()
