"""The compiled outer step of DiLoCo's replicas (diloco.py), and a run's rounds after a resumption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.config.rounds import fragment_beside, fragments_after
from jaxllm.mesh import replicated
from jaxllm.runtime import progress
from jaxllm.train.diloco import OUTER, DilocoState, Metrics, outer_step, outer_step_of


class Rounds:
    """Runs the outer steps that config/rounds.py says are due, and holds the compiled one.

    With train.diloco_overlap the outer step that is due after a step is a part of the next one (`beside`), and only those after
    the last step of the run are programs of their own.

    Args:
      shardings: shardings of the state.

    Attributes:
      jitted_step: the outer step: (state, number of the fragment) -> (state, metrics).
      name: its name.
    """

    def __init__(self, config: Config, mesh: Mesh, shardings: DilocoState):
        self._train, self._mesh = config.train, mesh
        step = outer_step_of(config, mesh, shardings)
        step.__name__ = outer_step.__name__
        self.jitted_step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
        self.name = "outer step of a fragment" if config.train.diloco_fragments > 1 else "outer step"
        self._compiled: Any = None
        self._numbers: dict[int, jax.Array] = {}
        self._done: tuple[int, list[int]] = 0, []

    def resumed(self, meta: Mapping[str, Any]) -> Rounds:
        """These rounds, continued from the checkpoint with this metadata: the outer step after its step may be done in it."""
        # Older checkpoints lack the first two.
        saved: Any = SimpleNamespace(**{"diloco_fragments": 1, "diloco_overlap": False} | meta["config"]["train"])
        done, count = fragments_after(saved, meta["step"]), self._train.diloco_fragments
        # Fragments of another number have other weights: each has something that is done.
        self._done = meta["step"], done if count == saved.diloco_fragments else list(range(count if done else 0))
        return self

    def fragment_beside(self, done: int) -> int | None:
        """The fragment that is synchronised during the step that follows `done` steps, unless the checkpoint has it already."""
        due = fragment_beside(self._train, done)
        return None if done == self._done[0] and due in self._done[1] else due

    def number(self, fragment: int) -> jax.Array:
        """The number as an argument of a compiled program."""
        if fragment not in self._numbers:
            sharding = replicated(self._mesh)
            copies = [jax.device_put(np.int32(fragment), device) for device in sharding.addressable_devices]
            self._numbers[fragment] = jax.make_array_from_single_device_arrays((), sharding, copies)
        return self._numbers[fragment]

    def bring_together(
        self, state: Any, step: int, take: Callable[[str, Any], Any] = lambda name, lowered: None
    ) -> tuple[Any, Metrics]:
        """Runs the outer steps that follow inner step `step`, which donate `state`. It is compiled at the first call, unless
        take(its name, lowered) returns the compiled program. Returns no metrics if there are none."""
        outer = []
        for number in map(self.number, fragments_after(self._train, step)):
            if self._compiled is None:
                with progress.phase("compile"):
                    lowered = self.jitted_step.lower(state, number)
                    self._compiled = take(self.name, lowered) or lowered.compile()
            state, metrics = self._compiled(state, number)
            outer.append(metrics)
        return state, {OUTER: outer} if outer else {}


def layout_of_number(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Rounds.number as a shape."""
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
