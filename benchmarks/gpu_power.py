"""Power and clocks of a GPU while a benchmark runs, by nvidia-smi.

    with sampling(file, gpu): ...                  one nvidia-smi process appends a line each 250 ms to a CSV file
    means(file, begin, end)                        {"power_w": ..., "sm_mhz": ..., "power_capped": ...} between two Unix times

Without nvidia-smi there is no file, and no figure.
"""

from __future__ import annotations

import csv
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

FIELDS = ("timestamp", "power.draw", "clocks.sm", "clocks_event_reasons.active")
PERIOD_MS = 250
_POWER_CAP = 0x4
"""Bit of the event reasons: the clocks are lowered to stay below the power limit."""


@contextmanager
def sampling(file: Path, gpu: str) -> Iterator[None]:
    """Samples the GPU, an index or UUID, until the end of the block."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}", f"--id={gpu}"]
    with file.open("a") as out:
        process = subprocess.Popen(["nvidia-smi", *query], stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def means(file: Path, begin: float, end: float) -> dict[str, float]:
    """Means over the samples of the interval; `power_capped` is the share of samples below the power limit by lower clocks."""
    if not file.exists():
        return {}
    samples = [sample for line in csv.reader(file.read_text().splitlines()) if (sample := _sample(line))]
    within = [sample[1:] for sample in samples if begin <= sample[0] <= end]
    names = ("power_w", "sm_mhz", "power_capped")
    return dict(zip(names, map(statistics.fmean, zip(*within, strict=True)), strict=True)) if within else {}


def _sample(line: list[str]) -> tuple[float, ...] | None:
    """(Unix time, watts, MHz, whether power lowered the clocks). None for an incomplete line or a value that is not known."""
    try:
        at, power_w, sm_mhz, reasons = map(str.strip, line)
        seconds = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
        return seconds, float(power_w), float(sm_mhz), float(bool(int(reasons, 16) & _POWER_CAP))
    except ValueError:
        return None
