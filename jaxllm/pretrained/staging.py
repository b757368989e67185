"""Atomic creation of a folder or a file: it is written under a temporary name and renamed at the end."""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxllm.config.errors import ConfigError


def require_new(destination: str, force: bool = False, is_file: bool = False) -> Path:
    """Returns the destination as an absolute path.

    Args:
      force: accept an existing folder, or a file if `is_file` is set. `new_folder` will move it aside.

    Raises:
      ConfigError: the destination exists.
    """
    target = Path(destination).absolute()
    kind = "file" if is_file else "folder"
    if force and target.exists() and not (target.is_file() if is_file else target.is_dir()):
        raise ConfigError(f"{destination} exists already and is not a {kind}: choose another.")
    if not force and os.path.lexists(target):
        raise ConfigError(
            f"{destination} exists already, and nothing is overwritten: choose another {kind}, or use --force, which moves the "
            f"old one aside."
        )
    return target


@contextmanager
def new_folder(destination: str, size_bytes: int, force: bool = False, only: str | None = None) -> Iterator[Path]:
    """Yields a folder to write into. It becomes `destination` at the end of the block. If the block fails, it is deleted.

    Args:
      size_bytes: approximate size. Refused at once if the disk has less space.
      force: what exists there is moved to DESTINATION.before-1, -2 ..., not deleted.
      only: the file of the folder that becomes `destination`. The rest is deleted.

    Raises:
      ConfigError: the destination exists or cannot be written.
    """
    target = require_new(destination, force, only is not None)
    # A name of its own: another process may be writing the same destination.
    aside = target.with_name(f".{target.name}.being-written-{uuid.uuid4().hex[:12]}")
    try:
        aside.mkdir(parents=True)
        if (free := shutil.disk_usage(aside).free) < size_bytes:
            raise ConfigError(
                f"{destination} needs {size_bytes / 1e9:.3g} GB, and its disk has {free / 1e9:.3g} GB left: make room, or "
                f"choose another."
            )
        yield aside
        if os.path.lexists(target):
            require_new(destination, force, only is not None)
            target.rename(_before(target))
        if only is None:
            aside.rename(target)
        else:
            _put(aside / only, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{destination} could not be written ({reason}): remove the cause, or choose another.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_left(folder: Path) -> None:
    """Removes what killed processes left half-written in a folder of destinations, to which nothing may be writing now."""
    with suppress(OSError):
        for left in folder.glob(".*.being-written*"):
            # A process that writes to it in spite of that can then no longer give a part of it the final name.
            aside = left.rename(left.with_name(f"{left.name}-removed"))
            shutil.rmtree(aside, ignore_errors=True)


def _put(file: Path, target: Path) -> None:
    """Gives a file its name, if nothing has it: unlike a folder's, a file's rename would replace another file."""
    try:
        os.link(file, target)
    except FileExistsError:
        raise
    except OSError:
        # Not every file system has links.
        file.rename(target)


def _before(target: Path) -> Path:
    names = (target.with_name(f"{target.name}.before-{number}") for number in itertools.count(1))
    return next(path for path in names if not os.path.lexists(path))
