"""Compares the planner's answer with configurations drawn at random.

python benchmarks/random_plans.py CONFIG --gpus 8 [--draws 20000] [--gpu h100-80gb] [--device-gib 20] [--seed 0]

A draw sets every key of `parallel` that a plan may choose, and the microbatch: a mesh, ZeRO, schedule and virtual stages,
remat (a policy or a random mapping of the block's tensors), offload_state. Draws that Config refuses are repeated. With --more
also context_method and tensor_ring, which a plan leaves as they are. It counts those whose estimate is within the planner's
limits of memory (with --device-gib that many for the estimate), and prints the fastest by the step-time model beside the plan.
It exits with 1 if one is faster than the plan by more than a tie (plan_result.TIE_SHARE).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from typing import Any

from jaxllm.config import Config, ConfigError, divisors, load_config
from jaxllm.config.types import BLOCK_TENSORS, OFFLOAD_STATES
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.fastest_remat import Fitting
from jaxllm.plan.plan_result import TIE_SHARE, Candidate, recipe
from jaxllm.plan.search import SearchOptions, search, why_nothing
from jaxllm.plan.space import MOST_VIRTUAL_STAGES, REMATS

SCHEDULES = (("1f1b", 1), ("gpipe", 1), *(("interleaved", stages) for stages in range(2, MOST_VIRTUAL_STAGES + 1)))


def drawn(config: Config, gpus: int, gpus_per_host: int, rng: random.Random, more: bool = False) -> Iterator[Config]:
    """Random configs of these GPUs that Config accepts, resolved, without end, with the replicas of `config`. `tensor` and
    `context` stay inside a host, as in a plan.

    Args:
      more: also the settings that a plan leaves as they are.
    """
    values = recipe(config)
    values.get("run", {}).pop("cpu_devices", None)
    replicas, sequences = config.parallel.replica, config.largest_phase.sequences
    each = gpus // replicas
    while True:
        tensor = rng.choice(divisors(gpus_per_host))
        context = rng.choice(divisors(gpus_per_host // tensor))
        pipe = rng.choice(divisors(each // (tensor * context)))
        schedule, virtual_stages = rng.choice(SCHEDULES) if pipe > 1 else SCHEDULES[0]
        data = each // (tensor * context * pipe)
        parallel: dict[str, Any] = {
            **{"pipe": pipe, "data": data, "context": context, "tensor": tensor, "zero": rng.randrange(4)},
            **{"schedule": schedule, "virtual_stages": virtual_stages},
            "remat": rng.choice(REMATS) if rng.random() < 0.2 else _mapping(rng),
            "offload_state": rng.choice(OFFLOAD_STATES),
        }
        if more:
            parallel |= {"context_method": rng.choice(("auto", "ring", "all_gather")), "tensor_ring": rng.choice((None, True))}
        if sequences % (replicas * data):
            continue
        # Large microbatches seldom fit.
        sizes = divisors(sequences // (replicas * data))
        train = {**values["train"], "microbatch_sequences": sizes[int(len(sizes) * rng.random() ** 2)]}
        try:
            yield load_config({**values, "parallel": {**values.get("parallel", {}), **parallel}, "train": train}).resolve(gpus)
        except ConfigError:
            continue


def _mapping(rng: random.Random) -> dict[str, str]:
    actions = {name: rng.choice(("keep", "recompute", "offload")) for name in BLOCK_TENSORS}
    actions["attention_lse"] = actions["attention_output"]
    if actions["block_input"] == "recompute":
        actions["block_input"] = "keep"
    return actions


def candidate(config: Config, gpu: Gpu, gpus_per_host: int, rules: SearchOptions = SearchOptions()) -> Candidate | None:
    """A config with its estimates, as a plan judges it; None if it is above the planner's limits."""
    largest = config.at_largest_batch
    memory = estimate_memory(largest, gpu)
    limits = Fitting(config, gpu, gpus_per_host, rules)
    if memory.peak_bytes > limits.device_bytes or memory.host_bytes > limits.host_bytes:
        return None
    return Candidate(config, memory.peak_bytes, memory.host_bytes, estimate_step_time(largest, gpu, gpus_per_host))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--device-gib", type=float, help="limit for the estimate; default: the planner's share of the capacity")
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", action="store_true", help="also settings that a plan leaves as they are")
    options = parser.parse_args()
    config, gpu = load_config(options.config), find_gpu(options.gpu)
    per_host, _ = choose_gpus_per_host(options.gpus, None, gpu.gpus_per_host, config.parallel)
    rules = SearchOptions(device_bytes=None if options.device_gib is None else options.device_gib * 2**30)
    plan = search(config, gpu, options.gpus, options=rules)
    if not plan.candidates:
        sys.exit(why_nothing(plan, rules))
    best = plan.candidates[0]
    configs = drawn(config, options.gpus, per_host, random.Random(options.seed), options.more)
    found = [one for _ in range(options.draws) if (one := candidate(next(configs), gpu, per_host, rules)) is not None]
    found.sort(key=lambda one: -one.tokens_per_s_per_gpu)
    print(f"the plan     {best!r}")
    print(f"{options.draws:,} draws, of which {len(found):,} fit; the fastest of them:")
    for one in found[:5]:
        print(f"  {one.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu - 1:+.2%}  {one!r}")
    return int(bool(found) and best.tokens_per_s_per_gpu < (1 - TIE_SHARE) * found[0].tokens_per_s_per_gpu)


if __name__ == "__main__":
    sys.exit(main())
