"""New folders and files: written under a temporary name and renamed at the end; and the files that accompany weights in one."""

import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_config import CONFIG
from jaxllm.machine.host import rename_if_free

# ------------------------------------------------------------------------------------------------------------- companions

GENERATION = "generation_config.json"
BESIDE = (GENERATION, CONFIG, "*processor_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "README*")
OF_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tekken.json"),
    *("chat_template*", "additional_chat_templates"),
)
"""Names of the files that accompany weights, and of those of the tokenizer among them."""
LARGEST_BYTES = 2**30
"""Tokenizers have up to 33 MB."""


def copy_companions(home: Path | None, target: Path, tokenizer: bool = True) -> None:
    """Copies companion_files, by default with the tokenizer's files and the chat template. Creates `target` if there are any.

    Args: home: Folder.companions.
    """
    for name, path in companion_files(home, tokenizer).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


def companion_files(home: Path | None, tokenizer: bool = True) -> dict[str, Path]:
    """The files that accompany weights, by their path in the folder `home`, or without those of the tokenizer. ConfigError if
    one is not a regular file, has more than LARGEST_BYTES, or is a link out of the folder to anything but a blob of Hugging
    Face's cache."""
    patterns = (*BESIDE, *(OF_TOKENIZER if tokenizer else ()))
    files: dict[str, Path] = {}
    if home is None:
        return files
    for top in sorted({path for pattern in patterns for path in home.glob(pattern)}):
        for path in sorted(top.rglob("*")) if _followed(top, home).is_dir() else [top]:
            real = _followed(path, home)
            if real.is_file() and real.stat().st_size > LARGEST_BYTES:
                raise ConfigError(f"{path} has {real.stat().st_size:,} bytes, too many for a file beside weights: remove it.")
            if real.is_file():
                files[path.relative_to(home).as_posix()] = real
            elif not real.is_dir():
                raise ConfigError(f"{path} is not a regular file: replace or remove it.")
    return files


def _followed(path: Path, home: Path) -> Path:
    try:
        real = path.resolve()
    except RuntimeError:
        raise ConfigError(f"{path} is a link to itself: remove it.") from None
    is_blob = real.parent.name == "blobs" and real.parents[1].name.startswith("models--")
    if not is_blob and not real.is_relative_to(home.resolve()):
        raise ConfigError(f"{path} is a link to {real}, outside {home}: put the file itself there, or remove the link.")
    return real


# ------------------------------------------------------------------------------------------------------------ new folders


def require_new(destination: str, force: bool = False, is_file: bool = False) -> Path:
    """Returns the destination as an absolute path; ConfigError if it exists.

    Args:
      force: accept an existing folder, or a file if `is_file` is set. `new_folder` will move it aside.
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
    """Yields a folder to write into. It becomes `destination` at the end of the block. If the block fails, it is deleted. It
    raises ConfigError if the destination exists or cannot be written.

    Args:
      size_bytes: approximate size. Refused at once if the disk has less space.
      force: what exists there is moved to DESTINATION.before-1, -2 ..., not deleted.
      only: the file of the folder that becomes `destination`. The rest is deleted.
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
            names = (target.with_name(f"{target.name}.before-{number}") for number in itertools.count(1))
            target.rename(next(path for path in names if not os.path.lexists(path)))
        if only is None:
            aside.rename(target)
        else:
            # Unlike a folder's, a file's rename would replace another file.
            rename_if_free(aside / only, target)
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
