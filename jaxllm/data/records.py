"""Reads texts from files: plain text, JSON lines or Parquet, optionally compressed with gzip or Zstandard.

A file can be read in parts, so that several processes share a large one: JSON lines by byte range, Parquet by row group. A
line belongs to the part in which it begins.

Nothing is read without a bound: a line, a text and what compressed bytes expand to have limits, and what is longer is a broken
record. Only the texts of files that are made into bytes may have any length, because they pass in blocks.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from jaxllm.config.errors import ConfigError, line_of
from jaxllm.data.compression import DamagedFile, decompressed
from jaxllm.untrusted import JSON_BYTES, MIB, RefusedInput, parse_json, reason_of

_LINES = (".jsonl", ".json", ".ndjson")
_CHUNK = 1 << 20
_ROWS = 256
LINE_BYTES, LINE_BYTES_SKIPPED = JSON_BYTES, 4 * JSON_BYTES
"""A longer line is a broken record; a file with a line longer than the second is refused, as it is hardly JSON lines. From the
bytes of a line to its ids up to ten copies of it are alive: 640 MiB for the longest."""
TEXT_BYTES, BLOCKS_FROM = 256 * MIB, 16 * MIB
"""The longest text of a file that a tokenizer encodes in one piece; from the second on, bytes pass in blocks."""
LONGEST_DOCUMENT = 2**32 - 2
"""Bytes, which with its end a length of 32 bits counts."""
_MOST_EXPANDED = 100
"""Times that a compressed text may expand beyond TEXT_BYTES. Text shrinks to a tenth, logs to a fortieth; gzip can reach 1,000
and Zstandard 30,000."""
_BLANK = 1_000_000
"""Blank lines in a row that are hardly meant."""


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
    """None for a broken record, and for a text in blocks."""
    number: int | None
    """Line or row, counted from 1 in the part; None for a record that is a complete file."""
    reason: str
    """Why the record is broken."""
    read: int
    """Bytes of the part read so far, counted before decompression."""
    blocks: Callable[[], Iterator[bytes]] | None = None
    """Reads a long text in blocks of UTF-8, which may end inside a character."""


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


def read_part(part: Part, text_key: str, in_blocks: bool = False) -> Iterator[Record]:
    """Yields the records of a part, in order. Blank lines are skipped.

    Args:
      in_blocks: give the long text of a file in blocks, of which any number may follow.

    Raises:
      ConfigError: the file cannot be read, has changed since the work was divided, or has a line without an end.
    """
    path = part.file.path
    try:
        found = os.stat(path)
        if (found.st_size, found.st_mtime_ns) != (part.file.size, part.file.modified_ns):
            raise has_changed(part.file)
        if is_parquet(path):
            yield from _read_rows(part, text_key)
        elif is_lines(path):
            yield from _read_lines(part, text_key)
        else:
            yield _read_text(part, in_blocks)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read ({reason_of(error)}): fix it or leave it out.")


def has_changed(file: InputFile) -> ConfigError:
    return ConfigError(f"{file.path} has changed while it was being prepared: run the command again when it is finished.")


def read_objects(path: str) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Yields (line number, JSON object, "") from a file of JSON lines, compressed or not, in order. For a line without an
    object it yields None and the reason. Blank lines are skipped.

    Raises:
      ConfigError: the file cannot be read, or has a line without an end.
    """
    try:
        size = os.stat(path).st_size
        for line, number, _, damage in _lines(Part(InputFile(path, size, 0), 0, size, size)):
            yield (number, None, damage) if line is None else (number, *_object(line))
    except OSError as error:
        raise unreadable(path, error) from None


def records_before(part: Part) -> int:
    """Lines or rows before the first of this part. Adding it to Record.number gives the number in the file."""
    if is_parquet(part.file.path):
        with _parquet(part.file.path) as parquet:
            return sum(parquet.metadata.row_group(i).num_rows for i in range(part.start))
    with open(part.file.path, "rb") as file:
        lines, left = 0, _skip_to_line(file, part)
        file.seek(0)
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
        return lines


# -------------------------------------------------------------------------------------------------------------- text


def _read_text(part: Part, in_blocks: bool) -> Record:
    at_most = BLOCKS_FROM if in_blocks else TEXT_BYTES
    with open(part.file.path, "rb") as raw:
        try:
            content = decompressed(part.file.path, raw).read(at_most + 1)
        except DamagedFile as error:
            return Record(None, None, str(error), part.size)
    if len(content) > at_most:
        return _in_blocks(part) if in_blocks else Record(None, None, f"{_longer_than(TEXT_BYTES)}: split it", part.size)
    try:
        return Record(content.decode("utf-8"), None, "", part.size)
    except UnicodeDecodeError as error:
        return Record(None, None, f"not UTF-8 text (byte {error.start})", part.size)


