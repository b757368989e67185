"""Reads the texts that are tokenised at the start of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jaxllm.config.errors import ConfigError
from jaxllm.file_patterns import MOST_ENTRIES, Listing
from jaxllm.untrusted import GIB, RefusedInput, read_bytes, reason_of

MOST_FILES, MOST_BYTES = 100_000, 4 * GIB
"""Limits of texts that are read at the start of each run. The memory of a host holds them five times over, because the ids are
made of all texts at once."""
_ADVICE = "name a smaller folder, or tokenise the files once with jaxllm data prepare"


def matching_files(patterns: Sequence[str]) -> set[str]:
    """The files that match data.paths, by name.

    Raises:
      ConfigError: there are too many or too large files.
    """
    listing, names, size = Listing(MOST_ENTRIES), set(), 0
    try:
        for match in (match for pattern in patterns for match in listing.files(pattern)):
            if (name := _name(match)) not in names:
                names.add(name)
                with suppress(OSError):
                    size += os.path.getsize(name)
            if len(names) > MOST_FILES or size > MOST_BYTES:
                raise RefusedInput(f"it names more than {MOST_FILES:,} files or {MOST_BYTES // GIB} GiB")
    except RefusedInput as error:
        raise ConfigError(f"data.paths is too much to tokenise at the start of each run ({error}): {_ADVICE}.") from None
    return names


def read_texts(patterns: Sequence[str]) -> dict[str, bytes]:
    """Reads the files that match data.paths by name, sorted. A file that matches two patterns is read once.

    Raises:
      ConfigError: there are too many or too large files, or one cannot be read or is not UTF-8.
    """
    texts = {}
    for name in sorted(matching_files(patterns)):
        try:
            texts[name] = read_bytes(Path(name), MOST_BYTES)
        except (OSError, RefusedInput) as error:
            raise ConfigError(f"{name} cannot be read ({reason_of(error)}): fix it or leave it out of data.paths.") from None
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
