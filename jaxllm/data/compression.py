"""Reads files that are compressed with gzip or Zstandard, in pieces of bounded size."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any, BinaryIO

from jaxllm.config.errors import line_of

_CHUNK = 1 << 20


class DamagedFile(Exception):
    """The content is damaged and reading cannot continue. The message is the reason."""


def decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    """The content of an open file, decompressed if its name ends in .gz or .zst. Reading it may raise DamagedFile."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(_Gzip(raw), _CHUNK)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_Zstandard(raw), _CHUNK)
    return raw


class _Gzip(io.RawIOBase):
    def __init__(self, raw: BinaryIO):
        self._file = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._file.readinto(buffer)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedFile(f"damaged gzip ({line_of(error)})") from None


class _Zstandard(io.RawIOBase):
    """Behaves like zstandard's own reader, but does not accept a truncated file as complete."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._raw, self._frame, self._waiting = raw, None, b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            # A byte may expand to 32 KiB, and what a read expands to is in memory at once.
            data = self._waiting or self._raw.read(_CHUNK // 1024)
            self._waiting = b""
            if not data:
                if self._frame is not None:
                    raise DamagedFile("damaged Zstandard (it ends too early)")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise DamagedFile(f"damaged Zstandard ({line_of(error)})") from None
            if self._frame.eof:
                self._waiting, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
