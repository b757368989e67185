"""The files of checkpoints: their metadata, sizes and checksums, whether a checkpoint is intact, and the newest intact one."""

import errno
import itertools
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import jax
from pydantic import Field

from jaxllm.cluster.exit_codes import causes
from jaxllm.config import Config, ConfigError
from jaxllm.config.types import PositiveInt, Switch, Tokens
from jaxllm.machine.host import versions
from jaxllm.untrusted import INT32, RefusedInput, Text, Whole, checked, checked_map, parse_json, read_bytes, read_json, shown

FORMAT = 2
"""In format 1, a checksum covers only the ends of a large file (ENDS_ONLY)."""
STATE, META, FILES = "state", "meta", "files.json"
MANIFEST = f"{STATE}/manifest.ocdbt"
"""Orbax's index of the arrays, of a checkpoint whose processes share a disk."""
BACKSLASH, PATTERN_CHARACTERS = "\\", "[]*?\\"
"""TensorStore takes a backslash for a slash. Orbax takes a path with one of the others for a pattern when it saves, and then
leaves out most of the checkpoint, or takes files of another run.
"""
FILES_BYTES = 2**30
"""Limit of files.json: 10 million files."""
T = TypeVar("T")
Meta = dict[str, Any]
"""describe_run's, as StoredMeta says."""


@dataclass(frozen=True)
class _Train:
    global_batch_sequences: PositiveInt
    sequence_length: PositiveInt
    batch_schedule: tuple[tuple[Tokens, PositiveInt], ...] = ()
    length_schedule: tuple[tuple[Tokens, PositiveInt], ...] = ()
    skip_spikes: Switch = False
    diloco_steps: PositiveInt | None = None
    diloco_after_steps: Whole = 0
    diloco_bits: PositiveInt = 32
    diloco_overlap: Switch = False
    steps: Whole = 0


@dataclass(frozen=True)
class _Parallel:
    replica: PositiveInt = 1


@dataclass(frozen=True)
class _Data:
    mixture: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class _Sections:
    """The keys of a stored config that a resumed run reads. Its shape is compared with that of the run."""

    model: dict[str, Any]
    train: _Train
    parallel: _Parallel = _Parallel()
    data: _Data = _Data()


@dataclass(frozen=True)
class StoredMeta:
    """What the metadata of a checkpoint must hold; earlier versions had less beside it."""

    format: Whole
    step: Annotated[int, Field(strict=True, ge=0, le=INT32)]
    fingerprint: Text
    config: _Sections
    skipped_steps: Whole = 0
    noise_scale: tuple[()] | tuple[Whole, float, float, float, float, float, float, float] = ()


def describe_run(config: Config, step: int, fingerprint: str, skipped_steps: int = 0, noise: Sequence[float] = ()) -> Meta:
    """Metadata for a checkpoint of `step`. `fingerprint` is that of the text that the run reads, and `noise` the state of the
    averages of the gradient noise scale (run/noise_scale.py).
    """
    return {
        "format": FORMAT,
        "step": step,
        "samples": config.sequences_before(step),
        "skipped_steps": skipped_steps,
        "noise_scale": list(noise),
        "fingerprint": fingerprint,
        "vocab_size": config.model.vocab_size,
        "config": config.model_dump(mode="json"),
        "versions": versions(),
    }


def saved_steps(folder: Path) -> list[int]:
    """Steps in a folder of checkpoints, oldest first. Unfinished checkpoints have other names."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def by_step(names: Mapping[str, T]) -> dict[int, dict[str, T]]:
    """{step: {name in it: ...}} of the objects of checkpoints below the address of a store, oldest first, complete or not."""
    steps: dict[int, dict[str, T]] = {}
    for name, value in names.items():
        step, _, inner = name.partition("/")
        if step.isdecimal() and str(int(step)) == step and inner:
            steps.setdefault(int(step), {})[inner] = value
    return dict(sorted(steps.items()))


def committed_steps(there: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The complete ones of {step: {name of a file in it: ...}}, in that order: in a store files.json is written last."""
    return [step for step, files in there.items() if FILES in files]


def newest_whole(folder: Path, refused: Mapping[int, str] | None = None) -> tuple[int | None, dict[int, str]]:
    """Finds (the newest intact step in a folder of checkpoints, why each newer step is damaged). Steps in `refused`, with their
    reasons, are not examined. (None, {}) if the folder holds no checkpoints; ConfigError if none is intact, or one cannot be
    read here.
    """
    reasons = dict(refused or {})
    for step in reversed(saved_steps(folder)):
        if step not in reasons:
            reason = damage(folder / str(step))
            if reason is None:
                return step, reasons
            reasons[step] = reason
    if not reasons:
        return None, {}
    listed = ", ".join(f"{step} ({reason})" for step, reason in reasons.items())
    raise ConfigError(
        f"No checkpoint in {folder} is intact: {listed}; restore a copy of one there, or choose another run.dir to start again."
    )


def newest_undamaged(folder: Path, refused: Mapping[int, str]) -> int:
    """The newest step of a folder of checkpoints that is intact and not in `refused`; -1 without one. Raises as `damage`."""
    steps = (step for step in reversed(saved_steps(folder)) if step not in refused)
    return next((step for step in steps if damage(folder / str(step)) is None), -1)


def damage(folder: Path, item: str = "") -> str | None:
    """The damage to a checkpoint, or to its `item` alone, that its metadata and the sizes of its files show; None if there is
    none; ConfigError if a newer jaxllm wrote it, or it cannot be read here. `changed` finds changed bytes of arrays.
    """
    try:
        meta = read_meta(folder)
        if item != META and not (folder / STATE).is_dir():
            return f"{STATE} is missing"
        if not (folder / FILES).is_file():
            # Of a version before FILES: reading the arrays will show damage.
            return None if meta["format"] == 1 else f"{FILES} is missing"
        for name, (size, crc) in read_files(folder).items():
            path = folder / name
            if not name.startswith(item):
                continue
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
            # The metadata is used before the arrays are read.
            if name.startswith(f"{META}/") and zlib.crc32(path.read_bytes()) != crc:
                return f"{name} has changed"
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        if is_not_damage(error):
            raise cannot_be_read(folder, error) from None
        return why(error)
    return None


def read_meta(folder: Path) -> Meta:
    """The metadata of a checkpoint, without JAX.

    Raises:
      ConfigError: a newer jaxllm wrote it.
      OSError, ValueError: it is missing or torn.
    """
    # The file that Orbax's JsonSave writes.
    meta = checked(read_json(folder / META / "metadata", finite=False), dict[str, Any])
    if isinstance(meta.get("format"), int) and meta["format"] > FORMAT:
        raise ConfigError(
            f"{folder} has format {meta['format']}, and this jaxllm reads up to {FORMAT}: install a newer jaxllm."
        )
    checked(meta, StoredMeta)
    return meta


def read_files(folder: Path) -> dict[str, tuple[int, int]]:
    """{path: (bytes, CRC32)} of the files in a checkpoint. OSError or ValueError if the list is missing or torn."""
    return listed_in(read_bytes(folder / FILES, FILES_BYTES))


def listed_in(content: bytes) -> dict[str, tuple[int, int]]:
    """As read_files, of the content of a files.json. Raises ValueError if it is torn."""
    return checked_map(parse_json(content, FILES_BYTES), tuple[Whole, Whole])


def differs(folder: Path, there: Mapping[str, int]) -> str | None:
    """How the objects of a checkpoint in a store, {name: bytes}, differ from what its copied files.json lists; None if they do
    not."""
    try:
        listed = read_files(folder)
    except ValueError as error:
        return why(error)
    for name, (size, _) in listed.items():
        path = PurePosixPath(name)
        if path.parts[:1] not in ((STATE,), (META,)) or ".." in path.parts:
            return f"{FILES} names {shown(name)}"
        if there.get(name) != size:
            return f"{shown(name)} " + (f"has {there[name]} bytes of {size}" if name in there else "is missing")
    return None


NOT_DAMAGE = (
    *("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Permission denied", "Too many open files", "Stale file handle"),
    *("Connection timed out", "Cannot allocate memory"),
)
"""Texts in read errors whose cause is this machine, not the checkpoint."""


def is_not_damage(error: BaseException) -> bool:
    """Whether reading failed for a reason of this machine: memory, permissions, descriptors, its network."""
    links = causes(error, suppressed=True)
    return any(isinstance(link, MemoryError | PermissionError) for link in links) or any(
        word in str(link) for link in links for word in NOT_DAMAGE
    )


def cannot_be_read(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder} cannot be read here ({why(error)}): it shows no damage, so remove the cause.")


def set_aside(folder: Path) -> Path:
    """Moves a damaged checkpoint to a unique name in checkpoints-damaged, beside its folder."""
    home = folder.parent.parent / "checkpoints-damaged"
    home.mkdir(exist_ok=True)
    target = next(path for n in itertools.count(1) if not (path := home / f"{folder.name}-{n}").exists())
    shutil.move(folder, target)
    return target


KNOWN_CAUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)


def why(error: BaseException) -> str:
    """Describes an error of Orbax, TensorStore or the file system in a few words."""
    links = causes(error, suppressed=True)
    for link in links:
        if isinstance(link, RefusedInput):
            return str(link)
        if isinstance(link, OSError) and link.strerror:
            return f"{link.strerror}: {link.filename}" if link.filename else link.strerror
        for code in KNOWN_CAUSES:
            if os.strerror(code) in str(link):
                return os.strerror(code)
    return f"{type(links[-1]).__name__}: {' '.join(str(links[-1]).split())[:200]}"


def require_plain_path(key: str, folder: Path, refused: str = PATTERN_CHARACTERS) -> None:
    """Raises ConfigError if the absolute path of a folder of checkpoints has one of the refused characters: those of BACKSLASH
    for reading, of PATTERN_CHARACTERS for saving.
    """
    if found := set(str(folder.absolute())) & set(refused):
        named = " and ".join(sorted(found))
        raise ConfigError(
            f"{key}={folder} has {named} in its path, {folder.absolute()}, where Orbax loses checkpoints: choose a folder "
            f"without any of {' '.join(PATTERN_CHARACTERS)} in its path."
        )


# -------------------------------------------------------------------------------------------------------------- checksums
# Every byte is covered, and every byte is read again when the arrays are.
#
# On a save, each process computes the checksums of the files that it has just written, in Orbax's background thread; process 0
# collects them in files.json. On a restore, each process reads the files that the process of its number wrote, in a thread
# beside the one that reads the arrays: mostly the same bytes, so that the disk reads them once. The others, and the pieces of
# hosts that shared no disk, are dealt out in turn.

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
    Each of several processes verifies a share of the files. ConfigError if one cannot be read here for another reason.
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
