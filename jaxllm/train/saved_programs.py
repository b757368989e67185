"""Programs that `jaxllm compile --save DIR` compiled for a run: the run takes them with run.compilation_cache=DIR.

A program is named by its fingerprint: a hash of what XLA would compile, and of the options. The manifest beside the programs
says for which machine they are. A program that does not fit is compiled, and one sentence says why.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.placement import hosts_of
from jaxllm.runtime import distributed, xla_flags
from jaxllm.runtime.program_cache import MANIFEST, ProgramStore, identity, is_open_to_all, versions
from jaxllm.untrusted import RefusedInput, checked, read_json

log = logging.getLogger(__name__)

FUNCTION = re.compile(r"@([\w.]+)")
FORMAT = 1
PACKAGES = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cudnn-cu12"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13"),
)
JAX_OPTIONS = ("jax_optimization_level", "jax_exec_time_optimization_effort", "jax_memory_fitting_level")
"""Options that JAX passes to XLA, and that only environment variables set here."""


@dataclass
class Manifest:
    """What a folder of saved programs holds."""

    machine: dict[str, str]
    """What a program depends on beside its text, by the word that a message uses."""
    config: dict[str, Any]
    """The config that was saved last, to say what differs."""
    programs: dict[str, str] = field(default_factory=dict)
    """fingerprint -> name"""
    left: dict[str, str] = field(default_factory=dict)
    """The same for programs that are left to the first run."""
    format: int = FORMAT

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if it has none.

    Raises:
      OSError: it cannot be read.
      RefusedInput: it is no manifest of this format.
    """
    try:
        values = checked(read_json(folder / MANIFEST), dict[str, Any])
    except FileNotFoundError:
        return None
    if values.get("format") != FORMAT:
        raise RefusedInput(f"its format is {values.get('format')}, not {FORMAT}")
    machine, programs, left = (checked(values.get(name), dict[str, str]) for name in ("machine", "programs", "left"))
    return Manifest(machine, checked(values.get("config"), dict[str, Any]), programs, left)


def store_of(folder: Path) -> ProgramStore:
    return ProgramStore(folder / "saved")


def machine_of(mesh: Mesh) -> dict[str, str]:
    """Manifest.machine for the devices of a mesh, which need not be present."""
    devices = list(mesh.devices.flat)
    on_cpu = devices[0].platform == "cpu"
    per_host = sorted(set(Counter(hosts_of(devices)[device.process_index] for device in devices).values()))
    found = {"JAX": jax.__version__, "jaxlib": jaxlib.__version__, "devices": f"{len(devices)} {devices[0].device_kind}"}
    found["devices on a host"] = ", ".join(map(str, per_host))
    ids = " ".join(str(device.id) for device in devices)
    # A program contains the numbers of its devices.
    found["device order"] = ids if len(devices) <= 16 else hashlib.sha256(ids.encode()).hexdigest()[:16]
    if on_cpu:
        found |= {"processes": str(len({device.process_index for device in devices})), "CPU": identity()}
    else:
        found["packages"] = ", ".join(versions(*PACKAGES))
    given = [flag.partition("=") for flag in xla_flags.given_flags().split() if _matters(flag, on_cpu)]
    # Of a flag that is there twice XLA takes the last.
    flags = {name: value for name, _, value in given}
    found["XLA_FLAGS"] = " ".join(f"{name}={value}" for name, value in sorted(flags.items()))
    found["JAX's options"] = " ".join(f"{name}={getattr(jax.config, name, None)}" for name in JAX_OPTIONS)
    return found


def unlike(saved: dict[str, str], here: dict[str, str], what: str) -> str:
    """'{what} for devices 4 cpu, not 2 cpu', of the first difference; '' if there is none."""
    different = (key for key in here if saved.get(key) != here[key])
    return next((f"{what} for {key} {saved.get(key) or 'none'}, not {here[key] or 'none'}" for key in different), "")


def _matters(flag: str, on_cpu: bool) -> bool:
    without_effect = ("--xla_dump_", "--xla_force_host_platform_device_count", *(() if on_cpu else ("--xla_cpu_",)))
    return not flag.startswith(without_effect)


def fingerprint(stablehlo: str, options: dict[str, Any]) -> str:
    """Hash of a program before compilation. It is the same in all processes that lower it for the same devices."""
    head, *functions = re.split(r"^  (?=func\.func )", stablehlo.rstrip().removesuffix("}"), flags=re.MULTILINE)
    bodies = {found[1]: body for body in functions if (found := FUNCTION.search(body))}

    @functools.cache
    def digest(name: str) -> str:
        body = FUNCTION.sub("", bodies[name], count=1).strip()
        called = FUNCTION.sub(lambda found: digest(found[1]) if found[1] in bodies else found[0], body)
        return hashlib.sha256(called.encode()).hexdigest()

    # Names of functions, and whether two equal ones are one, depend on what the process traced before (JAX 0.11).
    main = digest("main") if "main" in bodies else ""
    module = re.sub(r"^module @\S+", "", head)
    return hashlib.sha256(f"{sorted(options.items())}{module}{main}".encode()).hexdigest()


