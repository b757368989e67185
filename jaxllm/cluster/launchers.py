"""Reads the rank, world size and coordinator of this process from the environment that its launcher sets. No JAX, no network.

jaxllm's own variables (docs/launch.md has the others) work with any launcher, and take precedence over the launcher's:

    JAXLLM_COORDINATOR      host:port of process 0, the same everywhere
    JAXLLM_NUM_PROCESSES    number of processes; 1: this process is a run of its own, whatever the launcher sets
    JAXLLM_PROCESS_ID       rank of this process, from 0
    JAXLLM_HOSTS            optional: host of each process by rank, divided by commas, for launch.least_hosts

Launchers set variables of their own (launcher_table.py): rank and number of processes, and some the host of process 0. If
several launchers started this process, one inside the other, the nearest counts: the first in the table. Variables that are
meant for JAX come first; JAX_COORDINATOR_ADDRESS serves with any launcher, as it does for jax.distributed.initialize. If the
nearest does not give the host of process 0, another that gives the same rank and number may: SLURM's plugins set MPI's
variables too. A port that is not given is derived from a text that all processes of the run have.

A process that no launcher claims is alone, unless any other variable says that it is one of several: that is refused.

A process may drive all GPUs of its host or some of them: the rendezvous finds out how many processes each host has.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxllm.cluster import launcher_table
from jaxllm.cluster.exit_codes import MOST_ATTEMPTS, NESTED
from jaxllm.cluster.launcher_table import COORDINATOR, LAUNCHERS, NUM_PROCESSES, PROCESS_ID, REQUIRED, number_or_none
from jaxllm.cluster.socket_messages import MOST_PROCESSES, read_secret
from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import INT32, INT64, LONGEST_TEXT, RefusedInput, shown, whole_number

# -------------------------------------------------------------------------------------------------- SLURM's list of hosts

MOST_BRACKETS = 8
"""Limit for one name in a node list; SLURM's own limit is five dims."""


def expand_node_list(node_list: str) -> list[str]:
    """Hosts of SLURM's short form, in its order: h[1-3,7],gpu-[001-004]x are h1 h2 h3 h7 gpu-001x and so on. ConfigError if the
    text is not one, or has more than MOST_PROCESSES hosts."""
    parts, hosts, why = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", node_list), [], ""
    try:
        if not parts or ",".join(parts) != node_list or any(part.count("[") > MOST_BRACKETS for part in parts):
            raise ValueError
        hosts = list(itertools.islice((host for part in parts for host in _expand(part)), MOST_PROCESSES + 1))
    except ValueError:
        why = "cannot be read"
    if why or len(hosts) > MOST_PROCESSES:
        why = why or f"has more than {MOST_PROCESSES:,} hosts"
        raise ConfigError(f"The SLURM node list {shown(node_list)} {why}: set {COORDINATOR}=host:port instead.")
    return hosts


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


# -------------------------------------------------------------------------------------------------------------- launchers

HOSTS, START_TIMEOUT_S, BIND = "JAXLLM_HOSTS", "JAXLLM_START_TIMEOUT_S", "JAXLLM_BIND"
DEFAULT_START_TIMEOUT_S = 300
RESTARTS, ATTEMPT, LAUNCH_ID, BEAT_FD = ("JAXLLM_RESTARTS", "JAXLLM_ATTEMPT", "JAXLLM_LAUNCH_ID", "JAXLLM_BEAT_FD")

FIRST_PORT, NUM_PORTS = 61440, 4096
"""Range of ports derived from a job's number: above those that Linux gives to outgoing connections (32768 to 60999)."""
PORTS_APART = 509
"""Distance between the ports of two steps of one job. A prime, so that a step and a neighbour job's step rarely collide."""


@dataclass(frozen=True)
class Launch:
    """Rank, world size and coordinator of this process, one of several."""

    launcher: str
    """A key of LAUNCHERS, or "variables": JAXLLM_* alone."""
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
    """Host of each rank; empty where the launcher does not give them, or gives hosts of several processes."""
    bind: str = ""
    """Where process 0 shall listen; empty: not said."""
    secret: bytes | None = field(default=None, repr=False)
    """What proves that a process belongs to this run; None: nothing does."""

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def led_by(self, rank: int) -> Launch:
        """The launch with this process in place of process 0, at an address of its own. Needs `hosts`, but for process 0."""
        if rank == 0:
            return self
        # Each process of a host has a port of its own. The launcher's choice of `bind` is an address of its process 0.
        port = self.port - self.hosts[:rank].count(self.hosts[rank])
        return replace(self, host=self.hosts[rank], port=port, bind="")


