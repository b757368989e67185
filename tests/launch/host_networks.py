"""Hosts as network namespaces of this machine, each with its own address and host name, on a bridge in another namespace. Each
can lose its cable. Nothing of the machine's own network changes; networks of several processes do not interfere.

    with Network(["h0", "h1"], folder) as network:
        subprocess.Popen([*network.on("h1"), "jaxllm", ...])
        network.unplug("h1")

That needs root and iproute2. Namespaces that a killed process left behind are removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SWITCH, ADDRESSES = "hsw", "10.99.0"
"""The bridge's host, which has the last address."""
COMMAND_LIMIT_S = 30

# Runs "$@" with the host name $0 and a hosts file: a host's own name must be the address at which the others reach it.
AT_HOME = 'hosts="$1"; shift; hostname "$0"; mount --bind "$hosts" /etc/hosts; exec "$@"'


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
            raise OSError(f"ip {' '.join(arguments)} failed: {result.stderr.strip()}")


def remove_namespace(name: str) -> None:
    """Removes a namespace and kills its processes."""
    for pid in _run("ip", "netns", "pids", name).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
