"""Fifteen minutes of one GPU, in two blocks: what is measured, in which order, and what it should show.

    bash launch/gpu_check.sh 1              570 s; `gpu_check.sh 2`: 235 s. Neither repeats a row of the other
    python benchmarks/gpu_day.py h100-80gb             the plan with its expected seconds and predictions; without a GPU
    python benchmarks/gpu_day.py h100-80gb --write     compiles the pretended steps (extra aot) and stores what they should show

A block takes its cases in this order while time remains; the second begins with its own, then takes what the first has left.
Rows that gpu_h100.jsonl has from earlier days are not measured again: after a change of FP8,
`python benchmarks/gpu.py --block 1 --again fp8` measures that case again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu as benchmark
import gpu_grouped
import gpu_limit
import gpu_peers
import gpu_pretend
import gpu_real_run
from gpu_cases import config_of, largest_microbatch

from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu, gpu_from_device_kind
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time

START_S = 45
"""Part of a block beside its cases: unpacking the wheels, starting Python and JAX. A process took 20 s from a cold disk."""
PREDICTED = Path(__file__).with_name("gpu_predicted.json")
"""Kind of GPU -> name of a pretended case -> what it should show, as compiled without a GPU."""
FIRST_PRETENDED = ("tiny", "ZeRO 3", "1F1B", "best")
TORCH_MICROBATCH, TORCH_S = 2, 120
"""PyTorch's side of 8B with ten layers: the state takes 24 GiB and a sequence 14 GiB, by the bytes per token and layer of the
1B row. The case took 65 s for 1B; 8B's matmuls compile as long and each step takes twice as long."""

Case = benchmark.Case


def cases(block: int, found: dict[str, Any], dry: bool) -> list[Case]:
    """The cases of a block. Args: found: the row of the ceilings; see gpu.cases."""
    stored = json.loads(PREDICTED.read_text(encoding="utf-8")) if PREDICTED.exists() else {}
    return [
        _with_prediction(case, gpu_from_device_kind(found.get("device", "")), stored) for case in _ordered(block, found, dry)
    ]


def _ordered(block: int, found: dict[str, Any], dry: bool) -> Iterator[Case]:
    pretended, grouped = ([Case(**case) for case in module.cases(dry)] for module in (gpu_pretend, gpu_grouped))
    limits = [Case(**case) for case in gpu_limit.cases(found, dry)]
    # The real run has a process of its own. So has what follows, with a peak of memory of its own.
    shares = [case for case in limits if case.name.endswith("%")]
    own = [*shares, Case(**gpu_real_run.case(dry)), *(case for case in limits if case not in shares)]
    if dry:
        yield from [*pretended[:2], *grouped] if block == 1 else own
        return
    layers = benchmark.layers_that_fit(found)
    of_8b = benchmark.about("8B", 8192, [f"model.num_layers={layers}"])
    pair = [benchmark.train(of_8b, "selective", variant, traced=True) for variant in ("", "fp8")]
    torch = [
        dataclasses.replace(case, options={**case.options, "first": TORCH_MICROBATCH}, expected_s=TORCH_S)
        for case in benchmark.their_cases(of_8b, "flash")
    ]
    # Only where their wheels came along (gpu_peers.py).
    peers = [Case(**gpu_peers.case(name, layers, dry)) for name in ("torchtitan", "maxtext") if find_spec(name)]
    first = [case for case in pretended if any(name in case.name for name in FIRST_PRETENDED)]
    ones = [*first, *pair, *grouped, *torch, *peers, *(case for case in pretended if case not in first)]
    yield from ones if block == 1 else [*own, *ones]


def _with_prediction(case: Case, gpu: Gpu | None, stored: dict[str, Any]) -> Case:
    if gpu is None:
        return case
    if case.kind in ("train", "limit"):
        overrides = case.options["overrides"]
        rows = 1 if case.kind == "limit" else largest_microbatch(overrides, gpu.capacity_bytes, gpu)
        config = config_of(overrides, microbatch_sequences=rows)
        speed = estimate_step_time(config, gpu, 1).tokens_per_s_per_gpu
        bytes_ = estimate_memory(config, gpu).peak_bytes
        predicted = {"tokens_per_s": speed, "estimate_bytes": bytes_, "share": bytes_ / gpu.capacity_bytes}
        return dataclasses.replace(case, predicted=predicted)
    # The parts of a grouped matmul bring their own.
    return dataclasses.replace(case, predicted=stored.get(gpu.name, {}).get(case.name, {}))


# ----------------------------------------------------------------------------------------------------------- without a GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", metavar="GPU", help="its kind, as for jaxllm compile --gpu")
    parser.add_argument("--write", action="store_true", help="compile the pretended steps and store the predictions")
    options = parser.parse_args()
    gpu = find_gpu(options.gpu)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.write:
        _store(gpu)
    found = {"device": gpu.device_kind, "capacity_bytes": gpu.capacity_bytes}
    known = benchmark.Runner(Path(os.devnull), [benchmark.KNOWN], 0.0, device=gpu.device_kind)
    done: set[str] = set()
    for block, limit_s in benchmark.BLOCKS_S.items():
        left = limit_s - START_S
        print(f"block {block}, {limit_s} s, of which {START_S} s for starts:")
        for case in cases(block, found, dry=False):
            if known.is_done(case) or case.name in done:
                continue
            expected = known.expected_s(case)
            fits = left >= expected
            left -= expected if fits else 0
            done |= {case.name} if fits else set()
            said = ", ".join(f"{name} {value:.4g}" for name, value in case.predicted.items() if isinstance(value, float | int))
            print(f"  {expected:4.0f} s  {case.name}{'' if fits else ' (no time)'}{f': {said}' if said else ''}")
        print(f"  {left:4.0f} s  left")


def _store(gpu: Gpu) -> None:
    stored = json.loads(PREDICTED.read_text(encoding="utf-8")) if PREDICTED.exists() else {}
    of_gpu = {case["name"]: gpu_pretend.predict(gpu, **case["options"]) for case in gpu_pretend.cases(dry=False)}
    # Seconds to compile are this machine's.
    stored[gpu.name] = {name: {k: v for k, v in found.items() if k != "compile_s"} for name, found in of_gpu.items()}
    PREDICTED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
