"""A new folder, whole or not at all: it is written under another name and gets its own when nothing is left to do."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.config_errors import ConfigError


def require_new(destination: str, force: bool = False) -> Path:
    """The destination as an absolute path.

    Args:
      force: an existing folder is no reason to refuse; `new_folder` will move it aside.

    Raises:
      ConfigError: it exists.
    """
    target = Path(destination).absolute()
    if force and target.exists() and not target.is_dir():
        raise ConfigError(f"{destination} exists already and is no folder: choose another.")
    if not force and os.path.lexists(target):
        raise ConfigError(
            f"{destination} exists already, and nothing is overwritten: choose another folder, or --force, which moves the old "
            f"one aside."
        )
    return target


@contextmanager
def new_folder(destination: str, size_bytes: int, force: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `destination` at the end of the block. If the block fails, nothing of it is left.

    Args:
      size_bytes: what it will take, about; refused at once where the disk has less.
      force: an existing folder becomes DESTINATION.before-1, -2 ...: it is moved, not deleted.

    Raises:
      ConfigError: the destination exists or cannot be written.
    """
    target = require_new(destination, force)
    aside = target.with_name(f".{target.name}.being-written")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if (free := shutil.disk_usage(aside).free) < size_bytes:
            raise ConfigError(
                f"{destination} would take {size_bytes / 1e9:.3g} GB, and its disk has {free / 1e9:.3g} GB left: make room, or "
                f"choose another."
            )
        yield aside
        if os.path.lexists(target):
            require_new(destination, force)
            target.rename(_before(target))
        aside.rename(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{destination} could not be written ({reason}): remove the cause, or choose another.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _before(target: Path) -> Path:
    names = (target.with_name(f"{target.name}.before-{number}") for number in itertools.count(1))
    return next(path for path in names if not os.path.lexists(path))
