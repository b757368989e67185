"""What counts as stuck, what a stuck process prints, and the phases that the watchdog reads."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest

from jaxllm.cluster import exit_codes, progress, watchdog
from jaxllm.cluster.peer_monitor import PeerStatus
from jaxllm.cluster.watchdog import Watchdog
from jaxllm.config import ConfigError, RunConfig


class Clock:
    """A clock that the test advances."""

    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        for module in (progress, watchdog):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=time.sleep))

    def __call__(self, seconds: float, dog: Watchdog | None = None) -> None:
        """Advances the clock in checks of a second."""
        for _ in range(int(seconds) if dog else 0):
            self.now_s += 1
            assert dog.verdict() is None
        self.now_s += seconds % 1 if dog else seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress, "_steps", deque(maxlen=progress.KEPT_STEPS))
    monkeypatch.setattr(progress, "_spent_s", {"step": 0.0, "data": 0.0, "wait": 0.0})
    for name in ("_phase", "_step", "_since_s", "_data_s", "_in_a_row"):
        monkeypatch.setattr(progress, name, getattr(progress, name))
    clock = Clock(monkeypatch)
    with progress.phase("step"):
        yield clock


# --------------------------------------------------------------------------------------------------------------- progress


def test_phases_nest_and_restart_their_clock(clock):
    progress.at_step(7)
    clock(2)
    assert progress.now() == progress.Snapshot("step", 7, 2)
    with progress.phase("save"):
        clock(3)
        assert progress.now() == progress.Snapshot("save", 7, 3)
    assert progress.now() == progress.Snapshot("step", 7, 0)
    with pytest.raises(RuntimeError), progress.phase("data"):
        raise RuntimeError
    assert progress.now().phase == "step"
    with (
        pytest.raises(ValueError, match="'lunch' is not one of the phases start, meet, devices, dataset"),
        progress.phase("lunch"),
    ):
        pass


def test_phases_of_another_thread_do_not_count_and_leave_none_behind(clock):
    """Hosts in threads restore at once: the last to leave would set the phase that the one before it had entered."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with progress.phase("restore"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with progress.phase("save"):
        thread.start()
        inside.wait()
        assert progress.now().phase == "save"
    assert progress.now().phase == "step"
    leave.set()
    thread.join()
    assert progress.now().phase == "step"


def test_a_step_s_time_is_its_own(clock):
    """It does not include the wait for its batch, nor a save, and the first step after a start does not count."""
    took = iter([(9, 99), (4, 5), (1, 2), (7, 8)])
    for step in (11, 12, 13, 20):
        data_s, step_s = next(took)
        with progress.phase("data"):
            clock(data_s)
        progress.at_step(step)
        clock(step_s - 1)
        with progress.phase("save"):
            clock(50)
        with progress.waiting():
            clock(1)
        if step == 13:
            assert progress.last_steps() == [(5, 4, 1)]
    assert progress.last_steps() == []


@pytest.mark.parametrize(
    ("phase", "step", "words"),
    [("step", 12, "step 12"), ("step", 0, "start"), ("data", 11, "data after step 11"), ("compile", 0, "compile")],
)
def test_where_it_is_in_words(phase, step, words):
    assert str(progress.Snapshot(phase, step, 1)) == words


# ---------------------------------------------------------------------------------------------------------------- limits

RUN = RunConfig(stuck_factor=20, stuck_min_s=30, phase_timeout_s=100)


def test_a_step_may_take_a_multiple_of_the_usual_and_never_less_than_the_minimum(clock):
    dog = Watchdog(RUN)
    progress.at_step(1)
    clock(30, dog)
    clock(0.5)
    assert dog.verdict() == (
        "this process is stuck: step 1 has taken 30 s (run.stuck_factor=20, run.stuck_min_s=30); "
        "start again from the last checkpoint"
    )
    for step in range(2, 53):
        progress.at_step(step)
        # One slow step does not change the median.
        clock(2 if step != 20 else 29, dog)
    progress.at_step(53)
    clock(40, dog)
    clock(1)
    assert "step 53 has taken 41 s (usual are 2 s; run.stuck_factor=20, run.stuck_min_s=30)" in dog.verdict()


@pytest.mark.parametrize("phase", [phase for phase in progress.PHASES if phase not in ("meet", "step")])
def test_all_else_has_a_limit_of_its_own(clock, phase):
    dog = Watchdog(RUN)
    progress.at_step(3)
    with progress.phase(phase):
        clock(100, dog)
        clock(1)
        assert f"{phase} after step 3 has taken 101 s (run.phase_timeout_s=100)" in dog.verdict()
    assert dog.verdict() is None


def test_waiting_for_the_others_to_start_has_no_limit_here(clock):
    with progress.phase("meet"):
        clock(10_000, Watchdog(RUN))


def monitor(slowest: PeerStatus | None, idle_s: float | None = None):
    told = []
    return SimpleNamespace(
        rank=1,
        name=lambda: "process 1 on h1",
        slowest=slowest,
        idle_s=idle_s,
        announce_stuck=told.append,
        told=told,
        status_by_process=lambda: "",
    )