def _in_blocks(part: Part) -> Record:
    """A record whose text is read twice: now to its end, because a document is stored in whole or not at all."""
    try:
        for _ in _blocks(part.file.path):
            pass
    except DamagedFile as error:
        return Record(None, None, str(error), part.size)
    return Record(None, None, "", part.size, lambda: _blocks(part.file.path))


def _blocks(path: str) -> Iterator[bytes]:
    """Yields the text of a file in blocks. Raises DamagedFile where it is no text, or expands too far."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as raw:
        file = decompressed(path, raw)
        while True:
            block, waiting = file.read(_CHUNK), len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise DamagedFile(f"not UTF-8 text (byte {position - waiting + error.start})") from None
            if not block:
                return
            if len(block) == _CHUNK and not block.strip(b"\0"):
                # A hole, as a crash or a failed copy leaves it.
                raise DamagedFile(f"not text (only zero bytes from byte {position} on)")
            position += len(block)
            _require_modest_expansion(file, raw, position)
            if position > LONGEST_DOCUMENT:
                raise DamagedFile("longer than 4 GiB: split it")
            yield block


def _require_modest_expansion(file: BinaryIO, raw: BinaryIO, position: int) -> None:
    """Raises DamagedFile if so many bytes are more than a compressed file should give."""
    if file is not raw and position > max(TEXT_BYTES, _MOST_EXPANDED * raw.tell()):
        raise DamagedFile(f"it expands to more than {_MOST_EXPANDED} times its size")


def _longer_than(limit: int) -> str:
    return f"longer than {limit // MIB} MiB"


# ------------------------------------------------------------------------------------------------------------- lines


def _read_lines(part: Part, text_key: str) -> Iterator[Record]:
    for line, number, read, damage in _lines(part):
        text, reason = (None, damage) if line is None else _field(line, text_key)
        yield Record(text, number, reason, read)


def _lines(part: Part) -> Iterator[tuple[bytes | None, int, int, str]]:
    """Yields (line, its number in the part from 1, bytes read so far, "") for lines that are not blank. For a line that is too
    long it yields None and the reason. Where the file is damaged it does so too, and ends.
    """
    with open(part.file.path, "rb") as raw:
        whole = not is_splittable(part.file.path)
        file = decompressed(part.file.path, raw)
        position = 0 if whole else _skip_to_line(raw, part)
        number = blank = 0
        while whole or position < part.stop:
            begin, reason = position, ""
            number += 1
            try:
                line = file.readline(LINE_BYTES + 1)
                position += len(line)
                if number % 64 == 0:
                    _require_modest_expansion(file, raw, position)
                if len(line) > LINE_BYTES and not line.endswith(b"\n"):
                    line, reason = None, _longer_than(LINE_BYTES)
                    position += _skip_line(file, part.file.path, begin)
            except DamagedFile as error:
                yield None, number, part.size, str(error)
                return
            if line is not None:
                if not line:
                    return
                if begin == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.isspace():
                    blank += 1
                    if blank % _BLANK == 0:
                        raise ConfigError(f"{part.file.path} has {blank:,} blank lines in a row: fix it or leave it out.")
                    continue
                blank = 0
            yield line, number, (raw.tell() if whole else position) - part.start, reason


def _skip_line(file: BinaryIO, path: str, begin: int) -> int:
    """Moves to the end of a line that is too long, without holding it, and returns the number of skipped bytes."""
    skipped = 0
    while not (piece := file.readline(_CHUNK)).endswith(b"\n") and piece:
        skipped += len(piece)
        if skipped > LINE_BYTES_SKIPPED - LINE_BYTES:
            raise ConfigError(
                f"{path} has a line {_longer_than(LINE_BYTES_SKIPPED)} (from byte {begin:,} on), so it hardly holds one JSON "
                f"object per line: fix it or leave it out."
            )
    return skipped + len(piece)


def _skip_to_line(file: BinaryIO, part: Part) -> int:
    """Moves to the first line that begins in a part, and returns its position; the part's end or later if there is none."""
    if part.start > 0:
        # Starts one byte early to keep a line that begins exactly at `start`.
        file.seek(part.start - 1)
        left = part.stop - part.start + 1
        while left > 0 and not (piece := file.readline(min(_CHUNK, left))).endswith(b"\n") and piece:
            left -= len(piece)
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
        value = parse_json(line.removesuffix(b"\n").decode("utf-8"), lenient=True)
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 (byte {error.start} of the line)"
    except RefusedInput as error:
        return None, str(error)
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
