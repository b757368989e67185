"""Process start-up: the devices of this process, alone or as one of many, and communication between processes.

The rank and world size come from the launcher, or from jaxllm's own variables (cluster/launchers.py). All processes meet
(cluster/rendezvous.py) before JAX starts, and watch each other (cluster/peer_monitor.py) until the run ends.
"""

import atexit
import itertools
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax

from jaxllm.cluster import exit_codes, launchers
from jaxllm.cluster.exit_codes import causes
from jaxllm.cluster.host_choice import ALL_REQUIRED, Elastic
from jaxllm.cluster.initialize import Meeting, initialize
from jaxllm.cluster.launchers import Launch, LaunchInfo
from jaxllm.cluster.peer_monitor import PeerMonitor
from jaxllm.cluster.rendezvous import WaitingRoom
from jaxllm.cluster.rendezvous_checks import too_few_gpus
from jaxllm.cluster.socket_messages import SECRET
from jaxllm.config import Config, ConfigError, RunConfig
from jaxllm.cost_model.hardware import Gpu
from jaxllm.machine import program_cache, xla_flags
from jaxllm.machine.host import require_threads_and_files, visible_gpus
from jaxllm.private_jax import coordination_client, has_backends
from jaxllm.terminal import flush, print_sentence
from jaxllm.untrusted import parse_json, shown

log = logging.getLogger(__name__)
T = TypeVar("T")

STEERING = ("JAXLLM_", "JAX_", "XLA_", "NCCL_", "CUDA_")
"""Prefixes of variables that change the behaviour of a run."""

GPU_NODES = "/dev/nvidiactl", "/dev/dxg"
"""A GPU's device node: NVIDIA's own, or that of Windows' Linux subsystem."""

ERROR_BARRIER_MS = 10_000
"""Time that a failed process waits for the others to fail too, so that all can print their reason."""

LAST_TO_LEAVE_S = 1.0
"""Delay with which process 0 exits after the others: it runs the coordinator, without which JAX aborts the others."""

EXCHANGE_LIMIT_MS = 24 * 3_600_000
"""Process 0 may have to read a checkpoint of terabytes while the others wait, each for run.phase_timeout_s at most."""

_exchanges, _boards = itertools.count(), itertools.count()
_meeting: Meeting | None = None
_without_devices = False
_monitor: PeerMonitor | None = None


def start(run: RunConfig, elastic: Elastic = ALL_REQUIRED) -> None:
    """Sets JAX up for a run. Call it before anything touches a device; a second call in one process must ask for the same. With
    several processes it returns once all have met.

    Args:
      elastic: how far the run may shrink when hosts are missing. `absent_hosts` and `layout` tell what came.

    Raises:
      ConfigError: JAX runs already, with other devices than run.cpu_devices asks for; XLA_FLAGS or the variables of the
        launcher or JAXLLM_* are not valid; the processes do not fit together, or not all of them come in time.
    """
    global _meeting, _monitor
    # A caller that started JAX's processes itself, as Ray's JaxTrainer does, needs no launcher.
    by_caller = _meeting is None and jax.distributed.is_initialized()
    launch = None if by_caller else _meeting.launch if _meeting is not None else launchers.find(os.environ)
    if not has_backends():
        xla_flags.require_known(xla_flags.given_flags())
    late_flags = xla_flags.apply(run)
    if has_backends():
        if run.cpu_devices is not None and (jax.default_backend() != "cpu" or jax.local_device_count() != run.cpu_devices):
            raise ConfigError(
                f"run.cpu_devices={run.cpu_devices}, but JAX already runs on {jax.local_device_count()} "
                f"{jax.default_backend()} devices in this process: start a new one (in a notebook, restart the kernel)."
            )
        if launch and not jax.distributed.is_initialized():
            given = f"{launch.count_from}={launch.num_processes}"
            raise ConfigError(f"{given}, but JAX already runs alone in this process: start a new one.")
        if late_flags and run.deterministic:
            raise ConfigError(
                "run.deterministic=true comes too late, JAX already runs: start a new process (restart the kernel)."
            )
        if late_flags:
            log.warning("JAX ran before jaxllm could set %s: make the first Trainer in a fresh process.", " ".join(late_flags))
        _start_program_cache(run.compilation_cache, launch, on_cpu=jax.default_backend() == "cpu")
        return
    require_threads_and_files()
    on_cpu = wants_cpu(run)
    if launch is None and not by_caller:
        _check_single_process(on_cpu)
    # If the CUDA plugin is installed only to compile for GPUs elsewhere, initializing it here fails with a page of errors.
    no_gpu = not os.environ.get("JAX_PLATFORMS") and not any(map(os.path.exists, GPU_NODES))
    if run.cpu_devices is not None or no_gpu:
        jax.config.update("jax_platforms", "cpu")
    if run.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", run.cpu_devices)
    if launch and not jax.distributed.is_initialized():
        flags, limit_s = xla_flags.given_flags(), run.peer_timeout_s
        _meeting = initialize(
            *(launch, launch_info(), os.environ), cpu=on_cpu, flags=flags, peer_timeout_s=limit_s, elastic=elastic
        )
        launch, answer = _meeting.launch, _meeting.answer
        # It watches the others from now until this process ends. The launch gives the rank: JAX would start its devices to find
        # it, which waits for all others, and these must be watched by then.
        _monitor = PeerMonitor(launch.process_id, hosts(), answer.connections, limit_s)
        atexit.register(_close_monitor, _monitor)
    if run.cpu_devices is None:
        _require_platforms()
    _start_program_cache(run.compilation_cache, launch, on_cpu=on_cpu or no_gpu)