@dataclass(frozen=True)
class LaunchInfo:
    """The launch that this process belongs to."""

    launcher: str
    """"alone", "variables", or a key of LAUNCHERS."""
    attempt: int
    """Number of restarts of this run; it grows with each restart."""
    launch_id: str | None
    """The same on all processes of a job and over its restarts; None where the launcher gives none."""
    restarts: bool
    """A supervisor restarts this run when it exits with a code that asks for it."""
    beat_fd: int | None
    """Write end of a pipe: one byte a second shows that this process is not frozen."""


class _Coordinator(NamedTuple):
    """Address of process 0, and where it comes from."""

    text: str = ""
    """host:port; '' if nothing gives it."""
    name: str = COORDINATOR
    """A variable, for messages."""
    port_from: str = COORDINATOR


def find(environ: Mapping[str, str]) -> Launch | None:
    """Rank, world size and coordinator of this process; None for a run of one process.

    Raises:
      ConfigError: a variable or the file of the secret is missing or not valid, or a variable says that this process is one of
        several and no launcher is known.
    """
    key = _nearest(environ)
    launcher = LAUNCHERS.get(key)
    count_from = NUM_PROCESSES if environ.get(NUM_PROCESSES) or not launcher else launcher.count_name(environ)
    id_from = PROCESS_ID if environ.get(PROCESS_ID) or not launcher else launcher.rank
    # A run of one process needs no coordinator, and may be where its hosts cannot be read.
    if environ.get(count_from) == "1" and (launcher or not environ.get(COORDINATOR)):
        return _alone(environ, key)
    coordinator = _coordinator(environ, key)
    values = {COORDINATOR: coordinator.text, NUM_PROCESSES: environ.get(count_from), PROCESS_ID: environ.get(id_from)}
    missing = [name for name in REQUIRED if not values[name]]
    if not launcher and not any(environ.get(name) for name in REQUIRED):
        return _alone(environ, key)
    if missing:
        raise ConfigError(_missing_sentence(key, missing))
    host, port = _address(coordinator)
    count, rank = _whole_number(environ, count_from, 1, MOST_PROCESSES), _whole_number(environ, id_from, 0)
    if rank >= count:
        raise ConfigError(f"{id_from}={rank} is not below {count_from}={count}: processes are numbered from 0 to {count - 1}.")
    hosts = _hosts(environ, key)
    here = environ.get(launcher.here) if launcher else None
    if launcher and is_loopback(host) and (len(hosts) > 1 or (here and here != environ.get(launcher.count_name(environ)))):
        raise ConfigError(
            f"{coordinator.name}={shown(coordinator.text)} means a different machine on each host, and {launcher.name} "
            f"started this run on several: give the host of process 0 by a name that all can reach."
        )
    limit_s = _whole_number(environ, START_TIMEOUT_S, 1) if environ.get(START_TIMEOUT_S) else DEFAULT_START_TIMEOUT_S
    if count == 1:
        return None
    by_rank = _given_hosts(environ, count) or (hosts if len(hosts) == count else ())
    bind, secret = environ.get(BIND, ""), read_secret(environ)
    if bind and not _is_name(bind):
        raise not_an_address(bind)
    return Launch(key, host, port, count, rank, limit_s, coordinator.port_from, id_from, count_from, by_rank, bind, secret)


def launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """The launch that this process belongs to, alone or not. ConfigError if a variable of it is not valid."""
    key = _nearest(environ)
    given = any(environ.get(name) for name in REQUIRED)
    attempt = _whole_number(environ, ATTEMPT, 0, MOST_ATTEMPTS) if environ.get(ATTEMPT) else 0
    attempt += (number_or_none(environ, "SLURM_RESTART_COUNT") or 0) * (NESTED if environ.get(ATTEMPT) else 1)
    restarts = environ.get(RESTARTS) or "no"
    if restarts not in ("yes", "no"):
        raise ConfigError(
            f"{RESTARTS}={shown(restarts)} is not valid: write yes where a supervisor restarts this run, or unset it."
        )
    launch_id = environ.get(LAUNCH_ID) or environ.get("SLURM_JOB_ID") or None
    if launch_id and len(launch_id) > LONGEST_TEXT:
        raise ConfigError(f"{LAUNCH_ID}={shown(launch_id)} is not valid: give a name of at most {LONGEST_TEXT:,} characters.")
    beat_fd = _whole_number(environ, BEAT_FD, 0) if environ.get(BEAT_FD) else None
    return LaunchInfo("alone" if key == "variables" and not given else key, attempt, launch_id, restarts == "yes", beat_fd)


def gpus_asked(environ: Mapping[str, str]) -> int | None:
    """Number of GPUs that the launcher gave to this step on this host; None where it does not tell."""
    return number_or_none(environ, "SLURM_GPUS_ON_NODE") if environ.get("SLURM_STEP_ID") else None


def idle_hosts(environ: Mapping[str, str]) -> int:
    """Number of hosts of a SLURM job that stay idle because srun did not start this run: it is one process, on this host."""
    if environ.get("SLURM_STEP_ID") or not environ.get("SLURM_JOB_ID") or launch_info(environ).launcher != "alone":
        return 0
    hosts = number_or_none(environ, "SLURM_JOB_NUM_NODES" if environ.get("SLURM_JOB_NUM_NODES") else "SLURM_NNODES")
    return 0 if hosts is None else hosts - 1


def join_address(host: str, port: int | str) -> str:
    """host:port; an IPv6 address, with brackets or without, gets them."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address means a different machine on each host, judged by its text: nothing is resolved."""
    if host == "localhost" or host.endswith(".localhost") or host == "ip6-localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _nearest(environ: Mapping[str, str]) -> str:
    """Key of the launcher that started this process, "variables" if none is known."""
    return next((key for key, launcher in LAUNCHERS.items() if launcher.started(environ)), "variables")


def _alone(environ: Mapping[str, str], key: str) -> None:
    """Raises ConfigError if a variable says that this process is one of several, and the user does not say that it is alone."""
    launcher = LAUNCHERS.get(key)
    sign = None if environ.get(NUM_PROCESSES) else launcher_table.first_sign(environ, key if launcher else "")
    if sign is None:
        return
    name, by = sign
    unclear = "its rank, their number or the host of process 0 is unknown"
    if launcher:
        unclear = f"{launcher.count_name(environ)}=1 that it is alone"
    raise ConfigError(
        f"{name}={shown(environ[name])} ({by}) says that this process is one of several, but {unclear}: set "
        f"{', '.join(REQUIRED)} for each process, or {NUM_PROCESSES}=1 for a run of its own."
    )


def _coordinator(environ: Mapping[str, str], key: str) -> _Coordinator:
    """By the user, by JAX's variable, by the launcher, or by another that gives the same rank and number."""
    if given := environ.get(COORDINATOR):
        return _Coordinator(given)
    seen = _rank_and_count(environ, key)
    same = [other for other in LAUNCHERS if other != key and seen and _rank_and_count(environ, other) == seen]
    return next(filter(None, (_own_coordinator(environ, one) for one in ("jax", key, *same))), _Coordinator())


def _rank_and_count(environ: Mapping[str, str], key: str) -> tuple[str, str] | None:
    launcher = LAUNCHERS.get(key)
    if launcher is None or not launcher.started(environ):
        return None
    rank, count = environ.get(launcher.rank), environ.get(launcher.count_name(environ))
    return (rank, count) if rank and count else None


