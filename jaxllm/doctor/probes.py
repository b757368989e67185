"""Measurements of a process's machine, storage and network, without a verdict: doctor/checks.py judges them.

    driver, cards = gpu_cards()                 before JAX starts and takes their memory
    processes = gather(facts(driver, cards))    of all processes, by rank
    clock_ahead()                               by how much process 0's clock is ahead of this one
    folder(path, measures)                      shared, writable, how fast
    collectives(mesh, axis, ...)                measured on all devices of a mesh

Every process calls all but the first, in the same order; they do not raise where another process would wait.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.cluster import distributed
from jaxllm.doctor.numa import Binding, binding
from jaxllm.machine.host import host_memory, visible_gpus
from jaxllm.mesh.axes import axis_index
from jaxllm.untrusted import MIB, parse_json

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
REPEATS = 7


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


def gather(here: Facts) -> list[Facts]:
    """Facts of all processes, by rank; every process must call it."""
    found = gather_json(asdict(here))
    return [
        Facts(**{**values, "cards": [Card(**card) for card in values["cards"]], "binding": Binding(**values["binding"])})
        for values in found
    ]


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
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,name,memory.total,memory.used,pci.bus_id,uuid",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None, []
    return parse_cards(answer.stdout) if answer.returncode == 0 else (None, [])


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
    unseen = sorted(names[name] for name in _missing(path, names)) if main else []
    gather_json("looked")
    found = {"error": error, "sees_main": sees or stopped != "", "unseen": unseen, "free_bytes": _free_bytes(path) or 0}
    if sees and not error and measures:
        found |= _speed(mine)
    with suppress(OSError):
        mine.unlink(missing_ok=True)
    all_found = gather_json(found)
    for one in reversed(made):
        with suppress(OSError):
            one.rmdir()
    return [Folder(**{**values, "unseen": tuple(values["unseen"])}) for values in all_found]


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


# --------------------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Collective:
    """One kind of collective along one axis, on all its groups at once."""

    what: str
    axis: str
    ranks: int
    size_bytes: int
    """Size of the full array, as cost_model/network.py counts: an all-reduce's sum, an all-gather's result on each rank."""
    seconds: float
    """The median of REPEATS, on the slowest process."""
    right: bool
    """Whether every device has the expected numbers."""


def collectives(
    mesh: Mesh, axis: str, size_bytes: int, limited: Callable[[str], AbstractContextManager[None]]
) -> Iterator[Collective]:
    """Times all-reduce, all-gather and permute along an axis; every process must call it, and iterate over all of them.

    Args:
      size_bytes: of the full array; each device takes about this much and twice that.
      limited: called with the name of each; the context in which it is measured.
    """
    ranks, shape = mesh.shape[axis], mesh.devices.shape
    numbers = np.moveaxis(np.arange(mesh.devices.size).reshape(shape), axis_index(axis), -1)
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]

    def expected(values: np.ndarray) -> np.ndarray:
        """[device, value] that a device should have, from [..., rank along the axis, value]."""
        return np.moveaxis(values, -2, axis_index(axis) - 1).reshape(mesh.devices.size, -1)

    every_rank = np.repeat(numbers[..., None, :], ranks, axis=-2)
    kinds = {
        "all-reduce": (partial(lax.psum, axis_name=axis), 1, expected(every_rank.sum(-1, keepdims=True))),
        "all-gather": (partial(lax.all_gather, axis_name=axis, axis=1, tiled=True), ranks, expected(every_rank)),
        "permute": (partial(lax.ppermute, axis_name=axis, perm=ring), 1, expected(np.roll(numbers, 1, -1)[..., None])),
    }
    for what, (function, parts, values) in kinds.items():
        length = max(size_bytes // 4 // parts, 1)
        with limited(what):
            seconds, right = _time(mesh, function, length, values)
            slowest, all_right = max(gather_json(seconds)), all(gather_json(right))
        yield Collective(what, axis, ranks, 4 * length * parts, slowest, all_right)


def _time(mesh: Mesh, function: Callable[[jax.Array], jax.Array], length: int, values: np.ndarray) -> tuple[float, bool]:
    """(median seconds, whether the devices of this process have values[device, part]); a device's input is its number."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.devices.size, length)
    given = jax.jit(lambda: lax.broadcasted_iota(jnp.float32, shape, 0), out_shardings=sharding)()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
    run = jax.jit(mapped, out_shardings=sharding)
    # Compiles, and NCCL chooses its route.
    answer = jax.block_until_ready(run(given))
    right = True
    for shard in answer.addressable_shards:
        parts = np.asarray(shard.data).reshape(values.shape[1], -1)
        right &= bool((parts == values[shard.index[0].start or 0][:, None]).all())
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run(given))
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken), right
