"""What a prepared folder tells about itself: its manifest.json and the .json of each shard, read with their types checked."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import FailFast, Field

from jaxllm.config.errors import ConfigError
from jaxllm.untrusted import INT32, RefusedInput, Whole, checked, read_json, reason_of, shown

FORMAT, VERSION = "jaxllm-tokens", 1
MANIFEST = "manifest.json"
INPUTS = "inputs.json"
"""The inputs, if any came from a store, with their versions. For people: nothing reads it."""
TOKENIZER = "tokenizer"
DATA_ENDINGS = (".array_record", ".lengths.npy", ".keys.npy")
INDEX_SHA256 = "index_sha256"
"""Key of a shard for the checksum of its document lengths and keys, which decide what is held out. Folders that were prepared
before it existed have none."""
Digest = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
# Not Text: a name of a folder may contain bytes that are not UTF-8, which Python reads as surrogates.
Name = Annotated[str, Field(strict=True)]


@dataclass(frozen=True)
class StoredTokenizer:
    kind: Literal["bytes", "folder"]
    name: Name
    sha256: Digest


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
    """See INDEX_SHA256."""


@dataclass(frozen=True)
class Manifest:
    """What reading needs of manifest.json."""

    documents: Whole
    record_tokens: Annotated[int, Field(strict=True, ge=1, le=INT32)]
    dtype: Literal["uint8", "uint16", "uint32"]
    tokenizer: StoredTokenizer
    shards: Annotated[list[StoredShard], FailFast(), Field(min_length=1)]


@dataclass(frozen=True)
class OriginTokenizer:
    name: Name
    sha256: Digest


@dataclass(frozen=True)
class OriginOptions:
    """What all shards of a folder were made with; see Origin."""

    tokenizer: OriginTokenizer
    text_key: Name
    shard_bytes: Whole
    record_tokens: Whole


@dataclass(frozen=True)
class OriginInputs:
    count: Whole
    bytes: Whole
    sha256: Digest


@dataclass(frozen=True)
class BrokenRecord:
    """A broken record, as position_of reads it."""

    file: Name
    reason: Name
    line: Whole | None = None
    row: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class ShardFile(StoredShard):
    """A shard's .json."""

    text_bytes: Whole
    broken: Whole
    empty: Whole
    broken_records: Annotated[list[BrokenRecord], FailFast()]
    options: OriginOptions
    inputs: OriginInputs


def shard_name(shard: int, shards: int) -> str:
    """Prefix of the names of a shard's files."""
    return f"tokens-{shard:05d}-of-{shards:05d}"


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json of a prepared folder.

    Raises:
      ConfigError: there is no manifest because preparation has not finished, or the manifest has another version, or says
        what cannot be.
    """
    file = folder / MANIFEST
    content = read_stored(file)
    if content is None:
        found = [
            re.fullmatch(r"tokens-[0-9]{5,10}-of-([0-9]{5,10})\.json", path.name) for path in folder.glob("tokens-*-of-*.json")
        ]
        names = [name for name in found if name]
        if names:
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


def is_shard(content: Any) -> bool:
    """Whether the content of a .json is that of a shard."""
    try:
        shard = checked(content, ShardFile)
    except RefusedInput:
        return False
    return shard.records is not None and shard.files.keys() == {shard.name + ending for ending in DATA_ENDINGS}


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
