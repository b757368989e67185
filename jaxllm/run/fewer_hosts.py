"""Training on with the hosts that are left: the layout for them, found by the planner (launch.least_hosts).

    trainer's start      meet(config); config = adapted(config)

The model, the global batch and the order of the samples stay; mesh and microbatch may change, and ZeRO level, schedule and
remat where nothing fits otherwise. A run with replicas (parallel.replica) may lose some: those whose hosts are all there keep
their mesh, and otherwise the planner looks for one with as many replicas as possible.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxllm.cluster import distributed, progress
from jaxllm.cluster.host_choice import ALL_REQUIRED, DOES_NOT_FIT, Elastic, site_of
from jaxllm.cluster.rendezvous_checks import ProcessInfo
from jaxllm.config import AUTO, Config, ConfigError, ParallelConfig
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.machine.xla_flags import gpu_kinds
from jaxllm.run import advisor
from jaxllm.run.hooks import Run
from jaxllm.untrusted import Whole, checked, parse_json

log = logging.getLogger(__name__)

MOST_BYTES = 2**16


@dataclass(frozen=True)
class _Layout:
    """What the leader sends."""

    parallel: dict[str, Any]
    microbatch_sequences: Whole


def meet(config: Config) -> None:
    """Starts JAX, with the other processes of the run, and requires that they have this config."""
    with progress.phase("meet"):
        distributed.start(config.run, rules(config))
    distributed.require_same_config(config)


def rules(config: Config) -> Elastic:
    """How far this run may shrink."""
    least, wait_s = config.launch.least_hosts, config.launch.wait_s
    if least is None:
        return ALL_REQUIRED
    own_networks = config.parallel.replica if _apart(config) else 1
    return Elastic(
        least, wait_s, partial(layout_here, config), partial(too_few, config), partial(why_none, config), own_networks
    )


def too_few(config: Config, hosts: Sequence[Sequence[ProcessInfo]]) -> bool:
    """Whether the config's mesh has more devices than these hosts; False where they cannot be counted before JAX starts."""
    uncounted = config.run.cpu_devices is None if _on_cpu(hosts) else any(info.gpus is None for one in hosts for info in one)
    return not uncounted and _wanted(config) > sum(_devices(config, hosts))


def layout_here(config: Config, hosts: Sequence[Sequence[ProcessInfo]]) -> str | None:
    """`layout` for these hosts, each a list of its processes. None if they have different numbers of devices."""
    devices = _devices(config, hosts)
    if len(set(devices)) > 1:
        return None
    kinds = () if _on_cpu(hosts) else gpu_kinds()
    return layout(config, len(hosts), devices[0], kinds[0] if kinds else "", _together(config, hosts, devices[0]))


