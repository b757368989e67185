"""Answers to a run (run/advisor.py): its speed, what would make it fit, a layout for fewer hosts, its report. Configs are
resolved, but for that of `fastest`. No JAX.
"""

from jaxllm.config import Config, ConfigError
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.cost_model.memory import EstimateMemory
from jaxllm.plan import advice
from jaxllm.plan.quote import Span, predicted_speed
from jaxllm.plan.search import SearchOptions, search
from jaxllm.run_report.page import page
from jaxllm.run_report.summary import report_on

STAND_IN = "h100-80gb"
"""Ranks layouts for devices that the planner does not know, such as CPUs, as if their memory were without limit."""
AS_BEFORE = ("schedule", "offload_state", "remat", "zero")
"""Kept where something fits with them: the search is then a matter of seconds, and the program has been tried. The ZeRO level
is the first to be given up: fewer ranks may need a higher one."""


def speed(config: Config, gpu: Gpu) -> Span:
    """Tokens/s of a device."""
    return predicted_speed(config, gpu, _per_host(config, gpu))


def changes_that_fit(config: Config, capacity_bytes: int, gpu: Gpu | None, estimate: EstimateMemory) -> list[advice.Change]:
    """Changes with which a step takes at most so many bytes on the same devices, cheapest first."""
    return advice.changes_that_fit(config, capacity_bytes, gpu, gpu and _per_host(config, gpu), estimate)


smallest_cluster = advice.smallest_cluster
"""More of the same devices, on which a step fits."""


def fastest(config: Config, gpu: Gpu | None, devices: int, per_host: int) -> Config | None:
    """The config in the fastest layout for so many devices, close to the given one; None if nothing fits. gpu: None for devices
    that the planner does not know."""
    for keep in (AS_BEFORE, AS_BEFORE[:-1], ()):
        options = SearchOptions(best=1, keep=keep, device_bytes=None if gpu else float("inf"))
        try:
            plan = search(config, gpu or find_gpu(STAND_IN), devices, per_host, options)
        except ConfigError:
            continue
        if plan.candidates:
            return plan.best
    return None


def report_page(folder: str) -> str | None:
    """The HTML page of `jaxllm report`; None if there can be none."""
    try:
        return page(report_on(folder))
    except ConfigError:
        return None


def _per_host(config: Config, gpu: Gpu) -> int:
    return choose_gpus_per_host(config.devices, None, gpu.gpus_per_host, config.parallel)[0]
