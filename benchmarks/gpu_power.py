"""The GPU that a benchmark runs on, and its power and clocks meanwhile, by NVML.

    kind_of_gpu()                        as JAX names it
    with sampling(file): ...             a thread appends a line each 250 ms to a CSV file
    means(file, begin, end)              {"power_w": ..., "sm_mhz": ..., "power_capped": ...} between two Unix times

Without NVIDIA's driver there is no file, and no figure.
"""

from __future__ import annotations

import csv
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxllm.machine.gpus import SM_CLOCK, nvml

PERIOD_S = 0.25
POWER_CAP = 0x4
"""nvmlClocksEventReasonSwPowerCap: the clocks are lowered to stay below the power limit."""


def first_gpu() -> str:
    """Its index or UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def kind_of_gpu() -> str | None:
    return None if (gpu := _handle()) is None else nvml("DeviceGetName", gpu)


def _handle() -> Any:
    nvml("Init")
    gpu = first_gpu()
    return nvml("DeviceGetHandleByIndex", int(gpu)) if gpu.isdecimal() else nvml("DeviceGetHandleByUUID", gpu)


@contextmanager
def sampling(file: Path) -> Iterator[None]:
    """Samples the GPU until the end of the block."""
    if (gpu := _handle()) is None:
        yield
        return
    ended = threading.Event()

    def sample() -> None:
        with file.open("a") as out:
            while not ended.wait(PERIOD_S):
                power, clock = nvml("DeviceGetPowerUsage", gpu), nvml("DeviceGetClockInfo", gpu, SM_CLOCK)
                reasons = nvml("DeviceGetCurrentClocksEventReasons", gpu)
                if None not in (power, clock, reasons):
                    print(time.time(), power / 1000, clock, int(bool(reasons & POWER_CAP)), sep=",", file=out, flush=True)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def means(file: Path, begin: float, end: float) -> dict[str, float]:
    """Means over the samples of the interval; `power_capped` is the share of samples below the power limit by lower clocks."""
    if not file.exists():
        return {}
    names = ("power_w", "sm_mhz", "power_capped")
    # A benchmark that was killed may have left half a line.
    samples = [tuple(map(float, line)) for line in csv.reader(file.read_text().splitlines()) if len(line) == 1 + len(names)]
    within = [values for at, *values in samples if begin <= at <= end]
    return dict(zip(names, map(statistics.fmean, zip(*within, strict=True)), strict=True)) if within else {}
