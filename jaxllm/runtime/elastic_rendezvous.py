"""The rendezvous of a run that may train on with fewer hosts (launch.least_hosts).

The launcher's process 0 may be on the host that is gone. So any of the first LEADERS processes may lead the rendezvous: each
looks whether one of them leads already, and joins it. If none does, process 0 leads at once, and process k after
launch.wait_s and k times TURN_S. A leader that finds another one of a lower rank gives way to it. So two parts of a cluster
that do not reach each other may both train; the run directory's lock lets one of them write (checkpoint/run_lock.py).

The leader waits launch.wait_s for the missing. Then those hosts train that are complete, as many of them as the planner finds
a layout for, and at least launch.least_hosts. They get new ranks, the leader 0. JAX gets a port of its own, since the leader
keeps that of the rendezvous: it is the door at which a host that returns waits. When one waits with which the run can grow, the
leader has the run saved and started again.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from jaxllm.config.errors import ConfigError
from jaxllm.runtime.authentication import Unproven
from jaxllm.runtime.launchers import START_TIMEOUT_S, Launch
from jaxllm.runtime.rendezvous import Rendezvous, open_port
from jaxllm.runtime.rendezvous_checks import ProcessInfo, missing
from jaxllm.runtime.rendezvous_client import PROBE_S, Answer, Led, NotReady, RendezvousError, Visit, exchange, other_secret
from jaxllm.runtime.socket_messages import connect, listen

LEADERS = 16
"""Processes that may lead. All of them gone is the one loss that such a run does not survive by itself."""
TURN_S = 3.0
"""Between the times at which two processes would begin to lead: enough for the first to be found by the second."""
LOOK_S = 0.5
RIVALS_S = 2.0
PORT_WAIT_S = 30.0
"""Time to wait until the port's holder exits: an earlier attempt."""
DOOR_S = 1e6
"""How long a process may wait at the door."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Elastic:
    """How far a run may shrink.

    Args:
      layout: (processes of the hosts that are there) -> keys of the config for them, as JSON; None if it cannot train there.
        The argument is a list of the processes that each host has.
    """

    least_hosts: int
    wait_s: float
    layout: Callable[[Sequence[int]], str | None]


def meet(own: ProcessInfo, launch: Launch, elastic: Elastic, monitor_port: int) -> tuple[Answer, socket.socket | None]:
    """Takes part in the rendezvous, and leads it if no other process does. Returns the answer and, on the leader, the port at
    which hosts that return will ask.

    Args:
      monitor_port: where this process's monitor would listen if it leads.

    Raises:
      RendezvousError: too few hosts came in time, or a process that came is gone again.
      ConfigError: the processes do not fit together, or the port cannot be opened.
    """
    began_s = time.monotonic()
    until_s, turn = began_s + launch.start_timeout_s, own.rank
    others = [rank for rank in range(min(LEADERS, own.count)) if rank != own.rank]
    lead_at_s = began_s + (elastic.wait_s + turn * TURN_S if turn else 0.0)
    while True:
        for rank in others:
            try:
                with suppress(OSError, NotReady), connect(*launch.address_of(rank), PROBE_S) as connection:
                    return exchange(connection, own, launch.secret, until_s), None
            except Unproven:
                raise other_secret(launch.hosts[rank], own) from None
        if turn < LEADERS and time.monotonic() >= lead_at_s:
            listener = open_port(at_home(launch, turn), own, PORT_WAIT_S)
            try:
                return _Leader(listener, own, launch, elastic, monitor_port).lead(), listener
            except _GivesWay as gives_way:
                with suppress(OSError, NotReady), gives_way.connection:
                    return gives_way.visit.answer(until_s), None
        if time.monotonic() >= until_s:
            raise RendezvousError(
                f"Process {own.rank} found no process that leads the run within {launch.start_timeout_s} s: look at the "
                f"output of {launch.hosts[0]}, or set {START_TIMEOUT_S} to wait longer."
            )
        time.sleep(LOOK_S)


def at_home(launch: Launch, rank: int) -> Launch:
    """A launch whose process 0 is this one, for the choice of port and address."""
    host, port = launch.address_of(rank)
    return replace(launch, host=host, port=port, bind=launch.bind if rank == 0 else "")


def complete_hosts(launch: Launch, there: Collection[int]) -> list[list[int]]:
    """Ranks of each host all of whose processes are there."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(launch.hosts):
        by_host.setdefault(host, []).append(rank)
    return [ranks for ranks in by_host.values() if set(ranks) <= set(there)]


class _GivesWay(Exception):
    """Another process leads.

    Args:
      visit: on the connection, introduced; that process takes this one.
    """

    def __init__(self, connection: socket.socket, visit: Visit):
        self.connection, self.visit = connection, visit


