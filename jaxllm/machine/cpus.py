"""The CPUs that this process may use, and the threads and files that it may use."""

from __future__ import annotations

import os
import resource
import threading

from jaxllm.config import ConfigError

THREADS, FILES = 64, 64
"""JAX starts about as many threads on a small machine, and a run opens about forty files."""


def available_cpus() -> int:
    """Cores of this machine that this process may use: a job often has fewer than the machine."""
    return len(allowed_cpus())


def allowed_cpus() -> set[int]:
    """Numbers of these cores."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def require_threads_and_files(count: int = THREADS) -> None:
    """Starts threads and ends them again, in a few milliseconds: XLA's own code would abort where none starts.

    Raises:
      ConfigError: the system does not start so many, or does not let this process open FILES.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FILES:
        raise ConfigError(f"This process may open only {files} files, and a run needs about {FILES}: raise `ulimit -n`.")
    ended, started = threading.Event(), []
    try:
        for number in range(count):
            thread = threading.Thread(target=ended.wait, name=f"probe {number}", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise ConfigError(
            f"The system starts only {len(started)} more threads for this user, and JAX needs about {count}: raise `ulimit -u`."
        ) from None
    finally:
        ended.set()
        for thread in started:
            thread.join()
