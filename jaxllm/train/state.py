"""The training state: step, master parameters, optimizer moments. All float32, born in the layout they live in.

Moments, and master parameters too, may lie in the pinned memory of the host (parallel.offload_state). Nothing else says so but
their shardings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from jaxllm.config import Config
from jaxllm.mesh import HOST, replicated
from jaxllm.parallel.types import Parallelized

log = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: jax.Array
    """Steps done, int32."""
    params: Any
    """Master parameters, float32, a nested dict."""
    opt_state: Any
    recent: Any = None
    """The last losses and gradient norms (instability.Recent), with train.skip_spikes."""

    def with_recent(self, recent: Any) -> TrainState:
        return replace(self, recent=recent)


def state_shardings(
    parallelized: Parallelized, optimizer: optax.GradientTransformation, mesh: Mesh, offload: str = "none"
) -> TrainState:
    """The layout of a TrainState: moments lie as their parameter does, counters everywhere.

    Args:
      offload: as parallel.offload_state.
    """
    host = _in_host_memory if offload != "none" else lambda sharding: sharding
    params = parallelized.master_shardings
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parallelized.table)
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: host(sharding),
        jax.eval_shape(optimizer.init, shapes),
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    # Where the step lies, in the place of the step.
    step: Any = replicated(mesh)
    return TrainState(step, jax.tree.map(host, params) if offload == "optimizer_and_master" else params, moments)


def what_to_offload(config: Config, mesh: Mesh) -> str:
    """parallel.offload_state; none, with a line in the log, where the devices know no pinned host memory. GPUs do, and so do
    CPUs in the versions of JAX this was written with: there it is a label on the same memory.
    """
    offload, device = config.parallel.offload_state, mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    # Described devices (aot.py) and those of other hosts list no memory.
    if offload == "none" or not kinds or HOST in kinds:
        return offload
    log.warning("This %s has no %s memory: parallel.offload_state=%s changes nothing here.", device.platform, HOST, offload)
    return "none"


def _in_host_memory(sharding: NamedSharding) -> NamedSharding:
    there = sharding.with_memory_kind(HOST)
    if there.memory_kind == HOST:
        return there
    # JAX drops the kind where devices are only described, unless the mesh has none.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def on_device(arrays: Any) -> Any:
    """The same arrays in the memory of the devices, wherever they lie."""

    def move(x: jax.Array) -> jax.Array:
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == HOST else x

    return jax.tree.map(move, arrays)
