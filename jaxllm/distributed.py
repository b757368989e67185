"""Process start-up: which devices this process drives, alone or as one of many.

A run on several hosts is one process per host, each started with

    JAXLLM_COORDINATOR      host:port of process 0, the same everywhere
    JAXLLM_NUM_PROCESSES    how many there are
    JAXLLM_PROCESS_ID       which this is, from 0
    JAXLLM_START_TIMEOUT_S  optional: seconds to wait for the others; default 300

or with none of them, for a run on one host.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm import xla_flags
from jaxllm.config import Config, ConfigError, RunConfig

COORDINATOR, NUM_PROCESSES, PROCESS_ID = REQUIRED = ("JAXLLM_COORDINATOR", "JAXLLM_NUM_PROCESSES", "JAXLLM_PROCESS_ID")
START_TIMEOUT_S = "JAXLLM_START_TIMEOUT_S"
DEFAULT_START_TIMEOUT_S = 300
log = logging.getLogger(__name__)

FAREWELL_MS = 10_000
"""How long a process that failed waits for the others to fail too, so that all can say why."""

LAST_TO_LEAVE_S = 1.0
"""How much later than the others process 0 leaves: with it goes the coordinator, and JAX aborts who is still there."""

EXCHANGE_LIMIT_MS = 3_600_000
"""Process 0 may have a checkpoint of terabytes to look through while the others wait."""

_exchanges, _boards = itertools.count(), itertools.count()


@dataclass(frozen=True)
class Cluster:
    """The place of this process among several."""

    host: str
    port: int
    num_processes: int
    process_id: int
    start_timeout_s: int = DEFAULT_START_TIMEOUT_S

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def start(run: RunConfig) -> None:
    """Sets JAX up for a run. Call it before anything touches a device; a second call in one process must ask for the same.
    With several processes it returns once all have met.

    Raises:
      ConfigError: JAX runs already, with other devices than run.cpu_devices asks for; the JAXLLM_* variables make no sense;
        the coordinator's port is taken, or it cannot be reached in time.
    """
    late_flags = xla_flags.apply(run)
    cluster = cluster_from_environment()
    if _already_started():
        if run.cpu_devices is not None and (jax.default_backend() != "cpu" or jax.local_device_count() != run.cpu_devices):
            raise ConfigError(
                f"run.cpu_devices={run.cpu_devices}, but JAX already runs on {jax.local_device_count()} "
                f"{jax.default_backend()} devices in this process: start a new one (in a notebook, restart the kernel)."
            )
        if cluster and not jax.distributed.is_initialized():
            raise ConfigError(f"{COORDINATOR} is set, but JAX already runs alone in this process: start a new one.")
        if late_flags and run.deterministic:
            raise ConfigError(
                "run.deterministic=true comes too late, JAX already runs: start a new process (restart the kernel)."
            )
        if late_flags:
            log.warning("JAX ran before jaxllm could set %s: make the first Trainer in a fresh process.", " ".join(late_flags))
        return
    # Where the CUDA plugin is installed to compile for GPUs elsewhere, trying it here would fail with a page of errors.
    if run.cpu_devices is not None or (not os.environ.get("JAX_PLATFORMS") and not _has_gpu_driver()):
        jax.config.update("jax_platforms", "cpu")
    if run.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", run.cpu_devices)
    if cluster and not jax.distributed.is_initialized():
        _join(cluster)


def start_without_devices() -> None:
    """Sets JAX up to compile for devices that are not here: on the CPU, alone, whatever else this machine has. Where JAX runs
    already it stays as it is.
    """
    xla_flags.apply(RunConfig(cpu_devices=1))
    if not _already_started():
        jax.config.update("jax_platforms", "cpu")


def cache_folder() -> Path:
    """Where jaxllm may keep what it can make again: $XDG_CACHE_HOME/jaxllm, by default ~/.cache/jaxllm."""
    # The standard wants relative paths ignored.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "jaxllm"


def is_main_process() -> bool:
    """The one process that writes logs, metrics and the config."""
    return jax.process_index() == 0


def cluster_from_environment() -> Cluster | None:
    """What the JAXLLM_* variables say; None for a run of one process.

    Raises:
      ConfigError: some but not all are set, or their values cannot be.
    """
    values = {name: os.environ.get(name, "") for name in REQUIRED}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        given = [name for name in REQUIRED if name not in missing]
        raise ConfigError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {' and '.join(missing)}: "
            f"set all of {', '.join(REQUIRED)} for each process, or none."
        )
    host, _, port = values[COORDINATOR].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"{COORDINATOR}={values[COORDINATOR]} has no port: write host:port, such as host-0:29500, "
            f"with the host of process 0."
        )
    count, rank = _whole_number(NUM_PROCESSES, at_least=1), _whole_number(PROCESS_ID, at_least=0)
    if rank >= count:
        raise ConfigError(
            f"{PROCESS_ID}={rank} is not below {NUM_PROCESSES}={count}: processes are numbered from 0 to {count - 1}."
        )
    timeout_s = _whole_number(START_TIMEOUT_S, at_least=1) if os.environ.get(START_TIMEOUT_S) else DEFAULT_START_TIMEOUT_S
    return Cluster(host.strip("[]"), int(port), count, rank, timeout_s) if count > 1 else None


def require_same_config(config: Config) -> None:
    """Compares the configs of all processes, through the coordinator and without a device. Every process must call it.

    Raises:
      ConfigError: on all processes, if one differs; names these processes and the keys.
    """
    _compare(config.model_dump_json(), _verdict)


def require_same(text: str, otherwise: str) -> None:
    """Compares a text over all processes; every process must call it.

    Raises:
      ConfigError: on all processes, if one differs: "Process 1 and process 0 " and `otherwise`.
    """
    _compare(text, lambda _, different: f"Process {next(iter(different))} and process 0 {otherwise}." if different else "")


def broadcast(text: str) -> str:
    """Process 0's text, on all processes; every process must call it. What the others give is not looked at."""
    return exchange(text, lambda texts: texts[0])


