"""Who started this process, as one of how many: read from the environment that a launcher sets. No JAX, no network.

jaxllm's own variables say it for any launcher, and win where a launcher says it too:

    JAXLLM_COORDINATOR      host:port of process 0, the same everywhere
    JAXLLM_NUM_PROCESSES    how many there are; 1: this process is a run of its own, whatever a launcher says
    JAXLLM_PROCESS_ID       which this is, from 0
    JAXLLM_START_TIMEOUT_S  optional: seconds to wait for the others; default 300

    SLURM       srun says all; the coordinator is the step's first host, its port comes from the job's number
    Open MPI    mpirun (4 and 5) says how many and which; JAXLLM_COORDINATOR must be given
    Kubernetes  an indexed Job says which; JAXLLM_COORDINATOR and JAXLLM_NUM_PROCESSES must be given

A process may drive all GPUs of its host or a share of them: how many there are on each host, the roll call finds out.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxllm.config_errors import ConfigError
from jaxllm.supervise import NESTED

COORDINATOR, NUM_PROCESSES, PROCESS_ID = REQUIRED = ("JAXLLM_COORDINATOR", "JAXLLM_NUM_PROCESSES", "JAXLLM_PROCESS_ID")
START_TIMEOUT_S = "JAXLLM_START_TIMEOUT_S"
DEFAULT_START_TIMEOUT_S = 300
RESTARTS, ATTEMPT, LAUNCH_ID, BEAT_FD = ("JAXLLM_RESTARTS", "JAXLLM_ATTEMPT", "JAXLLM_LAUNCH_ID", "JAXLLM_BEAT_FD")

FIRST_PORT, NUM_PORTS = 61440, 4096
"""Where a job's number becomes a port: above those that Linux gives to outgoing connections (32768 to 60999)."""
PORTS_APART = 509
"""Between two steps of one job. A prime, so that a step and its neighbour job's rarely meet."""

LAUNCHERS = {"variables": "JAXLLM_*", "slurm": "SLURM", "open mpi": "Open MPI", "kubernetes": "Kubernetes"}
"""What users call them."""


@dataclass(frozen=True)
class Launch:
    """The place of this process among several."""

    launcher: str
    """A key of LAUNCHERS."""
    host: str
    """Of process 0, as all can reach it."""
    port: int
    num_processes: int
    process_id: int
    start_timeout_s: int = DEFAULT_START_TIMEOUT_S
    port_from: str = COORDINATOR
    """What the port was taken from, for people."""
    id_from: str = PROCESS_ID
    count_from: str = NUM_PROCESSES
    hosts: tuple[str, ...] = ()
    """By rank, where the launcher tells and each has one process."""

    @property
    def by(self) -> str:
        """The launcher, for people."""
        return LAUNCHERS[self.launcher]

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Place:
    """What launch this process belongs to."""

    launcher: str
    """alone, or a key of LAUNCHERS."""
    attempt: int
    """How many times this run was restarted; grows with each restart."""
    launch_id: str | None
    """The same on all processes of a job and over its restarts; None where nobody gave one."""
    restarts: bool
    """Somebody starts this run again when it leaves with a code that asks for it."""
    beat_fd: int | None
    """A pipe's write end: a byte a second says that this process is not frozen."""


@dataclass(frozen=True)
class _Found:
    """What a launcher's own variables say, and by which names."""

    launcher: str
    count: str = NUM_PROCESSES
    rank: str = PROCESS_ID
    coordinator: str = ""
    hosts: tuple[str, ...] = ()
    several_hosts: bool = False


def find(environ: Mapping[str, str]) -> Launch | None:
    """The place of this process among several; None for a run of one process.

    Raises:
      ConfigError: something is missing, or cannot be.
    """
    # mpirun starts its daemons by srun where it runs in a SLURM job: what is nearer to this process comes first.
    found = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ) or _Found("variables")
    count_from = NUM_PROCESSES if environ.get(NUM_PROCESSES) else found.count
    id_from = PROCESS_ID if environ.get(PROCESS_ID) else found.rank
    coordinator = environ.get(COORDINATOR) or found.coordinator
    if environ.get(count_from) == "1" and (found.launcher != "variables" or not coordinator):
        return None
    values = {COORDINATOR: coordinator, NUM_PROCESSES: environ.get(count_from), PROCESS_ID: environ.get(id_from)}
    missing = [name for name in REQUIRED if not values[name]]
    if found.launcher == "variables" and len(missing) == len(REQUIRED):
        return None
    if missing:
        raise ConfigError(_what_is_missing(found.launcher, missing))
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"{COORDINATOR}={coordinator} has no port: write host:port, such as host-0:29500, with the host of process 0."
        )
    host = host.strip("[]")
    count, rank = _whole_number(environ, count_from, at_least=1), _whole_number(environ, id_from, at_least=0)
    if rank >= count:
        raise ConfigError(f"{id_from}={rank} is not below {count_from}={count}: processes are numbered from 0 to {count - 1}.")
    if found.several_hosts and is_loopback(host):
        raise ConfigError(
            f"{COORDINATOR}={coordinator} means another machine on each host, and {LAUNCHERS[found.launcher]} started this run "
            f"on several: name the host of process 0 as all can reach it."
        )
    limit_s = _whole_number(environ, START_TIMEOUT_S, 1) if environ.get(START_TIMEOUT_S) else DEFAULT_START_TIMEOUT_S
    port_from = COORDINATOR if environ.get(COORDINATOR) else "the SLURM job's number"
    hosts = found.hosts if len(found.hosts) == count else ()
    if count == 1:
        return None
    return Launch(found.launcher, host, int(port), count, rank, limit_s, port_from, id_from, count_from, hosts)


