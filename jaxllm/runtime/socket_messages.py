"""TCP connections between processes, and the messages on them: JSON objects, one per line, bounded and typed (untrusted.py)."""

from __future__ import annotations

import errno
import os
import socket
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from jaxllm.untrusted import INT32, parse_json, shown

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
"""Connections that a port holds beside those of the run's processes: beyond them, the oldest that has not said who it is makes
room. Otherwise strangers could use up the descriptors that the run needs for its files."""


class Reader:
    """Puts together the messages that come over one connection.

    Args:
      longest_bytes: of a message.
      prefix: what each line begins with, so that other programs on the port are told apart.
    """

    def __init__(self, longest_bytes: int, prefix: str = ""):
        self._longest_bytes, self._prefix, self._buffer = longest_bytes, prefix.encode(), b""

    def receive(self, connection: socket.socket) -> list[dict[str, Any]] | None:
        """Messages that have come, of a socket that does not block; None if the other end is closed or sends anything else."""
        try:
            received = connection.recv(65536)
            return self.read(received) if received else None
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            return None

    def read(self, received: bytes) -> list[dict[str, Any]]:
        """Messages that are complete with these bytes.

        Raises:
          ValueError: they are not a message.
        """
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if len(self._buffer) > self._longest_bytes or not self._buffer.startswith(self._prefix[: len(self._buffer)]):
            raise ValueError("not a message")
        return [self._parsed(line) for line in lines]

    def _parsed(self, line: bytes) -> dict[str, Any]:
        if not line.startswith(self._prefix):
            raise ValueError("not a message")
        message = parse_json(line.removeprefix(self._prefix), self._longest_bytes)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message


def listen(port: int) -> socket.socket:
    """Opens a port on all addresses of this host; 0 takes any free port. Unlike JAX's, it cannot be opened twice.

    Raises:
      OSError: the port is taken, or not allowed.
    """
    dual = socket.has_dualstack_ipv6()
    host, family = ("::", socket.AF_INET6) if dual else ("0.0.0.0", socket.AF_INET)
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
    return connection