def first_said(text: str) -> str:
    """The first text over the processes that is not empty, the same on all of them; every process must call it."""
    return exchange(text, lambda texts: next(filter(None, texts), ""))


def exchange(here: str, combine: Callable[[list[str]], str]) -> str:
    """combine(texts of all processes, by rank), called on process 0 and returned on all; every process must call it. It goes
    through the coordinator, without a device; process 0 may take an hour to say its text.
    """
    if not jax.distributed.is_initialized():
        return combine([here])
    client, rank, count = _client(), jax.process_index(), jax.process_count()
    # A value can be set once: every exchange has its own folder.
    folder = f"jaxllm/same/{next(_exchanges)}"
    if rank > 0:
        client.key_value_set(f"{folder}/{rank}", here)
    else:
        texts = [here, *(client.blocking_key_value_get(f"{folder}/{other}", EXCHANGE_LIMIT_MS) for other in range(1, count))]
        client.key_value_set(f"{folder}/result", combine(texts))
    return client.blocking_key_value_get(f"{folder}/result", EXCHANGE_LIMIT_MS)


class Board:
    """Short texts by name that all processes of a run see as soon as one has put them up; nothing waits.

    Every process must make its boards in the same order. With one process it is a dict.
    """

    def __init__(self) -> None:
        self._folder = f"jaxllm/board/{next(_boards)}/"
        self._alone: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        if jax.distributed.is_initialized():
            _client().key_value_set(self._folder + name, text, allow_overwrite=True)
        else:
            self._alone[name] = text

    def read(self) -> dict[str, str]:
        if not jax.distributed.is_initialized():
            return dict(self._alone)
        return {key.rpartition("/")[2]: text for key, text in _client().key_value_dir_get(self._folder)}


def _compare(here: str, verdict_on: Callable[[str, dict[int, str]], str]) -> None:
    """Raises ConfigError everywhere unless verdict_on(text of process 0, differing texts by process) is empty."""

    def combine(texts: list[str]) -> str:
        return verdict_on(texts[0], {rank: text for rank, text in enumerate(texts) if text != texts[0]})

    if verdict := exchange(here, combine):
        raise ConfigError(verdict)


