"""Peer monitor. Each process keeps its connection of the rendezvous to process 0 and sends a heartbeat every second; process 0
broadcasts the loss of any peer.

A heartbeat carries the process's phase. Process 0 counts a peer as lost when its connection closes without a goodbye or when it
is silent too long, and tells all others; each prints one sentence and exits with exit_codes.LOST. The others detect the loss of
process 0 themselves. A process that fails with an error announces it here first, so that the others can tell a cause from its
consequences: the error that a collective raises when a peer disappears names no peer.

JAX would notice too, by its own heartbeat, but it ends the process from C++ with a page of errors, and some losses only after a
minute or never. Messages are JSON objects, one per line. The thread needs Python's global lock: a C call that holds it longer
than the allowed silence looks like a frozen process.
"""

import json
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from jaxllm.cluster import exit_codes, progress
from jaxllm.cluster.socket_messages import Connection, Elapsed, Name, Rank, Sentence
from jaxllm.config.types import Switch
from jaxllm.terminal import flush, print_sentence
from jaxllm.untrusted import checked

MOST_NAMED = 16
FIRST_BEAT_S = 20.0
"""Time beyond the allowed silence that a process has for its first message, since not all start JAX in the same time."""
GRACE_S = 2.0
"""Wait before a process reports. One whose error may come from a lost peer waits for the notice of that loss; one that hears of
another's error waits for its own, since most bad input is found by all."""


class PeerStatus(NamedTuple):
    """Phase of a process, as far as process 0 knows."""

    rank: Rank
    host: Name
    seen: progress.Snapshot


@dataclass(frozen=True)
class Slowest:
    """PeerMonitor.slowest and idle_s of process 0."""

    slowest: PeerStatus | None
    idle_s: Elapsed | None = None


@dataclass(frozen=True)
class Bye:
    """The sender is done: its closed connection is no loss."""


@dataclass(frozen=True)
class StopNotice:
    """Reason why all processes have to exit."""

    sentence: Sentence
    code: Annotated[int, Field(strict=True, ge=1, le=255)]
    own_error: Switch = False
    """A process reported its own error: others may be about to find the same."""
    stuck: Switch = False
    """All processes should print their stacks."""


Message = progress.Snapshot | Slowest | Bye | StopNotice


def parse(message: dict[str, Any]) -> Message | None:
    """A message by its first key; None if its kind is not known, RefusedInput if it holds something else."""
    kinds: dict[str, type[Message]] = {"phase": progress.Snapshot, "slowest": Slowest, "bye": Bye, "notice": StopNotice}
    key = next((key for key in kinds if key in message), None)
    return None if key is None else checked(message[key] if key == "notice" else message, kinds[key])


class Link:
    """A connection, and the state of the other end.

    Args:
      rank: of the other end.
    """

    def __init__(self, rank: int, connection: Connection):
        self.rank, self.connection = rank, connection
        self.heard_s = time.monotonic() + FIRST_BEAT_S
        self.excused = False
        """The other end said goodbye or announced its failure: its silence is no loss."""
        self._sending = threading.Lock()
        connection.socket.setblocking(False)

    def send_now(self, **message: Any) -> None:
        """Sends a message if that does not block."""
        # Two threads send, and lines are numbered.
        with self._sending:
            try:
                self.connection.socket.send(self.connection.channel.line(json.dumps(message)))
            except OSError:
                # Closed, or so full that the other end has not read for minutes: the receiving side detects both.
                self.connection.channel.withdraw()


def listed(words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:MOST_NAMED]) + (f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else "")


BEAT_S = 1.0
TOGETHER_S = 0.2
"""A failing host takes several processes with it: those lost within this time are named in one sentence."""
LEAVE_S = 5.0
"""Time that process 0 waits for the others to exit first: it runs JAX's coordinator, without which JAX aborts the remaining
processes."""

CLOSED, SILENT = "its connection closed", "nothing heard for {:.0f} s"
CAUSES = {CLOSED: "it was killed or crashed", SILENT: "it is frozen, or its host or network failed"}


