"""Reads the metrics of a step on the host, once the devices have them, and keeps what depends on earlier steps."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.cluster import progress
from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.data.loader import SampleStream
from jaxllm.json_lines import read_lines
from jaxllm.machine import program_cache
from jaxllm.parallel.types import LAYER_ACTIVATION_NORM
from jaxllm.run.metrics import Record
from jaxllm.run.noise_scale import NoiseScale
from jaxllm.train import diloco
from jaxllm.train.instability import LAYER_GRAD_NORM, WINDOW, Recent


class Pending(NamedTuple):
    """A step whose metrics are not read yet."""

    step: int
    arrays: dict[str, jax.Array]


class StepMetrics:
    """Metrics of a run, or of one that resumes from the checkpoint with the metadata `meta`.

    Attributes:
      watch: the state of skipped steps and spikes.
      noise: the gradient noise scale so far, with log.noise_scale_every.
    """

    def __init__(self, config: Config, meta: Mapping[str, Any] | None = None):
        meta = meta or {}
        self.watch = Watch(config, meta.get("skipped_steps", 0))
        self.noise = NoiseScale(meta.get("noise_scale", ()) if config.log.noise_scale_every is not None else ())
        self._pending: Pending | Record | None = None
        self._last_finish_s: float | None = None

    def replace_pending(self, new: Pending | Record | None) -> Pending | Record | None:
        """Returns the previous step, if its metrics are not read yet, or if what was read is not handed on yet."""
        before, self._pending = self._pending, new
        return before

    def starts(self) -> None:
        """Starts the clock of tokens_per_s_per_device, if it does not run."""
        self._last_finish_s = self._last_finish_s or time.perf_counter()

    def read(self, pending: Pending, config: Config, mesh: Mesh) -> Record:
        """Waits for the step, and returns its metrics as Python numbers. If no other step runs by then, the clock stops."""
        step = pending.step
        with progress.waiting():
            values = diloco.combine_replicas(pending.arrays)
        if LAYER_ACTIVATION_NORM not in values:
            # The step always returns them, at little cost. They are logged together with the other norms.
            values.pop(LAYER_GRAD_NORM, None)
        values = by_layer(values)
        assert self._last_finish_s is not None, "set when that step was started"
        now, tokens = time.perf_counter(), config.tokens_before(step)
        step_s = now - self._last_finish_s
        rate = (tokens - config.tokens_before(step - 1)) / step_s / mesh.size
        self._last_finish_s = None if self._pending is None else now
        record = {"step": step, "tokens": tokens, **values, **self.watch.see(step, values)}
        record |= {"step_s": step_s, "tokens_per_s_per_device": rate, **utilisation(config, mesh, step, rate)}
        return record | self.noise.see(values)


class Watch:
    """Reads each step's metrics: counts skipped steps, marks spikes, and stops a run that only skips.

    Attributes:
      skipped_steps: number of skipped steps in the complete run.
      first_without_targets: the first such step of this start; 0: none so far.
    """

    def __init__(self, config: Config, skipped_steps: int = 0):
        self._train = config.train
        self.skipped_steps, self._in_a_row, self._step, self.first_without_targets = skipped_steps, 0, 0, 0
        self._recent = Recent.empty(np, np.float64)

    def recall(self, metrics: Path) -> None:
        """Restores the usual level from the last lines of a run's metrics.jsonl."""
        # Other lines, such as those of evaluations, are in between, and steps without targets, which do not count.
        for _, record in read_lines(metrics, last=4 * WINDOW):
            if None not in (values := [record.get("loss"), record.get("grad_norm")]) and values[1]:
                self._recent = self._recent.after(np.array(values), np)

    def see(self, step: int, values: Mapping[str, float]) -> Record:
        """Returns the keys for a step's line: skipped and loss_spike (0 or 1), skipped_steps so far, and no_targets of a step
        without any target, whose update is skipped too though nothing is wrong."""
        new_2 = np.array([values["loss"], values["grad_norm"]])
        if values["grad_norm"] == 0:
            self.first_without_targets = self.first_without_targets or step
            without = {"loss": values["loss"] or np.nan, "no_targets": 1}
            return {"skipped": 0, "skipped_steps": self.skipped_steps, "loss_spike": 0, **without}
        skipped = int(values["skipped"])
        spike = values.get("loss_spike")
        if spike is None:
            most = self._train.spike_deviations
            spike = most is not None and self._recent.is_spike(new_2, most, np)
        self._recent = self._recent.after(new_2, np)
        self.skipped_steps += skipped
        self._step, self._in_a_row = step, self._in_a_row + 1 if skipped else 0
        return {"skipped": skipped, "skipped_steps": self.skipped_steps, "loss_spike": int(spike)}

    def require_progress(self) -> None:
        """Raises ConfigError if the last train.max_skips_in_a_row steps were all skipped, and during DiLoCo's rounds more than
        a round."""
        train, limit = self._train, self._train.max_skips_in_a_row
        # A replica with bad weights skips until an outer step replaces them (train/diloco.py). The step beside that skips too.
        most = (train.diloco_steps or 0) + train.diloco_overlap
        waits = self._step > train.diloco_after_steps and most >= limit
        if self._in_a_row < (most + 1 if waits else limit):
            return
        if waits:
            limit = f"{limit}, and more than train.diloco_steps={train.diloco_steps}{' + 1' if train.diloco_overlap else ''}"
        last, first = self._step, self._step - self._in_a_row + 1
        which = f"Steps {first} to {last} were" if first < last else f"Step {last} was"
        raise ConfigError(
            f"{which} skipped, with a loss or gradients that are not finite or far above the usual "
            f"(train.max_skips_in_a_row={limit}): lower optimizer.learning_rate, or look at the samples that "
            f"run.dir/spikes.jsonl names; the weights are those from before."
        )


