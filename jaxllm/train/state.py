"""The training state: step, master parameters, optimizer moments. All are float32 and created with their final sharding; but
frozen parameters are in the compute dtype, and have no moments.

Moments, and optionally master parameters, may be in pinned host memory (parallel.offload_state). Only their shardings show
this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from jaxllm.config import Config
from jaxllm.config.types import MASTER_ON_HOST
from jaxllm.mesh.axes import HOST, replicated
from jaxllm.parallel.types import Parallelized

log = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: jax.Array
    """Number of steps done, int32."""
    params: Any
    """Master parameters, float32, and frozen ones in the compute dtype: a nested dict."""
    opt_state: Any
    recent: Any = None
    """The last losses and gradient norms (instability.Recent), with train.skip_spikes."""

    def with_recent(self, recent: Any) -> TrainState:
        return replace(self, recent=recent)


def state_shardings(
    parallelized: Parallelized, optimizer: optax.GradientTransformation, mesh: Mesh, offload: str = "none"
) -> TrainState:
    """Shardings of a TrainState: moments are sharded like their parameter; counters, and what has another shape than the
    parameter whose path it has, are replicated.

    Args:
      offload: the value of parallel.offload_state.
    """
    host = _in_host_memory if offload != "none" else lambda sharding: sharding
    params, trained = parallelized.master_shardings, parallelized.trained(parallelized.master)
    master = dict(jax.tree_util.tree_leaves_with_path(trained))

    # By path, because optax.tree_map_params (optax 0.2.8) cannot map optimizers whose parts are for some parameters.
    def sharding_of(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((master[path[at:]] for at in range(len(path)) if path[at:] in master), None)
        return host(found.sharding) if found is not None and found.shape == x.shape else replicated(mesh)

    moments = jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(optimizer.init, trained))
    # A tree of shardings, with the sharding of the step in its place.
    step: Any = replicated(mesh)
    if offload in MASTER_ON_HOST:
        params = jax.tree.map(lambda p, there: host(there) if p.trainable else there, parallelized.table, params)
    return TrainState(step, params, moments)


def what_to_offload(config: Config, mesh: Mesh) -> str:
    """The value of parallel.offload_state; none, with a log message, if the devices have no pinned host memory. GPUs have it,
    and so do CPUs in current JAX versions: there it is a label on the same memory.
    """
    offload, device = config.parallel.offload_state, mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    # Described devices (aot.py) and those of other hosts do not list memories.
    if offload == "none" or not kinds or HOST in kinds:
        return offload
    log.warning("This %s has no %s memory: parallel.offload_state=%s changes nothing here.", device.platform, HOST, offload)
    return "none"


def _in_host_memory(sharding: NamedSharding) -> NamedSharding:
    there = sharding.with_memory_kind(HOST)
    if there.memory_kind == HOST:
        return there
    # JAX drops the memory kind of merely described devices, unless the mesh has none.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def on_device(arrays: Any) -> Any:
    """Moves arrays from any memory to device memory."""

    def move(x: jax.Array) -> jax.Array:
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == HOST else x

    return jax.tree.map(move, arrays)
