"""Sends memory checkpoints to another host, and reads pieces back: plain TCP beside training, signed by the run's secret.

    client                                              server (each process of a run on several hosts)
    hellos and MACs as in authentication.py
    {"put": GENERATION, "writer", "count", "size", "digest"}    ->
                                                        <-      {"ready": true}
    the bytes of the file                               ->      received under another name, compared with the digest
                                                        <-      {"stored": true}

    {"get": GENERATION, "writer", "count", "pieces": [0, 7]}    ->
                                                        <-      {"size", "digest"}, and that many bytes

`digest` is the SHA-256 of a file's header, which has those of all pieces: so the MAC of a message covers every byte, though
none is encrypted. `pieces` of null asks for the header.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.memory_files import Generation, Header, Part, PartFile, Piece, new_file, read_header, sha256
from jaxllm.runtime.authentication import MAC_DIGITS, Channel, greet
from jaxllm.runtime.socket_messages import Connection, Door, Name, Rank, connect, keep_alive
from jaxllm.untrusted import JSON_BYTES, Text, Whole, checked, parse_json

PREFIX = "memory "
MESSAGE_BYTES = 2**20
"""Limit of a message; the longest names all pieces of a file."""
CONNECT_S = 10.0
STALLED_S = 60.0
"""A transfer ends if no byte moves for so long."""
TICK_S = 0.5
BLOCK = 2**20

Address = tuple[Name, int]


@dataclass(frozen=True)
class Put:
    put: Text
    writer: Rank
    count: Rank
    size: Whole
    digest: Text


@dataclass(frozen=True)
class Get:
    get: Text
    writer: Rank
    count: Rank
    pieces: list[Whole] | None


@dataclass(frozen=True)
class Sent:
    size: Whole
    digest: Text


class Port:
    """Takes and gives files of the run, in threads of its own, until `close`.

    Args:
      listener: a socket of `listen`.
      home: the folder of this run on this host.
      most_bytes: of a file that is put into this generation; 0: it is not taken.
      places: connections of the run's processes at a time.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes | None,
        home: Path,
        most_bytes: Callable[[Generation], int],
        places: int = 1,
    ):
        self._listener, self._secret, self._home, self._most_bytes = listener, secret, home, most_bytes
        self._selector = selectors.DefaultSelector()
        self._door = Door(listener, self._selector, places, self._stranger, self._drop)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(TICK_S):
                if key.data is None:
                    self._door.open()
                elif key.data.socket.fileno() >= 0:
                    # Otherwise it made room for another in this turn.
                    self._read(key.data)
            self._door.tidy()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]  # they are sockets
        self._selector.close()

    def _stranger(self, connection: socket.socket, address: str) -> Connection:
        return Connection(connection, Channel(self._secret, PREFIX, is_server=True), MESSAGE_BYTES, address)

    def _drop(self, connection: Connection) -> None:
        self._forget(connection)
        connection.socket.close()

    def _forget(self, connection: Connection) -> None:
        self._door.forget(connection)
        self._selector.unregister(connection.socket)

    def _read(self, connection: Connection) -> None:
        messages = connection.receive()
        if messages is None:
            self._door.report(connection)
            self._drop(connection)
        elif messages:
            self._forget(connection)
            threading.Thread(target=self._serve, args=[connection, messages[0]], name="memory-transfer", daemon=True).start()

    def _serve(self, connection: Connection, message: dict[str, Any]) -> None:
        # A transfer that fails is the sender's to report.
        with connection.socket as to, suppress(OSError, ValueError):
            keep_alive(to)
            to.settimeout(STALLED_S)
            if "put" in message:
                self._take(to, connection.channel, checked(message, Put))
            else:
                self._give(to, connection.channel, checked(message, Get))

    def _take(self, to: socket.socket, channel: Channel, wanted: Put) -> None:
        part = _part(wanted.put, wanted.writer, wanted.count)
        if wanted.size > self._most_bytes(part.generation):
            raise ValueError("not expected")
        to.sendall(channel.line('{"ready": true}'))
        target = new_file(self._home / part.path)
        with target as file:
            left, block = wanted.size, memoryview(bytearray(BLOCK))
            while left:
                received = to.recv_into(block[: min(left, BLOCK)])
                if not received:
                    raise ConnectionError("it closed the connection")
                file.write(block[:received])
                left -= received
            file.flush()
            found = PartFile(target.aside)
            if found.digest != wanted.digest:
                raise ValueError("another file")
            found.require_intact()
        to.sendall(channel.line('{"stored": true}'))

    def _give(self, to: socket.socket, channel: Channel, wanted: Get) -> None:
        found = PartFile(self._home / _part(wanted.get, wanted.writer, wanted.count).path)
        if wanted.pieces is None:
            contents = [np.frombuffer(found.text, np.uint8)]
        else:
            asked = [found.header.pieces[place] for place in wanted.pieces if place < len(found.header.pieces)]
            contents = [found.content(piece) for piece in asked]
        to.sendall(channel.line(json.dumps({"size": sum(content.size for content in contents), "digest": found.digest})))
        for content in contents:
            to.sendall(content.data)


