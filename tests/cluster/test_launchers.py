"""Values that launchers set in the environment, and messages for values that are not valid."""

import time

import jax
import pytest
from documented_launches import DOCUMENTED, WITHOUT_HOST, environment_of

from jaxllm.cluster import distributed
from jaxllm.cluster.launcher_table import LAUNCHERS
from jaxllm.cluster.launchers import (
    FIRST_PORT,
    NUM_PORTS,
    expand_node_list,
    find,
    gpus_asked,
    idle_hosts,
    is_loopback,
    launch_info,
)
from jaxllm.config import ConfigError

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
    with pytest.raises(ConfigError, match="has more than 131,072 hosts: set JAXLLM_COORDINATOR=host:port instead"):
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
        (without(SLURM, "SLURM_STEP_NODELIST"), "SLURM's variables of this process are incomplete: set JAXLLM_COORDINATOR"),
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


# ------------------------------------------------------------------------------------------------------------ all launchers


@pytest.fixture(params=LAUNCHERS)
def key(request) -> str:
    return request.param


def given_by_user(key: str, count: int) -> dict:
    """What a user of this launcher must set."""
    if key not in WITHOUT_HOST:
        return {}
    return COORDINATOR | ({"JAXLLM_NUM_PROCESSES": str(count)} if key == "kubernetes" else {})


def test_each_launcher_gives_rank_and_number_and_one_address(key):
    found = [find(environment_of(key, rank, 3, 29500) | given_by_user(key, 3)) for rank in range(3)]
    assert [(one.launcher, one.process_id, one.num_processes) for one in found] == [(key, rank, 3) for rank in range(3)]
    assert len({one.address for one in found}) == 1
    assert found[0].host == "h0"
    assert launch_info(environment_of(key, 1, 3, 29500)).launcher == key


def test_another_run_on_the_same_hosts_has_another_port(key):
    if key not in WITHOUT_HOST:
        assert len({find(environment_of(key, 0, 2, port)).port for port in range(29500, 29504)}) == 4


def test_its_only_process_is_alone(key):
    if key != "kubernetes":
        assert find(environment_of(key, 0, 1, 29500)) is None
    assert find(environment_of(key, 1, 2, 29500) | {"JAXLLM_NUM_PROCESSES": "1"}) is None


def test_own_variables_come_first(key):
    found = find(environment_of(key, 1, 2, 29500) | OURS | {"JAXLLM_PROCESS_ID": "2"})
    assert (found.address, found.process_id, found.num_processes) == ("h0:29500", 2, 3)


@pytest.mark.parametrize("key", sorted(LAUNCHERS.keys() - {"jaxjob", "kubernetes"}))
def test_a_launcher_without_its_host_is_refused(key):
    names = (LAUNCHERS[key].address, LAUNCHERS[key].hosts)
    with pytest.raises(
        ConfigError, match=r"set JAXLLM_COORDINATOR|give .*JAXLLM_COORDINATOR|JAX_COORDINATOR_ADDRESS=host:port"
    ):
        find(without(environment_of(key, 1, 2, 29500), *names))


def test_a_number_without_a_rank_is_refused(key):
    count = LAUNCHERS[key].count
    if not count:
        return
    environ = environment_of(key, 1, 2, 29500)
    alone = {name: environ[name] for name in (count, LAUNCHERS[key].needs) if name in environ}
    with pytest.raises(ConfigError) as error:
        find(alone)
    assert f"{count}=2 (" in str(error.value)
    assert "set JAXLLM_COORDINATOR, JAXLLM_NUM_PROCESSES, JAXLLM_PROCESS_ID for each process, or JAXLLM_NUM_PROCESSES=1" in str(
        error.value
    )


def test_every_launcher_is_documented():
    assert list(DOCUMENTED) == list(LAUNCHERS)
    assert set(WITHOUT_HOST) == {key for key, one in LAUNCHERS.items() if not one.address and not one.hosts}


