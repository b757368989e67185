"""Reads SLURM's short form of a list of hosts. No JAX, no network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from jaxllm.config.errors import ConfigError
from jaxllm.runtime.launcher_table import COORDINATOR
from jaxllm.runtime.socket_messages import MOST_PROCESSES
from jaxllm.untrusted import INT64, shown, whole_number

MOST_BRACKETS = 8
"""Limit for one name in a node list; SLURM's own limit is five dims."""


def expand_node_list(node_list: str) -> list[str]:
    """Hosts of SLURM's short form, in its order: h[1-3,7],gpu-[001-004]x are h1 h2 h3 h7 gpu-001x and so on.

    Raises:
      ConfigError: the text is not a node list, or has more than MOST_PROCESSES hosts.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", node_list)
    try:
        if not parts or ",".join(parts) != node_list or any(part.count("[") > MOST_BRACKETS for part in parts):
            raise ValueError
        hosts = list(itertools.islice((host for part in parts for host in _expand(part)), MOST_PROCESSES + 1))
    except ValueError:
        raise ConfigError(
            f"The SLURM node list {shown(node_list)} cannot be read: set {COORDINATOR}=host:port instead."
        ) from None
    if len(hosts) > MOST_PROCESSES:
        raise ConfigError(
            f"The SLURM node list {shown(node_list)} has more than {MOST_PROCESSES:,} hosts: correct it, or set "
            f"{COORDINATOR}=host:port instead."
        )
    return hosts


def _expand(part: str) -> Iterator[str]:
    """Yields each number in the brackets in turn; the last bracket varies fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, after = rest.partition("]")
    for span in numbers.split(","):
        first, dash, last = span.partition("-")
        least = whole_number(first, 0, INT64)
        # Leading zeros are part of the name. A span without a number would take time and give no host to count.
        for number in range(least, whole_number(last if dash else first, least, INT64) + 1):
            for end in _expand(after):
                yield f"{before}{number:0{len(first)}d}{end}"
