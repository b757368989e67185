"""Reads the rank, world size and coordinator of this process from the environment that its launcher sets. No JAX, no network.

jaxllm's own variables work with any launcher, and take precedence over the launcher's:

    JAXLLM_COORDINATOR      host:port of process 0, the same everywhere
    JAXLLM_NUM_PROCESSES    number of processes; 1: this process is a run of its own, whatever the launcher sets
    JAXLLM_PROCESS_ID       rank of this process, from 0
    JAXLLM_START_TIMEOUT_S  optional: seconds to wait for the others; default 300
    JAXLLM_SECRET           optional: the same on all processes; those that lack it are turned away (authentication.py)
    JAXLLM_SECRET_FILE      instead: a file of mode 600 with it
    JAXLLM_BIND             optional: the address or name of its host at which process 0 listens; 0.0.0.0: all addresses

    SLURM       srun gives everything; the coordinator is the step's first host, its port is derived from the job's number
    Open MPI    mpirun (4 and 5) gives rank and size; JAXLLM_COORDINATOR must be set
    Kubernetes  an indexed Job gives the rank; JAXLLM_COORDINATOR and JAXLLM_NUM_PROCESSES must be set

A process may drive all GPUs of its host or some of them: the rendezvous finds out how many processes each host has.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxllm.config.errors import ConfigError
from jaxllm.runtime.authentication import read_secret
from jaxllm.runtime.socket_messages import MOST_PROCESSES
from jaxllm.runtime.supervisor import MOST_ATTEMPTS, NESTED
from jaxllm.untrusted import INT32, INT64, LONGEST_TEXT, RefusedInput, shown, whole_number

COORDINATOR, NUM_PROCESSES, PROCESS_ID = REQUIRED = ("JAXLLM_COORDINATOR", "JAXLLM_NUM_PROCESSES", "JAXLLM_PROCESS_ID")
START_TIMEOUT_S, BIND = "JAXLLM_START_TIMEOUT_S", "JAXLLM_BIND"
DEFAULT_START_TIMEOUT_S = 300
RESTARTS, ATTEMPT, LAUNCH_ID, BEAT_FD = ("JAXLLM_RESTARTS", "JAXLLM_ATTEMPT", "JAXLLM_LAUNCH_ID", "JAXLLM_BEAT_FD")

FIRST_PORT, NUM_PORTS = 61440, 4096
"""Range of ports derived from a job's number: above those that Linux gives to outgoing connections (32768 to 60999)."""
PORTS_APART = 509
"""Distance between the ports of two steps of one job. A prime, so that a step and a neighbour job's step rarely collide."""

"""Limit for the name of a launch."""
MOST_BRACKETS = 8
"""Limit for one name in a node list; SLURM's own limit is five dims."""

LAUNCHERS = {"variables": "JAXLLM_*", "slurm": "SLURM", "open mpi": "Open MPI", "kubernetes": "Kubernetes"}
"""Names for users."""


@dataclass(frozen=True)
class Launch:
    """Rank, world size and coordinator of this process, one of several."""

    launcher: str
    """A key of LAUNCHERS."""
    host: str
    """Host of process 0, by a name that all processes can reach."""
    port: int
    num_processes: int
    process_id: int
    start_timeout_s: int = DEFAULT_START_TIMEOUT_S
    port_from: str = COORDINATOR
    """Source of the port, for messages."""
    id_from: str = PROCESS_ID
    count_from: str = NUM_PROCESSES
    hosts: tuple[str, ...] = ()
    """Host of each rank, where the launcher gives them and each host has one process."""
    bind: str = ""
    """Where process 0 shall listen; empty: not said."""
    secret: bytes | None = field(default=None, repr=False)
    """What proves that a process belongs to this run; None: nothing does."""

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


@dataclass(frozen=True)
class LaunchInfo:
    """The launch that this process belongs to."""

    launcher: str
    """"alone", or a key of LAUNCHERS."""
    attempt: int
    """Number of restarts of this run; it grows with each restart."""
    launch_id: str | None
    """The same on all processes of a job and over its restarts; None where the launcher gives none."""
    restarts: bool
    """A supervisor restarts this run when it exits with a code that asks for it."""
    beat_fd: int | None
    """Write end of a pipe: one byte a second shows that this process is not frozen."""


@dataclass(frozen=True)
class _LauncherVariables:
    """Values of a launcher's own variables, and the names of those to read."""

    launcher: str
    count: str = NUM_PROCESSES
    rank: str = PROCESS_ID
    coordinator: str = ""
    hosts: tuple[str, ...] = ()
    several_hosts: bool = False


