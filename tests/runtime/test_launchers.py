"""Values that launchers set in the environment, and messages for values that are not valid."""

import time

import pytest

from jaxllm.config import ConfigError
from jaxllm.runtime.launchers import (
    FIRST_PORT,
    NUM_PORTS,
    expand_node_list,
    find,
    gpus_asked,
    idle_hosts,
    is_loopback,
    launch_info,
)

SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08,11],big1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NUM_NODES": "4",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
OURS = {"JAXLLM_COORDINATOR": "h0:29500", "JAXLLM_NUM_PROCESSES": "3", "JAXLLM_PROCESS_ID": "1"}
COORDINATOR = {"JAXLLM_COORDINATOR": "h0:29500"}
POD = {"JOB_COMPLETION_INDEX": "1"}


def without(environ: dict, *names: str) -> dict:
    return {name: value for name, value in environ.items() if name not in names}


# ------------------------------------------------------------------------------------------------------------ what they say


@pytest.mark.parametrize(
    ("environ", "launcher", "address", "rank", "count"),
    [
        (OURS, "variables", "h0:29500", 1, 3),
        (OURS | {"JAXLLM_COORDINATOR": "[fd00::7]:29500"}, "variables", "[fd00::7]:29500", 1, 3),
        (SLURM, "slurm", f"gpu07:{FIRST_PORT + 70123 % NUM_PORTS}", 2, 4),
        (SLURM | COORDINATOR, "slurm", "h0:29500", 2, 4),
        (MPI | COORDINATOR, "open mpi", "h0:29500", 3, 4),
        (POD | COORDINATOR | {"JAXLLM_NUM_PROCESSES": "2"}, "kubernetes", "h0:29500", 1, 2),
        # A JobSet of several jobs: pods of each are numbered from 0.
        (POD | OURS | {"JAXLLM_PROCESS_ID": "2"}, "kubernetes", "h0:29500", 2, 3),
        # mpirun in a SLURM job starts its daemons by srun, one a host.
        (SLURM | {"SLURM_NTASKS": "2"} | MPI | COORDINATOR, "open mpi", "h0:29500", 3, 4),
        # All set by hand, whatever the launcher sets.
        (SLURM | OURS, "slurm", "h0:29500", 1, 3),
    ],
    ids=str,
)
def test_rank_and_world_size(environ, launcher, address, rank, count):
    found = find(environ)
    assert (found.launcher, found.address, found.process_id, found.num_processes) == (launcher, address, rank, count)
    assert launch_info(environ).launcher == launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script, outside srun
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        POD | {"JAXLLM_NUM_PROCESSES": "1"},
        SLURM | {"JAXLLM_NUM_PROCESSES": "1"},
        OURS | {"JAXLLM_NUM_PROCESSES": "1", "JAXLLM_PROCESS_ID": "0"},
        dict.fromkeys(OURS, ""),
    ],
    ids=str,
)
def test_runs_of_one_process(environ):
    assert find(environ) is None


def test_steps_of_a_job_have_ports_of_their_own_outside_those_for_outgoing_connections():
    ports = {find(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(8)}
    assert len(ports) == 8
    assert all(60999 < port < 2**16 for port in ports)


def test_hosts_are_known_by_rank_where_each_has_one_process():
    assert find(SLURM).hosts == ("gpu07", "gpu08", "gpu11", "big1")
    assert find(SLURM | {"SLURM_STEP_NUM_TASKS": "8"}).hosts == ()


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("h1", "h1"),
        ("h1,h3", "h1 h3"),
        ("h[1-3,7],gpu-[009-011]x", "h1 h2 h3 h7 gpu-009x gpu-010x gpu-011x"),
        ("h[8-11]", "h8 h9 h10 h11"),
        ("r[1-2]n[0,3]", "r1n0 r1n3 r2n0 r2n3"),
        ("login.example.org,a[5]", "login.example.org a5"),
    ],
)
def test_lists_of_nodes(node_list, hosts):
    assert expand_node_list(node_list) == hosts.split()


