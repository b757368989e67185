"""What rounding costs in loss: the quickstart model on the same texts in the same order.

python benchmarks/fp8_loss.py [section.key=value ...] [--seeds N] [--json FILE]      bfloat16, float32 and FP8
python benchmarks/fp8_loss.py --study reduce_dtype                                   gradients of 8 ranks added in bfloat16
python benchmarks/fp8_loss.py --dry-run                                              a trial at tiny sizes

On a CPU the rounding is FP8 and the sums are float32; on a GPU from Ada on, the hardware does both. The output is the mean
training loss (nats per token) of each tenth of the run, and its difference from that of the first row, step by step on the
same batch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.config import load_config

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
EIGHT_RANKS = ("run.cpu_devices=8", "parallel.data=8", "parallel.zero=3")
STUDIES = {
    "fp8": {
        "bfloat16": ("model.compute_dtype=bfloat16",),
        "float32": ("model.compute_dtype=float32",),
        "fp8": ("model.compute_dtype=bfloat16", "model.matmul_dtype=fp8"),
    },
    "reduce_dtype": {"float32": EIGHT_RANKS, "bfloat16": (*EIGHT_RANKS, "parallel.reduce_dtype=bfloat16")},
}
TINY = ("model.num_layers=1", "model.hidden_size=64", "model.intermediate_size=128", "train.steps=10", "run.cpu_devices=1")
QUIET = ("train.eval_every_steps=null", "log.baselines=false", "log.sample_tokens=0", "checkpoint.every_minutes=null")
TENTHS = 10


def losses(study: str, side: str, seed: int, overrides: Sequence[str], folder: str) -> list[float]:
    # Imported after parsing, so that wrong options are refused without JAX.
    from jaxllm.run.trainer import Trainer

    chosen = [*QUIET, *overrides, *STUDIES[study][side], f"train.seed={seed}", f"run.dir={folder}/{side}-{seed}"]
    trainer = Trainer(load_config(QUICKSTART, chosen))
    found = [line["loss"] for line in trainer.steps(trainer.config.train.steps)]
    trainer.close()
    return found


def tenths(values: Sequence[float]) -> list[float]:
    return [float(np.mean(part)) for part in np.array_split(np.asarray(values), TENTHS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--study", choices=list(STUDIES), default="fp8")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every loss of every step")
    options = parser.parse_intermixed_args()
    overrides = [*(TINY if options.dry_run else ()), *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        run = lambda side: [losses(options.study, side, seed, overrides, folder) for seed in range(options.seeds)]  # noqa: E731
        found = {side: run(side) for side in STUDIES[options.study]}
    print(f"Mean loss of {options.seeds} seed(s) by tenths of the run\n")
    print("| | " + " | ".join(f"{10 * (n + 1)}%" for n in range(TENTHS)) + " |\n|---|" + "---|" * TENTHS)
    first = next(iter(found))
    base = np.mean(found[first], axis=0)
    for side, runs in found.items():
        mean = np.mean(runs, axis=0)
        print(f"| {side} | " + " | ".join(f"{x:.4f}" for x in tenths(mean)) + " |")
        if side != first:
            print(f"| {side} - {first} | " + " | ".join(f"{x:+.4f}" for x in tenths(mean - base)) + " |")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
