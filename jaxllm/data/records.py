"""Reads texts from files: plain text, JSON lines or arrays, CSV, Parquet or Arrow, optionally compressed by gzip or Zstandard.

A file can be read in parts, so that several processes share a large one: JSON lines by byte range, Parquet by row group. A
line belongs to the part in which it begins.

Nothing is read without a bound: a line, a text and what compressed bytes expand to have limits, and what is longer is a broken
record. Only the texts of files that are made into bytes may have any length, because they pass in blocks.
"""

import codecs
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

from jaxllm.config.errors import ConfigError
from jaxllm.config.file_patterns import MOST_ENTRIES, Listing
from jaxllm.data.parts import DamagedFile, InputFile, Part, Record, check_text, decompressed, is_splittable, kind_of
from jaxllm.data.rows import (
    CsvRows,
    arrow_columns,
    elements,
    parquet_columns,
    parquet_objects,
    read_arrow,
    read_parquet,
    rows_before,
)
from jaxllm.data.stores import open_input, require_unchanged, unreadable
from jaxllm.untrusted import JSON_BYTES, MIB, RefusedInput, parse_json, shown

_CHUNK = 1 << 20
_SNIFFED = 4096
LINE_BYTES, LINE_BYTES_SKIPPED = JSON_BYTES, 4 * JSON_BYTES
"""A longer line is a broken record; a file with a line longer than the second is refused, as it is hardly JSON lines. From the
bytes of a line to its ids up to ten copies of it are alive: 640 MiB for the longest."""
TEXT_BYTES, BLOCKS_FROM = 256 * MIB, 16 * MIB
"""The longest text of a file that a tokenizer encodes in one piece; from the second on, bytes pass in blocks."""
LONGEST_DOCUMENT = 2**32 - 2
"""Bytes, which with its end a length of 32 bits counts."""
_ARCHIVES = {
    **{"gzip": rb"\x1f\x8b", "Zstandard": rb"\x28\xb5\x2f\xfd", "bzip2": rb"BZh[1-9]1AY&SY", "xz": rb"\xfd7zXZ"},
    **{"zip": rb"PK\x03\x04", "7z": rb"7z\xbc\xaf", "LZ4": rb'\x04"M\x18', "tar": rb"(?s:.{257})ustar"},
    **{"Parquet": rb"PAR1[^ -~]", "Arrow": rb"ARROW1\0"},
}
_NAMES = "end its name in .jsonl, .gz, .zst, .parquet or .arrow if it is that, unpack it, or leave it out"
FEW_BROKEN, BROKEN_SHARE = 10, 0.01
"""Records that a small input may lose, up to half of it; and the share that any may lose."""


def require_share(share: float, key: str) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(f"{key}={share:g} is not valid: it should be from 0 to 1.")


def require_few_broken(where: str, broken: int, total: int, first: str, share: float, key: str) -> None:
    """Raises ConfigError if more than a share of the records, which `key` sets, and than FEW_BROKEN or half cannot be used."""
    if broken > (max(share * total * (1 + 1e-9), min(FEW_BROKEN, total / 2)) if share else 0):
        raise ConfigError(
            f"{broken:,} of {total:,} records of {where} cannot be used, the first {first}: fix them or leave them out, or set "
            f"{key}={math.ceil(100 * broken / total) / 100:g} to do without them."
        )


def require_ends(where: str, lost: int, size: int, first: str, share: float, key: str) -> None:
    """Raises ConfigError if more than a share of the bytes is in files that cannot be read to their ends."""
    if lost > share * size * (1 + 1e-9):
        raise ConfigError(
            f"{lost / size:.0%} of {where} cannot be read to the end, the first {first}: copy such files again or leave them "
            f"out, or set {key}={math.ceil(100 * lost / size) / 100:g} to do without what they lack."
        )