def find(environ: Mapping[str, str]) -> Launch | None:
    """Rank, world size and coordinator of this process; None for a run of one process.

    Raises:
      ConfigError: a variable is missing or not valid, or the file of the secret is not.
    """
    # mpirun starts its daemons by srun inside a SLURM job: the launcher nearer to this process comes first.
    found = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ) or _LauncherVariables("variables")
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
        raise ConfigError(_missing_sentence(found.launcher, missing))
    host, port = _address(coordinator)
    count, rank = _whole_number(environ, count_from, 1, MOST_PROCESSES), _whole_number(environ, id_from, 0)
    if rank >= count:
        raise ConfigError(f"{id_from}={rank} is not below {count_from}={count}: processes are numbered from 0 to {count - 1}.")
    if found.several_hosts and is_loopback(host):
        raise ConfigError(
            f"{COORDINATOR}={shown(coordinator)} means a different machine on each host, and {LAUNCHERS[found.launcher]} "
            f"started this run on several: give the host of process 0 by a name that all can reach."
        )
    limit_s = _whole_number(environ, START_TIMEOUT_S, 1) if environ.get(START_TIMEOUT_S) else DEFAULT_START_TIMEOUT_S
    port_from = COORDINATOR if environ.get(COORDINATOR) else "the SLURM job's number"
    hosts = found.hosts if len(found.hosts) == count else ()
    if count == 1:
        return None
    bind, secret = environ.get(BIND, ""), read_secret(environ)
    return Launch(found.launcher, host, port, count, rank, limit_s, port_from, id_from, count_from, hosts, bind, secret)


def launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """The launch that this process belongs to, alone or not.

    Raises:
      ConfigError: JAXLLM_ATTEMPT or JAXLLM_BEAT_FD is not a number, JAXLLM_RESTARTS is neither yes nor no, or JAXLLM_LAUNCH_ID
        is too long.
    """
    found = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ)
    given = any(environ.get(name) for name in REQUIRED)
    attempt = _whole_number(environ, ATTEMPT, 0, MOST_ATTEMPTS) if environ.get(ATTEMPT) else 0
    attempt += (_number_or_none(environ, "SLURM_RESTART_COUNT") or 0) * (NESTED if environ.get(ATTEMPT) else 1)
    restarts = environ.get(RESTARTS) or "no"
    if restarts not in ("yes", "no"):
        raise ConfigError(
            f"{RESTARTS}={shown(restarts)} is not valid: write yes where a supervisor restarts this run, or unset it."
        )
    launch_id = environ.get(LAUNCH_ID) or environ.get("SLURM_JOB_ID") or None
    if launch_id and len(launch_id) > LONGEST_TEXT:
        raise ConfigError(f"{LAUNCH_ID}={shown(launch_id)} is not valid: give a name of at most {LONGEST_TEXT:,} characters.")
    return LaunchInfo(
        found.launcher if found else "variables" if given else "alone",
        attempt,
        launch_id,
        restarts == "yes",
        _whole_number(environ, BEAT_FD, 0) if environ.get(BEAT_FD) else None,
    )


def gpus_asked(environ: Mapping[str, str]) -> int | None:
    """Number of GPUs that the launcher gave to this step on this host; None where it does not tell."""
    return _number_or_none(environ, "SLURM_GPUS_ON_NODE") if environ.get("SLURM_STEP_ID") else None


def idle_hosts(environ: Mapping[str, str]) -> int:
    """Number of hosts of a SLURM job that stay idle because srun did not start this run: it is one process, on this host."""
    if environ.get("SLURM_STEP_ID") or not environ.get("SLURM_JOB_ID") or launch_info(environ).launcher != "alone":
        return 0
    hosts = _number_or_none(environ, "SLURM_JOB_NUM_NODES" if environ.get("SLURM_JOB_NUM_NODES") else "SLURM_NNODES")
    return 0 if hosts is None else hosts - 1


