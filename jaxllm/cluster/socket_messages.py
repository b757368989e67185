"""TCP connections between processes, and the messages on them: JSON objects, one per line, bounded and typed (untrusted.py),
and signed if the run has a secret (cluster/authentication.py).
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field

from jaxllm.cluster.authentication import MAC_DIGITS, Channel
from jaxllm.machine.variables import SECRET, SECRET_FILE
from jaxllm.untrusted import INT32, parse_json, shown

log = logging.getLogger(__name__)

MOST_PROCESSES = 2**17
"""Limit for one run."""
MAX_SENTENCE = 4000

Name = Annotated[str, Field(strict=True, max_length=256), AfterValidator(lambda text: shown(text, 256))]
"""A host, a GPU or a version. Its control characters are escaped: it is printed."""
Sentence = Annotated[str, Field(strict=True), AfterValidator(lambda text: shown(text, MAX_SENTENCE))]
"""A message for a person, cut and escaped likewise."""
Rank = Annotated[int, Field(strict=True, ge=0, lt=MOST_PROCESSES)]
Pid = Annotated[int, Field(strict=True, ge=0, le=INT32)]
Elapsed = Annotated[float, Field(strict=True, ge=0, le=INT32, allow_inf_nan=False)]

STRANGERS = 64
"""Connections that a port holds beside those of the run's processes: beyond them, one that has not said who it is makes room.
Otherwise strangers could use up the descriptors that the run needs for its files."""
INTRODUCTION_S = 5.0
"""Time in which a connection must say who it is."""
SEND_S = 10.0
ACCEPTED_AT_ONCE = 32
"""Between two looks at the other connections. Half of STRANGERS, so that each new one is read before it makes room."""
MOST_REPORTED = 16
"""Addresses in warnings: an attacker may have millions."""


class Reader:
    """Puts together the messages that come over one connection.

    Args:
      longest_bytes: of a message.
    """

    def __init__(self, longest_bytes: int, channel: Channel):
        self._longest_bytes, self._channel, self._buffer = longest_bytes, channel, b""

    def read(self, received: bytes) -> list[dict[str, Any]]:
        """Messages that are complete with these bytes.

        Raises:
          Unproven: the other end has another secret, or none.
          ValueError: they are not a message.
        """
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        prefix, longest = self._channel.prefix, self._longest_bytes + MAC_DIGITS + 1
        if len(self._buffer) > longest or not self._buffer.startswith(prefix[: len(self._buffer)]):
            raise ValueError("not a message")
        return [message for line in lines if (message := self._parsed(line)) is not None]

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if not line.startswith(self._channel.prefix):
            raise ValueError("not a message")
        text = self._channel.open(line.removeprefix(self._channel.prefix))
        if text is None:
            return None
        message = parse_json(text, self._longest_bytes)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message


class Connection:
    """One end of a connection that does not block, except where its owner sets a timeout.

    Args:
      longest_bytes: of a message that comes.
    """

    def __init__(self, connection: socket.socket, channel: Channel, longest_bytes: int, address: str = ""):
        self.socket, self.channel, self.address = connection, channel, address
        self.since_s = time.monotonic()
        self.unread: list[dict[str, Any]] = []
        """Messages that came with others and are not looked at yet. `receive` gives them first."""
        self._reader = Reader(longest_bytes, channel)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have come; None if the other end is closed or sends anything else."""
        try:
            with suppress(BlockingIOError):
                self.read()
            messages, self.unread = self.unread, []
        except (OSError, ValueError):
            # First what came before.
            messages, self.unread = self.unread or None, []
        if reply := self.channel.reply:
            self.channel.reply = b""
            with suppress(OSError):
                self.socket.send(reply)
        return messages

    def read(self) -> None:
        """Adds what has come to `unread`.

        Raises:
          OSError: the other end is closed, or there is nothing.
          ValueError: it sends anything else.
        """
        received = self.socket.recv(65536)
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self.unread += self._reader.read(received)

    def send(self, text: str) -> None:
        """Sends a message, and waits up to SEND_S for the other end to take it."""
        # A process that is gone or frozen is detected when its next message does not come.
        with suppress(OSError):
            self.socket.settimeout(SEND_S)
            self.socket.sendall(self.channel.line(text))
            self.socket.setblocking(False)

    def hung_up(self) -> bool:
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


C = TypeVar("C", bound=Connection)


class Door(Generic[C]):
    """Process 0's port: takes connections, and turns away those that do not say in time who they are.

    Args:
      listener: a socket of `listen`. It does not block from now on.
      selector: looks at the listener and, with themselves as data, at all connections.
      places: connections of the run's processes.
      make: a stranger from a socket and the other end's address.
      drop: closes a stranger. It calls `forget`.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        places: int,
        make: Callable[[socket.socket, str], C],
        drop: Callable[[C], object],
    ):
        self._listener, self._selector, self._places, self._make, self._drop = listener, selector, places, make, drop
        self._strangers: dict[C, None] = {}
        """Those that have not said who they are, the oldest first."""
        self._reported: set[str] = set()
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, None)

    def open(self) -> None:
        """Takes some of the connections that wait."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            stranger = self._make(connection, address[0].removeprefix("::ffff:"))
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            self._strangers[stranger] = None
            if len(self._selector.get_map()) > self._places + STRANGERS:
                # Of the address with most strangers, one that has not answered, the oldest: nobody crowds out what comes from
                # elsewhere.
                crowds = Counter(other.address for other in self._strangers)
                self._drop(max(self._strangers, key=lambda other: (crowds[other.address], not other.channel.greeted)))

    def tidy(self) -> None:
        """Drops strangers that had their time."""
        before_s = time.monotonic() - INTRODUCTION_S
        for stranger in list(itertools.takewhile(lambda one: one.since_s < before_s, self._strangers)):
            self._drop(stranger)

    def forget(self, connection: C) -> None:
        """It is closed, or no stranger any more."""
        self._strangers.pop(connection, None)

    def report(self, connection: Connection) -> None:
        """Warns, once per address, if a connection was refused because of its secret."""
        if connection.channel.refused and connection.address not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(connection.address)
            log.warning(
                "A process at %s was turned away: its secret is not that of this run (%s, %s).",
                connection.address,
                SECRET,
                SECRET_FILE,
            )


def listen(port: int, address: str = "") -> socket.socket:
    """Opens a port; 0 takes any free port. Unlike JAX's, it cannot be opened twice.

    Args:
      address: IPv4 or IPv6, of this host; empty: all.

    Raises:
      OSError: the port is taken, or not allowed.
    """
    dual = not address and socket.has_dualstack_ipv6()
    host, family = address or ("::" if dual else "0.0.0.0"), socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    # It sets SO_REUSEADDR: closed connections of an earlier run may linger there; a live listener is detected all the same.
    return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=dual)


def connect(host: str, port: int, limit_s: float) -> socket.socket:
    """Raises OSError if nothing listens there, or the host cannot be reached in time."""
    connection = socket.create_connection((host, port), timeout=limit_s)
    if connection.getsockname() == connection.getpeername():
        # If nothing listens on a port of this host within Linux's range for outgoing connections, about one try in ten
        # thousand gets this very port and connects to itself.
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    # Otherwise a second short message waits for the first one's acknowledgement, 40 ms on Linux.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Ends a connection within about half a minute when the other host has lost its power or its cable (Linux)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
