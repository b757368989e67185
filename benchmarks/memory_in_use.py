"""Compares the memory that a train step uses on one GPU with XLA's figure and the estimate. Steps that cannot fit must fail.

python benchmarks/memory_in_use.py [--json]        on one GPU; about ten minutes
python benchmarks/memory_in_use.py --dry-run       a trial at tiny sizes on the local device

Each step runs in its own process through the Trainer, and the GPU's allocator gives the peak in use. It exceeds XLA's figure by
the prefetched batches and cuBLAS's workspace: ALLOWANCE_BYTES. Then one recipe runs with microbatches of 1, 2, 4 ... sequences:
the first whose figure is above the GPU's capacity must fail, and the one before must run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import subprocess_runner

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ALLOWANCE_BYTES = 96 * 2**20
"""cuBLAS's workspace (32 MiB on Hopper, as XLA requests it, on each of two streams) and prefetched batches. Computed, not
measured."""
TOLERANCE = 0.03
STEPS = 3
CHILD_LIMIT_S = 600
OUT_OF_MEMORY = subprocess_runner.OUT_OF_MEMORY

STEP = ("train.sequence_length=8192", "train.global_batch_sequences=2", "train.microbatch_sequences=1")
RECIPES: dict[str, tuple[str, ...]] = {
    "1B, selective": ("model.name=llama-3.2-1b", *STEP),
    "1B, selective, one text": ("model.name=llama-3.2-1b", *STEP, "data.mask_documents=false"),
    "1B, full, two sequences at once": (
        *("model.name=llama-3.2-1b", *STEP, "parallel.remat=full"),
        *("train.global_batch_sequences=4", "train.microbatch_sequences=2"),
    ),
    "1B, none": ("model.name=llama-3.2-1b", *STEP, "parallel.remat=none", "train.sequence_length=4096"),
    "1B, offload": ("model.name=llama-3.2-1b", *STEP, "parallel.remat=offload"),
    "1B, one microbatch": ("model.name=llama-3.2-1b", *STEP, "train.global_batch_sequences=1"),
    "3B, selective": ("model.name=llama-3.2-3b", *STEP),
    "3B, full, optimizer on the host": (
        *("model.name=llama-3.2-3b", *STEP, "parallel.remat=full", "parallel.offload_state=optimizer"),
    ),
}
GROWING = ("model.name=llama-3.2-1b", "train.sequence_length=8192", "parallel.remat=selective")
TINY = (
    *("model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=16", "model.vocab_size=256", "train.sequence_length=64"),
)
"""Overrides that --dry-run adds to each recipe."""


def run_here(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Trains a few steps in this process; with 0 it only compiles the step. in_use_bytes and limit_bytes are None if the device
    does not report them."""
    import jax

    from jaxllm import Trainer, load_config
    from jaxllm.cost_model.hardware import gpu_from_device_kind
    from jaxllm.cost_model.memory import estimate_memory
    from jaxllm.run.memory_check import total_bytes

    with tempfile.TemporaryDirectory() as folder:
        base = {"train": {"steps": max(steps, 1)}, "run": {"dir": folder}, "parallel": {"data": 1}, "model": {}}
        trainer = Trainer(load_config(base, [*overrides, "run.allow_overcommit=true"]))
        for _ in trainer.steps(steps):
            pass
        if not steps:
            trainer.compile_step(trainer.train_batch(0))
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {}
        compiled = trainer.programs.current.memory_analysis()
        estimate = estimate_memory(trainer.config, gpu_from_device_kind(device.device_kind))
        trainer.close()
    return {
        "device": device.device_kind,
        "attention": trainer.programs.functions.attention,
        "estimate_bytes": estimate.peak_bytes,
        "compiled_bytes": total_bytes(compiled),
        "in_use_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": stats.get("bytes_limit"),
    }


def run_in_subprocess(overrides: Sequence[str], steps: int = STEPS) -> dict[str, Any]:
    """Does the same in a new process. `error` is the reason of its failure."""
    said, error = subprocess_runner.run([sys.executable, __file__, "--child", str(steps), *overrides], CHILD_LIMIT_S)
    return said[-1] if error is None else {"error": error}


def excess(found: dict[str, Any]) -> float | None:
    """(in use - XLA's figure - allowance) / XLA's figure. Negative within the allowance; None if not reported."""
    if found["in_use_bytes"] is None:
        return None
    beyond = found["in_use_bytes"] - found["compiled_bytes"]
    return (beyond - min(max(beyond, 0), ALLOWANCE_BYTES)) / found["compiled_bytes"]


def first_that_fails(extra: Sequence[str] = (), most: int = 64) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """(results that ran, result that failed) for microbatches of 1, 2, 4 ... sequences of GROWING. The second is None if all up
    to `most` ran; otherwise it also has the figures of the compiled step."""
    ran, b = [], 1
    while b <= most:
        batch = (f"train.global_batch_sequences={b}", f"train.microbatch_sequences={b}")
        found = {"sequences": b, **run_in_subprocess((*GROWING, *batch, *extra), steps=2)}
        if "error" in found:
            compiled = run_in_subprocess((*GROWING, *batch, *extra), steps=0)
            return ran, {**compiled, **found}
        ran.append(found)
        b *= 2
    return ran, None


def line(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name}: {found['error']}"
    gib = {key: found[f"{key}_bytes"] / 2**30 for key in ("estimate", "compiled")}
    text = f"{name}: {gib['estimate']:.2f} GiB estimated, {gib['compiled']:.2f} by XLA ({found['attention']})"
    if found["in_use_bytes"] is None:
        return f"{text}; {found['device']} does not say what is in use"
    return f"{text}, {found['in_use_bytes'] / 2**30:.2f} in use ({100 * excess(found):+.1f}% beyond the allowance)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the local device")
    parser.add_argument("--json", action="store_true", help="one JSON object, alone on standard output")
    parser.add_argument("--child", nargs="+", metavar="STEPS OVERRIDE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_here(options.child[1:], int(options.child[0]))))
        return
    recipes, extra, most = RECIPES, (), 64
    if options.dry_run:
        recipes, extra, most = dict(list(RECIPES.items())[:1]), TINY, 1
    result: dict[str, Any] = {"steps": {}}
    for name, overrides in recipes.items():
        result["steps"][name] = run_in_subprocess((*overrides, *extra))
        print(line(name, result["steps"][name]), file=sys.stderr if options.json else sys.stdout, flush=True)
    result["ran"], result["failed"] = first_that_fails(extra, most)
    for found in [*result["ran"], *([result["failed"]] if result["failed"] else [])]:
        text = line(f"1B, selective, one microbatch of {found['sequences']}", found)
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(result))
    if any("error" in found for found in result["steps"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