def _together(config: Config, hosts: Sequence[Sequence[ProcessInfo]], per_host: int) -> list[int]:
    """The number of these hosts that each replica of the launch had; [] if it is not known, or does not matter."""
    if not _apart(config):
        return []
    count = hosts[0][0].count
    if _wanted(config) not in (0, count // len(hosts[0]) * per_host):
        # A launch of fewer hosts than the mesh has does not tell which of them were a replica's.
        return []
    return list(Counter(site_of(one[0].rank, count, config.parallel.replica) for one in hosts).values())


def why_none(config: Config, hosts: Sequence[Sequence[ProcessInfo]]) -> str:
    """Why no layout fits these hosts or fewer of them, down to launch.least_hosts, and what to change, for the log."""
    least = config.launch.least_hosts
    assert least is not None, "`rules` asks only then"
    devices, replicas, wanted = sum(_devices(config, hosts)), config.parallel.replica, _wanted(config)
    left = min(devices * replicas // wanted, replicas) if wanted else 0
    uneven = [batch for batch in config.batches if left and batch % left]
    # Fewer than the least must not train, whatever the batch is.
    is_batch = replicas > 1 and uneven and left * wanted * len(hosts) >= least * devices * replicas
    # One number of hosts, a likely one, because the other processes wait for it.
    of_one = max(wanted * len(hosts) // (devices * replicas), 1) if replicas > 1 else 1
    numbers = range((least - 1) // of_one, 0, -1)
    fewer = of_one * next((count for count in numbers if not any(batch % count for batch in config.batches)), 0)
    is_least = fewer > 0 and layout_here(config, hosts[:fewer]) is not None
    if not is_batch:
        return f"{fewer} of them could train on with launch.least_hosts={fewer}" if is_least else DOES_NOT_FIT
    apart = ", and one replica of several would use the slow network between them in every step" if _apart(config) else ""
    return (
        f"{uneven[0]} sequences cannot be shared by {left} replicas{apart}: with a train.global_batch_sequences that {left} "
        f"divides they train on" + (f", or {fewer} of them with launch.least_hosts={fewer}" if is_least else "")
    )


def _apart(config: Config) -> bool:
    """Whether a slow network connects the replicas, so that one never has hosts of two. DiLoCo is for such networks alone."""
    return config.parallel.names_replica_network or (config.parallel.replica > 1 and config.train.diloco_steps is not None)


def _on_cpu(hosts: Sequence[Sequence[ProcessInfo]]) -> bool:
    return hosts[0][0].cpu or not hosts[0][0].gpus


def _devices(config: Config, hosts: Sequence[Sequence[ProcessInfo]]) -> list[int]:
    """Number of each host's."""
    if _on_cpu(hosts):
        return [len(processes) * (config.run.cpu_devices or 1) for processes in hosts]
    return [len({gpu for info in processes for gpu in info.gpus or ()}) for processes in hosts]


def _wanted(config: Config) -> int:
    """Devices of the config's mesh; 0: it takes any number."""
    return 0 if config.parallel.data == AUTO else config.devices


def absent_hosts(given: Config) -> int:
    """Number of hosts that the run trains without (launch.least_hosts): those of its launch, and those for whose devices the
    config's mesh has room, where the launcher started fewer. All processes know it. given: the config that all hosts would use.
    """
    if given.launch.least_hosts is None:
        return 0
    here = len(set(distributed.hosts()))
    room = math.ceil(_wanted(given) * here / jax.device_count())
    return max(len(distributed.absent_hosts()), room - here)


def layout(config: Config, hosts: int, per_host: int, device_kind: str = "", together: Sequence[int] = ()) -> str | None:
    """A layout for these devices, as JSON; None if none fits.

    With as many devices as some of the config's replicas have, it is that of these replicas. Otherwise it is the fastest by the
    planner (run_report/for_runs.py), of the largest number of replicas with which any fits.

    Args:
      per_host: devices of each host.
      device_kind: theirs, as JAX names it.
      together: number of hosts of each replica before. A slow network connects these groups, so a replica has hosts of one of
        them only, and no part of a host unless it had before. Default: each host alone.
    """
    devices, before = hosts * per_host, _wanted(config) // config.parallel.replica
    groups = [per_host * count for count in together or [1] * hosts]
    most, kind = config.parallel.replica, gpu_from_device_kind(device_kind)
    numbers = [replicas for replicas in range(most, 0, -1) if devices % replicas == 0]
    # First that of the config's own replicas, then from the largest.
    for replicas in sorted(numbers, key=lambda replicas: devices * most != replicas * _wanted(config)):
        own = devices // replicas
        if _apart(config) and (any(group % own for group in groups) or own < min(per_host, before)):
            continue
        fewer = config.model_copy(update={"parallel": config.parallel.model_copy(update={"replica": replicas})})
        if own == before and most > 1 and (same := _same_mesh(config, fewer)):
            return same
        if (planner := advisor.answers) is None:
            raise ConfigError("launch.least_hosts needs the planner: start the run by jaxllm.fit or `jaxllm train`.")
        if (best := planner.fastest(fewer, kind, devices, per_host)) is not None:
            return _as_text(best.parallel, best.train.microbatch_sequences)
    return None


def _same_mesh(config: Config, fewer: Config) -> str | None:
    """The layout of fewer of the config's replicas, with as large a microbatch as divides and is not above the config's."""
    ranks = fewer.data_ranks
    for microbatch in range(config.microbatch_sequences, 0, -1):
        if any(batch % (ranks * microbatch) for batch in config.batches):
            continue
        with suppress(ConfigError):
            text = _as_text(fewer.parallel, microbatch)
            with_layout(config, text).resolve(fewer.devices)
            return text
    return None


def _as_text(parallel: ParallelConfig, microbatch_sequences: int | None) -> str:
    return json.dumps({"parallel": parallel.model_dump(mode="json"), "microbatch_sequences": microbatch_sequences})


def adapted(config: Config) -> Config:
    """The config for the devices that are there; all processes must call it. With launch.least_hosts its layout may be another:
    that of the leader, or the fastest if the run has no leader and too few devices, as where SLURM starts a job of one or two
    nodes with one.
    """
    if config.launch.least_hosts is None:
        return config
    if text := distributed.layout():
        return with_layout(config, text)
    devices, hosts = jax.devices(), len(set(distributed.hosts()))
    if _wanted(config) <= len(devices) or hosts < config.launch.least_hosts or len(devices) % hosts:
        return config
    found = distributed.broadcast(layout(config, hosts, len(devices) // hosts, devices[0].device_kind) or "")
    if found:
        log.warning("%d devices, and the mesh has %d: training in a layout for those.", len(devices), config.devices)
    return with_layout(config, found)


def with_layout(config: Config, text: str) -> Config:
    """A config in the layout that `layout` returned; "": as it is."""
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
    names, count = distributed.absent_hosts(), absent_hosts(given)
    if not count:
        return ""
    named = len(names) == count
    who = ", ".join(names) if named else f"{count} host{'s' if count > 1 else ''}"
    returns = ("it returns" if count == 1 else "they return") if named else "the launcher starts all"
    before, now = (c.num_microbatches if c.parallel.data != AUTO else None for c in (given, config))
    of = f", not {before}" if before not in (None, now) else ""
    replicas, left = given.parallel.replica, config.parallel.replica
    how = f"with {left} of {replicas} replicas" if left < replicas else "without"
    return (
        f"{who} {'is' if count == 1 else 'are'} missing: training on {how}, the same batches in {now} "
        f"microbatch{'es' if now != 1 else ''}{of}; with all again when {returns}"
    )


def register(run: Run) -> None:
    """Stops the run when missing hosts return, if a supervisor restarts it."""
    room = distributed.waiting_room() if distributed.launch_info().restarts else None
    if room is None:
        return
    room.grow = lambda hosts: run.signals.ask(f"the return of {hosts}")
    run.stack.callback(room.leave)

    def end() -> None:
        room.ended = not run.trainer.stopped_by

    run.on("ended", end)
