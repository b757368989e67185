"""The XLA programs of a run: which there are, each compiled before its first use, or taken from those that `jaxllm compile
--save DIR` compiled (run.compilation_cache=DIR).

A saved program is named by its fingerprint: a hash of what XLA would compile, and of the options. The manifest beside the
programs says for which machine they are. A program that does not fit is compiled, and one sentence says why.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxllm.cluster import distributed
from jaxllm.config import Config
from jaxllm.config.rounds import exchanges_beside_steps, sends_codes, without_rounds
from jaxllm.cost_model.memory import may_fit
from jaxllm.machine import program_cache, xla_flags
from jaxllm.machine.host import installed
from jaxllm.machine.program_cache import MANIFEST, ProgramStore, identity, is_open_to_all
from jaxllm.machine.xla_flags import compile_options
from jaxllm.mesh.axes import batch_sharding, replicated
from jaxllm.mesh.placement import hosts_of
from jaxllm.parallel.device_batches import evaluated_microbatches
from jaxllm.run.memory_check import total_bytes
from jaxllm.run.rounds import Rounds, early_exchange, layout_of_number
from jaxllm.train import diloco
from jaxllm.train.build import Given, State, Training, build_trainings
from jaxllm.untrusted import RefusedInput, checked, read_json

# ------------------------------------------------------------------------------------------------------ programs of a run
# All can be compiled before the run (compile/save.py). A Trainer takes these functions with its arrays; here they get shapes.

INITIAL_STATE, EVALUATION, TOKEN_LOSSES = "initial state", "evaluation", "token losses"
FIRST_ROUND = "start of the first round"


def jit_function(function: Callable, mesh: Mesh) -> Any:
    """A function (weights, batch) of Parallelized, whose results all devices get."""
    return jax.jit(function, out_shardings=replicated(mesh))


def layer_norms_name(length: int | None) -> str:
    """length: of the sequences, if others differ."""
    return f"layer norms{f', sequences of {length}' if length else ''}"


def jit_first_round(training: Training, config: Config) -> Any:
    """State of ordinary steps -> the state in rounds (train/diloco.py), which `training` is for."""
    begin = partial(diloco.begin, replicas=config.parallel.replica, codes=sends_codes(config))
    return jax.jit(begin, out_shardings=training.shardings)


def batch_layout(
    config: Config, mesh: Mesh, microbatches: int, rows: int, trains: bool = True
) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch [microbatch, sequence, position] as shapes with shardings: one that a step trains on, or one to evaluate."""
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "mask": jnp.bool_}
    if config.data.mask_documents:
        dtypes["segments"] = jnp.int32
    if config.train.loss == "dpo" and trains:
        dtypes["reference"] = jnp.float32
    shape, sharding = (microbatches, rows, config.train.sequence_length), batch_sharding(mesh)
    layout = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    if (vision := config.model.vision) is not None and config.images_per_sequence:
        pixels = (*shape[:2], config.images_per_sequence, *vision.pixels)
        layout["images"] = jax.ShapeDtypeStruct(pixels, jnp.float32, sharding=sharding)
    return layout


@dataclass(frozen=True)
class RunProgram:
    """A program before it is lowered."""

    name: str
    jitted: Any
    arguments: tuple[Any, ...]
    """Shapes with shardings."""
    options: dict[str, Any] = field(default_factory=dict)
    """Compiler options."""
    exchanges: bool = False
    """Whether it is a step with an exchange between replicas."""