def inspected(file: InputFile, text_key: str) -> tuple[InputFile, list[int]]:
    """The file with the format of its content, where its name does not say it (a .json holds lines of objects or one array),
    and the bytes of each row group of Parquet.

    Raises:
      ConfigError: a table cannot be read, or has no column of that name.
    """
    if _is_array(file):
        return replace(file, kind="array"), []
    names, groups = [text_key], []
    try:
        if file.kind == "csv":
            with open_input(file) as raw:
                names = CsvRows(decompressed(file.path, raw).readline, LINE_BYTES).names
        elif file.kind == "arrow":
            names = arrow_columns(file)
        elif file.kind == "parquet":
            names, groups = parquet_columns(file)
    except DamagedFile as error:
        raise ConfigError(f"{file.path} cannot be read ({error}): fix it or leave it out.") from None
    except OSError as error:
        raise unreadable(file.path, error) from None
    if text_key not in names:
        which = f"one of {shown(', '.join(names[:100]), 400)}" if names else "a column, or leave the empty file out"
        raise ConfigError(f"{file.path} has no column {text_key}: set --text-key to {which}.")
    return file, groups


def _is_array(file: InputFile) -> bool:
    if file.path.lower().endswith((".json", ".json.gz", ".json.zst")):
        # Where this fails, reading the file will say what is wrong.
        with suppress(DamagedFile, OSError), open_input(file) as raw:
            begins = decompressed(file.path, raw).read(_SNIFFED)
            return begins.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return False


def read_part(part: Part, text_key: str, in_blocks: bool = False) -> Iterator[Record]:
    """Yields the records of a part, in order. Blank lines are skipped.

    Args:
      in_blocks: give the long text of a file in blocks, of which any number may follow.

    Raises:
      ConfigError: the file cannot be read, has changed since the work was divided, or has a line without an end.
    """
    file = part.file
    tables = {"parquet": read_parquet, "arrow": read_arrow, "csv": _read_csv, "array": _read_json, "lines": _read_json}
    try:
        require_unchanged(file)
        if file.kind == "text":
            yield _read_text(part, text_key, in_blocks)
        else:
            yield from tables[file.kind](part, text_key)
        if file.address:
            # A store gives a part in many answers, each of the content at its time.
            require_unchanged(file)
    except OSError as error:
        raise unreadable(file.path, error) from None


def read_objects(path: str) -> Iterator[tuple[int, dict[str, Any] | None, str, int]]:
    """Yields (number of the line, element or row, JSON object, "", 0) from a file of JSON lines or one JSON array, compressed
    or not, or of Parquet, in order. For one without an object it yields None and the reason, and last Record.lost. Blank lines
    are skipped. Raises as `read_part`.
    """
    try:
        file = InputFile(path, os.stat(path).st_size, 0, kind_of(path))
        if file.kind == "parquet":
            yield from parquet_objects(file)
            return
        read = _elements if _is_array(file) else _lines
        for line, number, _, damage, lost in read(Part(file, 0, file.size, file.size)):
            yield (number, None, damage, lost) if line is None else (number, *_object(line), 0)
    except OSError as error:
        raise unreadable(path, error) from None


def records_before(part: Part) -> int:
    """Lines or rows before the first of this part. Adding it to Record.number gives the number in the file."""
    if part.file.kind == "parquet":
        return rows_before(part)
    if part.start == 0:
        return 0
    with open_input(part.file) as file:
        lines, left = 0, _skip_to_line(file, part)
        file.seek(0)
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
        return lines


# -------------------------------------------------------------------------------------------------------------- text


def _read_text(part: Part, text_key: str, in_blocks: bool) -> Record:
    at_most = BLOCKS_FROM if in_blocks else TEXT_BYTES
    with open_input(part.file) as raw:
        try:
            content = decompressed(part.file.path, raw).read(at_most + 1)
            require_text(part.file.path, content, {text_key}, _NAMES)
            if len(content) <= at_most:
                return Record(content.decode("utf-8"), None, "", part.size)
            if not in_blocks:
                raise DamagedFile(f"{_longer_than(TEXT_BYTES)}: split it")
            # Read twice: now to its end, because a document is stored in whole or not at all.
            for _ in _blocks(part.file):
                pass
            return Record(None, None, "", part.size, lambda: _blocks(part.file))
        except UnicodeDecodeError as error:
            return Record(None, None, f"not UTF-8 text (byte {error.start})", part.size)
        except DamagedFile as error:
            return Record(None, None, str(error), part.size)


