"""The rendezvous (rendezvous.py) as a process sees it that is not process 0, and what the two say to each other."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pydantic import Field

from jaxllm.config.errors import ConfigError
from jaxllm.config.types import Switch
from jaxllm.runtime.authentication import SECRET, SECRET_FILE, Channel, Unproven, greet
from jaxllm.runtime.launchers import COORDINATOR, Launch, is_loopback
from jaxllm.runtime.rendezvous_checks import (
    ProcessInfo,
)
from jaxllm.runtime.socket_messages import (
    Elapsed,
    Name,
    Pid,
    Rank,
    Reader,
    Sentence,
    connect,
    keep_alive,
)
from jaxllm.untrusted import Text, Whole, checked

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


Port = Annotated[int, Field(strict=True, gt=0, lt=2**16)]


class RendezvousError(ConfigError):
    """The processes did not meet in time. A restart may help without any other change."""


class NotReady(Exception):
    """The listener at process 0's port is not process 0, or closed the connection. Process 0 may come later."""


class _AnotherLaunch(NotReady):
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
    rank: int | None = None
    """This process's rank in a run that another process than the launcher's first may lead; None: the launcher's."""
    led: Led | None = None


@dataclass(frozen=True)
class Led:
    """What the leader of such a run decided (elastic_rendezvous.py)."""

    port: Port
    """JAX's, on the leader's host."""
    attempt: Whole
    """The highest of its processes."""
    absent: list[Name] = field(default_factory=list)
    """Hosts that train without us."""
    layout: Text = ""
    """Keys of the config that differ on the hosts that are there, as JSON; empty: none."""


@dataclass(frozen=True)
class _Run:
    """What is the same for all processes."""

    members: list[tuple[Name, Pid]]
    monitor_port: Port
    led: Led | None = None


@dataclass(frozen=True)
class Reply:
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
    rank: Rank | None = None
    """With `all`: Answer.rank."""
    start: Switch = False
    ended: Switch = False
    """The run has ended while this process waited to return."""


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
                return exchange(connection, own, launch.secret, until_s)
        except OSError as error:
            why = error.strerror or str(error)
        except NotReady as reason:
            why = str(reason)
        except Unproven:
            raise other_secret(launch.address, own) from None
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


@contextmanager
def _as_not_ready() -> Iterator[None]:
    try:
        yield
    except (ConfigError, Unproven):
        raise
    except TimeoutError:
        raise NotReady("it does not answer") from None
    except ValueError:
        raise NotReady("something else answers there") from None


class Visit:
    """The connection of a process to process 0.

    Raises (all methods):
      OSError, NotReady: the rendezvous is not there, or ends.
      Unproven: it has another secret, or one of the two has none.
      ConfigError: it refuses this process, or all.
    """

    def __init__(self, connection: socket.socket, own: ProcessInfo, secret: bytes | None):
        self._connection, self._own, self._channel = connection, own, Channel(secret, MAGIC, is_server=False)
        self._reader, self._replies = Reader(MAX_ANSWER_BYTES, self._channel), list[Reply]()
        keep_alive(connection)

    def introduce(self, until_s: float) -> bool:
        """Says who this process is; whether a rendezvous takes it."""
        with _as_not_ready():
            greet(self._connection, self._channel, until_s - time.monotonic())
            self._connection.sendall(self._channel.line(json.dumps(asdict(self._own))))
            self._replies = _next(self._connection, self._reader, until_s)
            return self._replies[0].wait_s is not None

    def answer(self, until_s: float) -> Answer:
        """What follows on `introduce`."""
        with _as_not_ready():
            return self._answer(until_s)

    def _answer(self, until_s: float) -> Answer:
        answer, replies = None, self._replies
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
                run, address = reply.all, self._connection.getpeername()[0]
                if run.led is None and len(run.members) != self._own.count:
                    raise ValueError("not a reply")
                answer = Answer(run.members, run.monitor_port, reply.devices, address, reply.rank, run.led)
                self._connection.sendall(self._channel.line('{"ready": true}'))
            elif reply.ended:
                ended = ConfigError(f"The run has ended while {self._own} waited to return: there is nothing left to train.")
                ended.exit_code = 0
                raise ended
            elif reply.start and answer is not None:
                return answer
            replies = replies or _next(self._connection, self._reader, until_s)


def exchange(connection: socket.socket, own: ProcessInfo, secret: bytes | None, until_s: float) -> Answer:
    """A complete Visit."""
    visit = Visit(connection, own, secret)
    visit.introduce(min(until_s, time.monotonic() + FIRST_REPLY_S))
    return visit.answer(until_s)


def other_secret(address: str, own: ProcessInfo) -> ConfigError:
    """The error that Unproven means to a user."""
    return ConfigError(
        f"Process 0 at {address} has another secret than {own}, or one of the two has none: set the same {SECRET} or "
        f"{SECRET_FILE} for all processes."
    )


def _next(connection: socket.socket, reader: Reader, until_s: float) -> list[Reply]:
    """The next reply, and those that came with it; raises OSError or ValueError if there is none."""
    replies: list[Reply] = []
    while not replies:
        connection.settimeout(min(max(until_s - time.monotonic(), 0.1), LONGEST_WAIT_S))
        received = connection.recv(65536)
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        replies = [checked(message, Reply) for message in reader.read(received)]
    return replies


def probe(address: str, launch: Launch, own: ProcessInfo) -> str:
    """Description of the listener at process 0's port, in parentheses, for a process that also has rank 0; empty if it is not a
    jaxllm process.

    Raises:
      ConfigError: it is another process 0 of this same launch. It raises the same error.
    """
    try:
        with connect(address, launch.port, PROBE_S) as connection:
            exchange(connection, own, launch.secret, time.monotonic() + PROBE_S)
    except _AnotherLaunch as reason:
        return f" ({reason})"
    except Unproven:
        return " (process 0 of a run with another secret, or with none, is there)"
    except (OSError, NotReady):
        pass
    return ""
