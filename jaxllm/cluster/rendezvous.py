"""Rendezvous: all processes of a run meet at one of them, the leader, before JAX starts. If something keeps them apart, all
report it in one sentence.

JAX itself aborts, hangs or crashes at this point: it aborts from C++ minutes after a process is missing, segfaults if its port
is taken, and mixes up two runs on one port. So the leader first listens on the coordinator's port itself. Each other process
sends its description and stays connected. Once all have arrived and fit together, the leader asks whether they still listen,
frees the port for JAX and releases them. Every process that came learns of any problem and reports the same sentence. The
connections stay for the heartbeats (cluster/peer_monitor.py).

Process 0 leads, and all are required. With launch.least_hosts (host_choice.py) the host of process 0 may be the one that is
gone. So any of the first LEADERS processes may lead: each looks whether one of them leads already, and joins it. If none does,
process 0 leads at once, and process k after launch.wait_s and k times TURN_S. A leader that finds another one of a lower rank
gives way to it. So two parts of a cluster that do not reach each other may both train; the run directory's lock lets one
of them write (checkpoint/run_lock.py).

Such a leader waits launch.wait_s for the missing. Then those hosts train that are complete, as many of them as the planner
finds a layout for, and at least launch.least_hosts. They get new ranks, the leader 0. JAX gets a port of its own, since the
leader keeps that of the rendezvous: it is the door at which a host that returns waits. When one waits with which the run can
grow, the leader has the run saved and started again. A launcher may also start fewer hosts than the config's mesh has: those
get a layout in the same way, and hosts that no layout uses wait as spares.

A message is one line: MAGIC and a JSON object, typed by ProcessInfo on the way to the leader and by Reply on the way back
(rendezvous_client.py), and signed if the run has a secret (cluster/socket_messages.py). These modules use no JAX.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from jaxllm.cluster import rendezvous_checks as checks
from jaxllm.cluster import rendezvous_client as client
from jaxllm.cluster.host_choice import Elastic, HostChoice
from jaxllm.cluster.launchers import COORDINATOR, START_TIMEOUT_S, Launch, is_loopback
from jaxllm.cluster.rendezvous_checks import ProcessInfo, assign_gpus, why_incompatible, why_rejected
from jaxllm.cluster.rendezvous_client import GRACE_S, MAGIC, Answer, RendezvousError, Run, Visit, open_port, other_secret
from jaxllm.cluster.socket_messages import SECRET, SECRET_FILE, Channel, Connection, Unproven, keep_alive, listen
from jaxllm.config.errors import ConfigError

PORT_WAIT_S = 30.0
"""Time to wait after a restart until the port's holder, an earlier attempt, exits."""
TURN_S = 3.0
"""Between the times at which two processes would begin to lead: enough for the first to be found by the second."""
LOOK_S = 0.5
SLOWEST_RETRY_S = 1.0
GATHER_S = 10.0
"""Time that a leader other than process 0 gives the others to find it: each looks at all that may lead, up to 2 s each."""
DOOR_S = 1e6
"""How long a process may wait at the door."""

STRANGERS = 64
"""Connections that a port holds beside those of the run's processes: beyond them, one that has not said who it is makes room.
Otherwise strangers could use up the descriptors that the run needs for its files."""
INTRODUCTION_S = 5.0
"""Time in which a connection must say who it is."""
ACCEPTED_AT_ONCE = 32
"""Between two looks at the other connections. Half of STRANGERS, so that each new one is read before it makes room."""
MOST_REPORTED = 16
"""Addresses in warnings: an attacker may have millions."""
START, ENDED = '{"start": true}', '{"ended": true}'
"""Replies (rendezvous_client.Reply)."""

log = logging.getLogger(__name__)


def meet(own: ProcessInfo, launch: Launch, elastic: Elastic) -> tuple[Answer, WaitingRoom | None]:
    """Takes part in the rendezvous, and leads it if this process may and no other does. Returns once the leader releases all,
    with the answer and, on the leader of a run that trains without some hosts, where these wait when they return.

    Raises:
      RendezvousError: no leader was reached in time, too few came in time, or a process that came is gone again.
      ConfigError: the processes do not fit together, the port cannot be opened, or the run ended while this process waited.
    """
    may_lead = own.rank < elastic.leaders
    while True:
        try:
            return _meet_once(own, launch, elastic, may_lead)
        except _Over as over:
            # Once it has given way it does not lead again: when the next of its network does too, only that one says so.
            may_lead = may_lead and not over.args


