"""The peer monitor: which peer is lost, how it was detected, and what the others print and exit with."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from jaxllm.config import ConfigError
from jaxllm.runtime import exit_codes, peer_link, peer_monitor, progress
from jaxllm.runtime.peer_monitor import PeerMonitor
from jaxllm.runtime.socket_messages import STRANGERS
from jaxllm.stderr import flush, print_sentence

LIMIT_S = 20


def until(condition, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.01)


class End:
    """One process's monitor inside this process: the sentences it printed, and the codes it would have exited with."""

    def __init__(self, rank, members, to, silence_s):
        self.said, self.codes = [], []
        self.monitor = PeerMonitor(rank, members, to, silence_s, end=self.codes.append, printer=self.said.append)

    def ended(self) -> tuple[str, int]:
        until(lambda: self.codes, f"process {self.monitor.rank} ends")
        (sentence,), (code,) = self.said, self.codes
        return sentence, code


@pytest.fixture
def run(monkeypatch):
    """run(count, missing=()) -> the ends by rank, on hosts h0, h1 ...; the test itself plays the missing ones."""
    monkeypatch.setattr(peer_monitor, "LEAVE_S", 0.3)
    monkeypatch.setattr(peer_link, "GRACE_S", 0.5)
    monkeypatch.setattr(peer_monitor, "BEAT_S", 0.1)
    made, spare = [], []

    def make(count: int, missing: tuple[int, ...] = (), silence_s: float = 30) -> dict[int, End]:
        members = [SimpleNamespace(rank=rank, host=f"h{rank}", pid=100 + rank) for rank in range(count)]
        listener = socket.create_server(("127.0.0.1", 0))
        make.address = listener.getsockname()
        ends = {}
        for rank in range(count):
            if rank not in missing:
                ends[rank] = End(rank, members, listener if rank == 0 else make.address, silence_s)
        made.extend(ends.values())
        hub = ends[0].monitor
        until(lambda: hub._connected == set(range(1, count)) - set(missing), "all call")
        return ends

    def play(rank: int, **message) -> socket.socket:
        """A process whose messages the test sends."""
        connection = socket.create_connection(make.address)
        spare.append(connection)
        say(connection, hello=rank, host=f"h{rank}", pid=100 + rank)
        if message:
            say(connection, **message)
        return connection

    make.play = play
    yield make
    for end in made:
        end.monitor.close()
    for connection in spare:
        connection.close()


