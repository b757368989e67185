"""`jaxllm train`: the loop round the trainer. Resumes, logs, evaluates, saves, and says at the end what came out."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import yaml

from jaxllm import distributed, exits, progress, watchdog
from jaxllm.batch_schedule import Phase, done_by, phases_of
from jaxllm.config import ATTENTION_RESULTS, Config, ConfigError
from jaxllm.data.baselines import ngram_baseline
from jaxllm.data.chat import TEMPLATE_FILE
from jaxllm.inference.generate import sample
from jaxllm.inference.text_stream import printable
from jaxllm.parallel.stacking import stacking_of
from jaxllm.plan.activations import is_blockwise, remat_words
from jaxllm.plan.flops import mfu, parameter_count
from jaxllm.plan.hardware import gpu_from_device_kind
from jaxllm.plan.noise_reading import reading
from jaxllm.plan.pipeline_report import USUAL_IDLE
from jaxllm.plan.schedule import idle_share, microbatches_for
from jaxllm.pretrained.folder import TOKENIZER, copy_companions
from jaxllm.train.checkpoint import Checkpoints, Meta, describe_run, require_shared, saved_steps
from jaxllm.train.console import Console
from jaxllm.train.fence import alone_in
from jaxllm.train.fits import explaining_out_of_memory
from jaxllm.train.interrupt import Interrupt
from jaxllm.train.metrics import Record, Sink, open_sinks
from jaxllm.train.run_clock import RunClock
from jaxllm.train.stragglers import Stragglers
from jaxllm.train.trainer import Evaluation, Trainer

log = logging.getLogger(__name__)

WELL_FILLED = 0.9
"""Of a sequence: below this a run says how much of it is room."""
FINAL_EVAL_TOKENS = 2**24
"""Of each source, in the evaluation at the end: a hundredth of a large corpus would take days."""


def fit(config: Config) -> Trainer:
    """Trains `config` to its last step, from its newest checkpoint if the run directory has one. A signal may stop it before:
    then Trainer.stopped_by names it. Where somebody restarts the run and the signal comes before the first step, the process
    ends instead, with exits.RESTART.
    """
    clock = RunClock()
    place, minutes = distributed.place(), config.checkpoint.every_minutes
    watchdog.beat(place.beat_fd)
    interrupt = Interrupt(minutes * 60 if minutes else None, leave_early if place.restarts else None)
    # The others hear of an error before anything is closed here: that may wait for them.
    with ExitStack() as stack, distributed.leaving_on_errors(), explaining_out_of_memory(config) as explaining:
        stack.enter_context(watchdog.Watchdog(config.run, distributed.line))
        folder = make_run_dir(config)
        if place.restarts:
            stack.enter_context(interrupt)
        trainer = explaining.trainer = Trainer(config, resumes=bool(saved_steps(folder / "checkpoints")))
        stack.callback(trainer.close)
        require_shared(folder)
        require = stack.enter_context(alone_in(folder))
        config = trainer.config
        console = stack.enter_context(Console(config.train.steps, main=distributed.is_main_process()))
        checkpoints = Checkpoints(folder, config.checkpoint, require)
        stack.callback(checkpoints.close)
        announce(console, trainer)
        if checkpoints.latest is not None:
            require_same_run(folder, checkpoints.meta(), config, trainer.data.fingerprint)
            trainer.restore(checkpoints)
            for sentence in checkpoints.damaged:
                console.say(f"{sentence}: moved to {folder / 'checkpoints-damaged'}")
            console.say(f"resumed from step {trainer.step} in {folder}")
        first = trainer.step
        if first >= config.train.steps:
            console.say(f"nothing to train: train.steps={config.train.steps}")
        sinks = open_sinks(config, first, require) if distributed.is_main_process() else []
        for sink in sinks:
            stack.callback(sink.close)
        if sinks:
            trainer.watch.recall(folder / "metrics.jsonl")
            trainer.noise.recall(folder / "metrics.jsonl", first)
        if distributed.is_main_process():
            require()
            write_config(folder, config)
            keep_companions(folder, trainer)
        if not place.restarts:
            # Until here a signal does what it does to any program.
            stack.enter_context(interrupt)
        with progress.phase("step"):
            stopped_by = train(trainer, checkpoints, interrupt, console, sinks, clock)
        with progress.phase("save"):
            checkpoints.wait()
        with progress.phase("finish"):
            stopped_by = trainer.stopped_by = stopped_by or conclude(trainer, interrupt, console, sinks)
        if stopped_by and trainer.step:
            console.say(f"stopped at step {trainer.step} by {stopped_by}; saved; the same command goes on from there")
        elif stopped_by:
            console.say(f"stopped before the first step by {stopped_by}; there is nothing to save")
        console.say(f"run directory {folder}")
    return trainer


def leave_early(name: str) -> None:
    """For Interrupt: the signal `name` came when nothing was trained yet, and somebody restarts this run."""
    distributed.leave_at_once(
        f"told to stop by {name} before the first step of this start: there is nothing to save", exits.RESTART
    )


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


def write_config(folder: Path, config: Config) -> None:
    """config.yaml, the old one or the new one at any moment."""
    aside = folder / ".config.yaml"
    aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    aside.replace(folder / "config.yaml")


def train(
    trainer: Trainer, checkpoints: Checkpoints, interrupt: Interrupt, console: Console, sinks: list[Sink], clock: RunClock
) -> str | None:
    """The loop itself. Metrics arrive one step late; evaluation, saving and profiling wait for the step under way. Returns the
    signal that stopped it, or None at the last step.
    """
    config, first = trainer.config, trainer.step
    peak_flops = peak_flops_of(trainer)
    stragglers = Stragglers(console.say)

    def publish(record: Record | None) -> None:
        if record is None:
            return
        record |= clock.of_line(trainer, peak_flops)
        for sink in sinks:
            sink.write(record)
        if record["skipped"] or record["loss_spike"]:
            console.say(what_went_wrong(record))
        rate = float(record["tokens_per_s_per_device"])
        utilisation = mfu(rate, config.model, config.train.sequence_length, peak_flops) if peak_flops else None
        due = record["step"] % config.log.every_steps == 0 or record["step"] in (first + 1, config.train.steps)
        console.step(record, utilisation, due)

    def save(step: int) -> None:
        meta = describe_run(config, step, trainer.data.fingerprint, trainer.watch.skipped_steps)
        with progress.phase("save"):
            checkpoints.save(step, trainer.state, meta)

    started = time.perf_counter()
    if first < config.train.steps:
        trainer.prepare()
        if trainer.compile_s is not None:
            console.say(f"compiled the train step in {trainer.compile_s:.1f} s")
    stopped_by = interrupt.begin()
    while trainer.step < config.train.steps and not stopped_by:
        checkpoints.raise_errors()
        if trainer.step > 0 and (phase := config.phase_at(trainer.step)).first_step == trainer.step:
            console.say(f"{describe_phase(config, phase)} from here on")
        with profile(config, trainer.step + 1, first + 1):
            publish(trainer.advance())
            step, last = trainer.step, trainer.step == config.train.steps
            due = interrupt.due(step)
            stopped_by = None if last else due.stopped_by
            periods = (config.checkpoint.every_steps, config.checkpoint.keep_every_steps)
            saves = last or due.save or any(is_multiple(step, period) for period in periods)
            evaluates = not (last or stopped_by) and is_multiple(step, config.train.eval_every_steps)
            stragglers.look()
            if saves or evaluates or ends_profile(config, step):
                publish(trainer.finish())
                if saves and not last:
                    stragglers.measure()
        if (saves or evaluates) and (note := noise_note(trainer)):
            console.say(note)
        if saves:
            save(step)
            interrupt.saved()
        if evaluates:
            found = record_evaluation(trainer, sinks, interrupt, config.train.eval_batches)
            if found is None:
                stopped_by = interrupt.asked()
                if not saves:
                    save(step)
            else:
                console.say(f"step {step}  held-out loss {found.loss:.4f}{by_source(found)}")
    if trainer.step > first:
        console.say(f"trained {trainer.step - first} steps in {time.perf_counter() - started:.0f} s")
    return stopped_by


def noise_note(trainer: Trainer) -> str | None:
    """What the gradient noise scale says of the last step's batch; None if it was not measured."""
    if (found := trainer.noise.found) is None:
        return None
    config = trainer.config
    tokens = config.tokens_before(trainer.step) - config.tokens_before(trainer.step - 1)
    # In rounds an island's steps are its own.
    return f"step {trainer.step}  {reading(found, tokens // (config.parallel.replica if trainer.rounds else 1))}"


