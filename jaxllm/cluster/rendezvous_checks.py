"""Checks of the rendezvous: whether processes fit together. Each returns one sentence for all of them, empty if all is well:
on arrival of one process `why_rejected`, once all have arrived `why_incompatible`, at the time limit `missing`.
"""

import ipaddress
import itertools
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from jaxllm.cluster.launchers import BIND, START_TIMEOUT_S, Launch, is_loopback, not_an_address
from jaxllm.cluster.socket_messages import MOST_PROCESSES, Name, Pid, Rank
from jaxllm.config.types import Switch
from jaxllm.untrusted import RefusedInput, Text, Whole, checked, shown

MOST_NAMED = 8
"""Maximum number of hosts or rank ranges in one sentence."""


@dataclass(frozen=True)
class ProcessInfo:
    """Description that a process sends of itself. A message has MAX_INFO_BYTES at most, and with it each list."""

    rank: Rank
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_PROCESSES)]
    """World size that its launcher gave it."""
    host: Name
    pid: Pid
    versions: dict[Name, Name]
    """Version of each package, for messages."""
    machine: Text
    """Identity of the host. Different hosts may share a name."""
    flags: list[Annotated[str, Field(strict=True)]]
    """XLA flags that change the compiled program."""
    launch_id: Text | None = None
    attempt: Whole = 0
    cpu: Switch = False
    """The run asks for the CPU."""
    gpus: list[Name] | None = None
    """UUIDs of the GPUs that this process sees, in CUDA's order; None: the driver could not be asked."""
    gpus_asked: Whole | None = None
    """GPUs that the launcher gave to this run on this host; None where it does not tell."""
    host_address: Name = ""
    """Address of the host's own name, resolved on that host; empty if it does not resolve."""
    proof: Name = ""
    """By what it proves to JAX's coordinator that it belongs to the run: the name of a variable; empty: by nothing."""

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"

    @property
    def title(self) -> str:
        return f"Process {self.rank} on {self.host}"


def parse_process_info(message: dict[str, Any], versions: Mapping[str, str]) -> ProcessInfo | None:
    """The description in a message; None if there is none. Other versions may describe themselves in another way: then it has
    what why_rejected needs.

    Args:
      versions: of process 0.
    """
    theirs = message.get("versions")
    if isinstance(theirs, dict) and theirs != versions:
        named = {name: version for name, version in theirs.items() if isinstance(version, str)}
        message = {key: message.get(key) for key in ("rank", "count", "host", "pid")} | {"versions": named}
        message |= {"machine": "", "flags": []}
    try:
        info = checked(message, ProcessInfo)
    except RefusedInput:
        return None
    return info if info.rank < info.count else None


def why_rejected(info: ProcessInfo, first: ProcessInfo, launch: Launch, duplicate: ProcessInfo | None) -> str:
    """Why a process cannot join process 0's run; empty if it can.

    Args:
      first: process 0.
      duplicate: the process that came earlier with the same rank and is still connected.
    """
    different = [name for name in first.versions if info.versions.get(name) != first.versions[name]]
    if different:
        have = " and ".join(f"{name} {info.versions.get(name, 'of another kind')}" for name in different)
        has = " and ".join(first.versions[name] for name in different)
        return f"{info.title} has {have}, {first} {has}: install the same on all hosts, and start all processes from there."
    if info.count != first.count:
        return (
            f"{info.title} was started as one of {info.count} processes, {first} as one of {first.count}: give all the "
            f"same {launch.count_from}, or give another run another port."
        )
    if duplicate is not None:
        return (
            f"Process {info.rank} was started twice, with process id {duplicate.pid} on {duplicate.host} and {info.pid} on "
            f"{info.host}: give each process its own {launch.id_from}."
        )
    if sorted(info.flags) != sorted(first.flags):
        odd = set(info.flags) ^ set(first.flags)
        only = [f"{shown(flag, 200)} only for {info.rank if flag in info.flags else first.rank}" for flag in odd]
        return (
            f"{info.title} has other XLA_FLAGS than {first} ({_some(sorted(only)) or 'some are given twice'}): export the same "
            f"on all hosts."
        )
    if info.proof != first.proof:
        return (
            f"{info.title} proves who it is to JAX by {info.proof or 'nothing'}, {first} by {first.proof or 'nothing'}: set "
            f"JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE for all processes, or for none."
        )
    return ""


