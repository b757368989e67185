"""Launchers without a script here: processes that they start find each other, and train.

torchrun and MPICH's mpiexec are real. For the others two processes get what the documentation says (documented_launches.py).
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import real_launches
import yaml
from documented_launches import DOCUMENTED, WITHOUT_HOST, environment_of
from outside import free_port
from run_files import records
from tiny import TINY

import jaxllm
from jaxllm.cluster.launcher_table import LAUNCHERS
from jaxllm.run.loop import fit

pytestmark = pytest.mark.launcher
LIMIT_S = 120
OTHERS = [key for key in LAUNCHERS if key not in ("slurm", "open mpi")]
"""The two have tests of their own."""

# Meets the others as a run does, without JAX, and writes a file, as mpiexec may join the lines of two processes.
# Its host sees two GPUs; argument "hosts": each process has its own host.
MEET = """
import json, os, sys
from jaxllm.cluster import launchers, rendezvous
from jaxllm.cluster.host_choice import ALL_REQUIRED
from jaxllm.cluster.rendezvous_checks import ProcessInfo

launch = launchers.find(os.environ)
rank, machine = launch.process_id, f"m{launch.process_id}" if sys.argv[1:] == ["hosts"] else "m"
own = ProcessInfo(rank, launch.num_processes, machine, os.getpid(), {}, machine, [], gpus=[f"{machine}-a", f"{machine}-b"])
answer, _ = rendezvous.meet(own, launch, ALL_REQUIRED)
with open(f"{__file__}.{rank}", "w") as file:
    json.dump([launch.launcher, rank, answer.members, answer.devices], file)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "meet.py"
    path.write_text(MEET)
    return str(path)


def start(*command: str, **variables: str) -> subprocess.Popen:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    ours = {"PYTHONPATH": str(real_launches.CHECKOUT), "JAXLLM_START_TIMEOUT_S": "60"}
    return subprocess.Popen(command, env=real_launches.environment(**ours, **variables), **options)


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    return out


def assert_met(program: str, launcher: str, devices: list) -> None:
    """Both processes have met each other, under this launcher, and drive these GPUs of the two that each sees."""
    answers = [json.loads(Path(f"{program}.{rank}").read_text()) for rank in range(2)]
    assert [answer[:2] for answer in answers] == [[launcher, 0], [launcher, 1]]
    assert answers[0][2] == answers[1][2]
    assert [answer[3] for answer in answers] == devices


@pytest.mark.parametrize("key", OTHERS)
def test_two_processes_with_the_documented_variables_meet(key, program):
    port, name = free_port(), socket.gethostname()
    # These start one process for each host.
    by_host = key in ("jax", "jaxjob", "skypilot", "dstack", "kubernetes")
    ours = {"JAXLLM_COORDINATOR": f"127.0.0.1:{port}"} if key in WITHOUT_HOST else {}
    ours |= {"JAXLLM_NUM_PROCESSES": "2"} if key == "kubernetes" else {}
    environs = [environment_of(key, rank, 2, port, name) | ours for rank in range(2)]
    started = [start(sys.executable, program, *(["hosts"] if by_host else []), **environ) for environ in environs]
    for process in started:
        output(process)
    assert_met(program, key, [None, None] if by_host else [[0], [1]])


@pytest.mark.parametrize(("places", "devices"), [("host", [[0], [1]]), ("hosts", [None, None])])
def test_mpich(places, devices, program):
    """One process for each GPU, and one for each host."""
    real_launches.require(**{"mpiexec.hydra": "mpich"})
    address = ("-genv", "JAXLLM_COORDINATOR", f"127.0.0.1:{free_port()}")
    output(start("mpiexec.hydra", "-n", "2", *address, sys.executable, program, places))
    assert_met(program, "pmi", devices)


def test_mpich_without_a_coordinator_is_refused(program):
    real_launches.require(**{"mpiexec.hydra": "mpich"})
    code = "import os; from jaxllm.cluster.launchers import find; print(find(os.environ))"
    assert output(start("mpiexec.hydra", "-n", "1", sys.executable, "-c", code)) == "None\n"
    process = start("mpiexec.hydra", "-n", "2", sys.executable, "-c", code)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert (
        "PMI (MPICH, Intel MPI) does not tell where process 0 is: give mpiexec -genv JAXLLM_COORDINATOR host:port with" in err
    )


@pytest.fixture(scope="module")
def training(text_file, tmp_path_factory):
    """A recipe, and the losses of one process."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    fit(jaxllm.load_config(folder / "tiny.yaml", ["run.cpu_devices=8", "parallel.data=8", f"run.dir={folder / 'alone'}"]))
    return folder / "tiny.yaml", losses(folder / "alone")


def losses(folder) -> list[float]:
    return [line["loss"] for line in records(folder) if "loss" in line]


def test_a_run_under_torchrun(training, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    recipe, expected = training
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    train = ("-m", "jaxllm.cli", "train", str(recipe), "run.cpu_devices=1", f"run.dir={tmp_path / 'run'}")
    output(start(*torchrun, "--nproc-per-node=2", f"--master-port={free_port()}", *train))
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-5)


def test_two_agents_of_torchrun(program):
    """As on two hosts, with one process each."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    options = ("--nnodes=2", "--nproc-per-node=1", f"--master-addr={socket.gethostname()}", f"--master-port={free_port()}")
    agents = [
        start(sys.executable, "-m", "torch.distributed.run", *options, f"--node-rank={rank}", program) for rank in range(2)
    ]
    for agent in agents:
        output(agent)
    assert_met(program, "torchrun", [[0], [1]])


def test_a_run_of_two_pods_of_kubeflows_jax_runtime(training, tmp_path):
    recipe, expected = training
    port, name = free_port(), socket.gethostname()
    train = (sys.executable, "-m", "jaxllm.cli", "train", str(recipe), "run.cpu_devices=1", f"run.dir={tmp_path / 'run'}")
    pods = [start(*train, **environment_of("jax", rank, 2, port, name)) for rank in range(2)]
    for pod in pods:
        output(pod)
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-5)


# As Ray's JaxTrainer does before it calls the user's function (ray-project/ray, python/ray/train/v2/jax/config.py).
BY_CALLER = """
import sys
import jax
from jaxllm.config import ConfigError, RunConfig
from jaxllm.cluster import distributed

run = RunConfig(cpu_devices=1, compilation_cache="off")
try:
    distributed.start(run)
except ConfigError as error:
    print(error)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
distributed.start(run)
print(jax.process_count(), distributed.is_main_process())
"""


def test_a_caller_that_started_jax_needs_no_launcher():
    refusal, found = output(start(sys.executable, "-c", BY_CALLER, str(free_port()), WORLD_SIZE="2")).splitlines()
    assert refusal.startswith("WORLD_SIZE=2 (PyTorch's environment) says that this process is one of several, but its rank")
    assert found == "1 True"


def test_all_launchers_are_tried():
    assert DOCUMENTED.keys() == LAUNCHERS.keys()
    assert os.environ.keys().isdisjoint({one.rank for one in LAUNCHERS.values()})
