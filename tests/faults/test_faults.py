"""Faults in runs of several real processes: all processes end in time and name the fault, and the next launch resumes from the
newest checkpoint, bit for bit like a run without faults.

One run directory takes all the faults, one after the other: each launch shows what the previous fault has left, and meets the
next. The tests pass in any order and each alone, as a launch without a checkpoint starts from scratch. Refusals before training
are tested in test_multiprocess.py and test_roll_call.py; SLURM, mpirun and ssh in launch/.
"""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from faulty_runs import CHECKOUT, HOST, SILENT_S, START_S, STEPS, Run, environment, is_open, supervised
from run_files import records

from jaxllm.cluster import exit_codes

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

AGAIN = "start again from the last checkpoint"
KILLED = ("its connection closed", "it was killed or crashed")
FROZEN = (r"nothing heard for \d+ s", "it is frozen, or its host or network failed")
NOT_BEGUN = "stopped by SIGTERM before the first step of this start: there is nothing to save"
NO_SAVES = "checkpoint.every_steps=null"
TOLERANCE = 2e-5
"""Relative, of a loss after some thirty steps on another mesh."""
RESTARTS = {"JAXLLM_RESTARTS": "yes"}


@pytest.fixture(scope="module")
def whole(text_file, tmp_path_factory):
    """The run without faults."""
    run = Run(tmp_path_factory.mktemp("whole"), text_file)
    with run.launch(NO_SAVES, pace_s=0) as launch:
        launch.start_all()
        launch.assert_ends(0, 0, within_s=START_S)
    assert [step for step, *_ in run.records()] == list(range(1, STEPS + 1))
    return run


@pytest.fixture(scope="module")
def disturbed(text_file, tmp_path_factory):
    return Run(tmp_path_factory.mktemp("disturbed"), text_file)


@pytest.fixture
def run(disturbed, whole):
    """The run with faults. After each test its losses so far equal those of the run without faults, bit for bit."""
    yield disturbed
    records = disturbed.records()
    assert records == whole.records()[: len(records)]


# ----------------------------------------------------------------------------------------------------- lost processes


def lost(rank: int, how: tuple[str, str]) -> str:
    """The others' sentence about a lost process."""
    shows, cause = how
    return rf"process {rank} on {HOST} is lost \({shows}\) during (?:step \d+|[a-z]+ after step \d+): {cause}; {AGAIN}"


def test_a_killed_coordinator_is_named(run):
    with run.launch() as launch:
        launch.start_all()
        launch.wait_until_it_trains()
        launch.strike(0, signal.SIGKILL)
        # JAX aborts a process that is still exiting 0.1 s later, on a busy machine before its sentence.
        launch.assert_ends(-signal.SIGKILL, (exit_codes.LOST, -signal.SIGABRT))
        if launch[1].popen.returncode == exit_codes.LOST:
            launch.assert_says(1, lost(0, KILLED))


def test_a_late_process_is_waited_for_and_missed_when_it_is_killed(run):
    with run.launch() as launch:
        launch.start(0)
        launch.wait_until(lambda: is_open(launch.port), "the rendezvous")
        launch.start(1)
        launch.wait_until_it_trains()
        launch.strike(1, signal.SIGKILL)
        launch.assert_ends(exit_codes.LOST, -signal.SIGKILL)
        launch.assert_says(0, lost(1, KILLED))


def test_a_stopped_process_is_given_up_by_the_other_and_killed_by_its_supervisor(run):
    with run.launch() as launch:
        launch.start_all(under=supervised(restarts=0))
        launch.wait_until_it_trains()
        launch.strike(1, signal.SIGSTOP)
        launch.assert_ends(exit_codes.LOST, 128 + signal.SIGKILL)
        launch.assert_says(0, lost(1, FROZEN))
        launch.assert_says(1, f"process {launch[1].pid} is frozen, no sign of life for {SILENT_S} s: killing it")


# ------------------------------------------------------------------------------------------------------- data and disk


def test_a_failure_in_one_process_is_reported_by_the_other(run):
    """Data is read in a thread: its failure ends that process."""
    # Process 1 would wait for the end of a save, and JAX abort it once process 0 has exited.
    with run.launch(NO_SAVES) as launch:
        launch.start(0)
        launch.start(1, fault="unreadable data")
        launch.wait_for(1, "reading fails")
        launch.assert_ends(exit_codes.LOST, 1)
        launch.assert_resumed()
        launch.assert_says(0, rf"process 1 on {HOST} failed: OSError: .*Input/output error.*")
        launch.assert_says(1, r"A disk or a terminal has failed \(input/output error\): see the system's log\.")
        assert all("Traceback" not in launch[rank].err.text for rank in (0, 1))


