"""A user's key, which signs the compiled programs that jaxllm keeps. A program that is loaded runs as its user: one that
another user wrote, or that came beside a recipe, has no valid signature and is not read.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from jaxllm.untrusted import RefusedInput, opened, reason_of

KEY_VARIABLE = "JAXLLM_PROGRAMS_KEY"
"""Names the key's file instead of the one in the home folder: for homes that do not last, as in a pod, and for colleagues who
share programs, each with a copy of the key. Only the environment can: a recipe cannot choose a key."""
KEY_DIGITS = 64

log = logging.getLogger(__name__)


def key_file(environ: Mapping[str, str]) -> Path | None:
    """The key's file; None, with a warning, if the user has no home folder."""
    if given := environ.get(KEY_VARIABLE):
        return Path(given).expanduser().absolute()
    try:
        return Path.home() / ".config" / "jaxllm" / "programs.key"
    except RuntimeError as error:
        log.warning("There is no key for compiled programs (%s): each start compiles. Set %s to a file.", error, KEY_VARIABLE)
    return None


@cache
def signing_key(file: Path) -> bytes | None:
    """The key in `file`, made at the first call; None, with a warning, if it cannot be made or others may read it."""
    try:
        with suppress(FileExistsError):
            _make(file)
        with opened(file) as key:
            found, text = os.fstat(key.fileno()), key.read(KEY_DIGITS + 2).strip()
        # On a volume for a group of users, as of a pod, files have the group's bits.
        if found.st_mode & stat.S_IRWXO or found.st_uid not in (0, os.geteuid()):
            raise OSError(
                f"it is open to other users, or theirs: make a new one of mode 600, not {stat.S_IMODE(found.st_mode):o}"
            )
        if len(text) != KEY_DIGITS:
            raise OSError(f"it does not hold {KEY_DIGITS} digits: delete it")
    except (OSError, RefusedInput) as error:
        log.warning(
            "Compiled programs are not kept: their key %s cannot be used (%s). Correct that, or set %s to another file.",
            file,
            reason_of(error),
            KEY_VARIABLE,
        )
        return None
    return text


def name_of(key: bytes) -> str:
    """Digits that tell keys apart and say nothing of them."""
    return hashlib.sha256(b"name" + key).hexdigest()[:8]


def _make(file: Path) -> None:
    """Writes a new key if there is none. Of processes that do so at once one wins. Raises OSError, FileExistsError."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as content:
            content.write(secrets.token_hex(KEY_DIGITS // 2))
        try:
            os.link(new, file)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            # A disk without hard links: of processes that do so at once the last wins.
            os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
