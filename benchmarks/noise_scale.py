"""Cost of measuring the gradient noise scale: one run that measures in every second step, and the times of both kinds.

python benchmarks/noise_scale.py [section.key=value ...]      on one GPU; a few minutes
python benchmarks/noise_scale.py --dry-run                    a trial at tiny sizes

The default is Llama 3.2 1B with 4 microbatches of 8,192 tokens. It prints one JSON object: seconds per step, median and
quartiles, and the extra cost of a measuring step as a fraction of an ordinary one. With log.noise_scale_every=k a run pays
1/k of that.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from jaxllm.config import load_config

RECIPE = {
    "model": {"name": "llama-3.2-1b"},
    "train": {"steps": 1000, "sequence_length": 8192, "global_batch_sequences": 4, "microbatch_sequences": 1},
    "data": {"source": "python_stdlib", "mask_documents": False},
    "log": {"noise_scale_every": 2},
}
TINY = (
    *("model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=16", "model.vocab_size=256", "train.sequence_length=64", "run.cpu_devices=1"),
)
WARM_UP = 6
"""Uncounted first steps of both kinds, including two compilations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=60, help="number of steps of both kinds together, after the warm-up")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    config = load_config(RECIPE, [*(TINY if options.dry_run else ()), *options.overrides])
    # Imported after the config is read, so that a wrong config is refused without JAX.
    from jaxllm.run.trainer import Trainer

    trainer = Trainer(config)
    times_s: dict[bool, list[float]] = {False: [], True: []}
    for line in trainer.steps(WARM_UP + options.steps):
        if line["step"] > WARM_UP:
            step_s = trainer.config.step_tokens / line["tokens_per_s_per_device"] / trainer.mesh.size
            times_s["noise_g2" in line].append(step_s)
    trainer.close()
    quartiles = {
        name: np.percentile(times_s[measures], [25, 50, 75]) for name, measures in (("plain", False), ("measuring", True))
    }
    report = {f"{name}_step_s": [round(float(x), 6) for x in found] for name, found in quartiles.items()}
    cost = quartiles["measuring"][1] / quartiles["plain"][1] - 1
    scale = [x if math.isfinite(x) else None for x in trainer.metrics.noise.found or ()]
    print(json.dumps(report | {"cost_of_a_measuring_step": round(float(cost), 5), "noise_scale_tokens": scale}))


if __name__ == "__main__":
    main()
