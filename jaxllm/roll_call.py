"""The roll call: all processes of a run meet at process 0 before JAX starts, and learn in one sentence what keeps them apart.

JAX at this place aborts, hangs or crashes: at a missing process from C++ after minutes, at a port that is taken with a
segmentation fault, and two runs on one port it mixes up. So process 0 first listens on the coordinator's port itself. Each of
the others says what it is and stays connected; once all are there and fit together, process 0 asks them whether they still
listen, frees the port for JAX, and lets them go on. Whatever is wrong is known to all that came, and all say the same.

    process 0      host(open_port(launch, call), call, launch, line_port)  -> Answer
    the others     attend(call, launch)                                    -> Answer

A message is one line: MAGIC and a JSON object. Only the standard library here, and no JAX.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxllm.config_errors import ConfigError
from jaxllm.launchers import COORDINATOR, Launch, is_loopback
from jaxllm.roll_verdicts import Call, is_here, missing, shares, stranger, unfit
from jaxllm.socket_messages import Reader

MAGIC = "jaxllm roll call "
LONGEST_CALL, LONGEST_ANSWER = 2**16, 2**24
"""Bytes of a line. An answer names all processes."""
GRACE_S = 10.0
"""How much longer than its own limit process 0 may take to say what it found; and how long it waits for a process that came to
say that it is still there."""
SEND_S = 10.0
ASK_S = 2.0
TRY_S = 5.0
"""For one attempt to connect: a host that starts up in the meantime takes no notice of earlier ones for long."""
FIRST_WORD_S = 15.0
"""For process 0's first word to one that comes. Who holds its port otherwise, such as a run before this one that is about to
end, may take a connection and say nothing."""
SLOWEST_RETRY_S = 1.0


class Missing(ConfigError):
    """The processes did not meet in time: starting again may help where nothing else has to change."""


class _NotYet(Exception):
    """Whoever answered at process 0's port is not process 0, or hung up. Perhaps it soon will be."""


class _AnotherLaunch(_NotYet):
    """It is process 0 of another run."""


@dataclass(frozen=True)
class Answer:
    """What all know once all are there."""

    members: list[tuple[str, int]]
    """(host, process id of the system) by rank."""
    line_port: int
    """Where process 0's line listens."""
    devices: list[int] | None
    """Which of the GPUs that this process sees it shall drive; None: all."""
    address: str = ""
    """Process 0's, as this process has reached it. Not sent."""


# ----------------------------------------------------------------------------------------------------------------- process 0


def listen(port: int) -> socket.socket:
    """Opens a port on all addresses of this host; 0: any that is free. Unlike JAX's, it cannot be opened twice.

    Raises:
      OSError: it is taken, or not allowed.
    """
    dual = socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        # Closed connections of an earlier run may linger there; whoever listens is found all the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::" if dual else "0.0.0.0", port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def open_port(launch: Launch, own: Call, patience_s: float = 0.0) -> socket.socket:
    """Process 0's port.

    Args:
      patience_s: how long to wait for one that is taken: after a restart whoever held it may be about to go.

    Raises:
      Missing: it is still taken after patience_s.
      ConfigError: it is taken, by whom as far as that answers, and nobody waits; or it cannot be opened.
    """
    if not is_here(launch.host):
        # Process 0 may have been started here and at its own place: then each should know of the other.
        _ask(launch.host, launch, own)
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return listen(launch.port)
        except OSError as error:
            kind = ConfigError
            if error.errno != errno.EADDRINUSE:
                why = f"cannot be opened ({error.strerror})"
            elif time.monotonic() < until_s:
                time.sleep(0.5)
                continue
            else:
                kind = Missing if patience_s else ConfigError
                why = f"is taken on this host{_ask('127.0.0.1', launch, own)}"
            raise kind(
                f"Port {launch.port} of {launch.port_from} {why}: choose another for all, with {COORDINATOR}=host:port."
            ) from None


