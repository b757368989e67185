"""The train step as XLA programs, each compiled before its first use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.runtime import distributed, program_cache, xla_flags
from jaxllm.train.build import State, Training
from jaxllm.train.saved_programs import SavedPrograms, fingerprint, step_name


class CompiledSteps:
    """One program per number of microbatches, and one more for steps that measure the noise scale, if not all do.

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

    def use(self, training: Training) -> None:
        """Switches to another train step. Its programs are compiled when they are needed."""

        def jitted(step: Callable) -> Any:
            def counted(state, batch):
                self.traces += 1
                return step(state, batch)

            return training.jit_step(counted)

        self._step = jitted(training.step)
        self._measuring_step: Any = jitted(training.measuring_step) if training.measuring_step else None
        self._programs: dict[tuple[int, bool], Any] = {}

    def select(self, batch: Any, step: int) -> bool:
        """Selects the program of the step that follows `step` steps. Returns False if it is not compiled yet."""
        if (key := self._key(batch, step)) not in self._programs:
            return False
        self.current = self._programs[key]
        return True

    def compile(self, state: State, batch: Any, step: int) -> None:
        """Compiles the program of the step that follows `step` steps, and selects it."""
        started, before = time.perf_counter(), program_cache.counts()
        config = self._config.in_phase(self._config.phase_at(step)) if self._config.train.batch_schedule else self._config
        options = xla_flags.compile_options(config, self._mesh.devices.flat[0])
        key = self._key(batch, step)
        lowered = (self._measuring_step if key[1] else self._step).lower(state, batch)
        if jax.process_count() > 1:
            what = "lowered different train steps; give all hosts the same packages, flags and environment variables"
            distributed.require_same(fingerprint(lowered.as_text(), options), what)
        taken = self._saved.take(step_name(*key), lowered, options)
        self.current = self._programs[key] = taken or lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - started
        now = program_cache.counts()
        self.from_cache = taken is not None or (now.found > before.found and now.compiled == before.compiled)

    def _key(self, batch: Any, step: int) -> tuple[int, bool]:
        """(number of microbatches, whether the program measures the noise scale)"""
        every = self._config.log.noise_scale_every
        measures = every is not None and self._measuring_step is not None and (step + 1) % every == 0
        return len(batch["tokens"]), measures
