"""Reads the metrics of a step on the host, once the devices have them, and keeps what depends on earlier steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.cluster import progress
from jaxllm.config import Config, ConfigError
from jaxllm.json_lines import numbers, read_lines
from jaxllm.run.noise_scale import NoiseScale
from jaxllm.run.tracker_kinds import Record
from jaxllm.train import diloco
from jaxllm.train.instability import LAYER_ACTIVATION_NORM, LAYER_GRAD_NORM, WINDOW, Recent


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
        self.noise = NoiseScale.of(meta.get("noise_scale", ()) if config.log.noise_scale_every is not None else ())
        self._pending: Pending | None = None
        self._last_finish_s: float | None = None

    def replace_pending(self, new: Pending | None) -> Pending | None:
        """Returns the previous step, if its metrics are not read yet."""
        before, self._pending = self._pending, new
        return before

    def starts(self) -> None:
        """Starts the clock of tokens_per_s_per_device, if it does not run."""
        self._last_finish_s = self._last_finish_s or time.perf_counter()

    def stop_clock(self) -> None:
        self._last_finish_s = None

    def read(self, pending: Pending, config: Config, devices: int) -> Record:
        """Waits for the step, and returns its metrics as Python numbers."""
        step = pending.step
        with progress.waiting():
            values = diloco.combine_replicas(pending.arrays)
        if LAYER_ACTIVATION_NORM not in values:
            # The step always returns them, at little cost. They are logged together with the other norms.
            values.pop(LAYER_GRAD_NORM, None)
        values = by_layer(values)
        assert self._last_finish_s is not None, "set when that step was started"
        now, tokens = time.perf_counter(), config.tokens_before(step)
        rate = (tokens - config.tokens_before(step - 1)) / (now - self._last_finish_s) / devices
        self._last_finish_s = now
        record = {"step": step, "tokens": tokens, **values, **self.watch.see(step, values), "tokens_per_s_per_device": rate}
        return record | self.noise.see(values)


class Watch:
    """Reads each step's metrics: counts skipped steps, marks spikes, and stops a run that only skips.

    Attributes:
      skipped_steps: number of skipped steps in the complete run.
    """

    def __init__(self, config: Config, skipped_steps: int = 0):
        self._limit, self._deviations = config.train.max_skips_in_a_row, config.train.spike_deviations
        self._together, self._round = config.train.diloco_after_steps, config.train.diloco_steps or 0
        # The step beside the outer step that repairs a replica is skipped too.
        self._late = int(config.train.diloco_overlap)
        self.skipped_steps, self._in_a_row, self._step = skipped_steps, 0, 0
        self._recent = Recent.empty(np, np.float64)

    def recall(self, metrics: Path) -> None:
        """Restores the usual level from the last lines of a run's metrics.jsonl."""
        # Other lines, such as those of evaluations, are in between.
        for _, record in read_lines(metrics, last=4 * WINDOW):
            if (values := numbers(record, "loss", "grad_norm")) is not None:
                self._recent = self._recent.after(np.array(values), np)

    def see(self, step: int, values: Mapping[str, float]) -> dict[str, int]:
        """Returns the keys for a step's line: skipped and loss_spike (0 or 1), and skipped_steps so far."""
        skipped, new_2 = int(values["skipped"]), np.array([values["loss"], values["grad_norm"]])
        spike = values.get("loss_spike")
        if spike is None:
            spike = self._deviations is not None and self._recent.is_spike(new_2, self._deviations, np)
        self._recent = self._recent.after(new_2, np)
        self.skipped_steps += skipped
        self._step, self._in_a_row = step, self._in_a_row + 1 if skipped else 0
        return {"skipped": skipped, "skipped_steps": self.skipped_steps, "loss_spike": int(spike)}

    def require_progress(self) -> None:
        """Raises ConfigError if the last train.max_skips_in_a_row steps were all skipped, and during DiLoCo's rounds more than
        a round."""
        # A replica with bad weights skips until an outer step replaces them (train/diloco.py).
        most = self._round + self._late
        waits = self._step > self._together and most >= self._limit
        if self._in_a_row < (most + 1 if waits else self._limit):
            return
        late = " + 1" if self._late else ""
        limit = f"{self._limit}, and more than train.diloco_steps={self._round}{late}" if waits else self._limit
        last, first = self._step, self._step - self._in_a_row + 1
        which = f"Steps {first} to {last} were" if first < last else f"Step {last} was"
        raise ConfigError(
            f"{which} skipped, with a loss or gradients that are not finite or far above the usual "
            f"(train.max_skips_in_a_row={limit}): lower optimizer.learning_rate, or look at the samples that "
            f"run.dir/spikes.jsonl names; the weights are those from before."
        )


def by_layer(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. An array over all layers becomes one entry per layer, such as layer_grad_norm/0."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if np.ndim(value) == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}/{number}": float(x) for number, x in enumerate(value)}
    return flat