def _require_platforms() -> None:
    """Raises ConfigError if the environment asks for devices that are not here, as an image for GPUs does on a login node."""
    given = os.environ.get("JAX_PLATFORMS", "")
    if given in ("", "cpu"):
        return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["it cannot be initialized"])[0].rstrip(".")
        raise ConfigError(
            f"JAX_PLATFORMS={shown(given)} asks for devices that this host, or its JAX, does not have ({shown(reason, 200)}): "
            f"unset it, or set JAX_PLATFORMS=cpu."
        ) from None


def _start_program_cache(wanted: str, launch: Launch | None, on_cpu: bool) -> None:
    """On CPU each process has its own entries. On GPUs all must find the same ones, because those that compile share out the
    timing of kernels and wait for each other's results; and one process of each host writes."""
    is_writer, agree = True, None
    if not on_cpu and jax.distributed.is_initialized():
        if launch is None or _meeting is None:
            # The caller started JAX's processes, and we do not know who shares a host.
            wanted = "off"
        else:
            is_writer, agree = launch.process_id == hosts().index(hosts()[launch.process_id]), _seen_by_all
    program_cache.start(wanted, lambda: cache_folder() / "programs", os.environ, is_writer=is_writer, agree=agree)


def _seen_by_all(entries: Iterable[str]) -> frozenset[str]:
    def common(texts: list[str]) -> str:
        return " ".join(sorted(frozenset.intersection(*(frozenset(text.split()) for text in texts))))

    return frozenset(exchange(" ".join(entries), common).split())


def environment() -> dict[str, str]:
    """The variables of this process that control jaxllm, JAX, XLA, CUDA and NCCL. Not the secret: they are sent and printed."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(STEERING) and name != SECRET}


def is_one_of_several() -> bool:
    """Whether this process is one of several of a run; it works before `start` too."""
    return jax.distributed.is_initialized() or (not has_backends() and launchers.find(os.environ) is not None)


def wants_cpu(run: RunConfig) -> bool:
    """Whether the run or the user's environment asks for the CPU, whatever GPUs there are."""
    return run.cpu_devices is not None or os.environ.get("JAX_PLATFORMS") == "cpu"


def start_without_devices(gpu: Gpu | None = None, deterministic: bool = False) -> None:
    """Sets JAX up to compile for devices that are not here: on the CPU, alone, whatever else this machine has. If JAX runs
    already, it stays as it is.

    Args:
      gpu, deterministic: set XLA_FLAGS as a run on GPUs of this kind sets them, with this run.deterministic.
    """
    global _without_devices
    if not has_backends():
        xla_flags.require_known(xla_flags.given_flags())
        _without_devices = True
        jax.config.update("jax_platforms", "cpu")
    kinds = () if gpu is None else (gpu.device_kind or gpu.name,)
    xla_flags.apply(RunConfig(cpu_devices=1, deterministic=deterministic), kinds)
    program_cache.use_key(os.environ)
    if program_cache.FOLDER_VARIABLE in os.environ:
        # JAX's own cache would store programs for absent devices, which it cannot load, and warn of each.
        _start_program_cache("auto", None, on_cpu=True)


def cache_folder() -> Path:
    """Folder for files that jaxllm can make again: $XDG_CACHE_HOME/jaxllm, by default ~/.cache/jaxllm."""
    # The XDG standard says to ignore relative paths.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "jaxllm"


