"""What peer monitors exchange, and the connection between two of them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from jaxllm.config import ConfigError
from jaxllm.config.types import Switch
from jaxllm.runtime import exit_codes, progress
from jaxllm.runtime.socket_messages import Name, Pid, Rank, Reader, Sentence
from jaxllm.untrusted import checked

MOST_NAMED = 16
MAX_MESSAGE_BYTES = 2**16
"""Length limit of a message; the longest is an error's sentence."""
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
class Hello:
    """The first message of a connection."""

    hello: Rank
    host: Name
    pid: Pid


@dataclass(frozen=True)
class Slowest:
    """PeerMonitor.slowest of process 0."""

    slowest: PeerStatus | None


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


Message = Hello | progress.Snapshot | Slowest | Bye | StopNotice


def parse(message: dict[str, Any]) -> Message | None:
    """A message by its first key; None if its kind is not known.

    Raises:
      RefusedInput: its kind is known, but it holds something else.
    """
    kinds: dict[str, type[Message]] = {"hello": Hello, "phase": progress.Snapshot, "slowest": Slowest, "bye": Bye}
    kind = next((kind for key, kind in kinds.items() if key in message), None)
    if kind is None and "notice" in message:
        return checked(message["notice"], StopNotice)
    return None if kind is None else checked(message, kind)


@dataclass
class Link:
    """One end of a connection, and the state of the other end."""

    socket: socket.socket
    rank: int | None
    """None until the other end has sent its rank."""
    heard_s: float
    reader: Reader = field(default_factory=lambda: Reader(MAX_MESSAGE_BYTES))
    excused: bool = False
    """The other end said goodbye or announced its failure: its silence is no loss."""

    def send(self, **message: Any) -> None:
        if self.rank is None:
            # A stranger is told nothing.
            return
        # Closed, or so full that the other end has not read for minutes: the receiving side detects both.
        with suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")


def connect(rank: int, address: tuple[str, int], limit_s: float) -> socket.socket:
    """A connection to process 0, tried for so many seconds. Raises ConfigError if it cannot be reached."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection(address, timeout=max(limit_s, 1))
        except OSError as error:
            if time.monotonic() > until_s:
                # Process 0's port was open when the processes met, and is closed now: process 0 has ended.
                gone = isinstance(error, ConnectionRefusedError)
                remedy = "open all ports between the hosts, as collectives need them too"
                refused = ConfigError(
                    f"Process {rank} cannot reach process 0 at {address[0]}:{address[1]} ({error.strerror or error}): "
                    f"{'look at its own output' if gone else remedy}."
                )
                if gone:
                    refused.exit_code = exit_codes.LOST
                raise refused from None
        time.sleep(0.5)


def listed(words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:MOST_NAMED]) + (f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else "")
