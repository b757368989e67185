"""From a launch to a running `jax.distributed`: the rendezvous, then JAX's own on the port that the rendezvous frees."""

import hashlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib

import jaxllm
from jaxllm.cluster import exit_codes
from jaxllm.cluster.host_choice import ALL_REQUIRED, Elastic
from jaxllm.cluster.launchers import HOSTS, START_TIMEOUT_S, Launch, LaunchInfo, gpus_asked, join_address
from jaxllm.cluster.rendezvous import WaitingRoom, meet
from jaxllm.cluster.rendezvous_checks import ProcessInfo, addresses, listening_address
from jaxllm.cluster.rendezvous_client import TRY_S, Answer, RendezvousError
from jaxllm.cluster.socket_messages import SECRET, SECRET_FILE, connect
from jaxllm.config import ConfigError
from jaxllm.machine.host import visible_gpus
from jaxllm.terminal import print_sentence
from jaxllm.untrusted import RefusedInput, whole_number

log = logging.getLogger(__name__)

JAX_START_S = 60
"""Limit for JAX to start on all processes once they have met: it takes about a second."""
LEAST_SHUTDOWN_S = 60
SPARE_FILES = 512
"""File descriptors of a process besides its connections to the others."""


class Meeting(NamedTuple):
    """Result of `initialize` for this process."""

    launch: Launch
    """With the rank and the number of processes that the run has."""
    answer: Answer
    room: WaitingRoom | None = None
    """On the leader of a run that trains without some hosts."""


def initialize(
    launch: Launch,
    launch_info: LaunchInfo,
    environ: MutableMapping[str, str],
    *,
    cpu: bool,
    flags: str,
    peer_timeout_s: float,
    elastic: Elastic = ALL_REQUIRED,
) -> Meeting:
    """Runs the rendezvous and starts `jax.distributed`.

    Args:
      environ: of this process. Its proxy variables are changed to let JAX through.
      cpu: this process shall run on the CPU.
      flags: XLA's.
      peer_timeout_s: silence in seconds after which a process counts as lost; JAX's own timeout is three times that.
      elastic: how far the run may shrink.

    Raises:
      ConfigError: the processes do not fit together, or process 0's port is taken at the first start.
      RendezvousError: not all processes come in time, or the port is still taken after a restart.
    """
    _check_elastic(launch, elastic)
    _bypass_proxies(environ, {launch.host, *launch.hosts[: elastic.leaders]})
    chosen = _device_choice(environ)
    own = _process_info(launch, launch_info, environ, cpu, flags, chosen)
    if launch.process_id == 0 or elastic.shrinks:
        _raise_file_limit(2 * launch.num_processes + SPARE_FILES)
    try:
        # A name such as a service's may lead to process 0 alone, and another process may take its place.
        answer, room = meet(own, replace(launch, host=launch.hosts[0]) if elastic.shrinks else launch, elastic)
        if elastic.shrinks:
            # The launcher's choice is an address of its process 0.
            bind = launch.bind if own.rank == 0 else ""
            launch = replace(launch, host=answer.address, port=answer.port, bind=bind)
        else:
            # A process knows its own address of process 0's port, and the holder of the run directory its own attempt.
            answer = replace(answer, attempt=own.attempt)
        launch = replace(launch, process_id=answer.rank, num_processes=len(answer.members))
        if launch.process_id == 0:
            _warn_if_open(launch, answer)
        else:
            # Process 0 logs for all.
            logging.getLogger("jaxllm").setLevel(logging.ERROR)
            _wait_for_coordinator(launch, answer)
    except RendezvousError as error:
        # If a supervisor restarts the run, the others may come then.
        if launch_info.restarts:
            error.exit_code = exit_codes.LOST
        raise
    devices = answer.devices if answer.devices is None or chosen is None else [chosen[index] for index in answer.devices]
    # A user's own JAX_COORDINATOR_BIND_ADDRESS is JAX's to read.
    address = "" if launch.process_id > 0 or environ.get("JAX_COORDINATOR_BIND_ADDRESS") else listening_address(launch)
    bind = join_address(address, launch.port) if address else None
    exit_code = exit_codes.LOST if launch_info.restarts else exit_codes.BAD_INPUT
    options: dict[str, Any] = {"local_device_ids": devices, "coordinator_bind_address": bind}
    if own.proof == SECRET and launch.secret is not None:
        # Few runs need it: those with a secret, by a JAX that takes certificates.
        from jaxllm.cluster import certificates

        options |= certificates.arguments(launch.secret, answer.salt)
    _start_jax(launch, answer, peer_timeout_s, exit_code, **options)
    return Meeting(launch, answer, room)


def _check_elastic(launch: Launch, elastic: Elastic) -> None:
    least, hosts = elastic.least_hosts, len(set(launch.hosts))
    if least is None:
        return
    if not hosts:
        raise ConfigError(
            f"launch.least_hosts={least} needs the hosts of all processes, and the launcher does not tell them: set {HOSTS} to "
            f"the host of each process, as h0,h1,h2, or remove launch.least_hosts."
        )
    if least > hosts:
        raise ConfigError(f"launch.least_hosts={least} is more than the {hosts} hosts of this run: set at most {hosts}.")
    if elastic.wait_s >= launch.start_timeout_s:
        raise ConfigError(
            f"launch.wait_s={elastic.wait_s:g} is not below {START_TIMEOUT_S}={launch.start_timeout_s}, after which processes "
            f"stop waiting: set it lower."
        )