def why_incompatible(infos: Sequence[ProcessInfo]) -> str:
    """Why processes that have all arrived cannot work together; empty if they can.

    Args:
      infos: by rank.
    """
    hosts, first = group_by_host(infos), infos[0]
    other = next((info for info in infos if info.cpu is not first.cpu), None)
    if other is not None:
        on_cpu, on_gpu = (first, other) if first.cpu else (other, first)
        return f"{on_cpu.title} runs on the CPU, but not {on_gpu}: give all the same run.cpu_devices and JAX_PLATFORMS."
    if not first.cpu and any(info.gpus is None for info in infos):
        return ""
    if not first.cpu:
        sentences = itertools.chain(map(_host_with_too_few, hosts), map(_cannot_share, hosts), [_uneven(infos)])
        if sentence := next(filter(None, sentences), ""):
            return sentence
    # If no host has a driver, JAX uses the CPU too.
    on_cpus = first.cpu or not first.gpus
    return _unreachable(infos) if on_cpus and len(hosts) > 1 else ""


def assign_gpus(infos: Sequence[ProcessInfo]) -> list[list[int] | None]:
    """Indices of the visible GPUs that each process shall drive, by rank; None: all.

    Processes of one host that see the same GPUs share them in rank order. If each sees its own, the launcher has assigned them.
    """
    result: list[list[int] | None] = [None] * len(infos)
    for on_host in group_by_host(infos):
        seen = on_host[0].gpus
        if len(on_host) == 1 or on_host[0].cpu or not seen or any(info.gpus != seen for info in on_host):
            continue
        each = len(seen) // len(on_host)
        for index, info in enumerate(on_host):
            result[info.rank] = list(range(index * each, (index + 1) * each))
    return result


def missing(launch: Launch, infos: Mapping[int, ProcessInfo], there: Collection[int]) -> str:
    """The processes that are missing at the time limit, and those that came.

    Args:
      launch: as its leader has it (Launch.led_by).
      infos: by rank, of all processes that ever connected.
      there: ranks of the connected processes.
    """
    absent = [rank for rank in range(launch.num_processes) if rank not in there]
    names = f"Process{'es' if len(absent) > 1 else ''} {spans(absent)}"
    if launch.hosts:
        names += f" ({_some([launch.hosts[rank] for rank in absent])})"
    left = [str(infos[rank]) for rank in absent if rank in infos]
    gone = f", where {_some(left)} disconnected again" if left else ""
    hosts = group_by_host([infos[rank] for rank in sorted(there)])
    came = [f"{spans([info.rank for info in on_host])} on {on_host[0].host}" for on_host in hosts]
    hint = ""
    if is_loopback(launch.host):
        hint = f"; only processes of this host reach {launch.host}"
    elif 0 in there and not is_local(launch.host):
        hint = f"; {launch.host} is not an address of {infos[0].host}, where process 0 waits"
    elif 0 in there and (address := listening_address(launch)):
        hint = f"; process 0 listens at {address} alone, and at all addresses of its host with {BIND}=0.0.0.0"
    return (
        f"{names} of {launch.num_processes} did not come to {launch.address} within {launch.start_timeout_s} s{gone} "
        f"(there: {_some(came)}{hint}): start the missing ones, or set {START_TIMEOUT_S} to wait longer."
    )


def spans(numbers: Iterable[int]) -> str:
    """Text such as "0, 3 to 7 and 9"; the numbers ascend."""
    runs = runs_of(numbers)
    words = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in runs[:MOST_NAMED]]
    rest = sum(map(len, runs[MOST_NAMED:]))
    return _and([*itertools.chain(*words), *([f"{rest} more"] if rest else [])])


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as runs of consecutive ones."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in run] for _, run in runs]


def group_by_host(infos: Iterable[ProcessInfo]) -> list[list[ProcessInfo]]:
    hosts: dict[str, list[ProcessInfo]] = {}
    for info in infos:
        hosts.setdefault(info.machine, []).append(info)
    return list(hosts.values())


def _host_with_too_few(on_host: Sequence[ProcessInfo]) -> str:
    """The sentence of `too_few_gpus` for one host."""
    seen = {gpu for info in on_host for gpu in info.gpus or ()}
    return too_few_gpus(on_host[0].host, seen, max(info.gpus_asked or 0 for info in on_host))


