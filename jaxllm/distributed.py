"""Process start-up: which devices this process drives, alone or as one of many."""

from __future__ import annotations

import logging

import jax

from jaxllm import xla_flags
from jaxllm.config import ConfigError, RunConfig

log = logging.getLogger(__name__)


def start(run: RunConfig) -> None:
    """Sets JAX up for a run. Call it before anything touches a device; a second call in one process must ask for the same.

    Raises:
      ConfigError: JAX runs already, with other devices than run.cpu_devices asks for.
    """
    xla_flags.apply(run)
    if run.cpu_devices is None:
        return
    if _already_started():
        if jax.default_backend() != "cpu" or jax.device_count() != run.cpu_devices:
            raise ConfigError(
                f"run.cpu_devices={run.cpu_devices}, but JAX already runs on {jax.device_count()} {jax.default_backend()} "
                f"devices in this process: start a new one (in a notebook, restart the kernel)."
            )
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", run.cpu_devices)


def is_main_process() -> bool:
    """The one process that writes logs, metrics and the config."""
    return jax.process_index() == 0


def _already_started() -> bool:
    # Public since 0.4.36 as jax.extend.backend? No: only the private module knows without starting a backend.
    from jax._src import xla_bridge

    return bool(getattr(xla_bridge, "_backends", None))