def is_main_process() -> bool:
    """Whether this is the one process that writes logs, metrics and the config. Before `start` it raises what
    launchers.find does."""
    if has_backends() or jax.distributed.is_initialized():
        return jax.process_index() == 0
    return _without_devices or (found := launchers.find(os.environ)) is None or found.process_id == 0


def launch_info() -> LaunchInfo:
    """The launch that this process belongs to. It works before `start` too, and without a device."""
    info = launchers.launch_info(os.environ)
    # A host that returns counts its own attempts from 0.
    return replace(info, attempt=_meeting.answer.attempt) if _meeting else info


def absent_hosts() -> list[str]:
    """Hosts of the launch that this run trains without."""
    return _meeting.answer.absent if _meeting else []


def layout() -> str:
    """Keys of the config for the hosts that are there, as JSON; "": those of the config."""
    return _meeting.answer.layout if _meeting else ""


def waiting_room() -> WaitingRoom | None:
    """Where hosts that return wait, at the leader of this run. None on other processes, and if no host is absent."""
    return _meeting.room if _meeting else None


def hosts() -> list[str]:
    """The host of each process of this run by rank, as they met in `start`; only this one's in a run of one process."""
    return [socket.gethostname()] if _meeting is None else [host for host, _ in _meeting.answer.members]


def peer_monitor() -> PeerMonitor | None:
    """The connection that watches the other processes; None in a run of one process."""
    return _monitor


def require_same_config(config: Config) -> None:
    """Compares the configs of all processes through the coordinator, without a device; every process must call it. ConfigError
    on all processes, if one differs; it names these processes and the keys."""
    _compare(config.model_dump_json(), _verdict)


def require_same(text: str, otherwise: str) -> None:
    """Compares a text over all processes; every process must call it. ConfigError on all processes, if one differs: "Process 1
    and process 0 " and `otherwise`."""
    _compare(text, lambda _, different: f"Process {next(iter(different))} and process 0 {otherwise}.")


def broadcast(text: str) -> str:
    """Process 0's text, on all processes; every process must call it. The texts of the others are ignored."""
    return exchange(text, lambda texts: texts[0])


def first_nonempty(text: str) -> str:
    """The first nonempty text by rank, the same on all processes; every process must call it."""
    return exchange(text, lambda texts: next(filter(None, texts), ""))


@contextmanager
def raising_together(kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Every process enters the block together. A ConfigError inside, of the first process that has one, is raised on all, as
    `kind` with its sentence and exit code."""
    failure = ""
    try:
        yield
    except ConfigError as error:
        failure = json.dumps([str(error), error.exit_code])
    if failure := first_nonempty(failure):
        sentence, code = parse_json(failure)
        raise kind(sentence).with_code(code) from None


def from_main(ask: Callable[[], T]) -> T:
    """What `ask` returns on process 0, carried as JSON, on all; every process calls it. Its ConfigError is raised on all."""
    found = None
    with raising_together():
        if not jax.distributed.is_initialized() or is_main_process():
            found = ask()
    return parse_json(broadcast(json.dumps(found)))


def gathered(value: Any) -> list[Any]:
    """The values of all processes, by rank, on all; every process must call it. JSON carries them: a tuple becomes a list."""
    # A measured speed may be infinite.
    return [parse_json(text, finite=False) for text in parse_json(exchange(json.dumps(value), json.dumps))]


def exchange(here: str, combine: Callable[[list[str]], str]) -> str:
    """combine(texts of all processes, by rank), called on process 0 and returned on all; every process must call it. It uses
    the coordinator, not a device; process 0 may take a day to give its text."""
    if not jax.distributed.is_initialized():
        return combine([here])
    client, rank, count = coordination_client(), jax.process_index(), jax.process_count()
    # A value can be set only once: every exchange has its own folder.
    number = next(_exchanges)
    folder = f"jaxllm/same/{number}"
    if rank > 0:
        client.key_value_set(f"{folder}/{rank}", here)
    else:
        texts = [here, *(client.blocking_key_value_get(f"{folder}/{other}", EXCHANGE_LIMIT_MS) for other in range(1, count))]
        client.key_value_set(f"{folder}/result", combine(texts))
        # All have read the result before, or they would not be here.
        client.key_value_delete(f"jaxllm/same/{number - 1}/")
    return client.blocking_key_value_get(f"{folder}/result", EXCHANGE_LIMIT_MS)


class Board:
    """Key-value store shared by all processes of a run: each sees a text as soon as another has put it; nothing waits.

    Every process must make its boards in the same order. A run of one process makes boards too, but must not use them."""

    def __init__(self) -> None:
        self._folder = f"jaxllm/board/{next(_boards)}/"

    def put(self, name: str, text: str) -> None:
        coordination_client().key_value_set(self._folder + name, text, allow_overwrite=True)

    def read(self) -> dict[str, str]:
        return {key.rpartition("/")[2]: text for key, text in coordination_client().key_value_dir_get(self._folder)}


def _compare(here: str, verdict_on: Callable[[str, dict[int, str]], str]) -> None:
    """Raises ConfigError(verdict_on(text of process 0, differing texts by process)) on all processes if texts differ."""

    def combine(each: list[str]) -> str:
        different = {who: text for who, text in enumerate(each) if text != each[0]}
        return verdict_on(each[0], different) if different else ""

    if verdict := exchange(here, combine):
        raise ConfigError(verdict)


def _verdict(here: str, different: dict[int, str]) -> str:
    mine, theirs = (parse_json(text, finite=False) for text in (here, next(iter(different.values()))))
    keys = [f"{section}.{key}" for section in mine for key in mine[section] if mine[section][key] != theirs[section].get(key)]
    return (
        f"The processes were given different configs: {' and '.join(keys)} of process{'es' if len(different) > 1 else ''} "
        f"{', '.join(map(str, different))} is not that of process 0; start all of them with the same config and overrides."
    )


def is_of_jax(error: BaseException) -> bool:
    """Whether a device, a collective or a barrier may have raised this error. Such an error does not tell which peer was lost.
    In a step it is a JaxRuntimeError; where a step's result is copied to the host, as in a save, it is a ValueError."""
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and re.search(r"\b(Gloo|NCCL)\b", str(error)) is not None
    )


