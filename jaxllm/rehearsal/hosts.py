"""The processes of a rehearsal: on each host a supervisor that starts `jaxllm train`, and what they print.

Nothing outlives this process: a supervisor ends with it, and its training process with the supervisor. Linux only.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxllm.cluster.launchers import FIRST_PORT, NUM_PORTS
from jaxllm.cluster.supervisor import die_with_parent
from jaxllm.rehearsal.network import Network

SILENT_AFTER = 1.5
"""Times the peers' patience until a supervisor kills a frozen process: they must give it up first, or they would see a kill."""
LEFT_OUT = ("JAXLLM_ATTEMPT", "JAXLLM_RESTARTS", "JAXLLM_BEAT_FD", "JAXLLM_START_TIMEOUT_S")
PORTS = range(FIRST_PORT, FIRST_PORT + NUM_PORTS)


@dataclass(frozen=True)
class Line:
    unix_s: float
    host: int
    text: str


class Hosts:
    """Hosts of one run; close() ends all.

    Args:
      recipe: the config file.
      folder: gets a log file for each host.
      network: None: all hosts are this machine.
      peer_timeout_s: run.peer_timeout_s.
    """

    def __init__(self, count: int, recipe: Path, folder: Path, network: Network | None, peer_timeout_s: float):
        self.lines: list[Line] = []
        self._count, self._folder, self._network = count, folder, network
        self._supervisors: dict[int, subprocess.Popen[str]] = {}
        folder.mkdir()
        where = f"h0:{PORTS[0]}" if network else f"127.0.0.1:{free_port()}"
        given = {"JAXLLM_COORDINATOR": where, "JAXLLM_NUM_PROCESSES": count, "JAXLLM_LAUNCH_ID": f"rehearsal-{os.getpid()}"}
        # env starts the command with this process's own variables but for these.
        self._environment = ["env", *(f"--unset={name}" for name in LEFT_OUT), "PYTHONUNBUFFERED=1"]
        self._environment += [f"{name}={value}" for name, value in given.items()]
        limits = ["--restarts", "20", "--backoff-s", "1", "--anew-after", "10", "--silent-after"]
        supervisor = [sys.executable, "-m", "jaxllm.cluster.supervisor", *limits, str(peer_timeout_s * SILENT_AFTER)]
        self._command = [*supervisor, "--", sys.executable, "-m", "jaxllm.cli", "train", str(recipe)]

    def power_on(self, rank: int) -> None:
        at_home = self._network.on(f"h{rank}") if self._network else []
        supervisor = subprocess.Popen(
            [*self._environment, f"JAXLLM_PROCESS_ID={rank}", *at_home, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        self._supervisors[rank] = supervisor
        threading.Thread(target=self._read, args=(rank, supervisor), daemon=True).start()

    def power_off(self, rank: int) -> None:
        """Ends all processes of a host at once. In a network of its own nothing is heard of them any more; without one, the
        system closes their connections."""
        if self._network:
            self._network.unplug(f"h{rank}")
        supervisor = self._supervisors.pop(rank)
        training = _children(supervisor.pid)
        for pid in (supervisor.pid, *training):
            _signal_group(pid, signal.SIGKILL)
        supervisor.wait()

    def power_on_again(self, rank: int) -> None:
        if self._network:
            self._network.plug(f"h{rank}")
        self.power_on(rank)

    def freeze(self, rank: int) -> None:
        """Stops the training process of a host. Its supervisor lives on."""
        for pid in _children(self._supervisors[rank].pid):
            _signal_group(pid, signal.SIGSTOP)

    def exit_codes(self) -> dict[int, int]:
        """By host, of the supervisors that have ended by themselves."""
        return {rank: code for rank, one in self._supervisors.items() if (code := one.poll()) is not None}

    def close(self) -> None:
        for supervisor in self._supervisors.values():
            for pid in (supervisor.pid, *_children(supervisor.pid)):
                _signal_group(pid, signal.SIGKILL)
            supervisor.wait()

    def _read(self, rank: int, supervisor: subprocess.Popen[str]) -> None:
        assert supervisor.stdout is not None, "it was started with a pipe"
        with supervisor.stdout as output, (self._folder / f"host-{rank}.log").open("a") as log:
            for text in output:
                self.lines.append(Line(time.time(), rank, text.rstrip("\n")))
                log.write(text)
                log.flush()


def free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free")


def _children(pid: int) -> Sequence[int]:
    """PIDs of a supervisor's children, each the head of its process group (proc(5), /proc/pid/task/tid/children)."""
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