class _Leader(Rendezvous):
    """A rendezvous that may do without some."""

    def __init__(self, listener: socket.socket, own: ProcessInfo, launch: Launch, elastic: Elastic, monitor_port: int):
        super().__init__(listener, own, launch)
        self._elastic, self._monitor_port = elastic, monitor_port

    def lead(self) -> Answer:
        """Returns once all that train are released. The port stays open, unless it raises an error.

        Raises:
          _GivesWay: a process of lower rank leads too.
        """
        try:
            answer = self._gather()
            self.let_start()
            return answer
        except Exception as error:
            if isinstance(error, ConfigError):
                self.refuse(str(error), isinstance(error, RendezvousError))
            self.listener.close()
            raise
        finally:
            self.close()

    def _gather(self) -> Answer:
        rivals_at_s = time.monotonic()
        choose_at_s = rivals_at_s + self._elastic.wait_s
        while True:
            there, now_s = {self.own.rank, *self.connections}, time.monotonic()
            if len(there) == self.own.count:
                return self._release(list(range(self.own.count)), "")
            if now_s >= choose_at_s:
                if (chosen := self._choose(there)) is not None:
                    return self._release(*chosen)
                choose_at_s = now_s + self._elastic.wait_s
            if now_s >= self.until_s:
                raise RendezvousError(missing(self.launch, self.infos, there))
            if now_s >= rivals_at_s:
                self._look_for_rivals()
                rivals_at_s = time.monotonic() + RIVALS_S
            self.look(LOOK_S)

    def _look_for_rivals(self) -> None:
        for rank in range(min(self.own.rank, LEADERS)):
            with suppress(OSError, NotReady, Unproven), ExitStack() as stack:
                connection = stack.enter_context(connect(*self.launch.address_of(rank), PROBE_S))
                visit = Visit(connection, self.own, self.launch.secret)
                if visit.introduce(time.monotonic() + PROBE_S):
                    stack.pop_all()
                    raise _GivesWay(connection, visit)

    def _choose(self, there: Collection[int]) -> tuple[list[int], str] | None:
        """Ranks of the largest number of hosts that has a layout, this one among them, and the layout."""
        hosts = complete_hosts(self.launch, there)
        hosts.sort(key=lambda ranks: self.own.rank not in ranks)
        if not hosts or self.own.rank not in hosts[0]:
            return None
        for count in range(len(hosts), self._elastic.least_hosts - 1, -1):
            if (layout := self._elastic.layout([len(ranks) for ranks in hosts[:count]])) is not None:
                return [rank for ranks in hosts[:count] for rank in ranks], layout
        return None

    def _release(self, ranks: list[int], layout: str) -> Answer:
        ranks.sort(key=lambda rank: (rank != self.own.rank, rank))
        absent = list(dict.fromkeys(host for rank, host in enumerate(self.launch.hosts) if rank not in ranks))
        attempt = max(self.infos[rank].attempt for rank in ranks)
        # Closed before JAX opens it: another program could take it between, and the supervisors would start all again.
        with listen(0) as free:
            port = free.getsockname()[1]
        answer = self.release(ranks, self._monitor_port, Led(port, attempt, absent, layout))
        return replace(answer, address=self.launch.hosts[self.own.rank])


class WaitingRoom(Rendezvous):
    """Where processes wait that the run trains without. A thread serves them until `leave`.

    Args:
      present: ranks that train.
      grow: called with the names of the hosts that wait, when the run can train on more hosts with them.
    """

    def __init__(
        self,
        listener: socket.socket,
        own: ProcessInfo,
        launch: Launch,
        elastic: Elastic,
        absent: Collection[str],
        grow: Callable[[str], None],
    ):
        super().__init__(listener, own, launch)
        self.until_s = time.monotonic() + DOOR_S
        self._elastic, self._grow = elastic, grow
        self._present = {rank for rank, host in enumerate(launch.hosts) if host not in absent}
        self._hosts = len(complete_hosts(launch, self._present))
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="waiting-room", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Closes the port. Those who wait look for another leader."""
        self._left.set()
        self._thread.join()
        self.close()
        self.listener.close()

    def admit(self, connection, info: ProcessInfo) -> bool:
        if info.rank in self._present:
            return False
        try:
            return super().admit(connection, info)
        except ConfigError:
            # It was told why; the run has nothing to do with it.
            return False

    def _serve(self) -> None:
        refused: set[frozenset[int]] = set()
        while not self._left.is_set():
            self.look(LOOK_S)
            waiting = frozenset(self.connections)
            hosts = complete_hosts(self.launch, self._present | waiting)
            if len(hosts) <= self._hosts or waiting in refused:
                continue
            whole = sum(map(len, hosts)) == self.own.count
            if whole or self._elastic.layout([len(ranks) for ranks in hosts]) is not None:
                self._grow(", ".join(self.launch.hosts[ranks[0]] for ranks in hosts if not set(ranks) <= self._present))
            refused.add(waiting)
