"""Ways to the rendezvous (cluster/rendezvous.py): what a process and the leader say to each other, and the leader's port."""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from pydantic import Field

from jaxllm.cluster.launchers import COORDINATOR, Launch
from jaxllm.cluster.rendezvous_checks import ProcessInfo, is_local, listening_address
from jaxllm.cluster.socket_messages import (
    SECRET,
    SECRET_FILE,
    Channel,
    Connection,
    Elapsed,
    Name,
    Pid,
    Rank,
    Sentence,
    Unproven,
    connect,
    keep_alive,
    listen,
)
from jaxllm.config.errors import ConfigError
from jaxllm.config.types import Switch
from jaxllm.untrusted import Text, Whole, checked

MAGIC = "jaxllm roll call "
MAX_INFO_BYTES, MAX_ANSWER_BYTES = 2**16, 2**24
"""Length limits of a message. An answer names all processes."""
GRACE_S = 10.0
"""Extra time that process 0 may take beyond its own limit to send its verdict; also its wait for a process to confirm that it
is still there."""
TRY_S, PROBE_S = 5.0, 2.0
"""Limit of one connection attempt: a host that boots meanwhile does not see earlier attempts for a long time. The second where
other hosts may lead too."""
FIRST_REPLY_S = 15.0
"""Limit for process 0's first reply. Another holder of its port, such as an earlier run about to end, may accept a connection
and send nothing."""
LONGEST_WAIT_S = 10**6
"""Limit for one wait on a socket: Python takes no more than 2**31 milliseconds."""


class RendezvousError(ConfigError):
    """The processes did not meet in time. A restart may help without any other change."""


class NotReady(OSError):
    """The listener at process 0's port is not process 0, or closed the connection. Process 0 may come later."""


class _AnotherLaunch(NotReady):
    """The listener is process 0 of another run."""


@dataclass(frozen=True)
class Run:
    """What the leader decided. It is the same for all processes."""

    members: list[tuple[Name, Pid]]
    """(host, process ID of the system) by rank."""
    port: Annotated[int, Field(strict=True, gt=0, lt=2**16)]
    """JAX's, on the leader's host."""
    attempt: Whole = 0
    """The highest of its processes."""
    absent: list[Name] = field(default_factory=list)
    """Hosts of the launch that the run trains without."""
    layout: Text = ""
    """Keys of the config that differ on the hosts that are there, as JSON; empty: none."""
    salt: Name = ""
    """Random, so that each start has a certificate of its own (certificates.py)."""


@dataclass(frozen=True)
class Answer(Run):
    """Result of the rendezvous for one process."""

    devices: list[int] | None = None
    """Indices of the visible GPUs that this process shall drive; None: all."""
    rank: int = 0
    """This process's rank in the run; the leader's is 0."""
    address: str = ""
    """The leader's, as this process reached it. Not sent."""
    connections: dict[int, Connection] = field(default_factory=dict, compare=False)
    """The leader's to all others, by rank; the others' to the leader. Not sent."""


@dataclass(frozen=True)
class Reply:
    """What process 0 sends: one of these at a time."""

    wait_s: Elapsed | None = None
    """Time until its own limit."""
    unproven: Switch = False
    """socket_messages.REFUSAL."""
    other: Sentence | None = None
    """It belongs to another launch."""
    refused: Sentence | None = None
    missing: Switch = False
    """With `refused`: a restart may help."""
    all: Run | None = None
    devices: list[Rank] | None = None
    """With `all`: Answer.devices."""
    rank: Rank = 0
    """With `all`: Answer.rank."""
    start: Switch = False
    ended: Switch = False
    """The run has ended while this process waited to return."""


