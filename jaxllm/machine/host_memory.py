"""The memory of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from jaxllm.config import ConfigError
from jaxllm.display import readable

GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Versions 2 and 1 of control groups: the controller's name in /proc/self/cgroup, the mount point, and the files with the limit
and with what is used."""


def host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(bytes of this machine that this process may have, bytes it may still take). Its control groups limit both, as in a
    container or a SLURM job. None: not known.

    Args:
      root: the folder of proc/ and sys/.
    """
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None, None
    for limit_file, used_file in _control_groups(root):
        # "max" means no limit.
        with suppress(OSError, ValueError):
            limit = int(limit_file.read_text())
            total = min(total, limit)
            used = int(used_file.read_text()) - _reclaimable(used_file.with_name("memory.stat"))
            available = min(available, max(limit - used, 0))
    return total, available


def _reclaimable(stat: Path) -> int:
    """Bytes of files in the page cache that the system gives up first; they count as used. 0 if it is not known."""
    try:
        values = dict(line.split() for line in stat.read_text().splitlines())
        return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _control_groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """Files of limit and use of this process's control groups, and of those around them. They need not be there: a container's
    system may name groups of its host, of which only the mount point is visible inside.
    """
    paths: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    for controller, mount, limit, used in GROUPS:
        own = PurePosixPath(paths.get(controller, "/").strip("/"))
        for folder in (own, *own.parents):
            yield root / mount / folder / limit, root / mount / folder / used


def require_host_memory(needed_bytes: int, what: str) -> None:
    """Compares with all memory that this process may have. The system would kill what exceeds it, after minutes and without a
    word.

    Args:
      what: the start of a sentence, such as "The model's weights".

    Raises:
      ConfigError: it is not that much.
    """
    total, _ = host_memory()
    if total is not None and needed_bytes > total:
        raise ConfigError(
            f"{what} need at least {readable(needed_bytes)}, and this machine has {readable(total)} for this process: use a "
            f"smaller model."
        )