def environment(*keys: str, rank: int = 1, count: int = 2, **of: tuple[int, int]) -> dict:
    """Variables of several launchers, one inside the other; `of`: rank and count of one of them."""
    found = {}
    for key in keys:
        found |= environment_of(key, *of.get(key, (rank, count)), 29500)
    return found


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "count"),
    [
        # One agent on each of two hosts.
        (environment("slurm", "torchrun", torchrun=(3, 4)), "torchrun", 3, 4),
        (environment("skypilot", "torchrun", torchrun=(3, 4)), "torchrun", 3, 4),
        (environment("kubernetes", "torchrun", torchrun=(3, 4)), "torchrun", 3, 4),
        (environment("pytorch", "open mpi") | {"OMPI_COMM_WORLD_RANK": "0"} | COORDINATOR, "open mpi", 0, 2),
        # Hydra starts its proxies by srun.
        (environment("slurm", "pmi", pmi=(3, 4)) | COORDINATOR, "pmi", 3, 4),
        # A batch script that exports RANK for all tasks.
        (environment("slurm", "pytorch", pytorch=(0, 2)), "slurm", 1, 2),
        (environment("jax", "torchrun", torchrun=(3, 4)), "jax", 1, 2),
        (environment("kubernetes", "pytorch"), "pytorch", 1, 2),
    ],
    ids=str,
)
def test_the_nearest_launcher_counts(environ, launcher, rank, count):
    found = find(environ)
    assert (found.launcher, found.process_id, found.num_processes) == (launcher, rank, count)


def test_launchers_that_agree_complete_each_other():
    """SLURM's plugins for PMI and Cray set MPI's variables, and wrappers export those of PyTorch."""
    step = environment("slurm")
    cray = without(environment("pals"), "PALS_HOSTLIST") | step
    for environ in (environment("pmi") | step, cray, environment("flux") | step):
        assert find(environ).address == find(step).address
    assert find(environment("open mpi", "pytorch")).address == find(environment("pytorch")).address
    with pytest.raises(ConfigError, match=r"PMI \(MPICH, Intel MPI\) does not tell where process 0 is: give mpiexec -genv"):
        find(environment("pmi", pmi=(0, 2)) | step)


def test_jax_coordinator_address_serves_with_any_launcher():
    address = {"JAX_COORDINATOR_ADDRESS": "h7:1234"}
    for key in ("slurm", "open mpi", "torchrun"):
        found = find(environment(key) | address)
        assert (found.address, found.port_from) == ("h7:1234", "JAX_COORDINATOR_ADDRESS")
    assert find(environment("slurm") | address | COORDINATOR).address == "h0:29500"


