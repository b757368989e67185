"""Measurements of a process's machine, its binding and storage, without a verdict: doctor/checks.py judges them.

    driver, cards = gpu_cards()                 before JAX starts and takes their memory
    processes = gather(facts(driver, cards))    of all processes, by rank
    clock_ahead()                               by how much process 0's clock is ahead of this one
    folder(path, measures)                      shared, writable, how fast

Every process calls all but the first, in the same order; they do not raise where another process would wait.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
from pydantic import TypeAdapter

from jaxllm.cluster import distributed
from jaxllm.machine.host import allowed_cpus, host_memory, visible_gpus
from jaxllm.untrusted import MIB, RefusedInput, parse_json, read_text, whole_number

T = TypeVar("T")

PACKAGES = (
    *("jaxllm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
    *(f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt")),
    *(f"nvidia-{library}-cu{major}" for major in (12, 13) for library in ("nccl", "cudnn")),
)
"""Packages whose versions change the results of a step; nvidia-*: if CUDA came from pip."""

SYSFS = Path("/sys")
ANSWER_LIMIT_S = 60
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
    """NUMA node of each GPU that the process drives, by nvidia-smi's number; without those whose node is unknown."""

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
    return Facts(
        rank=jax.process_index(),
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        versions=versions(),
        driver=driver,
        cards=cards,
        platform=device.platform,
        device_kind=device.device_kind,
        devices=jax.local_device_count(),
        device_limit_bytes=stats.get("bytes_limit"),
        host_bytes=total,
        host_available_bytes=available,
        shared_memory_bytes=_free_bytes(Path("/dev/shm")),
        binding=binding({card.uuid: card.pci for card in cards}, _driven_gpus()),
        environment=distributed.environment(),
    )


def _driven_gpus() -> set[str]:
    """UUIDs of the GPUs that this process drives."""
    devices = jax.local_devices()
    # A device's own number counts the GPUs that the driver shows to this process.
    numbers = {device.local_hardware_id for device in devices if device.platform != "cpu"}
    return {uuid for number, uuid in enumerate((visible_gpus() or []) if numbers else []) if number in numbers}


def gather(here: T) -> list[T]:
    """A dataclass of all processes, by rank; every process must call it, with its own."""
    adapter = TypeAdapter(type(here))
    return [adapter.validate_python(values) for values in gather_json(adapter.dump_python(here))]


def gather_json(here: Any) -> list[Any]:
    """Values of all processes, by rank, as far as JSON can express them; every process must call it."""
    texts = parse_json(distributed.exchange(json.dumps(here), json.dumps), jax.process_count() * MIB)
    # A speed may be infinite.
    return [parse_json(text, lenient=True) for text in texts]


def versions() -> dict[str, str]:
    """Versions of the installed packages of PACKAGES."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def gpu_cards() -> tuple[str | None, list[Card]]:
    """(the driver's version, the GPUs of this machine), by nvidia-smi; (None, []) if it is missing or does not answer."""
    query = "--query-gpu=driver_version,name,memory.total,memory.used,pci.bus_id,uuid"
    return parse_cards(answer("nvidia-smi", query, "--format=csv,noheader,nounits"))


def answer(*command: str) -> str:
    """Output of a program; '' if it is missing, fails or takes too long."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def parse_cards(text: str) -> tuple[str | None, list[Card]]:
    """Parses lines such as `580.95.05, NVIDIA H200, 143771, 4, 00000000:19:00.0, GPU-5c9f...`, sizes in MiB. A missing value
    ([N/A]) counts as 0.
    """
    driver, cards = None, []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6:
            driver = fields[0]
            total, used = (int(field) * 2**20 if field.isdecimal() else 0 for field in fields[2:4])
            cards.append(Card(fields[1], total, used, *fields[4:]))
    return driver, cards


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
        made = _make(path) if main else []
        error = _write(mine, b"jaxllm doctor") if main else ""
    except OSError as failure:
        error = _reason(failure)
    # Process 0's file is there now, or never will be.
    stopped = distributed.broadcast(error)
    sees = stopped == "" and (main or not _missing(path, [f".doctor-{token}-0"]))
    if sees and not main:
        error = _write(mine, b"jaxllm doctor")
    wrote = gather_json(sees and not error)
    names = {f".doctor-{token}-{other}": other for other, there in enumerate(wrote) if there}
    unseen = tuple(sorted(names[name] for name in _missing(path, names))) if main else ()
    gather_json("looked")
    found = {"error": error, "sees_main": sees or stopped != "", "unseen": unseen, "free_bytes": _free_bytes(path) or 0}
    if sees and not error and measures:
        found |= _speed(mine)
    with suppress(OSError):
        mine.unlink(missing_ok=True)
    folders = gather(Folder(**found))
    for one in reversed(made):
        with suppress(OSError):
            one.rmdir()
    return folders


def _make(path: Path) -> list[Path]:
    """Creates a folder and its parents; returns the new ones, outermost first."""
    missing = [one for one in (path, *path.parents) if not one.exists()][::-1]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def _write(path: Path, content: bytes) -> str:
    """The reason why the write failed; '' if it succeeded."""
    try:
        path.write_bytes(content)
    except OSError as failure:
        return _reason(failure)
    return ""


def _reason(failure: OSError) -> str:
    return failure.strerror or str(failure)


def _missing(path: Path, names: Iterable[str]) -> set[str]:
    """Those of the files that do not appear in a folder within SEEN_LIMIT_S."""
    deadline, missing = time.monotonic() + SEEN_LIMIT_S, set(names)
    while missing:
        # Listing a folder makes NFS refresh it.
        with suppress(OSError):
            missing -= set(os.listdir(path))
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return missing


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
        return {"error": _reason(failure)}
    return {"write_bytes_per_s": written / write_s, "read_bytes_per_s": read / read_s}


# ---------------------------------------------------------------------------------------------------------------------- CPUs
# Linux describes NUMA nodes in /sys: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-devices-node ("cpulist") and
# https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci ("numa_node"; -1 where the firmware does not tell).


def binding(pci: Mapping[str, str], driven: Collection[str], sysfs: Path = SYSFS) -> Binding:
    """Binding of this process.

    Args:
      pci: PCI address by UUID, of all GPUs of the host in nvidia-smi's order.
      driven: UUIDs of the GPUs that this process drives.
    """
    mine, cpus_of = allowed_cpus(), _cpus_of_nodes(sysfs)
    gpu_nodes = {}
    for number, (name, address) in enumerate(pci.items()):
        node = _node_of(address, sysfs) if name in driven else None
        if node is not None:
            gpu_nodes[str(number)] = node
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
    """NUMA node of a PCI device; nvidia-smi writes the domain with eight digits and in capitals, the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    try:
        return whole_number(read_text(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").strip())
    except (OSError, RefusedInput):
        return None