def run_programs(config: Config, mesh: Mesh) -> Iterator[RunProgram]:
    """The programs of a run of a resolved config, from its initial state to its last evaluation. Sampling text at the end, and
    reading a checkpoint, compile small programs of their own.
    """
    of_first = build_trainings(without_rounds(config), mesh)
    first = of_first[1]
    yield RunProgram(INITIAL_STATE, first.jit_create(), (config.train.seed,))
    trainings, outer = [(of_first, 0, config.train.steps)], cast(Any, None)
    if config.train.diloco_steps is not None:
        of_rounds, begin = build_trainings(config, mesh), config.train.diloco_after_steps
        trainings, rounds = [(of_first, 0, begin), (of_rounds, begin, config.train.steps)], of_rounds[1]
        yield RunProgram(FIRST_ROUND, jit_first_round(rounds, config), (first.layout(),))
        outer = Rounds(config, mesh, rounds.shardings)  # type: ignore[arg-type]
        yield RunProgram(outer.name, outer.jitted_step, (rounds.layout(), layout_of_number(mesh)))
    ends = [*(phase.first_step for phase in config.phases[1:]), config.train.steps]
    for by_parts, begin, end in trainings:
        for phase, phase_end in zip(config.phases, ends, strict=True):
            if max(begin, phase.first_step) >= min(end, phase_end):
                continue
            of_phase = config.in_phase(phase) if config.has_phases else config
            device, M = mesh.devices.flat[0], of_phase.num_microbatches
            options = compile_options(of_phase, device, may_fit(of_phase, device))
            batch = batch_layout(of_phase, mesh, M, of_phase.microbatch_rows)
            training, length = by_parts[phase.parts], config.length_of(phase)
            steps, of_step = range(max(begin, phase.first_step), min(end, phase_end)), (training.layout(), batch)
            # Whether a step synchronises a fragment.
            kinds = {False} if training.outer is None else {outer.fragment_beside(step) is not None for step in steps}
            for step, exchanges in itertools.product(filter(None, (training.step, training.measuring_step)), sorted(kinds)):
                name = step_name(M, length, step is training.measuring_step, exchanges)
                number = (layout_of_number(mesh),) if exchanges else ()
                crosses = exchanges and exchanges_beside_steps(config)
                yield RunProgram(name, training.jit_step(step, exchanges), (*of_step, *number), options, crosses)
            if config.layer_norms_every is not None:
                norms = jit_function(training.functions.layer_norms, mesh)
                yield RunProgram(layer_norms_name(length), norms, (training.layout().params, batch))
    last = trainings[-1][0][1]
    batch = batch_layout(config, mesh, evaluated_microbatches(config), config.microbatch_rows, trains=False)
    pairs, functions = config.train.loss == "dpo", last.functions
    name, function = (TOKEN_LOSSES, functions.token_losses) if pairs else (EVALUATION, functions.loss_sum)
    yield RunProgram(name, jit_function(function, mesh), (last.layout().params, batch))


# --------------------------------------------------------------------------------------------------------- compiled steps


class Programs:
    """What a Trainer runs on its devices: its steps, one program per number of microbatches and length; others for steps that
    measure the noise scale, if not all do, and for steps that synchronise a fragment (train.diloco_overlap); and beside them
    the functions below, jitted.

    Args:
      given: the loss and the optimizer that take the place of the usual ones.
      saved: programs that `jaxllm compile --save` compiled for this run.

    Attributes:
      training, functions: what the programs are of: train.build.Training, and its functions.
      rounds: schedule of DiLoCo's outer steps (run/rounds.py) once rounds have begun; None before, and without DiLoCo.
      loss_sum, token_losses: functions of Parallelized, jitted.
      current: the step's program for the present batch; None before the first compilation.
      compile_s: seconds to compile it; None until then.
      step_bytes: most bytes that XLA reserves on a device for one of the steps compiled so far; 0 if it does not tell.
      from_cache: whether the last program came from the persistent cache, or was saved by `jaxllm compile`.
      traces: number of times a step was traced.
    """

    def __init__(self, config: Config, mesh: jax.sharding.Mesh, given: Given, saved: SavedPrograms):
        self._config, self._mesh, self._given, self.saved = config, mesh, given, saved
        self.current: Any = None
        self.compile_s: float | None = None
        self.from_cache = False
        self.step_bytes = self.traces = 0
        self.use(in_rounds=False)

    def use(self, in_rounds: bool) -> None:
        """Switches to the programs of steps in rounds (train/diloco.py) or of ordinary ones, each compiled when it is needed.
        The caller converts the state.
        """
        config, mesh = self._config if in_rounds else without_rounds(self._config), self._mesh
        self._trainings = trainings = build_trainings(config, mesh, self._given)
        self.training = training = trainings[1]
        self.functions = training.functions
        self.rounds = Rounds(config, mesh, training.shardings) if in_rounds else None  # type: ignore[arg-type]

        def wrapped(name: str, function: Callable) -> Callable:
            return self.saved.wrap(name, jit_function(function, mesh))

        self.loss_sum = wrapped(EVALUATION, self.functions.loss_sum)
        self.token_losses = wrapped(TOKEN_LOSSES, self.functions.token_losses)
        names = {phase.parts: layer_norms_name(config.length_of(phase)) for phase in config.phases}
        self._layer_norms = {parts: wrapped(name, trainings[parts].functions.layer_norms) for parts, name in names.items()}
        self._programs: dict[tuple[int, int, bool, bool], Any] = {}

    def initial_state(self) -> State:
        return self.saved.wrap(INITIAL_STATE, self.training.jit_create())(self._config.train.seed)

    def first_round(self, state: State) -> State:
        """State of ordinary steps -> the state in rounds, which `use` has switched to."""
        return self.saved.wrap(FIRST_ROUND, jit_first_round(self.training, self._config))(state)

    def bring_together(self, state: State, step: int) -> tuple[State, dict[str, Any]]:
        """Runs the outer steps that follow inner step `step`, and returns their metrics."""
        if self.rounds is None:
            return state, {}
        return self.rounds.bring_together(state, step, partial(self.saved.take, options={}))

    def layer_norms(self, state: State, batch: Any, step: int) -> dict[str, jax.Array]:
        """The norm of each layer's output in the step that follows `step` steps."""
        return self._layer_norms[self._config.phase_at(step).parts](state.params, batch)

    def select(self, batch: Any, step: int) -> bool:
        """Selects the program of the step that follows `step` steps. Returns False if it is not compiled yet."""
        if (key := self._key(batch, step)) not in self._programs:
            return False
        self.current = self._programs[key]
        return True

    def compile(self, state: State, batch: Any, step: int) -> None:
        """Compiles the program of the step that follows `step` steps, and selects it."""
        started, before = time.perf_counter(), program_cache.counts()
        config, phase = self._config, self._config.phase_at(step)
        if config.has_phases:
            config = config.in_phase(phase)
        device = self._mesh.devices.flat[0]
        options = xla_flags.compile_options(config, device, may_fit(config, device))
        microbatches, parts, measures, exchanges = key = self._key(batch, step)
        training = self._trainings[parts]
        own_step: Any = training.measuring_step if measures else training.step

        def counted(state, batch):
            self.traces += 1
            return own_step(state, batch)

        lowered = training.jit_step(counted, exchanges).lower(state, batch, *self._fragment(step))
        if jax.process_count() > 1:
            what = "lowered different train steps; give all hosts the same packages, flags and environment variables"
            distributed.require_same(fingerprint(lowered.as_text(), options), what)
        name = step_name(microbatches, self._config.length_of(phase), measures, exchanges)
        taken = self.saved.take(name, lowered, options)
        if taken is None and exchanges and exchanges_beside_steps(config):
            options = early_exchange(lowered, options, self._mesh.devices.flat[0])
        self.current = self._programs[key] = taken or lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - started
        # Not every backend of JAX reports it.
        if (memory := self.current.memory_analysis()) is not None:
            self.step_bytes = max(self.step_bytes, total_bytes(memory))
        now = program_cache.counts()
        self.from_cache = taken is not None or (now.found > before.found and now.compiled == before.compiled)

    def run(self, state: State, batch: Any, step: int) -> tuple[State, dict[str, Any]]:
        """Runs the selected program, which is that of the step that follows `step` steps."""
        return self.current(state, batch, *self._fragment(step))

    def _fragment(self, step: int) -> tuple[jax.Array, ...]:
        """The number of the fragment that the step synchronises, if it does."""
        number = None if self.rounds is None else self.rounds.fragment_beside(step)
        return () if self.rounds is None or number is None else (self.rounds.number(number),)

    def _key(self, batch: Any, step: int) -> tuple[int, int, bool, bool]:
        """(number of microbatches, parts of a sequence, whether the program measures the noise scale, whether it synchronises a
        fragment)"""
        every, parts = self._config.log.noise_scale_every or 1, self._config.phase_at(step).parts
        measures = self._trainings[parts].measuring_step is not None and (step + 1) % every == 0
        return len(batch["tokens"]), parts, measures, bool(self._fragment(step))


