"""The run directory: its config and tokenizer, whether a config may resume its run, and its checkpoints: found and restored
before the first step, saved when they are due, and at the end.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import yaml

from jaxllm.checkpoint.files import Meta, describe_run, require_plain_path, saved_steps
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints, joined_checkpoints
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.stored_checkpoints import StoredCheckpoints, hold_store
from jaxllm.cluster import distributed, progress
from jaxllm.config import Config, ConfigError, whole_rope_scaling
from jaxllm.config.batch_schedule import done_by, phases_of
from jaxllm.config.hf_config import CONFIG, TOKENIZER
from jaxllm.data.tokenizer import TEMPLATE_FILE, Tokenizer, read_companion
from jaxllm.run import fewer_hosts
from jaxllm.run.batch_growth import resumed
from jaxllm.run.hooks import Moment, Run, is_multiple
from jaxllm.train.optimizer import make_learning_rate
from jaxllm.weights.staging import GENERATION, copy_companions

PERIODS = ("every_steps", "keep_every_steps", "store_every_steps", "export_every_steps")
"""Keys of the section checkpoint: a multiple of any of them is saved."""

RISES = 1.5
"""Times its last value from which on a learning rate that rises when a run is resumed is said."""


class Stores(NamedTuple):
    """Where a run's checkpoints are beside run.dir, which the Trainer must know before it is made."""

    stored: StoredCheckpoints | None
    """Those in checkpoint.store, on process 0."""
    joined: JoinedCheckpoints | None
    """Those of hosts without a shared disk."""
    leads: bool
    """Whether this process holds run.dir for itself or for others."""
    resumes: bool
    """Whether there is a checkpoint anywhere, on all processes alike."""


@contextmanager
def stores_of(config: Config, folder: Path) -> Iterator[Stores]:
    """The stores of a run are held until the end of the context."""
    if config.checkpoint.store is not None or distributed.is_one_of_several():
        # Whether the run resumes the Trainer must know, on all processes alike.
        fewer_hosts.meet(config)
    with hold_store(folder, config.checkpoint) as (stored, has_one):
        has_one = has_one or bool(saved_steps(folder / "checkpoints"))
        # Hosts may have run directories of their own.
        resumes = bool(distributed.first_nonempty("yes" if has_one else ""))
        with joined_checkpoints(folder, config.checkpoint, stored) as (leads, joined):
            yield Stores(stored, joined, leads, resumes or (joined is not None and joined.has_parts()))


def restore(run: Run) -> None:
    """Opens the run's checkpoints, and restores the newest state, if there is one."""
    trainer, folder, console = run.trainer, run.folder, run.console

    def accept(where: Path | str, meta: Meta, place: str = "checkpoint.store") -> None:
        require_same_run(where, meta, resumed(trainer.asked, meta), trainer.data.fingerprint, place)

    checkpoints = Checkpoints(folder, trainer.config.checkpoint, run.require, run.stores.stored, accept, run.stores.joined)
    run.checkpoints = run.stack.enter_context(closing(checkpoints))
    if checkpoints.latest is not None:
        accept(folder, checkpoints.meta(), "run.dir")
        with progress.phase("restore"):
            trainer.restore(checkpoints)
        for sentence in checkpoints.said:
            console.say(sentence)
        for sentence in checkpoints.damaged:
            console.say(f"{sentence}: moved to {folder / 'checkpoints-damaged'}")
        console.say(f"resumed from step {trainer.step} in {folder}")
        if said := rate_note(checkpoints.meta()["config"]["train"]["steps"], trainer.config, trainer.step):
            console.say(said)
    checkpoints.offer_saved()


def rate_note(planned: int, config: Config, step: int) -> str:
    """Says that the learning rate rises where a run of `planned` steps is made longer after `step`; "" if it does not."""
    if planned == config.train.steps or step < 1:
        return ""
    as_planned = config.model_copy(update={"train": config.train.model_copy(update={"steps": planned})})
    before, now = (float(make_learning_rate(c)(jnp.int32(at))) for c, at in ((as_planned, step - 1), (config, step)))
    if now < RISES * before:
        return ""
    return (
        f"the learning rate rises from {before:.2g} to {now:.2g}: optimizer.schedule={config.optimizer.schedule} ended at step "
        f"{planned:,}, and now ends at {config.train.steps:,}. To train on without it, start a run from these weights "
        f"(train.init_from)"
    )