def announce(console: Console, trainer: Trainer) -> None:
    config, devices = trainer.config, trainer.mesh.devices
    kind = devices.flat[0].device_kind
    axes = ", ".join(f"{axis} {size}" for axis, size in trainer.mesh.shape.items())
    console.say(f"{devices.size} {kind} device{'s' if devices.size > 1 else ''}; mesh {axes}; ZeRO {config.parallel.zero}")
    M = config.num_microbatches
    console.say(
        f"{parameter_count(config.model) / 1e6:,.1f}M parameters; {config.step_tokens:,} tokens a step in "
        f"{M} microbatch{'es' if M > 1 else ''}; {config.total_tokens:,} tokens in all"
    )
    for line in batch_notes(config):
        console.say(line)
    if config.parallel.pipe > 1:
        for line in pipeline_notes(config):
            console.say(line)
    if config.train.diloco_steps is not None:
        console.say(diloco_line(config))
    if trainer.memory_fit is not None:
        console.say(trainer.memory_fit.line)
    if trainer.weights is not None:
        console.say(f"weights from {trainer.weights.description}; optimizer, step and data begin anew")
    if config.total_tokens < config.optimizer.warmup_tokens:
        console.say(f"note: the run ends within its warm-up of {config.optimizer.warmup_tokens:,} tokens")
    fates = config.parallel.remat
    attention = trainer.parallelized.attention
    console.say(f"attention {attention}; remat {remat_words(fates)}; {trainer.data.description}")
    named = set(fates) & set(ATTENTION_RESULTS) if isinstance(fates, dict) else ()
    if named and (attention == "xla" or not is_blockwise(config)):
        console.say(f"note: attention that is not in blocks has no {', '.join(sorted(named))}: it is computed again")
    note_epochs(console, trainer)


