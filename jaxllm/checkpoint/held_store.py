"""Holds a run's store from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxllm.checkpoint.files import committed_steps
from jaxllm.checkpoint.store import Store, StoreError, StoreLock, unusable
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.runtime import distributed
from jaxllm.runtime.shared_errors import raise_together


@contextmanager
def hold_store(run_dir: Path, config: CheckpointConfig) -> Iterator[tuple[StoredCheckpoints | None, bool]]:
    """Holds checkpoint.store for this run; every process must call it. Yields its checkpoints on process 0, None on the others
    and without a store; and whether there is one.

    Raises:
      ConfigError: on all processes, if another run holds the store, or it cannot be read and written.
    """
    if config.store is None:
        yield None, False
        return
    lock, stored, has_one, refusal = None, None, False, None
    # A process that runs alone has no number before JAX has devices, which are not needed yet.
    is_main = not jax.distributed.is_initialized() or distributed.is_main_process()
    if is_main:
        try:
            store = Store(config.store)
            lock = StoreLock(store)
            lock.take()
            has_one = bool(committed_steps(store.steps()))
            stored = StoredCheckpoints(store, lock, run_dir, config)
        except ConfigError as error:
            refusal = error
        except (StoreError, OSError) as error:
            refusal = unusable(config.store, error)
    try:
        raise_together(refusal)
        yield stored, bool(distributed.broadcast("yes" if has_one else ""))
    finally:
        if stored is not None:
            stored.close()
        if lock is not None:
            lock.release()