def test_a_process_stuck_in_its_data_is_named_by_the_first_to_notice(run):
    """And both print their stacks."""
    with run.launch("run.phase_timeout_s=25") as launch:
        launch.start(0)
        launch.start(1, fault="stuck data")
        launch.wait_for(1, "reading fails")
        launch.assert_ends(exit_codes.LOST, exit_codes.LOST)
        launch.assert_resumed()
        itself = rf"process 1 on {HOST} is stuck: data after step \d+ has taken \d+ s \(run\.phase_timeout_s=25\); {AGAIN}"
        waits = rf"waiting for process 1 on {HOST}, \d+ s in data after step \d+; run\.phase_timeout_s=25"
        other = rf"process 0 on {HOST} is stuck: step \d+ has taken \d+ s \({waits}\); {AGAIN}"
        for rank in (0, 1):
            launch.assert_says(rank, f"(?:{itself}|{other})")
        assert re.search(r'File "\S+trainer\.py", line \d+ in (?:advance|finish)\n', launch[0].err.text), launch
        assert re.search(r'File "\S+trainer\.py", line \d+ in take\n', launch[1].err.text), launch


def test_a_process_whose_disk_is_full_ends_the_run_and_loses_nothing(run):
    """A limit on the size of its files simulates the full disk; without another disk a restart would not help."""
    with run.launch() as launch:
        launch.start(0)
        launch.start(1, under=("bash", "-c", 'ulimit -f 16; exec "$@"', "bash"))
        launch.wait_for_steps(1)
        launch.assert_ends(exit_codes.BAD_INPUT, exit_codes.BAD_INPUT)
        sentence = rf"Checkpoint \d+ could not be written to {re.escape(str(run.dir))}/checkpoints \(.*File too large.*\): .*"
        launch.assert_says(1, sentence)
        launch.assert_says(0, rf"process 1 on {HOST} failed: {sentence}")
        assert run.saved[-1:] == ([launch.first] if launch.first else [])


def test_a_killed_worker_that_prepares_data_ends_its_command_which_resumes(tmp_path):
    lines = (f'{{"text": "{i} law mesh ring axis shard gather tick"}}\n' for i in range(240_000))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    command = [sys.executable, "-m", "jaxllm.cli", "data", "prepare", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes"]
    options = {"env": environment(), "cwd": CHECKOUT, "text": True}

    def prepare(out: str, workers: int) -> list[str]:
        return [*command, "--shard-megabytes", "1", "--out", str(tmp_path / out), "--workers", str(workers)]

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process, until_s = subprocess.Popen(prepare("out", 2), **pipes, **options), time.monotonic() + START_S
    try:
        # A file being written has its writer's PID in its name.
        while not (under_way := [path.name for path in (tmp_path / "out").glob(".tokens-*.tmp")]):
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.001)
        os.kill(int(under_way[0].removesuffix(".tmp").rpartition("-")[2]), signal.SIGKILL)
        _, error = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == exit_codes.BAD_INPUT, error
    (line,) = error.splitlines()
    assert line.startswith("jaxllm: A worker was killed (exit code -9), perhaps because memory ran out: run the command again")
    assert list((tmp_path / "out").glob(".*")) == []
    for out, workers in (("out", 2), ("whole", 1)):
        subprocess.run(prepare(out, workers), check=True, capture_output=True, timeout=START_S, **options)
    out, whole = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("out", "whole"))
    assert out == whole


# ------------------------------------------------------------------------------------------------------------- signals


def stopped_step(launch) -> int:
    (line,) = (line for line in launch[0].out.lines if line.startswith("stopped at"))
    return int(re.fullmatch(r"stopped at step (\d+) by SIGTERM; saved; rerun the same command to resume", line)[1])


def test_sigterm_in_a_step_saves_the_same_step_of_all(run):
    with run.launch() as launch:
        launch.start_all(**RESTARTS)
        launch.wait_until_it_trains()
        launch.strike(1, signal.SIGTERM)
        launch.assert_ends(exit_codes.RESTART, exit_codes.RESTART)
        assert run.saved[-1] == run.records()[-1][0] == stopped_step(launch)


def test_sigterm_in_a_save_finishes_it_and_saves_once_more(run):
    with run.launch("checkpoint.keep=10") as launch:
        launch.start(0, fault="slow save", **RESTARTS)
        launch.start(1, **RESTARTS)
        launch.wait_for(0, "saving")
        launch.strike(0, signal.SIGTERM)
        launch.assert_ends(exit_codes.RESTART, exit_codes.RESTART)
        launch.assert_resumed()
        under_way = launch.first - launch.first % 2 + 2
        assert under_way in run.saved
        assert under_way < run.saved[-1] == run.records()[-1][0] == stopped_step(launch)
        assert all(path.name.isdecimal() for path in (run.dir / "checkpoints").iterdir())


