"""Where a run's time and memory go: what each line of metrics.jsonl says of it, beside the step's own numbers, so that `jaxllm
report` needs no other file.

    clock = RunClock()                          # when the run begins
    record |= clock.of_line(trainer, peak)      # just before the line of a step is written

Seconds are process 0's, and those between the line before and this one: what came before a step's numbers were read, which is
one step behind. Summed over a run they are exact.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import jax

from jaxllm import progress
from jaxllm.train.fits import total_bytes
from jaxllm.train.metrics import Record

ALWAYS = ("data",)
"""Phases with a key in every line; the others only where they took any time."""
PAUSES = ("compile", "evaluate", "save")


class RunClock:
    """One start of a run, from when it is made."""

    def __init__(self):
        self._began_unix_s = time.time()
        self._before_s = progress.totals()
        self._first = True
        # Not held, for a program that is kept would keep its place on the devices; nor by id, which another may get after it.
        self._programs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._compiled_bytes = 0

    def of_line(self, trainer: Any, peak_flops: float | None = None) -> Record:
        """Keys of the line about to be written, on the process that writes it.

        Args:
          trainer: a Trainer that has compiled its step.
          peak_flops: of one device in the compute dtype, FLOP/s; None where that is not known.

        Every line has unix_s, now, in seconds since 1970; data_s, waiting for batches; on GPUs memory_peak_bytes, the most that
        was in use at once on the fullest device of this process since it began. compile_s, evaluate_s and save_s are there
        where they are not 0. memory_compiled_bytes, what XLA sets aside for a step on each device, is there with the first
        program, and with each that takes more: a larger batch's may. The first line of a start has also what `of_start` says.
        """
        now_s = progress.totals()
        spent_s = {name: now_s[name] - self._before_s[name] for name in (*ALWAYS, *PAUSES)}
        self._before_s = now_s
        line: Record = {"unix_s": time.time()}
        line |= {f"{name}_s": seconds for name, seconds in spent_s.items() if seconds or name in ALWAYS}
        if (peak_bytes := memory_in_use()) is not None:
            line["memory_peak_bytes"] = peak_bytes
        if (compiled_bytes := self._of_new_program(trainer.compiled)) > self._compiled_bytes:
            line["memory_compiled_bytes"] = self._compiled_bytes = compiled_bytes
        if self._first:
            self._first = False
            line |= {"start_unix_s": self._began_unix_s, **of_start(trainer, peak_flops)}
        return line

    def _of_new_program(self, program: Any) -> int:
        """What XLA sets aside for a step; 0 where that is known or it does not say."""
        if program is None or program in self._programs:
            return 0
        self._programs.add(program)
        # Not every backend of JAX's says.
        memory = program.memory_analysis()
        return 0 if memory is None else total_bytes(memory)


def of_start(trainer: Any, peak_flops: float | None) -> Record:
    """What one start adds: devices; where their memory is known also memory_estimate_bytes, the closed form for the largest
    batch, and memory_capacity_bytes, what a step may take; and device_peak_flops where that is known."""
    record: Record = {"devices": trainer.mesh.size}
    if (fit := trainer.memory_fit) is not None:
        record |= {"memory_estimate_bytes": fit.memory.peak_bytes, "memory_capacity_bytes": fit.capacity_bytes}
    if peak_flops is not None:
        record["device_peak_flops"] = peak_flops
    return record


def memory_in_use() -> int | None:
    """The most bytes that were in use at once on a device of this process, since it began; None where no device says (CPU)."""
    told = [(device.memory_stats() or {}) for device in jax.local_devices() if device.platform != "cpu"]
    return max((stats["peak_bytes_in_use"] for stats in told if "peak_bytes_in_use" in stats), default=None)
