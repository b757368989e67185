"""Reads each step's metrics on the host: counts skipped steps, marks spikes, stops a run that only skips (instability.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.json_lines import numbers, read_lines
from jaxllm.train.instability import WINDOW, Recent


class Watch:
    """Reads each step's metrics: counts skipped steps, marks spikes, and stops a run that only skips.

    Attributes:
      skipped_steps: number of skipped steps in the complete run.
    """

    def __init__(self, config: Config):
        self._limit, self._deviations = config.train.max_skips_in_a_row, config.train.spike_deviations
        self._together, self._round = config.train.diloco_after_steps, config.train.diloco_steps or 0
        # The step beside the outer step that repairs a replica is skipped too.
        self._late = int(config.train.diloco_overlap)
        self.begin(0)

    def begin(self, skipped_steps: int) -> None:
        """Starts a new run, or a resumed one whose checkpoint records the number of skipped steps."""
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
        # A replica with bad weights skips until an outer step replaces them (diloco.py).
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


def spike_line(config: Config, record: Mapping[str, float]) -> dict[str, float] | None:
    """Makes a line for run.dir/spikes.jsonl with the data to replay a step; None for a usual step. The step read the samples
    from first_sequence on, in the layout of Trainer.train_batch(step - 1).
    """
    if not (record.get("skipped") or record.get("loss_spike")):
        return None
    names = ("step", "skipped", "loss_spike", "loss", "grad_norm", "learning_rate")
    line = {name: record[name] for name in names if name in record}
    # By the record: the config may be of a time when the batch had not grown (batch_growth.py).
    sequences = int(record.get("batch_sequences", config.train.global_batch_sequences))
    first_sequence = int(record["tokens"]) // config.train.sequence_length - sequences
    return line | {"first_sequence": first_sequence, "sequences": sequences}


def by_layer(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. An array over all layers becomes one entry per layer, such as layer_grad_norm/0."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if np.ndim(value) == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}/{number}": float(x) for number, x in enumerate(value)}
    return flat
