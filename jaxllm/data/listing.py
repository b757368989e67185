"""Finds the files that patterns match, and reads those that are tokenised at the start of a run."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from jaxllm import stderr
from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import GIB, RefusedInput, read_bytes, shown

MOST_ENTRIES, MOST_FILES, MOST_BYTES = 500_000, 100_000, 4 * GIB
"""Limits of texts that are read at the start of each run: what is listed in a few seconds, and what the memory of a host holds
five times over, because the ids are made of all texts at once."""
_ADVICE = "name a smaller folder, or tokenise the files once with jaxllm data prepare"
_SECONDS_BETWEEN_LINES = 5.0


class Listing:
    """Lists the files of patterns, and counts what it looks at.

    Attributes:
      entries: number of files and folders that were looked at below a `**`.
    """

    def __init__(self, most_entries: int | None = None, advice: str = ""):
        """
        Args:
          most_entries: refuse patterns below which there is more. Default: any number.
          advice: what to do then.
        """
        self.entries, self._most, self._advice = 0, most_entries, advice
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def files(self, pattern: str) -> Iterator[str]:
        """Yields the files that a pattern matches, as glob.iglob(pattern, recursive=True) finds them, but in any order.

        Raises:
          ConfigError: there are more entries than `most_entries`.
        """
        if "\0" in pattern or pattern.endswith("/"):
            return
        base, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/+\*\*)*(?:/+|$)", pattern, maxsplit=1)
        if not rest:
            yield from filter(os.path.isfile, glob.iglob(pattern))
            return
        for root in glob.iglob(base) if glob.has_magic(base) else [base]:
            for folder, names, entries in _folders(root or "."):
                self._count(pattern, entries)
                if "/" in rest[0]:
                    yield from self.files(os.path.join(glob.escape(folder), rest[0]))
                else:
                    yield from (os.path.join(folder, name) for name in _matching(names, rest[0]))

    def _count(self, pattern: str, more: int) -> None:
        self.entries += more
        if self._most is not None and self.entries > self._most:
            raise ConfigError(f"Below {shown(pattern)} are more than {self._most:,} files and folders: {self._advice}.")
        if time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            stderr.print_sentence(f"listing {shown(pattern)}: {self.entries:,} files and folders so far")


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


def read_texts(patterns: tuple[str, ...]) -> dict[str, bytes]:
    """Reads the files that match data.paths by name, sorted. A file that matches two patterns is read once.

    Raises:
      ConfigError: there are too many or too large files, or one cannot be read or is not UTF-8.
    """
    listing = Listing(MOST_ENTRIES, _ADVICE)
    names, size = set(), 0
    for match in (match for pattern in patterns for match in listing.files(pattern)):
        if (name := _name(match)) not in names:
            names.add(name)
            with suppress(OSError):
                size += os.path.getsize(name)
        if len(names) > MOST_FILES or size > MOST_BYTES:
            raise ConfigError(
                f"data.paths names more than {MOST_FILES:,} files or {MOST_BYTES // GIB} GiB, which is too much to tokenise at "
                f"the start of each run: {_ADVICE}."
            )
    texts = {}
    for name in sorted(names):
        try:
            texts[name] = read_bytes(Path(name), MOST_BYTES)
        except (OSError, RefusedInput) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{name} cannot be read ({reason}): fix it or leave it out of data.paths.") from None
        bad = first_bad_byte(texts[name])
        if bad is not None:
            raise ConfigError(f"{name} is not UTF-8 text (byte {bad}): convert it or leave it out of data.paths.")
    return texts


def _name(path: str) -> str:
    """The path below the working directory, or else the absolute path."""
    return os.path.abspath(path).removeprefix(os.getcwd().rstrip("/") + "/")


def first_bad_byte(text: bytes) -> int | None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None
