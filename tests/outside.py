"""Processes that a test starts outside pytest's own: their environment, and waiting for conditions in them."""

import os
import random
import socket
import time
from contextlib import suppress

from jaxllm.machine.xla_flags import CPU_THREADS


def environment(**variables: str) -> dict[str, str]:
    """This environment without the XLA_FLAGS of conftest.py, which make programs quick to compile and slow to run, and set the
    number of devices.
    """
    left_out = ("XLA_FLAGS", CPU_THREADS)
    return {name: value for name, value in os.environ.items() if name not in left_out} | variables


def wait_until(condition, process, limit_s) -> None:
    """Returns as soon as `condition()` is true; fails if `process` (a Popen) ends first, or at the time limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


_given_ports: set[int] = set()


def free_port() -> int:
    """A free port above those that Linux gives to outgoing connections, which come and go; another one at each call, and
    for each worker of pytest-xdist.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for port in random.sample(sorted(set(range(61440 + worker, 65536, workers)) - _given_ports), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            _given_ports.add(port)
            return port
    raise AssertionError("no port is free")
