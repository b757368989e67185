"""Reads texts from files: plain text, JSON lines or Parquet, optionally compressed with gzip or Zstandard.

A file can be read in parts, so that several processes share a large one: JSON lines by byte range, Parquet by row group. A
line belongs to the part in which it begins.
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

from jaxllm.config.errors import ConfigError, line_of

_LINES = (".jsonl", ".json", ".ndjson")
_CHUNK = 1 << 20
_ROWS = 256


@dataclass(frozen=True)
class InputFile:
    """A file as it was when the work was divided."""

    path: str
    size: int
    """Bytes."""
    modified_ns: int


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
    """None for a broken record."""
    number: int | None
    """Line or row, counted from 1 in the part; None for a record that is a complete file."""
    reason: str
    """Why the record is broken."""
    read: int
    """Bytes of the part read so far, counted before decompression."""


def is_lines(path: str) -> bool:
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith(_LINES)


def is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def is_splittable(path: str) -> bool:
    """Whether a part of this file can begin at any byte."""
    return path.lower().endswith(_LINES)


def row_groups(path: str, text_key: str) -> list[int]:
    """Compressed bytes of each row group of a Parquet file.

    Raises:
      ConfigError: the file is not Parquet, has no column of that name, or pyarrow is not installed.
    """
    with _parquet(path) as parquet:
        columns = parquet.schema_arrow.names
        if text_key not in columns:
            raise ConfigError(f"{path} has no column {text_key}: set --text-key to one of {', '.join(columns)}.")
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        return [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]


def read_part(part: Part, text_key: str) -> Iterator[Record]:
    """Yields the records of a part, in order. Blank lines are skipped.

    Raises:
      ConfigError: the file cannot be read, or has changed since the work was divided.
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
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): fix it or leave it out.") from None


def read_objects(path: str) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Yields (line number, JSON object, "") from a file of JSON lines, compressed or not, in order. For a line without an
    object it yields None and the reason. Blank lines are skipped.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        size = os.stat(path).st_size
        for line, number, _, damage in _lines(Part(InputFile(path, size, 0), 0, size, size)):
            yield (number, None, damage) if line is None else (number, *_object(line))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): fix it or leave it out.") from None


def records_before(part: Part) -> int:
    """Lines or rows before the first of this part. Adding it to Record.number gives the number in the file."""
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
        except _DamagedFile as error:
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
    """Yields (line, its number in the part from 1, bytes read so far, "") for lines that are not blank. Where the file is
    damaged it yields None and the reason, and ends.
    """
    with open(part.file.path, "rb") as raw:
        whole = not is_splittable(part.file.path)
        file = _decompressed(part.file.path, raw)
        position = 0 if whole else _skip_to_line(raw, part.start)
        number = 0
        while whole or position < part.stop:
            try:
                line = file.readline()
            except _DamagedFile as error:
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
    """Moves to the first line that begins at byte `start` or later, and returns its position."""
    if start > 0:
        # Starts one byte early to keep a line that begins exactly at `start`.
        file.seek(start - 1)
        file.readline()
    return file.tell()


def _field(line: bytes, text_key: str) -> tuple[str | None, str]:
    value, reason = _object(line)
    if value is None:
        return None, reason
    if text_key not in value:
        return None, f"no field {text_key!r}"
    return _check_text(value[text_key], text_key)


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


def _check_text(text: Any, text_key: str) -> tuple[str | None, str]:
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
                        broken = isinstance(value, UnicodeDecodeError)
                        text, reason = (None, "not UTF-8") if broken else _check_text(value, text_key)
                        yield Record(text, number, reason, read)
            except (ArrowException, OSError) as error:
                # The rest of the group is lost. Numbers of the next group stay right.
                yield Record(None, number + 1, f"damaged Parquet ({line_of(error)})", read)
                number = before + parquet.metadata.row_group(group).num_rows


def _values(column: Any) -> list[Any]:
    """Converts a column to Python values. A string that is not UTF-8, which Parquet does not check, becomes its error."""
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
        raise ConfigError(f"{path} cannot be read as Parquet ({line_of(error)}): fix it or leave it out.") from None


# ------------------------------------------------------------------------------------------------------- compression


class _DamagedFile(Exception):
    """The compressed data is damaged and reading cannot continue."""


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
            raise _DamagedFile(f"damaged gzip ({line_of(error)})") from None


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
            data = self._waiting or self._raw.read(_CHUNK // 8)
            self._waiting = b""
            if not data:
                if self._frame is not None:
                    raise _DamagedFile("damaged Zstandard (it ends too early)")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise _DamagedFile(f"damaged Zstandard ({line_of(error)})") from None
            if self._frame.eof:
                self._waiting, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
