"""Texts out of files: plain text, JSON lines, Parquet; compressed with gzip or Zstandard or not.

A file can be read in parts, so that several processes share a large one: JSON lines by bytes, Parquet by row groups. A line
belongs to the part in which it begins.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from jaxllm.config_errors import ConfigError, line_of

_LINES = (".jsonl", ".json", ".ndjson")
_CHUNK = 1 << 20
_ROWS = 256


@dataclass(frozen=True)
class InputFile:
    """A file as it was when the work was shared out."""

    path: str
    size: int
    """Bytes."""
    modified_ns: int


@dataclass(frozen=True)
class Part:
    """Something to read: bytes [start, stop) of a file, or its row groups [start, stop) if it is Parquet."""

    file: InputFile
    start: int
    stop: int
    size: int
    """Bytes of the file that belong to it, for sharing out work."""


class Record(NamedTuple):
    text: str | None
    """None: broken."""
    number: int | None
    """Line or row, counted from 1 in the part; None for a whole file."""
    reason: str
    """What is broken."""
    read: int
    """Bytes of the part read so far, as they are on disk."""


def is_lines(path: str) -> bool:
    return _uncompressed(path).endswith(_LINES)


def is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def is_splittable(path: str) -> bool:
    """Whether parts of it can begin at any byte."""
    return path.lower().endswith(_LINES)


def row_groups(path: str, text_key: str) -> list[int]:
    """Compressed bytes of each row group of a Parquet file.

    Raises:
      ConfigError: not Parquet, no column of that name, or pyarrow is not installed.
    """
    with _parquet(path) as parquet:
        columns = parquet.schema_arrow.names
        if text_key not in columns:
            raise ConfigError(f"{path} has no column {text_key}: set --text-key to one of {', '.join(columns)}.")
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        return [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]


def read_part(part: Part, text_key: str) -> Iterator[Record]:
    """The records of a part, in order. Blank lines are none.

    Raises:
      ConfigError: the file cannot be read, or has changed since the work was shared out.
    """
    path = part.file.path
    try:
        found = os.stat(path)
        if (found.st_size, found.st_mtime_ns) != (part.file.size, part.file.modified_ns):
            raise ConfigError(f"{path} has changed while it was being prepared: run the command again when it is finished.")
        if is_parquet(path):
            yield from _read_rows(part, text_key)
        elif is_lines(path):
            yield from _read_lines(part, text_key)
        else:
            yield _read_text(part)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): mend it or leave it out.") from None


def read_objects(path: str) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """(line, the object on it, "") of a file of JSON lines, compressed or not, in order; None and the reason where a line holds
    none. Blank lines are left out.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        size = os.stat(path).st_size
        for line, number, _, damage in _lines(Part(InputFile(path, size, 0), 0, size, size)):
            yield (number, None, damage) if line is None else (number, *_object(line))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): mend it or leave it out.") from None


def records_before(part: Part) -> int:
    """Lines or rows of the file that come before the part's first: what turns Record.number into a number in the file."""
    if is_parquet(part.file.path):
        with _parquet(part.file.path) as parquet:
            return sum(parquet.metadata.row_group(i).num_rows for i in range(part.start))
    with open(part.file.path, "rb") as file:
        lines, left = 0, _skip_to_line(file, part.start)
        file.seek(0)
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
        return lines


# -------------------------------------------------------------------------------------------------------------- text


def _read_text(part: Part) -> Record:
    with open(part.file.path, "rb") as raw:
        try:
            content = _decompressed(part.file.path, raw).read()
        except _Damaged as error:
            return Record(None, None, str(error), part.size)
    try:
        return Record(content.decode("utf-8"), None, "", part.size)
    except UnicodeDecodeError as error:
        return Record(None, None, f"not UTF-8 text (byte {error.start})", part.size)


# ------------------------------------------------------------------------------------------------------------- lines


def _read_lines(part: Part, text_key: str) -> Iterator[Record]:
    for line, number, read, damage in _lines(part):
        text, reason = (None, damage) if line is None else _field(line, text_key)
        yield Record(text, number, reason, read)


