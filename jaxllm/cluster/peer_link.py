"""What peer monitors exchange, and the connection between two of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from jaxllm.cluster import progress
from jaxllm.cluster.socket_messages import Connection, Elapsed, Name, Rank, Sentence
from jaxllm.config.types import Switch
from jaxllm.untrusted import checked

MOST_NAMED = 16
FIRST_BEAT_S = 20.0
"""Time beyond the allowed silence that a process has for its first message, since not all start JAX in the same time."""
GRACE_S = 2.0
"""Wait before a process reports. One whose error may come from a lost peer waits for the notice of that loss; one that hears of
another's error waits for its own, since most bad input is found by all."""


@dataclass(frozen=True)
class Member:
    """One process of a run."""

    rank: int
    host: str
    pid: int


class PeerStatus(NamedTuple):
    """Phase of a process, as far as process 0 knows."""

    rank: Rank
    host: Name
    seen: progress.Snapshot


@dataclass(frozen=True)
class Slowest:
    """PeerMonitor.slowest and idle_s of process 0."""

    slowest: PeerStatus | None
    idle_s: Elapsed | None = None


@dataclass(frozen=True)
class Bye:
    """The sender is done: its closed connection is no loss."""


@dataclass(frozen=True)
class StopNotice:
    """Reason why all processes have to exit."""

    sentence: Sentence
    code: Annotated[int, Field(strict=True, ge=1, le=255)]
    own_error: Switch = False
    """A process reported its own error: others may be about to find the same."""
    stuck: Switch = False
    """All processes should print their stacks."""

    @property
    def wait_s(self) -> float:
        return GRACE_S if self.own_error else 0.0


Message = progress.Snapshot | Slowest | Bye | StopNotice


def parse(message: dict[str, Any]) -> Message | None:
    """A message by its first key; None if its kind is not known.

    Raises:
      RefusedInput: its kind is known, but it holds something else.
    """
    kinds: dict[str, type[Message]] = {"phase": progress.Snapshot, "slowest": Slowest, "bye": Bye}
    kind = next((kind for key, kind in kinds.items() if key in message), None)
    if kind is None and "notice" in message:
        return checked(message["notice"], StopNotice)
    return None if kind is None else checked(message, kind)


class Link:
    """A connection, and the state of the other end.

    Args:
      rank: of the other end.
    """

    def __init__(self, rank: int, connection: Connection):
        self.rank, self.connection = rank, connection
        self.heard_s = time.monotonic() + FIRST_BEAT_S
        self.excused = False
        """The other end said goodbye or announced its failure: its silence is no loss."""
        self._sending = threading.Lock()
        connection.socket.setblocking(False)

    def send_now(self, **message: Any) -> None:
        """Sends a message if that does not block."""
        # Two threads send, and lines are numbered.
        with self._sending:
            try:
                self.connection.socket.send(self.connection.channel.line(json.dumps(message)))
            except OSError:
                # Closed, or so full that the other end has not read for minutes: the receiving side detects both.
                self.connection.channel.withdraw()


def listed(words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:MOST_NAMED]) + (f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else "")