class _Over(Exception):
    """The run that this process waited for, or its rendezvous, is over: all begin again, and are waited for again. It has an
    argument if others lead, because more hosts can train without this one."""


def _meet_once(own: ProcessInfo, launch: Launch, elastic: Elastic, may_lead: bool) -> tuple[Answer, WaitingRoom | None]:
    began_s, pause_s, why = time.monotonic(), 0.1, ""
    until_s = began_s + launch.start_timeout_s
    others = [launch.led_by(rank) for rank in range(min(elastic.leaders, own.count)) if rank != own.rank]
    lead_at_s = began_s + (elastic.wait_s + own.rank * TURN_S if own.rank else 0.0)
    while True:
        for place in others:
            try:
                visit = Visit(place, own, until_s, client.PROBE_S if elastic.shrinks else client.TRY_S)
                return _answer(visit, until_s) if elastic.shrinks else visit.answer(until_s), None
            except OSError as error:
                why = error.strerror or str(error)
            except Unproven:
                raise other_secret(place.address, own) from None
        if may_lead and time.monotonic() >= lead_at_s:
            # An earlier attempt may still hold the port.
            patience_s = PORT_WAIT_S if elastic.shrinks or own.attempt else 0.0
            leader = _Leader(open_port(launch.led_by(own.rank), own, patience_s), own, launch, elastic)
            try:
                gathered_s = time.monotonic() + (GATHER_S if own.rank else 0.0)
                return leader.lead(max(began_s + elastic.wait_s, gathered_s))
            except _GivesWay as gives_way:
                return _answer(gives_way.args[0], until_s), None
        if time.monotonic() + pause_s >= until_s:
            raise _not_found(own, launch, elastic, why)
        time.sleep(pause_s)
        # Thousands that come before the leader should not keep its host busy.
        pause_s = min(1.5 * pause_s, SLOWEST_RETRY_S)


def _answer(visit: Visit, until_s: float) -> Answer:
    try:
        return visit.answer(until_s)
    except OSError:
        raise _Over from None


def _not_found(own: ProcessInfo, launch: Launch, elastic: Elastic, why: str) -> RendezvousError:
    limit_s = launch.start_timeout_s
    if elastic.shrinks:
        return RendezvousError(
            f"Process {own.rank} found no process that leads the run within {limit_s} s: look at the output of "
            f"{launch.hosts[0]}, or set {START_TIMEOUT_S} to wait longer."
        )
    # If process 0 runs on another host, each process has looked for it at home.
    hint = f"; {launch.host} is {own.host} itself" if is_loopback(launch.host) else ""
    return RendezvousError(
        f"Process {own.rank} cannot reach process 0 at {launch.address} after {limit_s} s ({why}{hint}): start it there, or "
        f"correct {COORDINATOR}."
    )


class _GivesWay(Exception):
    """Another process leads. The argument is the Visit to it, which takes this one."""


