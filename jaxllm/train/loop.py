"""`jaxllm train`: the loop round the trainer. Resumes, logs, evaluates, saves, and says at the end what came out."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
import yaml

from jaxllm import distributed
from jaxllm.config import Config, ConfigError
from jaxllm.data.baselines import ngram_baseline
from jaxllm.inference.generate import sample
from jaxllm.plan.flops import mfu, parameter_count
from jaxllm.plan.hardware import gpu_from_device_kind
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.console import Console
from jaxllm.train.metrics import Record, Sink, open_sinks
from jaxllm.train.trainer import Trainer

log = logging.getLogger(__name__)

SAMPLE_PROMPT = b"def "


def fit(config: Config) -> Trainer:
    """Trains `config` to its last step, from its newest checkpoint if the run directory has one."""
    folder = make_run_dir(config)
    with distributed.leaving_on_errors(), ExitStack() as stack:
        trainer = Trainer(config)
        stack.callback(trainer.close)
        config = trainer.config
        console = stack.enter_context(Console(config.train.steps, main=distributed.is_main_process()))
        checkpoints = Checkpoints(folder, config.checkpoint)
        stack.callback(checkpoints.close)
        announce(console, trainer)
        if checkpoints.latest_step is not None:
            require_same_run(folder, config)
            trainer.restore(checkpoints)
            console.say(f"resumed from step {trainer.step} in {folder}")
        first = trainer.step
        if first >= config.train.steps:
            console.say(f"nothing to train: train.steps={config.train.steps}")
        sinks = open_sinks(config, first) if distributed.is_main_process() else []
        for sink in sinks:
            stack.callback(sink.close)
        if distributed.is_main_process():
            (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        train(trainer, checkpoints, console, sinks)
        conclude(trainer, console, sinks if trainer.step > first else [])
        console.say(f"run directory {folder}")
    return trainer


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


def require_same_run(folder: Path, config: Config) -> None:
    """Refuses to go on with a run under a config that would change its model, its text or where each step reads.

    Raises:
      ConfigError: names the first such key, with both values.
    """
    file = folder / "config.yaml"
    if not file.exists():
        return
    before, now = yaml.safe_load(file.read_text()), config.model_dump(mode="json")
    free = {("model", key) for key in ("name", "attention", "scan_layers", "compute_dtype")}
    keys = [(section, key) for section in ("model", "data") for key in now[section] if (section, key) not in free]
    keys += [("train", key) for key in ("seed", "sequence_length", "global_batch_sequences")]
    for section, key in keys:
        old, new = before.get(section, {}).get(key), now[section][key]
        if old != new:
            raise ConfigError(
                f"{folder} holds a run with {section}.{key}={old}, not {new}: go on with that value, or choose another run.dir."
            )


def train(trainer: Trainer, checkpoints: Checkpoints, console: Console, sinks: list[Sink]) -> None:
    """The loop itself. Metrics arrive one step late; evaluation, saving and profiling wait for the step under way."""
    config, first = trainer.config, trainer.step
    peak_flops = peak_flops_of(trainer)

    def publish(record: Record | None) -> None:
        if record is None:
            return
        for sink in sinks:
            sink.write(record)
        rate = float(record["tokens_per_s_per_device"])
        utilisation = mfu(rate, config.model, config.train.sequence_length, peak_flops) if peak_flops else None
        due = record["step"] % config.log.every_steps == 0 or record["step"] in (first + 1, config.train.steps)
        console.step(record, utilisation, due)

    started = time.perf_counter()
    while trainer.step < config.train.steps:
        with profile(config, trainer.step + 1, first + 1):
            publish(trainer.advance())
            if trainer.compile_s is not None and trainer.step == first + 1:
                console.say(f"compiled the train step in {trainer.compile_s:.1f} s")
            step, last = trainer.step, trainer.step == config.train.steps
            saves = last or is_multiple(step, config.checkpoint.every_steps)
            evaluates = not last and is_multiple(step, config.train.eval_every_steps)
            if saves or evaluates or ends_profile(config, step):
                publish(trainer.finish())
        if saves:
            checkpoints.save(step, trainer.state)
        if evaluates:
            loss, _ = trainer.evaluate(config.train.eval_batches)
            for sink in sinks:
                sink.write({"step": step, "eval_loss": loss})
            console.say(f"step {step}  held-out loss {loss:.4f}")
    if trainer.step > first:
        console.say(f"trained {trainer.step - first} steps in {time.perf_counter() - started:.0f} s")


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
    if config.total_tokens < config.optimizer.warmup_tokens:
        console.say(f"note: the run ends within its warm-up of {config.optimizer.warmup_tokens:,} tokens")
    console.say(f"attention {trainer.parallelized.attention}; remat {config.parallel.remat}; {trainer.corpus.description}")


def conclude(trainer: Trainer, console: Console, sinks: list[Sink]) -> None:
    """Held-out loss over all held-out bytes, n-gram baselines on the same split, and a sample."""
    corpus = trainer.corpus
    if corpus.held_out.size > 1:
        loss, scored = trainer.evaluate()
        for sink in sinks:
            sink.write({"step": trainer.step, "eval_loss": loss})
        for order, name in ((2, "bigrams"), (3, "trigrams")) if trainer.config.log.baselines else ():
            baseline = ngram_baseline(corpus.train, corpus.held_out, order)
            console.say(f"baseline: byte {name} {baseline:.3f} nats per byte ({baseline / math.log(2):.3f} bits)")
        console.say(f"{scored:,} held-out bytes in {corpus.held_out_files} files")
        console.say(f"held-out loss {loss:.3f} nats per byte ({loss / math.log(2):.3f} bits)")
    if length := trainer.config.log.sample_tokens:
        prompt = np.frombuffer(SAMPLE_PROMPT, np.uint8)
        new = sample(trainer.model, prompt, length, window=trainer.config.train.sequence_length)
        text = bytes(new.astype(np.uint8)).decode(errors="replace")
        # A young model samples control characters too, and a terminal would obey them.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        console.say("sample:\n" + SAMPLE_PROMPT.decode() + text)


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
    # XLA multiplies float32 matrices in TF32 on these chips.
    return gpu.dense_flops["tf32" if trainer.config.model.compute_dtype == "float32" else "bfloat16"] if gpu else None
