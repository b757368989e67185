"""The hosts of a rehearsal: on each a supervisor that starts `jaxllm train`, and what they print. Linux only.

Nothing outlives this process: a supervisor ends with it, and its training process with the supervisor. Each host may be a
network namespace with its own address and host name, on a bridge in another namespace, and can lose its cable. Nothing of the
machine's own network changes; networks of several processes do not interfere.

    with Network(["h0", "h1"], folder) as network:
        subprocess.Popen([*network.on("h1"), "jaxllm", ...])
        network.unplug("h1")

That needs root and iproute2. Namespaces that a killed process left behind are removed by the next one.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxllm.cluster.launchers import FIRST_PORT, NUM_PORTS
from jaxllm.cluster.supervisor import die_with_parent
from jaxllm.config import ConfigError
from jaxllm.machine.host import own_path

SILENT_AFTER = 1.5
"""Times the peers' patience until a supervisor kills a frozen process: they must give it up first, or they would see a kill."""
LEFT_OUT = ("JAXLLM_ATTEMPT", "JAXLLM_RESTARTS", "JAXLLM_BEAT_FD", "JAXLLM_START_TIMEOUT_S")
PORTS = range(FIRST_PORT, FIRST_PORT + NUM_PORTS)
SWITCH, ADDRESSES = "hsw", "10.99.0"
"""The bridge's host, which has the last address."""
COMMAND_LIMIT_S = 30

# Runs "$@" with the host name $0 and a hosts file: a host's own name must be the address at which the others reach it.
AT_HOME = 'hosts="$1"; shift; hostname "$0"; mount --bind "$hosts" /etc/hosts; exec "$@"'


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
        self._folder, self._network = folder, network
        self._supervisors: dict[int, subprocess.Popen[str]] = {}
        folder.mkdir()
        where = f"h0:{PORTS[0]}" if network else f"127.0.0.1:{free_port()}"
        given = {"JAXLLM_COORDINATOR": where, "JAXLLM_NUM_PROCESSES": count, "JAXLLM_LAUNCH_ID": f"rehearsal-{os.getpid()}"}
        # env starts the command with this process's own variables but for these.
        self._environment = ["env", *(f"--unset={name}" for name in LEFT_OUT), "PYTHONUNBUFFERED=1", "PYTHONSAFEPATH=1"]
        self._environment.append(f"PYTHONPATH={os.pathsep.join(own_path())}")
        self._environment += [f"{name}={value}" for name, value in given.items()]
        limits = ["--restarts", "20", "--backoff-s", "1", "--anew-after", "10", "--silent-after"]
        supervisor = [sys.executable, "-m", "jaxllm.cluster.supervisor", *limits, str(peer_timeout_s * SILENT_AFTER)]
        self._command = [*supervisor, "--", sys.executable, "-m", "jaxllm.cli", "train", str(recipe)]

    def power_on(self, rank: int) -> None:
        """Starts a host, also again."""
        if self._network:
            self._network.plug(f"h{rank}")
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
        self._kill(rank)

    def freeze(self, rank: int) -> None:
        """Stops the training process of a host. Its supervisor lives on."""
        for pid in _children(self._supervisors[rank].pid):
            _signal_group(pid, signal.SIGSTOP)

    def exit_codes(self) -> dict[int, int]:
        """By host, of the supervisors that have ended by themselves."""
        return {rank: code for rank, one in self._supervisors.items() if (code := one.poll()) is not None}

    def close(self) -> None:
        for rank in list(self._supervisors):
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        supervisor = self._supervisors.pop(rank)
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


# ---------------------------------------------------------------------------------------------------------------- networks


def networks_are_possible() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return False
    probe = f"jaxllm-{os.getpid()}-hprobe"
    made = _run("ip", "netns", "add", probe).returncode == 0
    return made and _run("ip", "netns", "delete", probe).returncode == 0


class Network:
    """See above.

    Args:
      names: of the hosts; each begins with an h.
      folder: existing; gets the hosts file.
    """

    def __init__(self, names: Sequence[str], folder: Path):
        self._names, self._hosts_file = names, folder / "hosts"
        self._namespaces = {name: f"jaxllm-{os.getpid()}-{name}" for name in (SWITCH, *names)}

    def __enter__(self) -> Network:
        for forgotten in _run("ip", "netns", "list").stdout.split():
            # Its owner was killed.
            if (found := re.fullmatch(r"jaxllm-(\d+)-h\w+", forgotten)) and not Path(f"/proc/{found[1]}").exists():
                remove_namespace(forgotten)
        addresses = {SWITCH: 254} | {name: number for number, name in enumerate(self._names, start=1)}
        lines = ["127.0.0.1 localhost", *(f"{ADDRESSES}.{number} {name}" for name, number in addresses.items())]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        try:
            self._lay_cables(addresses)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes of the hosts, too."""
        for namespace in self._namespaces.values():
            remove_namespace(namespace)

    def on(self, name: str) -> list[str]:
        """Prefix of a command that runs on a host, or on the SWITCH. The process that is started becomes the command."""
        enter = ["nsenter", f"--net=/run/netns/{self._namespaces[name]}", "unshare", "--mount", "--uts"]
        return [*enter, "bash", "-c", AT_HOME, name, str(self._hosts_file)]

    def unplug(self, name: str) -> None:
        """Cuts the network of a host; its processes live on."""
        self._ip("-n", self._namespaces[SWITCH], "link", "set", f"to-{name}", "down")

    def plug(self, name: str) -> None:
        self._ip("-n", self._namespaces[SWITCH], "link", "set", f"to-{name}", "up")

    def _lay_cables(self, addresses: Mapping[str, int]) -> None:
        switch = self._namespaces[SWITCH]
        for namespace in self._namespaces.values():
            self._ip("netns", "add", namespace)
            self._ip("-n", namespace, "link", "set", "lo", "up")
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        self._ip("-n", switch, "addr", "add", f"{ADDRESSES}.{addresses[SWITCH]}/24", "dev", "br0")
        for name in self._names:
            own, cable = self._namespaces[name], f"to-{name}"
            self._ip("-n", switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", own)
            self._ip("-n", switch, "link", "set", cable, "master", "br0", "up")
            self._ip("-n", own, "addr", "add", f"{ADDRESSES}.{addresses[name]}/24", "dev", "eth0")
            self._ip("-n", own, "link", "set", "eth0", "up")

    def _ip(self, *arguments: str) -> None:
        result = _run("ip", *arguments)
        if result.returncode:
            raise ConfigError(f"ip {' '.join(arguments)} failed ({result.stderr.strip()}): remove the cause.")


def remove_namespace(name: str) -> None:
    """Removes a namespace and kills its processes."""
    for pid in _run("ip", "netns", "pids", name).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
