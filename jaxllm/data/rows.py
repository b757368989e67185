"""Reads rows of files: CSV and JSON arrays one at a time; Parquet and Arrow by pyarrow, Parquet by row groups, which are the
parts of a file, Arrow as a whole.
"""

import codecs
import csv
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxllm.config.errors import ConfigError, line_of
from jaxllm.data.parts import DamagedFile, InputFile, Part, Record, check_text
from jaxllm.data.stores import open_input
from jaxllm.untrusted import JSON_VALUES, MIB

# ---------------------------------------------------------------------------------------------------- CSV and JSON arrays
# Reads rows of CSV and elements of a JSON array, one at a time and of bounded size, from a file that need not be local.

_CHUNK = 1 << 20
_LEAST_LINE, _ROWS = 64, 256
# A lone quote is a string that does not end in what was read so far.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)


def elements(read: Callable[[int], bytes], at_most: int) -> Iterator[bytes]:
    """Yields the bytes of each element of a JSON array. Only its commas and brackets are looked at: an element may be no JSON.

    Args:
      read: gives up to so many next bytes; none at the end.
      at_most: bytes of an element.

    Raises:
      DamagedFile: an element is longer or has more than JSON_VALUES values, the array has no end, or something follows it.
    """
    data, begin, at, depth, count, values = b"", 0, 0, 0, 0, 0
    while True:
        found = _TOKEN.search(data, at)
        mark = found[0] if found else b'"'
        if (len(data) if found is None else found.start()) - begin > at_most:
            raise DamagedFile(f"an element is longer than {at_most // MIB} MiB")
        if found is None or mark == b'"':
            # As much again, so that a long string is not searched from its start many times.
            if not (more := read(max(_CHUNK, len(data) - begin))):
                raise DamagedFile("the JSON array does not end")
            at = (found.start() if found else len(data)) - begin
            data, begin = data[begin:] + more, 0
            continue
        at = found.end()
        if mark in (b"[", b"{", b",") and (values := values + 1) > JSON_VALUES:
            raise DamagedFile(f"an element has more than {JSON_VALUES:,} values")
        if mark in (b"[", b"{"):
            depth += 1
            begin = at if depth == 1 else begin
        elif mark in (b"]", b"}"):
            depth -= 1
        if (mark == b"," and depth == 1) or depth == 0:
            element, begin = data[begin : found.start()], at
            # An array without elements has none to yield, while an element without content is broken.
            if depth or count or element.strip():
                count, values = count + 1, 0
                yield element
        if depth == 0:
            rest = data[at:]
            while rest or (rest := read(_CHUNK)):
                if rest.strip():
                    raise DamagedFile("something follows the JSON array")
                rest = b""
            return


