"""Training on with the hosts that are left: the layout for them, found by the planner (launch.least_hosts).

    trainer's start      distributed.start(config.run, rules(config)); config = adapted(config)

The model, the global batch and the order of the samples stay; mesh, ZeRO level, schedule, remat and microbatch may change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.config import AUTO, Config, ConfigError, ParallelConfig
from jaxllm.cost_model.hardware import find_gpu, gpu_from_device_kind
from jaxllm.plan.search import SearchOptions, search
from jaxllm.runtime import distributed
from jaxllm.runtime.elastic_rendezvous import Elastic
from jaxllm.runtime.rendezvous_checks import ProcessInfo
from jaxllm.runtime.xla_flags import gpu_kinds
from jaxllm.untrusted import Whole, checked, parse_json

log = logging.getLogger(__name__)

MOST_BYTES = 2**16
STAND_IN = "h100-80gb"
"""Ranks layouts for devices that the planner does not know, such as CPUs, as if their memory were without limit."""
AS_BEFORE = ("schedule", "overlap_passes", "offload_state", "remat")
"""Kept where something fits with them: the search is then a matter of seconds, and the program has been tried."""


@dataclass(frozen=True)
class _Layout:
    """What the leader sends."""

    parallel: dict[str, Any]
    microbatch_sequences: Whole


def rules(config: Config) -> Elastic | None:
    """How far this run may shrink; None: not at all."""
    least = config.launch.least_hosts
    return None if least is None else Elastic(least, config.launch.wait_s, lambda hosts: layout_here(config, hosts))


def layout_here(config: Config, hosts: Sequence[Sequence[ProcessInfo]]) -> str | None:
    """`layout` for these hosts, each a list of its processes. None if they have different numbers of devices."""
    first = hosts[0][0]
    on_cpu = first.cpu or not first.gpus
    if on_cpu:
        devices = [len(processes) * (config.run.cpu_devices or 1) for processes in hosts]
    else:
        devices = [len({gpu for info in processes for gpu in info.gpus or ()}) for processes in hosts]
    if len(set(devices)) > 1:
        return None
    kinds = () if on_cpu else gpu_kinds()
    return layout(config, len(hosts), devices[0], kinds[0] if kinds else "")


def layout(config: Config, hosts: int, per_host: int, device_kind: str = "") -> str | None:
    """The fastest layout that fits by the step-time model, as JSON, with all of AS_BEFORE kept if that leaves any; None if none
    fits.

    Args:
      per_host: devices of each host.
      device_kind: theirs, as JAX names it.
    """
    gpu = gpu_from_device_kind(device_kind)
    for keep in (AS_BEFORE, ()):
        options = SearchOptions(best=1, keep=keep, device_bytes=None if gpu else float("inf"))
        try:
            plan = search(config, gpu or find_gpu(STAND_IN), hosts * per_host, per_host, options)
        except ConfigError:
            continue
        if plan.candidates:
            best = plan.best
            parallel = best.parallel.model_dump(mode="json")
            return json.dumps({"parallel": parallel, "microbatch_sequences": best.train.microbatch_sequences})
    return None


def adapted(config: Config) -> Config:
    """The config for the devices that are there; all processes must call it. With launch.least_hosts its layout may be another:
    that of the leader, or the fastest if the launcher started fewer hosts than the config's mesh has, as SLURM does for a range
    of nodes.
    """
    if config.launch.least_hosts is None:
        return config
    if text := distributed.layout():
        return with_layout(config, text)
    devices, hosts = jax.devices(), len({member.host for member in distributed.members()})
    too_large = config.parallel.data != AUTO and config.devices > len(devices)
    if not too_large or hosts < config.launch.least_hosts or len(devices) % hosts:
        return config
    found = distributed.broadcast(layout(config, hosts, len(devices) // hosts, devices[0].device_kind) or "")
    if found:
        log.warning("%d devices, and the mesh has %d: training in a layout for those.", len(devices), config.devices)
    return with_layout(config, found)


def with_layout(config: Config, text: str) -> Config:
    """A config in the layout that `layout` returned; "": as it is.

    Raises:
      ConfigError: the text is no layout.
    """
    if not text:
        return config
    found = checked(parse_json(text, MOST_BYTES), _Layout)
    train = config.train.model_copy(update={"microbatch_sequences": found.microbatch_sequences})
    return config.model_copy(update={"parallel": ParallelConfig(**found.parallel), "train": train})


def describe(given: Config, config: Config) -> str:
    """What is missing, for the log; "" if all hosts are there.

    Args:
      given: the config that all hosts would use.
      config: that in use, resolved.
    """
    absent = distributed.absent_hosts()
    if not absent:
        return ""
    before, now = (c.num_microbatches if c.parallel.data != AUTO else None for c in (given, config))
    of = f", not {before}" if before not in (None, now) else ""
    return (
        f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing: training on without, the same batches in {now} "
        f"microbatch{'es' if now != 1 else ''}{of}; with all again when {'it returns' if len(absent) == 1 else 'they return'}"
    )
