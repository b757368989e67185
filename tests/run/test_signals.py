"""Signals in real processes: the run stops between two steps, saves, and resumes as if it had never stopped. It exits with 0,
or with exit_codes.RESTART if a supervisor restarts it.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from outside import free_port, wait_until
from run_files import steps_of
from tiny import TINY

from jaxllm.cluster import distributed, exit_codes
from jaxllm.config.rounds import next_common_step
from jaxllm.run import signals as module
from jaxllm.run.signals import SignalHandler

CHECKOUT = Path(__file__).parents[2]
VARIABLES = ("JAXLLM_COORDINATOR", "JAXLLM_NUM_PROCESSES", "JAXLLM_PROCESS_ID")
LIMIT_S = 120
ENDLESS = 100_000
COMMON = ("optimizer.schedule=constant", "data.held_out_fraction=0.0", "log.every_steps=1")


@pytest.fixture(scope="module")
def recipe(text_file, tmp_path_factory):
    """TINY as a YAML file."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    return path


RESTARTS = {"JAXLLM_RESTARTS": "yes"}

# The command line, with a slow first compilation.
SLOW_COMPILATION = """
import time
from jaxllm.cli import app as cli
from jaxllm.run.trainer import Trainer
compile_step = Trainer.compile_step

def slowly(self, batch):
    print("in the compilation")
    time.sleep(5)
    return compile_step(self, batch)

Trainer.compile_step = slowly
cli.main()
"""


def start(
    recipe, folder, *overrides, rank=None, port=None, steps=ENDLESS, devices=1, variables=(), program=("-m", "jaxllm.cli")
) -> subprocess.Popen:
    place = {} if rank is None else dict(zip(VARIABLES, (f"127.0.0.1:{port}", "2", str(rank)), strict=True))
    place |= dict(variables)
    command = ["train", recipe, f"run.cpu_devices={devices}", f"run.dir={folder}", f"train.steps={steps}", *COMMON, *overrides]
    return subprocess.Popen(
        [sys.executable, *program, *command],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1", **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process, pattern: str) -> str:
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"{pattern} never came: {process.stderr.read()}")


def finish(process) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, error


def losses(folder) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in steps_of(folder)]


def stopped_step(out: str, name: str) -> int:
    (line,) = (line for line in out.splitlines() if line.startswith("stopped at"))
    found = re.fullmatch(rf"stopped at step (\d+) by {name}; saved; rerun the same command to resume", line)
    assert found, line
    return int(found[1])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGUSR1))]
)
def test_a_signal_stops_saved_and_the_run_resumes_alike(number, recipe, tmp_path):
    folder = tmp_path / "run"
    process = start(recipe, folder)
    wait_for(process, r"^step 3/")
    # To the whole process group, as Ctrl-C and schedulers send it.
    os.killpg(process.pid, number)
    code, out, error = finish(process)
    assert (code, error) == (0, "")
    step = stopped_step(out, number.name)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(step)]
    assert [done for done, _ in losses(folder)] == list(range(1, step + 1))
    if number == signal.SIGTERM:
        code, out, error = finish(start(recipe, folder, steps=step + 2))
        assert (code, error) == (0, "")
        assert f"resumed from step {step}" in out
        assert finish(start(recipe, tmp_path / "whole", steps=step + 2))[0] == 0
        assert losses(folder) == losses(tmp_path / "whole")


