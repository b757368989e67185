"""Where the text comes from, and which part of it is never trained on.

A corpus is two streams of bytes. Every file ends with a zero byte, so that a model learns where texts end; that byte
counts as a token like any other. Whole files are held out, each by a hash of its own path: adding or removing a file
never moves another one across, and two machines with the same files make the same split.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.config import ConfigError, DataConfig

DOCUMENT_END = b"\0"
# Folders of the standard library's tree that are not the library: other people's packages, tests, byte code; and the manual
# in pydoc_data, one file of prose so long that it would be most of whichever part it fell into.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text cut in two. The arrays are read-only."""

    train: np.ndarray
    """uint8 [bytes], zero bytes between documents included."""
    held_out: np.ndarray
    """uint8 [bytes]; empty with data.held_out_fraction=0."""
    train_files: int
    held_out_files: int
    """A single file cut in two counts here as well as in train_files."""
    description: str
    """One line for people. Its digest tells whether two hosts, or two runs, read the same bytes."""


def load_corpus(data: DataConfig) -> Corpus:
    """Read all of a source into memory as bytes.

    source=python_stdlib: every module of the running Python's standard library, tests left out. Files that are not
    UTF-8 are skipped and counted in the description. Hosts of one run need the same Python, or their texts differ.

    source=files: whatever data.paths matches. Files beneath the working directory are known by their path from there,
    others by their absolute path; keep texts beneath it if the split must not depend on the machine.

    Raises:
      ConfigError: nothing to read, a file of data.paths is not UTF-8, or nothing left to train on or to hold out.
    """
    if data.source == "python_stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        texts, skipped = _read_library(root)
        origin = f"standard library of Python {platform.python_version()}"
        where = f"There is no Python source beneath {root}: use data.source=files with data.paths."
    else:
        texts, skipped = _read_files(data.paths), 0
        origin = ", ".join(data.paths)
        where = f"The files of data.paths ({origin}) hold no text: name files that do."
    if not any(texts.values()):
        raise ConfigError(where)

    train, held_out = _split(texts, data.held_out_fraction)
    train_bytes, held_out_bytes = b"".join(train), b"".join(held_out)
    digest = hashlib.sha256(train_bytes + held_out_bytes).hexdigest()[:12]
    description = (
        f"{origin}: {len(train_bytes):,} bytes of {len(train)} files to train on, "
        f"{len(held_out_bytes):,} of {len(held_out)} held out"
        + (f", {skipped} skipped (not UTF-8)" if skipped else "")
        + f"; sha256 {digest}"
    )
    return Corpus(
        train=np.frombuffer(train_bytes, np.uint8),
        held_out=np.frombuffer(held_out_bytes, np.uint8),
        train_files=len(train),
        held_out_files=len(held_out),
        description=description,
    )


def _read_library(root: Path) -> tuple[dict[str, bytes], int]:
    """The library's sources by relative path, sorted, and the number of files skipped."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    # Distributions leave links here that may lead nowhere.
    texts = {name: (root / name).read_bytes() for name in sorted(names) if (root / name).is_file()}
    readable = {name: text for name, text in texts.items() if _first_bad_byte(text) is None}
    return readable, len(texts) - len(readable)


def _read_files(patterns: tuple[str, ...]) -> dict[str, bytes]:
    """The matching files by name, sorted; a file that two patterns match is read once."""
    matches = (match for pattern in patterns for match in glob.iglob(pattern, recursive=True))
    texts = {}
    for name in sorted({_name(match) for match in matches if os.path.isfile(match)}):
        try:
            texts[name] = Path(name).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read ({error.strerror}): mend it or leave it out of data.paths.") from None
        bad = _first_bad_byte(texts[name])
        if bad is not None:
            raise ConfigError(f"{name} is not UTF-8 text (byte {bad}): convert it or leave it out of data.paths.")
    return texts


def _name(path: str) -> str:
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else absolute).as_posix()


def _first_bad_byte(text: bytes) -> int | None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None


def _place(name: str) -> float:
    """Where a file's name falls in [0, 1): below the held-out fraction, the file is held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _split(texts: dict[str, bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on and documents held out, each with its end mark."""
    documents = {name: text + DOCUMENT_END for name, text in texts.items()}
    if fraction == 0:
        return list(documents.values()), []
    if len(documents) == 1:
        return _cut(*documents.values(), fraction)
    train = [text for name, text in documents.items() if _place(name) >= fraction]
    held_out = [text for name, text in documents.items() if _place(name) < fraction]
    places = [_place(name) for name in documents]
    if not held_out:
        enough = math.ceil(min(places) * 1000) / 1000
        raise ConfigError(
            f"data.held_out_fraction={fraction:g} holds out none of the {len(documents)} files: raise it to "
            f"{enough:g}, give more files, or set it to 0 to go without held-out text."
        )
    if not train:
        few_enough = math.floor(max(places) * 1000) / 1000
        raise ConfigError(
            f"data.held_out_fraction={fraction:g} holds out all {len(documents)} files: lower it to {few_enough:g}."
        )
    return train, held_out


def _cut(document: bytes, fraction: float) -> tuple[list[bytes], list[bytes]]:
    """A lone file gives its end away; its first part then has no end mark, because no text ends there."""
    at = len(document) - round(len(document) * fraction)
    if not 0 < at < len(document):
        empty = "to hold out" if at else "to train on"
        raise ConfigError(
            f"data.held_out_fraction={fraction:g} of one file of {len(document)} bytes leaves nothing {empty}: "
            f"choose a value between 0 and 1 that leaves both, or give more text."
        )
    return [document[:at]], [document[at:]]
