"""Measurements of a process's machine, its binding and storage, without a verdict: doctor/checks.py judges them.

    driver, cards = gpu_cards()                 before JAX starts and takes their memory
    processes = gather(facts(driver, cards))    of all processes, by rank
    clock_ahead()                               by how much process 0's clock is ahead of this one
    folder(path, measures)                      shared, writable, how fast

Every process calls all but the first, in the same order; they do not raise where another process would wait.
"""

import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
from pydantic import TypeAdapter

from jaxllm.cluster import distributed
from jaxllm.machine.gpus import MEMORY_V2, gpus_of, nvml
from jaxllm.machine.host import allowed_cpus, host_memory, installed_version
from jaxllm.untrusted import RefusedInput, read_text, reason_of, whole_number

T = TypeVar("T")

PACKAGES = (
    *("jaxllm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
    *(f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt")),
    *(f"nvidia-{library}-cu{major}" for major in (12, 13) for library in ("nccl", "cudnn")),
)
"""Packages whose versions change the results of a step; nvidia-*: if CUDA came from pip."""

DISK_BYTES, DISK_LIMIT_S = 256 * 2**20, 3.0
"""Size and time limit of the file that measures a disk's speed."""
BLOCK_BYTES = 4 * 2**20
SEEN_LIMIT_S = 20.0
"""Time that a process waits for another's file: NFS may show it after several seconds."""


# ------------------------------------------------------------------------------------------------------------------ machines


@dataclass(frozen=True)
class Card:
    """One GPU, as its driver reports it."""

    name: str
    memory_bytes: int
    used_bytes: int
    """By all programs; before JAX has taken its share, by others."""
    pci: str = ""
    """PCI address."""
    uuid: str = ""
    number: int = 0
    """NVML's."""


@dataclass(frozen=True)
class Binding:
    """CPUs and NUMA nodes of one process."""

    cpus: int
    """CPUs that the process may use."""
    host_cpus: int
    nodes: list[int]
    """NUMA nodes of these CPUs; empty if the kernel does not tell."""
    host_nodes: int
    gpu_nodes: dict[str, int]
    """NUMA node of each GPU that the process drives, by NVML's number; without those whose node is unknown."""

    @property
    def far_gpus(self) -> list[str]:
        """GPUs on nodes where the process has no CPU."""
        return [gpu for gpu, node in self.gpu_nodes.items() if self.nodes and node not in self.nodes]


@dataclass(frozen=True)
class Facts:
    """One process and the machine it is on."""

    rank: int
    host: str
    pid: int
    python: str
    versions: dict[str, str]
    driver: str | None
    cards: list[Card]
    platform: str
    device_kind: str
    devices: int
    """Devices that this process drives."""
    device_limit_bytes: int | None
    """GPU memory that XLA took."""
    host_bytes: int | None
    host_available_bytes: int | None
    """The minimum of what the machine and the job's own limit leave."""
    shared_memory_bytes: int | None
    """Free in /dev/shm."""
    binding: Binding
    environment: dict[str, str]


def facts(driver: str | None, cards: list[Card]) -> Facts:
    """Facts of this process, once JAX runs; the driver's part was asked before (`gpu_cards`)."""
    device = jax.local_devices()[0]
    stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    total, available = host_memory()
    # A part of a GPU (MIG) is on its GPU's node.
    whole = (nvml("DeviceGetDeviceHandleFromMigDeviceHandle", gpu) or gpu for gpu in gpus_of(jax.local_devices()))
    driven = {nvml("DeviceGetUUID", gpu) for gpu in whole}
    return Facts(
        rank=jax.process_index(),
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := installed_version(name))},
        driver=driver,
        cards=cards,
        platform=device.platform,
        device_kind=device.device_kind,
        devices=jax.local_device_count(),
        device_limit_bytes=stats.get("bytes_limit"),
        host_bytes=total,
        host_available_bytes=available,
        shared_memory_bytes=_free_bytes(Path("/dev/shm")),
        binding=binding({str(card.number): card.pci for card in cards if card.uuid in driven}),
        environment=distributed.environment(),
    )


def gather(here: T) -> list[T]:
    """A dataclass of all processes, by rank; every process must call it, with its own."""
    adapter = TypeAdapter(type(here))
    return [adapter.validate_python(values) for values in distributed.gathered(adapter.dump_python(here))]


def host_gpus() -> dict[int, Any]:
    """NVML's handles of the host's GPUs by its numbers; without those that a scheduler or the driver withholds."""
    nvml("Init")
    handles = {number: nvml("DeviceGetHandleByIndex", number) for number in range(nvml("DeviceGetCount") or 0)}
    return {number: gpu for number, gpu in handles.items() if gpu}


def gpu_cards() -> tuple[str | None, list[Card]]:
    """(the driver's version, the GPUs of this machine), by NVML; (None, []) without it. A size that is not known is 0."""
    cards = []
    for number, gpu in host_gpus().items():
        memory, pci = nvml("DeviceGetMemoryInfo", gpu, MEMORY_V2), nvml("DeviceGetPciInfo", gpu)
        sizes = (memory.total, memory.used) if memory else (0, 0)
        names = nvml("DeviceGetName", gpu) or "", pci.busId if pci else "", nvml("DeviceGetUUID", gpu) or ""
        cards.append(Card(names[0], *sizes, *names[1:], number))
    return nvml("SystemGetDriverVersion"), cards


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def clock_ahead() -> tuple[float, float]:
    """(minimum, maximum) seconds by which process 0's clock is ahead of this one's; every process must call it.

    Process 0 reads its clock after this process has asked and before it has the answer, so both bounds are certain.
    """
    # A late process would widen the bounds of all: after this exchange all begin together.
    distributed.exchange("", lambda _: "")
    asked = time.time()
    there = float(distributed.exchange("", lambda _: repr(time.time())))
    return there - time.time(), there - asked


