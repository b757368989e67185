"""What processes say of themselves when they meet, and why they may not fit together: one sentence for all of them.

stranger(call, first, ...)   known as soon as one comes: another version, a rank twice, other flags
unfit(calls)                 known once all are there: GPUs that are missing or claimed twice, a host nobody can reach
missing(launch, calls, ...)  at the end of the time limit
shares(calls)                which GPUs each drives
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxllm.launchers import START_TIMEOUT_S, Launch, is_loopback

MOST_NAMED = 8
"""Hosts or spans of processes in one sentence."""


@dataclass(frozen=True)
class Call:
    """What a process says of itself."""

    rank: int
    count: int
    """How many processes it was told of."""
    host: str
    machine: str
    """The same for two processes on one host, and for no two on different hosts: hosts may share a name."""
    pid: int
    versions: dict[str, str]
    """By package, for people."""
    flags: list[str]
    """Of XLA, as far as they change what is compiled."""
    launch_id: str | None = None
    attempt: int = 0
    cpu: bool = False
    """It was told to run on the CPU."""
    gpus: list[str] | None = None
    """Their UUIDs in CUDA's order, as this process sees them; None: the driver could not be asked."""
    gpus_asked: int | None = None
    """How many the launcher gave to this run on this host; None where it does not say."""
    host_address: str = ""
    """What the host's own name means on that host; empty: nothing."""

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"

    @property
    def title(self) -> str:
        return f"Process {self.rank} on {self.host}"


def stranger(call: Call, first: Call, launch: Launch, twin: Call | None) -> str:
    """Why a process that comes cannot be one of process 0's; empty: it can.

    Args:
      first: process 0.
      twin: who came before with the same rank and is still there.
    """
    different = [name for name in first.versions if call.versions.get(name) != first.versions[name]]
    if different:
        have = " and ".join(f"{name} {call.versions.get(name, 'of another kind')}" for name in different)
        has = " and ".join(first.versions[name] for name in different)
        return f"{call.title} has {have}, {first} {has}: install the same on all hosts, and start all processes from there."
    if call.count != first.count:
        return (
            f"{call.title} was told of {call.count} processes, {first} of {first.count}: give all the "
            f"same {launch.count_from}, or another run another port."
        )
    if twin is not None:
        return (
            f"Process {call.rank} was started twice, with process id {twin.pid} on {twin.host} and {call.pid} on {call.host}: "
            f"give each process a {launch.id_from} of its own."
        )
    if sorted(call.flags) != sorted(first.flags):
        ours, theirs = set(first.flags), set(call.flags)
        only = [f"{flag} only for {call.rank}" for flag in theirs - ours] + [f"{flag} only for 0" for flag in ours - theirs]
        return (
            f"{call.title} has other XLA_FLAGS than {first} ({_some(sorted(only)) or 'some are given twice'}): export the same "
            f"on all hosts."
        )
    return ""


def unfit(calls: Sequence[Call]) -> str:
    """Why processes that are all there cannot work together; empty: they can.

    Args:
      calls: by rank.
    """
    hosts, first = by_host(calls), calls[0]
    other = next((call for call in calls if call.cpu is not first.cpu), None)
    if other is not None:
        on_cpu, on_gpu = (first, other) if first.cpu else (other, first)
        return f"{on_cpu.title} is to run on the CPU, but not {on_gpu}: give all the same run.cpu_devices and JAX_PLATFORMS."
    if not first.cpu and any(call.gpus is None for call in calls):
        return ""
    if not first.cpu:
        sentences = itertools.chain(map(_too_few, hosts), map(_cannot_share, hosts), [_uneven(calls)])
        if sentence := next(filter(None, sentences), ""):
            return sentence
    # Without a driver on any of them, JAX takes the CPU too.
    on_cpus = first.cpu or not first.gpus
    return _unreachable(calls) if on_cpus and len(hosts) > 1 else ""


def shares(calls: Sequence[Call]) -> list[list[int] | None]:
    """Which of the GPUs it sees each process shall drive, by rank; None: all.

    Processes of one host that see the same GPUs share them in the order of their ranks; where each sees its own, whoever
    started them has shared them out.
    """
    result: list[list[int] | None] = [None] * len(calls)
    for on_host in by_host(calls):
        seen = on_host[0].gpus
        if len(on_host) == 1 or on_host[0].cpu or not seen or any(call.gpus != seen for call in on_host):
            continue
        each = len(seen) // len(on_host)
        for place, call in enumerate(on_host):
            result[call.rank] = list(range(place * each, (place + 1) * each))
    return result


