"""Rendezvous: all processes of a run meet at process 0 before JAX starts. If something keeps them apart, all report it in one
sentence.

JAX itself aborts, hangs or crashes at this point: it aborts from C++ minutes after a process is missing, segfaults if its port
is taken, and mixes up two runs on one port. So process 0 first listens on the coordinator's port itself. Each other process
sends its description and stays connected. Once all have arrived and fit together, process 0 asks whether they still listen,
frees the port for JAX and releases them. Every process that came learns of any problem and reports the same sentence.

    process 0      serve(open_port(launch, info), info, launch, monitor_port)  -> Answer
    the others     join(info, launch)  (rendezvous_client.py)                 -> Answer

A message is one line: MAGIC and a JSON object, typed by ProcessInfo on the way to process 0 and by Reply on the way back, and
signed if the run has a secret (authentication.py). These modules use no JAX.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from jaxllm.config.errors import ConfigError
from jaxllm.runtime.authentication import Channel
from jaxllm.runtime.launchers import COORDINATOR, Launch
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
from jaxllm.runtime.rendezvous_client import GRACE_S, MAGIC, MAX_INFO_BYTES, Answer, Led, RendezvousError, probe
from jaxllm.runtime.socket_messages import (
    Connection,
    Door,
    keep_alive,
    listen,
)

PORT_WAIT_S = 30.0
"""Time to wait after a restart until the port's holder, an earlier attempt, exits."""
START, ENDED = '{"start": true}', '{"ended": true}'
"""Replies (rendezvous_client.Reply)."""


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


def serve(listener: socket.socket, own: ProcessInfo, launch: Launch, monitor_port: int) -> Answer:
    """Runs the rendezvous on process 0; returns once all have arrived and are released. Closes `listener` in any case.

    Args:
      launch: names for messages, and the time limit.
      monitor_port: sent to all.

    Raises:
      RendezvousError: not all came within the limit, or a process that came disconnected or does not answer.
      ConfigError: the processes do not fit together. All that came raise the same error.
    """
    rendezvous = Rendezvous(listener, own, launch)
    try:
        rendezvous.await_all()
        answer = rendezvous.release(range(own.count), monitor_port)
        # Only now: a process that tries JAX's port too early waits a second for its next try.
        listener.close()
        rendezvous.tell_all(START)
        return answer
    except ConfigError as error:
        rendezvous.refuse(str(error), isinstance(error, RendezvousError))
        raise
    finally:
        rendezvous.close()
        listener.close()


class Rendezvous:
    """Processes that have arrived at process 0."""

    def __init__(self, listener: socket.socket, own: ProcessInfo, launch: Launch):
        self.own, self.launch, self.listener = own, launch, listener
        self.infos: dict[int, ProcessInfo] = {own.rank: own}
        """By rank, disconnected processes included."""
        self.connections: dict[int, _Connection] = {}
        """By rank, connected processes without this one."""
        self.until_s = time.monotonic() + launch.start_timeout_s
        self.selector = selectors.DefaultSelector()
        self.door = Door(listener, self.selector, own.count, self._stranger, self.drop)

    def await_all(self) -> None:
        while len(self.connections) < self.own.count - 1:
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                raise RendezvousError(missing(self.launch, self.infos, {0, *self.connections}))
            self.look(min(left_s, 1.0))

    def release(self, ranks: Sequence[int], monitor_port: int, led: Led | None = None) -> Answer:
        """Tells these processes, own rank first, that they are a run, and waits for their confirmation.

        Raises:
          RendezvousError: one is gone, or does not answer.
          ConfigError: they do not fit together.
        """
        infos = [replace(self.infos[rank], rank=number) for number, rank in enumerate(ranks)]
        if sentence := why_incompatible(infos):
            raise ConfigError(sentence)
        devices, members = assign_gpus(infos), [(info.host, info.pid) for info in infos]
        # Everything but rank and devices is the same for all, and long for many processes.
        same = json.dumps({"members": members, "monitor_port": monitor_port, "led": led and asdict(led)})
        for number, rank in enumerate(ranks[1:], start=1):
            self.connections[rank].send(f'{{"devices": {json.dumps(devices[number])}, "rank": {number}, "all": {same}}}')
        self._await_ready(ranks[1:])
        return Answer(members, monitor_port, devices[0], rank=0, led=led)

    def tell_all(self, message: str) -> None:
        for connection in self.connections.values():
            connection.send(message)

    def _await_ready(self, ranks: Sequence[int]) -> None:
        """Waits until each process has confirmed that it is still there."""
        until_s = time.monotonic() + GRACE_S
        while silent := [rank for rank in ranks if rank not in self.connections or not self.connections[rank].ready]:
            gone = [rank for rank in silent if rank not in self.connections]
            if gone or time.monotonic() >= until_s:
                who, what = (gone[0], "was gone") if gone else (silent[0], f"did not answer for {GRACE_S:.0f} s")
                raise RendezvousError(
                    f"{self.infos[who].title} joined, but {what} when all were there: look for the cause in "
                    f"its own output, and restart all processes."
                )
            self.look(0.2)

    def refuse(self, sentence: str, missing: bool) -> None:
        self.tell_all(json.dumps({"refused": sentence, "missing": missing}))

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self.selector.close()

    def look(self, limit_s: float) -> None:
        # Known ones are heard before strangers take time.
        for key, _ in sorted(self.selector.select(limit_s), key=lambda one: one[0].data is None):
            self.door.open() if key.data is None else self._read(key.data)
        self.door.tidy()

    def _stranger(self, connection: socket.socket, address: str) -> _Connection:
        keep_alive(connection)
        return _Connection(connection, Channel(self.launch.secret, MAGIC, is_server=True), MAX_INFO_BYTES, address)

    def _read(self, connection: _Connection) -> None:
        messages = connection.receive()
        for message in messages or ():
            if connection.info is not None:
                connection.ready = True
            elif (info := parse_process_info(message, self.own.versions)) is None or not self.admit(connection, info):
                messages = None
                break
        if messages is None:
            self.door.report(connection)
            self.drop(connection)

    def admit(self, connection: _Connection, info: ProcessInfo) -> bool:
        """Registers a process. False if it belongs to another launch and has to be dropped."""
        if None not in (info.launch_id, self.own.launch_id) and info.launch_id != self.own.launch_id:
            connection.send(json.dumps({"other": f"process 0 of another launch, {self.own.launch_id}, is there"}))
            return False
        before = self.connections.get(info.rank)
        if before is not None and before.hung_up():
            # The process was restarted.
            self.drop(before)
            before = None
        twin = self.infos[info.rank] if before is not None or info.rank == self.own.rank else None
        if sentence := why_rejected(info, self.own, self.launch, twin):
            connection.send(json.dumps({"refused": sentence, "missing": False}))
            raise ConfigError(sentence)
        connection.info, self.infos[info.rank], self.connections[info.rank] = info, info, connection
        self.door.forget(connection)
        connection.send(json.dumps({"wait_s": max(self.until_s - time.monotonic(), 0.0)}))
        return True

    def drop(self, connection: _Connection) -> None:
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
