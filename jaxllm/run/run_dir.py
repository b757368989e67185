"""The run directory: its config and tokenizer files, and whether a config may resume its run."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from jaxllm.checkpoint.files import Meta, require_plain_path
from jaxllm.cluster import distributed
from jaxllm.config import Config, ConfigError, whole_rope_scaling
from jaxllm.config.batch_schedule import done_by, phases_of
from jaxllm.config.hf_config import TOKENIZER
from jaxllm.data.chat import TEMPLATE_FILE
from jaxllm.json_lines import read_lines
from jaxllm.weights.staging import copy_companions


def make_run_dir(config: Config) -> Path:
    """Creates run.dir if it does not exist; ConfigError if it cannot be written, or not be used for checkpoints."""
    folder = Path(config.run.dir)
    require_plain_path("run.dir", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written: choose another folder ({error.strerror}).") from None
    return folder


def write_config(folder: Path, config: Config) -> None:
    """Writes config.yaml atomically: a reader sees the old file or the new one."""
    aside = folder / ".config.yaml"
    aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    aside.replace(folder / "config.yaml")


def keep_config(run: Any) -> None:
    """Writes the present config to run.dir/config.yaml, on process 0."""
    if distributed.is_main_process():
        run.require()
        write_config(run.folder, run.trainer.config)


def keep_companions(folder: Path, trainer: Any) -> None:
    """Writes run.dir/tokenizer, for exports and for resuming elsewhere: the run's own tokenizer (no files for bytes) and the
    files that accompanied its initial weights, whose folder may be deleted later.
    """
    home, aside, before = folder / TOKENIZER, folder / ".tokenizer", folder / ".tokenizer-before"
    beside = None if trainer.start.weights is None else trainer.start.weights.outline.companions
    if trainer.step:
        # Left by a start that was killed between the two renames below.
        beside = home if home.exists() else before
    shutil.rmtree(aside, ignore_errors=True)
    # If the data is only token IDs, the tokenizer is that of the weights.
    copy_companions(beside, aside, tokenizer=trainer.data.tokenizer is None)
    if trainer.data.tokenizer is not None:
        trainer.data.tokenizer.save(aside)
        if (template := trainer.data.chat_template) is not None and aside.exists():
            # Save the template of training, wherever it came from.
            (aside / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    if home.exists():
        shutil.rmtree(before, ignore_errors=True)
        home.rename(before)
    if aside.exists():
        aside.rename(home)
    shutil.rmtree(before, ignore_errors=True)


def require_same_run(folder: Path | str, meta: Meta, config: Config, fingerprint: str, place: str = "run.dir") -> None:
    """Refuses to resume a run under a config that would change its model, its text or the batch of any step.

    Args:
      folder: where the checkpoint is, which the key `place` of the config says.
      meta: the checkpoint's description of itself.
      fingerprint: fingerprint of the present text.

    Raises:
      ConfigError: names the first such key, with both values, or says that the text differs.
    """
    before, now = meta["config"], config.model_dump(mode="json")
    # The fingerprint identifies the text, whatever its path.
    free = {("model", key) for key in ("name", "attention", "scan_layers", "compute_dtype", "matmul_dtype")}
    free |= {("data", key) for key in ("paths", "tokenizer", "chat_template", "max_documents", "cache_dir", "cache_gib")}
    keys = [(section, key) for section in ("model", "data") for key in now[section] if (section, key) not in free]
    keys += [("train", key) for key in ("seed", "sequence_length", "global_batch_sequences", "loss", "freeze")]
    for section, key in keys:
        # A key that is newer than the run had its default value.
        default = type(getattr(config, section)).model_fields[key].get_default()
        old, new = before.get(section, {}).get(key, [] if default == () else default), now[section][key]
        if key == "mixture":
            old, new = ([{k: v for k, v in part.items() if k != "paths"} for part in parts] for parts in (old, new))
        if key == "rope_scaling" and isinstance(old, dict):
            # The run may lack newer keys of it.
            old = whole_rope_scaling(old)
        if old != new:
            raise ConfigError(
                f"{folder} holds a run with {section}.{key}={old}, not {new}: resume with that value, or choose another "
                f"{place}."
            )
    require_same_batches(folder, meta, config, place)
    if meta["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{folder} holds a run on other text: the files of data.* have changed since; restore them, or choose "
            f"another {place}."
        )


def require_same_batches(folder: Path | str, meta: Meta, config: Config, place: str = "run.dir") -> None:
    """Refuses a train.batch_schedule or train.length_schedule that differs for the steps already done; later steps may
    change."""
    train, step = meta["config"]["train"], meta["step"]
    first, length = train["global_batch_sequences"], train["sequence_length"]
    batches, lengths, given = train.get("batch_schedule", ()), train.get("length_schedule", ()), config.train
    before = done_by(phases_of(first, batches, length), step)
    if before != done_by(phases_of(given.global_batch_sequences, given.batch_schedule, given.sequence_length), step):
        schedule = ", ".join(f"[{phase.first_sequence * length}, {phase.sequences}]" for phase in before[1:])
        raise ConfigError(
            f"{folder} holds a run of {step} steps that began with train.global_batch_sequences={before[0].sequences} and "
            f"train.batch_schedule=[{schedule}], but the given schedule differs for them: begin it with these, or choose "
            f"another {place}."
        )
    if done_by(phases_of(first, batches, length, lengths), step) != done_by(config.phases, step):
        raise ConfigError(
            f"{folder} holds a run of {step} steps with train.length_schedule={[list(pair) for pair in lengths]}, but the "
            f"given schedule differs for them: begin it with these, or choose another {place}."
        )


def has_evaluation(metrics: Path, step: int) -> bool:
    return any("eval_loss" in record and record["step"] == step for _, record in read_lines(metrics, "eval_loss"))
