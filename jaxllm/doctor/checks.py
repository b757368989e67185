"""From measurements to verdicts: the rows of `jaxllm doctor`, each ok, warn or fail, with the finding and the fix.

Every function takes the findings of probes.py from all processes, by rank, and returns rows; none measures anything itself.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.cluster.launchers import LaunchInfo
from jaxllm.cluster.rendezvous_checks import runs_of
from jaxllm.cost_model.hardware import XLA_MEMORY_FRACTION, gpu_from_device_kind
from jaxllm.display import readable
from jaxllm.doctor.probes import Facts, Folder
from jaxllm.mesh.axes import AXES, REPLICA
from jaxllm.mesh.placement import crossings

OK, WARN, FAIL = "ok", "warn", "fail"

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 60.0
"""Above the first, logs of two hosts can no longer be ordered; above the second, schedulers and file systems begin to refuse
each other's tickets."""
LEAST_DRIVER = {12: 525, 13: 580}
"""Minimum driver by CUDA's major version (NVIDIA, CUDA Toolkit release notes, minimum drivers for minor version compatibility).
"""
IN_USE_BYTES = 2**30
"""More GPU memory than an idle GPU with its driver uses."""
SHARED_MEMORY_BYTES = 2**30
"""Minimum of /dev/shm for several GPUs in a host: NCCL communicates through it where GPUs do not reach each other. Docker gives
64 MiB."""
SLOW_DISK_BYTES_PER_S = 100e6


@dataclass(frozen=True)
class Row:
    check: str
    status: str
    found: str
    todo: str = ""
    """'' if there is nothing to do."""


def unknown_flags(names: Sequence[str], jaxlib: str) -> Row:
    listed = ", ".join(f"--{name}" for name in names)
    found = f"jaxlib {jaxlib} does not know {listed}: JAX would end the process at its first device, so no other check ran"
    return Row("xla flags", FAIL, found, "take it out of XLA_FLAGS: flags belong to one version of jaxlib")


def versions(processes: Sequence[Facts]) -> Row:
    mine = processes[0].versions
    shown = ", ".join(f"{name} {version}" for name, version in mine.items() if name.startswith(("jax", "nvidia")))
    found = f"{shown}, Python {processes[0].python}"
    others = _different(processes, lambda one: (one.versions, one.python))
    plugins = [name for name in mine if name.startswith("jax-cuda") and mine[name] != mine.get("jaxlib")]
    if others:
        differ = sorted({name for one in others for name, _ in one.versions.items() ^ mine.items()} or {"Python"})
        found = f"not those of process 0 on {_processes(others)}: {', '.join(differ)}"
        return Row("versions", FAIL, found, "install the same on all hosts")
    if plugins:
        wants = mine.get("jaxlib", "")
        found = f"jaxlib {wants} wants its own version of {' and '.join(f'{name}, not {mine[name]}' for name in plugins)}"
        return Row("versions", FAIL, found, f"install {' '.join(f'{name}=={wants}' for name in plugins)}")
    return Row("versions", OK, found)


def driver(processes: Sequence[Facts], forced: bool) -> Row:
    """Compares the driver's version with CUDA's minimum and over the hosts. `forced`: the run asked for CPU devices."""
    first = next((one for one in processes if one.driver is not None), None)
    if first is None or first.driver is None:
        if all(one.platform != "gpu" for one in processes):
            return Row("driver", OK, "none: no NVIDIA GPUs here")
        todo = "install nvidia-ml-py 12.535 or newer: without it other users of the GPUs are not known"
        return Row("driver", WARN, "NVIDIA's management library does not answer", todo)
    majors = [int(name.removeprefix("jax-cuda")[:2]) for name in first.versions if name.startswith("jax-cuda")]
    newest = max(majors, default=0)
    others = _different(processes, lambda one: one.driver, first)
    # A locally built driver may have a name in place of a number.
    number = first.driver.split(".")[0]
    if not forced and number.isdecimal() and int(number) < LEAST_DRIVER.get(newest, 0):
        found = f"{first.driver} on {_processes([first])}: CUDA {newest} needs {LEAST_DRIVER[newest]} or newer"
        older = [f", or install jaxllm[cuda{major}]" for major, least in LEAST_DRIVER.items() if least <= int(number)]
        return Row("driver", FAIL, found, "update it" + "".join(older))
    if others:
        found = f"{first.driver} on {_processes([first])}, another on {_processes(others)}"
        return Row("driver", WARN, found, "install the same on all hosts")
    return Row("driver", OK, first.driver)


