"""JAX's persistent compilation cache for the tests and for every process they start.

XLA takes most of the suite's time: with the programs of an earlier run the suite takes about a third.
JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off, JAX_COMPILATION_CACHE_DIR moves it.

JAX does not write an entry atomically: a killed process leaves half an entry, and a second process may read an entry too early.
JAX then warns and compiles. The same warning appears for each program that is compiled for GPUs without a GPU, because JAX can
write but not read it.
"""

import hashlib
import os
import platform
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

LIMIT_BYTES = 2 * 2**30
WARNING = "Error reading persistent compilation cache entry"


def switch_on(environ: MutableMapping[str, str]) -> None:
    """Sets the variables that JAX reads at import. Values that the caller set stay."""
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(default_folder()))
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    # XLA's own caches would change the options that GPU programs are compiled with.
    environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
    filters = [environ["PYTHONWARNINGS"]] if environ.get("PYTHONWARNINGS") else []
    environ["PYTHONWARNINGS"] = ",".join([*filters, f"ignore:{WARNING}:UserWarning"])


def default_folder() -> Path:
    """The cache folder for this version of JAX and kind of CPU, because JAX's cache key does not include CPU features."""
    cpu = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})) or cpu
    identity = "\n".join([version("jax"), version("jaxlib"), platform.machine(), cpu])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "jaxllm-tests" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def prune(folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Deletes the least recently used entries until the rest fits. JAX's own limit would lock and list the folder at each
    write."""
    entries = []
    for path in folder.glob("*-cache"):
        # Another run may delete entries too.
        with suppress(FileNotFoundError):
            stat = path.stat()
            entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    excess = sum(size for _, size, _ in entries) - limit_bytes
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
