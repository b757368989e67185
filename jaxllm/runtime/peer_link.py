"""What peer monitors exchange, and the connection between two of them."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from jaxllm.config import ConfigError
from jaxllm.config.types import Switch
from jaxllm.runtime import exit_codes, progress
from jaxllm.runtime.authentication import Channel, greet
from jaxllm.runtime.socket_messages import Connection, Elapsed, Name, Pid, Rank, Sentence
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


class Link(Connection):
    """One end of a connection, and the state of the other end.

    Args:
      rank: None until the other end has sent its rank.
    """

    def __init__(self, connection: socket.socket, rank: int | None, channel: Channel, address: str = ""):
        super().__init__(connection, channel, MAX_MESSAGE_BYTES, address)
        self.rank, self.heard_s = rank, self.since_s
        self.excused = False
        """The other end said goodbye or announced its failure: its silence is no loss."""
        self._sending = threading.Lock()

    def send_now(self, **message: Any) -> None:
        """Sends a message if that does not block."""
        if self.rank is None:
            # A stranger is told nothing.
            return
        # Two threads send, and lines are numbered.
        with self._sending:
            try:
                self.socket.send(self.channel.line(json.dumps(message)))
            except OSError:
                # Closed, or so full that the other end has not read for minutes: the receiving side detects both.
                self.channel.withdraw()


def connect(own: Member, address: tuple[str, int], limit_s: float, secret: bytes | None = None) -> Link:
    """A link to process 0, tried for so many seconds. Raises ConfigError if it cannot be reached."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return _connect(own, address, max(until_s - time.monotonic(), 1), secret)
        except (OSError, ValueError) as error:
            if time.monotonic() > until_s:
                # Process 0's port was open when the processes met. Closed, or without an answer: process 0 has ended or hangs.
                gone = isinstance(error, ConnectionError | ValueError)
                remedy = "open all ports between the hosts, as collectives need them too"
                why = error.strerror or error if isinstance(error, OSError) else "something else answers there"
                refused = ConfigError(
                    f"Process {own.rank} cannot reach process 0 at {address[0]}:{address[1]} ({why}): "
                    f"{'look at its own output' if gone else remedy}."
                )
                if gone:
                    refused.exit_code = exit_codes.LOST
                raise refused from None
        time.sleep(0.5)


def _connect(own: Member, address: tuple[str, int], limit_s: float, secret: bytes | None) -> Link:
    until_s = time.monotonic() + limit_s
    connection, channel = socket.create_connection(address, timeout=limit_s), Channel(secret, is_server=False)
    try:
        greet(connection, channel, limit_s)
        link = Link(connection, 0, channel)
        link.send_now(hello=own.rank, host=own.host, pid=own.pid)
        if secret is not None:
            # Strangers may have crowded it out until then.
            connection.settimeout(max(until_s - time.monotonic(), 0.001))
            if not connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            connection.setblocking(False)
        return link
    except TimeoutError:
        connection.close()
        raise ConnectionResetError(errno.ECONNRESET, "it does not answer") from None
    except BaseException:
        connection.close()
        raise


def listed(words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:MOST_NAMED]) + (f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else "")