def diloco_line(config: Config) -> str:
    """Who trains on its own, on how much, and when islands meet."""
    train, islands = config.train, config.parallel.replica
    alone = f"{islands} islands, each on 1/{islands} of every batch" if islands > 1 else "one island"
    start = f" after {train.diloco_after_steps} steps together" if train.diloco_after_steps else ""
    outer = f"Nesterov step of {train.diloco_lr:g}, momentum {train.diloco_momentum:g}"
    return f"DiLoCo: {alone}{start}; an outer {outer}, every {train.diloco_steps} steps and after the last"


def batch_notes(config: Config) -> Iterator[str]:
    """What train.batch_schedule comes to; each batch's program is compiled when its first step is due."""
    if not config.train.batch_schedule:
        return
    later = config.phases[1:]
    for phase in later:
        if phase.first_step < config.train.steps:
            tokens = config.tokens_before(phase.first_step)
            yield f"after step {phase.first_step} ({tokens:,} tokens) {describe_phase(config, phase)}, compiled then"
    if config.train.batch_lr != "none":
        rule = {"sqrt": "the root of the batch", "linear": "the batch"}[config.train.batch_lr]
        last = config.phases[-1].sequences
        yield f"learning rate in proportion to {rule}; optimizer.learning_rate is that of {last} sequences"
    if later and later[-1].first_step >= config.train.steps:
        yield f"note: the run ends before train.batch_schedule comes to its batch of {later[-1].sequences} sequences"


def describe_phase(config: Config, phase: Phase) -> str:
    M = config.in_phase(phase).num_microbatches
    tokens = phase.sequences * config.train.sequence_length
    return f"batch of {phase.sequences} sequences, {tokens:,} tokens a step in {M} microbatch{'es' if M > 1 else ''}"


def what_went_wrong(record: Record) -> str:
    """Of a step that was skipped, or is a spike."""
    what = "a spike" if record["loss_spike"] else "not finite"
    skipped = f"; skipped, {record['skipped_steps']} so far" if record["skipped"] else ""
    return f"step {record['step']} is {what}: loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}{skipped}"


def pipeline_notes(config: Config) -> Iterator[str]:
    """What the pipeline costs: its bubble, and layers that do nothing."""
    stages, virtual, M = config.parallel.pipe, config.parallel.virtual_stages, config.num_microbatches
    stacking = stacking_of(config)
    chunks = f" x {virtual} chunks" if virtual > 1 else ""
    plural, idle = "s" if stacking.chunk > 1 else "", idle_share(stages, M, virtual)
    schedule, layers = config.parallel.schedule, f"{stacking.chunk} layer{plural}"
    yield f"pipeline {schedule}, {stages} stages{chunks} of {layers}; idle {100 * idle:.1f}% of a step"
    if extra := stacking.identity_layers:
        layers = f"{extra} identity layers fill up the last stages" if extra > 1 else "1 identity layer fills up the last stage"
        yield f"note: {layers}: computed, never changed"
    if idle >= USUAL_IDLE:
        enough = microbatches_for(USUAL_IDLE, stages, virtual)
        size = enough * config.train.global_batch_sequences // M
        yield (
            f"note: stages stand still {100 * idle:.1f}% of a step; {enough} microbatches (such as "
            f"train.global_batch_sequences={size}) bring that below {100 * USUAL_IDLE:.0f}%"
        )


