"""The rendezvous of a run that may train on with fewer hosts (launch.least_hosts).

The launcher's process 0 may be on the host that is gone. So any of the first LEADERS processes may lead the rendezvous: each
looks whether one of them leads already, and joins it. If none does, process 0 leads at once, and process k after
launch.wait_s and k times TURN_S. A leader that finds another one of a lower rank gives way to it. So two parts of a cluster
that do not reach each other may both train; the run directory's lock lets one of them write (checkpoint/run_lock.py).

The leader waits launch.wait_s for the missing. Then those hosts train that are complete, as many of them as the planner finds
a layout for, and at least launch.least_hosts. They get new ranks, the leader 0. JAX gets a port of its own, since the leader
keeps that of the rendezvous: it is the door at which a host that returns waits. When one waits with which the run can grow, the
leader has the run saved and started again. A launcher may also start fewer hosts than the config's mesh has: those get a layout
in the same way, and hosts that no layout uses wait as spares.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.runtime.authentication import Unproven
from jaxllm.runtime.launchers import START_TIMEOUT_S, Launch
from jaxllm.runtime.rendezvous import ENDED, PORT_WAIT_S, START, Rendezvous, open_port
from jaxllm.runtime.rendezvous_checks import ProcessInfo, missing, why_incompatible
from jaxllm.runtime.rendezvous_client import (
    FIRST_REPLY_S,
    PROBE_S,
    Answer,
    Led,
    NotReady,
    RendezvousError,
    Visit,
    other_secret,
)
from jaxllm.runtime.socket_messages import connect, listen

LEADERS = 16
"""Processes that may lead. All of them gone is the one loss that such a run does not survive by itself."""
TURN_S = 3.0
"""Between the times at which two processes would begin to lead: enough for the first to be found by the second."""
LOOK_S = 0.5
GATHER_S = 10.0
"""Time that a leader other than process 0 gives the others to find it: each looks at all that may lead, up to 2 s each."""
DOOR_S = 1e6
"""How long a process may wait at the door."""
DOES_NOT_FIT = "the batch does not divide over them, or their memory is too small"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Elastic:
    """How far a run may shrink.

    Args:
      layout: (processes of each host that is there) -> keys of the config for them, as JSON; None if it cannot train there.
      too_few: (processes of each host of the launch) -> whether the config's mesh has more devices than all of them.
      why_none: (processes of each host that is there) -> why no layout fits them, and what to change.
      sites: number of groups of consecutive hosts that a slow network connects (replicas). Whole ones are taken first, and the
        hosts of one have consecutive ranks.
    """

    least_hosts: int
    wait_s: float
    layout: Callable[[Sequence[Sequence[ProcessInfo]]], str | None]
    too_few: Callable[[Sequence[Sequence[ProcessInfo]]], bool] = lambda hosts: False
    why_none: Callable[[Sequence[Sequence[ProcessInfo]]], str] = lambda hosts: DOES_NOT_FIT
    sites: int = 1


def meet(own: ProcessInfo, launch: Launch, elastic: Elastic, monitor_port: int) -> tuple[Answer, WaitingRoom | None]:
    """Takes part in the rendezvous, and leads it if no other process does. Returns the answer and, on the leader of a run that
    trains without some hosts, where these wait when they return.

    Args:
      monitor_port: where this process's monitor would listen if it leads.

    Raises:
      RendezvousError: too few hosts came in time, or a process that came is gone again.
      ConfigError: the processes do not fit together, the port cannot be opened, or the run ended while this process waited.
    """
    may_lead = True
    while True:
        try:
            return _meet_once(own, launch, elastic, monitor_port, may_lead)
        except _Over as over:
            # Once it has given way it does not lead again: when the next of its network does too, only that one says so.
            may_lead = may_lead and not over.others_lead


class _Over(Exception):
    """The run that this process waited for, or its rendezvous, is over: all begin again, and are waited for again.

    Args:
      others_lead: more hosts can train without this one.
    """

    def __init__(self, others_lead: bool = False):
        self.others_lead = others_lead


def _meet_once(
    own: ProcessInfo, launch: Launch, elastic: Elastic, monitor_port: int, may_lead: bool
) -> tuple[Answer, WaitingRoom | None]:
    began_s, turn = time.monotonic(), own.rank if may_lead else LEADERS
    until_s = began_s + launch.start_timeout_s
    others = [rank for rank in range(min(LEADERS, own.count)) if rank != own.rank]
    lead_at_s = began_s + (elastic.wait_s + turn * TURN_S if turn else 0.0)
    while True:
        for rank in others:
            try:
                with suppress(OSError, NotReady), connect(*launch.address_of(rank), PROBE_S) as connection:
                    visit = Visit(connection, own, launch.secret)
                    taken = visit.introduce(min(until_s, time.monotonic() + FIRST_REPLY_S))
                    return _answer(visit, until_s) if taken else visit.answer(until_s), None
            except Unproven:
                raise other_secret(launch.hosts[rank], own) from None
        if turn < LEADERS and time.monotonic() >= lead_at_s:
            leader = _Leader(open_port(at_home(launch, turn), own, PORT_WAIT_S), own, launch, elastic, monitor_port)
            try:
                return leader.lead(max(began_s + elastic.wait_s, time.monotonic() + (GATHER_S if turn else 0.0)))
            except _GivesWay as gives_way:
                with gives_way.connection:
                    return _answer(gives_way.visit, until_s), None
        if time.monotonic() >= until_s:
            raise RendezvousError(
                f"Process {own.rank} found no process that leads the run within {launch.start_timeout_s} s: look at the "
                f"output of {launch.hosts[0]}, or set {START_TIMEOUT_S} to wait longer."
            )
        time.sleep(LOOK_S)


def _answer(visit: Visit, until_s: float) -> Answer:
    try:
        return visit.answer(until_s)
    except (OSError, NotReady):
        raise _Over from None


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


def site_of(rank: int, count: int, sites: int) -> int:
    """The group of hosts (Elastic.sites) of a rank of the launch, which has `count` processes."""
    return rank * sites // count


class _GivesWay(Exception):
    """Another process leads.

    Args:
      visit: on the connection, introduced; that process takes this one.
    """

    def __init__(self, connection: socket.socket, visit: Visit):
        self.connection, self.visit = connection, visit


class _Patient(Rendezvous):
    """A rendezvous that a process cannot spoil for the others."""

    def __init__(self, listener: socket.socket, own: ProcessInfo, launch: Launch, elastic: Elastic):
        super().__init__(listener, own, launch)
        self._elastic = elastic

    def admit(self, connection: Any, info: ProcessInfo) -> bool:
        before = self.connections.get(info.rank)
        if before is not None and info.launch_id == self.own.launch_id:
            # As after a cut cable: the launcher has started this rank again, and the first one does not know.
            sentence = f"{info.title} came again, with process id {info.pid}: it takes the place of this one."
            before.send(json.dumps({"refused": sentence, "missing": True}))
            self.drop(before)
        try:
            return super().admit(connection, info)
        except ConfigError:
            # It has been told why.
            return False

    def fitting(self, there: Collection[int]) -> list[list[int]]:
        """Ranks of each complete host whose processes fit to this one's host, which comes first; none if it is not complete."""
        hosts = complete_hosts(self.launch, there)
        home = next((ranks for ranks in hosts if self.own.rank in ranks), None)
        if home is None:
            return []
        fit = [ranks for ranks in hosts if ranks != home and not why_incompatible(self._numbered([*home, *ranks]))]
        return [home, *sorted(fit, key=lambda ranks: self._order(ranks[0], [home, *fit]))]

    def _order(self, rank: int, hosts: Sequence[Sequence[int]]) -> tuple[bool, bool, int]:
        """Sort key of a process: this one's site first, and then whole ones."""
        return self._site(rank) != self._site(self.own.rank), not self._is_whole(rank, hosts), rank

    def _is_whole(self, rank: int, hosts: Sequence[Sequence[int]]) -> bool:
        """Whether all processes of a rank's site are among these hosts."""
        present = sum(len(ranks) for ranks in hosts if self._site(ranks[0]) == self._site(rank))
        return self._elastic.sites == 1 or present >= self.own.count // self._elastic.sites

    def _site(self, rank: int) -> int:
        return site_of(rank, self.own.count, self._elastic.sites)

    def layout(self, hosts: Sequence[Sequence[int]]) -> str | None:
        return self._elastic.layout([[self.infos[rank] for rank in ranks] for ranks in hosts])

    def too_few(self, hosts: Sequence[Sequence[int]]) -> bool:
        return self._elastic.too_few([[self.infos[rank] for rank in ranks] for ranks in hosts])

    def _numbered(self, ranks: Sequence[int]) -> list[ProcessInfo]:
        return [replace(self.infos[rank], rank=number) for number, rank in enumerate(ranks)]


