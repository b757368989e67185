"""Forwards what a supervised process prints. Standard library only."""

from __future__ import annotations

import os
import selectors
import time

KEPT_BYTES = 2**20
"""Buffer for COMMAND's output while its reader does not read."""
LAST_WORDS_S = 5.0
"""Time to forward COMMAND's remaining output after its end."""


class Relay:
    """Forwards one output of COMMAND without waiting for its reader, and keeps reading when the reader is gone."""

    def __init__(self, selector: selectors.BaseSelector, sink: int):
        self._selector, self._sink = selector, sink
        self._source: int | None = None
        self._kept = bytearray()
        self._waits = self._closed = False
        os.set_blocking(sink, False)

    def take_from(self, source: int) -> None:
        os.set_blocking(source, False)
        self._source = source
        self._selector.register(source, selectors.EVENT_READ, self._read)

    def put(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        self._write()

    def finish(self) -> None:
        """Forwards the rest, as far as the reader takes it soon."""
        until_s = time.monotonic() + LAST_WORDS_S
        # A process that COMMAND left behind may never stop writing.
        while self._read() and time.monotonic() < until_s:
            pass
        self._drop_source()
        while self._kept and time.monotonic() < until_s:
            self._write()
            time.sleep(0.01)

    def _read(self) -> bool:
        """Returns whether there was any data."""
        if self._source is None:
            return False
        try:
            data = os.read(self._source, 2**16)
        except BlockingIOError:
            return False
        if not data:
            self._drop_source()
            return False
        self.put(data)
        return True

    def _drop_source(self) -> None:
        if self._source is not None:
            self._selector.unregister(self._source)
            os.close(self._source)
            self._source = None

    def _write(self) -> None:
        blocked = False
        while self._kept and not blocked:
            try:
                del self._kept[: os.write(self._sink, self._kept)]
            except BlockingIOError:
                blocked = True
            except OSError:
                self._kept.clear()
        if blocked != self._waits:
            if blocked:
                self._selector.register(self._sink, selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(self._sink)
            self._waits = blocked
