"""Reads rows of Parquet and Arrow files by pyarrow: Parquet by row groups, which are the parts of a file; Arrow as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxllm.config.errors import ConfigError, line_of
from jaxllm.data.parts import InputFile, Part, Record, check_text
from jaxllm.data.stores import open_input
from jaxllm.untrusted import shown

_ROWS = 256


def no_column(path: str, text_key: str, columns: list[str]) -> ConfigError:
    which = f"one of {shown(', '.join(columns[:100]), 400)}" if columns else "a column, or leave the empty file out"
    return ConfigError(f"{path} has no column {text_key}: set --text-key to {which}.")


# ----------------------------------------------------------------------------------------------------------- Parquet


def row_groups(file: InputFile, text_key: str) -> list[int]:
    """Compressed bytes of each row group of a Parquet file.

    Raises:
      ConfigError: the file is not Parquet, has no column of that name, or pyarrow is not installed.
    """
    with _parquet(file) as parquet:
        columns = parquet.schema_arrow.names
        if text_key not in columns:
            raise no_column(file.path, text_key, columns)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        return [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]


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
                yield Record(None, number + 1, f"damaged Parquet ({line_of(error)})", read)
                number = before + parquet.metadata.row_group(group).num_rows


@contextmanager
def _parquet(file: InputFile) -> Iterator[Any]:
    pyarrow = _pyarrow(file)
    from pyarrow.parquet import ParquetFile

    with open_input(file) as source:
        try:
            # pyarrow reads a local file faster by itself.
            parquet = ParquetFile(source if file.address else file.path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{file.path} cannot be read as Parquet ({line_of(error)}): fix it or leave it out.") from None
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
                yield Record(None, number + 1, f"damaged Arrow ({line_of(error)})", part.size)
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
    pyarrow = _pyarrow(file)
    from pyarrow import ipc

    with open_input(file) as source:
        options = ipc.IpcReadOptions(included_fields=fields)
        try:
            try:
                reader = ipc.open_file(source, options=options)
            except pyarrow.ArrowInvalid:
                source.seek(0)
                reader = ipc.open_stream(source, options=options)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{file.path} cannot be read as Arrow ({line_of(error)}): fix it or leave it out.") from None
        yield source, reader


# -------------------------------------------------------------------------------------------------------------- both


def _pyarrow(file: InputFile) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"Reading {file.path} needs pyarrow: pip install 'jaxllm[parquet]'.") from None
    return pyarrow


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
