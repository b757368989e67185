"""JAX's persistent compilation cache for the tests and for every process they start.

XLA takes most of the suite's time: with the programs of an earlier run the suite takes about a third.
JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off, JAX_COMPILATION_CACHE_DIR moves it.

JAX does not write an entry atomically: a killed process leaves half an entry, and a second process may read an entry too early.
JAX then warns and compiles. The same warning appears for each program that is compiled for GPUs without a GPU, because JAX can
write but not read it: `kept_gpu_programs` keeps what tests read of such a program, its text and its memory.
"""

import dataclasses
import gzip
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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


@contextmanager
def kept_gpu_programs(folder: Path) -> Iterator[None]:
    """Inside, train steps that this process compiles for GPUs without a GPU are read from the folder if they are there."""
    from jax.experimental import topologies

    from jaxllm.compile import aot

    targets: dict[Any, str] = {}
    describe, trace = topologies.get_topology_desc, aot.trace_step

    def get_topology_desc(**target):
        topology = describe(**target)
        targets[topology.devices[0].client] = json.dumps(target, sort_keys=True)
        return topology

    def trace_step(config, devices):
        step = trace(config, devices)
        target = targets.get(devices[0].client)
        if target is None:
            return step
        lowered = step.lowered._lowered if isinstance(step.lowered, GpuLowered) else step.lowered
        return dataclasses.replace(step, lowered=GpuLowered(lowered, target, aot.versions(), folder))

    with (
        mock.patch.object(topologies, "get_topology_desc", get_topology_desc),
        mock.patch.object(aot, "trace_step", trace_step),
    ):
        yield


class GpuLowered:
    """A lowered step whose compilation is looked up first."""

    def __init__(self, lowered: Any, target: str, versions: list[str], folder: Path):
        self._lowered, self._target, self._versions, self._folder = lowered, target, versions, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Any:
        if "xla_dump_to" in (compiler_options or {}):
            return self._lowered.compile(compiler_options=compiler_options)
        # Names of operations, which tests read, are debug information; so are places in source files, which differ by checkout.
        text = re.sub(r'loc\("[^"]*\.py":[^)]*\)', "", self._lowered.as_text(debug_info=True))
        options = sorted((compiler_options or {}).items())
        described = repr([self._target, version("jaxlib"), self._versions, options, os.environ.get("XLA_FLAGS"), text])
        path = self._folder / f"gpu-{hashlib.sha256(described.encode()).hexdigest()}-cache"
        with suppress(OSError, ValueError, EOFError):
            return GpuProgram(**json.loads(gzip.decompress(path.read_bytes())))
        compiled = self._lowered.compile(compiler_options=compiler_options)
        memory = compiled.memory_analysis()
        sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        program = GpuProgram(compiled.as_text(), sizes)
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(program)).encode(), 1, mtime=0))
        aside.replace(path)
        return program


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """What tests read of a compiled step."""

    text: str
    sizes: dict[str, int]

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return SimpleNamespace(**self.sizes)