# --------------------------------------------------------------------------------------------------------- saved programs

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
    """The manifest of a folder; None if it has none. OSError if it cannot be read, RefusedInput if it is of another format."""
    try:
        values = checked(read_json(folder / MANIFEST), dict[str, Any])
    except FileNotFoundError:
        return None
    if values.get("format") != FORMAT:
        raise RefusedInput(f"its format is {values.get('format')}, not {FORMAT}")
    return checked(values, Manifest)


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
        found["packages"] = ", ".join(installed(*PACKAGES))
    without_effect = ("--xla_dump_", "--xla_force_host_platform_device_count", *(() if on_cpu else ("--xla_cpu_",)))
    given = [flag.partition("=") for flag in xla_flags.given_flags().split() if not flag.startswith(without_effect)]
    # Of a flag that is there twice XLA takes the last.
    flags = {name: value for name, _, value in given}
    found["XLA_FLAGS"] = " ".join(f"{name}={value}" for name, value in sorted(flags.items()))
    found["JAX's options"] = " ".join(f"{name}={getattr(jax.config, name, None)}" for name in JAX_OPTIONS)
    return found


def unlike(saved: dict[str, str], here: dict[str, str], what: str) -> str:
    """'{what} for devices 4 cpu, not 2 cpu', of the first difference; '' if there is none."""
    different = (key for key in here if saved.get(key) != here[key])
    return next((f"{what} for {key} {saved.get(key) or 'none'}, not {here[key] or 'none'}" for key in different), "")


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


def step_name(microbatches: int, length: int | None, measures: bool, exchanges: bool) -> str:
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
            unsigned = "is not signed by your key, and a program of somebody else would run as you"
            problem = f"The {name} in {self._folder} {unsigned if store_of(self._folder).has_unsigned(key) else 'is damaged'}"
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
