"""Time and memory of a run, as each line of metrics.jsonl reports them beside the step's own numbers, so that `jaxllm report`
needs no other file.

    timer = RunTimer()                          # when the run starts
    record |= timer.record_keys(trainer, peak)  # just before the line of a step is written

Seconds are process 0's, from the previous line to this one: they end before a step's numbers were read, which is one step
behind. Their sum over a run is exact.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import jax

from jaxllm.cluster import progress
from jaxllm.machine import program_cache
from jaxllm.run.memory_check import total_bytes
from jaxllm.run.metrics import Record

ALWAYS = ("data",)
"""Phases with a key in every line; the others have one only if they took any time."""
PAUSES = ("compile", "evaluate", "save")
START = ("meet", "devices", "dataset", "initialize", "restore", "step")
"""Phases that the first line of a start has a key for, beside those above. The seconds of "start" are its start_other_s."""


class RunTimer:
    """Measures one start of a run, from construction. `import_s`: what this process spent before; 0: not known."""

    def __init__(self, import_s: float = 0.0):
        self._import_s = import_s
        self._began_unix_s = time.time()
        self._before_s = progress.totals()
        self._first = True
        # Weak references: a strong one would keep the program on the devices, and an id may be reused.
        self._programs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._compiled_bytes = 0

    def record_keys(self, trainer: Any, peak_flops: float | None = None) -> Record:
        """Keys of the next line, on the process that writes it.

        Args:
          trainer: a Trainer that has compiled its step.
          peak_flops: of one device in the compute dtype, FLOP/s; None if unknown.

        Every line has unix_s, the current time in seconds since 1970; data_s, the wait for batches; on GPUs memory_peak_bytes,
        the highest use of the fullest device of this process since it started. compile_s, evaluate_s and save_s are present if
        they are not 0. memory_compiled_bytes, the memory that XLA reserves for a step on each device, comes with the first
        program and with each that needs more: a larger batch's may. The first line of a start also has start_unix_s,
        the keys of `start_keys`, and those parts of the time since the import of jaxllm that are not 0: start_import_s,
        start_meet_s and so on by START, start_other_s. With compile_s, data_s and evaluate_s they add up to all of it.
        """
        now_s = progress.totals()
        spent_s = {name: seconds - self._before_s[name] for name, seconds in now_s.items()}
        self._before_s = now_s
        line: Record = {"unix_s": time.time()}
        line |= {f"{name}_s": spent_s[name] for name in (*ALWAYS, *PAUSES) if spent_s[name] or name in ALWAYS}
        if (peak_bytes := memory_in_use()) is not None:
            line["memory_peak_bytes"] = peak_bytes
        if (compiled_bytes := self._new_program_bytes(trainer.compiled)) > self._compiled_bytes:
            line["memory_compiled_bytes"] = self._compiled_bytes = compiled_bytes
        if self._first:
            self._first = False
            parts_s = {"import": self._import_s, **{name: spent_s[name] for name in START}, "other": spent_s["start"]}
            line |= {f"start_{name}_s": seconds for name, seconds in parts_s.items() if seconds}
            line |= {"start_unix_s": self._began_unix_s, **start_keys(trainer, peak_flops)}
        return line

    def _new_program_bytes(self, program: Any) -> int:
        """Bytes that XLA reserves for a step; 0 if the program is known already or XLA does not tell."""
        if program is None or program in self._programs:
            return 0
        self._programs.add(program)
        # Not every backend of JAX reports it.
        memory = program.memory_analysis()
        return 0 if memory is None else total_bytes(memory)


def start_keys(trainer: Any, peak_flops: float | None) -> Record:
    """Keys for one start: devices; absent_hosts, the number of those that it trains without; with a compilation cache
    programs_found in it and programs_compiled until the first step; if the devices' memory is known also memory_estimate_bytes,
    the closed form for the largest batch, and memory_capacity_bytes, the limit for a step; on a known GPU device_peak_flops,
    and predicted_tokens_per_s_per_device for the largest batch with its range, ..._low and ..._high.
    """
    record: Record = {"devices": trainer.mesh.size}
    if trainer.start.absent_hosts:
        record["absent_hosts"] = trainer.start.absent_hosts
    if any(counts := program_cache.counts()):
        record |= {f"programs_{name}": count for name, count in counts._asdict().items()}
    if (fit := trainer.start.memory_fit) is not None:
        record |= {"memory_estimate_bytes": fit.memory.peak_bytes, "memory_capacity_bytes": fit.capacity_bytes}
        if (speed := fit.speed) is not None:
            ends = {"": speed.expected, "_low": speed.low, "_high": speed.high}
            record |= {f"predicted_tokens_per_s_per_device{end}": value for end, value in ends.items()}
    if peak_flops is not None:
        record["device_peak_flops"] = peak_flops
    return record


def memory_in_use() -> int | None:
    """Most bytes in use at once on a device of this process since it started; None if no device reports it (CPU)."""
    stats_by_device = [(device.memory_stats() or {}) for device in jax.local_devices() if device.platform != "cpu"]
    return max((stats["peak_bytes_in_use"] for stats in stats_by_device if "peak_bytes_in_use" in stats), default=None)