def variables(processes: Sequence[Facts]) -> Iterator[Row]:
    flags = processes[0].environment.get("XLA_FLAGS", "")
    others = _different(processes, lambda one: one.environment.get("XLA_FLAGS", ""))
    if others:
        found = f"XLA_FLAGS of process 0 ({flags or 'empty'}) is not that of {_processes(others)}"
        yield Row("xla flags", FAIL, found, "set the same on all hosts: different flags compile different programs")
    else:
        yield Row("xla flags", OK, flags or "none")
    # Variables that identify a process or choose its GPUs differ for a reason.
    own = re.compile("XLA_FLAGS|CUDA_VISIBLE_DEVICES|JAXLLM_.*")
    ours = [{name: value for name, value in one.environment.items() if not own.fullmatch(name)} for one in processes]
    uneven = sorted({name for one in ours for name, _ in one.items() ^ ours[0].items()})
    shown = ", ".join(f"{name}={value}" for name, value in ours[0].items()) or "none"
    if uneven:
        found = f"{', '.join(uneven)} {'is' if len(uneven) == 1 else 'are'} not the same on all processes"
        yield Row("variables", WARN, found, "set the same on all hosts, unless their hardware differs")
    else:
        yield Row("variables", OK, shown)


def launcher(processes: Sequence[Facts], hosts: Mapping[int, Any], info: LaunchInfo) -> Row:
    names: dict[Any, list[int]] = {}
    for one in processes:
        names.setdefault(hosts.get(one.rank, one.host), []).append(one.rank)
    where = ", ".join(f"{processes[ranks[0]].host}: {_ranges(ranks)}" for ranks in list(names.values())[:8])
    more = f" and {len(names) - 8} more hosts" if len(names) > 8 else ""
    attempt = f", attempt {info.attempt}" if info.attempt else ""
    found = (
        f"{info.launcher}{attempt}; {count_text(len(processes), 'process')} on {count_text(len(names), 'host')} ({where}{more})"
    )
    if len({len(ranks) for ranks in names.values()}) > 1:
        return Row("launcher", WARN, found, "start the same number of processes on each host")
    again = "" if len(processes) == 1 else f"; {'restarted if it fails' if info.restarts else 'no supervisor restarts it'}"
    return Row("launcher", OK, found + again)


def devices(processes: Sequence[Facts], forced: bool) -> Row:
    total = sum(one.devices for one in processes)
    each = f", {processes[0].devices} to a process" if len(processes) > 1 else ""
    found = f"{total} x {processes[0].device_kind}{each}"
    idle = [] if forced else [one for one in processes if one.platform == "cpu" and one.cards]
    if others := _different(processes, lambda one: (one.platform, one.device_kind)):
        kinds = ", ".join(sorted({one.device_kind for one in others}))
        return Row("devices", FAIL, f"{found}, but {_processes(others)} have {kinds}", "give a run GPUs of one kind")
    if others := _different(processes, lambda one: one.devices):
        counts = ", ".join(sorted({str(one.devices) for one in others}))
        found = f"{processes[0].devices} on process 0, {counts} on {_processes(others)}"
        return Row("devices", FAIL, found, "give each process the same number")
    if idle:
        found = f"CPU, although there are GPUs ({idle[0].cards[0].name}): {_processes(idle)}"
        return Row("devices", FAIL, found, "install jaxllm[cuda13] (or cuda12), and unset JAX_PLATFORMS")
    return Row("devices", OK, found)


