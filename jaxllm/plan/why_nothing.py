"""One sentence for a plan without candidates: the obstacle, and the cheapest changes that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxllm.config import Config
from jaxllm.config.checks import keeps_whole_layers, unlike_all_on_host
from jaxllm.config.types import OFFLOAD_STATES
from jaxllm.display import readable
from jaxllm.plan.fastest_remat import HOST_FULL
from jaxllm.plan.plan_result import FIT_SHARE, Plan
from jaxllm.plan.search import SearchOptions, any_fits

MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""Multiples of the present GPUs that are tried if nothing fits."""


def why_nothing(plan: Plan, options: SearchOptions = SearchOptions()) -> str:
    """One sentence for a plan without candidates: the obstacle, and the cheapest changes that help."""
    config, gpu, gpus = plan.config, plan.gpu, plan.gpus
    if not plan.rejected:
        return f"--keep leaves no configuration of {gpus} GPUs: change --gpus, or keep less."
    if plan.leanest is None:
        worst = max(plan.rejected, key=lambda row: row.count)
        return (
            f"No configuration for {gpus} x {gpu.name} is possible, mostly because {worst.reason} ({worst.count:,}, such as "
            f"{worst.example}): change --gpus, train.global_batch_sequences or --keep."
        )
    choice, size = plan.leanest
    needs = (
        f"Nothing fits on {gpus} x {gpu.name}: of those that the GPU is too small for, the leanest takes {readable(size)} of "
        f"the {readable(FIT_SHARE * gpu.capacity_bytes)} available ({choice})"
    )
    if on_host := sum(row.count for row in plan.rejected if row.reason == HOST_FULL):
        limit = readable(plan.host_bytes_per_gpu)
        needs += f"; {on_host:,} that may fit there need more than {limit} of the host (--host-gib-per-gpu)"

    def fits(changed: Config, devices: int = gpus) -> bool:
        per_host = None if devices % plan.gpus_per_host else plan.gpus_per_host
        return any_fits(changed, gpu, devices, per_host, options)

    changes = list(_changes(config, gpus, fits, "offload_state" in options.keep))
    return f"{needs}: use {' or '.join(changes)}." if changes else f"{needs}: use a smaller model."


def _changes(config: Config, gpus: int, fits: Callable[..., bool], keeps_state: bool) -> Iterator[str]:
    """Changes that help. State on the host costs only time, so if it is kept elsewhere and is enough there is no second."""
    more_on_host = OFFLOAD_STATES[OFFLOAD_STATES.index(config.parallel.offload_state) + 1 :] if keeps_state else ()
    for state in more_on_host:
        parallel = config.parallel.model_copy(update={"offload_state": state})
        if unlike_all_on_host(config.model, parallel.model_copy(update={"pipe": 1}), config.log):
            continue
        if fits(config.model_copy(update={"parallel": parallel})):
            keys = [f"parallel.offload_state={state}"]
            if state == "all":
                keys += ["parallel.pipe=1"] if config.parallel.pipe > 1 else []
                keys += ["parallel.zero=3"] if keeps_whole_layers(config.parallel) else []
            yield " ".join(keys)
            return
    for factor in MORE_GPUS:
        if fits(config, gpus * factor):
            yield f"--gpus={gpus * factor}"
            break
    S = config.train.sequence_length
    for length in (S // 2**power for power in range(1, S.bit_length())):
        if fits(config.model_copy(update={"train": config.train.model_copy(update={"sequence_length": length})})):
            yield f"train.sequence_length={length}"
            return