def test_a_step_that_waits_for_a_peer_may_take_as_long_as_its_phase(clock):
    saves = monitor(PeerStatus(2, "h2", progress.Snapshot("save", 4, 90)))
    dog = Watchdog(RUN, lambda: saves)
    progress.at_step(5)
    clock(100, dog)
    clock(1)
    assert dog.verdict() == (
        "process 1 on h1 is stuck: step 5 has taken 101 s (waiting for process 2 on h2, 90 s in save after step 4; "
        "run.phase_timeout_s=100); start again from the last checkpoint"
    )
    # That status is old: all may be in the same step by now.
    dog = Watchdog(RUN, lambda: monitor(PeerStatus(2, "h2", progress.Snapshot("data", 4, 0.5))))
    progress.at_step(5)
    clock(30, dog)
    clock(1)
    assert "process 1 on h1 is stuck: step 5 has taken 31 s (run.stuck" in dog.verdict()


def test_no_step_is_stuck_while_another_process_begins_steps(clock):
    """As a slow replica does, for which the others wait at an outer step. When it waits too, the run is stuck."""
    peers = monitor(None, idle_s=2.0)
    dog = Watchdog(RUN, lambda: peers)
    progress.at_step(5)
    clock(200, dog)
    peers.idle_s = 30.0
    clock(5, dog)
    peers.idle_s = 30.5
    assert dog.verdict().startswith("process 1 on h1 is stuck: step 5 has taken 205 s (")
    # A save or a wait for data has a limit of its own.
    peers.idle_s = 2.0
    with progress.phase("save"):
        clock(100, dog)
        clock(1)
        assert "save after step 5 has taken 101 s" in dog.verdict()


def test_time_in_which_the_process_was_stopped_does_not_count(clock):
    dog = Watchdog(RUN)
    progress.at_step(5)
    clock(20, dog)
    clock(5000)
    # The first check notices that the process resumed.
    clock(31, dog)
    clock(1)
    assert "step 5 has taken 31 s" in dog.verdict()


@pytest.mark.parametrize("key", ["peer_timeout_s", "stuck_min_s", "phase_timeout_s"])
def test_limits_must_be_above_zero(key, tiny_config):
    with pytest.raises(ConfigError, match=rf"run\.{key}=0 is not valid: it should be greater than 0"):
        tiny_config(f"run.{key}=0")


def test_a_usual_step_is_not_stuck(tiny_config):
    with pytest.raises(ConfigError, match=r"run\.stuck_factor=1 is not valid: it should be greater than 1"):
        tiny_config("run.stuck_factor=1")


# ------------------------------------------------------------------------------------------------------------------- end


def test_a_stuck_process_notifies_the_others_prints_its_stacks_and_ends(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "STACKS_S", 0.0)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    codes, peers = deque(), monitor(None)
    run = RunConfig(stuck_min_s=0.05, phase_timeout_s=0.05)
    with Watchdog(run, lambda: peers, end=codes.append), progress.phase("step"):
        progress.at_step(5)
        deadline = time.monotonic() + 20
        while not codes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (sentence,) = peers.told
    assert re.match(r"process 1 on h1 is stuck: step 5 has taken \d s \(", sentence)
    error = capfd.readouterr().err
    assert f"jaxllm: {sentence}\n" in error
    assert "in test_a_stuck_process_notifies_the_others_prints_its_stacks_and_ends" in error
    assert list(codes) == [exit_codes.LOST]


def test_a_process_that_makes_progress_continues(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    codes = []
    with Watchdog(RunConfig(stuck_min_s=0.5, phase_timeout_s=0.5), end=codes.append), progress.phase("step"):
        for step in range(20):
            progress.at_step(step)
            time.sleep(0.05)
    assert codes == []
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


NO_PYTHON = """
import ctypes
import time
from jaxllm.config import RunConfig
from jaxllm.cluster import watchdog
watchdog.LOOK_S = 0.1
with watchdog.Watchdog(RunConfig(stuck_min_s=5, phase_timeout_s=5)):
    time.sleep(0.3)
    {}
"""


def test_a_process_stuck_in_c_ends():
    """With Python's global lock held, and without. Both at the same time, because each takes five seconds."""
    expected = {
        "ctypes.PyDLL(None).sleep(60)": (1, "Timeout (0:00:05)!"),
        "ctypes.CDLL(None).sleep(60)": (exit_codes.LOST, "jaxllm: this process is stuck: start has taken "),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {work: subprocess.Popen([sys.executable, "-c", NO_PYTHON.format(work)], **pipes) for work in expected}
    try:
        ends = {work: process.communicate(timeout=60) for work, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    for work, (code, words) in expected.items():
        out, err = ends[work]
        assert (processes[work].returncode, out) == (code, "")
        assert words in err
        assert 'File "<string>", line 9 in <module>' in err


@pytest.mark.parametrize("what", ["file", "read end", "nothing", "largest"])
def test_a_number_that_is_not_a_supervisor_s_pipe_is_ignored(what, tmp_path):
    """Variables may reach a process that its supervisor's open files do not."""
    ours, theirs = os.pipe()
    path = tmp_path / "tokens"
    with path.open("wb") as file:
        watchdog.beat({"file": file.fileno(), "read end": ours, "nothing": 10**6, "largest": 2**31 - 1}[what])
        assert not any(thread.name == "beat" for thread in threading.enumerate())
    assert path.read_bytes() == b""
    os.close(ours)
    os.close(theirs)


def test_heartbeats_continue_as_long_as_the_process_lives(monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    ours, theirs = os.pipe()
    watchdog.beat(None)
    for _ in range(2):
        watchdog.beat(theirs)
    assert not os.get_inheritable(theirs)
    assert sum(thread.name == "beat" for thread in threading.enumerate()) == 1
    assert b"".join(os.read(ours, 1) for _ in range(5)) == b"....."
    # The loss of the supervisor harms nothing.
    os.close(ours)
    deadline = time.monotonic() + 20
    while any(thread.name == "beat" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.close(theirs)
