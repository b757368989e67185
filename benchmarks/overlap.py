"""Transfers of a step that no compute hides: the real step is compiled for 8 and 64 H100s without a GPU, and its schedule is
simulated (jaxllm/compile/overlap.py). Nothing runs on a GPU: the schedule is XLA's own, the times are from a model.

python benchmarks/overlap.py [NAME ...] [--write | --check | --bounds] [--json FILE]
(needs the extra aot; a few minutes)

    NAME         steps to compile, of those in STEPS; default: all
    --write      puts the table into benchmarks/RESULTS.md, between its markers
    --check      compares the exposed seconds of each step with its bound; a sentence for each that is above, and exit code 1
    --bounds     writes the bounds of these steps for the installed minor version of JAX into benchmarks/overlap_bounds.json

Columns: bytes that a GPU sends in a step; the fraction of collectives without a matmul or attention between start and done
(bare); the fraction of bytes whose time shows (shows); FLOPs of matmuls and attention between starts and dones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from markdown_sections import write_between

from jaxllm.compile.aot import compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.compile.overlap import Overlap, by_kind, simulate_overlap, total
from jaxllm.config import Config, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.mesh.axes import axis_sizes

GPU = GPUS["h100-80gb"]
GPUS_PER_HOST = 8
RESULTS = Path(__file__).with_name("RESULTS.md")
BOUNDS = Path(__file__).with_name("overlap_bounds.json")
SLACK = 1.05
"""A bound is this much above the exposed seconds that it was recorded from, so that a patch version of XLA may order a few
instructions differently."""

PIPE_TENSOR = ("parallel.pipe=2", "parallel.tensor=2")
FOUR_AXES = ("parallel.pipe=4", "parallel.context=2", "parallel.tensor=4")
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=4")
LONG_70B = ("parallel.zero=3", "parallel.context=2", "parallel.remat=offload", "train.microbatch_sequences=2")
STEPS: Mapping[str, tuple[int, str, Sequence[str]]] = {
    "8b-zero1-512-single": (512, "llama-3.1-8b", ()),
    "8b-zero1-512-full-single": (512, "llama-3.1-8b", ("parallel.remat=full",)),
    "8b-zero1-tensor-64-single": (64, "llama-3.1-8b", ("parallel.tensor=2",)),
    "8b-zero1-512-two": (512, "llama-3.1-8b", ()),
    "8b-zero1-512-full-two": (512, "llama-3.1-8b", ("parallel.remat=full",)),
    "8b-zero1-tensor-64": (64, "llama-3.1-8b", ("parallel.tensor=2",)),
    "8b-zero3": (8, "llama-3.1-8b", ("parallel.zero=3",)),
    "8b-zero3-tensor": (8, "llama-3.1-8b", ("parallel.zero=3", "parallel.tensor=2")),
    "8b-pipe-tensor": (8, "llama-3.1-8b", PIPE_TENSOR),
    "8b-pipe-context-tensor": (8, "llama-3.1-8b", ("parallel.pipe=2", "parallel.context=2", "parallel.tensor=2")),
    "70b-layers-tensor": (8, "llama-3.1-70b", ("model.num_layers=8", "parallel.tensor=8")),
    "8b-zero3-64": (64, "llama-3.1-8b", ("parallel.zero=3",)),
    "70b-zero3-context": (64, "llama-3.1-70b", LONG_70B),
    "70b-4d": (64, "llama-3.1-70b", FOUR_AXES),
    "70b-4d-interleaved": (64, "llama-3.1-70b", (*FOUR_AXES, *INTERLEAVED)),
}
"""Name -> (GPUs, model, overrides). The data axis takes the remaining GPUs."""
MICROBATCHES, FEWER = 8, {"single": 1, "two": 2}
"""Microbatches of a step, and of those whose name ends in one of these words."""


def configured(name: str, *more: str) -> Config:
    gpus, model, overrides = STEPS[name]
    sections = {
        "model": {"name": model},
        "data": {"mask_documents": False},
        "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 1, "microbatch_sequences": 1},
    }
    given = load_config(sections, overrides)
    data = gpus // (given.parallel.pipe * given.parallel.context * given.parallel.tensor)
    batch = FEWER.get(name.rpartition("-")[2], MICROBATCHES) * data * given.train.microbatch_sequences
    return load_config(sections, [*overrides, *more, f"train.global_batch_sequences={batch}"]).resolve(gpus)


def compiled(config: Config) -> tuple[tuple[Overlap, ...], int, float, int]:
    """(transfers, bytes of temporaries, seconds to compile, loops with a number of iterations that XLA does not state)."""
    started = time.perf_counter()
    devices = gpu_devices(config.devices // GPUS_PER_HOST, GPUS_PER_HOST, GPU)
    step = compile_step(config, devices)
    module = Module(step.as_text(), axis_sizes(config.parallel))
    lines, unknown_loops = by_kind(simulate_overlap(module, GPU, GPUS_PER_HOST)), module.loops_without_trip_count()
    return lines, step.memory_analysis().temp_size_in_bytes, time.perf_counter() - started, unknown_loops


def rows_of(name: str, lines: Sequence[Overlap]) -> list[str]:
    """Markdown rows: one for each kind and axes, and one for all."""
    rows = []
    for line in (*lines, total(lines)):
        cells = [name, line.kind, " x ".join(line.axes) or "-", f"{line.count:,}", f"{line.sent_bytes / 2**30:.3g}"]
        cells += [f"{line.bare_share:.0%}", f"{line.exposed_share:.0%}", f"{line.flops_behind / 1e12:,.3g}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def table(found: Mapping[str, Sequence[Overlap]]) -> str:
    head = [
        "| step | collective | over | times | GiB sent | bare | shows | TFLOP behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(row for name, lines in found.items() for row in rows_of(name, lines))])


def minor_version() -> str:
    """0.10 for JAX 0.10.2."""
    return ".".join(jax.__version__.split(".")[:2])


def read_bounds() -> dict[str, dict[str, float | None]]:
    """Minor version of JAX -> step -> largest exposed seconds; None: XLA does not state the trip count of one of its loops."""
    return json.loads(BOUNDS.read_text(encoding="utf-8")) if BOUNDS.exists() else {}


def write_bounds(exposed_s: Mapping[str, float | None]) -> None:
    bounds = read_bounds()
    known = bounds.get(minor_version(), {})
    known |= {name: None if shown_s is None else math.ceil(1e3 * SLACK * shown_s) / 1e3 for name, shown_s in exposed_s.items()}
    bounds[minor_version()] = {name: known[name] for name in STEPS if name in known}
    ordered = sorted(bounds.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    BOUNDS.write_text(json.dumps(dict(ordered), indent=1) + "\n", encoding="utf-8")


def above_bounds(exposed_s: Mapping[str, float | None], bounds_s: Mapping[str, float | None]) -> list[str]:
    """A sentence for each step that shows more than its bound, or of which that cannot be said."""
    sentences = []
    for name, shown_s in exposed_s.items():
        if name not in bounds_s:
            sentences.append(f"{name} has no bound for JAX {minor_version()}: python benchmarks/overlap.py {name} --bounds")
        elif (bound_s := bounds_s[name]) is None:
            continue
        elif shown_s is None:
            sentences.append(f"{name} has a loop whose trip count XLA does not state: what shows is not known.")
        elif shown_s > bound_s:
            sentences.append(f"{name} waits {shown_s:.3f} s for transfers, more than its bound of {bound_s:.3f} s.")
    return sentences


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STEPS))
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    instead.add_argument("--check", action="store_true", help="compare with benchmarks/overlap_bounds.json")
    instead.add_argument("--bounds", action="store_true", help="write benchmarks/overlap_bounds.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    chosen = parser.parse_args(arguments)
    names = chosen.names or list(STEPS)
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]}: choose from {', '.join(STEPS)}")
    found, exposed_s = {}, {}
    for name in names:
        found[name], _, taken_s, unknown_loops = compiled(configured(name))
        exposed_s[name] = None if unknown_loops else total(found[name]).exposed_s
        print(f"{name}: {taken_s:.0f} s", file=sys.stderr, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({name: [asdict(line) for line in lines] for name, lines in found.items()}, indent=1))
    if chosen.bounds:
        write_bounds(exposed_s)
    if chosen.check:
        sentences = above_bounds(exposed_s, read_bounds().get(minor_version(), {}))
        print("\n".join(sentences or [f"{len(names)} steps are within their bounds for JAX {minor_version()}."]))
        return int(bool(sentences))
    text = (
        f"JAX {jax.__version__}; {GPU.name}, S 8192, {MICROBATCHES} microbatches (`single`: one; `two`) of one sequence "
        f"(`70b-zero3-context`: two), bfloat16.\n\n{table(found)}"
    )
    print(text)
    if chosen.write:
        write_between(RESULTS, "overlap", text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
