"""Saving and resuming a run. Orbax writes each checkpoint aside and renames it when it is whole."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxllm.config import CheckpointConfig
from jaxllm.train.state import TrainState


class Checkpoints:
    """The checkpoints of one run directory, by step."""

    def __init__(self, run_dir: Path, config: CheckpointConfig):
        self._manager = ocp.CheckpointManager(
            run_dir.absolute() / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=config.keep, save_interval_steps=1),
        )

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving `state` as of `step`; training may go on. A step that is saved already is left as it is."""
        if step != self.latest_step:
            self._manager.save(step, args=ocp.args.StandardSave(_as_dict(state)))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, laid out as `like` (arrays, or ShapeDtypeStructs with shardings)."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _as_dict(like))
        restored = self._manager.restore(self.latest_step, args=ocp.args.StandardRestore(abstract))
        return TrainState(**restored)

    def close(self) -> None:
        """Waits for saves under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def _as_dict(state: TrainState) -> dict:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}
