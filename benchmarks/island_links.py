"""Hours of training over a slow link between islands: one mesh, hybrid sharding and DiLoCo, by the step-time model.

python benchmarks/island_links.py [--islands 2 4 8] [--gbit 0.1 1 10 100] [--latency-ms 10]     prints Markdown; ten minutes

Llama 3.1 8B (docs/recipes/8b-on-8.yaml) on hosts of eight H100s, each host an island with one link to the others. The planner
chooses the fastest layout that fits, for each link and each way to use it:

    data         data ranks with ZeRO over all GPUs, as if there were no islands
    one mesh     the ranks of all islands in one mesh, in which any axis may cross the link, also stages
    hybrid       parallel.replica: gradients are summed between islands once a step
    DiLoCo       the same with train.diloco_steps: weights once a round, in float32 or in 4 bits

These are predictions. Hours are those of the same number of tokens: what DiLoCo loses in loss is in benchmarks/islands.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.plan.search import SearchOptions, search

RECIPE = Path(__file__).parents[1] / "docs" / "recipes" / "8b-on-8.yaml"
GPU, GPUS_PER_ISLAND = GPUS["h100-80gb"], 8
TOKENS = 100e9
DATA, ONE_MESH, HYBRID = "data", "one mesh", "hybrid"
WAYS: dict[str, tuple[str, ...]] = {
    DATA: (),
    ONE_MESH: (),
    HYBRID: (),
    **{f"DiLoCo, H = {steps}": (f"train.diloco_steps={steps}",) for steps in (10, 50, 200)},
    "DiLoCo, H = 50, 4 bits": ("train.diloco_steps=50", "train.diloco_bits=4"),
}


def tokens_per_s(way: str, islands: int, gbit: float, latency_ms: float) -> float:
    """Predicted speed of the fastest layout; 0 if none fits."""
    gpu, given = GPU, list(WAYS[way])
    keep = ("pipe", "context", "tensor") if way == DATA else ()
    if way in (DATA, ONE_MESH):
        bytes_per_s = gbit * 1e9 / 8 / GPUS_PER_ISLAND
        fastest = min(bytes_per_s, GPU.network_bandwidth_bytes_per_s)
        gpu = replace(GPU, network_bandwidth_bytes_per_s=fastest, network_latency_s=latency_ms / 1000)
    else:
        given += [f"parallel.replica={islands}", f"parallel.replica_gbit_per_s={gbit}"]
        given += [f"parallel.replica_latency_ms={latency_ms}"]
    gpus = islands * GPUS_PER_ISLAND
    try:
        found = search(load_config(RECIPE, given), gpu, gpus, GPUS_PER_ISLAND, SearchOptions(best=1, keep=keep)).candidates
    except ConfigError:
        return 0.0
    return found[0].predicted.tokens_per_s_per_gpu * gpus if found else 0.0


def table(islands: int, links: list[float], latency_ms: float) -> Iterator[str]:
    yield f"| Gbit/s between {islands} islands | {' | '.join(WAYS)} |"
    yield "|---" * (len(WAYS) + 1) + "|"
    for gbit in links:
        speeds = {way: tokens_per_s(way, islands, gbit, latency_ms) for way in WAYS}
        hours = [f"{TOKENS / speed / 3600:,.0f}" if speed else "-" for speed in speeds.values()]
        yield f"| {gbit:g} | {' | '.join(hours)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1, 10, 100])
    parser.add_argument("--latency-ms", type=float, default=10.0)
    given = parser.parse_args()
    for islands in given.islands:
        for line in table(islands, given.gbit, given.latency_ms):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