def register(run: Run) -> None:
    """Restores the newest state. Saves by checkpoint.*, by the clock, before a stop and after the last step."""
    restore(run)
    trainer, checkpoints, config = run.trainer, run.checkpoints, run.trainer.config.checkpoint
    run.first = saved_step = trainer.step
    run.console.resize(trainer.config.train.steps)

    def save() -> None:
        nonlocal saved_step
        with progress.phase("save"):
            checkpoints.save(trainer.step, trainer.state, meta_of(trainer, trainer.config))
        saved_step = trainer.step
        run.signals.saved()

    def finish() -> None:
        if trainer.step != saved_step:
            # A signal came during an evaluation, or a hook stopped the run.
            save()
        checkpoints.wait(trainer.stopped_by)

    run.on("before", checkpoints.raise_errors)
    periods = [getattr(config, key) for key in PERIODS]
    run.when(
        lambda moment: moment.last or moment.asks_to_save or any(is_multiple(moment.step, period) for period in periods),
        lambda _: save(),
        name="save",
    )
    run.on("trained", finish)
    if distributed.is_main_process():
        keep_config(run)
        keep_companions(run.folder, trainer)


def meta_of(trainer: Any, config: Config) -> Meta:
    """Metadata of a checkpoint of a Trainer's state, under `config`."""
    noise, skipped = trainer.metrics.noise, trainer.metrics.watch.skipped_steps
    return describe_run(config, trainer.step, trainer.data.fingerprint, skipped, noise.state() if noise.found else ())


def keep_config(run: Run) -> None:
    """Writes config.yaml now, and where the batch grows."""
    kept = None

    def keep(_: Moment | None) -> None:
        nonlocal kept
        if (config := run.trainer.config) is not kept:
            kept = config
            run.require()
            write_config(run.folder, config)

    keep(None)
    run.on("begun", keep)


def write_config(folder: Path, config: Config) -> None:
    """Writes config.yaml, atomically: a reader sees the old file or the new one."""
    aside = folder / ".config.yaml"
    aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    aside.replace(folder / "config.yaml")


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


def keep_companions(folder: Path, trainer: Any) -> None:
    """Writes run.dir/tokenizer, for exports and for resuming elsewhere: the run's own tokenizer (no files for bytes) and the
    files that accompanied its initial weights, whose folder may be deleted later.
    """
    home, aside, before = folder / TOKENIZER, folder / ".tokenizer", folder / ".tokenizer-before"
    beside = None if trainer.start.weights is None else trainer.start.weights.outline.companions
    if trainer.step:
        # `before` was left by a start that was killed between the two renames below. The last is that of a run that resumed.
        places = home, before, beside, Path(trainer.config.run.dir) / TOKENIZER
        beside = next((place for place in places if place is not None and place.exists()), None)
    shutil.rmtree(aside, ignore_errors=True)
    # If the data is only token IDs, the tokenizer is that of the weights.
    copy_companions(beside, aside, tokenizer=trainer.data.tokenizer is None)
    if trainer.data.tokenizer is not None:
        trainer.data.tokenizer.save(aside)
        if (template := trainer.data.chat_template) is not None:
            # Save the template of training, wherever it came from.
            aside.mkdir(exist_ok=True)
            (aside / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
        if aside.exists():
            stop_at(trainer.data.ends, aside, trainer.data.tokenizer)
    if home.exists():
        shutil.rmtree(before, ignore_errors=True)
        home.rename(before)
    if aside.exists():
        aside.rename(home)
    shutil.rmtree(before, ignore_errors=True)


def stop_at(learnt: set[int], folder: Path, tokenizer: Tokenizer) -> None:
    """Adds the tokens that end what was learnt to those by which servers stop, in the files that exports copy."""
    config, generation = (read_companion(folder / name) for name in (CONFIG, GENERATION))
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    for said in (config, generation):
        ids |= {name: token for name, token in said.items() if name.endswith("_token_id") and token is not None}
    ends = _ends(ids)
    if more := sorted(learnt - {*ends}):
        ids["eos_token_id"] = ends = [*ends, *more]
        known = {name: token for name, token in ids.items() if token is not None}
        (folder / GENERATION).write_text(json.dumps(generation | known, indent=2) + "\n")
    if config and not learnt <= {*_ends(config)}:
        (folder / CONFIG).write_text(json.dumps(config | {"eos_token_id": ends}, indent=2) + "\n")


def _ends(said: dict[str, Any]) -> list[int]:
    named = said.get("eos_token_id")
    return [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]


def require_same_run(folder: Path | str, meta: Meta, config: Config, fingerprint: str, place: str = "run.dir") -> None:
    """Refuses to resume a run under a config that would change its model, its text, whose fingerprint is given, or the batch
    of any step. The key `place` of the config says where the checkpoint is."""
    before, now = meta["config"], config.model_dump(mode="json")
    # The fingerprint identifies the text, whatever its path.
    free = {("model", key) for key in ("name", "attention", "scan_layers", "compute_dtype", "matmul_dtype")}
    free_of_data = ("paths", "tokenizer", "chat_template", "max_documents", "max_broken_share", "cache_dir", "cache_gib")
    free |= {("data", key) for key in free_of_data}
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