def place(environ: Mapping[str, str]) -> Place:
    """What launch this process belongs to, alone or not.

    Raises:
      ConfigError: JAXLLM_ATTEMPT or JAXLLM_BEAT_FD is no number, JAXLLM_RESTARTS neither yes nor no.
    """
    found = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ)
    given = any(environ.get(name) for name in REQUIRED)
    attempt = _whole_number(environ, ATTEMPT, 0) if environ.get(ATTEMPT) else 0
    queued_again = environ.get("SLURM_RESTART_COUNT", "")
    if queued_again.isdecimal():
        attempt += int(queued_again) * (NESTED if environ.get(ATTEMPT) else 1)
    restarts = environ.get(RESTARTS) or "no"
    if restarts not in ("yes", "no"):
        raise ConfigError(f"{RESTARTS}={restarts} is not valid: write yes where somebody restarts this run, or leave it out.")
    return Place(
        found.launcher if found else "variables" if given else "alone",
        attempt,
        environ.get(LAUNCH_ID) or environ.get("SLURM_JOB_ID") or None,
        restarts == "yes",
        _whole_number(environ, BEAT_FD, 0) if environ.get(BEAT_FD) else None,
    )


def gpus_asked(environ: Mapping[str, str]) -> int | None:
    """How many GPUs the launcher gave to this step on this host; None where it does not say."""
    given = environ.get("SLURM_GPUS_ON_NODE", "") if environ.get("SLURM_STEP_ID") else ""
    return int(given) if given.isdecimal() else None


def idle_hosts(environ: Mapping[str, str]) -> int:
    """How many hosts of a SLURM job a run would leave idle that was not started by srun: it is one process, here."""
    if environ.get("SLURM_STEP_ID") or not environ.get("SLURM_JOB_ID") or place(environ).launcher != "alone":
        return 0
    hosts = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    return int(hosts) - 1 if hosts.isdecimal() else 0


def hosts_of(node_list: str) -> list[str]:
    """The hosts of SLURM's short form in its order: h[1-3,7],gpu-[001-004]x are h1 h2 h3 h7 gpu-001x and so on.

    Raises:
      ConfigError: it is none.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", node_list)
    try:
        if not parts or ",".join(parts) != node_list:
            raise ValueError
        return [host for part in parts for host in _expanded(part)]
    except ValueError:
        raise ConfigError(f"The SLURM node list {node_list} cannot be read: set {COORDINATOR}=host:port instead.") from None


def is_loopback(host: str) -> bool:
    """Whether a name or an address means the same machine wherever it is said, to look at: nothing is resolved."""
    if host == "localhost" or host.endswith(".localhost") or host == "ip6-localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _expanded(part: str) -> Iterator[str]:
    """Each bracket's numbers in turn, the last fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, after = rest.partition("]")
    for span in numbers.split(","):
        first, dash, last = span.partition("-")
        # Leading zeros are part of the name.
        for number in range(int(first), int(last if dash else first) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(first)}d}{end}"


def _open_mpi(environ: Mapping[str, str]) -> _Found | None:
    size, here = environ.get("OMPI_COMM_WORLD_SIZE"), environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if not size or not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    return _Found("open mpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", several_hosts=bool(here) and here != size)


def _slurm(environ: Mapping[str, str]) -> _Found | None:
    """Of a step that srun started. A batch script has SLURM_PROCID too, but no step."""
    if not environ.get("SLURM_STEP_ID") or not environ.get("SLURM_PROCID"):
        return None
    count = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if environ.get(name)), NUM_PROCESSES)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    job, step = environ.get("SLURM_JOB_ID", ""), environ["SLURM_STEP_ID"]
    # A step of one process needs no coordinator, and may run where its hosts cannot be read.
    if environ.get(count) == "1" or environ.get(NUM_PROCESSES) == "1":
        return _Found("slurm", count, "SLURM_PROCID")
    hosts = tuple(hosts_of(nodes)) if nodes else ()
    # Steps that are not numbered, such as srun --pty's, have no small number.
    offset = int(job) + (int(step) * PORTS_APART if step.isdecimal() else 0) if job.isdecimal() else None
    coordinator = f"{hosts[0]}:{FIRST_PORT + offset % NUM_PORTS}" if hosts and offset is not None else ""
    return _Found("slurm", count, "SLURM_PROCID", coordinator, hosts, len(hosts) > 1)


def _kubernetes(environ: Mapping[str, str]) -> _Found | None:
    return _Found("kubernetes", rank="JOB_COMPLETION_INDEX") if environ.get("JOB_COMPLETION_INDEX") else None


def _what_is_missing(launcher: str, missing: list[str]) -> str:
    names, one = " and ".join(missing), len(missing) == 1
    if launcher == "open mpi":
        return (
            f"Open MPI does not say where process 0 is: start with launch/mpi.sh, or give mpirun "
            f"-x {COORDINATOR}=host:port with the first host and a free port of it."
        )
    if launcher == "kubernetes":
        return (
            f"Kubernetes numbers this pod (JOB_COMPLETION_INDEX is set), but {names} {'is' if one else 'are'} not set: give "
            f"{'it' if one else 'them'} in the manifest as launch/k8s-jobset.yaml does, or {NUM_PROCESSES}=1 for a run of its "
            f"own in each pod."
        )
    if launcher == "slurm":
        return f"SLURM does not say enough of this step: set {names} for each process."
    given = [name for name in REQUIRED if name not in missing]
    return (
        f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {names}: "
        f"set all of {', '.join(REQUIRED)} for each process, or none."
    )


def _whole_number(environ: Mapping[str, str], name: str, at_least: int) -> int:
    text = environ[name]
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name}={text} is not valid: it should be a whole number of at least {at_least}.")
    return int(text)