def utilisation(config: Config, mesh: Mesh, step: int, tokens_per_s_per_device: float) -> Record:
    """tflops_per_gpu, a step's model TFLOP/s with causal attention, and mfu, their share of the GPU's dense peak in the compute
    dtype. A GPU whose peak is not known has no mfu, and a CPU neither."""
    if mesh.devices.flat[0].platform == "cpu":
        return {}
    length = config.train.sequence_length // config.phase_at(step - 1).parts
    flops = tokens_per_s_per_device * train_flops_per_token(config.model, length, frozen=config.frozen)
    peak_flops = peak_flops_of(config, mesh)
    return {"tflops_per_gpu": flops / 1e12} | ({"mfu": flops / peak_flops} if peak_flops else {})


def peak_flops_of(config: Config, mesh: Mesh) -> float | None:
    """Dense peak of this chip in the compute dtype, in FLOP/s; None for an unknown chip."""
    gpu = gpu_from_device_kind(mesh.devices.flat[0].device_kind)
    return gpu.peak_flops(config.model.compute_dtype) if gpu else None


def data_keys(config: Config, stream: SampleStream, step: int) -> Record:
    """What a step read: batch and length where a schedule changes them, and the epochs of each of several sources."""
    phase, found = config.phase_at(step - 1), {}
    if config.train.batch_schedule or config.train.batch_grows_to:
        found["batch_sequences"] = phase.sequences
    if (length := config.length_of(phase)) is not None:
        found["sequence_length"] = length
    if len(stream.sources) > 1:
        epochs = stream.epochs(config.sequences_before(step))
        found |= {f"epochs/{name}": count for name, count in epochs.items()}
    return found


def by_layer(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. An array over all layers becomes one entry per layer, such as layer_grad_norm/0."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if np.ndim(value) == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}/{number}": float(x) for number, x in enumerate(value)}
    return flat


PAUSES = ("compile", "evaluate", "save")
"""Phases that have a key in a line if they took any time."""
START = ("meet", "devices", "dataset", "initialize", "restore", "step")
"""Phases that the first line of a start has a key for, beside those above. The seconds of "start" are its start_other_s."""


class RunTimer:
    """Measures one start of a run, from construction. `import_s`: what this process spent before; 0: not known."""

    def __init__(self, import_s: float = 0.0):
        self._import_s = import_s
        self._began_unix_s = time.time()
        self._before_s = progress.totals()
        self._first = True
        self._compiled_bytes = 0

    def record_keys(self, trainer: Any, shown: bool = False) -> Record:
        """Keys of the next line, on the process that writes it (docs/logging.md). They are seconds since the line before, what
        is in memory, and in the first line of a start also where all its time since the import of jaxllm went.

        Args:
          trainer: a Trainer that has compiled its step.
          shown: whether the step is one of log.every_steps. On GPUs its line has their load (machine/gpus.py).
        """
        now_s = progress.totals()
        spent_s = {name: seconds - self._before_s[name] for name, seconds in now_s.items()}
        self._before_s = now_s
        line: Record = {"unix_s": time.time(), "data_s": spent_s["data"]}
        line |= {f"{name}_s": spent_s[name] for name in PAUSES if spent_s[name]} | memory_in_use()
        if shown and jax.local_devices()[0].platform != "cpu":
            # NVIDIA's module takes 60 ms.
            from jaxllm.machine import gpus

            line |= gpus.load(jax.local_devices())
        if trainer.programs.step_bytes > self._compiled_bytes:
            line["memory_compiled_bytes"] = self._compiled_bytes = trainer.programs.step_bytes
        if self._first:
            self._first = False
            parts_s = {"import": self._import_s, **{name: spent_s[name] for name in START}, "other": spent_s["start"]}
            line |= {f"start_{name}_s": seconds for name, seconds in parts_s.items() if seconds}
            line |= {"start_unix_s": self._began_unix_s, **start_keys(trainer)}
        return line


def start_keys(trainer: Any) -> Record:
    """Keys for one start (docs/logging.md)."""
    record: Record = {"devices": trainer.mesh.size}
    if trainer.start.absent_hosts:
        record["absent_hosts"] = trainer.start.absent_hosts
    if any(counts := program_cache.counts()):
        record |= {f"programs_{name}": count for name, count in counts._asdict().items()}
    if (fit := trainer.start.memory_fit) is not None:
        record |= {"memory_estimate_bytes": fit.memory.peak_bytes, "memory_capacity_bytes": fit.capacity_bytes}
        if (speed := fit.speed) is not None:
            ends = {"": speed.expected, "_low": speed.low, "_high": speed.high}
            record |= {f"predicted_tokens_per_s_per_device{end}": value for end, value in ends.items()}
    if (peak_flops := peak_flops_of(trainer.config, trainer.mesh)) is not None:
        record["device_peak_flops"] = peak_flops
    return record


def memory_in_use() -> Record:
    """memory_bytes, what arrays hold now on the fullest device of this process, and memory_peak_bytes, the most since it
    started. What no device reports (CPU) has no key."""
    said = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    names = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use"}
    found = {key: [stats[name] for stats in said if name in stats] for key, name in names.items()}
    return {key: max(values) for key, values in found.items() if values}
