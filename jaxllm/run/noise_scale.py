"""The gradient noise scale (McCandlish et al., 2018, arXiv 1812.06162) predicts the gain of a larger batch, during training.

Let g be the true gradient and S the covariance of one token's contribution to it. The gradient G of B tokens has E|G|^2 = |g|^2
+ tr(S) / B, so batches of two sizes give both. Each step has two sizes: its K parts (parallel/grad_square_norms.py) and all of
it. With norms before clipping, and the parts' squares averaged by their numbers of targets,

    tr(S) / B = (mean |G_i|^2 - |G|^2) / (K - 1)          |g|^2 = |G|^2 - tr(S) / B

The first is the variance of the parts. Both are unbiased if the covariance of a part is inversely proportional to its targets.

tr(S) / |g|^2, in tokens, is the noise scale. Both are noisy, and |g|^2 may be negative, so each is averaged over steps before
the division. The interval is Fieller's for a ratio of two means. If |g|^2 cannot be distinguished from 0, it has no upper end.

Interpretation. If steps and tokens to a loss are S_min (1 + b/B) and E_min (1 + B/b), with b the noise scale, then a fraction
w = B / (B + b) of a step's tokens is wasted, and a doubled batch needs (1 - w) / 2 fewer steps and w more tokens. This is a
model: measured critical batches can be far larger (Merrill et al., 2025, arXiv 2505.23971). Nothing in this module changes a
run; run/batch_growth.py does.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.cost_model.noise_reading import NoiseEstimate, reading
from jaxllm.run.hooks import Moment, Run
from jaxllm.train.step import G2, S

WINDOW = 200.0
"""Number of estimates that count in an average, once there are twice as many."""
FEWEST = 2.0
"""Degrees of freedom from which there is an interval: six estimates."""
SCALE, LOW, HIGH = "noise_scale_tokens", "noise_scale_low", "noise_scale_high"
"""Metrics of the run so far."""


class NoiseScale:
    """Averages the estimates of steps.

    The newest estimate has weight 4 / (n + 3) in the average of n, and at least 2 / (window + 1). The first is polynomial-decay
    averaging (Shamir and Zhang, 2013): at the start gradients shrink tenfold in a few steps, and a plain average would keep
    them.

    Args:
      state: what `state` gave, to go on from; (): none, as of a checkpoint that has no measurement.
      window: effective number of estimates in the average; infinity: no lower limit of the weight.
    """

    def __init__(self, state: Sequence[float] = (), window: float = WINDOW):
        numbers = state or [0.0] * 8
        # For (|g|^2, tr(S)): weighted mean and covariance; and the sum of squared weights, which sum to 1.
        self._window, self._count, self._squares = window, int(numbers[0]), numbers[1]
        self._mean_2, self._covariance_22 = np.array(numbers[2:4]), np.array(numbers[4:8]).reshape(2, 2)

    def add(self, g2: float, s: float) -> None:
        """Adds one step's estimates. Values that are not finite are ignored."""
        new_2 = np.array([g2, s], float)
        if not np.isfinite(new_2).all():
            return
        self._count += 1
        n = self._count
        weight = 1 / n if math.isinf(self._window) else max(4 / (n + 3), 2 / (self._window + 1))
        away_2 = new_2 - self._mean_2
        self._mean_2 = self._mean_2 + weight * away_2
        self._covariance_22 = (1 - weight) * (self._covariance_22 + weight * np.outer(away_2, away_2))
        self._squares = (1 - weight) ** 2 * self._squares + weight**2

    def see(self, values: Mapping[str, float]) -> dict[str, float]:
        """Adds a step's metrics if it was measured and not skipped. Returns the averages for the step's line."""
        if G2 not in values:
            return {}
        if not values.get("skipped"):
            self.add(values[G2], values[S])
        return {} if self.found is None else dict(zip((SCALE, LOW, HIGH), self.found, strict=True))

    def state(self) -> list[float]:
        """The averages as numbers, which a checkpoint stores."""
        return [self._count, self._squares, *map(float, self._mean_2), *map(float, self._covariance_22.flat)]

    @property
    def found(self) -> NoiseEstimate | None:
        """The present estimate; None before the first."""
        if not self._count:
            return None
        g2, s = map(float, self._mean_2)
        return NoiseEstimate(s / g2 if g2 > 0 else math.inf, *self._interval(g2, s))

    def _interval(self, g2: float, s: float) -> tuple[float, float]:
        """All b for which s - b g2 is within t standard deviations of 0 (Fieller, 1954)."""
        if self._squares >= 1 or (freedom := 1 / self._squares - 1) < FEWEST:
            return 0.0, math.inf
        # Unbiased covariance of one estimate, times its remaining share in the mean.
        of_mean_22 = self._covariance_22 * self._squares / (1 - self._squares)
        t2 = student_t(freedom) ** 2
        p, q, r = g2 * g2 - t2 * of_mean_22[0, 0], g2 * s - t2 * of_mean_22[0, 1], s * s - t2 * of_mean_22[1, 1]
        root = math.sqrt(max(q * q - p * r, 0.0))
        if p > 0 and g2 > 0:
            return max((q - root) / p, 0.0), max((q + root) / p, 0.0)
        return (q - root) / p if p < 0 and r > 0 else 0.0, math.inf


def student_t(freedom: float) -> float:
    """The 97.5% quantile of Student's t, within 4% from 2 degrees of freedom on (Cornish-Fisher expansion)."""
    z = 1.959964
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def register(run: Run) -> None:
    """Says the noise scale and the last step's batch before each save and evaluation, if it was measured."""

    def say(_: Moment) -> None:
        trainer, config = run.trainer, run.trainer.config
        if (found := trainer.metrics.noise.found) is None:
            return
        tokens = config.tokens_before(trainer.step) - config.tokens_before(trainer.step - 1)
        # During rounds the batch of a step is that of one replica.
        batch = tokens // (config.parallel.replica if trainer.programs.rounds else 1)
        run.console.say(f"step {trainer.step}  {reading(found, batch)}")

    run.when(lambda moment: run.is_due("save", moment) or run.is_due("evaluate", moment), say)