def memory(processes: Sequence[Facts]) -> Iterator[Row]:
    limits = [one.device_limit_bytes for one in processes if one.device_limit_bytes is not None]
    gpu = gpu_from_device_kind(processes[0].device_kind)
    busy = [one for one in processes if one.platform != "cpu" and any(card.used_bytes > IN_USE_BYTES for card in one.cards)]
    if limits:
        found = f"XLA has {readable(min(limits))} of each GPU"
        due = gpu.memory_bytes * XLA_MEMORY_FRACTION if gpu else 0
        if busy:
            most = max(card.used_bytes for one in busy for card in one.cards)
            found += f"; before it took them, up to {readable(most)} of a GPU were in use: {_processes(busy)}"
            todo = "end the other programs there (nvidia-smi shows them), if this job may use all GPUs"
            yield Row("gpu memory", WARN, found, todo)
        elif gpu and min(limits) < 0.98 * due:
            found += f", less than {XLA_MEMORY_FRACTION:.0%} of the {readable(gpu.memory_bytes)} that a {gpu.name} has"
            yield Row("gpu memory", WARN, found, "unset XLA_CLIENT_MEM_FRACTION and similar variables, or plan with less")
        else:
            yield Row("gpu memory", OK, found)
    tight = [one for one in processes if one.host_available_bytes is not None and one.host_available_bytes < 2 * 2**30]
    least = min((one.host_available_bytes for one in processes if one.host_available_bytes is not None), default=None)
    cores = min(one.binding.cpus for one in processes)
    found = (
        f"{'unknown' if least is None else readable(least)} free and {count_text(cores, 'core')}, the least of all processes"
    )
    several = [one for one in processes if one.platform != "cpu" and len(one.cards) > 1]
    small = [one for one in several if (one.shared_memory_bytes or SHARED_MEMORY_BYTES) < SHARED_MEMORY_BYTES]
    if tight:
        found = f"{found}; little on {_processes(tight)}"
        yield Row("host memory", WARN, found, "ask for more: checkpoints pass through it")
    elif small:
        shm = readable(min(one.shared_memory_bytes or 0 for one in small))
        found = f"{found}; /dev/shm has {shm} on {_processes(small)}"
        yield Row("host memory", WARN, found, "give containers more (Docker: --shm-size=8g), or NCCL may not start")
    else:
        yield Row("host memory", OK, found)


def cpus(processes: Sequence[Facts]) -> Iterator[Row]:
    first = processes[0].binding
    found = f"{first.cpus} of {count_text(first.host_cpus, 'CPU')}"
    if first.nodes:
        found += f", NUMA node{'s' if len(first.nodes) > 1 else ''} {_ranges(first.nodes)} of {first.host_nodes}"
    for node in sorted(set(first.gpu_nodes.values())):
        gpus = [int(gpu) for gpu, there in first.gpu_nodes.items() if there == node]
        found += f", GPU{'s' if len(gpus) > 1 else ''} {_ranges(gpus)} on node {node}"
    if len(processes) > 1:
        found += " (process 0)"
    single = [one for one in processes if one.binding.cpus == 1 < one.binding.host_cpus]
    far = [one for one in processes if one.binding.far_gpus]
    if single:
        # JAX, the data and the checkpoints have dozens of threads.
        found = f"a single CPU of {single[0].binding.host_cpus}: {_processes(single)}"
        todo = "give each process its share: srun --cpus-per-task=N, mpirun --bind-to none"
        yield Row("cpus", WARN, found, todo)
    if far:
        one = far[0].binding
        gpu = one.far_gpus[0]
        found = f"GPU {gpu} is on NUMA node {one.gpu_nodes[gpu]}, the CPUs only on {_ranges(one.nodes)}: {_processes(far)}"
        todo = "bind each process to its GPUs' node, or not at all: srun --cpu-bind=none, mpirun --bind-to none"
        yield Row("cpus", WARN, found, todo)
    if not single and not far:
        yield Row("cpus", OK, found)


def clocks(processes: Sequence[Facts], ahead: Sequence[tuple[float, float]]) -> Iterator[Row]:
    """Compares clocks. `ahead`: for each process, the minimum and maximum by which process 0's clock is ahead of its own."""
    if len(processes) == 1:
        return
    # Bounds that contain 0 prove nothing.
    certain = [max(low, -high, 0.0) for low, high in ahead]
    bound = max(max(abs(low), abs(high)) for low, high in ahead)
    worst = max(range(len(certain)), key=certain.__getitem__)
    if certain[worst] < CLOCK_WARN_S:
        yield Row("clocks", OK, f"at most {bound * 1e3:.0f} ms apart")
        return
    one = processes[worst]
    way = "behind" if ahead[worst][0] > 0 else "ahead of"
    found = f"that of process {one.rank} on {one.host} is at least {certain[worst]:.1f} s {way} that of process 0"
    yield Row("clocks", FAIL if certain[worst] >= CLOCK_FAIL_S else WARN, found, "set the clocks of all hosts by NTP (chrony)")