def too_few_gpus(host: str, seen: Collection[str], asked: int | None) -> str:
    """The sentence for a host whose processes together see only the GPUs `seen`; empty if that is enough."""
    if len(seen) >= (asked or 0):
        return ""
    if not seen:
        return (
            f"{host} was given {_gpus(asked)} for this run, but no NVIDIA driver answers there: check nvidia-smi, or "
            f"set run.cpu_devices to run on the CPU."
        )
    return (
        f"{host} was given {_gpus(asked)} for this run, but its processes see only {len(seen)}: check CUDA_VISIBLE_DEVICES "
        f"and options that bind GPUs to tasks, or ask for fewer."
    )


def _cannot_share(on_host: Sequence[ProcessInfo]) -> str:
    first, name = on_host[0], on_host[0].host
    if all(info.gpus == first.gpus for info in on_host):
        count = len(first.gpus or ())
        if count % len(on_host) == 0:
            return ""
        return (
            f"{len(on_host)} processes on {name} cannot share {_gpus(count)} evenly: start one for each host or one "
            f"for each GPU."
        )
    owners: dict[str, ProcessInfo] = {}
    for info in on_host:
        for gpu in info.gpus or ():
            if gpu in owners:
                return (
                    f"Processes {owners[gpu].rank} and {info.rank} on {name} both see {gpu}, but their other GPUs differ: "
                    f"give all processes of a host the same CUDA_VISIBLE_DEVICES, or each process its own GPUs."
                )
            owners[gpu] = info
    return ""


def _uneven(infos: Sequence[ProcessInfo]) -> str:
    counts = [len((info.gpus or ()) if share is None else share) for info, share in zip(infos, assign_gpus(infos), strict=True)]
    odd = next((info for info in infos if counts[info.rank] != counts[0]), None)
    if odd is None:
        return ""
    return (
        f"{odd.title} would drive {_gpus(counts[odd.rank])}, {infos[0]} {_gpus(counts[0])}: give all the same number, and "
        f"check nvidia-smi where one is missing."
    )


def _unreachable(infos: Sequence[ProcessInfo]) -> str:
    """Gloo, which carries collectives between CPUs, listens at the address of the host's own name."""
    lost = next((info for info in infos if info.host_address and is_loopback(info.host_address)), None)
    if lost is None:
        return ""
    return (
        f"On {lost.host} the host's own name resolves to {lost.host_address}, where no other host can reach {lost}: give it "
        f"its address in /etc/hosts there."
    )


def is_local(host: str) -> bool:
    """Whether a name leads to this host: a socket can bind to its address. False for a name that does not resolve."""
    return any(map(_is_own, addresses(host)))


def listening_address(launch: Launch) -> str:
    """The address of this host, process 0's, at which it listens; empty: all of them.

    It is the coordinator's, if the others find it there too. They may not if its name leads elsewhere (to a service or a
    gateway that passes connections on), or has several addresses; or if it leads to loopback here alone, as Debian's
    /etc/hosts maps a host's own name.

    Raises:
      ConfigError: JAXLLM_BIND is not an address of this host.
    """
    if launch.bind:
        found = addresses(launch.bind)
        if len(found) != 1 or not _is_own(found[0]):
            raise not_an_address(launch.bind)
        return "" if ipaddress.ip_address(found[0]).is_unspecified else found[0]
    found = addresses(launch.host)
    if is_loopback(launch.host):
        # localhost is often both 127.0.0.1 and ::1. Clients try both.
        return next((one for one in sorted(found) if _is_own(one) and not ipaddress.ip_address(one).is_unspecified), "")
    return found[0] if len(found) == 1 and _is_own(found[0]) and not is_loopback(found[0]) else ""


def addresses(host: str) -> list[str]:
    """What a name leads to; empty if it does not resolve."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def _is_own(address: str) -> bool:
    """Whether it is an address of this host: a socket can bind to it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _gpus(count: int | None) -> str:
    return "no GPU" if not count else "1 GPU" if count == 1 else f"{count} GPUs"


def _some(words: Sequence[str]) -> str:
    rest = len(words) - MOST_NAMED
    return _and([*words[:MOST_NAMED], f"{rest} more"] if rest > 0 else words)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
