"""When DiLoCo's replicas are synchronised (diloco.py), and the compiled outer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import Config
from jaxllm.config.rounds import fragments_of
from jaxllm.mesh import replicated
from jaxllm.runtime import progress
from jaxllm.train.diloco import OUTER, DilocoState, Metrics, outer_step, outer_step_of


class Rounds:
    """Decides when replicas are synchronised, and holds the compiled outer step.

    With train.diloco_overlap the outer step that is due after a step is a part of the next one (`beside`), and only those after
    the last step of the run are programs of their own.

    Args:
      shardings: shardings of the state.

    Attributes:
      jitted_step: the outer step: (state, number of the fragment) -> (state, metrics).
      name: its name.
    """

    def __init__(self, config: Config, mesh: Mesh, shardings: DilocoState):
        train, self.count = config.train, fragments_of(config)
        assert train.diloco_steps is not None, "there are no rounds"
        self._first, self._last, self._between = train.diloco_after_steps, train.steps, train.diloco_steps // self.count
        self._overlaps, self._mesh = train.diloco_overlap, mesh
        step = outer_step_of(config, mesh, shardings)
        step.__name__ = outer_step.__name__
        self.jitted_step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
        self.name = "outer step of a fragment" if self.count > 1 else "outer step"
        self._compiled: Any = None
        self._numbers: dict[int, jax.Array] = {}
        self._is_done_after: int | None = None

    def resumed(self, meta: Mapping[str, Any]) -> Rounds:
        """These rounds, continued from the checkpoint with this metadata: the outer step after its step may be done in it."""
        train = meta["config"]["train"]
        is_done = not train.get("diloco_overlap", False) or meta["step"] == train.get("steps")
        self._is_done_after = meta["step"] if is_done else None
        return self

    def fragments_after(self, step: int) -> list[int]:
        """The fragments that are synchronised between this step (the first is 1) and the next. It is a function of the step
        alone, so a resumed run continues its round."""
        if step == self._last:
            return list(range(self.count))
        return [] if self._overlaps or (due := self._due_after(step)) is None else [due]

    def fragment_beside(self, done: int) -> int | None:
        """The fragment that is synchronised during the step that follows `done` steps; None if there is none."""
        if not self._overlaps or done in (self._last, self._is_done_after):
            return None
        # Where each step between exchanges, the first and the last do too: that saves a program. The first has no effect.
        # After the last all fragments are synchronised.
        return self._due_after(done) if self._first < done < self._last - 1 or self._between == 1 else None

    def _due_after(self, step: int) -> int | None:
        done = step - self._first
        return None if done % self._between else done // self._between % self.count

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
        for number in map(self.number, self.fragments_after(step)):
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
