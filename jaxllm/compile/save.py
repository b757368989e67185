"""`jaxllm compile --save DIR`: compiles every program of a run before the run, for devices that need not be present.

XLA does not make cuDNN's plans without a GPU (it runs its cuDNN passes only with one), and a program without them ends the
process when it first runs. A program for absent GPUs that calls cuDNN is therefore left to the first run, which keeps it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from jaxllm.cluster import distributed
from jaxllm.compile import aot
from jaxllm.compile.report import require_present
from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host, require_devices
from jaxllm.display import readable
from jaxllm.machine.program_cache import MANIFEST, write_whole
from jaxllm.mesh.placement import mesh_on_hosts
from jaxllm.run.programs import Manifest, fingerprint, machine_of, read_manifest, run_programs, store_of, unlike
from jaxllm.run.rounds import early_exchange
from jaxllm.untrusted import RefusedInput

CUDNN = "__cudnn$"


@dataclass(frozen=True)
class SavedProgram:
    """One program of a run."""

    name: str
    compile_s: float
    """0 if it was saved before."""
    bytes: int
    """Its size in the folder; 0 if it is left to the first run, because it calls cuDNN."""


def save_programs(
    config: Config, folder: str | Path, gpu: Gpu | None = None, gpus: int | None = None, gpus_per_host: int | None = None
) -> list[SavedProgram]:
    """Compiles the programs of a run into `folder`. Programs of other configs for the same machine stay there.

    Args:
      gpu, gpus, gpus_per_host: as compile_report has them.

    Raises:
      ConfigError: the folder holds programs for other devices or versions, or cannot be written.
    """
    folder = Path(folder)
    if gpu is None:
        # A program that was loaded from a cache cannot be stored again: XLA's CPU programs then lack functions (JAX 0.10.2).
        distributed.start(config.run.model_copy(update={"compilation_cache": "off"}))
        devices = jax.devices()
        require_present(gpus, devices)
    else:
        distributed.start_without_devices(gpu, config.run.deterministic)
        gpus = require_devices(config, gpus)
        per_host, _ = choose_gpus_per_host(gpus, gpus_per_host, gpu.gpus_per_host, config.parallel)
        devices = aot.gpu_devices(gpus // per_host, per_host, gpu, gpu.memory_bytes)
    config = config.resolve(len(devices))
    mesh = mesh_on_hosts(config.parallel, devices)
    manifest = _manifest(folder, machine_of(mesh))
    manifest.config = config.model_dump(mode="json")
    return list(_compile(config, mesh, folder, manifest, is_present=gpu is None))


def _manifest(folder: Path, machine: dict[str, str]) -> Manifest:
    """The folder's manifest, or a new one. Raises ConfigError if it is for another machine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = read_manifest(folder)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"--save {folder} cannot be used ({error}): name another folder.") from None
    if not store_of(folder).signs:
        raise ConfigError(f"--save {folder} needs a key that signs programs, and there is none: see the warning above.")
    if found is None:
        return Manifest(machine, {})
    if problem := unlike(found.machine, machine, f"--save {folder} holds programs"):
        raise ConfigError(f"{problem}: name another folder.")
    return found


def _compile(
    config: Config, mesh: jax.sharding.Mesh, folder: Path, manifest: Manifest, is_present: bool
) -> Iterator[SavedProgram]:
    store, writes = store_of(folder), distributed.is_main_process()
    for program in run_programs(config, mesh):
        started = time.perf_counter()
        with jax.set_mesh(mesh):
            lowered = program.jitted.lower(*program.arguments)
            key = fingerprint(lowered.as_text(), program.options)
            before = store.get(key) if key in manifest.programs else None
            # All compile or none does: on GPUs they share out the timing of kernels.
            if not distributed.first_nonempty("" if before else "missing") and before:
                yield SavedProgram(program.name, 0.0, len(before))
                continue
            options = program.options
            if program.exchanges:
                options = early_exchange(lowered, options, mesh.devices.flat[0])
            compiled = lowered.compile(compiler_options=options or None)
        is_left = not is_present and CUDNN in (compiled.as_text() or "")
        content = b"" if is_left else serialize_executable.serialize(compiled)[0]
        compile_s = time.perf_counter() - started
        if content and writes:
            store.put(key, content)
            if store.get(key) is None:
                raise ConfigError(f"--save {folder} cannot be written: name another folder.")
        (manifest.programs if content else manifest.left)[key] = program.name
        if writes:
            # At once: what is compiled stays, also if this is interrupted.
            write_whole(folder / MANIFEST, manifest.text().encode())
        yield SavedProgram(program.name, compile_s, len(content))


def saved_lines(saved: list[SavedProgram], folder: str) -> list[str]:
    """Lines for a terminal."""

    def line(one: SavedProgram) -> str:
        took = f"{one.compile_s:.1f} s" if one.compile_s else "was there"
        return f"  {one.name}: {took}, {readable(one.bytes) if one.bytes else 'left to the first run'}"

    lines = [f"Programs in {folder}, for a run with run.compilation_cache={folder}", *map(line, saved)]
    if not all(one.bytes for one in saved):
        lines.append("Those left call cuDNN, whose plans XLA makes on a GPU only. The first run keeps them.")
    return lines