def _warn_if_open(launch: Launch, answer: Answer) -> None:
    if launch.secret is None and len({host for host, _ in answer.members}) > 1:
        reached = f"anyone who reaches port {launch.port} of {launch.host} can stop it"
        log.warning("The processes of this run share no secret: %s; set %s or %s for all.", reached, SECRET, SECRET_FILE)


def _start_jax(launch: Launch, answer: Answer, peer_timeout_s: float, exit_code: int, **options: Any) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler would swallow SIGTERM, and nothing here asks JAX for signals.
    jax.config.update("jax_enable_preemption_service", False)
    # After its own limit JAX aborts the process from C++ with a stack trace: print the message before it does.
    limit_s = min(launch.start_timeout_s, JAX_START_S)
    with time_limit(limit_s, _exit_unstarted, launch, answer, limit_s, exit_code):
        jax.distributed.initialize(
            launch.address,
            launch.num_processes,
            launch.process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=limit_s + 60,
            # JAX sends a heartbeat in each half of its limit, so that it may count a process as lost after half of it: the
            # peer monitor, which says which process that was, has to be first.
            heartbeat_timeout_seconds=max(round(3 * peer_timeout_s), 2),
            shutdown_timeout_seconds=max(round(2 * peer_timeout_s), LEAST_SHUTDOWN_S),
            **options,
        )


@contextmanager
def time_limit(limit_s: float, give_up: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """If the block takes longer than the limit, a thread calls give_up(*arguments), which ends the process: nothing else
    interrupts a call into C++."""
    timer = threading.Timer(limit_s, give_up, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exit_unstarted(launch: Launch, answer: Answer, limit_s: float, exit_code: int) -> None:
    print_sentence(
        f"All {launch.num_processes} processes met at {launch.address}, but JAX did not start on all of them within "
        f"{limit_s} s: find the process that stopped in the others' output (process 0 is on {answer.members[0][0]}), or look "
        f"for a proxy or firewall between the hosts, or for JAX_MTLS_* files that do not fit."
    )
    os._exit(exit_code)


def _wait_for_coordinator(launch: Launch, answer: Answer) -> None:
    """JAX's client tries once a second: process 0's port should be open at its first try."""
    until_s = time.monotonic() + min(launch.start_timeout_s, JAX_START_S)
    while True:
        try:
            connect(launch.host, launch.port, TRY_S).close()
            return
        except OSError as error:
            if time.monotonic() >= until_s:
                raise RendezvousError(
                    f"Process 0 on {answer.members[0][0]} released all processes, but at {launch.address} JAX does not answer "
                    f"({error.strerror or error}): look at the output of process 0."
                ) from None
        time.sleep(0.05)


def _process_info(
    launch: Launch, launch_info: LaunchInfo, environ: MutableMapping[str, str], cpu: bool, flags: str, chosen: list[int] | None
) -> ProcessInfo:
    gpus = None if cpu else visible_gpus()
    if gpus and chosen is not None:
        gpus = [gpus[index] for index in chosen if index < len(gpus)]
    name, boot = socket.gethostname(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessInfo(
        launch.process_id,
        launch.num_processes,
        name,
        os.getpid(),
        {"jaxllm": jaxllm.__version__, "JAX": jax.__version__, "jaxlib": jaxlib.__version__, "jaxllm's code": code_hash()[:10]},
        f"{name} {boot}",
        # The dump folder may contain the host's name.
        [flag for flag in flags.split() if not flag.startswith("--xla_dump_")],
        launch_info.launch_id,
        launch_info.attempt,
        cpu,
        gpus,
        gpus_asked(environ),
        next(iter(addresses(name)), ""),
        _proof_for_jax(launch),
    )


def _proof_for_jax(launch: Launch) -> str:
    """By what JAX's coordinator and this process prove who they are; empty: JAX (0.10), or this system, has no way."""
    if any(getattr(jax.config, f"jax_mtls_{kind}_file", None) for kind in ("cert", "key", "ca")):
        return "JAX_MTLS_CERT_FILE"
    can_prove = hasattr(jax.config, "jax_mtls_peer_uri_prefix") and hasattr(os, "memfd_create")
    return SECRET if launch.secret is not None and can_prove else ""


def code_hash() -> str:
    """Hash of jaxllm's own files: checkouts on different hosts may differ in more than their versions."""
    folder, found = Path(jaxllm.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


def _device_choice(environ: MutableMapping[str, str]) -> list[int] | None:
    """GPUs that the user chose with JAX's own variables, by CUDA's numbers; None: all that are visible."""
    chosen = environ.get("JAX_LOCAL_DEVICE_IDS") or environ.get("JAX_CUDA_VISIBLE_DEVICES") or "all"
    try:
        return [whole_number(word.strip()) for word in chosen.split(",")]
    except RefusedInput:
        # JAX refuses it.
        return None


def _bypass_proxies(environ: MutableMapping[str, str], hosts: Collection[str]) -> None:
    """gRPC, which JAX uses, would ask a proxy for a host of the cluster, and may hang."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in environ):
        return
    # gRPC's own list takes precedence over the common one.
    given = environ.get("no_grpc_proxy") or environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    environ["no_grpc_proxy"] = ",".join(filter(None, [given, *sorted(hosts)]))
    # Without this, JAX warns of each variable.
    with suppress(AttributeError):
        jax.config.update("jax_check_proxy_envs", False)


def _raise_file_limit(count: int) -> None:
    """The default limit is often 1,024 open files, fewer than the processes that process 0 talks to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
