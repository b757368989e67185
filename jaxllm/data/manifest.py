"""What a prepared folder tells about itself: its manifest.json, the .json of each shard, what they were made from,
and their arrays, read with their types checked; how files are written that are complete or absent.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from numpy.lib import format as array_format
from pydantic import FailFast, Field

from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import INT32, RefusedInput, Whole, checked, opened, read_json, reason_of, shown

# ----------------------------------------------------------------------------------------------------------------- origin
# What the shards of one prepared folder were made from. The first shard that is finished decides; others are refused.


Digest = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
# Not Text: a name of a folder may contain bytes that are not UTF-8, which Python reads as surrogates.
Name = Annotated[str, Field(strict=True)]


@dataclass(frozen=True)
class OriginTokenizer:
    name: Name
    sha256: Digest


@dataclass(frozen=True)
class OriginOptions:
    tokenizer: OriginTokenizer
    text_key: Name
    shard_bytes: Whole
    record_tokens: Whole


@dataclass(frozen=True)
class OriginInputs:
    count: Whole
    bytes: Whole
    sha256: Digest
    """It covers names, sizes, and dates or versions."""

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes in {self.count:,} file{'s' if self.count != 1 else ''}"


@dataclass(frozen=True)
class Origin:
    """Properties that all shards of one folder share; the first two are in the .json of each."""

    options: OriginOptions
    inputs: OriginInputs
    stored: tuple[dict[str, Any], ...] = ()
    """What INPUTS keeps: path or address, bytes and version of each input, if any came from a store."""


def check_same_origin(folder: Path, origin: Origin, first_alone: bool = False) -> None:
    """Raises ConfigError if the folder holds shards of another origin. With `first_alone` it looks at one of them."""
    for file in folder.glob("tokens-*-of-*.json") if first_alone else sorted(folder.glob("tokens-*-of-*.json")):
        # A shard without a recorded origin is made again, like one without its .json.
        if (there := as_shard(read_stored(file))) is None:
            continue
        ours, theirs = origin.options, there.options
        if theirs.tokenizer.sha256 != ours.tokenizer.sha256:
            names = theirs.tokenizer.name, ours.tokenizer.name
            which = f"the tokenizer {names[0]}, not {names[1]}" if names[0] != names[1] else f"another tokenizer {names[0]}"
            raise ConfigError(f"{folder} holds shards made with {which}: choose another --out, or use that tokenizer again.")
        if there.inputs != origin.inputs:
            counts = str(there.inputs), str(origin.inputs)
            which = f"{counts[0]}, not {counts[1]}" if counts[0] != counts[1] else "their names or dates differ"
            raise ConfigError(
                f"{folder} holds shards of other inputs ({which}): choose another --out, or give the same inputs."
            )
        # Checked after the inputs, because the default shard size depends on them.
        for key, flag in (("text_key", "--text-key"), ("shard_bytes", "--shard-megabytes"), ("record_tokens", "record_tokens")):
            values = getattr(theirs, key), getattr(ours, key)
            if values[0] != values[1]:
                values = [f"{v / 2**20:g}" if key == "shard_bytes" else v for v in values]
                raise ConfigError(
                    f"{folder} holds shards made with {flag} {values[0]}, not {values[1]}: "
                    f"choose another --out, or use {flag} {values[0]} again."
                )
        if first_alone:
            return


@contextmanager
def adding_to(folder: Path, origin: Origin) -> Iterator[None]:
    """A shard of this origin is added to the folder inside, where no other process adds one. Raises ConfigError if the folder
    holds shards of another origin, as of another command that began at the same time.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            # A disk without locks leaves a moment between the look and the addition.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        check_same_origin(folder, origin, first_alone=True)
        yield
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------- .npy files
# Reads arrays of .npy files that may hold anything.