def say(connection: socket.socket, **message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


@pytest.fixture
def at_step_12():
    with progress.phase("step"):
        progress.at_step(12)
        yield


# ----------------------------------------------------------------------------------------------------------------- loss


def test_a_lost_process_is_named_by_all_others(run):
    ends = run(3, missing=(2,))
    lost = run.play(2, phase="step", step=12, seconds=0.1)
    until(lambda: 2 in ends[0].monitor._seen, "process 2 says where it is")
    lost.close()
    sentence = (
        "process 2 on h2 is lost (its connection closed) during step 12: it was killed or crashed; "
        "start again from the last checkpoint"
    )
    assert ends[1].ended() == ends[0].ended() == (sentence, exit_codes.LOST)


def test_several_losses_of_one_host_are_one_sentence(run, monkeypatch):
    # The second connection may close a moment later on a busy machine.
    monkeypatch.setattr(peer_monitor, "TOGETHER_S", 1.0)
    ends = run(4, missing=(1, 2))
    pair = [run.play(rank) for rank in (1, 2)]
    until(lambda: ends[0].monitor._connected == {1, 2, 3}, "both call")
    for connection in pair:
        connection.close()
    sentence, code = ends[3].ended()
    assert sentence.startswith("processes 1, 2 on h1, h2 are lost (its connection closed): it was killed or crashed;")
    assert code == exit_codes.LOST


def test_each_detects_the_loss_of_process_0_itself(run, at_step_12):
    ends = run(3)
    ends[0].monitor.close()
    for rank in (1, 2):
        sentence, code = ends[rank].ended()
        assert sentence.startswith("process 0 on h0 is lost (its connection closed) during step 12: it was killed or crashed")
        assert code == exit_codes.LOST
    assert not ends[0].codes


def test_silence_is_a_loss_and_status_from_process_0_is_not_silence(run):
    ends = run(3, missing=(2,), silence_s=3)
    run.play(2)
    sentence, code = ends[1].ended()
    assert re.match(
        r"process 2 on h2 is lost \(nothing heard for \d s\): it is frozen, or its host or network failed;", sentence
    )
    assert (code, ends[0].ended()[0]) == (exit_codes.LOST, sentence)


def test_a_process_that_never_connects_is_named(run, monkeypatch):
    monkeypatch.setattr(peer_monitor, "CONNECT_S", 0.1)
    ends = run(3, missing=(1,), silence_s=3)
    sentence, code = ends[2].ended()
    assert sentence.startswith("process 1 on h1 is lost (it never connected): it ended at once, or its host or network failed;")
    assert code == exit_codes.LOST


def test_a_graceful_close_is_not_a_loss(run):
    ends = run(3)
    ends[1].monitor.close_gracefully()
    until(lambda: any(link.excused for link in ends[0].monitor._links), "process 0 hears it")
    ends[1].monitor.close()
    until(lambda: len(ends[0].monitor._links) == 1, "the connection closes")
    ends[0].monitor.close_gracefully()
    until(lambda: ends[2].monitor._links[0].excused, "process 2 hears it")
    ends[0].monitor.close()
    until(lambda: not ends[2].monitor._links, "the last connection closes")
    time.sleep(2 * peer_monitor.TOGETHER_S)
    assert not any(end.said or end.codes for end in ends.values())


def test_other_programs_are_ignored(run):
    ends = run(3, missing=(2,))
    hello = b'{"hello": 1, "host": "h1", "pid": 7}\n'
    own = b'{"hello": 0, "host": "h0", "pid": 100}\n'
    negative = b'{"hello": -1, "host": "h2", "pid": 102}\n'
    deep = (b"[" * 60_000 + b"\n", b'{"a":' * 10_000 + b"\n")
    words = (b"GET / HTTP/1.1\r\n\r\n", b"7\n", hello, b'{"hello": 9}\n', b"x" * 70_000, own, negative, *deep)
    for word in words:
        with socket.create_connection(run.address) as stranger:
            # The monitor closes the connection; otherwise this runs into the time limit.
            stranger.settimeout(LIMIT_S)
            with suppress(ConnectionError):
                stranger.sendall(word)
                while stranger.recv(4096):
                    pass
    until(lambda: len(ends[0].monitor._links) == 1, "all strangers are gone")
    assert not any(end.said or end.codes for end in ends.values())


@pytest.mark.parametrize(
    "message",
    [
        {"hello": "1", "host": "h1", "pid": 101},
        {"hello": 1, "host": "h1"},
        {"phase": "step", "step": "12", "seconds": 0.1},
        {"phase": "step", "step": 12, "seconds": None},
        {"phase": "step", "step": 12, "seconds": 1e300},
        {"phase": "asleep", "step": 12, "seconds": 0.1},
        {"phase": ["step"], "step": 12, "seconds": 0.1},
        {"phase": "step", "step": 10**30, "seconds": 0.1},
        {"slowest": [1, "h1"]},
        {"slowest": ["1", "h1", {"phase": "save", "step": 11, "seconds": 4.0}]},
        {"slowest": 5},
        {"slowest": None, "idle_s": -1.0},
        {"notice": "end"},
        {"notice": {"sentence": "the end", "code": 0}},
        {"notice": {"sentence": "the end", "code": 10**6}},
        {"notice": {"sentence": ["the end"], "code": 2}},
    ],
    ids=str,
)
def test_a_message_of_other_types_is_none(message):
    with pytest.raises(ValueError, match=r" should be | should match | has no "):
        peer_link.parse(message)


def test_garbage_of_a_process_is_its_loss(run):
    ends = run(3, missing=(2,))
    run.play(2, phase="step", step=[12], seconds="long")
    assert ends[1].ended()[0].startswith("process 2 on h2 is lost (its connection closed): it was killed or crashed")


def test_a_notice_is_one_printable_line(run):
    ends = run(2, missing=(1,))
    run.play(1, notice={"sentence": "no\x1b[2J\n" + "x" * 60_000, "code": 2, "own_error": False, "stuck": False})
    sentence, code = ends[0].ended()
    assert sentence.startswith(r"no\x1b[2J\nxxx")
    assert len(sentence) < 5000
    assert code == 2


def test_a_message_of_an_unknown_kind_is_ignored():
    assert peer_link.parse({"news": 1}) is None


def test_strangers_do_not_use_up_descriptors(run):
    """The oldest make room; a late process is heard all the same. When all are there, the port is closed."""
    ends = run(3, missing=(2,))
    strangers = [socket.create_connection(run.address) for _ in range(STRANGERS + 20)]
    for stranger in strangers[:15]:
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b""
    assert len(ends[0].monitor._links) <= STRANGERS + 3
    run.play(2, phase="step", step=12, seconds=0.1)
    until(lambda: len(ends[0].monitor._links) == 2, "all strangers are gone")
    for stranger in strangers:
        stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(run.address)
    assert not any(end.said or end.codes for end in ends.values())


def test_process_0_out_of_reach_is_refused(monkeypatch):
    monkeypatch.setattr(peer_monitor, "CONNECT_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(
        ConfigError, match=rf"^Process 1 cannot reach process 0 at 127.0.0.1:{address[1]} \(Connection refused\): look at its"
    ) as error:
        PeerMonitor(1, [peer_link.Member(rank, f"h{rank}", 7) for rank in range(2)], address, 30)
    # Process 0 listened when they met.
    assert error.value.exit_code == exit_codes.LOST


def test_a_last_message_without_a_reader_does_not_keep_a_process(monkeypatch):
    tried = []

    def refuse(_, words):
        tried.append(words)
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", refuse)
    print_sentence("told to nobody")
    assert tried == [b"jaxllm: told to nobody\n"]


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("code", "others"), [(exit_codes.BAD_INPUT, exit_codes.BAD_INPUT), (1, exit_codes.LOST)])
@pytest.mark.parametrize("who", [0, 1])
def test_an_error_of_one_is_printed_by_the_others(run, who, code, others):
    ends = run(3)
    ends[who].monitor.announce_failure("ValueError: no", code)
    for rank in {0, 1, 2} - {who}:
        assert ends[rank].ended() == (f"process {who} on h{who} failed: ValueError: no", others)
    assert not ends[who].said + ends[who].codes


