"""Rendezvous: all processes of a run meet at process 0 before JAX starts. If something keeps them apart, all report it in one
sentence.

JAX itself aborts, hangs or crashes at this point: it aborts from C++ minutes after a process is missing, segfaults if its port
is taken, and mixes up two runs on one port. So process 0 first listens on the coordinator's port itself. Each other process
sends its description and stays connected. Once all have arrived and fit together, process 0 asks whether they still listen,
frees the port for JAX and releases them. Every process that came learns of any problem and reports the same sentence.

    process 0      serve(open_port(launch, info), info, launch, monitor_port)  -> Answer
    the others     join(info, launch)                                          -> Answer

A message is one line: MAGIC and a JSON object, typed by ProcessInfo on the way to process 0 and by _Reply on the way back, and
signed if the run has a secret (authentication.py). This module uses no JAX.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field

from jaxllm.config.errors import ConfigError
from jaxllm.config.types import Switch
from jaxllm.runtime.authentication import SECRET, SECRET_FILE, Channel, Unproven, greet
from jaxllm.runtime.launchers import COORDINATOR, Launch, is_loopback
from jaxllm.runtime.rendezvous_checks import (
    ProcessInfo,
    assign_gpus,
    is_local,
    listening_address,
    missing,
    parse_process_info,
    why_incompatible,
    why_rejected,
)
from jaxllm.runtime.socket_messages import Connection, Door, Elapsed, Name, Pid, Rank, Reader, Sentence, connect, listen
from jaxllm.untrusted import checked

MAGIC = "jaxllm roll call "
MAX_INFO_BYTES, MAX_ANSWER_BYTES = 2**16, 2**24
"""Length limits of a message. An answer names all processes."""
GRACE_S = 10.0
"""Extra time that process 0 may take beyond its own limit to send its verdict; also its wait for a process to confirm that it
is still there."""
PROBE_S = 2.0
TRY_S = 5.0
"""Limit of one connection attempt: a host that boots meanwhile does not see earlier attempts for a long time."""
FIRST_REPLY_S = 15.0
"""Limit for process 0's first reply. Another holder of its port, such as an earlier run about to end, may accept a connection
and send nothing."""
SLOWEST_RETRY_S = 1.0
LONGEST_WAIT_S = 10**6
"""Limit for one wait on a socket: Python takes no more than 2**31 milliseconds."""


class RendezvousError(ConfigError):
    """The processes did not meet in time. A restart may help without any other change."""


class _NotReady(Exception):
    """The listener at process 0's port is not process 0, or closed the connection. Process 0 may come later."""


class _AnotherLaunch(_NotReady):
    """The listener is process 0 of another run."""


@dataclass(frozen=True)
class Answer:
    """Result of the rendezvous for one process."""

    members: list[tuple[str, int]]
    """(host, process ID of the system) by rank."""
    monitor_port: int
    """Port on which process 0's peer monitor listens."""
    devices: list[int] | None
    """Indices of the visible GPUs that this process shall drive; None: all."""
    address: str = ""
    """Process 0's address, as this process reached it. Not sent."""


@dataclass(frozen=True)
class _Run:
    """What is the same for all processes."""

    members: list[tuple[Name, Pid]]
    monitor_port: Annotated[int, Field(strict=True, gt=0, lt=2**16)]


@dataclass(frozen=True)
class _Reply:
    """What process 0 sends: one of these at a time."""

    wait_s: Elapsed | None = None
    """Time until its own limit."""
    unproven: Switch = False
    """authentication.REFUSAL."""
    other: Sentence | None = None
    """It belongs to another launch."""
    refused: Sentence | None = None
    missing: Switch = False
    """With `refused`: a restart may help."""
    all: _Run | None = None
    devices: list[Rank] | None = None
    """With `all`: Answer.devices."""
    start: Switch = False


# ----------------------------------------------------------------------------------------------------------------- process 0


def open_port(launch: Launch, own: ProcessInfo, patience_s: float = 0.0) -> socket.socket:
    """Opens process 0's port.

    Args:
      patience_s: time to wait for a taken port: after a restart its holder may be about to exit.

    Raises:
      RendezvousError: the port is still taken after patience_s.
      ConfigError: the port is taken and there is no wait (the message names the holder if it answers), or it cannot be opened.
    """
    if not is_local(launch.host):
        # Process 0 may have been started here and on its own host: each should then learn of the other.
        _probe(launch.host, launch, own)
    until_s, address = time.monotonic() + patience_s, listening_address(launch)
    while True:
        try:
            return listen(launch.port, address)
        except OSError as error:
            kind = ConfigError
            if error.errno != errno.EADDRINUSE:
                # The error's own text also has the address that was tried.
                why = f"cannot be opened ({os.strerror(error.errno or 0)})"
            elif time.monotonic() < until_s:
                time.sleep(0.5)
                continue
            else:
                kind = RendezvousError if patience_s else ConfigError
                why = f"is taken on this host{_probe(address or '127.0.0.1', launch, own)}"
            raise kind(
                f"Port {launch.port} of {launch.port_from} {why}: choose another for all, with {COORDINATOR}=host:port."
            ) from None


