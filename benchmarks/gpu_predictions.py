"""Predictions for benchmarks/gpu.py without the GPU: each training case is compiled for that kind of GPU. Compares XLA's memory
with the estimate that chooses the case's microbatch, and predicts the speed by the step-time model. MFU counts attention's full
square, and refers to bfloat16's peak for FP8 too.

    python benchmarks/gpu_predictions.py h100-80gb h200-141gb [--only PATTERN] [--write]      (extra aot; seconds for each case)

It runs nothing on a GPU. --write puts the tables into benchmarks/RESULTS.md, between their markers. The exit code is 1 if a
step does not fit: gpu.py would then spend a GPU's minutes on a case that runs out of memory.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gpu as benchmark
from gpu_cases import config_of, largest_microbatch
from markdown_sections import write_between

from jaxllm.cluster import distributed
from jaxllm.compile.report import CompileReport, compile_report
from jaxllm.config import Config
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time

RESULTS = Path(__file__).with_name("RESULTS.md")
GIB = 2**30
HEAD = (
    "| step | layers | microbatch | GiB by XLA | by the estimate | of what a step may take | tokens/s | MFU | compiled in |",
    "|---|---|---|---|---|---|---|---|---|",
)


def training_cases(gpu: Gpu, only: str = "") -> Iterator[tuple[str, Config]]:
    """(name, config with the microbatch that gpu.py would choose) of each training case of jaxllm."""
    found = {"device": gpu.device_kind, "capacity_bytes": gpu.capacity_bytes}
    for case in benchmark.cases(found, dry=False):
        if case.kind == "train" and re.search(only, case.name):
            overrides = case.options["overrides"]
            rows = largest_microbatch(overrides, gpu.capacity_bytes, gpu)
            yield case.name, config_of(overrides, microbatch_sequences=rows)


def row(name: str, config: Config, gpu: Gpu, report: CompileReport) -> str:
    estimate = estimate_memory(config, gpu).peak_bytes
    rate = estimate_step_time(config, gpu, 1).tokens_per_s_per_gpu
    flops = rate * train_flops_per_token(config.model, config.train.sequence_length, causal=False)
    share = report.total_bytes / gpu.capacity_bytes
    cells = [name, f"{config.model.num_layers}", f"{config.train.microbatch_sequences}"]
    cells += [f"{report.total_bytes / GIB:.1f}", f"{estimate / GIB:.1f}", f"{share:.0%}"]
    cells += [f"{rate:,.0f}", f"{flops / gpu.dense_flops['bfloat16']:.0%}", f"{report.compile_s:.0f} s"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="+", metavar="GPU", help="kinds of GPU, as for jaxllm compile --gpu")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cases with matching names")
    parser.add_argument("--write", action="store_true", help="write the tables into benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines, misfits = [], 0
    for gpu in map(find_gpu, options.gpus):
        new = [f"{gpu.name}, of which a step may take {gpu.capacity_bytes / GIB:.1f} GiB:", "", *HEAD]
        print(*new, sep="\n", flush=True)
        for name, config in training_cases(gpu, options.only):
            report = compile_report(config, gpu, 1, cache=distributed.cache_folder() / "compile")
            new.append(row(name, config, gpu, report))
            print(new[-1], flush=True)
            misfits += not report.fits
        lines += [*new, ""]
    if options.write:
        write_between(RESULTS, "predictions", "\n".join(lines).rstrip())
    sys.exit(bool(misfits))


if __name__ == "__main__":
    main()