@pytest.mark.parametrize(
    ("address", "port", "found"),
    [
        ("h0", "1234", "h0:1234"),
        ("h0:99", "1234", "h0:99"),
        ("fd00::7", "1234", "[fd00::7]:1234"),
        ("[fd00::7]:99", "1234", "[fd00::7]:99"),
    ],
)
def test_the_port_may_be_apart(address, port, found):
    given = {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_PORT": port}
    assert find(environment("jax") | given).address == found


def test_torchruns_own_port_is_never_used():
    for port in (*range(1024, 61440, 1000), *range(61440, 65536)):
        found = find(environment_of("torchrun", 0, 2, port))
        assert FIRST_PORT <= found.port < FIRST_PORT + NUM_PORTS
        assert found.port != port
    assert found.port_from == "MASTER_PORT, from which it is derived,"


def test_pals_takes_the_first_host_of_its_file(tmp_path):
    (tmp_path / "nodes").write_text("x1000c0:4\nx1001c0:4\n")
    (tmp_path / "empty").write_text("")
    environ = without(environment("pals"), "PALS_HOSTLIST")
    assert find(environ | {"PBS_NODEFILE": str(tmp_path / "nodes")}).host == "x1000c0"
    files = {"PALS_HOSTFILE": str(tmp_path / "nodes"), "PBS_NODEFILE": str(tmp_path / "empty")}
    assert find(environ | files).host == "x1000c0"
    for path in (tmp_path, tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(ConfigError, match="PALS does not tell where process 0 is: set JAXLLM_COORDINATOR=host:port"):
            find(environ | {"PBS_NODEFILE": str(path)})


@pytest.mark.parametrize(
    ("environ", "sign"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "h0:1234"}, "JAX_COORDINATOR_ADDRESS=h0:1234 (JAX's environment)"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "h0"}, "WORLD_SIZE=8 (PyTorch's environment)"),
        ({"RANK": "3"}, "RANK=3 (PyTorch's environment)"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 (PyTorch Lightning, DeepSpeed)"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "7"}, "PMIX_RANK=1 (PMIx)"),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS=2 (MPICH, Intel MPI)"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NNODES=2 (Kubeflow's torch runtime)"),
        ({"VC_MASTER_NUM": "1", "VC_WORKER_NUM": "1"}, "VC_MASTER_NUM=1 (Volcano)"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "(SageMaker)"),
        ({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {}}'}, "(TensorFlow)"),
        # The nearest says that it is alone.
        (environment("slurm", "torchrun", torchrun=(0, 1)), "SLURM_STEP_NUM_TASKS=2 (SLURM) says that this process is one of"),
        (environment("skypilot", "torchrun", torchrun=(0, 1)), "SKYPILOT_NUM_NODES=2 (SkyPilot)"),
        (environment("jax", "torchrun", jax=(0, 1)), "WORLD_SIZE=2 (torchrun)"),
    ],
    ids=str,
)
def test_other_signs_of_several_processes_are_refused(environ, sign):
    with pytest.raises(ConfigError) as error:
        find(environ)
    assert sign in str(error.value)
    assert str(error.value).endswith("for each process, or JAXLLM_NUM_PROCESSES=1 for a run of its own.")
    assert find(environ | {"JAXLLM_NUM_PROCESSES": "1"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"PMIX_RANK": "0", "NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "VC_WORKER_NUM": "1", "VC_TASK_INDEX": "0"},
        {"WORLD_SIZE": "many", "PMI_SIZE": "-2", "PET_NNODES": "1:4"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}', "SM_HOSTS": '["algo-1"]'},
        {"TF_CONFIG": "{", "SM_HOSTS": "[" * 10_000},
        {"TF_CONFIG": '{"cluster": 3}', "SM_HOSTS": '"several"'},
        # A batch script; a shell on one node of a job.
        without(environment("slurm"), "SLURM_STEP_ID"),
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "JSM_NAMESPACE_SIZE": ""},
        # mpirun starts its daemons on all hosts of a job.
        environment("slurm", "open mpi", **{"open mpi": (0, 1)}),
        # One pod of a Kubeflow job.
        environment("jax", jax=(0, 1)),
        environment("kubernetes", "torchrun", rank=0, count=1),
    ],
    ids=lambda environ: str(environ)[:60],
)
def test_no_false_alarm(environ):
    assert find(environ) is None


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


def test_the_main_process_is_known_before_jax_starts(monkeypatch):
    monkeypatch.setattr(distributed, "has_backends", lambda: False)
    monkeypatch.setattr(distributed, "_without_devices", False)
    monkeypatch.setattr(jax, "process_index", pytest.fail)
    assert distributed.is_main_process()
    for rank in range(3):
        for name, value in (OURS | {"JAXLLM_PROCESS_ID": str(rank)}).items():
            monkeypatch.setenv(name, value)
        assert distributed.is_main_process() == (rank == 0)


@pytest.mark.parametrize("environ", [OURS, {"JOB_COMPLETION_INDEX": "1"}], ids=["another rank", "half of a launch"])
def test_a_process_without_devices_is_the_main_one(environ, monkeypatch):
    """It is alone, also where a launcher started several: each compiles what it was asked for."""
    monkeypatch.setattr(distributed, "has_backends", lambda: False)
    monkeypatch.setattr(distributed, "_without_devices", False)
    monkeypatch.setattr(distributed.xla_flags, "apply", lambda *_: [])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    distributed.start_without_devices()
    assert distributed.is_main_process()