class _Leader(_Patient):
    """A rendezvous that may do without some hosts."""

    def __init__(self, listener: socket.socket, own: ProcessInfo, launch: Launch, elastic: Elastic, monitor_port: int):
        super().__init__(listener, own, launch, elastic)
        self._monitor_port = monitor_port
        self._rivals = itertools.cycle(range(min(own.rank, LEADERS)))

    def lead(self, choose_at_s: float) -> tuple[Answer, WaitingRoom | None]:
        """Returns once all that train are released, with the room for the others, if there are others.

        Args:
          choose_at_s: until then it waits for all.

        Raises:
          _GivesWay: a process of lower rank leads too.
        """
        keeps_port = False
        try:
            ranks, layout = self._gather(choose_at_s)
            answer = self._release(ranks, layout)
            self.tell_all(START)
            keeps_port = len(ranks) < self.own.count
        except ConfigError as error:
            self.refuse(str(error), isinstance(error, RendezvousError))
            raise
        finally:
            self.close()
            if not keeps_port:
                self.listener.close()
        room = WaitingRoom(self.listener, self.own, self.launch, self._elastic, ranks, self.infos) if keeps_port else None
        return answer, room

    def _gather(self, choose_at_s: float) -> tuple[list[int], str]:
        """Ranks that shall train, and their layout."""
        looked_at: set[int] = set()
        while True:
            there, now_s = {self.own.rank, *self.connections}, time.monotonic()
            hosts = self.fitting(there) if self.own.attempt else complete_hosts(self.launch, there)
            whole = sum(map(len, hosts)) == self.own.count
            if whole and not self.too_few(hosts):
                return list(range(self.own.count)), ""
            if (whole or now_s >= choose_at_s) and there != looked_at:
                looked_at = there
                chosen = self._choose(there)
                if self._are_more_without_this_host(hosts, len(chosen[0]) if chosen else 0):
                    raise _Over(others_lead=True)
                if chosen is not None:
                    return chosen
                if len(hosts) >= (least := self._elastic.least_hosts):
                    why = self._elastic.why_none([[self.infos[rank] for rank in ranks] for ranks in hosts])
                    sentence = f"No layout fits {len(hosts)} hosts or fewer, down to launch.least_hosts={least} ({why})"
                    if whole:
                        raise ConfigError(f"{sentence}, and the launcher started no more.")
                    log.warning("%s: waiting for more.", sentence)
            if now_s >= self.until_s:
                raise RendezvousError(missing(self.launch, self.infos, there))
            self._look_for_a_rival()
            self.look(LOOK_S)

    def _are_more_without_this_host(self, hosts: Sequence[Sequence[int]], processes: int) -> bool:
        """Whether the whole sites beside this one's have more than so many processes, and can train. Each leader trains."""
        if self._is_whole(self.own.rank, hosts):
            return False
        others = [ranks for ranks in hosts if self._is_whole(ranks[0], hosts)]
        is_more = len(others) >= self._elastic.least_hosts and sum(map(len, others)) > processes
        may_lead = any(rank < LEADERS for ranks in others for rank in ranks)
        return is_more and may_lead and self.layout(others) is not None

    def _look_for_a_rival(self) -> None:
        rank = next(self._rivals, None)
        if rank is None:
            return
        with suppress(OSError, NotReady, Unproven), ExitStack() as stack:
            connection = stack.enter_context(connect(*self.launch.address_of(rank), PROBE_S))
            visit = Visit(connection, self.own, self.launch.secret)
            if visit.introduce(time.monotonic() + PROBE_S):
                stack.pop_all()
                raise _GivesWay(connection, visit)

    def _choose(self, there: Collection[int]) -> tuple[list[int], str] | None:
        """Ranks of the largest number of hosts that has a layout, this one among them, and the layout."""
        hosts = self.fitting(there)
        for count in range(len(hosts), self._elastic.least_hosts - 1, -1):
            if (layout := self.layout(hosts[:count])) is not None:
                if spares := hosts[count:]:
                    names = ", ".join(self.launch.hosts[ranks[0]] for ranks in spares)
                    log.warning("No layout fits %d hosts: training on %d, without %s.", len(hosts), count, names)
                return [rank for ranks in hosts[:count] for rank in ranks], layout
        return None

    def _release(self, ranks: list[int], layout: str) -> Answer:
        own_site = self._site(self.own.rank)
        ranks.sort(key=lambda rank: (self._site(rank) != own_site, self._site(rank), rank != self.own.rank, rank))
        absent = list(dict.fromkeys(host for rank, host in enumerate(self.launch.hosts) if rank not in ranks))
        attempt = max(self.infos[rank].attempt for rank in ranks)
        # Closed before JAX opens it: another program could take it between, and the supervisors would start all again.
        with listen(0) as free:
            port = free.getsockname()[1]
        answer = self.release(ranks, self._monitor_port, Led(port, attempt, absent, layout))
        return replace(answer, address=self.launch.hosts[self.own.rank])


