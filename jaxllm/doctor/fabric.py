"""What collectives need of a host: adapters for RDMA and their library, locked memory, direct access between GPUs, and
sound GPUs. Measured and judged.

    found = gather(asks=True)           every process calls it; those that ask run nvidia-smi and dcgmi for their host
    rows(processes, found)

Most faults here end no run: NCCL takes the slower way, and says so only with NCCL_DEBUG=INFO (docs/nccl.md). They are warnings.
A GPU that must be replaced fails.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from jaxllm.cluster import distributed
from jaxllm.display import readable
from jaxllm.doctor import probes
from jaxllm.doctor.checks import FAIL, OK, WARN, Row
from jaxllm.doctor.probes import Facts, answer

ADAPTERS, DEVICE_FILES, STATUS = Path("/sys/class/infiniband"), Path("/dev/infiniband"), Path("/proc/self/status")
VERBS = "libibverbs.so.1"
"""The library that NCCL opens for InfiniBand and RoCE (NCCL, src/misc/ibvsymbols.cc)."""
PLUGIN = "libnccl-net.so"
"""The name by which NCCL opens a plugin for its network (src/plugin/net.cc). It needs AWS's for EFA (aws-ofi-nccl, README)."""
EFA = "efa"
"""The kernel's driver of EFA."""
LOCKED_BYTES = 2**30
"""A limit of locked memory below this is a warning. Each connection of NCCL registers some MiB. AWS's and Red Hat's guides ask
for `unlimited`; containers have 8 MiB or less by default."""
IPC_LOCK = 1 << 14
"""CAP_IPC_LOCK in a process's capabilities (linux/capability.h): no limit applies."""

SLOWDOWNS = {
    # NVIDIA, NVML API reference, NvmlClocksEventReasons. Not the power cap: a GPU at work is usually at it.
    0x08: "hardware slowdown",
    0x20: "too hot (software slowdown)",
    0x40: "too hot (hardware slowdown)",
    0x80: "power brake",
}
ECC = "ecc.errors.uncorrected.volatile.total"
REMAPPED = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
CLOCK_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field and its name before driver 535: nvidia-smi refuses a query with a field that it does not know."""
HEALTHY = "Healthy"
P2P_REASONS = {
    # The legend of `nvidia-smi topo -p2p r`.
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "disabled by a registry key of the driver",
}


@dataclass(frozen=True)
class Fabric:
    """One process's view of its host's adapters and GPUs."""

    adapters: tuple[str, ...] = ()
    """Names of the RDMA adapters that the kernel has."""
    opens: bool = True
    """Whether this process may open one of their device files."""
    missing_library: str = ""
    """The library that NCCL needs for these adapters and cannot load; '' if nothing is missing."""
    locked_bytes: int | None = None
    """Limit of locked memory; None: no limit."""
    gpu_errors: tuple[str, ...] = ()
    """Faults of the host's GPUs that a reset repairs."""
    gpu_damage: tuple[str, ...] = ()
    """Faults that only another GPU repairs."""
    slowed: tuple[str, ...] = ()
    """GPUs whose clocks are held down, and the cause."""
    unreached: tuple[str, ...] = ()
    """Pairs of GPUs without direct access, and the cause."""
    dcgm: str = ""
    """What DCGM's monitor says of the host; '' if there is none."""


_Views: TypeAlias = Sequence[tuple[Facts, Fabric]]
"""Each process with its view."""


def gather(asks: bool) -> list[Fabric]:
    """The views of all processes, by rank; every process must call it. `asks`: whether this one asks for its host's GPUs."""
    here = replace(adapters(), locked_bytes=locked_limit())
    if asks:
        rows_of_memory = answer("nvidia-smi", f"--query-remapped-rows={','.join(REMAPPED)}", "--format=csv,noheader")
        here = replace(
            here,
            gpu_errors=(*ecc_errors(_query(ECC)), *pending_rows(rows_of_memory)),
            gpu_damage=lost_rows(rows_of_memory),
            slowed=slowed(_query(CLOCK_REASONS[0]) or _query(CLOCK_REASONS[1])),
            unreached=unreached(answer("nvidia-smi", "topo", "-p2p", "r")),
            dcgm=health(answer("dcgmi", "health", "--group", "0", "--check")),
        )
    return probes.gather(here)


# ------------------------------------------------------------------------------------------------------------------ measured