def missing(launch: Launch, calls: Mapping[int, Call], there: Collection[int]) -> str:
    """Who is not there at the end of the time limit, and who is.

    Args:
      calls: what those said that ever came, by rank.
      there: ranks of those that are there, 0 among them.
    """
    absent = [rank for rank in range(launch.num_processes) if rank not in there]
    names = f"Process{'es' if len(absent) > 1 else ''} {spans(absent)}"
    if launch.hosts:
        names += f" ({_some([launch.hosts[rank] for rank in absent])})"
    left = [str(calls[rank]) for rank in absent if rank in calls]
    gone = f", where {_some(left)} hung up again" if left else ""
    came = [
        f"{spans([call.rank for call in on_host])} on {on_host[0].host}"
        for on_host in by_host([calls[r] for r in sorted(there)])
    ]
    hint = ""
    if is_loopback(launch.host):
        hint = f"; only processes of this host reach {launch.host}"
    elif not is_here(launch.host):
        hint = f"; {launch.host} is no address of {calls[0].host}, where process 0 waits"
    return (
        f"{names} of {launch.num_processes} did not come to {launch.address} within {launch.start_timeout_s} s{gone} "
        f"(there: {_some(came)}{hint}): start the missing ones, or set {START_TIMEOUT_S} to wait longer."
    )


def spans(numbers: Iterable[int]) -> str:
    """Such as "0, 3 to 7 and 9"; the numbers ascend."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    words = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in runs[:MOST_NAMED]]
    rest = sum(map(len, runs[MOST_NAMED:]))
    return _and([*itertools.chain(*words), *([f"{rest} more"] if rest else [])])


def by_host(calls: Iterable[Call]) -> list[list[Call]]:
    hosts: dict[str, list[Call]] = {}
    for call in calls:
        hosts.setdefault(call.machine, []).append(call)
    return list(hosts.values())


def _too_few(on_host: Sequence[Call]) -> str:
    """Fewer GPUs are seen on a host than were asked for."""
    seen = {gpu for call in on_host for gpu in call.gpus or ()}
    return too_few(on_host[0].host, seen, max(call.gpus_asked or 0 for call in on_host))


def too_few(host: str, seen: Collection[str], asked: int | None) -> str:
    """What to say of a host whose processes together see the GPUs `seen`; empty: that is enough."""
    if len(seen) >= (asked or 0):
        return ""
    if not seen:
        return (
            f"{host} was given {_gpus(asked)} for this run, but no NVIDIA driver answers there: see what nvidia-smi says, or "
            f"set run.cpu_devices to run on the CPU."
        )
    return (
        f"{host} was given {_gpus(asked)} for this run, but only {len(seen)} can be seen there: look at CUDA_VISIBLE_DEVICES "
        f"and at options that bind GPUs to tasks, or ask for fewer."
    )


def _cannot_share(on_host: Sequence[Call]) -> str:
    first, name = on_host[0], on_host[0].host
    if all(call.gpus == first.gpus for call in on_host):
        count = len(first.gpus or ())
        if count % len(on_host) == 0:
            return ""
        return (
            f"{len(on_host)} processes on {name} cannot share {_gpus(count)} evenly: start one for each host or one "
            f"for each GPU."
        )
    owners: dict[str, Call] = {}
    for call in on_host:
        for gpu in call.gpus or ():
            if gpu in owners:
                return (
                    f"Processes {owners[gpu].rank} and {call.rank} on {name} both see {gpu}, but not otherwise the same GPUs: "
                    f"give all processes of a host the same CUDA_VISIBLE_DEVICES, or each GPUs of its own."
                )
            owners[gpu] = call
    return ""


def _uneven(calls: Sequence[Call]) -> str:
    counts = [len((call.gpus or ()) if share is None else share) for call, share in zip(calls, shares(calls), strict=True)]
    odd = next((call for call in calls if counts[call.rank] != counts[0]), None)
    if odd is None:
        return ""
    return (
        f"{odd.title} would drive {_gpus(counts[odd.rank])}, {calls[0]} {_gpus(counts[0])}: give each process as many, and "
        f"look at nvidia-smi where one is missing."
    )


def _unreachable(calls: Sequence[Call]) -> str:
    """Gloo, which carries collectives between CPUs, listens where the host's own name leads."""
    lost = next((call for call in calls if call.host_address and is_loopback(call.host_address)), None)
    if lost is None:
        return ""
    return (
        f"On {lost.host} its own name means {lost.host_address}, where no other host can reach {lost}: give it its address in "
        f"/etc/hosts there."
    )


def is_here(host: str) -> bool:
    """Whether a name leads to this host: one can listen at its address. False for a name that leads nowhere."""
    try:
        addresses = {info[4] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in str(address[0]) else socket.AF_INET) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def _gpus(count: int | None) -> str:
    return "no GPU" if not count else "1 GPU" if count == 1 else f"{count} GPUs"


def _some(words: Sequence[str]) -> str:
    rest = len(words) - MOST_NAMED
    return _and([*words[:MOST_NAMED], f"{rest} more"] if rest > 0 else words)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