def as_sentence(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return str(error.args[0])
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}".removesuffix(": ")


@contextmanager
def leaving_on_errors():
    """Wraps the work that the processes of a run do together. After an error inside, this process does not wait for the others
    at exit, as JAX would for five minutes: they may hang in a collective that it never joins."""
    try:
        yield
    except BaseException as error:
        if jax.distributed.is_initialized():
            code = exit_codes.exit_code_for(error)
            if _monitor is not None:
                _monitor.announce_failure(as_sentence(error), code, perhaps_a_peer=any(map(is_of_jax, causes(error))))
            # Runs before JAX's own shutdown (last registered, first called), after the error was printed.
            atexit.register(_leave, code)
            # Python first waits for threads, and one of Orbax's may wait for a process that never comes.
            threading.Thread(target=_leave_after_main, args=[code], daemon=True).start()
        raise


def leave_at_once(reason: str, code: int) -> NoReturn:
    """Ends this process, and with it all others of the run, with `code`, whatever their main threads do.

    Args:
      reason: such as "stopped by SIGTERM".
    """
    if _monitor is not None:
        _monitor.announce_stop(reason, code)
    print_sentence(reason)
    if _monitor is not None:
        _monitor.leave(code)
    flush()
    os._exit(code)


def _close_monitor(monitor: PeerMonitor) -> None:
    """Runs at exit, before JAX waits for the others."""
    # Python printed it, so nothing caught it: the others would wait for this process in vain.
    if (error := getattr(sys, "last_value", None)) is not None and not hasattr(sys, "ps1"):
        monitor.announce_failure(as_sentence(error), 1)
        _leave(1)
    monitor.close_gracefully()


def _leave(code: int) -> None:
    if _monitor is not None:
        _monitor.leave(code)
    with suppress(Exception):
        coordination_client().wait_at_barrier("jaxllm/failed", ERROR_BARRIER_MS)
    flush()
    if is_main_process():
        time.sleep(LAST_TO_LEAVE_S)
    os._exit(code)


def _leave_after_main(code: int) -> None:
    threading.main_thread().join()
    time.sleep(1)
    _leave(code)


def _check_single_process(on_cpu: bool) -> None:
    """Checks a run of one process against the launcher's environment: idle hosts, missing GPUs."""
    if idle := launchers.idle_hosts(os.environ):
        log.warning("This run is one process; %d more hosts of this SLURM job are idle: start it with srun.", idle)
    asked = None if on_cpu else launchers.gpus_asked(os.environ)
    # Asks the driver only where a launcher promised GPUs.
    seen = visible_gpus() if asked else None
    if seen is not None and (sentence := too_few_gpus(socket.gethostname(), seen, asked)):
        raise ConfigError(sentence)
