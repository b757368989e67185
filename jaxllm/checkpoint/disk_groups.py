"""Which processes of a run have one run.dir: those whose hosts share its disk, and those of one host.

Each process makes a file there and looks for those of the others. Of the processes with one run.dir, the lowest leads: it holds
the lock, fetches checkpoints and deletes old ones.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.config import ConfigError
from jaxllm.runtime import distributed
from jaxllm.untrusted import parse_json

SHARED_LIMIT_S = 20
"""Seconds that a process looks for the files of others: NFS may need some seconds to show them."""


@dataclass(frozen=True)
class DiskGroups:
    leaders: tuple[int, ...]
    """By rank, the lowest process with the same run.dir."""

    @property
    def is_one(self) -> bool:
        """Whether all processes have the same run.dir."""
        return not any(self.leaders)

    @property
    def leads(self) -> bool:
        """Whether this process is the leader of its run.dir."""
        rank = jax.process_index()
        return self.leaders[rank] == rank


def find_disk_groups(run_dir: Path) -> DiskGroups:
    """The processes by their run directories; every process must call it. If not all share it, that takes SHARED_LIMIT_S."""
    count, rank = jax.process_count(), jax.process_index()
    if count == 1:
        return DiskGroups((0,))
    name = distributed.broadcast(f".shared-{uuid.uuid4().hex}")
    own = run_dir / f"{name}-{rank}"
    own.touch()
    try:
        distributed.broadcast("written")
        deadline, unseen = time.monotonic() + SHARED_LIMIT_S, set(range(count))
        while True:
            # Listing the folder makes NFS refresh it.
            os.listdir(run_dir)
            unseen = {other for other in unseen if not (run_dir / f"{name}-{other}").exists()}
            if not unseen or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        seen = sorted(set(range(count)) - unseen)
        return DiskGroups(tuple(parse_json(distributed.exchange(json.dumps(seen), _leaders))))
    finally:
        own.unlink(missing_ok=True)


def not_shared(run_dir: Path, groups: DiskGroups) -> ConfigError:
    """The error of a run that needs one run.dir, and has several."""
    stranger = next(rank for rank, leader in enumerate(groups.leaders) if leader)
    return ConfigError(
        f"run.dir={run_dir} of process {stranger} is not that of process 0: put it on storage that all hosts share, or set "
        f"checkpoint.store=s3://BUCKET/PREFIX."
    )


def _leaders(texts: Sequence[str]) -> str:
    """The lowest process of each process's group, by rank; `texts` are those that each sees. One that sees another shares its
    disk: the other may see it later.
    """
    leaders = list(range(len(texts)))
    for rank, text in enumerate(texts):
        joined = {leaders[one] for one in (rank, *parse_json(text))}
        leaders = [min(joined) if leader in joined else leader for leader in leaders]
    return json.dumps(leaders)
