"""Process start-up: which devices this process drives, alone or as one of many.

Which of several it is says its launcher (launchers.py): srun, mpirun, an indexed Kubernetes Job, or variables of jaxllm's own.
All meet (roll_call.py) before JAX starts, and stay in touch (peers.py) until the run ends.
"""

from __future__ import annotations

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
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxllm import exits, launchers, peers, xla_flags
from jaxllm.config import Config, ConfigError, RunConfig
from jaxllm.cuda_driver import visible_gpus
from jaxllm.joining import Joined, join
from jaxllm.launchers import Place
from jaxllm.roll_verdicts import too_few

log = logging.getLogger(__name__)

FAREWELL_MS = 10_000
"""How long a process that failed waits for the others to fail too, so that all can say why."""

LAST_TO_LEAVE_S = 1.0
"""How much later than the others process 0 leaves: with it goes the coordinator, and JAX aborts who is still there."""

EXCHANGE_LIMIT_MS = 3_600_000
"""Process 0 may have a checkpoint of terabytes to look through while the others wait."""

_exchanges, _boards = itertools.count(), itertools.count()
_joined: Joined | None = None
_line: peers.Line | None = None


def start(run: RunConfig) -> None:
    """Sets JAX up for a run. Call it before anything touches a device; a second call in one process must ask for the same.
    With several processes it returns once all have met.

    Raises:
      ConfigError: JAX runs already, with other devices than run.cpu_devices asks for; what the launcher or the JAXLLM_*
        variables say makes no sense; the processes do not fit together, or not all of them come in time.
    """
    global _joined
    late_flags = xla_flags.apply(run)
    launch = launchers.find(os.environ)
    if _already_started():
        if run.cpu_devices is not None and (jax.default_backend() != "cpu" or jax.local_device_count() != run.cpu_devices):
            raise ConfigError(
                f"run.cpu_devices={run.cpu_devices}, but JAX already runs on {jax.local_device_count()} "
                f"{jax.default_backend()} devices in this process: start a new one (in a notebook, restart the kernel)."
            )
        if launch and not jax.distributed.is_initialized():
            who = f"{launchers.COORDINATOR} is set" if launch.launcher == "variables" else f"{launch.by} started several"
            raise ConfigError(f"{who}, but JAX already runs alone in this process: start a new one.")
        if late_flags and run.deterministic:
            raise ConfigError(
                "run.deterministic=true comes too late, JAX already runs: start a new process (restart the kernel)."
            )
        if late_flags:
            log.warning("JAX ran before jaxllm could set %s: make the first Trainer in a fresh process.", " ".join(late_flags))
        return
    told_cpu = run.cpu_devices is not None or os.environ.get("JAX_PLATFORMS") == "cpu"
    if launch is None:
        _look_round(told_cpu)
    # Where the CUDA plugin is installed to compile for GPUs elsewhere, trying it here would fail with a page of errors.
    if run.cpu_devices is not None or (not os.environ.get("JAX_PLATFORMS") and not _has_gpu_driver()):
        jax.config.update("jax_platforms", "cpu")
    if run.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", run.cpu_devices)
    if launch and not jax.distributed.is_initialized():
        flags, limit_s = xla_flags.given_flags(), run.peer_timeout_s
        _joined = join(launch, place(), os.environ, cpu=told_cpu, flags=flags, peer_timeout_s=limit_s)
        _open_line(_joined, launch.process_id, limit_s)


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


@dataclass(frozen=True)
class Member:
    """One process of a run."""

    rank: int
    host: str
    pid: int


def place() -> Place:
    """What launch this process belongs to; before `start` too, and without a device."""
    return launchers.place(os.environ)


def members() -> list[Member]:
    """All processes of this run by rank, as `start` met them; this process alone where there is one."""
    if _joined is not None:
        return [Member(rank, host, pid) for rank, (host, pid) in enumerate(_joined.answer.members)]
    return [Member(0, socket.gethostname(), os.getpid())]


def line() -> peers.Line | None:
    """To the other processes; None where there are none."""
    return _line


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
            code = exits.of(error)
            if _line is not None:
                _line.failed(_in_a_sentence(error), code, perhaps_a_peer=any(map(is_of_jax, causes(error))))
            # Runs before JAX's own farewell (last registered, first called), after the error was printed.
            atexit.register(_leave, code)
            # Python first waits for threads, and one of Orbax's may wait for a process that never comes.
            threading.Thread(target=_leave_after_main, args=[code], daemon=True).start()
        raise


def leave_at_once(told: str, code: int) -> NoReturn:
    """Ends this process and with it all others of the run, with `code`, whatever their main threads do.

    Args:
      told: such as "told to stop by SIGTERM".
    """
    if _line is not None:
        _line.told_to_stop(told, code)
    peers.print_sentence(told)
    if _line is not None:
        _line.leave(code)
    peers.flush()
    os._exit(code)


def causes(error: BaseException | None, *, suppressed: bool = False) -> list[BaseException]:
    """An error and what it was raised from, in that order: a save turns what it meets into an error of its own.

    Args:
      suppressed: also what `from None` says explains nothing.
    """
    links: list[BaseException] = []
    # An error may be raised from itself.
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or (error.__context__ if suppressed or not error.__suppress_context__ else None)
    return links


def is_of_jax(error: BaseException) -> bool:
    """Whether a device, a collective or a barrier may have raised it. One whose peer went says nothing of the peer; and what is
    a JaxRuntimeError in a step is a ValueError where a step's result is copied to the host, as a save does."""
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and re.search(r"\b(Gloo|NCCL)\b", str(error)) is not None
    )


def _in_a_sentence(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}".removesuffix(": ")


def _open_line(joined: Joined, rank: int, silence_s: float) -> None:
    """To the other processes (peers.py), from now until this one ends."""
    global _line
    # `rank` is given: JAX would start its devices to say it, and that waits for all others, who are to be watched by then.
    _line = peers.Line(rank, members(), joined.line or (joined.answer.address, joined.answer.line_port), silence_s)
    atexit.register(_part)


def _part() -> None:
    """At the end of this process, before JAX waits for the others."""
    if _line is None:
        return
    # Printed by Python, so nobody caught it: the others would wait for this process in vain.
    if (error := getattr(sys, "last_value", None)) is not None and not hasattr(sys, "ps1"):
        _line.failed(_in_a_sentence(error), 1)
        _leave(1)
    _line.farewell()


def _leave(code: int) -> None:
    if _line is not None:
        _line.leave(code)
    try:
        _client().wait_at_barrier("jaxllm/failed", FAREWELL_MS)
    except Exception:
        pass
    peers.flush()
    if is_main_process():
        time.sleep(LAST_TO_LEAVE_S)
    os._exit(code)


def _leave_after_main(code: int) -> None:
    threading.main_thread().join()
    time.sleep(1)
    _leave(code)


def _look_round(told_cpu: bool) -> None:
    """What a run of one process should know of the launcher that it was, or was not, started by."""
    if idle := launchers.idle_hosts(os.environ):
        log.warning("This run is one process; %d more hosts of this SLURM job do nothing for it: start it by srun.", idle)
    asked = None if told_cpu else launchers.gpus_asked(os.environ)
    # Most runs are asked nothing, and the driver neither.
    seen = visible_gpus() if asked else None
    if seen is not None and (sentence := too_few(socket.gethostname(), seen, asked)):
        raise ConfigError(sentence)


def _client() -> Any:
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