def note_epochs(console: Console, trainer: Trainer) -> None:
    """How often the run will read each source, where there are several or one is read more than once."""
    config, stream = trainer.config, trainer.stream
    epochs = stream.epochs(config.sequences_before(config.train.steps))
    if len(epochs) > 1 or max(epochs.values()) > 1:
        console.say("epochs of the whole run: " + ", ".join(f"{name} {count:.2f}" for name, count in epochs.items()))
    full = sum(
        share * source.packing.num_tokens / source.packing.num_samples
        for source, share in zip(stream.sources, stream.counts, strict=True)
    ) / (sum(stream.counts) * config.train.sequence_length)
    if full < WELL_FILLED:
        console.say(f"note: sequences are {100 * full:.1f}% full; data.packing=concat or longer sequences waste less")


def record_evaluation(
    trainer: Trainer, sinks: list[Sink], interrupt: Interrupt, max_batches: int | None = None
) -> Evaluation | None:
    """Evaluates; writes eval_loss, and for a mixture each source's, to the sinks. None: a signal came in between."""
    found = trainer.evaluate(max_batches, stop=lambda: interrupt.asked() is not None)
    if found is None:
        return None
    record: Record = {"step": trainer.step, "eval_loss": found.loss}
    if len(found.by_source) > 1:
        record |= {f"eval_loss/{name}": loss for name, loss in found.by_source.items()}
    for sink in sinks:
        sink.write(record)
    return found


def by_source(found: Evaluation) -> str:
    several = len(found.by_source) > 1
    return " (" + ", ".join(f"{name} {loss:.4f}" for name, loss in found.by_source.items()) + ")" if several else ""


def conclude(trainer: Trainer, interrupt: Interrupt, console: Console, sinks: list[Sink]) -> str | None:
    """Held-out loss over all held-out text, n-gram baselines on the same split, and a sample. Returns the signal that stopped
    the evaluation, or None.
    """
    data, unit, config = trainer.data, trainer.data.unit, trainer.config
    if data.held_out_tokens > 1:
        batch_tokens = config.microbatch_rows * config.parallel.pipe * config.train.sequence_length
        # A run that is started once more, with nothing to train, has its line already.
        known = has_evaluation(Path(config.run.dir) / "metrics.jsonl", trainer.step)
        found = record_evaluation(trainer, [] if known else sinks, interrupt, -(-FINAL_EVAL_TOKENS // batch_tokens))
        if found is None:
            return interrupt.asked()
        (source, *_) = data.sources
        for order, name in ((2, "bigrams"), (3, "trigrams")) if config.log.baselines else ():
            baseline = ngram_baseline(source.text(source.train), source.text(source.held_out), order)
            console.say(f"baseline: byte {name} {baseline:.3f} nats per byte ({baseline / math.log(2):.3f} bits)")
        documents = sum(len(source.held_out) for source in data.sources)
        console.say(f"{found.tokens:,} held-out {unit}s scored in {documents:,} document{'s' if documents > 1 else ''}")
        console.say(f"held-out loss {found.loss:.3f} nats per {unit} ({found.loss / math.log(2):.3f} bits){by_source(found)}")
    if (length := config.log.sample_tokens) and data.tokenizer is not None:
        begun = config.log.sample_prompt
        new = sample(trainer.model, data.tokenizer.encode(begun), length, window=config.train.sequence_length)
        console.say("sample:\n" + begun + printable(data.tokenizer.decode(new)))
    return None


def has_evaluation(metrics: Path, step: int) -> bool:
    if not metrics.exists():
        return False
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return any("eval_loss" in line and line["step"] == step for line in lines)


@contextmanager
def profile(config: Config, step: int, first_step: int):
    """Traces steps log.profile_steps = [first, last] into run.dir/profile; from `first_step` where a run resumes in between."""
    span = config.log.profile_steps
    if span and step == max(span[0], first_step) and step <= span[1]:
        jax.profiler.start_trace(str(Path(config.run.dir) / "profile"))
    yield
    if ends_profile(config, step):
        jax.profiler.stop_trace()


def ends_profile(config: Config, step: int) -> bool:
    return bool(config.log.profile_steps) and step == config.log.profile_steps[1]


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def peak_flops_of(trainer: Trainer) -> float | None:
    """Dense peak of this chip in the compute dtype, FLOP/s, or None where the chip is unknown."""
    gpu = gpu_from_device_kind(trainer.mesh.devices.flat[0].device_kind)
    return gpu.peak_flops(trainer.config.model.compute_dtype) if gpu else None
