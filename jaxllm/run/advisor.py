"""What a run asks of the planner and the report, which `jaxllm.fit` and the command line hand in: advisor.use(for_runs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import EstimateMemory

Change = Any
"""Keys of a config to set: overrides, as on the command line; figures, their effect; cost in time, in words; config."""


class Advisor:
    """Answers of a run without planner and report. Configs are resolved, but for that of `fastest`."""

    def speed(self, config: Config, gpu: Gpu) -> Any:
        """Tokens/s of a device: expected, low, high, and text(unit, decimals). None if it is not known."""
        return None

    def changes_that_fit(
        self, config: Config, capacity_bytes: int, gpu: Gpu | None, estimate: EstimateMemory
    ) -> Sequence[Change]:
        """Changes with which a step takes at most so many bytes on the same devices, cheapest first."""
        return ()

    def smallest_cluster(self, config: Config, capacity_bytes: int, gpu: Gpu | None, estimate: EstimateMemory) -> Change | None:
        """More of the same devices, on which a step fits."""
        return None

    def fastest(self, config: Config, gpu: Gpu | None, devices: int, per_host: int) -> Config | None:
        """The config in the fastest layout for so many devices, close to the given one; None if nothing fits. gpu: None for
        devices that the planner does not know."""
        raise ConfigError("launch.least_hosts needs the planner: start the run by jaxllm.fit or `jaxllm train`.")

    def report_page(self, folder: str) -> str | None:
        """The HTML page of `jaxllm report`; None if there can be none."""
        return None


_current: Any = Advisor()


def use(advisor: Any) -> None:
    """Every later question goes to `advisor`: a module with these functions."""
    global _current
    _current = advisor


def ask() -> Advisor:
    return _current


def is_known() -> bool:
    return not isinstance(_current, Advisor)
