"""TCP connections between processes, and the messages on them: JSON objects, one per line, bounded and typed (untrusted.py).

Only processes of the same run are taken: a secret that the launcher gives to all of them signs what they send each other.

    client                                        server (process 0)
    hello NONCE                             ->
                                            <-    hello NONCE
    MAC MESSAGE                             ->    verified: the client has the secret
                                            <-    MAC MESSAGE, verified: so has the server

The key of a connection is derived from the secret, the protocol and both nonces, which are fresh. A MAC (HMAC-SHA256, RFC 2104)
covers the direction, the number of the message in its direction, and the message. So a message that is changed, replayed from
another connection or this one, reordered, left out before another or sent back to its sender is refused, and with it the
connection. Nothing is encrypted: messages are host names, versions and numbers of steps.

Without a secret, lines are the messages alone.
"""

import errno
import hmac
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import INT32, RefusedInput, opened, parse_json, reason_of, shown

SECRET, SECRET_FILE = "JAXLLM_SECRET", "JAXLLM_SECRET_FILE"
LEAST_BYTES, MOST_BYTES = 16, 4096
"""Limits for a secret. Launchers make 32 random bytes, as 64 hexadecimal digits."""
NONCE_BYTES, MAC_DIGITS = 32, 64
_HELLO = re.compile(rb"hello ([0-9a-f]{64})")
REFUSAL = '{"unproven": true}'
"""What process 0 sends, unsigned, to a client that has another secret or none. The latter reads it as a reply."""


class Unproven(ValueError):
    """The other end has another secret, or none."""


class Channel:
    """One end of a connection: signs the lines that it sends, in this order, and verifies those that come. Without a secret a
    line is its message. Not for several threads at once.

    Args:
      prefix: of each line, so that other programs on the port are told apart. The key depends on it too.
      is_server: this end is process 0's.
    """

    def __init__(self, secret: bytes | None, prefix: str = "", *, is_server: bool):
        self.prefix, self._secret, self._is_server = prefix.encode(), secret, is_server
        self.is_guarded = secret is not None
        self._nonce = b"" if secret is None else secrets.token_hex(NONCE_BYTES).encode()
        self._key = b""
        self._sent = self._received = 0
        self.refused = False
        """The other end has not proven that it has the secret, and tried."""
        self.reply = b""
        """What a server has to send at once, unsigned: its own hello, or REFUSAL."""

    @property
    def greeted(self) -> bool:
        return bool(self._key)

    def hello(self) -> bytes:
        return self.prefix + b"hello " + self._nonce + b"\n"

    def line(self, text: str) -> bytes:
        """The line that carries the next message."""
        message = text.encode()
        if self.is_guarded:
            message = self._mac(self._is_server, self._sent, message) + b" " + message
            self._sent += 1
        return self.prefix + message + b"\n"

    def withdraw(self) -> None:
        """The last line was not sent."""
        self._sent = max(self._sent - 1, 0)

    def open(self, line: bytes) -> bytes | None:
        """The message of a line, given without prefix; None if it is the other end's hello.

        Raises:
          Unproven: the first line shows that the other end has another secret, or none.
          ValueError: it is no line of this connection in this order.
        """
        try:
            if self._secret is None:
                if _HELLO.fullmatch(line):
                    raise Unproven
                return line
            if not self.greeted:
                return self._greet(line)
            mac, _, message = line.partition(b" ")
            if not hmac.compare_digest(mac, self._mac(not self._is_server, self._received, message)):
                raise ValueError("not the next message of this connection") if self._received else Unproven
        except Unproven:
            self.refused = True
            self.reply = self.prefix + REFUSAL.encode() + b"\n" if self._is_server else b""
            raise
        self._received += 1
        return message

    def _greet(self, line: bytes) -> None:
        hello = _HELLO.fullmatch(line)
        if hello is None:
            raise Unproven if line.startswith(b"{") else ValueError("not a message")
        nonces = (hello[1], self._nonce) if self._is_server else (self._nonce, hello[1])
        self._key = hmac.digest(self._secret or b"", b"\n".join((b"jaxllm connection 1", self.prefix, *nonces)), "sha256")
        self.reply = self.hello() if self._is_server else b""

    def _mac(self, by_server: bool, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, b"%d %d " % (by_server, number) + message, "sha256").hex().encode()


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret of this run; None where none is given. ConfigError if it is given twice, is too short or too long, or its file
    cannot be read, or can be read by others."""
    path = environ.get(SECRET_FILE)
    if path is None:
        secret = environ.get(SECRET)
        return None if secret is None else _long_enough(os.fsencode(secret), SECRET)
    if SECRET in environ:
        raise ConfigError(f"{SECRET} and {SECRET_FILE} are both set: unset one of them.")
    name = f"{SECRET_FILE}={shown(path)}"
    try:
        with opened(Path(path)) as file:
            mode, content = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(MOST_BYTES + 1)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{name} cannot be read ({reason_of(error)}): name a file with the secret, or unset it.") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name} is open to other users (mode {mode:o}): make a new secret in a file of mode 600.")
    return _long_enough(content, name)


def _long_enough(given: bytes, name: str) -> bytes:
    secret = given.strip()
    if len(secret) < LEAST_BYTES or len(given) > MOST_BYTES:
        raise ConfigError(
            f"The secret in {name} has {'too many' if len(given) > MOST_BYTES else len(secret)} bytes: give {LEAST_BYTES} to "
            f"{MOST_BYTES:,}, such as what `openssl rand -hex 32` prints."
        )
    return secret


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

SEND_S = 10.0


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
        self._longest_bytes, self._buffer = longest_bytes, b""
        connection.setblocking(False)
        # Otherwise a second short message waits for the first one's acknowledgement, 40 ms on Linux.
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
        """Adds the messages that are complete with what has come to `unread`.

        Raises:
          OSError: the other end is closed, or there is nothing.
          Unproven: it has another secret, or none.
          ValueError: it sends anything else.
        """
        received = self.socket.recv(65536)
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        prefix, longest = self.channel.prefix, self._longest_bytes + MAC_DIGITS + 1
        if len(self._buffer) > longest or not self._buffer.startswith(prefix[: len(self._buffer)]):
            raise ValueError("not a message")
        self.unread += [message for line in lines if (message := self._parsed(line)) is not None]

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if not line.startswith(self.channel.prefix):
            raise ValueError("not a message")
        text = self.channel.open(line.removeprefix(self.channel.prefix))
        if text is None:
            return None
        message = parse_json(text, self._longest_bytes)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

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


def listen(port: int, address: str = "") -> socket.socket:
    """Opens a port; 0 takes any free port. OSError if it is not allowed or taken: unlike JAX's, it cannot be opened twice.

    Args:
      address: IPv4 or IPv6, of this host; empty: all.
    """
    dual = not address and socket.has_dualstack_ipv6()
    host, family = address or ("::" if dual else "0.0.0.0"), socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    # It sets SO_REUSEADDR: closed connections of an earlier run may linger there; a live listener is detected all the same.
    return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=dual)


def connect(host: str, port: int, limit_s: float) -> socket.socket:
    """Raises OSError if nothing listens there, or the host cannot be reached in time."""
    connection = socket.create_connection((host, port), timeout=limit_s)
    try:
        is_its_own_peer = connection.getsockname() == connection.getpeername()
    except OSError:
        # The other end has reset it already.
        connection.close()
        raise
    if is_its_own_peer:
        # If nothing listens on a port of this host within Linux's range for outgoing connections, about one try in ten
        # thousand gets this very port and connects to itself.
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Ends a connection within about half a minute when the other host has lost its power or its cable (Linux)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
