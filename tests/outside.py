"""Processes that a test starts: their environment, without the settings of conftest.py, and waiting for them."""

import os
import random
import socket
import time
from contextlib import suppress


def environment(**variables: str) -> dict[str, str]:
    """The environment without the compiler options and the device count that conftest.py sets for this process."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables


def wait_until(condition, process, limit_s) -> None:
    """Returns once `condition()` holds. Fails if `process` (a Popen) ends earlier, or after a time limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def free_port() -> int:
    """A free port above the range that Linux uses for outgoing connections."""
    for port in random.sample(range(61440, 65536), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")
