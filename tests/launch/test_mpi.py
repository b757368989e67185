"""launch/mpi.sh under a real mpirun: how processes find each other, what it forwards, and a run that survives a killed process
and a signal.
"""

import os
import signal
import subprocess

import pytest
import real_launches
from real_launches import LIMIT_S, launch, launched, pid_of

from jaxllm.cluster import exit_codes

pytestmark = pytest.mark.launcher
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TWO = ("--oversubscribe", "-np", "2")


@pytest.fixture(scope="module", autouse=True)
def open_mpi():
    # MPICH has an mpirun too.
    real_launches.require(ompi_info="openmpi-bin")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "mpi.sh needs the command to run behind --"),
        (("-np", "2", "jaxllm", "train"), "mpi.sh needs the command to run behind --"),
        (("-np", "2", "--"), "mpi.sh needs the command to run behind --"),
        (("--restarts",), "--restarts needs a value"),
    ],
)
def test_usage_is_refused_in_a_sentence(arguments, sentence, tmp_path):
    code, out, err = launch("mpi.sh", *arguments, cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_other_programs_of_that_name_are_refused(tmp_path):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    (tmp_path / "mpirun").chmod(0o755)
    for program, sentence in (
        (tmp_path / "mpirun", "is not Open MPI's"),
        (tmp_path / "none", "cannot be run: install Open MPI"),
    ):
        code, out, err = launch("mpi.sh", "-np", "2", "--", "true", cwd=tmp_path, MPIRUN=str(program))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{program} {sentence}" in err


def test_processes_find_each_other_in_the_callers_folder(tmp_path):
    """And may use all of the host's cores."""
    words = 'echo "$OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE in $PWD, $XLA_FLAGS"; nproc'
    words += '; echo "$JAXLLM_COORDINATOR $JAXLLM_SECRET" >&2'
    variables = AS_ROOT | {"XLA_FLAGS": "--first=1 --second=a,b"}
    code, out, err = launch("mpi.sh", *TWO, "--", "bash", "-c", words, cwd=tmp_path, **variables)
    assert code == 0, err
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout.strip()
    expected = [line for n in range(2) for line in (f"[{n}] {n} of 2 in {tmp_path}, --first=1 --second=a,b", f"[{n}] {cores}")]
    assert sorted(out.splitlines()) == sorted(expected)
    ((coordinator, secret),) = {tuple(line.split()[1:]) for line in err.splitlines() if line.startswith("[")}
    assert coordinator.startswith("127.0.0.1:")
    assert len(secret) == 64


def test_a_given_coordinator_and_the_first_failure_that_is_final(tmp_path):
    words = '((OMPI_COMM_WORLD_RANK)) && { echo "$JAXLLM_ATTEMPT $JAXLLM_COORDINATOR"; exit 7; }; exec sleep 60'
    options = ("--restarts", "1", "--backoff-s", "0.1", *TWO)
    variables = AS_ROOT | {"JAXLLM_COORDINATOR": "host-0:29500"}
    code, out, err = launch("mpi.sh", *options, "--", "bash", "-c", words, cwd=tmp_path, **variables)
    assert (code, out.splitlines()) == (7, ["[1] 0 host-0:29500", "[1] 1 host-0:29500"])
    assert "[1] jaxllm: exit code 7 (an error); given up after 1 restarts in a row" in err


@pytest.mark.slow
def test_a_run_goes_through_a_kill_and_a_signal_to_the_losses_of_one_process(text_file, tmp_path):
    run = real_launches.Run(tmp_path, text_file)
    line = ("mpi.sh", "--restarts", "3", "--backoff-s", "0.1", *TWO, "--")
    with launched(*line, *run.command(), cwd=tmp_path, **AS_ROOT) as process:
        run.wait_for(3, process)
        os.kill(pid_of("slowly.py", rank=1), signal.SIGKILL)
        # No process gets there alone.
        run.wait_for(7, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == exit_codes.RESTART, out + err
    assert "[1] jaxllm: exit code 137 (ended by SIGKILL); restart 1 of at most 3 in 0.1 s" in err
    assert "by SIGTERM; saved" in out
    code, out, err = launch(*line, *run.command(step_s=0), cwd=tmp_path, **AS_ROOT)
    assert code == 0, out + err
    assert "[0] resumed from step" in out
    run.assert_losses_of_one_process()
