"""Messages between processes over a TCP connection: JSON objects, a line each. Only the standard library here, and no JAX."""

from __future__ import annotations

import json
import socket
from typing import Any


class Reader:
    """Puts together the messages that come over one connection.

    Args:
      longest_bytes: of a message.
      prefix: what each line begins with, so that other programs on the port are told apart.
    """

    def __init__(self, longest_bytes: int, prefix: str = ""):
        self._longest_bytes, self._prefix, self._buffer = longest_bytes, prefix.encode(), b""

    def receive(self, connection: socket.socket) -> list[dict[str, Any]] | None:
        """Messages that have come, of a socket that does not block; None if the other end is closed.

        Raises:
          ValueError: what came is not a message.
        """
        try:
            received = connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.read(received) if received else None

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
        message = json.loads(line.removeprefix(self._prefix)) if line.startswith(self._prefix) else None
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message
