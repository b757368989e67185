"""Sizes and checksums of a checkpoint's files: every byte is covered, and every byte is read again when the arrays are.

On a save, each process computes the checksums of the files that it has just written, in Orbax's background thread; process 0
collects them in files.json. On a restore, each process reads the files that the process of its number wrote, in a thread beside
the one that reads the arrays: mostly the same bytes, so that the disk reads them once. The others, and the pieces of hosts that
shared no disk, are dealt out in turn.
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from jaxllm.checkpoint.files import FILES, FILES_BYTES, META, STATE, cannot_be_read, is_not_damage, read_files, read_meta, why
from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import read_json

PART = "files-of-process-"
THREADS = min(8, os.cpu_count() or 1)
"""Files that a process reads at a time. zlib computes the CRC32 of about 3 GB per second and thread, without Python's lock."""
BLOCK = 2**22
ENDS_ONLY = 64 * 2**20
"""Bytes. In format 1, the checksum of a larger file covers only its first and last MiB."""


class DamagedError(ConfigError):
    """The bytes of a checkpoint have changed since the save."""

    def __init__(self, folder: Path, reason: str):
        super().__init__(f"The checkpoint {folder} is damaged ({reason}): use another, or restore a copy of it.")
        self.reason = reason


def describe_own_files(arrays: Path) -> None:
    """Writes the sizes and checksums of the arrays' files of this process into an unfinished checkpoint, for describe_files.

    Args:
      arrays: the folder that will be named STATE.
    """
    own = {path: f"{STATE}/{path.relative_to(arrays).as_posix()}" for path in _files_in(arrays)}
    own = {path: name for path, name in own.items() if _writer(name) == jax.process_index()}
    (arrays.parent / f"{PART}{jax.process_index()}.json").write_text(json.dumps(described(own)))


def describe_files(folder: Path) -> None:
    """Writes files.json, {path: [bytes, CRC32]} of the files in the items of a checkpoint. Orbax changes the files beside the
    items later. Process 0 calls it when all have written.
    """
    known: dict[str, list[int]] = {}
    for part in (parts := list(folder.glob(f"{PART}*.json"))):
        known |= read_json(part, FILES_BYTES)
    names = {path: path.relative_to(folder).as_posix() for item in (STATE, META) for path in _files_in(folder / item)}
    known |= described({path: name for path, name in names.items() if name not in known})
    (folder / FILES).write_text(json.dumps({name: known[name] for name in names.values()}))
    for part in parts:
        part.unlink()


@contextmanager
def verified(folder: Path) -> Iterator[None]:
    """Verifies this process's share of a checkpoint's files while the body reads its arrays. All processes call it.

    Raises:
      DamagedError: a file has changed since the save. It replaces an error of the body, which the damage explains.
      ConfigError: a file cannot be read here, for a reason other than damage.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside, ExitStack() as stack:
        # Otherwise Ctrl-C would wait until all is read.
        stack.callback(stop.set)
        found, error = beside.submit(changed, folder, jax.process_index(), jax.process_count(), stop), None
        try:
            yield
        except Exception as raised:
            if isinstance(raised, ConfigError) or is_not_damage(raised):
                raise
            error = raised
        if reason := found.result():
            raise DamagedError(folder, reason) from error
        if error is not None:
            raise error


def changed(folder: Path, process: int = 0, processes: int = 1, stop: threading.Event | None = None) -> str | None:
    """The first file whose bytes are not those of the save, as a reason for damage; None if there is none, or after `stop`.

    Args:
      process, processes: of several processes, each verifies a share of the files.

    Raises:
      ConfigError: a file cannot be read here, for a reason other than damage.
    """
    stop = stop or threading.Event()
    if not (folder / FILES).is_file():
        # Of a version before FILES: reading the arrays will show damage.
        return None
    try:
        ends_only = read_meta(folder)["format"] == 1
        recorded = read_files(folder)
        readers = ((name, place if (writer := _writer(name)) is None else writer) for place, name in enumerate(recorded))
        names = [name for name, reader in readers if reader % processes == process]
        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(lambda name: checksum(folder / name, ends_only, stop), names)
            for name, crc in zip(names, found, strict=True):
                if crc != recorded[name][1] and not stop.is_set():
                    stop.set()
                    return f"{name} has changed"
    except (OSError, MemoryError, ValueError) as error:
        if is_not_damage(error):
            raise cannot_be_read(folder, error) from None
        return why(error)
    return None


def checksum(path: Path, ends_only: bool = False, stop: threading.Event | None = None) -> int:
    """CRC32 of a file; with `ends_only`, of the first and the last MiB of a file above 64 MiB."""
    value = 0
    with path.open("rb") as file:
        if ends_only and os.fstat(file.fileno()).st_size > ENDS_ONLY:
            value = zlib.crc32(file.read(2**20))
            file.seek(-(2**20), os.SEEK_END)
        while (stop is None or not stop.is_set()) and (block := file.read(BLOCK)):
            value = zlib.crc32(block, value)
    return value


def described(names: Mapping[Path, str]) -> dict[str, list[int]]:
    """{name: [bytes, CRC32]} of files with these names."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(checksum, names))
    return {name: [path.stat().st_size, crc] for (path, name), crc in zip(names.items(), found, strict=True)}


def _files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _writer(name: str) -> int | None:
    """The process that wrote a file of arrays, by its path such as state/ocdbt.process_3/d/0f...; None for the small others,
    which process 0 may still change after all have written.
    """
    found = re.match(rf"{STATE}/ocdbt\.process_(\d+)/", name)
    return int(found[1]) if found else None