def _verdict(here: str, different: dict[int, str]) -> str:
    if not different:
        return ""
    mine, theirs = json.loads(here), json.loads(next(iter(different.values())))
    keys = [f"{section}.{key}" for section in mine for key in mine[section] if mine[section][key] != theirs[section].get(key)]
    return (
        f"The processes were given different configs: {' and '.join(keys)} of process{'es' if len(different) > 1 else ''} "
        f"{', '.join(map(str, different))} is not that of process 0; start all of them with the same config and overrides."
    )


@contextmanager
def leaving_on_errors():
    """Round what the processes of a run do together. After an error in here this process does not wait for the others when it
    exits, as JAX would for five minutes: they may sit in a collective that it never joins.
    """
    try:
        yield
    except BaseException as error:
        if jax.distributed.is_initialized():
            # Runs before JAX's own farewell (last registered, first called), after the error was printed.
            code = 2 if isinstance(error, ConfigError) else 1
            atexit.register(_leave, code)
            # Python first waits for threads, and one of Orbax's may wait for a process that never comes.
            threading.Thread(target=_leave_after_main, args=[code], daemon=True).start()
        raise


def _leave(code: int) -> None:
    try:
        _client().wait_at_barrier("jaxllm/failed", FAREWELL_MS)
    except Exception:
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    if is_main_process():
        time.sleep(LAST_TO_LEAVE_S)
    os._exit(code)


def _leave_after_main(code: int) -> None:
    threading.main_thread().join()
    time.sleep(1)
    _leave(code)


def _join(cluster: Cluster) -> None:
    deadline = time.monotonic() + cluster.start_timeout_s
    if cluster.process_id == 0:
        _require_free_port(cluster)
    else:
        _wait_for_coordinator(cluster, deadline)
        # What all processes would say, process 0 says.
        logging.getLogger("jaxllm").setLevel(logging.ERROR)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler would swallow SIGTERM: nothing here asks JAX whether one came.
    jax.config.update("jax_enable_preemption_service", False)
    # Past its own limit JAX aborts the process from C++ with a stack trace: speak before it does.
    remaining_s = max(deadline - time.monotonic(), 1)
    timer = threading.Timer(remaining_s, _give_up, [cluster])
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        cluster.address,
        cluster.num_processes,
        cluster.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=int(remaining_s) + 60,
    )
    timer.cancel()


def _give_up(cluster: Cluster) -> None:
    print(
        f"jaxllm: Not all of the {cluster.num_processes} processes met at {cluster.address} within "
        f"{cluster.start_timeout_s} s: start the missing ones, or set {START_TIMEOUT_S} to wait longer.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _require_free_port(cluster: Cluster) -> None:
    """JAX crashes where the port is taken, or shares it with another run's coordinator."""
    family, address = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    with socket.socket(family) as probe:
        # Closed connections of an earlier run may linger there; whoever listens is found all the same.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((address, cluster.port))
        except OSError as error:
            why = "is taken on this host" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            raise ConfigError(f"Port {cluster.port} of {COORDINATOR} {why}: choose another for all processes.") from None


def _wait_for_coordinator(cluster: Cluster, deadline: float) -> None:
    while True:
        try:
            socket.create_connection((cluster.host, cluster.port), timeout=max(deadline - time.monotonic(), 1)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"Process {cluster.process_id} cannot reach process 0 at {cluster.address} after "
                    f"{cluster.start_timeout_s} s ({error.strerror or error}): start it there, or correct {COORDINATOR}."
                ) from None
        time.sleep(0.1)


def _whole_number(name: str, at_least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name}={text} is not valid: it should be a whole number of at least {at_least}.")
    return int(text)


def _client():
    # JAX has no public name for its key-value store.
    from jax._src import distributed

    return distributed.global_state.client


def _has_gpu_driver() -> bool:
    """Whether a GPU's device node is here: NVIDIA's own, or that of Windows' Linux subsystem."""
    return any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/dxg"))


def _already_started() -> bool:
    # JAX has no public question for this that does not itself start a backend.
    try:
        from jax._src import xla_bridge
    except ImportError:
        return False
    return bool(getattr(xla_bridge, "_backends", None))