def serve(listener: socket.socket, own: ProcessInfo, launch: Launch, monitor_port: int) -> Answer:
    """Runs the rendezvous on process 0; returns once all have arrived and are released. Closes `listener` in any case.

    Args:
      launch: names for messages, and the time limit.
      monitor_port: sent to all.

    Raises:
      RendezvousError: not all came within the limit, or a process that came disconnected or does not answer.
      ConfigError: the processes do not fit together. All that came raise the same error.
    """
    rendezvous = _Rendezvous(listener, own, launch)
    try:
        rendezvous.await_all()
        infos = [rendezvous.infos[rank] for rank in range(own.count)]
        if sentence := why_incompatible(infos):
            raise ConfigError(sentence)
        devices = assign_gpus(infos)
        members = [(info.host, info.pid) for info in infos]
        # Everything but the devices is the same for all, and long for many processes.
        same = json.dumps({"members": members, "monitor_port": monitor_port})
        for rank, connection in rendezvous.connections.items():
            connection.send(f'{{"devices": {json.dumps(devices[rank])}, "all": {same}}}')
        rendezvous.await_ready()
        # Only now: a process that tries JAX's port too early waits a second for its next try.
        listener.close()
        for connection in rendezvous.connections.values():
            connection.send('{"start": true}')
        return Answer(members, monitor_port, devices[0])
    except ConfigError as error:
        rendezvous.refuse(str(error), isinstance(error, RendezvousError))
        raise
    finally:
        rendezvous.close()
        listener.close()


