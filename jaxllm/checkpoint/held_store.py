"""What a run opens at its start and closes at its end: its store, and checkpoints of hosts that share no disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxllm.checkpoint.disk_groups import find_disk_groups, not_shared
from jaxllm.checkpoint.files import committed_steps
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints
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
    if distributed.is_main_process():
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


@contextmanager
def joined_checkpoints(
    run_dir: Path, config: CheckpointConfig, stored: StoredCheckpoints | None
) -> Iterator[tuple[bool, JoinedCheckpoints | None]]:
    """Whether this process leads those with its run.dir; and the run's checkpoints in its store, if its hosts share no disk,
    None if they do. Every process must call it.

    Args:
      stored: those of a run on a shared disk, on process 0.

    Raises:
      ConfigError: on all processes, if there is no store, one cannot use it, or the config needs a shared disk.
    """
    if not jax.distributed.is_initialized():
        # A run of one process, which may have no devices yet.
        yield True, None
        return
    groups = find_disk_groups(run_dir)
    if groups.is_one:
        yield groups.leads, None
        return
    if config.store is None:
        raise not_shared(run_dir, groups)
    if config.export_every_steps is not None:
        raise ConfigError(
            "checkpoint.export_every_steps reads whole checkpoints in run.dir, and these hosts share none: put run.dir on "
            "storage that all hosts share, or set checkpoint.export_every_steps=null and export a checkpoint of the store."
        )
    store = Store(config.store)
    lock = StoreLock(store) if stored is None else stored.lock
    joined = JoinedCheckpoints(store, lock, run_dir, config, groups)
    try:
        yield groups.leads, joined
    finally:
        joined.close()