def require_text(path: str, content: bytes, fields: Collection[str], fix: str) -> None:
    """ConfigError if what is read as one text is an archive, or JSON lines with one of these fields. `fix` ends it."""
    objects = [_object(line)[0] or {} for line in content[:_CHUNK].split(b"\n", 2)[:2]]
    what = next((what for what, begin in _ARCHIVES.items() if re.match(begin, content)), None)
    if len(objects) == 2 and all(not one.keys().isdisjoint(fields) for one in objects):
        what = "JSON lines"
    if what:
        raise ConfigError(f"{path} is {what}, and would be read as one text: {fix}.")


def _blocks(of: InputFile) -> Iterator[bytes]:
    """Yields the text of a file in blocks. Raises DamagedFile where it is no text, or expands too far."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with open_input(of) as raw:
        file = decompressed(of.path, raw)
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
            if position > LONGEST_DOCUMENT:
                raise DamagedFile("longer than 4 GiB: split it")
            yield block


def _longer_than(limit: int) -> str:
    return f"longer than {limit // MIB} MiB"


# ------------------------------------------------------------------------------------------------------------- lines


def _read_json(part: Part, text_key: str) -> Iterator[Record]:
    for line, number, read, damage, lost in (_elements if part.file.kind == "array" else _lines)(part):
        text, reason = (None, damage) if line is None else _field(line, text_key)
        yield Record(text, number, reason, read, lost=lost)


def _lines(part: Part) -> Iterator[tuple[bytes | None, int, int, str, int]]:
    """Yields (line, its number in the part from 1, bytes read so far, "", 0) for lines that are not blank. For a line that is
    too long it yields None and the reason. Where the file is damaged it does so too, with Record.lost, and ends.
    """
    with open_input(part.file) as raw:
        whole = not is_splittable(part.file)
        file = decompressed(part.file.path, raw)
        position = 0 if whole else _skip_to_line(raw, part)
        number = 0
        while whole or position < part.stop:
            begin, reason = position, ""
            number += 1
            try:
                line = file.readline(LINE_BYTES + 1)
                position += len(line)
                if len(line) > LINE_BYTES and not line.endswith(b"\n"):
                    line, reason = None, _longer_than(LINE_BYTES)
                    position += _skip_line(file, part.file.path, begin)
            except DamagedFile as error:
                yield None, number, part.size, str(error), part.size
                return
            if line is not None:
                if not line:
                    return
                if begin == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.isspace():
                    continue
            yield line, number, (raw.tell() if whole else position) - part.start, reason, 0


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
    return check_text(value[text_key], text_key)


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


# ------------------------------------------------------------------------------------------------------ arrays and CSV


def _elements(part: Part) -> Iterator[tuple[bytes | None, int, int, str, int]]:
    """As `_lines`, of the elements of a JSON array."""
    number = 0
    with open_input(part.file) as raw:
        try:
            for number, element in enumerate(elements(decompressed(part.file.path, raw).read, LINE_BYTES), 1):
                yield element, number, raw.tell(), "", 0
        except DamagedFile as error:
            yield None, number + 1, part.size, str(error), part.size


def _read_csv(part: Part, text_key: str) -> Iterator[Record]:
    number = 0
    with open_input(part.file) as raw:
        try:
            rows = CsvRows(decompressed(part.file.path, raw).readline, LINE_BYTES)
            place = rows.names.index(text_key)
            for number, (row, reason) in enumerate(rows, 1):
                text = None
                if row is not None and len(row) <= place:
                    reason = f"it has {len(row)} of {len(rows.names)} columns"
                elif row is not None:
                    text, reason = check_text(row[place], text_key)
                yield Record(text, number, reason, raw.tell())
        except DamagedFile as error:
            yield Record(None, number + 1, str(error), part.size, lost=part.size)


def listed(patterns: Sequence[str]) -> list[str]:
    """The files that match data.paths, sorted. Raises ConfigError if there are too many entries to look at."""
    listing = Listing(MOST_ENTRIES)
    try:
        return sorted({path for pattern in patterns for path in listing.files(pattern)})
    except RefusedInput as error:
        sentence = f"data.paths is too much to read at the start of each run ({error}): name a smaller folder."
        raise ConfigError(sentence) from None
