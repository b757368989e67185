"""Compiled programs of earlier tests and runs, without which the suite takes three times as long: the cache of a user's runs
(jaxllm/machine/program_cache.py) in a folder of its own.

JAX_ENABLE_COMPILATION_CACHE=0 turns it off, JAX_COMPILATION_CACHE_DIR moves it.

A program that is compiled for GPUs without a GPU can be stored but not loaded: `kept_gpu_programs` keeps what tests read of
it, its text and its memory. jaxllm is imported late, because JAX reads its variables when it is imported.
"""

import dataclasses
import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

LIMIT_BYTES = 2 * 2**30


def switch_on(environ: MutableMapping[str, str]) -> None:
    """Sets the variables that JAX and jaxllm read. Values that the caller set stay."""
    home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(home / "jaxllm-tests"))
    # Some tests give a process another home.
    environ.setdefault("JAXLLM_PROGRAMS_KEY", str(home / "jaxllm-tests.key"))
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


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
        from jaxllm.machine.program_cache import SUFFIX, write_whole

        if "xla_dump_to" in (compiler_options or {}):
            return self._lowered.compile(compiler_options=compiler_options)
        # Names of operations, which tests read, are debug information; so are places in source files, which differ by checkout.
        text = re.sub(r'loc\("[^"]*\.py":[^)]*\)', "", self._lowered.as_text(debug_info=True))
        options = sorted((compiler_options or {}).items())
        described = repr([self._target, version("jaxlib"), self._versions, options, os.environ.get("XLA_FLAGS"), text])
        path = self._folder / f"gpu-{hashlib.sha256(described.encode()).hexdigest()}{SUFFIX}"
        with suppress(OSError, ValueError, EOFError):
            return GpuProgram(**json.loads(gzip.decompress(path.read_bytes())))
        compiled = self._lowered.compile(compiler_options=compiler_options)
        memory = compiled.memory_analysis()
        sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        program = GpuProgram(compiled.as_text(), sizes)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, gzip.compress(json.dumps(dataclasses.asdict(program)).encode(), 1, mtime=0))
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