class Rendezvous:
    """Processes that have arrived.

    Args:
      listener: a socket of rendezvous.open_port.
      launch: names for messages, and the time limit.
      elastic: if the run may shrink, a process cannot spoil the rendezvous for the others.
    """

    def __init__(self, listener: socket.socket, own: ProcessInfo, launch: Launch, elastic: Elastic):
        self.own, self.launch, self.elastic, self.listener = own, launch, elastic, listener
        self.infos: dict[int, ProcessInfo] = {own.rank: own}
        """By rank, disconnected processes included."""
        self.choice = HostChoice(own, launch, elastic, self.infos)
        self.present: Collection[int] = ()
        """Ranks that train already: such a process is not taken."""
        self.connections: dict[int, _Connection] = {}
        """By rank, connected processes without this one."""
        self.until_s = time.monotonic() + launch.start_timeout_s
        self.selector = selectors.DefaultSelector()
        self._strangers: dict[_Connection, None] = {}
        """Connections that have not said who they are, the oldest first."""
        self._reported: set[str] = set()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, None)

    def release(self, ranks: Sequence[int], layout: str) -> Answer:
        """Tells these processes, own rank first, that they are a run, and waits for their confirmation. RendezvousError if one
        is gone, or does not answer; ConfigError if they do not fit together."""
        infos = self.choice.numbered(ranks)
        if sentence := why_incompatible(infos):
            raise ConfigError(sentence)
        devices, members = assign_gpus(infos), [(info.host, info.pid) for info in infos]
        present = set(ranks)
        absent = list(dict.fromkeys(host for rank, host in enumerate(self.launch.hosts) if rank not in present))
        port = self.launch.port
        if self.elastic.shrinks:
            # Closed before JAX opens it: another program could take it between, and the supervisors would start all again.
            with listen(0) as free:
                port = free.getsockname()[1]
        run = Run(members, port, max(info.attempt for info in infos), absent, layout, secrets.token_hex(32))
        # Everything but rank and devices is the same for all, and long for many processes.
        same = json.dumps(asdict(run))
        for number, rank in enumerate(ranks[1:], start=1):
            self.connections[rank].send(f'{{"devices": {json.dumps(devices[number])}, "rank": {number}, "all": {same}}}')
        self._await_ready(ranks[1:])
        return Answer(**vars(run), devices=devices[0], address=self.launch.led_by(self.own.rank).host)

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

    def tell_all(self, message: str) -> None:
        for connection in self.connections.values():
            connection.send(message)

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self.selector.close()

    def look(self, limit_s: float) -> None:
        # Known ones are heard before strangers take time.
        for key, _ in sorted(self.selector.select(limit_s), key=lambda one: one[0].data is None):
            self.take_strangers() if key.data is None else self._read(key.data)
        before_s = time.monotonic() - INTRODUCTION_S
        for stranger in list(itertools.takewhile(lambda one: one.since_s < before_s, self._strangers)):
            self.drop(stranger)

    def take_strangers(self) -> None:
        """Takes some of the connections that wait."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self.listener.accept()
            except OSError:
                return
            keep_alive(connection)
            channel = Channel(self.launch.secret, MAGIC, is_server=True)
            stranger = _Connection(connection, channel, client.MAX_INFO_BYTES, address[0].removeprefix("::ffff:"))
            self.selector.register(connection, selectors.EVENT_READ, stranger)
            self._strangers[stranger] = None
            if len(self.selector.get_map()) > self.own.count + STRANGERS:
                # Of the address with most strangers, one that has not answered, the oldest: nobody crowds out what comes from
                # elsewhere.
                crowds = Counter(other.address for other in self._strangers)
                self.drop(max(self._strangers, key=lambda other: (crowds[other.address], not other.channel.greeted)))

    def _read(self, connection: _Connection) -> None:
        messages = connection.receive()
        for message in messages or ():
            if connection.info is not None:
                connection.ready = True
            elif (info := checks.parse_process_info(message, self.own.versions)) is None or not self._admit(connection, info):
                messages = None
                break
        if messages is None:
            address = connection.address
            if connection.channel.refused and address not in self._reported and len(self._reported) < MOST_REPORTED:
                self._reported.add(address)
                sentence = "A process at %s was turned away: its secret is not that of this run (%s, %s)."
                log.warning(sentence, address, SECRET, SECRET_FILE)
            self.drop(connection)

    def _admit(self, connection: _Connection, info: ProcessInfo) -> bool:
        """Registers a process. False if it has to be dropped, ConfigError if it does not fit and is required."""
        if info.rank in self.present:
            return False
        if None not in (info.launch_id, self.own.launch_id) and info.launch_id != self.own.launch_id:
            connection.send(json.dumps({"other": f"process 0 of another launch, {self.own.launch_id}, is there"}))
            return False
        before = self.connections.get(info.rank)
        if before is not None and self.elastic.shrinks and info.launch_id == self.own.launch_id:
            # As after a cut cable: the launcher has started this rank again, and the first one does not know.
            sentence = f"{info.title} came again, with process id {info.pid}: it takes the place of this one."
            before.send(_refusal(sentence, missing=True))
            self.drop(before)
        elif before is not None and before.hung_up():
            # The process was restarted.
            self.drop(before)
        is_twin = info.rank == self.own.rank or info.rank in self.connections
        if sentence := why_rejected(info, self.own, self.launch, self.infos[info.rank] if is_twin else None):
            connection.send(_refusal(sentence, missing=False))
            if self.elastic.shrinks:
                return False
            raise ConfigError(sentence)
        connection.info, self.infos[info.rank], self.connections[info.rank] = info, info, connection
        self._strangers.pop(connection, None)
        connection.send(json.dumps({"wait_s": max(self.until_s - time.monotonic(), 0.0)}))
        return True

    def drop(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            # Dropped for its successor before its own end was read.
            return
        if connection.info is not None and self.connections.get(connection.info.rank) is connection:
            del self.connections[connection.info.rank]
        self._strangers.pop(connection, None)
        self.selector.unregister(connection.socket)
        connection.socket.close()


class _Leader(Rendezvous):
    """A rendezvous from its beginning to the release of those that train."""

    def lead(self, choose_at_s: float) -> tuple[Answer, WaitingRoom | None]:
        """Returns once all that train are released, with the room for the others, if there are others.

        Args:
          choose_at_s: until then it waits for all.

        Raises:
          _GivesWay: a process of lower rank leads too.
          RendezvousError: not all that are required came in time, or one that came disconnected or does not answer.
          ConfigError: the processes do not fit together. All that came raise the same error.
        """
        keeps_port = False
        try:
            ranks, layout = self._gather(choose_at_s)
            ranks = self.choice.in_order(ranks)
            answer = self.release(ranks, layout)
            keeps_port = len(ranks) < self.own.count
            if not keeps_port:
                # Only now: a process that tries JAX's port too early waits a second for its next try.
                self.listener.close()
            for number, rank in enumerate(ranks[1:], start=1):
                # `close` leaves it open.
                answer.connections[number] = kept = self.connections.pop(rank)
                kept.send(START)
                self.selector.unregister(kept.socket)
        except ConfigError as error:
            self.tell_all(_refusal(str(error), isinstance(error, RendezvousError)))
            raise
        finally:
            self.close()
            if not keeps_port:
                self.listener.close()
        present = {rank: self.infos[rank] for rank in ranks}
        room = WaitingRoom(self.listener, self.own, self.launch, self.elastic, present) if keeps_port else None
        return answer, room

    def _gather(self, choose_at_s: float) -> tuple[list[int], str]:
        """Ranks that shall train, and their layout."""
        looked_at: set[int] = set()
        rivals = itertools.cycle(range(min(self.own.rank, self.elastic.leaders)))
        while True:
            now_s = time.monotonic()
            if len(self.connections) == self.own.count - 1 or now_s >= choose_at_s:
                there = {self.own.rank, *self.connections}
                hosts = self.choice.candidates(there)
                if self.choice.are_all(hosts):
                    return list(range(self.own.count)), ""
                whole = self.choice.is_launch(hosts)
                if (whole or now_s >= choose_at_s) and there != looked_at:
                    looked_at = there
                    chosen = self.choice.choose(there)
                    if self.choice.are_more_without_this_host(hosts, len(chosen[0]) if chosen else 0):
                        raise _Over("others lead")
                    if chosen is not None:
                        return chosen
                    if sentence := self.choice.why_none(hosts):
                        if whole:
                            raise ConfigError(f"{sentence}, and the launcher started no more.")
                        log.warning("%s: waiting for more.", sentence)
            if now_s >= self.until_s:
                raise RendezvousError(
                    checks.missing(self.launch.led_by(self.own.rank), self.infos, {self.own.rank, *self.connections})
                )
            if (rival := next(rivals, None)) is not None:
                place = self.launch.led_by(rival)
                with suppress(OSError, ConfigError, Unproven):
                    raise _GivesWay(Visit(place, self.own, time.monotonic() + client.PROBE_S, client.PROBE_S))
            self.look(LOOK_S)


class WaitingRoom(Rendezvous):
    """Where processes wait that the run trains without. A thread serves them from the release on, until `leave`.

    Args:
      present: by rank, those that train.

    Attributes:
      grow: called in that thread with the names of hosts that wait, when the run can train on more hosts with them, and has
        trained without them for launch.wait_s: a host that fails again and again must not stop it at each try. None: later.
      ended: the run has reached its end.
    """

    def __init__(
        self, listener: socket.socket, own: ProcessInfo, launch: Launch, elastic: Elastic, present: Mapping[int, ProcessInfo]
    ):
        super().__init__(listener, own, launch, elastic)
        self.infos |= present
        self.until_s = time.monotonic() + DOOR_S
        self.grow: Callable[[str], None] | None = None
        self.ended = False
        self.present, self._left = set(present), threading.Event()
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

    def _serve(self) -> None:
        looked_at: frozenset[int] = frozenset()
        while not self._left.is_set():
            try:
                self.look(LOOK_S)
                waiting = frozenset(self.connections)
                if self.grow is None or time.monotonic() < self._grow_at_s or waiting == looked_at:
                    continue
                looked_at = waiting
                if hosts := self.choice.to_grow_by(self.present, waiting):
                    self.grow(", ".join(hosts))
            except Exception:
                # The run itself is not concerned.
                log.exception("Hosts that return are not let in any more.")
                return


class _Connection(Connection):
    """A connection to the leader."""

    info: ProcessInfo | None = None
    ready = False
    """The process has confirmed that it is still there."""


def _refusal(sentence: str, missing: bool) -> str:
    return json.dumps({"refused": sentence, "missing": missing})
