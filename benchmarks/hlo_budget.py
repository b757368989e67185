"""Counts of XLA's programs for a few small steps on H100s that should not grow: kernels, fusions, collectives, temporaries.

python benchmarks/hlo_budget.py [NAME ...] [--write REASON]      (needs the extra aot)

Without --write it prints the differences from benchmarks/hlo_budget.json, and exits with code 1 if something grew. With --write
it writes the file again, and stores the reason with the date: an explained growth is not a regression. Counts belong to one
version of jaxlib; other versions cannot be compared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jaxlib

from jaxllm.compile import aot
from jaxllm.compile.hlo import COLLECTIVES, Module
from jaxllm.compile.kernels import NO_KERNELS
from jaxllm.config import Config, load_config
from jaxllm.mesh.axes import axis_sizes

BUDGET = Path(__file__).with_name("hlo_budget.json")
SHAPE = {
    "num_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 8192,
}
TRAIN = {"steps": 10, "sequence_length": 2048, "global_batch_sequences": 32, "microbatch_sequences": 1}
STEPS: Mapping[str, tuple[int, Sequence[str]]] = {
    "one": (1, ("train.global_batch_sequences=4",)),
    "tensor": (8, ("parallel.tensor=2",)),
    "zero3": (8, ("parallel.zero=3",)),
    "pipe-context-tensor": (8, ("parallel.pipe=2", "parallel.context=2", "parallel.tensor=2")),
    "tensor-fp8": (8, ("parallel.tensor=2", "model.matmul_dtype=fp8")),
}
"""Name -> (number of H100s, overrides)."""


def configured(name: str) -> Config:
    gpus, overrides = STEPS[name]
    return load_config({"model": SHAPE, "train": TRAIN, "data": {"mask_documents": False}}, overrides).resolve(gpus)


def launches(module: Module) -> list[tuple[str, int]]:
    """(HLO's name of the operation, executions in one run) of every kernel, copy, library call and collective; an asynchronous
    one counts once."""
    return [
        (at.instruction.op, at.executed)
        for at in module.walk()
        if at.instruction.op not in NO_KERNELS and not at.instruction.op.endswith(("-done", "-update"))
    ]


def counts(config: Config) -> dict[str, int]:
    """Counts of one compiled step. Instructions are counted once each, launches as often as they run."""
    compiled = aot.compile_step(config, aot.gpu_devices(1, config.devices))
    module = Module(compiled.as_text(), axis_sizes(config.parallel))
    launched = launches(module)
    by_op = Counter(op.removesuffix("-start") for op, _ in launched)
    found = {
        "kernels": len(launched),
        "launches": sum(executed for _, executed in launched),
        "fusions": by_op["fusion"],
        "library calls": by_op["custom-call"],
        "copies": by_op["copy"],
        **{kind: by_op[kind] for kind in COLLECTIVES},
        "temporary bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
    return {name: number for name, number in found.items() if number}


def versions() -> list[str]:
    """Versions that the counts depend on, besides jaxllm's: XLA's. NVIDIA's assembler comes after them, and a step that XLA
    compiled for cuDNN 9.12 was the same for 9.28."""
    return [f"jaxlib {jaxlib.__version__}", *(version for version in aot.versions() if version.startswith("jax-"))]


def grown(before: Mapping[str, int], now: Mapping[str, int], sign: int = 1) -> list[str]:
    """Counts that grew, such as 'fusions 40 -> 44'; with sign -1 those that shrank."""
    sizes = {name: (before.get(name, 0), now.get(name, 0)) for name in {**before, **now}}
    return [f"{name} {old:,} -> {new:,}" for name, (old, new) in sizes.items() if sign * new > sign * old]


def read(file: Path = BUDGET) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"versions": [], "steps": {}, "reasons": []}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STEPS))
    parser.add_argument("--write", metavar="REASON", help="write the counts, with the reason of the change")
    chosen = parser.parse_args(arguments)
    names = chosen.names or list(STEPS)
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]}: choose from {', '.join(STEPS)}")
    budget = read()
    if chosen.write and chosen.names and budget["versions"] != versions():
        parser.error(f"the file has counts of {', '.join(budget['versions']) or 'nothing'}: write all steps")
    worse = False
    for name in names:
        now, before = counts(configured(name)), budget["steps"].get(name, {})
        more, less = grown(before, now), grown(before, now, sign=-1)
        print(f"{name}: grew: {'; '.join(more) or 'nothing'}. Shrank: {'; '.join(less) or 'nothing'}", flush=True)
        worse |= bool(more)
        budget["steps"][name] = now
    if chosen.write:
        budget["versions"] = versions()
        budget["steps"] = {name: budget["steps"][name] for name in STEPS if name in budget["steps"]}
        budget["reasons"].append(f"{datetime.date.today().isoformat()}: {chosen.write}")
        BUDGET.write_text(json.dumps(budget, indent=2) + "\n", encoding="utf-8")
        return 0
    return int(worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