class _Rendezvous:
    """Processes that have arrived at process 0."""

    def __init__(self, listener: socket.socket, own: ProcessInfo, launch: Launch):
        self.own, self.launch, self.listener = own, launch, listener
        self.infos: dict[int, ProcessInfo] = {own.rank: own}
        """By rank, disconnected processes included."""
        self.connections: dict[int, _Connection] = {}
        """By rank, connected processes without process 0."""
        self.until_s = time.monotonic() + launch.start_timeout_s
        self.selector = selectors.DefaultSelector()
        self.door = Door(listener, self.selector, own.count, self._stranger, self._drop)

    def await_all(self) -> None:
        while len(self.connections) < self.own.count - 1:
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                raise RendezvousError(missing(self.launch, self.infos, {0, *self.connections}))
            self._look(min(left_s, 1.0))

    def await_ready(self) -> None:
        """Waits until each process has confirmed that it is still there."""
        until_s = time.monotonic() + GRACE_S
        while silent := [
            rank for rank in range(1, self.own.count) if rank not in self.connections or not self.connections[rank].ready
        ]:
            gone = [rank for rank in silent if rank not in self.connections]
            if gone or time.monotonic() >= until_s:
                who, what = (gone[0], "was gone") if gone else (silent[0], f"did not answer for {GRACE_S:.0f} s")
                raise RendezvousError(
                    f"{self.infos[who].title} joined, but {what} when all were there: look for the cause in "
                    f"its own output, and restart all processes."
                )
            self._look(0.2)

    def refuse(self, sentence: str, missing: bool) -> None:
        for connection in self.connections.values():
            connection.send(json.dumps({"refused": sentence, "missing": missing}))

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self.selector.close()

    def _look(self, limit_s: float) -> None:
        # Known ones are heard before strangers take time.
        for key, _ in sorted(self.selector.select(limit_s), key=lambda one: one[0].data is None):
            self.door.open() if key.data is None else self._read(key.data)
        self.door.tidy()

    def _stranger(self, connection: socket.socket, address: str) -> _Connection:
        return _Connection(connection, Channel(self.launch.secret, MAGIC, is_server=True), MAX_INFO_BYTES, address)

    def _read(self, connection: _Connection) -> None:
        messages = connection.receive()
        for message in messages or ():
            if connection.info is not None:
                connection.ready = True
            elif (info := parse_process_info(message, self.own.versions)) is None or not self._admit(connection, info):
                messages = None
                break
        if messages is None:
            self.door.report(connection)
            self._drop(connection)

    def _admit(self, connection: _Connection, info: ProcessInfo) -> bool:
        """Registers a process. False if it belongs to another launch and has to be dropped."""
        if None not in (info.launch_id, self.own.launch_id) and info.launch_id != self.own.launch_id:
            connection.send(json.dumps({"other": f"process 0 of another launch, {self.own.launch_id}, is there"}))
            return False
        before = self.connections.get(info.rank)
        if before is not None and before.hung_up():
            # The process was restarted.
            self._drop(before)
            before = None
        twin = self.infos[info.rank] if before is not None or info.rank == 0 else None
        if sentence := why_rejected(info, self.own, self.launch, twin):
            connection.send(json.dumps({"refused": sentence, "missing": False}))
            raise ConfigError(sentence)
        connection.info, self.infos[info.rank], self.connections[info.rank] = info, info, connection
        self.door.forget(connection)
        connection.send(json.dumps({"wait_s": max(self.until_s - time.monotonic(), 0.0)}))
        return True

    def _drop(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            # Dropped for its successor before its own end was read.
            return
        if connection.info is not None and self.connections.get(connection.info.rank) is connection:
            del self.connections[connection.info.rank]
        self.door.forget(connection)
        self.selector.unregister(connection.socket)
        connection.socket.close()


class _Connection(Connection):
    """A connection to process 0."""

    info: ProcessInfo | None = None
    ready = False
    """The process has confirmed that it is still there."""


# ---------------------------------------------------------------------------------------------------------------- the others


def join(own: ProcessInfo, launch: Launch) -> Answer:
    """Takes part in the rendezvous; returns once process 0 releases all. Retries until the time limit while nothing, or
    something else, answers at the address.

    Raises:
      RendezvousError: process 0 was not reached within the limit, did not report in time that all have arrived, or reported
        which have not.
      ConfigError: the processes do not fit together.
    """
    until_s, pause_s, why = time.monotonic() + launch.start_timeout_s, 0.1, ""
    while True:
        try:
            with connect(launch.host, launch.port, TRY_S) as connection:
                return _exchange(connection, own, launch.secret, until_s)
        except OSError as error:
            why = error.strerror or str(error)
        except _NotReady as reason:
            why = str(reason)
        except Unproven:
            raise ConfigError(
                f"Process 0 at {launch.address} has another secret than {own}, or one of the two has none: set the same "
                f"{SECRET} or {SECRET_FILE} for all processes."
            ) from None
        if time.monotonic() + pause_s >= until_s:
            # If process 0 runs on another host, each process has looked for it at home.
            hint = f"; {launch.host} is {own.host} itself" if is_loopback(launch.host) else ""
            raise RendezvousError(
                f"Process {own.rank} cannot reach process 0 at {launch.address} after {launch.start_timeout_s} s "
                f"({why}{hint}): start it there, or correct {COORDINATOR}."
            )
        time.sleep(pause_s)
        # Thousands that come before process 0 should not keep its host busy.
        pause_s = min(1.5 * pause_s, SLOWEST_RETRY_S)


def _exchange(connection: socket.socket, own: ProcessInfo, secret: bytes | None, until_s: float) -> Answer:
    """Raises Unproven if process 0 has another secret, or one of the two has none."""
    try:
        return _talk(connection, Channel(secret, MAGIC, is_server=False), own, until_s)
    except (ConfigError, Unproven):
        raise
    except TimeoutError:
        raise _NotReady("it does not answer") from None
    except ValueError:
        raise _NotReady("something else answers there") from None


def _talk(connection: socket.socket, channel: Channel, own: ProcessInfo, until_s: float) -> Answer:
    answer, reader, first_by_s = None, Reader(MAX_ANSWER_BYTES, channel), min(until_s, time.monotonic() + FIRST_REPLY_S)
    greet(connection, channel, first_by_s - time.monotonic())
    connection.sendall(channel.line(json.dumps(asdict(own))))
    replies = _next(connection, reader, first_by_s)
    while True:
        reply = replies.pop(0)
        if reply.wait_s is not None:
            # Process 0 may have been started later, and then waits longer.
            until_s = max(until_s, time.monotonic() + reply.wait_s + 2 * GRACE_S)
        elif reply.unproven:
            raise Unproven
        elif reply.other is not None:
            raise _AnotherLaunch(reply.other)
        elif reply.refused is not None:
            raise (RendezvousError if reply.missing else ConfigError)(reply.refused)
        elif reply.all is not None:
            if len(reply.all.members) != own.count:
                raise ValueError("not a reply")
            answer = Answer(reply.all.members, reply.all.monitor_port, reply.devices, connection.getpeername()[0])
            connection.sendall(channel.line('{"ready": true}'))
        elif reply.start and answer is not None:
            return answer
        replies = replies or _next(connection, reader, until_s)


def _next(connection: socket.socket, reader: Reader, until_s: float) -> list[_Reply]:
    """The next reply, and those that came with it; raises OSError or ValueError if there is none."""
    replies: list[_Reply] = []
    while not replies:
        connection.settimeout(min(max(until_s - time.monotonic(), 0.1), LONGEST_WAIT_S))
        received = connection.recv(65536)
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        replies = [checked(message, _Reply) for message in reader.read(received)]
    return replies


def _probe(address: str, launch: Launch, own: ProcessInfo) -> str:
    """Description of the listener at process 0's port, in parentheses, for a process that also has rank 0; empty if it is not a
    jaxllm process.

    Raises:
      ConfigError: it is another process 0 of this same launch. It raises the same error.
    """
    try:
        with connect(address, launch.port, PROBE_S) as connection:
            _exchange(connection, own, launch.secret, time.monotonic() + PROBE_S)
    except _AnotherLaunch as reason:
        return f" ({reason})"
    except Unproven:
        return " (process 0 of a run with another secret, or with none, is there)"
    except (OSError, _NotReady):
        pass
    return ""
