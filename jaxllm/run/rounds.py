"""The compiled outer step of DiLoCo's replicas (train/diloco.py), and a run's rounds after a resumption."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.cluster import distributed, progress
from jaxllm.config import Config
from jaxllm.config.rounds import EXCHANGE_SCOPE as SCOPE
from jaxllm.config.rounds import fragment_beside, fragments_after
from jaxllm.machine import xla_flags
from jaxllm.mesh.axes import replicated
from jaxllm.train import diloco
from jaxllm.train.build import State
from jaxllm.train.diloco import OUTER, DilocoState, Metrics, outer_step, outer_step_of

# --------------------------------------------------------------------------------------------------------- early exchange
# Makes XLA begin the exchange between replicas at the start of the step beside it (train.diloco_overlap).
#
# XLA's scheduler begins a collective as long before its end as it believes it to take: an all-reduce as long as some matmuls,
# whatever the network, and less than a loop over layers. So most of the step would be over when the exchange begins. A profile
# may give it other times by the names of instructions (XLA's profile-guided latency estimator). Only a compiled program has the
# names, so such a step is compiled twice.
#
# The profile itself is an option of JAX's, not a file that XLA reads: so JAX's cache of compiled programs knows its content.

log = logging.getLogger(__name__)

_START = re.compile(rf'^\s*%(\S+-start\S*) = .*op_name="[^"]*\b{SCOPE}/shard_map\b', re.MULTILINE)
_LATENCY_US = 10**12
_ESTIMATES = ("xla_gpu_pgle_profile_file_or_directory_path", "xla_gpu_enable_latency_hiding_scheduler")
"""Flags of a user who has a profile, or decides about the scheduler that reads it."""
_GPU_OPTIONS: dict[str, Any] = {
    # Also beside loops with collectives, which count as all that they send. With 4 an exchange of ZeRO 3 x tensor ranks still
    # waited for the loops.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
    # Instructions without a time in the profile keep XLA's own: no reason for a warning each.
    "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
}


def early_exchange(lowered: Any, options: dict[str, Any], device: jax.Device) -> dict[str, Any]:
    """Options to compile a step with an exchange: `options`, and those with which the exchange begins as soon as it can. The
    user's XLA_FLAGS take precedence. The step, `lowered`, is compiled once here.
    """
    if device.platform == "cpu":
        return options
    given = set(xla_flags.flag_names())
    text = "" if given.intersection(_ESTIMATES) else lowered.compile(compiler_options=options).as_text()
    profile = "".join(f'costs {{ name: "{name}" cost_us: {_LATENCY_US} }}\n' for name in _START.findall(text or ""))
    if jax.process_count() > 1:
        what = "compiled different exchanges between replicas; give all hosts the same packages, flags and cache of programs"
        distributed.require_same(profile, what)
    if not profile:
        if text:
            log.warning("XLA's program has no transfer between replicas that could begin early (train.diloco_overlap).")
        return options
    wanted = {name: value for name, value in _GPU_OPTIONS.items() if name not in given and xla_flags.is_accepted(name, value)}
    return options | wanted | {"fdo_profile": profile.encode()}


# ----------------------------------------------------------------------------------------------------------------- rounds


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


def layout_in(meta: Mapping[str, Any], layout: State) -> State:
    """What to read from the checkpoint with this metadata. layout: the state of the run, as ShapeDtypeStructs."""
    if not meta["config"]["train"].get("skip_spikes", False):
        layout = layout.with_recent(None)
    return diloco.as_saved(layout, meta) if isinstance(layout, diloco.DilocoState) else layout


def completed(state: State, layout: State, meta: Mapping[str, Any]) -> State:
    """A state that was read from the checkpoint with this metadata, with what that lacks. The usual level of losses is learnt
    again, nothing waits to be sent, and replicas join that were not there (`joined`)."""
    if state.recent is None and layout.recent is not None:
        state = state.with_recent(_zeros(layout.recent))
    if not isinstance(state, diloco.DilocoState) or not isinstance(layout, diloco.DilocoState):
        return state
    if state.residual is None and layout.residual is not None:
        state = dataclasses.replace(state, residual=_zeros(layout.residual))
    saved, replicas = meta["config"]["parallel"]["replica"], layout.islands.step.shape[0]
    if saved == replicas:
        return state
    rest = f"{replicas - saved} begin from the weights of the last outer step" if replicas > saved else "the others leave"
    log.warning(
        "The checkpoint has %d DiLoCo replicas and the run %d: the first %d continue, %s.",
        *(saved, replicas, min(saved, replicas), rest),
    )
    return joined(state, saved) if replicas > saved else state


def joined(state: diloco.DilocoState, saved: int) -> diloco.DilocoState:
    """`state`, which has replicas of zeros from number `saved` on. Each of these begins with the weights of the last outer
    step, the moments of the first replica, and nothing to send."""

    def begin(state: diloco.DilocoState) -> diloco.DilocoState:
        was_there = jnp.arange(state.islands.step.shape[0]) < saved
        islands = jax.tree.map(lambda x: diloco.where_replica(was_there, x, x[:1]), state.islands)
        params = jax.tree.map(lambda x, t: diloco.where_replica(was_there, x, t[None]), state.islands.params, state.params)
        return dataclasses.replace(state, islands=dataclasses.replace(islands, params=params))

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(state)


def _zeros(layout: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), layout)
