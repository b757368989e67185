"""Finds the files that patterns match, in folders of any size."""

import fnmatch
import glob
import heapq
import os
import stat
import time
from collections.abc import Iterator

from jaxllm import terminal
from jaxllm.untrusted import RefusedInput, shown

MOST_ENTRIES = 500_000
"""Files and folders that are listed in a few seconds, at the start of each run."""
_SECONDS_BETWEEN_LINES = 5.0


class Listing:
    """Lists the files of patterns below which are at most `most_entries` files and folders; None: any number."""

    def __init__(self, most_entries: int | None = None):
        self._entries, self._most = 0, most_entries
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def files(self, pattern: str) -> Iterator[str]:
        """Yields the files that a pattern matches, as glob.iglob(pattern, recursive=True) finds them, but in another order, and
        what links lead to only once, by device and inode, and not where it has a path without a link. A line counts the rest.

        Raises:
          RefusedInput: there are more entries than `most_entries`.
        """
        if "\0" in pattern or pattern.endswith("/"):
            return
        parts = [*filter(None, pattern.split("/"))]
        parts = [part for number, part in enumerate(parts) if part != "**" or parts[number - 1 : number] != ["**"]]
        parts += ["*"] if parts[-1:] == ["**"] else []
        # Each path with the number of the next part. Not by recursion, which nests as deep as folders and patterns.
        paths, links, seen, again = [("/" if pattern.startswith("/") else "", 0, False)], [], {}, 0
        while paths or links:
            path, at, behind_link = paths.pop() if paths else heapq.heappop(links)
            try:
                there = os.stat(path or ".")
                here = (there.st_dev, there.st_ino, at)
                if here in seen and (behind_link or seen[here] == path):
                    again += seen[here] != path
                    continue
                seen.setdefault(here, path)
                if at == len(parts):
                    if stat.S_ISREG(there.st_mode):
                        yield path
                    continue
                entries = sorted(os.scandir(path or "."), key=lambda one: one.name) if glob.has_magic(parts[at]) else []
                # Not what a link says of itself: of links that lead to each other it raises.
                folders = [e.name for e in entries if (os.path.isdir(e) if e.is_symlink() else e.is_dir())]
            except OSError:
                continue
            self._count(pattern, len(entries))
            names = [entry.name for entry in entries]
            deeper = []
            if parts[at] == "**":
                deeper = [(name, at) for name in folders if not name.startswith(".")]
                at += 1
            found = [parts[at]]
            if glob.has_magic(parts[at]):
                found = _matching(names if at + 1 == len(parts) else folders, parts[at])
            for name, following in reversed([*((name, at + 1) for name in found), *deeper]):
                inner = os.path.join(path, name)
                if os.path.islink(inner):
                    heapq.heappush(links, (inner, following, True))
                else:
                    paths.append((inner, following, behind_link))
        if again:
            terminal.print_sentence(
                f"{shown(pattern)}: left out {again:,} times what is listed already and links lead to again"
            )

    def _count(self, pattern: str, more: int) -> None:
        self._entries += more
        if self._most is not None and self._entries > self._most:
            raise RefusedInput(f"below {shown(pattern)} are more than {self._most:,} files and folders")
        if time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            terminal.print_sentence(f"listing {shown(pattern)}: {self._entries:,} files and folders so far")


def _matching(names: list[str], pattern: str) -> list[str]:
    """The names that the last part of a pattern matches; hidden ones only if it begins with a dot."""
    found = fnmatch.filter(names, pattern or "*")
    return found if pattern.startswith(".") else [name for name in found if not name.startswith(".")]