def read_npy(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """Reads an array of one dim from a .npy file, without pickles. Its size is compared with the file's first.

    Args:
      dtype: what its numbers are, such as np.integer.

    Raises:
      OSError: it cannot be read.
      RefusedInput: the file is something else, has other numbers or more dims, or is shorter or longer than it says.
    """
    with opened(path) as file:
        try:
            version = array_format.read_magic(file)
            read_header = {(1, 0): array_format.read_array_header_1_0, (2, 0): array_format.read_array_header_2_0}[version]
            shape, fortran, found = read_header(file, max_header_size=10_000)
        except Exception:
            # NumPy reads the header as Python: a tokenizer's error may come, or anything else.
            raise RefusedInput("it is not a .npy file") from None
        if not np.issubdtype(found, dtype) or found.hasobject or len(shape) != 1 or type(shape[0]) is not int or fortran:
            raise RefusedInput(f"it holds {shown(str(found))} of shape {shown(list(shape))}, not {dtype.__name__} in 1 dims")
        size = os.fstat(file.fileno()).st_size - file.tell()
        if shape[0] * found.itemsize != size:
            raise RefusedInput(f"it says {shape[0]:,} numbers and has {size:,} bytes")
        return np.fromfile(file, found)


# --------------------------------------------------------------------------------------------------------------- manifest

FORMAT, VERSION = "jaxllm-tokens", 1
MANIFEST = "manifest.json"
INPUTS = "inputs.json"
"""The inputs, if any came from a store, with their versions. For people: nothing reads it."""
TOKENIZER = "tokenizer"
DATA_ENDINGS = (".array_record", ".lengths.npy", ".keys.npy")
NAMES = ("tokens-*", TOKENIZER, MANIFEST, INPUTS)
"""Patterns of the files and folders that are written here under temporary names."""


@dataclass(frozen=True)
class StoredTokenizer(OriginTokenizer):
    kind: Literal["bytes", "folder"]


@dataclass(frozen=True)
class StoredShard:
    """A shard as the manifest and the shard's own .json tell it."""

    name: Annotated[str, Field(strict=True, pattern=r"^tokens-[0-9]{5,10}-of-[0-9]{5,10}$")]
    documents: Annotated[int, Field(strict=True, ge=0, le=INT32)]
    tokens: Whole
    sha256: Digest
    files: dict[str, Whole]
    """Bytes of each file."""
    records: Whole | None = None
    index_sha256: Digest | None = None
    """Checksum of document lengths and keys, which decide what is held out. Folders that were prepared before it existed have
    none."""


@dataclass(frozen=True)
class Manifest:
    """What reading needs of manifest.json."""

    documents: Whole
    record_tokens: Annotated[int, Field(strict=True, ge=1, le=INT32)]
    dtype: Literal["uint8", "uint16", "uint32"]
    tokenizer: StoredTokenizer
    shards: Annotated[list[StoredShard], FailFast(), Field(min_length=1)]


FOR_MANIFEST = ("name", "documents", "tokens", "text_bytes", "records", "broken", "empty", "sha256", "files", "index_sha256")
"""Keys that the manifest copies from a shard's .json."""


@dataclass(frozen=True, kw_only=True)
class ShardFile(StoredShard):
    """A shard's .json. One that is damaged is made again."""

    text_bytes: Whole
    broken: Whole
    empty: Whole
    broken_records: list[dict[str, Any]]
    options: OriginOptions
    inputs: OriginInputs


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json of a prepared folder.

    Raises:
      ConfigError: there is no manifest because preparation has not finished, or the manifest has another version, or says
        what cannot be.
    """
    file = folder / MANIFEST
    content = read_stored(file)
    if content is None:
        form = re.compile(r"tokens-[0-9]{5,10}-of-([0-9]{5,10})\.json")
        if names := [name for path in folder.glob("tokens-*-of-*.json") if (name := form.fullmatch(path.name))]:
            raise ConfigError(
                f"{folder} is not complete, {len(names)} of {int(names[0][1])} shards are prepared: "
                f"run jaxllm data prepare again to finish it."
            )
        raise ConfigError(
            f"{folder} is not a prepared folder (it has no {MANIFEST}): run jaxllm data prepare, or name another folder."
        )
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{file} was not written by jaxllm data prepare: name another folder.")
    if content.get("version") != VERSION:
        version = shown(content.get("version"))
        raise ConfigError(f"{file} is of version {version} and this jaxllm reads version {VERSION}: prepare it again.")
    try:
        manifest = checked(content, Manifest)
    except RefusedInput as error:
        raise damaged(file, str(error)) from None
    total = sum(shard.documents for shard in manifest.shards)
    if manifest.documents != total:
        raise damaged(file, f"documents is {manifest.documents:,}, and its shards have {total:,}")
    for shard in manifest.shards:
        if shard.files.keys() != {shard.name + ending for ending in DATA_ENDINGS}:
            raise damaged(file, f"it does not name the {len(DATA_ENDINGS)} files of {shard.name}")
        if shard.records not in (None, -(-shard.tokens // manifest.record_tokens)):
            raise damaged(file, f"{shard.name} has {shard.records:,} records, which record_tokens and tokens do not give")
    return manifest


def read_stored(file: Path) -> Any:
    """Reads the content of a JSON file; None if there is no file."""
    try:
        return read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RefusedInput) as error:
        raise damaged(file, reason_of(error)) from None


def check_sizes(folder: Path, files: dict[str, int]) -> None:
    """Raises ConfigError unless each file of a shard exists with its recorded size."""
    for name, size in files.items():
        file = folder / name
        if not os.path.isfile(file):
            raise ConfigError(f"{file} is missing: prepare it again, or copy the complete folder.")
        if file.stat().st_size != size:
            raise ConfigError(
                f"{file} has {file.stat().st_size:,} bytes and should have {size:,}: prepare it again, or copy it again."
            )


def as_shard(content: Any) -> ShardFile | None:
    """The content of a .json if it is that of a shard."""
    try:
        shard = checked(content, ShardFile)
    except RefusedInput:
        return None
    whole = shard.records is not None and shard.files.keys() == {shard.name + ending for ending in DATA_ENDINGS}
    return shard if whole else None


def index_sha256(lengths: np.ndarray, keys: np.ndarray) -> str:
    """SHA-256 of a shard's document lengths and keys."""
    return hashlib.sha256(lengths.tobytes() + keys.tobytes()).hexdigest()


def fingerprint(manifest: Manifest) -> str:
    """SHA-256 of the folder's ids, document ends and tokenizer. Names, locations and dates do not change it."""
    shards = [[shard.documents, shard.tokens, shard.sha256] for shard in manifest.shards]
    content = [FORMAT, VERSION, manifest.tokenizer.sha256, shards]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def damaged(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is damaged ({reason}): delete it and run the same jaxllm data prepare again.")


# -------------------------------------------------------------------------------------- files that are complete or absent
# Each is written under a temporary name with this process' id, and renamed once it is on the disk. A killed run therefore
# leaves nothing that looks finished, and two processes can safely write one file.


def remove_leftovers(folder: Path, of_other_hosts: bool = False, names: Sequence[str] = NAMES) -> None:
    """Deletes half-written files of dead processes on this host and, on request, half-written shards of other hosts.

    Args:
      names: patterns of what temporary_path was given.
    """
    host = socket.gethostname()
    for pattern in (f".{name}.*.tmp" for name in names):
        for path in folder.glob(pattern):
            writer, _, process = path.name.removesuffix(".tmp").rpartition("-")
            here = writer.endswith(f".{host}")
            if here and process.isdecimal() and not _is_running(int(process)):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            elif not here and of_other_hosts and path.name.startswith(".tokens-"):
                path.unlink(missing_ok=True)


def replace_json(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON to a file atomically. The file is on the disk when this returns."""
    with placing(file.parent, file.name) as aside, open(aside, "w", encoding="utf-8") as opened:
        # ASCII escapes: a file name may contain bytes that are not UTF-8, which Python reads as lone surrogates.
        opened.write(json.dumps(content, indent=1) + "\n")
        sync(opened)
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def placing(folder: Path, name: str) -> Iterator[Path]:
    """Yields another name for a file or a folder, which becomes `folder / name` at the end. After an error nothing stays."""
    # Where a disk has no locks, threads of this process may copy one object.
    aside = temporary_path(folder, f"{Path(name).name}.{threading.get_ident()}")
    try:
        yield aside
        # What is there may be a folder: of another tokenizer, or what someone damaged by hand.
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(aside, folder / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True) if aside.is_dir() else aside.unlink(missing_ok=True)


@contextmanager
def writing(refusal: Callable[[str], ConfigError]) -> Iterator[None]:
    """Raises refusal(reason) for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise refusal(reason_of(error)) from None


def temporary_path(folder: Path, name: str) -> Path:
    """Temporary name in the same folder, unique to this process, for the file `name`."""
    return folder / f".{name}.{socket.gethostname()}-{os.getpid()}.tmp"


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
