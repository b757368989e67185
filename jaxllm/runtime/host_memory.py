"""The memory of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.display import readable


def host_memory() -> tuple[int | None, int | None]:
    """(bytes of this machine, bytes a process may still take), the latter also limited by its control group."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None, None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        # "max" means no limit.
        with suppress(OSError, ValueError):
            available = min(available, max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
    return total, available


def require_host_memory(needed_bytes: int, what: str) -> None:
    """Compares with all memory of this machine. The system would kill what exceeds it, after minutes and without a word.

    Args:
      what: the start of a sentence, such as "The model's weights".

    Raises:
      ConfigError: the machine does not have that much.
    """
    total, _ = host_memory()
    if total is not None and needed_bytes > total:
        raise ConfigError(
            f"{what} need at least {readable(needed_bytes)}, and this machine has {readable(total)}: use a smaller model."
        )
