"""What collectives need of a host: adapters for RDMA and their library, locked memory, direct access between GPUs, and
sound GPUs. Measured and judged.

    found = gather(asks=True)           every process calls it; those that ask do so for their host's GPUs
    rows(processes, found)

Most faults here end no run: NCCL takes the slower way, and says so only with NCCL_DEBUG=INFO (docs/nccl.md). They are warnings.
A GPU that must be replaced fails.
"""

import ctypes
import itertools
import os
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from jaxllm.cluster import distributed
from jaxllm.display import readable
from jaxllm.doctor import probes
from jaxllm.doctor.checks import FAIL, OK, WARN, Row
from jaxllm.doctor.probes import Facts
from jaxllm.machine.gpus import nvml

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
UNCORRECTED_ECC, P2P_READ = (1, 0), 0
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED with NVML_VOLATILE_ECC, since the driver was loaded; NVML_P2P_CAPS_INDEX_READ, which
pynvml 13 has as a tuple by mistake."""
P2P_REASONS = {
    # NVML, NVML_P2P_STATUS_...; 0 is OK.
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "disabled by a registry key of the driver",
    5: "not supported",
}
HIDDEN = "Insufficient Permissions"
"""NVML's error for a GPU of another job."""
HEALTHY, DCGM, DCGM_LIMIT_S = "Healthy", ("dcgmi", "health", "--group", "0", "--check"), 60


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
    return probes.gather(replace(adapters(), locked_bytes=locked_limit(), **(of_host() if asks else {})))


# ------------------------------------------------------------------------------------------------------------------ measured


def adapters() -> Fabric:
    """The adapters, and what keeps NCCL from using them."""
    names = tuple(sorted(path.name for path in ADAPTERS.glob("*")))
    if not names:
        return Fabric()
    opens = any(os.access(path, os.R_OK | os.W_OK) for path in DEVICE_FILES.glob("uverbs*"))
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


def of_host() -> dict[str, Any]:
    """What the driver and DCGM say of the host's GPUs: attributes of a Fabric."""
    gpus, damage, slowed, apart = probes.host_gpus(), [], [], []
    opened = {number: nvml("DeviceGetHandleByIndex", number, tells=True) for number in range(nvml("DeviceGetCount") or 0)}
    errors = [f"GPU {number}: {text}" for number, text in opened.items() if isinstance(text, str) and text != HIDDEN]
    for number, gpu in gpus.items():
        if count := nvml("DeviceGetTotalEccErrors", gpu, *UNCORRECTED_ECC):
            errors.append(f"GPU {number} has {count} uncorrectable ECC errors")
        _, _, waits, failed = nvml("DeviceGetRemappedRows", gpu) or (0, 0, 0, 0)
        if waits:
            errors.append(f"GPU {number} has a damaged row of memory")
        if failed:
            damage.append(f"GPU {number} cannot replace a damaged row of memory")
        reasons = nvml("DeviceGetCurrentClocksEventReasons", gpu) or 0
        if causes := [cause for bit, cause in SLOWDOWNS.items() if reasons & bit]:
            slowed.append(f"GPU {number}: {', '.join(causes)}")
    for (one, gpu), (other, peer) in itertools.combinations(gpus.items(), 2):
        if status := nvml("DeviceGetP2PStatus", gpu, peer, P2P_READ):
            apart.append(f"GPU{one} and GPU{other} ({P2P_REASONS.get(status, 'unknown')})")
    found = {"gpu_errors": errors, "gpu_damage": damage, "slowed": slowed, "unreached": apart}
    return {"dcgm": health(), **{name: tuple(texts) for name, texts in found.items()}}


def health() -> str:
    """DCGM's overall verdict, such as Healthy, Warning or Failure; '' where it is missing, fails or takes too long."""
    try:
        ended = subprocess.run(DCGM, capture_output=True, text=True, errors="replace", timeout=DCGM_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    verdict = re.search(r"Overall Health:?\s*\|\s*(\w{1,32})", ended.stdout)
    return verdict[1] if verdict else ""


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
    return Row("access between GPUs", OK, "the driver names no two GPUs of a host without it")


def _health(views: _Views) -> Row:
    if found := _first((one, view.gpu_damage) for one, view in views):
        return Row("gpu health", FAIL, found, "leave these GPUs out, and have them replaced")
    if found := _first((one, view.gpu_errors) for one, view in views):
        todo = "reset these GPUs (nvidia-smi --gpu-reset) while nothing uses them; have one replaced if it comes again"
        return Row("gpu health", WARN, found, todo)
    return Row("gpu health", OK, "the driver names no uncorrectable ECC errors and no damaged rows of memory")


def _clocks(views: _Views) -> Row:
    if found := _first((one, view.slowed) for one, view in views):
        return Row("gpu clocks", WARN, f"held down: {found}", "check cooling and power: one slow GPU slows every step")
    return Row("gpu clocks", OK, "the driver names none that heat or power holds down")


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
