"""A run's directory: what it keeps beside metrics and checkpoints, and whether a config may go on with what it holds."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import yaml

from jaxllm.batch_schedule import done_by, phases_of
from jaxllm.config import Config, ConfigError
from jaxllm.data.chat import TEMPLATE_FILE
from jaxllm.pretrained.folder import TOKENIZER, copy_companions
from jaxllm.train.checkpoint_files import Meta
from jaxllm.train.trainer import Trainer


def make_run_dir(config: Config) -> Path:
    """run.dir, made if it is not there; ConfigError if it cannot be written."""
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written: choose another folder ({error.strerror}).") from None
    return folder


def write_config(folder: Path, config: Config) -> None:
    """config.yaml, the old one or the new one at any moment."""
    aside = folder / ".config.yaml"
    aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    aside.replace(folder / "config.yaml")


def keep_companions(folder: Path, trainer: Trainer) -> None:
    """run.dir/tokenizer, for exports and for whoever resumes elsewhere: the run's own tokenizer, none for bytes, and what came
    beside the weights that it started from, whose folder may be gone one day.
    """
    home, aside, before = folder / TOKENIZER, folder / ".tokenizer", folder / ".tokenizer-before"
    beside = None if trainer.weights is None else trainer.weights.outline().companions
    if trainer.step:
        # Killed between the two renames below, an earlier start left it there.
        beside = home if home.exists() else before
    shutil.rmtree(aside, ignore_errors=True)
    # Where data is token ids alone, the weights' tokenizer is theirs.
    copy_companions(beside, aside, tokenizer=trainer.data.tokenizer is None)
    if trainer.data.tokenizer is not None:
        trainer.data.tokenizer.save(aside)
        if (template := trainer.data.chat_template) is not None and aside.exists():
            # What the model has learnt to answer to, wherever it came from.
            (aside / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    if home.exists():
        shutil.rmtree(before, ignore_errors=True)
        home.rename(before)
    if aside.exists():
        aside.rename(home)
    shutil.rmtree(before, ignore_errors=True)


def require_same_run(folder: Path, meta: Meta, config: Config, fingerprint: str) -> None:
    """Refuses to go on with a run under a config that would change its model, its text or where each step reads.

    Args:
      meta: what the checkpoint says of itself.
      fingerprint: of the text as it is now.

    Raises:
      ConfigError: names the first such key, with both values, or says that the text is another.
    """
    before, now = meta["config"], config.model_dump(mode="json")
    # What the text is, its fingerprint says, wherever it lies now.
    free = {("model", key) for key in ("name", "attention", "scan_layers", "compute_dtype", "matmul_dtype")}
    free |= {("data", key) for key in ("paths", "tokenizer", "chat_template")}
    keys = [(section, key) for section in ("model", "data") for key in now[section] if (section, key) not in free]
    keys += [("train", key) for key in ("seed", "sequence_length", "global_batch_sequences")]
    for section, key in keys:
        # A key that is newer than the run had its default.
        default = type(getattr(config, section)).model_fields[key].get_default()
        old, new = before.get(section, {}).get(key, default), now[section][key]
        if key == "mixture":
            old, new = ([{k: v for k, v in part.items() if k != "paths"} for part in parts] for parts in (old, new))
        if old != new:
            raise ConfigError(
                f"{folder} holds a run with {section}.{key}={old}, not {new}: go on with that value, or choose another run.dir."
            )
    require_same_batches(folder, meta, config)
    if meta["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{folder} holds a run on other text: what data names has changed since; bring it back, or choose another run.dir."
        )


def require_same_batches(folder: Path, meta: Meta, config: Config) -> None:
    """Refuses a train.batch_schedule that says other of the steps that are done; what comes later may be changed."""
    train, step = meta["config"]["train"], meta["step"]
    first, length = train["global_batch_sequences"], train["sequence_length"]
    before = done_by(phases_of(first, train.get("batch_schedule", ()), length), step)
    if before != done_by(config.phases, step):
        told = ", ".join(f"[{phase.first_sequence * length}, {phase.sequences}]" for phase in before[1:])
        raise ConfigError(
            f"{folder} holds a run of {step} steps that began with train.global_batch_sequences={before[0].sequences} and "
            f"train.batch_schedule=[{told}], and the one given says otherwise of them: begin it with these, or choose another "
            f"run.dir."
        )


def has_evaluation(metrics: Path, step: int) -> bool:
    if not metrics.exists():
        return False
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return any("eval_loss" in line and line["step"] == step for line in lines)
