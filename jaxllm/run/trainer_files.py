"""What a Trainer writes when its program asks (Trainer.save and Trainer.export). `fit` writes by itself."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.run_lock import hold_run_dir
from jaxllm.cluster import distributed, progress
from jaxllm.config import CheckpointConfig, Config, ConfigError
from jaxllm.run import saving
from jaxllm.run.batch_growth import resumed
from jaxllm.weights.export import export as export_weights
from jaxllm.weights.export import require_format
from jaxllm.weights.staging import require_new
from jaxllm.weights.streaming import Conversion


def save(trainer: Any, run_dir: str | Path | None) -> Path:
    """See Trainer.save."""
    config = trainer.config if run_dir is None else _in_folder(trainer.config, run_dir)
    if config.checkpoint.store is not None:
        raise ConfigError("checkpoint.store is filled by jaxllm.fit alone: leave it out for trainer.save.")
    folder, step = saving.make_run_dir(config), trainer.step
    with hold_run_dir(folder, distributed.is_main_process()) as require:
        with closing(Checkpoints(folder, config.checkpoint, require)) as checkpoints:
            if checkpoints.latest is not None:
                meta = checkpoints.meta()
                saving.require_same_run(folder, meta, resumed(trainer.asked, meta), trainer.data.fingerprint)
                if meta["step"] >= step:
                    raise ConfigError(
                        f"{folder} has step {meta['step']} already, and this is step {step}: name another run_dir."
                    )
            _write(checkpoints, trainer, config, trainer.state)
        if distributed.is_main_process():
            saving.write_config(folder, config)
            saving.keep_companions(folder, trainer)
    return folder / "checkpoints" / str(step)


def export(trainer: Any, destination: str | Path, to: str, options: dict[str, Any]) -> Conversion | None:
    """See Trainer.export."""
    require_format(to)
    if options.get("verify") and distributed.is_one_of_several():
        raise ConfigError("verify=True needs one process: leave it out, and verify what was written by `jaxllm convert`.")
    with distributed.raising_together():
        target = require_new(str(destination), bool(options.get("force")), is_file=to == "gguf")
    # Beside it, where there must be room for as much.
    folder = target.parent / f".{target.name}.weights"
    config = _in_folder(trainer.config, folder)
    with hold_run_dir(saving.make_run_dir(config), distributed.is_main_process()) as require:
        try:
            if distributed.is_main_process():
                # An export that was killed may have left some.
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            with closing(Checkpoints(folder, CheckpointConfig(), require)) as checkpoints:
                # What exports read of a state.
                _write(checkpoints, trainer, config, {"step": trainer.state.step, "params": trainer.state.params})
            with distributed.raising_together():
                if not distributed.is_main_process():
                    return None
                saving.keep_companions(folder, trainer)
                done = export_weights(folder, target, to, **options)
                return replace(done, source=f"step {trainer.step}")
        finally:
            if distributed.is_main_process():
                shutil.rmtree(folder, ignore_errors=True)


def _write(checkpoints: Checkpoints, trainer: Any, config: Config, state: Any) -> None:
    with progress.phase("save"):
        checkpoints.save(trainer.step, state, saving.meta_of(trainer, config))
        checkpoints.wait()


def _in_folder(config: Config, run_dir: str | Path) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
