"""Instability: skipped steps, spikes, and the norms of each layer.

If the loss or the gradient norm of a step is not finite, the step itself skips the update, on all devices alike: weights and
moments stay the same bit for bit, the step counts, and its samples are not read again. A spike is a loss or gradient norm more
than train.spike_deviations standard deviations above the mean of the last WINDOW steps (the rule of OLMo-core's
SkipStepAdamW). The host marks spikes as metrics arrive. With train.skip_spikes the step detects and skips them too; the last
losses and norms are then part of the state, so that a resumed run skips the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.sharding import stack_dims
from jaxllm.train.json_lines import numbers, read_lines

WINDOW = 128
"""Number of past steps that define the usual level."""
FEWEST = WINDOW // 2
"""Number of steps before which no step counts as a spike."""
LAYER_GRAD_NORM, LAYER_ACTIVATION_NORM = "layer_grad_norm", "layer_activation_norm"


class Recent(NamedTuple):
    """Loss and gradient norm of the last steps in which both were finite, including spikes: after a permanent change of level,
    former spikes soon become usual. Arrays of numpy or JAX."""

    values: Any
    """[2, WINDOW], a ring buffer."""
    count: Any
    """Number of steps written so far."""

    @staticmethod
    def empty(xp: Any = jnp, dtype: Any = jnp.float32) -> Recent:
        return Recent(xp.zeros((2, WINDOW), dtype), xp.zeros((), xp.int32))

    def is_spike(self, new_2: Any, deviations: float, xp: Any = jnp) -> Any:
        """Whether loss or gradient norm is far above the usual level. False if not finite, and before FEWEST steps."""
        known = xp.arange(WINDOW) < self.count
        number = known.sum().astype(self.values.dtype)
        mean_2 = xp.where(known[None], self.values, 0).sum(axis=1) / xp.maximum(number, 1)
        squares = xp.where(known[None], xp.square(self.values - mean_2[:, None]), 0)
        deviation_2 = xp.sqrt(squares.sum(axis=1) / xp.maximum(number - 1, 1))
        above = (new_2 > mean_2 + deviations * deviation_2).any()
        return above & xp.isfinite(new_2).all() & (self.count >= FEWEST)

    def after(self, new_2: Any, xp: Any = jnp) -> Recent:
        finite = xp.isfinite(new_2).all()
        here = (xp.arange(WINDOW) == self.count % WINDOW) & finite
        return Recent(xp.where(here[None], new_2[:, None], self.values), self.count + finite.astype(xp.int32))


# ------------------------------------------------------------------------------------------------------------ in the step

SkipPolicy = Callable[[Recent | None, jax.Array, jax.Array], tuple[jax.Array, Recent | None, dict[str, jax.Array]]]
"""(recent losses and norms, loss, gradient norm) -> (whether to apply the update, recent losses and norms now, metrics)"""


def skip_not_finite(recent: Recent | None, loss: jax.Array, grad_norm: jax.Array):
    """The SkipPolicy of a run that skips no spikes."""
    apply_update = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    return apply_update, recent, {"skipped": ~apply_update}


def skip_spikes(deviations: float) -> SkipPolicy:
    """The SkipPolicy that skips spikes too."""

    def should_apply(recent: Recent | None, loss: jax.Array, grad_norm: jax.Array):
        assert recent is not None, "part of the state with train.skip_spikes"
        new_2 = jnp.stack([loss, grad_norm]).astype(jnp.float32)
        spike = recent.is_spike(new_2, deviations)
        apply_update = jnp.isfinite(new_2).all() & ~spike
        return apply_update, recent.after(new_2), {"skipped": ~apply_update, "loss_spike": spike}

    return should_apply


def layer_grad_norms(table: Any, num_layers: int) -> Callable[[Any], jax.Array]:
    """Makes a function: gradients -> norm of each layer, float32 [num_layers].

    Args:
      table: nested dict of Parameter. The parameters of layers are stacked (parallel/layer_stacking.py).
    """

    def squares(parameter: Any, gradient: jax.Array) -> jax.Array:
        axes = tuple(range(stack_dims(parameter.dims), gradient.ndim))
        return jnp.sum(jnp.square(gradient), axis=axes).reshape(-1)

    def norms(gradients: Any) -> jax.Array:
        # Flattened chunk stacks are in the order of layers, with identity layers at the end.
        total: Any = sum(jax.tree.leaves(jax.tree.map(squares, table["layers"], gradients["layers"])))
        return jnp.sqrt(total[:num_layers])

    return norms


# ----------------------------------------------------------------------------------------------------------- on the host


class Watch:
    """Reads each step's metrics: counts skipped steps, marks spikes, and stops a run that only skips.

    Attributes:
      skipped_steps: number of skipped steps in the complete run.
    """

    def __init__(self, config: Config):
        self._most, self._deviations = config.train.max_skips_in_a_row, config.train.spike_deviations
        self.begin(0)

    def begin(self, skipped_steps: int) -> None:
        """Starts a new run, or a resumed one whose checkpoint records the number of skipped steps."""
        self.skipped_steps, self._in_a_row, self._step = skipped_steps, 0, 0
        self._recent = Recent.empty(np, np.float64)

    def recall(self, metrics: Path) -> None:
        """Restores the usual level from the last lines of a run's metrics.jsonl."""
        # Other lines, such as those of evaluations, are in between.
        for _, record in deque(read_lines(metrics), 4 * WINDOW):
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
        """Raises ConfigError if the last train.max_skips_in_a_row steps were all skipped."""
        if self._in_a_row < self._most:
            return
        last, first = self._step, self._step - self._in_a_row + 1
        which = f"Steps {first} to {last} were" if first < last else f"Step {last} was"
        raise ConfigError(
            f"{which} skipped, with a loss or gradients that are not finite or far above the usual "
            f"(train.max_skips_in_a_row={self._most}): lower optimizer.learning_rate, or look at the samples that "
            f"run.dir/spikes.jsonl names; the weights are those from before."
        )


def spike_line(config: Config, record: Mapping[str, float]) -> dict[str, float] | None:
    """Makes a line for run.dir/spikes.jsonl with the data to replay a step; None for a usual step. The step read the samples
    from first_sequence on, in the layout of Trainer.train_batch(step - 1).
    """
    if not (record.get("skipped") or record.get("loss_spike")):
        return None
    done = int(record["step"]) - 1
    names = ("step", "skipped", "loss_spike", "loss", "grad_norm", "learning_rate")
    line = {name: record[name] for name in names if name in record}
    return line | {"first_sequence": config.sequences_before(done), "sequences": config.phase_at(done).sequences}


def by_layer(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. An array over all layers becomes one entry per layer, such as layer_grad_norm/0."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if np.ndim(value) == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}/{number}": float(x) for number, x in enumerate(value)}
    return flat
