"""Reads a run directory without jaxllm, so that the code under test is not used to test itself."""

import json
from pathlib import Path
from typing import Any


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps, without those of evaluations."""
    return [line for line in records(folder) if "loss" in line]


def saved_state(folder: Path, step: int) -> Any:
    """All arrays of a checkpoint as numpy arrays."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    path, handler = folder / "checkpoints" / str(step) / "state", ocp.PyTreeCheckpointHandler()
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
    return handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
