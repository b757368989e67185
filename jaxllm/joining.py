"""From a launch to a running `jax.distributed`: the roll call, then JAX's own meeting on the port that it leaves free."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

import jaxllm
from jaxllm import exits, roll_call
from jaxllm.cuda_driver import visible_gpus
from jaxllm.launchers import Launch, Place, gpus_asked
from jaxllm.peers import print_sentence
from jaxllm.roll_call import Answer, Missing
from jaxllm.roll_verdicts import Call

MEETING_S = 60
"""For JAX to start on all processes once they have met: it takes about a second."""
TAKEN_PORT_S = 30.0
"""After a restart: how long whoever held the port may take to go."""
LEAST_SHUTDOWN_S = 60
SPARE_FILES = 512
"""What a process opens besides its connections to the others."""


@dataclass(frozen=True)
class Joined:
    """What this process knows of the others."""

    answer: Answer
    line: socket.socket | None
    """On process 0, what listens on answer.line_port."""


def join(
    launch: Launch, place: Place, environ: MutableMapping[str, str], *, cpu: bool, flags: str, peer_timeout_s: float
) -> Joined:
    """Meets the others and starts `jax.distributed`.

    Args:
      environ: of this process; proxies are told to let JAX through.
      cpu: this process was told to run on the CPU.
      flags: XLA's.
      peer_timeout_s: after so many seconds of silence a process is given up; JAX is to notice later than that.

    Raises:
      ConfigError: the processes do not fit together, or process 0's port is taken at the first start.
      Missing: not all of them come in time, or the port is still taken after a restart.
    """
    _past_proxies(environ, launch.host)
    chosen = _chosen_devices(environ)
    own = _call(launch, place, environ, cpu, flags, chosen)
    line = None
    try:
        if launch.process_id == 0:
            _allow_files(2 * launch.num_processes + SPARE_FILES)
            port = roll_call.open_port(launch, own, TAKEN_PORT_S if place.attempt else 0.0)
            line = roll_call.listen(0)
            answer = roll_call.host(port, own, launch, line.getsockname()[1])
        else:
            # What all processes would say, process 0 says.
            logging.getLogger("jaxllm").setLevel(logging.ERROR)
            answer = roll_call.attend(own, launch)
            _wait_for_coordinator(launch, answer)
    except Missing as error:
        # Where somebody starts it again, the others may come then.
        if place.restarts:
            error.exit_code = exits.LOST
        raise
    devices = answer.devices if answer.devices is None or chosen is None else [chosen[index] for index in answer.devices]
    _start_jax(launch, answer, devices, peer_timeout_s, exits.LOST if place.restarts else exits.BAD_INPUT)
    return Joined(answer, line)


def _start_jax(launch: Launch, answer: Answer, devices: list[int] | None, peer_timeout_s: float, exit_code: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler would swallow SIGTERM: nothing here asks JAX whether one came.
    jax.config.update("jax_enable_preemption_service", False)
    # Past its own limit JAX aborts the process from C++ with a stack trace: speak before it does.
    limit_s = min(launch.start_timeout_s, MEETING_S)
    timer = threading.Timer(limit_s, _give_up, [launch, answer, limit_s, exit_code])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            launch.address,
            launch.num_processes,
            launch.process_id,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            initialization_timeout=limit_s + 60,
            heartbeat_timeout_seconds=max(round(2 * peer_timeout_s), 2),
            shutdown_timeout_seconds=max(round(2 * peer_timeout_s), LEAST_SHUTDOWN_S),
        )
    finally:
        timer.cancel()


def _give_up(launch: Launch, answer: Answer, limit_s: float, exit_code: int) -> None:
    print_sentence(
        f"All {launch.num_processes} processes met at {launch.address}, but JAX did not start on all of them within "
        f"{limit_s} s: look for the one that stopped in the others' output (process 0 is on {answer.members[0][0]}), or for a "
        f"proxy or firewall between the hosts."
    )
    os._exit(exit_code)


def _wait_for_coordinator(launch: Launch, answer: Answer) -> None:
    """JAX's client tries once a second: it should find process 0's port open at its first try."""
    until_s = time.monotonic() + min(launch.start_timeout_s, MEETING_S)
    while True:
        try:
            roll_call.connect(launch.host, launch.port, roll_call.TRY_S).close()
            return
        except OSError as error:
            if time.monotonic() >= until_s:
                raise Missing(
                    f"Process 0 on {answer.members[0][0]} let all go on, but at {launch.address} JAX does not answer "
                    f"({error.strerror or error}): see what process 0 says."
                ) from None
        time.sleep(0.05)


def _call(
    launch: Launch, place: Place, environ: MutableMapping[str, str], cpu: bool, flags: str, chosen: list[int] | None
) -> Call:
    gpus = None if cpu else visible_gpus()
    if gpus and chosen is not None:
        gpus = [gpus[index] for index in chosen if index < len(gpus)]
    name = socket.gethostname()
    try:
        host_address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        host_address = ""
    return Call(
        launch.process_id,
        launch.num_processes,
        name,
        f"{name} {_boot_id()}",
        os.getpid(),
        {"jaxllm": jaxllm.__version__, "JAX": jax.__version__, "jaxlib": jaxlib.__version__, "jaxllm's code": code_hash()[:10]},
        # Where a compiler dumps to may name the host.
        [flag for flag in flags.split() if not flag.startswith("--xla_dump_")],
        place.launch_id,
        place.attempt,
        cpu,
        gpus,
        gpus_asked(environ),
        str(host_address),
    )


def code_hash() -> str:
    """Of jaxllm's own files: hosts with checkouts of their own may differ in more than versions."""
    folder, found = Path(jaxllm.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _chosen_devices(environ: MutableMapping[str, str]) -> list[int] | None:
    """GPUs that the user chose by JAX's own means, by CUDA's numbers; None: all that can be seen."""
    chosen = environ.get("JAX_LOCAL_DEVICE_IDS") or environ.get("JAX_CUDA_VISIBLE_DEVICES") or "all"
    numbers = [word.strip() for word in chosen.split(",")]
    return [int(word) for word in numbers] if all(word.isdecimal() for word in numbers) else None


def _past_proxies(environ: MutableMapping[str, str], host: str) -> None:
    """gRPC, which JAX meets over, would ask a proxy for a host of the cluster, and may hang."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in environ):
        return
    # Its own list stands before the common one.
    given = environ.get("no_grpc_proxy") or environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    environ["no_grpc_proxy"] = ",".join(filter(None, [given, host]))
    # JAX warns of each variable otherwise.
    with suppress(AttributeError):
        jax.config.update("jax_check_proxy_envs", False)


def _allow_files(count: int) -> None:
    """Often only 1,024 may be open, fewer than the processes that process 0 talks to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