UNREADABLE = ["", "h[1-", "h]1", "h[]", "h[a-b]", "a,,b", "h[1-2]]", "h[2-1]", "h[1-999999999]n[2-1]", f"h[{'0' * 5000}]"]


@pytest.mark.parametrize("node_list", [*UNREADABLE, "h" + "[1]" * 30_000], ids=lambda text: text[:30])
def test_invalid_lists_of_nodes(node_list):
    with pytest.raises(ConfigError, match="cannot be read: set JAXLLM_COORDINATOR=host:port instead"):
        expand_node_list(node_list)


@pytest.mark.parametrize("node_list", ["h[1-999999999]", "h[0-999]" + "[0-9]" * 6, ",".join(["h[1-70000]"] * 2)])
def test_lists_of_too_many_nodes_are_not_expanded(node_list):
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match="has more than 131,072 hosts: correct it, or set JAXLLM_COORDINATOR=host:port"):
        expand_node_list(node_list)
    assert time.monotonic() - began_s < 5


def test_a_list_of_nodes_that_cannot_be_read_does_not_matter_where_the_coordinator_is_given():
    assert find(SLURM | COORDINATOR | {"SLURM_STEP_NODELIST": "h[1-999999999]"}).address == "h0:29500"


def test_numbers_that_are_none_say_nothing():
    """They are for information."""
    for text in ("9" * 5000, "-1", "many", "٣"):
        assert gpus_asked(SLURM | {"SLURM_GPUS_ON_NODE": text}) is None
        assert idle_hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": text}) == 0
        assert launch_info(SLURM | {"SLURM_RESTART_COUNT": text}).attempt == 0


def test_gpus_asked():
    assert gpus_asked(SLURM | {"SLURM_GPUS_ON_NODE": "8"}) == 8
    assert gpus_asked(SLURM) is None
    # Of the job, not of this step.
    assert gpus_asked(without(SLURM, "SLURM_STEP_ID") | {"SLURM_GPUS_ON_NODE": "8"}) is None


def test_hosts_that_do_nothing():
    outside = without(SLURM, "SLURM_STEP_ID")
    assert idle_hosts(outside) == 3
    for environ in (SLURM, outside | OURS, outside | MPI, {}, outside | {"SLURM_JOB_NUM_NODES": "1"}):
        assert idle_hosts(environ) == 0


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.1.1", True), ("::1", True), ("0.0.0.0", True), ("10.0.0.1", False), ("h1", False)],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