def folder(
    path: str, processes: Sequence[Facts], folders: Sequence[Folder], checkpoint_bytes: int | None, has_store: bool = False
) -> Iterator[Row]:
    """Judges the run directory.

    Args:
      checkpoint_bytes: size of one checkpoint of the config; None without a config.
      has_store: hosts need not share it.
    """
    name = f"run.dir={path}"
    errors = [rank for rank, one in enumerate(folders) if one.error]
    blind = [processes[rank] for rank, one in enumerate(folders) if not one.sees_main]
    unseen = [processes[rank] for rank in folders[0].unseen]
    if (blind or unseen) and not has_store:
        writer, reader = ("process 0", _processes(blind)) if blind else (_processes(unseen), "process 0")
        found = f"{name}: files written by {writer} are not seen by {reader}"
        todo = "choose a folder, by its absolute path, on storage that all hosts share, or set checkpoint.store"
        yield Row("run directory", FAIL, found, todo)
        return
    if errors:
        who = _processes([processes[rank] for rank in errors])
        found = f"{name} cannot be written by {who}: {folders[errors[0]].error}"
        yield Row("run directory", FAIL, found, "free some space, get write permission, or choose another run.dir")
        return
    free = min(one.free_bytes for one in folders)
    alone = "" if len(folders) == 1 else f", seen and written by all {len(folders)}"
    if blind or unseen:
        alone = " on each host for itself, for which there is checkpoint.store"
    found = f"{name} is writable{alone}; {readable(free)} free"
    if checkpoint_bytes is not None:
        found += f", a checkpoint takes {readable(checkpoint_bytes)}"
    if checkpoint_bytes is not None and free < 2 * checkpoint_bytes:
        # The new checkpoint is written before an old one is deleted.
        status = FAIL if free < checkpoint_bytes else WARN
        yield Row("run directory", status, found, "make room for two checkpoints, or choose another run.dir")
    else:
        yield Row("run directory", OK, found)
    timed = [one for one in folders if one.write_bytes_per_s > 0]
    if timed:
        write, read = sum(one.write_bytes_per_s for one in timed), sum(one.read_bytes_per_s for one in timed)
        found = f"{rate_text(write)} written, {rate_text(read)} read, {count_text(len(timed), 'host')} at once"
        if checkpoint_bytes is not None:
            found += f"; a checkpoint in about {checkpoint_bytes / write:.0f} s"
        slow = write < SLOW_DISK_BYTES_PER_S
        yield Row("disk", WARN if slow else OK, found, "choose faster storage, or save less often" if slow else "")


def mesh(grid: Any, hosts: Mapping[int, Any]) -> Iterator[Row]:
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip((REPLICA, *AXES)[-grid.ndim :], grid.shape, strict=True))
    if lines := crossings(grid, hosts):
        for line in lines:
            found, _, todo = line.rpartition(": every layer waits for the network. ")
            yield Row("mesh", WARN, found, todo[:1].lower() + todo[1:].removesuffix("."))
    else:
        yield Row("mesh", OK, f"{sizes}; tensor and context stay inside a host")


# --------------------------------------------------------------------------------------------------------------------- words


def _different(processes: Sequence[Facts], key: Callable[[Facts], Any], first: Facts | None = None) -> list[Facts]:
    """Processes that differ from the first in `key`."""
    wanted = key(first or processes[0])
    return [one for one in processes if key(one) != wanted]


def _processes(some: Sequence[Facts]) -> str:
    """Text such as 'process 3 on h3' or 'processes 1-3 and 7 on h1, h3'."""
    ranks, hosts = [one.rank for one in some], list(dict.fromkeys(one.host for one in some))
    more = "" if len(hosts) <= 4 else f" and {len(hosts) - 4} more hosts"
    return f"process{'es' if len(ranks) > 1 else ''} {_ranges(ranks)} on {', '.join(hosts[:4])}{more}"


def _ranges(numbers: Iterable[int]) -> str:
    """Text such as '0-3, 7'."""
    runs = runs_of(sorted(numbers))
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def count_text(number: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{number} {thing if number == 1 else plural}"


def rate_text(bytes_per_s: float) -> str:
    """Text in powers of 1000, as networks are sold."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.{0 if bytes_per_s >= 100 * size else 1}f} {unit}"
    return f"{bytes_per_s:.0f} B/s"