def test_sigterm_in_the_compilation_ends_all_at_once(run):
    """Nothing is trained, so it waits for nothing."""
    before = run.saved
    with run.launch() as launch:
        launch.start_all(fault="slow compilation", **RESTARTS)
        launch.wait_for(1, "compiling")
        launch.strike(1, signal.SIGTERM)
        launch.assert_ends(exit_codes.RESTART, exit_codes.RESTART)
        launch.assert_says(1, NOT_BEGUN)
        launch.assert_says(0, f"process 1 on {HOST} was {NOT_BEGUN}")
        assert run.saved == before


# ----------------------------------------------------------------------------------------------------- other processes


def test_four_processes_lose_one_and_two_take_up_their_run(text_file, whole, tmp_path):
    """Each sample is in the step that it belongs to: the losses equal those of the run without faults but for the order of
    sums.
    """
    run, steps = Run(tmp_path, text_file), 30
    with run.launch(count=4) as launch:
        launch.start_all()
        launch.wait_until_it_trains()
        launch.strike(2, signal.SIGKILL)
        launch.assert_ends(exit_codes.LOST, exit_codes.LOST, -signal.SIGKILL, exit_codes.LOST)
        for rank in (0, 1, 3):
            launch.assert_says(rank, lost(2, KILLED))
    with run.launch(f"train.steps={steps}", NO_SAVES, pace_s=0) as launch:
        launch.start_all()
        launch.assert_ends(0, 0, within_s=START_S)
        launch.assert_resumed()
    expected, losses = (np.array([loss for _, loss, _ in one.records()[:steps]]) for one in (whole, run))
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    # Other samples would be visible.
    assert np.median(np.abs(np.diff(expected)) / expected[1:]) > 20 * TOLERANCE


def test_hosts_are_lost_during_a_save_and_while_the_others_plan_without_them(text_file, whole, tmp_path):
    """Four hosts lose one while process 0 has not yet given a checkpoint its name, and then process 0's, which asks the planner
    for a layout of the other three. Two train on, from the checkpoint before.
    """
    run, steps = Run(tmp_path, text_file), 20
    hosts = ",".join(f"127.0.0.{rank + 1}" for rank in range(4))
    shrinks = (f"train.steps={steps}", "launch.least_hosts=2", "launch.wait_s=10", "parallel.data=4", "parallel.zero=3")
    with run.launch(*shrinks, count=4) as launch:
        launch.start(0, under=supervised(restarts=5), fault="endless save and planning", JAXLLM_HOSTS=hosts)
        for rank in (1, 2, 3):
            launch.start(rank, under=supervised(restarts=5), JAXLLM_HOSTS=hosts)
        launch.wait_for(0, "saving")
        assert [path.name for path in (run.dir / "checkpoints").glob("*tmp*")] != []
        launch.lose(3)
        launch.wait_for(0, "planning")
        launch.lose(0)
        launch.assert_ends(0, 0, within_s=START_S)
        assert f"resumed from step 2 in {run.dir}" in launch[1].out.lines, launch
        missing = "127.0.0.1, 127.0.0.4 are missing: training on without, the same batches in "
        assert any(line.startswith(missing) for line in launch[1].out.lines), launch
    starts = [line for line in records(run.dir) if "start_unix_s" in line]
    assert [(start["devices"], start.get("absent_hosts", 0)) for start in starts] == [(4, 0), (2, 2)]
    assert all(path.name.isdecimal() for path in (run.dir / "checkpoints").iterdir())
    assert [step for step, *_ in run.records()] == list(range(1, steps + 1))
    expected, losses = (np.array([loss for _, loss, _ in one.records()[:steps]]) for one in (whole, run))
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


# ----------------------------------------------------------------------------------------------------------- the end


def test_who_comes_too_late_meets_the_next_attempt_and_the_run_ends_as_if_undisturbed(run, whole):
    with run.launch(NO_SAVES, pace_s=0) as launch:
        # Each attempt waits so long, and JAX's own start may take no longer; some may pass until the other has started.
        launch.start(0, under=supervised(restarts=5), JAXLLM_START_TIMEOUT_S="15")
        launch.wait_until(lambda: "; restart 1 of at most 5 in " in launch[0].err.text, "the end of the first attempt")
        launch.start(1)
        launch.assert_ends(0, 0, within_s=START_S)
        launch.assert_resumed()
        launch.assert_says(
            0, rf"Process 1 of 2 did not come to 127\.0\.0\.1:{launch.port} within 15 s \(there: 0 on {HOST}; .*"
        )
    assert run.records() == whole.records()
    jax.tree.map(np.testing.assert_array_equal, run.final_state(), whole.final_state())