def step_name(microbatches: int, length: int | None, measures: bool, exchanges: bool = False) -> str:
    """Name of a train step. length: of its sequences, if others differ. measures: it measures the noise scale, and others do
    not. exchanges: it synchronises a fragment of DiLoCo's replicas, and others do not."""
    name = f"train step of {microbatches} microbatch{'es' if microbatches > 1 else ''}"
    name += f", sequences of {length}" if length else ""
    return name + ", measuring the noise scale" * measures + ", synchronising replicas" * exchanges


class SavedPrograms:
    """The saved programs of run.compilation_cache, for a run on `mesh`. Every process of a run asks for the same programs in
    the same order, and all take one or none does.

    Attributes:
      taken: number of programs taken.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self._config, self._mesh, self.taken = config, mesh, 0
        self._folder = Path(config.run.compilation_cache)
        self._warned = False
        self._manifest = None if config.run.compilation_cache in ("auto", "off") else self._read()

    def _read(self) -> Manifest | None:
        manifest, problem = None, ""
        try:
            self._folder = self._folder.expanduser()
            manifest = read_manifest(self._folder)
            if manifest is not None:
                problem = unlike(manifest.machine, machine_of(self._mesh), f"The programs in {self._folder} are")
                if any(is_open_to_all(path) for path in (self._folder, store_of(self._folder).folder)):
                    problem = f"Every user of this machine may write into {self._folder}, whose programs would run as you"
        except (OSError, RuntimeError, RefusedInput) as error:
            problem = f"{self._folder / MANIFEST} cannot be read ({error})"
        text = "" if manifest is None else manifest.text()
        seen = distributed.exchange(text, lambda texts: "differ" if len(set(texts)) > 1 else "agree")
        if seen == "differ":
            problem = problem or f"The hosts see different programs in {self._folder}, which should be on a shared disk"
        # All take part in each exchange, or none does.
        return manifest if self._agreed(problem) else None

    def take(self, name: str, lowered: Any, options: dict[str, Any]) -> Any:
        """The saved program, as a jax.stages.Compiled; None if it is not there or does not load."""
        if self._manifest is None:
            return None
        compiled, problem, key = None, "", fingerprint(lowered.as_text(), options)
        if key in self._manifest.left:
            return None
        if key not in self._manifest.programs:
            problem = f"{self._folder} holds no {name} of this config{self._difference()}"
        elif (stored := store_of(self._folder).get(key)) is None:
            problem = f"The {name} in {self._folder} is damaged"
        else:
            devices = list(self._mesh.devices.flat)
            trees = jax.tree.structure(lowered.args_info), lowered.out_tree
            try:
                compiled = serialize_executable.deserialize_and_load(
                    stored, *trees, backend=devices[0].client, execution_devices=devices
                )
            except Exception as error:
                problem = (
                    f"The {name} in {self._folder} does not load ({[*str(error).splitlines(), type(error).__name__][0][:200]})"
                )
        if not self._agreed(problem):
            return None
        self.taken += 1
        return compiled

    def wrap(self, name: str, jitted: Any) -> Callable:
        """`jitted`, or a function that does the same by saved programs where they fit."""
        if self._manifest is None:
            return jitted
        programs: dict[Any, Any] = {}

        def call(*arguments: Any) -> Any:
            shapes = tuple(getattr(x, "shape", ()) for x in jax.tree.leaves(arguments))
            if shapes not in programs:
                programs[shapes] = self.take(name, jitted.lower(*arguments), {}) or jitted
            return programs[shapes](*arguments)

        return call

    def _agreed(self, problem: str) -> bool:
        """Whether no process has a problem. The first one is logged, once."""
        problem = distributed.first_nonempty(problem)
        if problem and not self._warned:
            self._warned = True
            log.warning("%s: what does not fit is compiled. Run `jaxllm compile --save` again for this run.", problem)
        return not problem

    def _difference(self) -> str:
        assert self._manifest is not None, "take asks only then"
        before, now = self._manifest.config, self._config.model_dump(mode="json")
        keys = [
            f"{section}.{key}"
            for section in ("model", "parallel", "data", "optimizer", "train")
            for key in now[section]
            if not key.startswith("eval_") and checked(before.get(section, {}), dict[str, Any]).get(key) != now[section][key]
        ]
        return f", which differs from the saved one in {', '.join(keys)}" if keys else ""