class WaitingRoom(_Patient):
    """Where processes wait that the run trains without. A thread serves them from the release on, until `leave`.

    Args:
      present: ranks that train.
      infos: by rank, what these said of themselves.

    Attributes:
      grow: called in that thread with the names of hosts that wait, when the run can train on more hosts with them, and has
        trained without them for launch.wait_s: a host that fails again and again must not stop it at each try. None: later.
      ended: the run has reached its end.
    """

    def __init__(
        self,
        listener: socket.socket,
        own: ProcessInfo,
        launch: Launch,
        elastic: Elastic,
        present: Collection[int],
        infos: Mapping[int, ProcessInfo],
    ):
        super().__init__(listener, own, launch, elastic)
        self.infos |= {rank: infos[rank] for rank in present}
        self.until_s = time.monotonic() + DOOR_S
        self.grow: Callable[[str], None] | None = None
        self.ended = False
        self._present, self._left = set(present), threading.Event()
        self._grow_at_s = time.monotonic() + elastic.wait_s
        self._thread = threading.Thread(target=self._serve, name="waiting-room", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Closes the port. Those who wait look for another leader, or exit if the run has ended."""
        self._left.set()
        self._thread.join()
        if self.ended:
            self.tell_all(ENDED)
        self.close()
        self.listener.close()

    def admit(self, connection: Any, info: ProcessInfo) -> bool:
        return info.rank not in self._present and super().admit(connection, info)

    def _serve(self) -> None:
        looked_at: frozenset[int] = frozenset()
        while not self._left.is_set():
            try:
                self.look(LOOK_S)
                waiting = frozenset(self.connections)
                if self.grow is None or time.monotonic() < self._grow_at_s or waiting == looked_at:
                    continue
                looked_at = waiting
                if hosts := self._hosts_to_grow_by(waiting):
                    self.grow(", ".join(hosts))
            except Exception:
                # The run itself is not concerned.
                log.exception("The port for hosts that return is closed.")
                return

    def _hosts_to_grow_by(self, waiting: Collection[int]) -> list[str]:
        hosts = self.fitting(self._present | set(waiting))
        hosts.sort(key=lambda ranks: not set(ranks) <= self._present)
        least = sum(set(ranks) <= self._present for ranks in hosts)
        for count in range(len(hosts), least, -1):
            whole = sum(map(len, hosts[:count])) == self.own.count
            if (whole and not self.too_few(hosts)) or self.layout(hosts[:count]) is not None:
                return [self.launch.hosts[ranks[0]] for ranks in hosts[least:count]]
        return []