def host(listener: socket.socket, own: Call, launch: Launch, line_port: int) -> Answer:
    """Calls the roll on process 0; returns once all are there and were let go. `listener` is closed in any case.

    Args:
      launch: names for people, and the time limit.
      line_port: for all to know.

    Raises:
      Missing: not all came within the limit, or one that came is gone or does not answer.
      ConfigError: what they say does not fit together. Those that came raise the same.
    """
    roll = _Roll(listener, own, launch)
    try:
        roll.gather()
        calls = [roll.calls[rank] for rank in range(own.count)]
        if sentence := unfit(calls):
            raise ConfigError(sentence)
        devices = shares(calls)
        members = [(call.host, call.pid) for call in calls]
        # All but the devices is the same for all, and long where there are many.
        same = json.dumps({"members": members, "line_port": line_port})
        for rank, guest in roll.guests.items():
            guest.send(f'{{"devices": {json.dumps(devices[rank])}, "all": {same}}}')
        roll.hear_again()
        # Only now: who came too early to JAX's port would wait a second for its next try.
        listener.close()
        for guest in roll.guests.values():
            guest.send('{"start": true}')
        return Answer(members, line_port, devices[0])
    except ConfigError as error:
        roll.refuse(str(error), isinstance(error, Missing))
        raise
    finally:
        roll.close()
        listener.close()


class _Roll:
    """Who came to process 0."""

    def __init__(self, listener: socket.socket, own: Call, launch: Launch):
        self.own, self.launch, self.listener = own, launch, listener
        self.calls: dict[int, Call] = {own.rank: own}
        """By rank; of those that hung up too."""
        self.guests: dict[int, _Guest] = {}
        """Those that are there, without process 0."""
        self.until_s = time.monotonic() + launch.start_timeout_s
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, None)

    def gather(self) -> None:
        while len(self.guests) < self.own.count - 1:
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                raise Missing(missing(self.launch, self.calls, {0, *self.guests}))
            self._look(min(left_s, 1.0))

    def hear_again(self) -> None:
        """Waits until each has said that it is still there."""
        until_s = time.monotonic() + GRACE_S
        while silent := [rank for rank in range(1, self.own.count) if rank not in self.guests or not self.guests[rank].ready]:
            gone = [rank for rank in silent if rank not in self.guests]
            if gone or time.monotonic() >= until_s:
                who, what = (gone[0], "was gone") if gone else (silent[0], f"did not answer for {GRACE_S:.0f} s")
                raise Missing(
                    f"{self.calls[who].title} came to the start, but {what} when all were there: look for the cause in "
                    f"its own output, and start all again."
                )
            self._look(0.2)

    def refuse(self, sentence: str, missing: bool) -> None:
        for guest in self.guests.values():
            guest.send(json.dumps({"refused": sentence, "missing": missing}))

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self.selector.close()

    def _look(self, limit_s: float) -> None:
        for key, _ in self.selector.select(limit_s):
            if key.data is not None:
                self._read(key.data)
                continue
            try:
                connection, _ = self.listener.accept()
            except OSError:
                continue
            connection.setblocking(False)
            self.selector.register(connection, selectors.EVENT_READ, _Guest(connection))

    def _read(self, guest: _Guest) -> None:
        messages = guest.receive()
        for message in messages or ():
            if guest.call is not None:
                guest.ready = True
            elif (call := _call_of(message)) is None or not self._welcome(guest, call):
                messages = None
                break
        if messages is None:
            self._drop(guest)

    def _welcome(self, guest: _Guest, call: Call) -> bool:
        """False: it is none of this launch's, and has to go."""
        if None not in (call.launch_id, self.own.launch_id) and call.launch_id != self.own.launch_id:
            guest.send(json.dumps({"other": f"process 0 of another launch, {self.own.launch_id}, is there"}))
            return False
        before = self.guests.get(call.rank)
        if before is not None and before.hung_up():
            # It was started again.
            self._drop(before)
            before = None
        twin = self.calls[call.rank] if before is not None or call.rank == 0 else None
        if sentence := stranger(call, self.own, self.launch, twin):
            guest.send(json.dumps({"refused": sentence, "missing": False}))
            raise ConfigError(sentence)
        guest.call, self.calls[call.rank], self.guests[call.rank] = call, call, guest
        guest.send(json.dumps({"wait_s": max(self.until_s - time.monotonic(), 0.0)}))
        return True

    def _drop(self, guest: _Guest) -> None:
        if guest.socket.fileno() < 0:
            # Dropped for its successor, while its own end was still to be read.
            return
        if guest.call is not None and self.guests.get(guest.call.rank) is guest:
            del self.guests[guest.call.rank]
        self.selector.unregister(guest.socket)
        guest.socket.close()


class _Guest:
    """A connection to process 0."""

    def __init__(self, connection: socket.socket):
        self.socket, self.reader = connection, Reader(LONGEST_CALL, MAGIC)
        self.call: Call | None = None
        self.ready = False
        """It has said that it is still there."""

    def receive(self) -> list[dict[str, Any]] | None:
        """What came since; None: it hung up, or is none of ours."""
        try:
            return self.reader.receive(self.socket)
        except ValueError:
            return None

    def hung_up(self) -> bool:
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, text: str) -> None:
        try:
            self.socket.settimeout(SEND_S)
            self.socket.sendall(f"{MAGIC}{text}\n".encode())
            self.socket.setblocking(False)
        except OSError:
            # It is gone or frozen: found where it should say something.
            pass


