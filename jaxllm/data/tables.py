"""Reads rows of CSV and elements of a JSON array, one at a time and of bounded size, from a file that need not be local."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterator

from jaxllm.config.errors import line_of
from jaxllm.data.compression import DamagedFile
from jaxllm.untrusted import JSON_VALUES, MIB

_CHUNK = 1 << 20
_LEAST_LINE = 64
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
        """
        Args:
          readline: gives the next line, or so many bytes of it; none at the end.
          at_most: bytes of a row.

        Raises:
          DamagedFile: the first row is longer, or cannot be read. Iterating raises it too, where a row is longer.
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
