"""What `jaxllm data prepare` reads: files, parts of them, and the records in these. The ending of a name decides the format,
and whether the content is compressed with gzip or Zstandard.
"""

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple

from jaxllm.config.errors import line_of
from jaxllm.untrusted import MIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LINES_ENDINGS = (".jsonl", ".json", ".ndjson")
Kind = Literal["text", "lines", "array", "csv", "parquet", "arrow"]
"""lines: a JSON object per line; array: one JSON array of objects; text: the file is one document."""


@dataclass(frozen=True)
class InputFile:
    """A file as it was when the work was divided."""

    path: str
    """Its absolute path, or its address without what may be secret (the query of a signed one)."""
    size: int
    """Bytes."""
    modified_ns: int = 0
    """0 for what has an address."""
    kind: Kind = "text"
    address: str = ""
    """For a file in a store: what is opened; of a Hub, with the commit. It may hold a signature, so it is never shown."""
    version: str = ""
    """For a file in a store: what the store changes with the content, such as an ETag, a generation or a SHA-256."""


@dataclass(frozen=True)
class Part:
    """A part of a file: bytes [start, stop), or row groups [start, stop) of Parquet."""

    file: InputFile
    start: int
    stop: int
    size: int
    """Bytes of the file that belong to this part, for dividing the work."""


class Record(NamedTuple):
    text: str | None
    """None for a broken record, and for a text in blocks."""
    number: int | None
    """Line or row, counted from 1 in the part; None for a record that is a complete file."""
    reason: str
    """Why the record is broken."""
    read: int
    """Bytes of the part read so far, counted before decompression."""
    blocks: Callable[[], Iterator[bytes]] | None = None
    """Reads a long text in blocks of UTF-8, which may end inside a character."""
    lost: int = 0
    """Bytes of the part, of which no more records can be read. What a cut file lacks is unknown, so all of it counts."""


def kind_of(path: str) -> Kind:
    """The format that a name promises; a file called .json may turn out to be an array."""
    name = path.lower()
    if name.endswith((".parquet", ".arrow")):
        return "parquet" if name.endswith(".parquet") else "arrow"
    inner = name.removesuffix(".gz").removesuffix(".zst")
    return "lines" if inner.endswith(LINES_ENDINGS) else "csv" if inner.endswith(".csv") else "text"


def is_splittable(file: InputFile) -> bool:
    """Whether a part of this file can begin at any byte."""
    return file.kind == "lines" and file.path.lower().endswith(LINES_ENDINGS)


def check_text(text: object, text_key: str) -> tuple[str | None, str]:
    """(the text, "") of a field, or (None, why it is broken)."""
    if not isinstance(text, str):
        return None, f"field {text_key!r} is not a string"
    try:
        # JSON can escape half of a surrogate pair, which no encoding of text can hold.
        text.encode("utf-8")
    except UnicodeEncodeError:
        return None, f"field {text_key!r} holds half a surrogate pair"
    return text, ""


# --------------------------------------------------------------------------------------------------------- decompression

_CHUNK = 1 << 20
_MOST_EXPANDED, _EXPANDS_FREELY = 100, 260 * MIB
"""Times that a compressed file may expand, and bytes from which on: 256 MiB and what is read ahead. Text shrinks to a tenth,
logs to a fortieth; gzip can reach 1,000 and Zstandard 30,000."""

_WINDOW_LOG = 31
"""Zstandard's largest window is 2**31 bytes (zstd --long=31), as dumps of forums have it. The library allocates as much, and
touches what the content fills."""


class DamagedFile(Exception):
    """The content is damaged and reading cannot continue. The message is the reason."""


def decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    """The content of an open file, decompressed if its name ends in .gz or .zst. Reading it may raise DamagedFile."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(_Expanding(raw, gzip.GzipFile(fileobj=raw), (zlib.error, gzip.BadGzipFile), "gzip"), _CHUNK)
    if path.lower().endswith(".zst"):
        file = zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
        return io.BufferedReader(_Expanding(raw, file, (zstd.ZstdError,), "Zstandard"), _CHUNK)
    return raw


class _Expanding(io.RawIOBase):
    """What compressed bytes expand to, which may not be too much."""

    def __init__(self, raw: BinaryIO, file: io.BufferedIOBase, errors: tuple[type[Exception], ...], name: str):
        self._raw, self._file, self._errors, self._name = raw, file, (EOFError, *errors), name
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._file.readinto(buffer)
        except self._errors as error:
            raise DamagedFile(f"damaged {self._name} ({line_of(error)})") from None
        self._position += count
        if self._position > _EXPANDS_FREELY and self._position > _MOST_EXPANDED * self._raw.tell():
            raise DamagedFile(f"it expands to more than {_MOST_EXPANDED} times its size")
        return count