# ---------------------------------------------------------------------------------------------------------------- the others


def attend(own: Call, launch: Launch) -> Answer:
    """Comes to the roll call; returns once process 0 lets all go. Tries again until the time limit while nobody, or somebody
    else, answers there.

    Raises:
      Missing: process 0 was not reached within the limit, or did not say in time that all are there, or who is not.
      ConfigError: what the processes say does not fit together.
    """
    until_s, pause_s, why = time.monotonic() + launch.start_timeout_s, 0.1, ""
    while True:
        try:
            with connect(launch.host, launch.port, TRY_S) as connection:
                return _converse(connection, own, until_s)
        except OSError as error:
            why = error.strerror or str(error)
        except _NotYet as reason:
            why = str(reason)
        if time.monotonic() + pause_s >= until_s:
            # Where it runs on another host, each has looked for it at home.
            hint = f"; {launch.host} is {own.host} itself" if is_loopback(launch.host) else ""
            raise Missing(
                f"Process {own.rank} cannot reach process 0 at {launch.address} after {launch.start_timeout_s} s "
                f"({why}{hint}): start it there, or correct {COORDINATOR}."
            )
        time.sleep(pause_s)
        # Thousands that come before process 0 should not keep its host busy.
        pause_s = min(1.5 * pause_s, SLOWEST_RETRY_S)


def connect(host: str, port: int, limit_s: float) -> socket.socket:
    """OSError: nobody listens there, or cannot be reached in time."""
    connection = socket.create_connection((host, port), timeout=limit_s)
    if connection.getsockname() == connection.getpeername():
        # Where nobody listens on a port of this host from which Linux also takes those of outgoing connections, one in some ten
        # thousand tries gets this very port, and is connected to itself.
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connection


def _converse(connection: socket.socket, own: Call, until_s: float) -> Answer:
    connection.sendall(f"{MAGIC}{json.dumps(asdict(own))}\n".encode())
    answer, reader = None, Reader(LONGEST_ANSWER, MAGIC)
    messages = _next(connection, reader, min(until_s, time.monotonic() + FIRST_WORD_S))
    while True:
        message = messages.pop(0)
        if "wait_s" in message:
            # Process 0 may have been started later, and then waits longer.
            until_s = max(until_s, time.monotonic() + float(message["wait_s"]) + 2 * GRACE_S)
        elif "other" in message:
            raise _AnotherLaunch(message["other"])
        elif "refused" in message:
            raise (Missing if message.get("missing") else ConfigError)(message["refused"])
        elif "all" in message:
            same = message["all"]
            members = [(name, pid) for name, pid in same["members"]]
            address = connection.getpeername()[0]
            answer = Answer(members, same["line_port"], message["devices"], address)
            connection.sendall(f'{MAGIC}{{"ready": true}}\n'.encode())
        elif "start" in message and answer is not None:
            return answer
        messages = messages or _next(connection, reader, until_s)


def _next(connection: socket.socket, reader: Reader, until_s: float) -> list[dict[str, Any]]:
    """The next message, and those that came with it; OSError or _NotYet: there is none."""
    messages: list[dict[str, Any]] = []
    while not messages:
        connection.settimeout(max(until_s - time.monotonic(), 0.1))
        try:
            received = connection.recv(65536)
        except TimeoutError:
            raise _NotYet("it does not answer") from None
        if not received:
            raise _NotYet("it hung up")
        try:
            messages = reader.read(received)
        except ValueError:
            raise _NotYet("something else answers there") from None
    return messages


def _ask(address: str, launch: Launch, own: Call) -> str:
    """Who answers at process 0's port, in brackets, to one that is process 0 too; empty: nobody of ours.

    Raises:
      ConfigError: another process 0 of this very launch. It raises the same.
    """
    try:
        with connect(address, launch.port, ASK_S) as connection:
            _converse(connection, own, time.monotonic() + ASK_S)
    except _AnotherLaunch as reason:
        return f" ({reason})"
    except (OSError, _NotYet):
        pass
    return ""


def _call_of(message: dict[str, Any]) -> Call | None:
    """A call, also that of another version of jaxllm: versions are compared first. None: it is none."""
    try:
        return Call(**{field.name: message[field.name] for field in fields(Call) if field.name in message})
    except TypeError:
        return None
