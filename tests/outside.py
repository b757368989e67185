"""The environment of a process that a test starts outside the test room (conftest.py)."""

import os


def environment(**variables: str) -> dict[str, str]:
    """Without what makes the room's programs quick to compile and slow to run, and is meant for its number of devices."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables
