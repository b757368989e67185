"""JAX's persistent compilation cache, made safe for runs: compiled programs outlive the process that compiled them.

    start("auto", default, environ)  # before the first compilation; the value of run.compilation_cache
    counts()  # Counts(found=3, compiled=1)

JAX decides what is stored and under which key (jax/_src/cache_key.py): program, options, flags, versions, devices. The store
below is ours, because JAX's own writes an entry in place, so that a killed process leaves half of one, and never deletes any.
"""

import hashlib
import hmac
import logging
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax

from jaxllm.config.errors import ConfigError
from jaxllm.machine.host import installed, rename_if_free
from jaxllm.private_jax import keep_programs_in
from jaxllm.untrusted import RefusedInput, opened, read_bytes, reason_of

log = logging.getLogger(__name__)

LIMIT_BYTES = 8 * 2**30
"""The least recently used entries beyond it are deleted at the start of a process. A large model's step takes 10 to 100 MB."""
SUFFIX = "-program"
"""JAX's own entries end in -cache."""
SIGNED = re.compile(rf"-[0-9a-f]{{8}}{SUFFIX}$")
TEMPORARY = re.compile(r"\d+-[0-9a-f]{16}\.tmp")
MAGIC = b"jaxllm 2"
ENTRY_BYTES = 2**30
"""The largest program that is read: ten times the step of a large model."""
LEAST_S = 0.02
"""Programs that compile faster are compiled in every process."""
FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MANIFEST = "manifest.json"
"""In a folder of programs that `jaxllm compile --save` compiled."""
HEX = 16
"""Digits of a key's hash that tell entries apart."""

OPTIONS: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": LEAST_S,
    # XLA's own caches write into the folder too, unbounded, and a compilation fails if they cannot.
    "jax_persistent_cache_enable_xla_caches": "none",
}
"""Options of JAX, unless an environment variable sets them."""


class Counts(NamedTuple):
    """Programs of this process since it started, without those that compile faster than LEAST_S."""

    found: int
    compiled: int


class ProgramStore:
    """A folder of compiled programs: JAX's CacheInterface. It never raises: what cannot be read is compiled, what cannot be
    written is compiled again by the next process, and one warning says so.

    A program runs as the user who loads it, and some are pickles. So each has a signature by this user's key over its name and
    content, and what has none is not loaded: another user may have written it, or it came beside a recipe.

    Args:
      is_writer: whether this process writes. Another one may write the same entries.
      known: the only entries that may be found, as `entries` names them; None: all that are in the folder.
    """

    def __init__(self, folder: Path, is_writer: bool = True, known: frozenset[str] | None = None):
        # JAX reads _path.
        self._path = self.folder = folder
        self._is_writer, self._known, self._given = is_writer, known, set()
        self._warned = False
        self._secret = signing_key(_key_file) if _key_file else None
        self.signs = self._secret is not None
        """Whether this user has a key; without one nothing is stored or read."""
        # Of several users of a folder each sees his own entries.
        self._suffix = f"-{name_of(self._secret)}{SUFFIX}" if self._secret else "/"
        self.found = self.compiled = 0

    def get(self, key: str) -> bytes | None:
        """The stored program; None if there is none, or if the entry is damaged or not of this user's key."""
        if self._secret is None or (self._known is not None and key[-HEX:] not in self._known):
            return None
        file, value = self._file(key), None
        try:
            value = self._verified(key)
            with suppress(OSError):
                if value is None:
                    # So that it is written again.
                    file.unlink()
                else:
                    # The age of an entry is the time since its last use: many disks do not record reads.
                    os.utime(file)
                    self._given.add(key)
        except FileNotFoundError:
            pass
        except (OSError, RefusedInput) as error:
            self._warn("read", error)
        self.found += value is not None
        return value

    def compiled_in(self, key: str, seconds: float) -> bool:
        """Counts a program that was compiled. Returns whether this process should store it: also if JAX could not load it."""
        if seconds < _option("jax_persistent_cache_min_compile_time_secs"):
            return False
        self.compiled += 1
        return self._is_writer and (key in self._given or not _is_whole(self._file(key)))

    def put(self, key: str, value: bytes) -> None:
        """Stores a program."""
        if self._secret is None or len(value) > ENTRY_BYTES:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(key), self._header(key, value) + value)
        except OSError as error:
            self._warn("written", error)

    def entries(self) -> list[str]:
        """The end of each key whose entry is complete."""
        if self._secret is None:
            return []
        mine = self.folder.glob(f"*{self._suffix}")
        return sorted(file.name.removesuffix(self._suffix)[-HEX:] for file in mine if _is_whole(file))

    def has_unsigned(self, key: str) -> bool:
        """Whether there is an entry of this key, and none that this user's key signed."""
        return not self._file(key).exists() and any(self.folder.glob(f"{key}*{SUFFIX}"))

    def holds_only_foreign(self) -> bool:
        """Whether other keys signed entries, and this user's key none."""
        names = [file.name for file in self.folder.glob(f"*{SUFFIX}")]
        return any(map(SIGNED.search, names)) and not any(name.endswith(self._suffix) for name in names)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{self._suffix}"

    def _header(self, key: str, value: bytes) -> bytes:
        """The length and a MAC over name and content, so that no entry passes as another."""
        assert self._secret is not None, "get and put ask first"
        return _head(len(value)) + hmac.digest(self._secret, key.encode() + b"\0" + value, "sha256")

    def _verified(self, key: str) -> bytes | None:
        """The content of an entry whose signature is right. One of a wrong size is not read."""
        with opened(self._file(key)) as entry:
            if not _has_its_size(entry):
                return None
        content = read_bytes(self._file(key), ENTRY_BYTES + HEADER_BYTES)
        value = content[HEADER_BYTES:]
        return value if hmac.compare_digest(content[:HEADER_BYTES], self._header(key, value)) else None

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "Compiled programs cannot be %s in %s (%s): the next start compiles again. Fix that, name another folder by "
                "run.compilation_cache, or set it to off.",
                what,
                self.folder,
                getattr(error, "strerror", None) or error,
            )


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file that appears under its name only when it is complete. Raises OSError."""
    temporary = file.with_name(f"{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _head(length: int) -> bytes:
    return MAGIC + length.to_bytes(8, "big")


HEADER_BYTES = len(_head(0)) + hashlib.sha256().digest_size


def _is_whole(file: Path) -> bool:
    """Whether the file is there and as long as it says: its content is not read."""
    with suppress(OSError, RefusedInput), opened(file) as entry:
        return _has_its_size(entry)
    return False


def _has_its_size(entry: BinaryIO) -> bool:
    length = os.fstat(entry.fileno()).st_size - HEADER_BYTES
    return 0 <= length <= ENTRY_BYTES and entry.read(len(_head(0))) == _head(length)


# ----------------------------------------------------------------------------------------------------------------- a user's key

KEY_VARIABLE = "JAXLLM_PROGRAMS_KEY"
"""Names the key's file instead of the one in the home folder: for homes that do not last, as in a pod, and for colleagues who
share programs, each with a copy of the key. Only the environment can: a recipe cannot choose a key."""
KEY_DIGITS = 64


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
        rename_if_free(new, file)
    finally:
        new.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------ for a process

_store: ProgramStore | None = None
_known: frozenset[str] | None = None
_has_asked = False
_key_file: Path | None = None


def use_key(environ: Mapping[str, str]) -> None:
    """Programs are signed by the key that the environment names, by default the one in the home folder; by none, with a
    warning, if the user has no home folder."""
    global _key_file
    if given := environ.get(KEY_VARIABLE):
        _key_file = Path(given).expanduser().absolute()
        return
    try:
        _key_file = Path.home() / ".config" / "jaxllm" / "programs.key"
    except RuntimeError as error:
        _key_file = None
        log.warning("There is no key for compiled programs (%s): each start compiles. Set %s to a file.", error, KEY_VARIABLE)


def start(
    wanted: str,
    default: Callable[[], Path],
    environ: Mapping[str, str],
    *,
    is_writer: bool = True,
    agree: Callable[[Iterable[str]], frozenset[str]] | None = None,
) -> None:
    """Switches the cache on or off for this process. Call it before the first compilation; a later call may change it. It
    raises ConfigError if `wanted` is no folder.

    Args:
      wanted: run.compilation_cache.
      default: the folder for "auto", unless JAX_COMPILATION_CACHE_DIR names one.
      environ: of this process. A variable of JAX that it has takes precedence.
      agree: (entries that this process sees) -> those that all processes of the run see. Each calls it once, at its first
        start, whatever its own folder.
    """
    global _store, _known, _has_asked
    use_key(environ)
    base = _base(wanted, default, environ)
    folder = None if base is None else _usable(base / identity())
    is_other = folder is None or _store is None or _store.folder != folder
    if folder is not None and is_other:
        # First, so that no entry goes that all have agreed on.
        prune(folder.parent)
    if agree is not None:
        if not _has_asked:
            _known = agree(ProgramStore(folder).entries() if folder else ())
        elif is_other:
            # Nobody asked about this folder.
            _known = frozenset()
        _has_asked = True
    if wanted == "auto" and "://" in environ.get(FOLDER_VARIABLE, ""):
        # An object store: JAX's own way.
        return
    if is_other:
        _store = None if folder is None else ProgramStore(folder, is_writer, _known)
        if _store is not None and _store.holds_only_foreign():
            log.warning(
                "The compilation cache %s holds programs, and none that your key signed: this start compiles its own. Where a "
                "home folder does not last, as in a pod, set %s to a file that does.",
                folder,
                KEY_VARIABLE,
            )
        jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
        for name, value in OPTIONS.items():
            if name.upper() not in environ:
                jax.config.update(name, value)
        if not keep_programs_in(_store) and (agree is not None or wanted != "auto"):
            # JAX's own files have no signature, and a recipe may name the folder.
            jax.config.update("jax_compilation_cache_dir", None)


def _base(wanted: str, default: Callable[[], Path], environ: Mapping[str, str]) -> Path | None:
    """The folder that holds the folder of this JAX; None if the cache is off, or JAX's own."""
    if "://" in wanted:
        raise ConfigError(f"run.compilation_cache={wanted} is not a folder: name one on a disk.")
    given = environ.get(FOLDER_VARIABLE, "")
    if wanted == "off" or not _option("jax_enable_compilation_cache"):
        return None
    try:
        # A folder of saved programs is often another user's, or read-only.
        if wanted != "auto" and not (Path(wanted).expanduser() / MANIFEST).exists():
            return Path(wanted).expanduser().absolute()
        if "://" in given:
            return None
        return Path(given).expanduser().absolute() if given else default()
    except RuntimeError as error:
        log.warning("There is no compilation cache: %s Name a folder by run.compilation_cache, or set it to off.", error)
        return None


def counts() -> Counts:
    """What this process found in the cache and what it compiled; zeros without a cache."""
    return Counts(_store.found, _store.compiled) if _store is not None else Counts(0, 0)


def _option(name: str) -> Any:
    return getattr(jax.config, name)


@cache
def identity() -> str:
    """Name of the folder for these versions and this kind of CPU: JAX's key contains neither cuDNN's nor the CPU's features."""
    cpu = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})) or cpu
    described = "\n".join([version("jaxlib"), *installed("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"), platform.machine(), cpu])
    return f"jax-{version('jax')}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def prune(base: Path, limit_bytes: int = LIMIT_BYTES, unused_s: float = 86_400) -> None:
    """Deletes the least recently used entries, of any version, until the rest fits, and what a killed process left half
    written.

    Args:
      base: the folder of the versions' folders.
      unused_s: seconds since the last use below which nothing is deleted: a run may need it yet.
    """
    entries, newest_s = [], time.time() - unused_s
    # A link may lead to a folder of something else.
    folders = [folder for folder in base.glob("jax-*") if not folder.is_symlink()]
    for path in (path for folder in folders for path in folder.glob("*")):
        # Another process may delete entries too.
        with suppress(OSError):
            found = path.stat(follow_symlinks=False)
            if path.name.endswith(SUFFIX):
                entries.append((found.st_mtime, found.st_size, path))
            elif TEMPORARY.fullmatch(path.name) and found.st_mtime < newest_s:
                path.unlink()
    excess = sum(size for _, size, _ in entries) - limit_bytes
    for used_s, size, path in sorted(entries):
        if excess <= 0 or used_s > newest_s:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
        excess -= size


def is_open_to_all(folder: Path) -> bool:
    """Whether every user may write into the folder, whose programs run as the user who loads them. Raises OSError."""
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def _usable(folder: Path) -> Path | None:
    """The folder, made if it is missing; None, with a warning, if it cannot be made or if every user may write into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shared = [path for path in (folder.parent, folder) if is_open_to_all(path)]
    except OSError as error:
        log.warning(
            "The compilation cache %s cannot be used (%s): every start compiles. Name another folder by run.compilation_cache, "
            "or set it to off.",
            folder,
            error.strerror or error,
        )
        return None
    if shared:
        log.warning(
            "The compilation cache %s is not used: every user of this machine may write into it, and its programs would run as "
            "you. Run chmod o-w on it, or name another folder by run.compilation_cache.",
            shared[0],
        )
        return None
    return folder