def test_a_process_with_the_same_error_prints_only_its_own(run):
    ends = run(3)
    for rank in (1, 2, 0):
        ends[rank].monitor.announce_failure("The config is wrong.", exit_codes.BAD_INPUT)
    time.sleep(2 * peer_monitor.GRACE_S)
    assert not any(end.said or end.codes for end in ends.values())


def test_a_loss_is_reported_rather_than_the_error_that_it_caused(run, monkeypatch):
    monkeypatch.setattr(peer_monitor, "GRACE_S", LIMIT_S)
    ends = run(3, missing=(2,))
    run.play(2).close()
    ends[1].monitor.announce_failure("JaxRuntimeError: Connection closed by peer", 1, perhaps_a_peer=True)
    for rank in (0, 1):
        assert ends[rank].ended()[0].startswith("process 2 on h2 is lost (its connection closed)")


def test_an_error_that_no_loss_explains_is_the_process_s_own(run):
    ends = run(2)
    ends[1].monitor.announce_failure("JaxRuntimeError: INTERNAL", 1, perhaps_a_peer=True)
    assert ends[0].ended() == ("process 1 on h1 failed: JaxRuntimeError: INTERNAL", exit_codes.LOST)
    assert not ends[1].said


def test_process_0_leaves_last(run, monkeypatch):
    monkeypatch.setattr(peer_monitor, "LEAVE_S", LIMIT_S)
    ends = run(2, missing=(1,))
    other = run.play(1)
    until(lambda: ends[0].monitor._connected == {1}, "process 1 calls")
    say(other, notice={"sentence": "process 1 on h1 failed: x", "code": exit_codes.LOST, "own_error": True, "stuck": False})
    until(lambda: ends[0].said, "process 0 says it")
    time.sleep(0.3)
    assert not ends[0].codes
    other.close()
    assert ends[0].ended() == ("process 1 on h1 failed: x", exit_codes.LOST)


# --------------------------------------------------------------------------------------------------------------- progress


