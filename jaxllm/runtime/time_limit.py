"""Time limit for a call into C++ that nothing but the end of the process can interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def time_limit(limit_s: float, give_up: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """If the block takes longer than the limit, a thread calls give_up(*arguments), which ends the process."""
    timer = threading.Timer(limit_s, give_up, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