class CsvRows:
    """The rows of CSV as RFC 4180 defines it, in UTF-8, with names in the first row. What is not UTF-8 becomes lone surrogates.

        rows = CsvRows(readline, at_most)
        rows.names
        for values, reason in rows: ...

    A blank line is no row. For a row that cannot be read, values are None and `reason` says why.
    """

    def __init__(self, readline: Callable[[int], bytes], at_most: int):
        """`readline` gives the next line, or so many bytes of it; none at the end. Raises DamagedFile where a row is longer
        than `at_most` bytes, also from iterating, and if the first row cannot be read.
        """
        self._readline, self._at_most, self._left = readline, at_most, at_most
        # What Python refuses by default is 128 KiB, as one setting for all readers.
        csv.field_size_limit(at_most)
        self._rows = csv.reader(self._lines(), strict=True)
        names, reason = next(iter(self), ([], ""))
        if names is None:
            raise DamagedFile(reason)
        self.names: list[str] = [*(name.removeprefix(codecs.BOM_UTF8.decode()) for name in names[:1]), *names[1:]]

    def __iter__(self) -> Iterator[tuple[list[str] | None, str]]:
        while True:
            self._left = self._at_most
            try:
                row = next(self._rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield None, f"not CSV ({line_of(error)})"
                continue
            if row:
                yield row, ""

    def _lines(self) -> Iterator[str]:
        while line := self._readline(max(self._left, 0) + 1):
            # A short line takes as long as one of so many bytes.
            self._left -= max(len(line), _LEAST_LINE)
            if self._left < 0:
                raise DamagedFile(f"a row is longer than {self._at_most // MIB} MiB, perhaps because a quote does not end")
            # A generator that raises has ended: bytes that are not UTF-8 must break one row alone, as half surrogate pairs.
            yield line.decode("utf-8", errors="surrogateescape")


# ----------------------------------------------------------------------------------------------------------- Parquet


def parquet_columns(file: InputFile) -> tuple[list[str], list[int]]:
    """Names of the columns, and compressed bytes of each row group. Raises as `arrow_columns`."""
    with _parquet(file) as parquet:
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        sizes = [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]
        return parquet.schema_arrow.names, sizes


def rows_before(part: Part) -> int:
    """Rows of the row groups before this part."""
    with _parquet(part.file) as parquet:
        return sum(parquet.metadata.row_group(i).num_rows for i in range(part.start))


def read_parquet(part: Part, text_key: str) -> Iterator[Record]:
    from pyarrow import ArrowException

    number, read = 0, 0
    with _parquet(part.file) as parquet:
        rows = sum(parquet.metadata.row_group(i).num_rows for i in range(part.start, part.stop))
        for group in range(part.start, part.stop):
            before = number
            try:
                for batch in parquet.iter_batches(_ROWS, row_groups=[group], columns=[text_key]):
                    for value in _values(batch.column(batch.schema.get_field_index(text_key))):
                        number += 1
                        read = number * part.size // rows
                        yield _record(value, text_key, number, read)
            except (ArrowException, OSError) as error:
                # The rest of the group is lost. Numbers of the next group stay right.
                after = before + parquet.metadata.row_group(group).num_rows
                lost = max(after - number, 0) * part.size // max(rows, 1)
                yield Record(None, number + 1, f"damaged Parquet ({line_of(error)})", read, lost=lost)
                number = after


def parquet_objects(file: InputFile) -> Iterator[tuple[int, dict[str, Any] | None, str, int]]:
    """Yields (number of the row, its values by column, "", 0); where the file is damaged it yields None, the reason and
    Record.lost, and ends. Parquet has every field in every row: one without a value is left out."""
    from pyarrow import ArrowException

    number = 0
    with _parquet(file) as parquet:
        try:
            for batch in parquet.iter_batches(_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row), "", 0
        except (ArrowException, OSError, UnicodeDecodeError) as error:
            yield number + 1, None, f"damaged Parquet ({line_of(error)})", file.size


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _parquet(file: InputFile) -> Iterator[Any]:
    with open_input(file) as source:
        with _reads(file, "Parquet"):
            from pyarrow.parquet import ParquetFile

            # pyarrow reads a local file faster by itself.
            parquet = ParquetFile(source if file.address else file.path)
        yield parquet


# ------------------------------------------------------------------------------------------------------------- Arrow


def arrow_columns(file: InputFile) -> list[str]:
    """Names of the columns. Raises ConfigError if the file is not Arrow, or pyarrow is not installed."""
    with _arrow(file) as (_, reader):
        return reader.schema.names


def read_arrow(part: Part, text_key: str) -> Iterator[Record]:
    number = 0
    place = arrow_columns(part.file).index(text_key)
    with _arrow(part.file, [place]) as (source, reader):
        from pyarrow import ArrowException

        batches = iter(reader) if not hasattr(reader, "get_batch") else map(reader.get_batch, range(reader.num_record_batches))
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                # Arrow trusts what a file says about offsets and sizes.
                batch.validate(full=True)
            except (ArrowException, OSError) as error:
                yield Record(None, number + 1, f"damaged Arrow ({line_of(error)})", part.size, lost=part.size)
                return
            for start in range(0, batch.num_rows, _ROWS):
                for value in _values(batch.column(0).slice(start, _ROWS)):
                    number += 1
                    yield _record(value, text_key, number, min(source.tell(), part.size))


@contextmanager
def _arrow(file: InputFile, fields: list[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """The open file and its reader: Arrow's file format has an index at its end, and its stream format, which Hugging Face's
    datasets keep on disks, has none.
    """
    with open_input(file) as source:
        with _reads(file, "Arrow") as pyarrow:
            from pyarrow import ipc

            options = ipc.IpcReadOptions(included_fields=fields)
            try:
                reader = ipc.open_file(source, options=options)
            except pyarrow.ArrowInvalid:
                source.seek(0)
                reader = ipc.open_stream(source, options=options)
        yield source, reader


# -------------------------------------------------------------------------------------------------------------- both


@contextmanager
def _reads(file: InputFile, as_what: str) -> Iterator[Any]:
    """Yields pyarrow. Raises ConfigError if it is not installed, or where it cannot read a file inside."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"Reading {file.path} needs pyarrow: pip install 'jaxllm[parquet]'.") from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file.path} cannot be read as {as_what} ({line_of(error)}): fix it or leave it out.") from None


def _record(value: Any, text_key: str, number: int, read: int) -> Record:
    text, reason = (None, "not UTF-8") if isinstance(value, UnicodeDecodeError) else check_text(value, text_key)
    return Record(text, number, reason, read)


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
