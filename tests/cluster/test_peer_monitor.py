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
from types import SimpleNamespace

import pytest
from outside import free_port

from jaxllm.cluster import exit_codes, peer_monitor, progress
from jaxllm.cluster.peer_monitor import PeerMonitor
from jaxllm.cluster.rendezvous_client import MAX_INFO_BYTES
from jaxllm.cluster.socket_messages import Channel, Connection
from jaxllm.terminal import flush, print_sentence

LIMIT_S = 20


def until(condition, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.01)


def connected(client: Channel | None = None, server: Channel | None = None) -> tuple[Connection, Connection]:
    """The two ends of a connection, as the rendezvous leaves them; process 0's is the second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    channels = client or Channel(None, is_server=False), server or Channel(None, is_server=True)
    return tuple(Connection(end, channel, MAX_INFO_BYTES) for end, channel in zip(ends, channels, strict=True))


class End:
    """One process's monitor inside this process: the sentences it printed, and the codes it would have exited with."""

    def __init__(self, rank, hosts, connections, silence_s):
        self.said, self.codes = [], []
        self.monitor = PeerMonitor(rank, hosts, connections, silence_s, end=self.codes.append, printer=self.said.append)

    def ended(self) -> tuple[str, int]:
        until(lambda: self.codes, f"process {self.monitor.rank} ends")
        (sentence,), (code,) = self.said, self.codes
        return sentence, code


@pytest.fixture
def run(monkeypatch):
    """run(count, missing=()) -> the ends by rank, on hosts h0, h1 ...; the test itself plays the missing ones."""
    monkeypatch.setattr(peer_monitor, "LEAVE_S", 0.3)
    monkeypatch.setattr(peer_monitor, "GRACE_S", 0.5)
    monkeypatch.setattr(peer_monitor, "FIRST_BEAT_S", 0.0)
    monkeypatch.setattr(peer_monitor, "BEAT_S", 0.1)
    made, spare = [], []

    def make(count: int, missing: tuple[int, ...] = (), silence_s: float = 30) -> dict[int, End]:
        hosts = [f"h{rank}" for rank in range(count)]
        pairs = {rank: connected() for rank in range(1, count)}
        make.others = {rank: pairs[rank][0].socket for rank in missing}
        spare.extend(make.others.values())
        ends = {0: End(0, hosts, {rank: server for rank, (_, server) in pairs.items()}, silence_s)}
        ends |= {rank: End(rank, hosts, {0: pairs[rank][0]}, silence_s) for rank in pairs if rank not in missing}
        made.extend(ends.values())
        return ends

    def play(rank: int, **message) -> socket.socket:
        """A process whose messages the test sends."""
        if message:
            say(make.others[rank], **message)
        return make.others[rank]

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


def test_a_process_that_says_nothing_from_the_start_is_named(run, monkeypatch):
    """It has more time: JAX starts first."""
    monkeypatch.setattr(peer_monitor, "FIRST_BEAT_S", 1.0)
    began_s = time.monotonic()
    ends = run(3, missing=(1,), silence_s=3)
    sentence, code = ends[2].ended()
    assert sentence.startswith("process 1 on h1 is lost (nothing heard for 3 s): it is frozen, or its host or network failed;")
    assert (code, time.monotonic() - began_s > 4) == (exit_codes.LOST, True)


def test_what_process_0_says_at_once_is_heard(run):
    """It came with the last message of the rendezvous, and process 0 is gone by now."""
    client, server = connected()
    with server.socket:
        say(server.socket, start=True)
        say(server.socket, notice={"sentence": "the end", "code": 2, "own_error": False, "stuck": False})
    client.socket.settimeout(LIMIT_S)
    while len(client.unread) < 2:
        client.read()
    client.unread.pop(0)
    end = End(1, ["h0", "h1"], {0: client}, 30)
    assert end.ended() == ("the end", 2)
    end.monitor.close()


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


@pytest.mark.parametrize(
    "message",
    [
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
        peer_monitor.parse(message)


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
    assert peer_monitor.parse({"news": 1}) is None


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
        until(lambda monitor=ends[rank].monitor: (slowest := monitor.slowest) and slowest.rank == 3, "the word goes round")
        assert ends[rank].monitor.slowest == (3, "h3", progress.Snapshot("save", 11, 40.0))
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
import os, sys, time
from jaxllm.cluster.host_choice import ALL_REQUIRED
from jaxllm.cluster.launchers import Launch
from jaxllm.cluster.peer_monitor import PeerMonitor
from jaxllm.cluster.rendezvous import meet
from jaxllm.cluster.rendezvous_checks import ProcessInfo
rank, count, port = map(int, sys.argv[1:])
own = ProcessInfo(rank, count, f"h{rank}", os.getpid(), {}, f"h{rank}", [], cpu=True)
answer, _ = meet(own, Launch("variables", "127.0.0.1", port, count, rank), ALL_REQUIRED)
monitor = PeerMonitor(rank, [host for host, _ in answer.members], answer.connections, 4)
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
        port = free_port()
        hub, stopped, other = (start(rank, 3, port) for rank in range(3))
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
    code = "import atexit; from jaxllm.terminal import flush; atexit.register(flush); print('said')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("said\n", "")
