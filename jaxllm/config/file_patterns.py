"""Finds the files that patterns match, in folders of any size."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress

from jaxllm import terminal
from jaxllm.untrusted import RefusedInput, shown

MOST_ENTRIES = 500_000
"""Files and folders that are listed in a few seconds, at the start of each run."""
_SECONDS_BETWEEN_LINES = 5.0


class Listing:
    """Lists the files of patterns, and counts what it looks at.

    Attributes:
      entries: number of files and folders that were looked at.
    """

    def __init__(self, most_entries: int | None = None):
        """
        Args:
          most_entries: refuse patterns below which there is more. Default: any number.
        """
        self.entries, self._most = 0, most_entries
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def files(self, pattern: str) -> Iterator[str]:
        """Yields the files that a pattern matches, as glob.iglob(pattern, recursive=True) finds them, but in any order.

        Raises:
          RefusedInput: there are more entries than `most_entries`.
        """
        if "\0" in pattern or pattern.endswith("/"):
            return
        base, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/+\*\*)*(?:/+|$)", pattern, maxsplit=1)
        if not rest:
            yield from filter(os.path.isfile, self._paths(pattern, pattern))
            return
        base = base.rstrip("/") or base[:1]
        for root in self._paths(base, pattern) if base else [base]:
            for folder, names, entries in _folders(root or "."):
                self._count(pattern, entries)
                if not base:
                    # glob writes a/b, not ./a/b.
                    folder = folder[2:]
                if "/" in rest[0]:
                    yield from self.files(os.path.join(glob.escape(folder), rest[0]))
                else:
                    yield from (os.path.join(folder, name) for name in _matching(names, rest[0]))

    def _paths(self, path: str, pattern: str) -> Iterator[str]:
        """What matches a part of the pattern without `**`, as glob.iglob(path) finds it."""
        if not glob.has_magic(path):
            if os.path.lexists(path):
                yield path
            return
        folder, name = os.path.split(path)
        # A path of slashes alone is its own folder.
        for home in self._paths(folder, pattern) if folder and folder != path else [folder]:
            if not glob.has_magic(name):
                if os.path.lexists(os.path.join(home, name)):
                    yield os.path.join(home, name)
                continue
            try:
                names = os.listdir(home or ".")
            except OSError:
                continue
            self._count(pattern, len(names))
            yield from (os.path.join(home, one) for one in _matching(names, name))

    def _count(self, pattern: str, more: int) -> None:
        self.entries += more
        if self._most is not None and self.entries > self._most:
            raise RefusedInput(f"below {shown(pattern)} are more than {self._most:,} files and folders")
        if time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            terminal.print_sentence(f"listing {shown(pattern)}: {self.entries:,} files and folders so far")


def _folders(root: str) -> Iterator[tuple[str, list[str], int]]:
    """Each folder below a root and itself, with its files and its number of entries. Follows links, and leaves out hidden
    folders, as glob does.
    """
    # Not os.walk: in Python 3.11 it nests as deep as the folders.
    left = [root]
    while left:
        folder, files = left.pop(), []
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            # A circle of links cannot be followed.
            with suppress(OSError):
                if entry.is_file():
                    files.append(entry.name)
                elif not entry.name.startswith(".") and entry.is_dir():
                    left.append(entry.path)
        yield folder, files, len(entries)


def _matching(names: list[str], pattern: str) -> list[str]:
    """The names that the last part of a pattern matches; hidden ones only if it begins with a dot."""
    found = fnmatch.filter(names, pattern or "*")
    return found if pattern.startswith(".") else [name for name in found if not name.startswith(".")]
