"""Prints the rendezvous address of a launch: host:port of this machine, with a port that is free now.

mpirun starts it in the same way as the training: only rank 0 prints, and a launch on one host uses loopback. Standard library
only.
"""

from __future__ import annotations

import os
import random
import socket

ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): nothing is sent, but the system tells which of its own addresses would reach it."""

PORTS = range(61440, 65536)
"""Above the ports 32768 to 60999, which Linux uses for outgoing connections."""


def host() -> str:
    """A name or address of this machine that others can reach."""
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", "")
    if size and size == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        return "127.0.0.1"
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    if any(not address[0].startswith("127.") and address[0] != "::1" for *_, address in found):
        return name
    # Debian maps a machine's own name to 127.0.1.1, which leads every other machine to itself.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
            return probe.getsockname()[0]
        except OSError:
            return name


def free_port() -> int:
    """A free port that is unlikely to be taken when the run restarts: above those of outgoing connections."""
    for port in [*random.sample(PORTS, 100), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("no port is free")


if __name__ == "__main__" and os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
    print(f"{host()}:{free_port()}", flush=True)
