"""The CPUs that this process may use."""

from __future__ import annotations

import os


def available_cpus() -> int:
    """Cores of this machine that this process may use: a job often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
