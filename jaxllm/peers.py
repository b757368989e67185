"""The line: one TCP connection from each process to process 0, on which all learn at once that one of them is gone.

Every process says each second what it is doing. Process 0 counts another as lost when its connection closes without a farewell
or when it is silent too long, and tells all others; each prints one sentence and leaves with exits.LOST. Process 0 itself is
missed by each of the others. A process that fails with an error says it here first, so that the others can tell a cause from
its consequences: what a collective raises when a peer goes names no peer.

JAX would find out too, by its own heartbeat, but it ends the process from C++ with a page of errors, and some losses only after
a minute or never. Messages are JSON objects, a line each. The thread needs Python's lock: a C call that holds it longer than
the silence allowed looks like a frozen process.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jaxllm import exits, progress
from jaxllm.config import ConfigError
from jaxllm.socket_messages import Reader

BEAT_S = 1.0
MOST_NAMED = 16
LONGEST_BYTES = 2**16
"""Of a message; an error's sentence is the longest."""
TOGETHER_S = 0.2
"""A host that fails takes several processes along: those lost within this time are named in one sentence."""
GRACE_S = 2.0
"""How long a process waits before it speaks: who got an error that a peer's loss may have caused, for word of that loss; who
hears of another's error, for one of its own, since bad input is mostly found by all."""
LEAVE_S = 5.0
"""How long process 0 waits for the others to leave first: with it goes JAX's coordinator, and JAX aborts who is still there."""
CALL_S = 20.0
"""How long a process tries to reach process 0's port, which has been open since before they met."""


CLOSED, SILENT, MISSING = "its connection closed", "nothing heard for {:.0f} s", "it never called"
CAUSES = {
    CLOSED: "it was killed or crashed",
    SILENT: "it is frozen, or its host or network failed",
    MISSING: "it ended at once, or its host or network failed",
}