class Visit(Connection):
    """The connection of a process to one that leads and takes it. After an error it is closed.

    Args:
      place: the launch, in which that process is process 0 (Launch.led_by).
      until_s: limit for the first reply.
      try_s: limit for the connection.

    Raises (all methods):
      OSError: the rendezvous is not there, or ends (NotReady: its port answers).
      Unproven: it has another secret, or one of the two has none.
      ConfigError: it refuses this process, or all.
    """

    def __init__(self, place: Launch, own: ProcessInfo, until_s: float, try_s: float = TRY_S):
        channel = Channel(place.secret, MAGIC, is_server=False)
        super().__init__(connect(place.host, place.port, try_s), channel, MAX_ANSWER_BYTES)
        self._own, until_s = own, min(until_s, time.monotonic() + FIRST_REPLY_S)
        with self._closed_after_an_error():
            keep_alive(self.socket)
            if channel.is_guarded:
                self.socket.sendall(channel.hello())
                while not channel.greeted:
                    self._read_until(until_s)
            self.send(json.dumps(asdict(own)))
            self._limit_s = self._next(until_s).wait_s
            if self._limit_s is None:
                raise ValueError("not the first reply")

    def answer(self, until_s: float) -> Answer:
        """What follows once all that are required have come, `until_s` or the leader's own limit at the latest."""
        answer = None
        with self._closed_after_an_error():
            # The leader may have been started later, and then waits longer.
            until_s = max(until_s, time.monotonic() + (self._limit_s or 0.0) + 2 * GRACE_S)
            while True:
                reply = self._next(until_s)
                if reply.all is not None:
                    if not reply.all.absent and len(reply.all.members) != self._own.count:
                        raise ValueError("not a reply")
                    here = {"address": self.socket.getpeername()[0], "connections": {0: self}}
                    answer = Answer(**vars(reply.all), devices=reply.devices, rank=reply.rank, **here)
                    self.send('{"ready": true}')
                elif reply.start and answer is not None:
                    return answer

    def _next(self, until_s: float) -> Reply:
        while not self.unread:
            self._read_until(until_s)
        reply = checked(self.unread.pop(0), Reply)
        if reply.unproven:
            raise Unproven
        if reply.other is not None:
            raise _AnotherLaunch(reply.other)
        if reply.refused is not None:
            raise (RendezvousError if reply.missing else ConfigError)(reply.refused)
        if reply.ended:
            ended = f"The run has ended while {self._own} waited to return: there is nothing left to train."
            raise ConfigError(ended).with_code(0)
        return reply

    def _read_until(self, until_s: float) -> None:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError
        self.socket.settimeout(min(left_s, LONGEST_WAIT_S))
        self.read()

    @contextmanager
    def _closed_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.socket.close()
            if isinstance(error, TimeoutError):
                raise NotReady("it does not answer") from None
            if isinstance(error, ValueError) and not isinstance(error, ConfigError | Unproven):
                raise NotReady("something else answers there") from None
            raise


def other_secret(address: str, own: ProcessInfo) -> ConfigError:
    """The error that Unproven means to a user."""
    return ConfigError(
        f"Process 0 at {address} has another secret than {own}, or one of the two has none: set the same {SECRET} or "
        f"{SECRET_FILE} for all processes."
    )


def probe(address: str, launch: Launch, own: ProcessInfo) -> str:
    """Description of the listener at process 0's port, in parentheses, for a process that also has rank 0; empty if it is not a
    jaxllm process. If it is another process 0 of this same launch, both raise the same ConfigError."""
    try:
        until_s = time.monotonic() + TRY_S
        Visit(replace(launch, host=address), own, until_s).answer(until_s)
    except _AnotherLaunch as reason:
        return f" ({reason})"
    except Unproven:
        return " (process 0 of a run with another secret, or with none, is there)"
    except OSError:
        pass
    return ""


def open_port(launch: Launch, own: ProcessInfo, patience_s: float = 0.0) -> socket.socket:
    """Opens the leader's port.

    Args:
      launch: in which this process leads (Launch.led_by).
      patience_s: time to wait for a taken port: after a restart its holder may be about to exit.

    Raises:
      RendezvousError: the port is still taken after patience_s.
      ConfigError: the port is taken and there is no wait (the message names the holder if it answers), or it cannot be opened.
    """
    if not is_local(launch.host):
        # Process 0 may have been started here and on its own host: each should then learn of the other.
        probe(launch.host, launch, own)
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
                why = f"is taken on this host{probe(address or '127.0.0.1', launch, own)}"
            raise kind(
                f"Port {launch.port} of {launch.port_from} {why}: choose another for all, with {COORDINATOR}=host:port."
            ) from None
