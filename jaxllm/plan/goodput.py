"""Goodput of a run that failures interrupt, and the time between checkpoints that costs least.

    stops = Interruptions(between_failures_s=86_400, save_s=300, write_s=0, restart_s=600)
    stops.best_interval_s / 60             117 minutes
    stops.goodput(stops.best_interval_s)

Failures are a Poisson process: the time to the next one is exponential, whatever came before, also during a restart. Young 1974
("A first order approximation to the optimum checkpoint interval") balances saves and lost work to sqrt(2 save_s M), where M is
the time between failures. Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps") gives the
exact expected time under these assumptions, and a series for its minimum. Here the exact time is minimised, by bisection: that
also holds where saves are not short beside M, and needs no cases. The series agrees with it to 1% up to save_s = M / 2.

One thing is added to Daly's model, a save that is written while training continues: the loop waits save_s, and the checkpoint
counts only write_s later. A failure then also undoes the write_s of work since the copy. In the exact expected time write_s
adds to restart_s, and the best interval depends on neither. Steps are assumed to be as fast during a write as otherwise, which
is not measured on GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interruptions:
    """Saves and failures of a run on all its GPUs, in seconds."""

    between_failures_s: float
    """Mean time between failures of the job: that of one GPU over the number of GPUs."""
    save_s: float
    """Time that the loop waits for a save."""
    write_s: float
    """Time from then until the checkpoint is complete, while training continues."""
    restart_s: float
    """Time from a failure until training continues from the last checkpoint."""

    @property
    def best_interval_s(self) -> float:
        """Time of training between two saves that costs least, at least write_s: a save waits for the one before.

        The u = interval / M at which the derivative of the expected time is zero: -u - ln(1 - u) = save_s / M.
        """
        low, high, wanted = 0.0, 1.0, self.save_s / self.between_failures_s
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if middle == 1 or -middle - math.log1p(-middle) > wanted else (middle, high)
        return max(high * self.between_failures_s, self.write_s)

    def goodput(self, interval_s: float) -> float:
        """Expected share of the time that moves the run forward: training that no failure undoes.

        The expected time of one interval is M e^(R / M) (e^((interval + save) / M) - 1) (Daly 2006), with R = restart + write.
        """
        mean_s, period_s = self.between_failures_s, interval_s + self.save_s
        # Written so that nothing overflows.
        survives = math.exp(-(self.restart_s + self.write_s + period_s) / mean_s)
        return interval_s / mean_s * survives / -math.expm1(-period_s / mean_s)

    def lost_s(self, interval_s: float) -> float:
        """Time that a failure costs on average: restart, and the work since the last complete checkpoint."""
        return self.restart_s + self.write_s + (interval_s + self.save_s) / 2

    def wall_s(self, training_s: float, interval_s: float, deviations: float = 0.0) -> float:
        """Time until `training_s` of training is done: expected, or that many standard deviations of luck above it.

        The number of failures is Poisson's, and all moments of an interval are equally likely for each. It is never less than
        training and saves alone.
        """
        expected_s = training_s / self.goodput(interval_s)
        fixed_s, period_s = self.restart_s + self.write_s, interval_s + self.save_s
        squared = fixed_s**2 + fixed_s * period_s + period_s**2 / 3
        luck_s = math.sqrt(expected_s / self.between_failures_s * squared)
        return max(training_s * period_s / interval_s, expected_s + deviations * luck_s)