def put(address: Address, secret: bytes | None, path: Path, part: Part) -> None:
    """Sends a file of this host to a process of another, and returns when that has stored it.

    Raises:
      OSError: it cannot be reached, the connection breaks, or no byte moves for STALLED_S.
      ValueError: it does not take the file, or something else answers.
    """
    size, digest = path.stat().st_size, PartFile(path).digest
    with _called(address, secret, put=str(part.generation), writer=part.writer, count=part.count, size=size, digest=digest) as (
        to,
        reply,
    ):
        if "ready" not in reply():
            raise ValueError("it does not take the file")
        with path.open("rb") as file:
            to.sendfile(file)
        if "stored" not in reply():
            raise ValueError("it did not store the file")


def get_header(address: Address, secret: bytes | None, part: Part) -> Header:
    """Raises as `put` does."""
    content, digest = _get(address, secret, part, None, JSON_BYTES)
    return read_header(content.tobytes(), digest)


def get_pieces(address: Address, secret: bytes | None, part: Part, pieces: dict[int, Piece]) -> dict[int, np.ndarray]:
    """Contents of some pieces of a file, by their number in its header. Raises as `put` does, and ValueError if they are not
    those of the header.
    """
    size = sum(piece.num_bytes for piece in pieces.values())
    content, _ = _get(address, secret, part, list(pieces), size)
    ends = np.cumsum([piece.num_bytes for piece in pieces.values()])
    found = dict(zip(pieces, np.split(content, ends[:-1]), strict=True))
    if any(sha256(found[place]) != piece.sha256 for place, piece in pieces.items()):
        raise ValueError("other bytes came")
    return found


def _get(address: Address, secret: bytes | None, part: Part, pieces: list[int] | None, most_bytes: int) -> tuple[Any, str]:
    with _called(address, secret, get=str(part.generation), writer=part.writer, count=part.count, pieces=pieces) as (_, reply):
        sent = checked(reply(), Sent)
        if sent.size > most_bytes or (pieces is not None and sent.size < most_bytes):
            raise ValueError("it sends something else")
        content = np.empty(sent.size, np.uint8)
        if reply.file.readinto(content.data) != sent.size:
            raise ConnectionError("it closed the connection")
        return content, sent.digest


class _Replies:
    """The server's messages, and the bytes behind them."""

    def __init__(self, connection: socket.socket, channel: Channel):
        self._channel, self.file = channel, connection.makefile("rb")

    def __call__(self) -> dict[str, Any]:
        line = self.file.readline(MESSAGE_BYTES + MAC_DIGITS + len(PREFIX) + 2)
        if not line.endswith(b"\n"):
            raise ConnectionError("it closed the connection")
        text = self._channel.open(line.removeprefix(PREFIX.encode()).removesuffix(b"\n"))
        return checked(parse_json(text or b"", MESSAGE_BYTES), dict[str, Any])


@contextmanager
def _called(address: Address, secret: bytes | None, **message: Any) -> Iterator[tuple[socket.socket, _Replies]]:
    with connect(*address, CONNECT_S) as connection:
        channel = Channel(secret, PREFIX, is_server=False)
        greet(connection, channel, CONNECT_S)
        keep_alive(connection)
        connection.settimeout(STALLED_S)
        connection.sendall(channel.line(json.dumps(message)))
        replies = _Replies(connection, channel)
        with replies.file:
            yield connection, replies


def _part(name: str, writer: int, count: int) -> Part:
    generation = Generation.parse(name)
    if generation is None or writer >= count:
        raise ValueError("no such file")
    return Part(generation, writer, count)