def _lines(part: Part) -> Iterator[tuple[bytes | None, int, int, str]]:
    """(line, its number in the part from 1, bytes read so far, "") of lines that are not blank; None and the reason where the
    file is damaged, which ends it.
    """
    with open(part.file.path, "rb") as raw:
        whole = not is_splittable(part.file.path)
        file = _decompressed(part.file.path, raw)
        position = 0 if whole else _skip_to_line(raw, part.start)
        number = 0
        while whole or position < part.stop:
            try:
                line = file.readline()
            except _Damaged as error:
                yield None, number + 1, part.size, str(error)
                return
            if not line:
                return
            position += len(line)
            number += 1
            if position == len(line):
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace():
                continue
            yield line, number, (raw.tell() if whole else position) - part.start, ""


def _skip_to_line(file: BinaryIO, start: int) -> int:
    """Moves to the first line that begins at byte `start` or later; where that is."""
    if start > 0:
        # Beginning one byte early keeps a line that begins exactly there.
        file.seek(start - 1)
        file.readline()
    return file.tell()


def _field(line: bytes, text_key: str) -> tuple[str | None, str]:
    value, reason = _object(line)
    if value is None:
        return None, reason
    if text_key not in value:
        return None, f"no field {text_key!r}"
    return _checked(value[text_key], text_key)


def _object(line: bytes) -> tuple[dict[str, Any] | None, str]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 (byte {error.start} of the line)"
    except json.JSONDecodeError as error:
        return None, f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON that can be read ({' '.join(str(error).split())})"
    if not isinstance(value, dict):
        return None, "not a JSON object"
    return value, ""


def _checked(text: Any, text_key: str) -> tuple[str | None, str]:
    if not isinstance(text, str):
        return None, f"field {text_key!r} is not a string"
    try:
        # JSON can escape half of a surrogate pair, which no encoding of text can hold.
        text.encode("utf-8")
    except UnicodeEncodeError:
        return None, f"field {text_key!r} holds half a surrogate pair"
    return text, ""


# -------------------------------------------------------------------------------------------------------------- rows


def _read_rows(part: Part, text_key: str) -> Iterator[Record]:
    from pyarrow import ArrowException

    number, read = 0, 0
    with _parquet(part.file.path) as parquet:
        rows = sum(parquet.metadata.row_group(i).num_rows for i in range(part.start, part.stop))
        for group in range(part.start, part.stop):
            before = number
            try:
                for batch in parquet.iter_batches(_ROWS, row_groups=[group], columns=[text_key]):
                    for value in _values(batch.column(batch.schema.get_field_index(text_key))):
                        number += 1
                        read = number * part.size // rows
                        if isinstance(value, UnicodeDecodeError):
                            yield Record(None, number, "not UTF-8", read)
                        else:
                            yield Record(*_row(number, value, text_key), read)
            except (ArrowException, OSError) as error:
                # What the group still held is lost; the next one begins where it would have.
                yield Record(None, number + 1, f"damaged Parquet ({line_of(error)})", read)
                number = before + parquet.metadata.row_group(group).num_rows


def _row(number: int, value: Any, text_key: str) -> tuple[str | None, int, str]:
    text, reason = _checked(value, text_key)
    return text, number, reason


def _values(column: Any) -> list[Any]:
    """Python's values; the error where a string is not UTF-8, which Parquet does not check."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _parquet(path: str) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"Reading {path} needs pyarrow: pip install 'jaxllm[parquet]'.") from None
    try:
        return ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet ({line_of(error)}): mend it or leave it out.") from None


# ------------------------------------------------------------------------------------------------------- compression


class _Damaged(Exception):
    """Compressed data that cannot be read on."""


def _uncompressed(path: str) -> str:
    lower = path.lower()
    return lower.removesuffix(".gz").removesuffix(".zst")


def _decompressed(path: str, raw: BinaryIO) -> BinaryIO:
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
            raise _Damaged(f"damaged gzip ({line_of(error)})") from None


class _Zstandard(io.RawIOBase):
    """Like zstandard's own reader, but a file that was cut short is not taken for a whole one."""

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
            data = self._waiting or self._raw.read(_CHUNK // 8)
            self._waiting = b""
            if not data:
                if self._frame is not None:
                    raise _Damaged("damaged Zstandard (it ends too early)")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise _Damaged(f"damaged Zstandard ({line_of(error)})") from None
            if self._frame.eof:
                self._waiting, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
