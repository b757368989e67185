"""All that jaxllm uses of JAX's private modules. Tried with JAX 0.10 to 0.12; each function says what another JAX gets."""

import logging
import threading
from types import ModuleType
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

log = logging.getLogger(__name__)


def cudnn_binding() -> ModuleType:
    """cuDNN's fused attention with its backward pass: JAX's public function has no backward that takes a log-sum-exp.

    Raises:
      ImportError: this JAX has no such module. model/cudnn_attention.py turns it into a sentence.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def empty_on_host(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array in the host's memory whose content is undefined, as `lax.scan` allocates its results.

    Zeros moved to the host would first be allocated on the device, complete, and cross the link in every step. That is the
    fallback for a JAX that allocates otherwise.
    """
    try:
        from jax._src.lax.lax import empty2

        return jax.lax.broadcast(empty2(dtype, memory_space=jax.memory.Space.Host), shape)
    except (ImportError, TypeError):
        return jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)


def without_dead_code(jaxpr: Any) -> Any:
    """A traced program without the equations whose results nothing reads, which XLA would drop; as it is with another JAX."""
    try:
        from jax.interpreters.partial_eval import dce_jaxpr

        program = jaxpr.jaxpr
        return jaxpr.replace(jaxpr=dce_jaxpr(program, [True] * len(program.outvars))[0])
    except (AttributeError, ImportError, TypeError):
        return jaxpr


def coordination_client() -> Any:
    """Client of the key-value store of jax.distributed, which has no public API; None in a run of one process.

    Raises:
      ImportError: this JAX has no such module.
    """
    from jax._src import distributed

    return distributed.global_state.client


def has_backends() -> bool:
    """Whether JAX has started a backend. The public ways to ask would start one. False if this JAX does not tell."""
    try:
        from jax._src import xla_bridge
    except ImportError:
        return False
    return bool(getattr(xla_bridge, "_backends", None))


_own_cache: dict[str, Any] = {}


def keep_programs_in(store: Any) -> bool:
    """Makes `store` JAX's persistent compilation cache, and lets every process of a run write what it compiled. JAX lets only
    process 0, whose entries the others cannot find: on CPU the key contains the process, and a disk may be a host's own.

    Args:
      store: a machine.program_cache.ProgramStore; None: JAX's own files again, where its options ask for a cache.

    Returns:
      Whether this JAX takes the store; with another one its own files stay.
    """
    try:
        from jax._src import compilation_cache, compiler

        put, reset = compilation_cache.put_executable_and_time, compilation_cache.reset_cache
        _own_cache.setdefault("get", compilation_cache.get_file_cache)
        _own_cache.setdefault("write", compiler._cache_write)
    except (ImportError, AttributeError):
        return False

    def write(key, seconds, name, backend, executable, host_callbacks=()):
        # A program for devices that are not here can be written, but nobody can read it.
        if backend.runtime_type == "compile_only_runtime" or not store.compiled_in(key, seconds) or host_callbacks:
            return
        try:
            put(key, name, executable, backend, int(seconds))
        except Exception as error:
            # JAX does the same: XLA cannot store every program.
            log.debug("%s is not stored: %s", name, error)

    is_own = store is None
    compilation_cache.get_file_cache = _own_cache["get"] if is_own else lambda path: (store, path)
    compiler._cache_write = _own_cache["write"] if is_own else write
    reset()
    return True


class _Channels:
    """Stands in for JAX's COLLECTIVE_CHANNEL_ID, 1 for every collective of a program, while a program for CPUs is lowered."""

    FIRST = 1 << 20
    """JAX counts the channels of callbacks from 2."""

    def __init__(self):
        self.last = self.FIRST

    def __index__(self) -> int:
        self.last += 1
        return self.last

    def __add__(self, other: int) -> int:
        return 1 + other


_lower: Any = None


def number_collectives() -> bool:
    """Gives each collective of a program for CPU devices a channel of its own, from now on in this process.

    XLA's CPU devices meet by run, group and channel. JAX gives all collectives one channel, in the belief that it does not
    matter. But XLA's executor may start a collective before a loop above it has ended (xla_flags.py): what one device brings to
    the loop's all-gather then meets what another brings to the next one. XLA aborts ("Unexpected number of participants"), or
    numbers are wrong: 1 of about 500 steps of ZeRO 3 on 8 devices, and none of 14,400 with a channel for each.

    Returns:
      Whether this JAX lets its collectives be numbered; with another one they keep their one channel.
    """
    global _lower
    try:
        from jax._src.interpreters import mlir
        from jax._src.lax import parallel

        lower, one, uncacheable = mlir.lower_jaxpr_to_module, mlir.COLLECTIVE_CHANNEL_ID, mlir._uncacheable_primitives
    except (ImportError, AttributeError):
        return False
    if lower is _lower:
        return True
    # JAX lowers equal equations once, as a function, with which they would share a channel.
    collectives = {p for p in vars(parallel).values() if isinstance(p, jax.extend.core.Primitive)} - uncacheable
    lock = threading.Lock()

    def lower_jaxpr_to_module(*args, platforms, **kwargs):
        if tuple(platforms) != ("cpu",):
            return lower(*args, platforms=platforms, **kwargs)
        with lock:
            mlir.COLLECTIVE_CHANNEL_ID = _Channels()
            uncacheable.update(collectives)
            try:
                return lower(*args, platforms=platforms, **kwargs)
            finally:
                mlir.COLLECTIVE_CHANNEL_ID = one
                uncacheable.difference_update(collectives)

    _lower = mlir.lower_jaxpr_to_module = lower_jaxpr_to_module
    return True


def in_row_major(x: jax.Array) -> jax.Array:
    """`x` in the memory layout in which its last dim is the fastest. JAX's layouts are public, but experimental."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
