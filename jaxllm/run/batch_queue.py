"""Prefetches the batches of a run in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllm.cluster import progress
from jaxllm.data.loader import ahead


class BatchQueue:
    """Reads batches in a background thread, two ahead of the current step.

    Args:
      read: function from the number of steps done to the batch of the next step.
    """

    def __init__(self, read: Callable[[int], Any]):
        self._read = read
        self._batches: Any = None
        self._next_step: int | None = None
        self._peeked: Any = None

    def peek(self, step: int) -> Any:
        """Returns the batch that `take` returns next."""
        self._peeked = self.take(step)
        return self._peeked

    def take(self, step: int) -> Any:
        """Returns the batch of the step that follows `step` steps."""
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        if self._batches is None or self._next_step != step:
            # After Ctrl-C a batch may have left the queue for a step that never ran.
            self.close()
            self._batches = ahead(self._read, start=step)
        self._next_step = None
        with progress.phase("data"):
            batch = next(self._batches)
        self._next_step = step + 1
        return batch

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._peeked = None
        if self._batches is not None:
            self._batches.close()
            self._batches = None