def adapters() -> Fabric:
    """The adapters, and what keeps NCCL from using them."""
    names = tuple(sorted(path.name for path in _entries(ADAPTERS)))
    if not names:
        return Fabric()
    opens = any(os.access(path, os.R_OK | os.W_OK) for path in _entries(DEVICE_FILES) if path.name.startswith("uverbs"))
    drivers = {(ADAPTERS / name / "device" / "driver").resolve().name for name in names}
    wanted = PLUGIN if drivers == {EFA} else VERBS
    # The user named another plugin of NCCL.
    loads = "NCCL_NET_PLUGIN" in distributed.environment() or _loads(wanted)
    return Fabric(names, opens, "" if loads else wanted)


def locked_limit() -> int | None:
    """Bytes that this process may lock; None if no limit applies."""
    with suppress(OSError, ValueError):
        capabilities = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", STATUS.read_text(), re.MULTILINE)
        if capabilities and int(capabilities[1], 16) & IPC_LOCK:
            return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def ecc_errors(text: str) -> tuple[str, ...]:
    """GPUs with uncorrectable errors since their driver was loaded, from lines such as `3, 2`."""
    return tuple(f"GPU {gpu} has {count} uncorrectable ECC errors" for gpu, count in _lines(text, 2) if _is_set(count))


def pending_rows(text: str) -> tuple[str, ...]:
    """GPUs with a row of memory that waits for its replacement, from lines such as `00000000:19:00.0, 1, 0`."""
    return tuple(f"GPU {gpu} has a damaged row of memory" for gpu, pending, _ in _lines(text, 3) if _is_set(pending))


def lost_rows(text: str) -> tuple[str, ...]:
    """GPUs with a row of memory that could not be replaced, from the same lines."""
    return tuple(f"GPU {gpu} cannot replace a damaged row of memory" for gpu, _, failure in _lines(text, 3) if _is_set(failure))


def slowed(text: str) -> tuple[str, ...]:
    """GPUs with clocks held down, from lines such as `3, 0x0000000000000048`."""
    found = []
    for gpu, mask in _lines(text, 2):
        bits = int(mask, 16) if re.fullmatch("0x[0-9a-fA-F]{1,16}", mask) else 0
        if causes := [cause for bit, cause in SLOWDOWNS.items() if bits & bit]:
            found.append(f"GPU {gpu}: {', '.join(causes)}")
    return tuple(found)


def unreached(text: str) -> tuple[str, ...]:
    """Pairs of GPUs that cannot read each other's memory, from the matrix of `nvidia-smi topo -p2p r`."""
    # The header is underlined, on a pipe too.
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    header = next((words for words in lines if words and all(word.startswith("GPU") for word in words)), [])
    found = []
    for gpu, *cells in (words for words in lines if len(words) == len(header) + 1 and words[0] in header):
        for other, cell in zip(header, cells, strict=True):
            if cell not in ("X", "OK") and header.index(other) > header.index(gpu):
                found.append(f"{gpu} and {other} ({P2P_REASONS.get(cell, cell)})")
    return tuple(found)


def health(text: str) -> str:
    """The overall verdict in the table of `dcgmi health --check`, such as Healthy, Warning or Failure; '' without one."""
    verdict = re.search(r"Overall Health:?\s*\|\s*(\w{1,32})", text)
    return verdict[1] if verdict else ""


def _query(field: str) -> str:
    """Lines of a GPU's number and one of its fields; '' if nvidia-smi has no such field."""
    return answer("nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader,nounits")


def _lines(text: str, fields: int) -> Iterator[list[str]]:
    """The fields of each line that has so many."""
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == fields:
            yield values


def _is_set(value: str) -> bool:
    """Whether a count is not 0, or an answer is yes. Neither is an answer that the GPU does not have ([N/A])."""
    return value.lower() == "yes" or (value.isdecimal() and int(value) > 0)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# -------------------------------------------------------------------------------------------------------------------- judged


def rows(processes: Sequence[Facts], found: Sequence[Fabric]) -> Iterator[Row]:
    """The verdicts; none for a run on CPU devices, which has no NCCL."""
    if any(one.platform == "cpu" for one in processes):
        return
    views = list(zip(processes, found, strict=True))
    yield _network(views)
    if any(view.adapters for _, view in views):
        yield _locked(views)
    if any(one.driver for one in processes):
        yield _peers(views)
        yield _health(views)
        yield _clocks(views)
    yield from _dcgm(views)