class Member(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...


class Behind(NamedTuple):
    """A process whose work is not a step: others may wait for it."""

    rank: int
    host: str
    seen: progress.Snapshot


@dataclass
class News:
    """Why all have to leave."""

    sentence: str
    code: int
    own_error: bool = False
    """A process said so of itself: others may be about to find the same."""
    stuck: bool = False
    """Everybody's stacks are of interest."""

    @property
    def wait_s(self) -> float:
        return GRACE_S if self.own_error else 0.0


@dataclass
class _Link:
    """One end of a connection, and what is known of the other."""

    socket: socket.socket
    rank: int | None
    """None until it has said who it is."""
    heard_s: float
    reader: Reader = field(default_factory=lambda: Reader(LONGEST_BYTES))
    excused: bool = False
    """It said farewell, or that it fails: nothing more is expected of it."""

    def send(self, **message: Any) -> None:
        # Closed, or so full that the other has not read for minutes: both are found on the receiving side.
        with suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")


class Line:
    """One process's end of the line. It works from its making on, in a thread of its own, until `close` or the process's end.

    Args:
      rank: of this process.
      members: all processes, by rank.
      to: process 0's address, or on process 0 the listening socket, which is the line's from now on.
      silence_s: after so many seconds without a word another process counts as lost.
      end, say: for tests. How to end this process with a code, and how to print a sentence.

    Raises:
      ConfigError: process 0 cannot be reached there.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        to: tuple[str, int] | socket.socket,
        silence_s: float,
        *,
        end: Callable[[int], Any] = os._exit,
        say: Callable[[str], None] | None = None,
    ):
        self.rank, self._members, self._silence_s = rank, members, silence_s
        self._end, self._say = end, say or print_sentence
        self._beat_s = min(BEAT_S, silence_s / 4)
        self._links: list[_Link] = []
        self._seen: dict[int, progress.Snapshot] = {}
        """On process 0, what each of the others said last, of those that are gone too; elsewhere what this process said."""
        self._called: set[int] = set()
        self._door: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._news: News | None = None
        self._heard = threading.Event()
        self._alone = threading.Event()
        """Set on process 0 when the last of the others has closed its connection."""
        self._failing = self._over = False
        self._behind: Behind | None = None
        self._lost: dict[int, tuple[str, float]] = {}
        """Not told yet: how, and the seconds of its silence."""
        self._tell_at_s = 0.0
        self._all_by_s: float | None = None
        """On process 0, when all must have called."""
        if isinstance(to, socket.socket):
            self._door = to
            self._all_by_s = time.monotonic() + CALL_S + silence_s
            to.setblocking(False)
            self._selector.register(to, selectors.EVENT_READ, None)
        else:
            self._add(_call(rank, to), 0)
            self._links[0].send(hello=rank, host=members[rank].host, pid=members[rank].pid)
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for the main thread

    def failed(self, sentence: str, code: int, *, perhaps_a_peer: bool = False) -> None:
        """To be called with the error that is about to end this process with `code`, before it is printed. Where it may come of
        a peer's loss, word of that is waited for, and if it comes this does not return: the line's thread says it and ends the
        process. The others leave with exits.BAD_INPUT too, or else with exits.LOST.
        """
        if perhaps_a_peer and self._heard.wait(GRACE_S):
            self._thread.join()
        with self._lock:
            if self._failing:
                return
            self._failing = True
            for_others = code if code == exits.BAD_INPUT else exits.LOST
            self._announce(News(f"{self.name()} failed: {sentence}", for_others, own_error=True))

    def told_to_stop(self, sentence: str, code: int) -> None:
        """To be called by a process that is about to leave at once with `code` though nothing is wrong; the others do too."""
        with self._lock:
            self._failing = True
            self._announce(News(f"{self.name()} was {sentence}", code, own_error=True))

    def stuck(self, sentence: str) -> None:
        """To be called by a watchdog that is about to end this process; the others show their stacks too, and leave."""
        with self._lock:
            self._failing = True
            self._announce(News(sentence, exits.LOST, stuck=True))

    def farewell(self) -> None:
        """This process is done: that its connection closes is no loss."""
        with self._lock:
            for link in list(self._links):
                link.send(bye=True)

    def name(self, rank: int | None = None) -> str:
        """Such as "process 3 on h3"; of this process by default."""
        member = self._members[self.rank if rank is None else rank]
        return f"process {member.rank} on {member.host}"

    def standing(self) -> str:
        """On process 0, where all are: "step 12: processes 0, 1, 2; data after step 11: process 3 on h3". Elsewhere empty."""
        if self._door is None:
            return ""
        places: dict[str, list[int]] = {}
        for one in self._everyone():
            places.setdefault(str(one.seen), []).append(one.rank)
        return "; ".join(f"{place}: {self._names(ranks)}" for place, ranks in places.items())

    def leave(self, code: int) -> None:
        """Ends this process; process 0 last, so that JAX does not abort the others in the middle of their words."""
        if self._door is not None:
            self._alone.wait(LEAVE_S)
        flush()
        self._end(code)

    def behind(self) -> Behind | None:
        """The process that has been at something else than a step for longest, as process 0 knew a second or two ago."""
        return self._behind

    def close(self) -> None:
        """Hangs up without a farewell, for tests."""
        self._over = True
        self._thread.join()
        for link in list(self._links):
            self._drop(link)
        if self._door is not None:
            self._door.close()
        self._selector.close()

    # --------------------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        next_beat_s = last_s = time.monotonic()
        while not self._over:
            now = time.monotonic()
            if now >= next_beat_s:
                self._beat()
                next_beat_s = now + self._beat_s
            due_s = min(next_beat_s, self._tell_at_s) if self._lost else next_beat_s
            ready = self._selector.select(max(due_s - now, 0.01))
            # Whoever was stopped and goes on has its peers' words in the buffers, and perhaps their end behind them: all is
            # read before it is judged. The first select after a stop returns with nothing. Its own absence they have judged by
            # now.
            stopped = time.monotonic() - last_s > 1.5 * self._beat_s
            if stopped and not ready:
                ready = self._selector.select(0)
            until_s = time.monotonic() + self._beat_s
            while ready:
                for key, _ in ready:
                    if key.data is None:
                        self._answer()
                    else:
                        self._read(key.data)
                ready = self._selector.select(0) if stopped and time.monotonic() < until_s else []
            now = time.monotonic()
            # They count from its last beat, a little before it stood still: where one is gone, that little is not asked for.
            if (still_s := now - last_s) > self._silence_s - (2 * self._beat_s if self._lost else 0):
                sentence = f"{self.name()} stood still for {still_s:.0f} s (stopped, or frozen): the others have given it up"
                self._learn(News(sentence, exits.LOST))
            last_s = now
            self._judge(now)
            if self._news is not None and self._go(self._news):
                return

    def _go(self, news: News) -> bool:
        """Says it and ends the process, unless that fails by itself. True: nothing is left to watch (where `end` returns)."""
        until_s = time.monotonic() + news.wait_s
        while not self._failing and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))
        if self._failing:
            # The main thread or the watchdog prints its own words and leaves; here only the others' leaving is watched.
            self._see_them_off(LEAVE_S)
            return True
        self._say(news.sentence)
        if news.stuck:
            if where := self.standing():
                self._say(where)
            progress.show_stacks()
        if self._door is not None:
            self._see_them_off(LEAVE_S)
        flush()
        self._end(news.code)
        return True

    def _see_them_off(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while self._links and not self._over and time.monotonic() < until_s:
            for link in [key.data for key, _ in self._selector.select(0.1) if key.data is not None]:
                try:
                    gone = not link.socket.recv(65536)
                except OSError as error:
                    gone = not isinstance(error, BlockingIOError)
                if gone:
                    self._drop(link)
            # Someone who calls now finds nobody; `select` must not return at once for it.
            if self._door is not None and self._door in self._selector.get_map():
                self._selector.unregister(self._door)

    def _beat(self) -> None:
        if self._door is None:
            # Kept: where an error has come of process 0's loss, this process has left its step by the time that it hears of it.
            self._seen[0] = seen = progress.now()
            for link in list(self._links):
                link.send(phase=seen.phase, step=seen.step, seconds=round(seen.seconds, 1))
            return
        others = [one for one in self._everyone() if one.seen.phase != "step"]
        self._behind = slowest = max(others, key=lambda one: one.seen.seconds, default=None)
        told = None
        if slowest is not None:
            seen = slowest.seen
            told = [slowest.rank, slowest.host, seen.phase, seen.step, round(seen.seconds, 1)]
        for link in list(self._links):
            link.send(behind=told)

    def _everyone(self) -> list[Behind]:
        with self._lock:
            seen = dict(self._seen)
        seen[self.rank] = progress.now()
        return [Behind(rank, self._members[rank].host, seen[rank]) for rank in sorted(seen)]

    def _answer(self) -> None:
        assert self._door is not None, "called when somebody is at it"
        try:
            connection, _ = self._door.accept()
        except OSError:
            return
        self._add(connection, None)

    def _read(self, link: _Link) -> None:
        try:
            messages = link.reader.receive(link.socket)
            if messages is None:
                self._closed(link)
                return
            link.heard_s = time.monotonic()
            for message in messages:
                self._take(link, message)
        except (ValueError, LookupError, TypeError, AttributeError):
            # Not one of ours: a port scanner, or another run.
            self._closed(link)

    def _take(self, link: _Link, message: dict[str, Any]) -> None:
        if link.rank is None:
            member = self._members[message["hello"]]
            if (member.host, member.pid) != (message["host"], message["pid"]):
                raise ValueError("another run's")
            link.rank = member.rank
            self._called.add(member.rank)
        elif "phase" in message:
            with self._lock:
                self._seen[link.rank] = progress.Snapshot(message["phase"], message["step"], message["seconds"])
        elif "behind" in message:
            told = message["behind"]
            self._behind = Behind(told[0], told[1], progress.Snapshot(*told[2:])) if told else None
        elif "bye" in message:
            link.excused = True
        elif "news" in message:
            news = News(**message["news"])
            link.excused = link.excused or news.own_error or news.stuck or link.rank == 0
            self._learn(news, but=link)

    def _closed(self, link: _Link) -> None:
        if link.rank is not None and not link.excused:
            self._lose(link.rank, CLOSED)
        self._drop(link)

    def _judge(self, now: float) -> None:
        for link in list(self._links):
            silent_s = now - link.heard_s
            if silent_s > self._silence_s and not link.excused:
                if link.rank is not None:
                    self._lose(link.rank, SILENT, silent_s)
                self._drop(link)
        if self._all_by_s is not None and now > self._all_by_s:
            self._all_by_s = None
            for member in self._members:
                if member.rank not in (self.rank, *self._called):
                    self._lose(member.rank, MISSING)
        if self._lost and now >= self._tell_at_s:
            self._learn(News(self._loss(), exits.LOST))
            self._lost = {}

    def _lose(self, rank: int, how: str, silent_s: float = 0.0) -> None:
        if not self._lost:
            # Process 0's loss is each process's own news, and JAX aborts 0.1 s after it.
            self._tell_at_s = time.monotonic() + (TOGETHER_S if self._door is not None else 0.0)
        self._lost.setdefault(rank, (how, silent_s))

    def _loss(self) -> str:
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
        hosts = dict.fromkeys(self._members[rank].host for rank in ranks)
        return f"processes {_list(map(str, ranks))} on {_list(hosts)}"

    def _learn(self, news: News, but: _Link | None = None) -> None:
        """The first news counts; process 0 tells it on."""
        with self._lock:
            if self._news is not None:
                return
            self._news = news
            if self._door is not None:
                self._tell(news, but)
        self._heard.set()

    def _announce(self, news: News) -> None:
        if self._door is not None and self._news is None:
            self._news = news
            self._heard.set()
        self._tell(news)

    def _tell(self, news: News, but: _Link | None = None) -> None:
        words = {"sentence": news.sentence, "code": news.code, "own_error": news.own_error, "stuck": news.stuck}
        for link in list(self._links):
            if link is not but:
                link.send(news=words)

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(connection, rank, time.monotonic())
        with self._lock:
            self._links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _drop(self, link: _Link) -> None:
        with self._lock:
            self._links.remove(link)
        self._selector.unregister(link.socket)
        link.socket.close()
        if not self._links:
            self._alone.set()


def _call(rank: int, address: tuple[str, int]) -> socket.socket:
    until_s = time.monotonic() + CALL_S
    while True:
        try:
            return socket.create_connection(address, timeout=max(CALL_S, 1))
        except OSError as error:
            if time.monotonic() > until_s:
                # Nobody listens any more where process 0 did when they met: it has ended.
                gone = isinstance(error, ConnectionRefusedError)
                remedy = "open all ports between the hosts, as collectives need them too"
                refused = ConfigError(
                    f"Process {rank} cannot reach process 0 at {address[0]}:{address[1]} ({error.strerror or error}): "
                    f"{'see what it says itself' if gone else remedy}."
                )
                if gone:
                    refused.exit_code = exits.LOST
                raise refused from None
        time.sleep(0.5)


def _list(words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:MOST_NAMED]) + (f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else "")


def print_sentence(sentence: str) -> None:
    """To standard error, as the command line does."""
    # Past sys.stderr, whose lock a stuck main thread may hold. Who reads it may be gone: what follows is mostly the process's
    # end, which must not fail of it.
    with suppress(OSError):
        os.write(2, f"jaxllm: {sentence}\n".encode())


def flush() -> None:
    """What the main thread has printed; given up after a second, as that may be stuck in the middle of printing."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            # Who reads it may be gone, or it was closed.
            with suppress(OSError, ValueError):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on none is started at the end of the interpreter, where the main thread is here.
        flush()
    else:
        thread.join(1)