def expand_node_list(node_list: str) -> list[str]:
    """Hosts of SLURM's short form, in its order: h[1-3,7],gpu-[001-004]x are h1 h2 h3 h7 gpu-001x and so on.

    Raises:
      ConfigError: the text is not a node list, or has more than MOST_PROCESSES hosts.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", node_list)
    try:
        if not parts or ",".join(parts) != node_list or any(part.count("[") > MOST_BRACKETS for part in parts):
            raise ValueError
        hosts = list(itertools.islice((host for part in parts for host in _expand(part)), MOST_PROCESSES + 1))
    except ValueError:
        raise ConfigError(
            f"The SLURM node list {shown(node_list)} cannot be read: set {COORDINATOR}=host:port instead."
        ) from None
    if len(hosts) > MOST_PROCESSES:
        raise ConfigError(
            f"The SLURM node list {shown(node_list)} has more than {MOST_PROCESSES:,} hosts: correct it, or set "
            f"{COORDINATOR}=host:port instead."
        )
    return hosts


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address means a different machine on each host, judged by its text: nothing is resolved."""
    if host == "localhost" or host.endswith(".localhost") or host == "ip6-localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _expand(part: str) -> Iterator[str]:
    """Yields each number in the brackets in turn; the last bracket varies fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, after = rest.partition("]")
    for span in numbers.split(","):
        first, dash, last = span.partition("-")
        least = whole_number(first, 0, INT64)
        # Leading zeros are part of the name. A span without a number would take time and give no host to count.
        for number in range(least, whole_number(last if dash else first, least, INT64) + 1):
            for end in _expand(after):
                yield f"{before}{number:0{len(first)}d}{end}"


def _open_mpi(environ: Mapping[str, str]) -> _LauncherVariables | None:
    size, here = environ.get("OMPI_COMM_WORLD_SIZE"), environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if not size or not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    several_hosts = bool(here) and here != size
    return _LauncherVariables("open mpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", several_hosts=several_hosts)


def _slurm(environ: Mapping[str, str]) -> _LauncherVariables | None:
    """Variables of a step that srun started. A batch script has SLURM_PROCID too, but no step."""
    if not environ.get("SLURM_STEP_ID") or not environ.get("SLURM_PROCID"):
        return None
    count = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if environ.get(name)), NUM_PROCESSES)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    job, step = _number_or_none(environ, "SLURM_JOB_ID", INT64), _number_or_none(environ, "SLURM_STEP_ID", INT64)
    # A step of one process needs no coordinator, and may run where its hosts cannot be read.
    if environ.get(count) == "1" or environ.get(NUM_PROCESSES) == "1":
        return _LauncherVariables("slurm", count, "SLURM_PROCID")
    try:
        hosts = tuple(expand_node_list(nodes)) if nodes else ()
    except ConfigError:
        if not environ.get(COORDINATOR):
            raise
        hosts = ()
    # Steps without a number, such as srun --pty's, have no small integer.
    offset = None if job is None else job + (step or 0) * PORTS_APART
    coordinator = f"{hosts[0]}:{FIRST_PORT + offset % NUM_PORTS}" if hosts and offset is not None else ""
    return _LauncherVariables("slurm", count, "SLURM_PROCID", coordinator, hosts, len(hosts) > 1)


def _kubernetes(environ: Mapping[str, str]) -> _LauncherVariables | None:
    return _LauncherVariables("kubernetes", rank="JOB_COMPLETION_INDEX") if environ.get("JOB_COMPLETION_INDEX") else None


def _missing_sentence(launcher: str, missing: list[str]) -> str:
    names, one = " and ".join(missing), len(missing) == 1
    if launcher == "open mpi":
        return (
            f"Open MPI does not tell where process 0 is: start with launch/mpi.sh, or give mpirun "
            f"-x {COORDINATOR}=host:port with the first host and a free port of it."
        )
    if launcher == "kubernetes":
        return (
            f"Kubernetes numbers this pod (JOB_COMPLETION_INDEX is set), but {names} {'is' if one else 'are'} not set: give "
            f"{'it' if one else 'them'} in the manifest as launch/k8s-jobset.yaml does, or {NUM_PROCESSES}=1 for a run of its "
            f"own in each pod."
        )
    if launcher == "slurm":
        return f"SLURM's variables of this step are incomplete: set {names} for each process."
    given = [name for name in REQUIRED if name not in missing]
    return (
        f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {names}: "
        f"set all of {', '.join(REQUIRED)} for each process, or none."
    )


def _address(coordinator: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        number = whole_number(port, 1, 2**16 - 1)
    except RefusedInput:
        number = 0
    if not host or not number:
        raise ConfigError(
            f"{COORDINATOR}={shown(coordinator)} has no port: write host:port, such as host-0:29500, with the host of "
            f"process 0."
        )
    try:
        # As the resolver does it: a part of a name has up to 63 characters.
        is_name = len(host) < 256 and host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"{COORDINATOR}={shown(coordinator)} names no host: write host:port, such as host-0:29500.")
    return host, number


def _whole_number(environ: Mapping[str, str], name: str, at_least: int, at_most: int = INT32) -> int:
    try:
        return whole_number(environ[name], at_least, at_most)
    except RefusedInput as reason:
        raise ConfigError(f"{name}={shown(environ[name])} is not valid: {reason}.") from None


def _number_or_none(environ: Mapping[str, str], name: str, at_most: int = INT32) -> int | None:
    """A number that a launcher gives for information: without it there is less to say."""
    try:
        return whole_number(environ.get(name, ""), 0, at_most)
    except RefusedInput:
        return None