# ------------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (COORDINATOR, "JAXLLM_COORDINATOR is set, but not JAXLLM_NUM_PROCESSES and JAXLLM_PROCESS_ID: set all of"),
        (without(OURS, "JAXLLM_COORDINATOR"), "JAXLLM_NUM_PROCESSES and JAXLLM_PROCESS_ID are set, but not JAXLLM_COORDINATOR"),
        (OURS | {"JAXLLM_COORDINATOR": "h0"}, "JAXLLM_COORDINATOR=h0 has no port: write host:port"),
        (OURS | {"JAXLLM_COORDINATOR": "h0:70000"}, "JAXLLM_COORDINATOR=h0:70000 has no port"),
        (OURS | {"JAXLLM_COORDINATOR": "h0:" + "9" * 5000}, "has no port: write host:port"),
        (OURS | {"JAXLLM_COORDINATOR": "h" * 5000 + ":29500"}, "names no host: write host:port"),
        (OURS | {"JAXLLM_COORDINATOR": "h..0:29500"}, "JAXLLM_COORDINATOR=h..0:29500 names no host: write host:port"),
        (OURS | {"JAXLLM_COORDINATOR": "h\x1b0:29500"}, r"JAXLLM_COORDINATOR=h\x1b0:29500 names no host"),
        (
            OURS | {"JAXLLM_NUM_PROCESSES": "131073"},
            "JAXLLM_NUM_PROCESSES=131073 is not valid: it should be a whole number from 1 to",
        ),
        (OURS | {"JAXLLM_NUM_PROCESSES": "9" * 5000}, "is not valid: it should be a whole number from 1 to 131,072."),
        (OURS | {"JAXLLM_PROCESS_ID": "-1"}, "JAXLLM_PROCESS_ID=-1 is not valid: it should be a whole number of at least 0."),
        (OURS | {"JAXLLM_PROCESS_ID": "3"}, "JAXLLM_PROCESS_ID=3 is not below JAXLLM_NUM_PROCESSES=3: processes are numbered"),
        (OURS | {"JAXLLM_START_TIMEOUT_S": "soon"}, "JAXLLM_START_TIMEOUT_S=soon is not valid"),
        (MPI, "Open MPI does not tell where process 0 is: start with launch/mpi.sh, or give mpirun -x JAXLLM_COORDINATOR="),
        (
            MPI | {"JAXLLM_COORDINATOR": "localhost:29500"},
            "localhost:29500 means a different machine on each host, and Open MPI",
        ),
        (
            SLURM | {"JAXLLM_COORDINATOR": "127.0.0.1:29500"},
            "127.0.0.1:29500 means a different machine on each host, and SLURM",
        ),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4"),
        (SLURM | {"SLURM_STEP_NODELIST": "h[1"}, "The SLURM node list h[1 cannot be read"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "SLURM's variables of this step are incomplete: set JAXLLM_COORDINATOR"),
        (
            POD,
            "JAXLLM_COORDINATOR and JAXLLM_NUM_PROCESSES are not set: give them in the manifest as launch/k8s-jobset.yaml",
        ),
        (POD | COORDINATOR, "JAXLLM_NUM_PROCESSES is not set: give it in the manifest"),
    ],
)
def test_invalid_variables(environ, sentence):
    with pytest.raises(ConfigError) as error:
        find(environ)
    assert sentence in str(error.value)


# ----------------------------------------------------------------------------------------------------------- launch and place


def test_launch_info_by_default():
    alone = launch_info({})
    assert (alone.launcher, alone.attempt, alone.launch_id, alone.restarts, alone.beat_fd) == ("alone", 0, None, False, None)


def test_launch_info_as_set():
    environ = {"JAXLLM_ATTEMPT": "3", "JAXLLM_LAUNCH_ID": "a7", "JAXLLM_RESTARTS": "yes", "JAXLLM_BEAT_FD": "5"}
    said = launch_info(OURS | environ)
    assert (said.attempt, said.launch_id, said.restarts, said.beat_fd) == (3, "a7", True, 5)


def test_the_slurm_job_is_the_launch_and_counts_its_restarts():
    again = launch_info(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert (again.launch_id, again.attempt) == ("70123", 2)


def test_attempts_grow_where_a_supervisor_runs_in_a_slurm_job():
    order = [("0", "0"), ("0", "9"), ("1", "0"), ("1", "4"), ("2", "0")]
    attempts = [launch_info(SLURM | {"SLURM_RESTART_COUNT": queued, "JAXLLM_ATTEMPT": own}).attempt for queued, own in order]
    assert attempts == sorted(set(attempts))


@pytest.mark.parametrize(
    "wrong",
    [
        {"JAXLLM_ATTEMPT": "x"},
        {"JAXLLM_ATTEMPT": str(10**16)},
        {"JAXLLM_BEAT_FD": "-1"},
        {"JAXLLM_BEAT_FD": "99999999999999999999"},
        {"JAXLLM_RESTARTS": "perhaps"},
    ],
    ids=str,
)
def test_invalid_launch_info(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value} is not valid"):
        launch_info(wrong)


def test_a_launch_of_an_endless_name_is_refused():
    with pytest.raises(ConfigError, match=r"^JAXLLM_LAUNCH_ID=xxx.* is not valid: give a name of at most 4,096 characters\.$"):
        launch_info({"JAXLLM_LAUNCH_ID": "x" * 100_000})