# ------------------------------------------------------------------------------------------------------------------- storage


@dataclass(frozen=True)
class Folder:
    """A folder as one process sees it."""

    error: str = ""
    """Reason why this process cannot write there."""
    sees_main: bool = True
    """Whether process 0's file is visible."""
    unseen: tuple[int, ...] = ()
    """Processes whose files process 0 did not see."""
    free_bytes: int = 0
    write_bytes_per_s: float = 0.0
    """Until the data was on the disk. 0: not measured by this process."""
    read_bytes_per_s: float = 0.0


def folder(path: Path, measures: bool) -> list[Folder]:
    """Whether all processes share a folder and can write there, and how fast; results of all, by rank. Every process must call
    it.

    Missing folders are created, and removed again; files too.

    Args:
      measures: whether this process measures the speed too; one for each host is enough. They measure at the same time, as when
        a checkpoint is written.
    """
    main, rank = distributed.is_main_process(), jax.process_index()
    token = distributed.broadcast(uuid.uuid4().hex)
    mine, error, made = path / f".doctor-{token}-{rank}", "", []
    try:
        if main:
            made = [one for one in (path, *path.parents) if not one.exists()]
            path.mkdir(parents=True, exist_ok=True)
            mine.write_bytes(b"jaxllm doctor")
    except OSError as failure:
        error = reason_of(failure)
    # Process 0's file is there now, or never will be.
    stopped = distributed.broadcast(error)
    sees = stopped == "" and (main or not _missing(path, [f".doctor-{token}-0"]))
    try:
        if sees and not main:
            mine.write_bytes(b"jaxllm doctor")
    except OSError as failure:
        error = reason_of(failure)
    wrote = distributed.gathered(sees and not error)
    names = {f".doctor-{token}-{other}": other for other, there in enumerate(wrote) if there}
    unseen = tuple(sorted(names[name] for name in _missing(path, names))) if main else ()
    distributed.gathered("looked")
    found = {"error": error, "sees_main": sees or stopped != "", "unseen": unseen, "free_bytes": _free_bytes(path) or 0}
    if sees and not error and measures:
        found |= _speed(mine)
    with suppress(OSError):
        mine.unlink(missing_ok=True)
    folders = gather(Folder(**found))
    for one in made:
        with suppress(OSError):
            one.rmdir()
    return folders


def _missing(path: Path, names: Iterable[str]) -> set[str]:
    """Those of the files that do not appear in a folder within SEEN_LIMIT_S."""
    deadline, missing = time.monotonic() + SEEN_LIMIT_S, set(names)
    while True:
        # Listing a folder makes NFS refresh it.
        with suppress(OSError):
            missing -= set(os.listdir(path))
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.2)


def _speed(path: Path) -> dict[str, Any]:
    """Bytes per second of one file, written until it is on the disk, and read again past this machine's page cache."""
    block, written = os.urandom(BLOCK_BYTES), 0
    try:
        with path.open("wb", buffering=0) as file:
            begin = time.perf_counter()
            while written < DISK_BYTES and time.perf_counter() - begin < DISK_LIMIT_S:
                written += file.write(block)
            os.fsync(file.fileno())
            write_s = time.perf_counter() - begin
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, read = time.perf_counter(), 0
        with path.open("rb", buffering=0) as file:
            while part := file.read(BLOCK_BYTES):
                read += len(part)
        read_s = time.perf_counter() - begin
    except OSError as failure:
        return {"error": reason_of(failure)}
    return {"write_bytes_per_s": written / write_s, "read_bytes_per_s": read / read_s}


# ---------------------------------------------------------------------------------------------------------------------- CPUs
# Linux describes NUMA nodes in /sys: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-devices-node ("cpulist") and
# https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci ("numa_node"; -1 where the firmware does not tell).


def binding(pci: Mapping[str, str], sysfs: Path = Path("/sys")) -> Binding:
    """Binding of this process. `pci`: the PCI address of each GPU that it drives, by number."""
    mine, cpus_of = allowed_cpus(), _cpus_of_nodes(sysfs)
    gpu_nodes = {gpu: node for gpu, address in pci.items() if (node := _node_of(address, sysfs)) is not None}
    nodes = sorted(node for node, cpus in cpus_of.items() if cpus & mine)
    return Binding(len(mine), os.cpu_count() or len(mine), nodes, len(cpus_of), gpu_nodes)


def _cpus_of_nodes(sysfs: Path) -> dict[int, set[int]]:
    """CPUs of each NUMA node that has any; empty if the kernel does not tell."""
    found = {}
    for folder in sysfs.glob("devices/system/node/node[0-9]*"):
        try:
            found[int(folder.name.removeprefix("node"))] = _numbers(read_text(folder / "cpulist").strip())
        except (OSError, RefusedInput):
            continue
    # A node may be memory alone.
    return {node: cpus for node, cpus in found.items() if cpus}


def _numbers(text: str) -> set[int]:
    """The kernel's lists, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        least = whole_number(first)
        found.update(range(least, whole_number(last if dash else first, least, 2**20) + 1))
    return found


def _node_of(address: str, sysfs: Path) -> int | None:
    """NUMA node of a PCI device; NVML writes the domain with eight digits and in capitals, the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    try:
        return whole_number(read_text(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").strip())
    except (OSError, RefusedInput):
        return None
