"""This machine: the CPUs, threads, files and memory that a process may use, the GPUs of NVIDIA's driver, and the versions of
installed packages. No JAX.
"""

import ctypes
import errno
import importlib.metadata
import os
import platform
import resource
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from jaxllm.config.errors import ConfigError
from jaxllm.display import readable

# ------------------------------------------------------------------------------------------------ CPUs, threads and files

THREADS, FILES = 64, 64
"""JAX starts about as many threads on a small machine, and a run opens about forty files."""


def allowed_cpus() -> set[int]:
    """Numbers of the cores that this process may use: a job often has fewer than the machine."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def available_cpus() -> int:
    return len(allowed_cpus())


def require_threads_and_files() -> None:
    """ConfigError if the system does not start so many threads, or does not let this process open FILES. It starts them and
    ends them again, in a few milliseconds: XLA's own code would abort where none starts."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FILES:
        raise ConfigError(f"This process may open only {files} files, and a run needs about {FILES}: raise `ulimit -n`.")
    ended, started = threading.Event(), []
    try:
        for number in range(THREADS):
            thread = threading.Thread(target=ended.wait, name=f"probe {number}", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise ConfigError(
            f"The system starts only {len(started)} more threads for this user, and JAX needs about {THREADS}: raise "
            f"`ulimit -u`."
        ) from None
    finally:
        ended.set()
        for thread in started:
            thread.join()


def rename_if_free(aside: Path, path: Path) -> None:
    """Gives a file a name that is not taken; FileExistsError if it is. On a file system without links it checks first, and two
    processes may pass the check at once."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EACCES, errno.EINVAL, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(aside, path)


# ----------------------------------------------------------------------------------------------------------------- memory

GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Versions 2 and 1 of control groups: the controller's name in /proc/self/cgroup, the mount point, and the files with the limit
and with what is used."""


def host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(bytes of this machine that this process may have, bytes it may still take). Its control groups limit both, as in a
    container or a SLURM job. None: not known.

    Args:
      root: the folder of proc/ and sys/.
    """
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None, None
    for limit_file, used_file in _control_groups(root):
        # "max" means no limit.
        with suppress(OSError, ValueError):
            limit = int(limit_file.read_text())
            total = min(total, limit)
            used = int(used_file.read_text()) - _reclaimable(used_file.with_name("memory.stat"))
            available = min(available, max(limit - used, 0))
    return total, available


def _reclaimable(stat: Path) -> int:
    """Bytes of files in the page cache that the system gives up first; they count as used. 0 if it is not known."""
    try:
        values = dict(line.split() for line in stat.read_text().splitlines())
        return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _control_groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """Files of limit and use of this process's control groups, and of those around them. They need not be there: a container's
    system may name groups of its host, of which only the mount point is visible inside.
    """
    paths: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    for controller, mount, limit, used in GROUPS:
        own = PurePosixPath(paths.get(controller, "/").strip("/"))
        for folder in (own, *own.parents):
            yield root / mount / folder / limit, root / mount / folder / used


def require_host_memory(needed_bytes: int, what: str) -> None:
    """ConfigError if it is more than all memory that this process may have. The system would kill what exceeds it, after
    minutes and without a word.

    Args:
      what: the start of a sentence, such as "The model's weights".
    """
    total, _ = host_memory()
    if total is not None and needed_bytes > total:
        raise ConfigError(
            f"{what} need at least {readable(needed_bytes)}, and this machine has {readable(total)} for this process: use a "
            f"smaller model."
        )


# ------------------------------------------------------------------------------------------------------------------- GPUs

LIBRARY, NO_DEVICE = "libcuda.so.1", 100


def visible_gpus() -> list[str] | None:
    """UUIDs as NVML writes them, in CUDA's order, of the GPUs that NVIDIA's driver shows to this process: not of those
    that CUDA_VISIBLE_DEVICES or a scheduler hides. Empty without a driver or a GPU; None if the driver fails in another way.

    It may be asked before JAX starts, and takes no memory on a GPU: it initializes the driver's library, as JAX will do anyway,
    but creates no context.
    """
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    count, device, found = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    status = cuda.cuInit(0)
    if status == NO_DEVICE:
        return []
    if status or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return None
    gpus = []
    for ordinal in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid_v2(ctypes.byref(found), device):
            return None
        gpus.append(f"GPU-{uuid.UUID(bytes=bytes(found))}")
    return gpus


# --------------------------------------------------------------------------------------------------------------- versions

PACKAGES = ("jaxllm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")


def versions() -> dict[str, str]:
    """Versions of Python, jaxllm and its main dependencies, with which a model or a checkpoint is made."""
    # jaxllm may run from a checkout without installation.
    found = {package: installed_version(package) or "not installed" for package in PACKAGES}
    return {"python": platform.python_version(), **found}


def installed(*packages: str) -> list[str]:
    """'name version' of those of the packages that are installed."""
    return [f"{name} {found}" for name in packages if (found := installed_version(name))]


def installed_version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


# ------------------------------------------------------------------------------------------------------ starting Python


def program(code: str) -> tuple[str, ...]:
    """Python's options for a program that has this process's modules, but not those of the working directory: there a recipe or
    a text of others may be."""
    folders = [folder for folder in sys.path if folder and isinstance(folder, str)]
    return "-P", "-c", f"import sys\nsys.path = {folders!r}\n{code}"


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment meanwhile. PYTHONSAFEPATH does for processes of multiprocessing what -P does."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ |= {} if before is None else {name: before}