class PeerMonitor:
    """Heartbeat connections of one process. A thread of its own serves them from construction until `close` or the end of the
    process.

    Args:
      rank: of this process.
      hosts: of all processes, by rank.
      connections: of the rendezvous, by the rank of the other end, which the monitor then owns: on process 0 to all others, on
        these to process 0.
      silence_s: silence in seconds after which a peer counts as lost.
      end, printer: for tests. They end this process with a code, and print a sentence.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        connections: Mapping[int, Connection],
        silence_s: float,
        *,
        end: Callable[[int], Any] = os._exit,
        printer: Callable[[str], None] | None = None,
    ):
        self.rank, self._hosts, self._silence_s = rank, hosts, silence_s
        self._end, self._print = end, printer or print_sentence
        self._beat_s = min(BEAT_S, silence_s / 4)
        self._links = [Link(other, connection) for other, connection in connections.items()]
        self._seen: dict[int, progress.Snapshot] = {}
        """On process 0, the last status of each peer, lost ones included; on others, the last status that this process sent."""
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._notice: StopNotice | None = None
        self._has_notice = threading.Event()
        self._all_left = threading.Event()
        """Set on process 0 when the last peer has closed its connection."""
        self._failing = self._closed_by_us = False
        self.slowest: PeerStatus | None = None
        """The process that has been in a phase other than "step" for longest, as process 0 knew a second or two ago."""
        self.idle_s: float | None = None
        """Seconds for which no process has begun a step or another phase, as process 0 knew a second or two ago."""
        self._lost: dict[int, tuple[str, float]] = {}
        """Losses not reported yet: how each was detected, and the seconds of silence."""
        self._report_at_s = 0.0
        for link in self._links:
            self._selector.register(link.connection.socket, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._run, name="peer-monitor", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for the main thread

    def announce_failure(self, sentence: str, code: int, *, perhaps_a_peer: bool = False) -> None:
        """Call it with the error that is about to end this process with `code`, before the error is printed. If the error may
        come from a peer's loss, it waits for the notice of that loss; if the notice comes, this call does not return: the
        monitor's thread prints it and ends the process. The others exit with exit_codes.BAD_INPUT if `code` is that, otherwise
        with exit_codes.LOST."""
        if perhaps_a_peer and self._has_notice.wait(GRACE_S):
            self._thread.join()
        with self._lock:
            if self._failing:
                return
            for_others = code if code == exit_codes.BAD_INPUT else exit_codes.LOST
            self._send_notice(StopNotice(f"{self.name()} failed: {sentence}", for_others, own_error=True))

    def announce_stop(self, sentence: str, code: int) -> None:
        """Call it from a process that is about to exit at once with `code` though nothing is wrong; the others do the same."""
        self._send_notice(StopNotice(f"{self.name()} was {sentence}", code, own_error=True))

    def announce_stuck(self, sentence: str) -> None:
        """Call it from a watchdog that is about to end this process; the others print their stacks too, and exit."""
        self._send_notice(StopNotice(sentence, exit_codes.LOST, stuck=True))

    def close_gracefully(self) -> None:
        """Tells the others that this process is done, so that its closed connection does not count as a loss."""
        with self._lock:
            self._send_all(bye=True)

    def name(self, rank: int | None = None) -> str:
        """Name such as "process 3 on h3"; of this process by default."""
        rank = self.rank if rank is None else rank
        return f"process {rank} on {self._hosts[rank]}"

    def status_by_process(self) -> str:
        """On process 0, all statuses: "step 12: processes 0, 1, 2; data after step 11: process 3 on h3". Empty elsewhere."""
        if self.rank > 0:
            return ""
        ranks_at: dict[str, list[int]] = {}
        for one in self._statuses():
            ranks_at.setdefault(str(one.seen), []).append(one.rank)
        return "; ".join(f"{status}: {self._names(ranks)}" for status, ranks in ranks_at.items())

    def leave(self, code: int) -> None:
        """Ends this process; process 0 exits last, so that JAX does not abort the others while they print."""
        if self.rank == 0:
            self._all_left.wait(LEAVE_S)
        flush()
        self._end(code)

    def close(self) -> None:
        """Closes the connections without a goodbye, for tests."""
        self._closed_by_us = True
        self._thread.join()
        for link in list(self._links):
            self._drop(link)
        self._selector.close()

    # --------------------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        next_beat_s = last_s = time.monotonic()
        while not self._closed_by_us:
            now = time.monotonic()
            if now >= next_beat_s:
                self._beat()
                next_beat_s = now + self._beat_s
            due_s = min(next_beat_s, self._report_at_s) if self._lost else next_beat_s
            ready = self._selector.select(max(due_s - now, 0.01))
            # A process that was stopped and resumes has its peers' messages in the buffers, and perhaps their ends behind
            # these: it reads everything before it judges. The first select after a stop returns nothing. The peers have judged
            # its own absence by now.
            stopped = time.monotonic() - last_s > 1.5 * self._beat_s
            if stopped and not ready:
                ready = self._selector.select(0)
            until_s = time.monotonic() + self._beat_s
            while ready:
                for key, _ in ready:
                    self._read(key.data)
                ready = self._selector.select(0) if stopped and time.monotonic() < until_s else []
            now = time.monotonic()
            # The peers count from its last heartbeat, a little before it stopped: if a peer is gone, that little does not
            # matter.
            if (still_s := now - last_s) > self._silence_s - (2 * self._beat_s if self._lost else 0):
                sentence = f"{self.name()} stood still for {still_s:.0f} s (stopped, or frozen): the others count it as lost"
                self._receive_notice(StopNotice(sentence, exit_codes.LOST))
            last_s = now
            self._check_timeouts(now)
            if self._notice is not None:
                return self._stop(self._notice)

    def _stop(self, notice: StopNotice) -> None:
        """Prints the notice and ends the process, unless the process fails by itself. Nothing is left to watch afterwards (if
        `end` returns)."""
        until_s = time.monotonic() + (GRACE_S if notice.own_error else 0.0)
        while not self._failing and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))
        if self._failing:
            # The main thread or the watchdog prints its own message and exits; here only the others' exits are watched.
            return self._wait_for_disconnects()
        self._print(notice.sentence)
        if notice.stuck:
            if where := self.status_by_process():
                self._print(where)
            progress.show_stacks()
        if self.rank == 0:
            self._wait_for_disconnects()
        flush()
        self._end(notice.code)

    def _wait_for_disconnects(self) -> None:
        until_s = time.monotonic() + LEAVE_S
        while self._links and not self._closed_by_us and time.monotonic() < until_s:
            for key, _ in self._selector.select(0.1):
                if key.data.connection.receive() is None:
                    self._drop(key.data)

    def _beat(self) -> None:
        if self.rank > 0:
            # Kept: when an error came from process 0's loss, this process has left its step by the time the loss is detected.
            self._seen[0] = seen = progress.now()
            return self._send_all(phase=seen.phase, step=seen.step, seconds=round(seen.seconds, 1))
        statuses = self._statuses()
        self.idle_s = round(min(one.seen.seconds for one in statuses), 1)
        others = [one for one in statuses if one.seen.phase != "step"]
        self.slowest = slowest = max(others, key=lambda one: one.seen.seconds, default=None)
        status = None if slowest is None else [slowest.rank, slowest.host, asdict(slowest.seen)]
        self._send_all(slowest=status, idle_s=self.idle_s)

    def _statuses(self) -> list[PeerStatus]:
        with self._lock:
            seen = self._seen | {self.rank: progress.now()}
        return [PeerStatus(rank, self._hosts[rank], seen[rank]) for rank in sorted(seen)]

    def _read(self, link: Link) -> None:
        messages = link.connection.receive()
        if messages is None:
            return self._closed(link)
        link.heard_s = time.monotonic()
        try:
            for message in messages:
                self._handle(link, parse(message))
        except ValueError:
            self._closed(link)

    def _handle(self, link: Link, message: Message | None) -> None:
        if isinstance(message, progress.Snapshot):
            with self._lock:
                self._seen[link.rank] = message
        elif isinstance(message, Slowest):
            self.slowest, self.idle_s = message.slowest, message.idle_s
        elif isinstance(message, Bye):
            link.excused = True
            self._seen.pop(link.rank, None)
        elif isinstance(message, StopNotice):
            link.excused = link.excused or message.own_error or message.stuck or link.rank == 0
            self._receive_notice(message, but=link)

    def _closed(self, link: Link) -> None:
        if not link.excused:
            self._mark_lost(link.rank, CLOSED)
        self._drop(link)

    def _check_timeouts(self, now: float) -> None:
        for link in list(self._links):
            silent_s = now - link.heard_s
            if silent_s > self._silence_s and not link.excused:
                self._mark_lost(link.rank, SILENT, silent_s)
                self._drop(link)
        if self._lost and now >= self._report_at_s:
            self._receive_notice(StopNotice(self._loss_sentence(), exit_codes.LOST))
            self._lost = {}

    def _mark_lost(self, rank: int, how: str, silent_s: float = 0.0) -> None:
        if not self._lost:
            # Each process reports process 0's loss itself, and JAX aborts 0.1 s after it.
            self._report_at_s = time.monotonic() + (TOGETHER_S if self.rank == 0 else 0.0)
        self._lost.setdefault(rank, (how, silent_s))

    def _loss_sentence(self) -> str:
        first, (how, silent_s) = next(iter(self._lost.items()))
        during = f" during {self._seen[first]}" if first in self._seen else ""
        verb = "is" if len(self._lost) == 1 else "are"
        return (
            f"{self._names(sorted(self._lost))} {verb} lost ({how.format(silent_s)}){during}: {CAUSES[how]}; "
            f"start again from the last checkpoint"
        )

    def _names(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return self.name(ranks[0])
        hosts = dict.fromkeys(self._hosts[rank] for rank in ranks)
        return f"processes {listed(map(str, ranks))} on {listed(hosts)}"

    def _receive_notice(self, notice: StopNotice, but: Link | None = None) -> None:
        """Keeps the first notice; process 0 forwards it."""
        with self._lock:
            if self._notice is not None:
                return
            self._notice = notice
            if self.rank == 0:
                self._send_all(but, notice=asdict(notice))
        self._has_notice.set()

    def _send_notice(self, notice: StopNotice) -> None:
        """Tells the others why this process is about to exit."""
        with self._lock:
            self._failing = True
            if self.rank == 0 and self._notice is None:
                self._notice = notice
                self._has_notice.set()
            self._send_all(notice=asdict(notice))

    def _send_all(self, but: Link | None = None, **message: Any) -> None:
        for link in list(self._links):
            if link is not but:
                link.send_now(**message)

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._links.remove(link)
        self._selector.unregister(link.connection.socket)
        link.connection.socket.close()
        if not self._links:
            self._all_left.set()