def _network(views: _Views) -> Row:
    name = "network adapters"
    with_some = [(one, view) for one, view in views if view.adapters]
    if not with_some:
        return Row(name, OK, "no RDMA adapters: between hosts NCCL sends by TCP")
    closed = [(one, view) for one, view in with_some if not view.opens]
    blind = [(one, view) for one, view in with_some if view.missing_library]
    without = [one for one, view in views if not view.adapters]
    text = _some((closed or blind or with_some)[0][1].adapters)
    if closed:
        found = f"{text}, but {DEVICE_FILES} cannot be opened {_on(one for one, _ in closed)}: NCCL would send by TCP"
        todo = "give the container its devices (Kubernetes: an rdma/ resource; Docker: --device=/dev/infiniband)"
        return Row(name, WARN, found, todo)
    if blind:
        library = blind[0][1].missing_library
        found = f"{text}, but {library} cannot be loaded {_on(one for one, _ in blind)}: NCCL would send by TCP"
        verbs, efa = "install libibverbs1 and ibverbs-providers", "install AWS's EFA software (launch/Dockerfile, --target efa)"
        return Row(name, WARN, found, verbs if library == VERBS else efa)
    if without:
        found = f"{text}, but none {_on(without)}: with them all would wait for the slower network"
        return Row(name, WARN, found, "start the run on hosts of one kind")
    return Row(name, OK, f"{text}; NCCL's library for them is there")


def _locked(views: _Views) -> Row:
    limits = [(one, view.locked_bytes) for one, view in views if view.locked_bytes is not None]
    tight = [(one, limit) for one, limit in limits if limit < LOCKED_BYTES]
    if not tight:
        return Row("locked memory", OK, "no limit that RDMA would meet")
    least = readable(min(limit for _, limit in tight))
    found = f"at most {least} may be locked {_on(one for one, _ in tight)}, and RDMA locks what it sends"
    todo = "set it to unlimited: Docker by --ulimit memlock=-1, others by LimitMEMLOCK=infinity of containerd or slurmd"
    return Row("locked memory", WARN, found, todo)


def _peers(views: _Views) -> Row:
    if found := _first((one, view.unreached) for one, view in views):
        todo = "turn off ACS, as NCCL's troubleshooting page says; GPUs that are made without direct access have no cure"
        return Row("access between GPUs", WARN, f"not direct: {found}; NCCL copies through the host", todo)
    return Row("access between GPUs", OK, "nvidia-smi names no two GPUs of a host without it")


def _health(views: _Views) -> Row:
    if found := _first((one, view.gpu_damage) for one, view in views):
        return Row("gpu health", FAIL, found, "leave these GPUs out, and have them replaced")
    if found := _first((one, view.gpu_errors) for one, view in views):
        todo = "reset these GPUs (nvidia-smi --gpu-reset) while nothing uses them; have one replaced if it comes again"
        return Row("gpu health", WARN, found, todo)
    return Row("gpu health", OK, "nvidia-smi names no uncorrectable ECC errors and no damaged rows of memory")


def _clocks(views: _Views) -> Row:
    if found := _first((one, view.slowed) for one, view in views):
        return Row("gpu clocks", WARN, f"held down: {found}", "check cooling and power: one slow GPU slows every step")
    return Row("gpu clocks", OK, "nvidia-smi names none that heat or power holds down")


def _dcgm(views: _Views) -> Iterator[Row]:
    ill = [one for one, view in views if view.dcgm not in ("", HEALTHY)]
    if ill:
        verdict = next(view.dcgm for one, view in views if one is ill[0])
        todo = "dcgmi health --check names the cause, and dcgmi diag -r 3 tests the GPUs"
        yield Row("dcgm", WARN, f"{verdict} {_on(ill)}", todo)
    elif any(view.dcgm for _, view in views):
        yield Row("dcgm", OK, "healthy; dcgmi diag -r 2 tests the GPUs for some minutes")


def _first(findings: Iterable[tuple[Facts, Sequence[str]]]) -> str:
    """The findings of the first process that has any, and all hosts that have some; '' if none has."""
    some = [(one, texts) for one, texts in findings if texts]
    return f"{_some(some[0][1], '; ')} {_on(one for one, _ in some)}" if some else ""


def _some(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _on(processes: Iterable[Facts]) -> str:
    return f"on {_some(list(dict.fromkeys(one.host for one in processes)))}"
