"""launch/local_cluster.sh with supervisors (without: test_multiprocess.py), and the rendezvous address of launches."""

import os
import signal
import socket

import pytest
import scripts
from real_launches import LIMIT_S, launch, launched, processes_of_launch, wait_until

from jaxllm.cluster import exit_codes

BEATS = """
beaten="beaten-$JAXLLM_ATTEMPT-$JAXLLM_PROCESS_ID"
(while sleep 0.1; do printf . >&"$JAXLLM_BEAT_FD"; touch "$beaten"; done) 2>/dev/null &
until [[ -e "$beaten" ]]; do sleep 0.05; done
"""


def test_options_need_values(tmp_path):
    code, out, err = launch("local_cluster.sh", "--restarts", cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--restarts needs a value: local_cluster.sh [OPTION...] N COMMAND..." in err
    code, _, err = launch("local_cluster.sh", "--restarts", "few", "1", "true", cwd=tmp_path)
    assert code == exit_codes.BAD_INPUT
    assert "argument --restarts: few is not valid: give a whole number of at least 0" in err


@pytest.mark.launcher
def test_failed_and_frozen_processes_are_started_again(tmp_path):
    """Two processes, each with its own fault; then both resume."""
    words = 'echo "$JAXLLM_ATTEMPT"; ((JAXLLM_ATTEMPT)) && exit 0; ((JAXLLM_PROCESS_ID)) && exit 7; kill -STOP 0'
    options = ("--restarts", "1", "--backoff-s", "0.1", "--silent-after", "2")
    code, out, err = launch("local_cluster.sh", *options, "2", "bash", "-c", BEATS + words, cwd=tmp_path)
    assert (code, sorted(out.splitlines())) == (0, ["[0] 0", "[0] 1", "[1] 0", "[1] 1"])
    assert "[1] jaxllm: exit code 7 (an error); restart 1 of at most 1 in 0.1 s" in err
    assert "[0] jaxllm: exit code 137 (ended by SIGKILL); restart 1 of at most 1 in 0.1 s" in err


@pytest.mark.launcher
def test_a_process_given_up_ends_the_others(tmp_path):
    fails = 'until [[ -e up ]]; do sleep 0.05; done; echo "$JAXLLM_ATTEMPT"; exit 7'
    words = f'if ((JAXLLM_PROCESS_ID)); then {fails}; fi; trap "echo TERM; exit 5" TERM; touch up; sleep 60 & wait'
    options = ("--restarts", "1", "--backoff-s", "0.1")
    code, out, err = launch("local_cluster.sh", *options, "2", "bash", "-c", words, cwd=tmp_path)
    assert (code, sorted(out.splitlines())) == (7, ["[0] TERM", "[1] 0", "[1] 1"])
    assert "jaxllm: process 1 failed with exit code 7; ending the others" in err


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("name", "send"),
    [("SIGTERM", os.kill), ("SIGTERM", os.killpg), ("SIGKILL", os.kill)],
    ids=["SIGTERM", "SIGTERM to its group", "SIGKILL"],
)
def test_supervised_processes_end_with_the_launcher(tmp_path, name, send):
    words = 'trap "echo >saved-$JAXLLM_PROCESS_ID; exit 75" TERM; echo ready; while :; do sleep 0.05; done'
    with launched("local_cluster.sh", "--restarts", "1", "2", "bash", "-c", words, cwd=tmp_path) as process:
        assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
        send(process.pid, signal.Signals[name])
        assert process.wait(LIMIT_S) == (exit_codes.RESTART if name == "SIGTERM" else -signal.SIGKILL)
        wait_until(lambda: not list(processes_of_launch()), "the end of all processes")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.fixture
def meeting_point():
    return scripts.load("launch/meeting_point.py")


@pytest.mark.parametrize(
    ("sizes", "addresses", "host"),
    [
        (("2", "2"), ["10.0.0.1"], "127.0.0.1"),
        (("2", "1"), ["10.0.0.1"], "node-1"),
        (("2", "1"), ["127.0.1.1", "10.0.0.1"], "node-1"),
        (("2", "1"), ["127.0.1.1"], "10.0.0.9"),
        (("2", "1"), ["::1"], "10.0.0.9"),
        (("2", "1"), [], "10.0.0.9"),
    ],
)
def test_the_host_where_others_find_rank_0(meeting_point, monkeypatch, sizes, addresses, host):
    class Probe:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, _):
            pass

        def getsockname(self):
            return ("10.0.0.9", 40000)

    def look_up(name, *_, **__):
        assert name == "node-1"
        if not addresses:
            raise socket.gaierror("unknown")
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", sizes[0])
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", sizes[1])
    monkeypatch.setattr(meeting_point.socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(meeting_point.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(meeting_point.socket, "socket", lambda *_: Probe())
    assert meeting_point.host() == host


def test_the_port_is_free_and_none_of_outgoing_connections(meeting_point, monkeypatch):
    assert meeting_point.free_port() in meeting_point.PORTS
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(meeting_point, "PORTS", [taken.getsockname()[1]] * 100)
        assert meeting_point.free_port() != taken.getsockname()[1]