def test_a_signal_during_a_save_saves_and_asks_for_a_restart(recipe, tmp_path):
    folder = tmp_path / "run"
    process = start(recipe, folder, "checkpoint.every_steps=1", variables=RESTARTS)
    wait_for(process, r"^step 2/")
    wait_until(lambda: list((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")), process, LIMIT_S)
    process.send_signal(signal.SIGTERM)
    code, out, error = finish(process)
    assert (code, error) == (exit_codes.RESTART, "")
    step = stopped_step(out, "SIGTERM")
    assert [done for done, _ in losses(folder)] == list(range(1, step + 1))
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert str(step) in names
    assert all(name.isdecimal() for name in names)


def test_a_signal_during_the_first_compilation_asks_for_a_restart_at_once(recipe, tmp_path):
    """Nothing is trained, so it waits for nothing."""
    folder = tmp_path / "run"
    process = start(recipe, folder, variables=RESTARTS, program=("-c", SLOW_COMPILATION))
    wait_for(process, "^in the compilation")
    process.send_signal(signal.SIGTERM)
    code, out, error = finish(process)
    sentence = "jaxllm: stopped by SIGTERM before the first step of this start: there is nothing to save\n"
    assert (code, error) == (exit_codes.RESTART, sentence)
    assert "compiled" not in out
    # It may have exited before the file was opened.
    assert not (folder / "metrics.jsonl").exists() or losses(folder) == []
    assert not (folder / "checkpoints").exists()


def test_at_a_prompt_a_second_ctrl_c_raises_and_the_process_stays(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(module, "SAME_SIGNAL_S", 0.0)
    with SignalHandler() as handler:
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + LIMIT_S
        while handler.actions_after(1).stopped_by is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert handler.actions_after(1).stopped_by == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_that_must_not_stop_halfway_ends_before_ctrl_c_raises():
    done = []

    def whole():
        with module.defer_sigint():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        whole()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_by_hand_a_signal_during_the_first_compilation_stops_before_the_first_step(recipe, tmp_path):
    folder = tmp_path / "run"
    process = start(recipe, folder, program=("-c", SLOW_COMPILATION))
    wait_for(process, "^in the compilation")
    process.send_signal(signal.SIGTERM)
    code, out, error = finish(process)
    assert (code, error) == (0, "")
    assert "stopped before the first step by SIGTERM; there is nothing to save" in out
    assert losses(folder) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_second_signal_leaves_at_once_even_from_a_stuck_main_thread(restarts):
    """The main thread is in one call into C that no handler interrupts, as in a compilation. If a supervisor restarts the run,
    a second SIGTERM comes from a scheduler that has sent one before.
    """
    program = f"""
import ctypes, threading, time
from jaxllm.run.signals import SignalHandler
with SignalHandler(leave_early={"print" if restarts else None}) as handler:
    handler.begin()
    def tell():
        while handler._signal is None:
            time.sleep(0.01)
        print("heard", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    print("ready", flush=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        ctypes.CDLL(None).sleep(100)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(process, "ready")
    process.send_signal(signal.SIGTERM)
    # One signal sent twice, to a process and to its group, counts as one.
    process.send_signal(signal.SIGTERM)
    wait_for(process, "heard")
    time.sleep(2 * module.SAME_SIGNAL_S)
    if restarts:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, error = finish(process)
    assert code == 128 + signal.SIGINT
    assert error == "jaxllm: exited at once on a second signal, SIGINT; nothing more was saved\n"


@pytest.mark.parametrize(
    "ranks", [(1,), pytest.param((0,), marks=pytest.mark.slow), pytest.param((0, 1), marks=pytest.mark.slow)], ids=str
)
def test_a_signal_to_one_process_stops_all_at_the_same_step(ranks, recipe, tmp_path):
    port = free_port()
    expected = exit_codes.RESTART if ranks == (1,) else 0
    variables = RESTARTS if expected else {}
    pair = [start(recipe, tmp_path / "run", "parallel.data=2", rank=rank, port=port, variables=variables) for rank in (0, 1)]
    wait_for(pair[0], r"^step 3/")
    for rank in ranks:
        pair[rank].send_signal(signal.SIGTERM)
    (code, out, error), (other_code, *_) = [finish(process) for process in pair]
    assert (code, other_code) == (expected, expected), error
    step = stopped_step(out, "SIGTERM")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(step)]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_signal_to_one_process_during_the_first_compilation_ends_all_alike(rank, recipe, tmp_path):
    options = {"port": free_port(), "variables": RESTARTS, "program": ("-c", SLOW_COMPILATION)}
    pair = [start(recipe, tmp_path / "run", "parallel.data=2", rank=r, **options) for r in (0, 1)]
    wait_for(pair[rank], "^in the compilation")
    pair[rank].send_signal(signal.SIGTERM)
    ends = [finish(process) for process in pair]
    assert [code for code, *_ in ends] == [exit_codes.RESTART, exit_codes.RESTART], ends
    reason = "stopped by SIGTERM before the first step of this start: there is nothing to save"
    assert ends[rank][2] == f"jaxllm: {reason}\n"
    assert re.fullmatch(rf"jaxllm: process {rank} on \S+ was {reason}\n", ends[1 - rank][2])
    assert not (tmp_path / "run" / "checkpoints").exists()


# ----------------------------------------------------------------------------------------------------------- without a run


class Peer:
    """Signal handlers of three processes on one board; the rank is set before each call."""

    def __init__(self, monkeypatch, count=3):
        board: dict[str, str] = {}
        self.rank = 0
        monkeypatch.setattr(module.jax, "process_count", lambda: count)
        monkeypatch.setattr(module.jax, "process_index", lambda: self.rank)
        monkeypatch.setattr(distributed, "is_main_process", lambda: self.rank == 0)
        fake = type("Board", (), {"put": lambda _, name, text: board.__setitem__(name, text), "read": lambda _: dict(board)})
        monkeypatch.setattr(distributed, "Board", fake)

    def actions_after(self, handler, rank, step):
        self.rank = rank
        return handler.actions_after(step)


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("lead", [-2, -1, 0, 1])
def test_all_stop_at_one_step_however_far_apart_they_are(asked, lead, monkeypatch):
    """The others are `lead` steps ahead of process 0 at each of its checks; the signal comes at one of three steps."""
    for asked_at in (3, 4, 5):
        peer = Peer(monkeypatch)
        handlers = [SignalHandler() for _ in range(3)]
        stops = {}
        for step in range(3, 30):
            for rank, at in ((0, step), (1, step + lead), (2, step + lead)):
                if at < 1 or rank in stops:
                    continue
                if rank == asked and at >= asked_at:
                    handlers[rank]._signal = "SIGTERM"
                due = peer.actions_after(handlers[rank], rank, at)
                assert due.save == (due.stopped_by is not None)
                if due.stopped_by:
                    stops[rank] = at
        assert len(stops) == 3
        assert len(set(stops.values())) == 1
        assert asked_at < stops[0] <= asked_at + module.STEPS_AHEAD + 4


@pytest.mark.parametrize("together", [0, 10])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("slowest", [0, 1])
def test_all_stop_at_one_step_of_a_round(together, fragments, slowest, tiny_config, monkeypatch):
    """The others are as far ahead of the slowest replica as they can be when it looks for a plan: an outer step that it has not
    begun ends for nobody, and while they train together, no step that it has not begun."""
    sizes = ("train.steps=40", "parallel.replica=4", "parallel.data=2", "train.diloco_steps=8")
    config = tiny_config(*sizes, f"train.diloco_fragments={fragments}", f"train.diloco_after_steps={together}")
    common = [step for step in range(1, 41) if step <= together or (step - together) % (8 // fragments) == 0]
    for asked_at in range(1, 24):
        peer = Peer(monkeypatch)
        handlers = [SignalHandler() for _ in range(3)]
        for handler in handlers:
            handler.next_common = lambda step: next_common_step(config, step)
        stops, at = {}, dict.fromkeys(range(3), 0)
        for step in range(1, 40):
            ahead = min([n for n in common if n > step], default=40)
            for rank, until in sorted([(r, step if r == slowest else ahead) for r in range(3)], key=lambda pair: -pair[1]):
                while at[rank] < until and rank not in stops:
                    at[rank] += 1
                    if rank == slowest and at[rank] >= asked_at:
                        handlers[rank]._signal = "SIGTERM"
                    if peer.actions_after(handlers[rank], rank, at[rank]).stopped_by:
                        stops[rank] = at[rank]
        assert len(stops) == 3
        assert len(set(stops.values())) == 1, (asked_at, stops)
        if slowest == 0:
            assert stops[0] == min(n for n in common if n > asked_at) + module.STEPS_AHEAD


def test_the_clock_of_process_0_saves_on_all_at_one_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    peer = Peer(monkeypatch)
    # The others' clocks run ten times as fast.
    handlers = [SignalHandler(10.0), SignalHandler(1.0), SignalHandler(1.0)]
    saves = {0: [], 1: [], 2: []}
    for step in range(1, 40):
        now[0] = float(step)
        for rank in range(3):
            if peer.actions_after(handlers[rank], rank, step).save:
                saves[rank].append(step)
                handlers[rank].saved()
    assert saves[0] == saves[1] == saves[2] == [14, 28]


def test_alone_the_clock_acts_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    handler = SignalHandler(60.0)
    assert not handler.actions_after(1).save
    now[0] = 61.0
    assert handler.actions_after(2) == module.StepActions(save=True, stopped_by=None)
    handler.saved()
    assert not handler.actions_after(3).save


def wait_for_signal(handler) -> None:
    deadline = time.monotonic() + 10
    while handler._signal is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_before_the_first_step_it_leaves_early_under_a_supervisor():
    left = []
    with SignalHandler(leave_early=left.append) as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal(handler)
    assert left == ["SIGTERM"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_process_ready_for_the_first_step_leaves_early_no_more(restarts):
    left = []
    with SignalHandler(leave_early=left.append if restarts else None) as handler:
        if restarts:
            assert handler.begin() is None
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal(handler)
        # Without a supervisor the signal came earlier; all learn of it where they meet.
        assert handler.begin() == "SIGTERM"
        assert handler.actions_after(1) == module.StepActions(save=True, stopped_by="SIGTERM")
    assert left == []


@pytest.mark.parametrize("warning", module.WARNINGS)
def test_a_warning_asks_to_stop_and_never_exits_at_once(warning, monkeypatch):
    """However often it comes, also behind a SIGTERM. That at the time limit is then the first, and only a second one exits."""
    monkeypatch.setattr(module, "SAME_SIGNAL_S", 0.0)
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with SignalHandler() as handler:
        os.kill(os.getpid(), warning)
        wait_for_signal(handler)
        for number in (warning, signal.SIGTERM, warning):
            os.kill(os.getpid(), number)
        assert handler.begin() == warning.name
        assert exits == []
        os.kill(os.getpid(), signal.SIGTERM)
    # On leaving, the thread has read all that came.
    assert exits == [128 + signal.SIGTERM]


def test_a_warning_that_somebody_handles_is_theirs():
    """nohup ignores SIGHUP; submitit requeues its job on SIGUSR2."""
    came: list[int] = []
    theirs = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR2: lambda number, _: came.append(number)}
    before = {number: signal.signal(number, handler) for number, handler in theirs.items()}
    try:
        with SignalHandler() as handler:
            for number in theirs:
                os.kill(os.getpid(), number)
        assert came == [signal.SIGUSR2]
        assert handler._signal is None
        assert {number: signal.getsignal(number) for number in theirs} == theirs
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in module.SIGNALS]
    with SignalHandler() as handler:
        assert [signal.getsignal(number) for number in module.SIGNALS] != before
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not handler.actions_after(1).stopped_by and time.monotonic() < deadline:
            time.sleep(0.01)
        assert handler.actions_after(1) == module.StepActions(save=True, stopped_by="SIGTERM")
    assert [signal.getsignal(number) for number in module.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_signals_are_left_alone():
    seen = []

    def use():
        with SignalHandler() as handler:
            seen.extend([signal.getsignal(signal.SIGTERM), handler.actions_after(1)])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before, module.StepActions(save=False, stopped_by=None)]