def test_all_know_the_slowest_process_and_process_0_the_status_of_all(run, at_step_12):
    ends = run(4, missing=(2, 3))
    for rank, seconds in ((2, 5.0), (3, 40.0)):
        run.play(rank, phase="save", step=11, seconds=seconds)
    for rank in (0, 1):
        until(lambda monitor=ends[rank].monitor: (slowest := monitor.slowest()) and slowest.rank == 3, "the word goes round")
        assert ends[rank].monitor.slowest() == (3, "h3", progress.Snapshot("save", 11, 40.0))
    assert (
        ends[0].monitor.status_by_process() == "step 12: processes 0, 1 on h0, h1; save after step 11: processes 2, 3 on h2, h3"
    )
    assert ends[1].monitor.status_by_process() == ""


def test_all_know_for_how_long_no_process_has_begun_anything(run, at_step_12, monkeypatch):
    began_s = progress._since_s
    monkeypatch.setattr(progress, "_since_s", began_s - 90)
    ends = run(4, missing=(2, 3))
    slow, _ = (run.play(rank, phase="step", step=4, seconds=seconds) for rank, seconds in ((2, 40.0), (3, 70.0)))
    for idle_s in (40.0, 2.5):
        say(slow, phase="step", step=5, seconds=idle_s)
        for rank in (0, 1):
            until(lambda monitor=ends[rank].monitor, idle_s=idle_s: monitor.idle_s == idle_s, "the word goes round")
    say(slow, phase="step", step=5, seconds=1000.0)
    until(lambda: ends[1].monitor.idle_s == 70.0, "all wait")
    say(slow, phase="step", step=6, seconds=0.5)
    until(lambda: ends[1].monitor.idle_s == 0.5, "one begins a step")
    say(slow, bye=True)
    until(lambda: ends[1].monitor.idle_s == 70.0, "one that leaves begins nothing more")


def test_a_stuck_process_makes_the_others_show_their_stacks(run, at_step_12, capfd):
    ends = run(3)
    until(lambda: set(ends[0].monitor._seen) == {1, 2}, "both say where they are")
    ends[1].monitor.announce_stuck("process 1 on h1 is stuck: step 12 has taken 300 s")
    for rank in (0, 2):
        until(lambda end=ends[rank]: end.codes, "it ends")
        assert (ends[rank].said[0], ends[rank].codes) == (
            "process 1 on h1 is stuck: step 12 has taken 300 s",
            [exit_codes.LOST],
        )
    assert ends[0].said[1] == "step 12: processes 0, 1, 2 on h0, h1, h2"
    assert capfd.readouterr().err.count("in test_a_stuck_process_makes_the_others_show_their_stacks") == 2


# -------------------------------------------------------------------------------------------------------------- processes

PROGRAM = """
import os, socket, sys, time
from types import SimpleNamespace
from jaxllm.runtime.peer_monitor import PeerMonitor
rank, count, *rest = map(int, sys.argv[1:])
members = [SimpleNamespace(rank=r, host=f"h{r}", pid=0) for r in range(count)]
if rank == 0:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
monitor = PeerMonitor(rank, members, listener if rank == 0 else ("127.0.0.1", rest[0]), 4)
while len(monitor._seen) < (1 if rank else count - 1):
    time.sleep(0.1)
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.launcher
def test_a_stopped_process_counts_as_lost_and_exits_when_it_resumes():
    started = []

    def start(*arguments) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, start_new_session=True, **pipes))
        return started[-1]

    try:
        hub = start(0, 3)
        port = int(hub.stdout.readline())
        stopped, other = start(1, 3, port), start(2, 3, port)
        for process in started:
            assert process.stdout.readline() == "here\n"
        os.kill(stopped.pid, signal.SIGSTOP)
        for process in (hub, other):
            _, error = process.communicate(timeout=LIMIT_S)
            assert re.search(r"jaxllm: process 1 on h1 is lost \(nothing heard for \d s\) during start: it is frozen", error)
            assert process.returncode == exit_codes.LOST
        os.kill(stopped.pid, signal.SIGCONT)
        _, error = stopped.communicate(timeout=LIMIT_S)
        assert "jaxllm: process 1 on h1 stood still for" in error
        assert stopped.returncode == exit_codes.LOST
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_flushing_fails_of_nothing(monkeypatch):
    closed, told = io.StringIO(), []
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: told.append("stderr")))
    flush()
    assert told == ["stderr"]


def test_flushing_at_the_interpreters_end():
    """At this point Python 3.12 starts no threads any more."""
    code = "import atexit; from jaxllm.stderr import flush; atexit.register(flush); print('said')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("said\n", "")