def _own_coordinator(environ: Mapping[str, str], key: str) -> _Coordinator | None:
    launcher = LAUNCHERS.get(key)
    if launcher is None:
        return None
    if address := environ.get(launcher.address):
        port = environ.get(launcher.port)
        has_port = "]:" in address or address.count(":") == 1
        return _Coordinator(
            address if has_port or not port else join_address(address, port), launcher.address, launcher.address
        )
    # Most texts of a job are no numbers, and a port that is taken (MASTER_PORT) must not be met again.
    number = None
    if text := environ.get(launcher.job, ""):
        number = PORTS_APART + (number_or_none(environ, launcher.job) or zlib.crc32(text.encode(errors="surrogateescape")))
    port_from = f"{launcher.job}, from which it is derived,"
    if key == "slurm":
        job, step = number_or_none(environ, "SLURM_JOB_ID", INT64), number_or_none(environ, "SLURM_STEP_ID", INT64)
        # Steps without a number, such as srun --pty's, have no small integer.
        number, port_from = None if job is None else job + (step or 0) * PORTS_APART, "the SLURM job's number"
    hosts = _hosts(environ, key)
    if not hosts or number is None:
        return None
    return _Coordinator(join_address(hosts[0], FIRST_PORT + number % NUM_PORTS), launcher.hosts, port_from)


def _hosts(environ: Mapping[str, str], key: str) -> tuple[str, ...]:
    """Hosts that the launcher gives, that of process 0 first. ConfigError if a SLURM node list cannot be read, and no
    coordinator is given."""
    launcher = LAUNCHERS.get(key)
    if launcher is None:
        return ()
    names = environ.get(launcher.hosts) or environ.get(launcher.hosts_else) or ""
    if key != "slurm":
        first = launcher_table.host_in_files(environ, launcher.host_files)
        return tuple(names.replace(",", " ").split()) or ((first,) if first else ())
    try:
        return tuple(expand_node_list(names)) if names else ()
    except ConfigError:
        if environ.get(COORDINATOR) or environ.get(LAUNCHERS["jax"].address):
            return ()
        raise


def _missing_sentence(key: str, missing: list[str]) -> str:
    names, one = " and ".join(missing), len(missing) == 1
    if key == "kubernetes":
        return (
            f"Kubernetes numbers this pod (JOB_COMPLETION_INDEX is set), but {names} {'is' if one else 'are'} not set: give "
            f"{'it' if one else 'them'} in the manifest as launch/k8s-jobset.yaml does, or {NUM_PROCESSES}=1 for a run of its "
            f"own in each pod."
        )
    if key == "slurm" or (key in LAUNCHERS and missing != [COORDINATOR]):
        return f"{LAUNCHERS[key].name}'s variables of this process are incomplete: set {names} for each process."
    if launcher := LAUNCHERS.get(key):
        return (
            f"{launcher.name} does not tell where process 0 is: {launcher.advice} with the first host and a free port of it, "
            f"or {NUM_PROCESSES}=1 for a run of its own in each process."
        )
    given = [name for name in REQUIRED if name not in missing]
    return (
        f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {names}: "
        f"set all of {', '.join(REQUIRED)} for each process, or none."
    )


def _address(coordinator: _Coordinator) -> tuple[str, int]:
    """Host and port."""
    host, _, port = coordinator.text.rpartition(":")
    host = host.strip("[]")
    try:
        number = whole_number(port, 1, 2**16 - 1)
    except RefusedInput:
        number = 0
    if not host or not number:
        raise ConfigError(
            f"{coordinator.name}={shown(coordinator.text)} has no port: write host:port, such as host-0:29500, with the host "
            f"of process 0."
        )
    if not _is_name(host):
        raise ConfigError(f"{coordinator.name}={shown(coordinator.text)} names no host: write host:port, such as host-0:29500.")
    return host, number


def not_an_address(bind: str) -> ConfigError:
    return ConfigError(
        f"{BIND}={shown(bind)} is not one address of this host: give an address or a name of process 0's host, or 0.0.0.0 for "
        f"all of its addresses."
    )


def _given_hosts(environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    given = environ.get(HOSTS)
    if not given:
        return ()
    hosts = tuple(host.strip() for host in given.split(",", count))
    if len(hosts) != count or not all(map(_is_name, hosts)):
        raise ConfigError(f"{HOSTS}={shown(given)} is not valid: give {count} hosts, that of each process, as h0,h1,h2.")
    return hosts


def _is_name(host: str) -> bool:
    try:
        # As the resolver does it: a part of a name has up to 63 characters.
        return len(host) < 256 and host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:
        return False


def _whole_number(environ: Mapping[str, str], name: str, at_least: int, at_most: int = INT32) -> int:
    try:
        return whole_number(environ[name], at_least, at_most)
    except RefusedInput as reason:
        raise ConfigError(f"{name}={shown(environ[name])} is not valid: {reason}.") from None
