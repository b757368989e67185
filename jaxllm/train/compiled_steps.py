"""The train step as XLA programs, each compiled before its first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.config.rounds import exchanges_beside_steps
from jaxllm.runtime import distributed, program_cache, xla_flags
from jaxllm.runtime.early_exchange import early_exchange
from jaxllm.train.build import State, Training
from jaxllm.train.rounds import Rounds
from jaxllm.train.saved_programs import SavedPrograms, fingerprint, step_name


class CompiledSteps:
    """One program per number of microbatches and length; others for steps that measure the noise scale, if not all do, and for
    steps that synchronise a fragment (train.diloco_overlap).

    Attributes:
      current: the program for the present batch; None before the first compilation.
      compile_s: seconds to compile it; None until then.
      from_cache: whether the last program came from the persistent cache, or was saved by `jaxllm compile`.
      traces: number of times a step was traced.
    """

    def __init__(self, config: Config, mesh: jax.sharding.Mesh, saved: SavedPrograms):
        self._config, self._mesh, self._saved = config, mesh, saved
        self.current: Any = None
        self.compile_s: float | None = None
        self.from_cache = False
        self.traces = 0

    def use(self, trainings: Mapping[int, Training], rounds: Rounds | None) -> None:
        """Switches to other train steps, by the parts that sequences are cut into. Their programs are compiled when they are
        needed."""

        def jitted(training: Training, step: Callable, exchanges: bool) -> Any:
            def counted(state, batch):
                self.traces += 1
                return step(state, batch)

            return training.jit_step(counted, exchanges)

        # {(parts, whether it measures the noise scale, whether it synchronises a fragment): jitted step}
        self._steps = {
            (parts, measures, exchanges): jitted(training, step, exchanges)
            for parts, training in trainings.items()
            for measures, step in enumerate((training.step, training.measuring_step))
            for exchanges in (False, True)[: 1 if training.outer is None else 2]
            if step is not None
        }
        self._rounds = rounds
        self._programs: dict[tuple[int, int, bool, bool], Any] = {}

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
        options = xla_flags.compile_options(config, self._mesh.devices.flat[0])
        key = self._key(batch, step)
        lowered = self._steps[key[1:]].lower(state, batch, *self._fragment(step))
        if jax.process_count() > 1:
            what = "lowered different train steps; give all hosts the same packages, flags and environment variables"
            distributed.require_same(fingerprint(lowered.as_text(), options), what)
        taken = self._saved.take(step_name(key[0], self._config.length_of(phase), *key[2:]), lowered, options)
        if taken is None and key[3] and exchanges_beside_steps(config):
            options = early_exchange(lowered, options, self._mesh.devices.flat[0])
        self.current = self._programs[key] = taken or lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - started
        now = program_cache.counts()
        self.from_cache = taken is not None or (now.found > before.found and now.compiled == before.compiled)

    def run(self, state: State, batch: Any, step: int) -> tuple[State, dict[str, Any]]:
        """Runs the selected program, which is that of the step that follows `step` steps."""
        return self.current(state, batch, *self._fragment(step))

    def _fragment(self, step: int) -> tuple[jax.Array, ...]:
        """The number of the fragment that the step synchronises, if it does."""
        number = None if self._rounds is None else self._rounds.fragment_beside(step)
        return () if self._rounds is None or number is None else (self._rounds.number(number),)

    def _key(self, batch: Any, step: int) -> tuple[int, int, bool, bool]:
        """(number of microbatches, parts of a sequence, whether the program measures the noise scale, whether it synchronises a
        fragment)"""
        every, parts = self._config.log.noise_scale_every, self._config.phase_at(step).parts
        measures = every is not None and (parts, True, False) in self._steps and (step + 1) % every == 0
        return len(batch["tokens"]), parts, measures, bool(self._fragment(step))
