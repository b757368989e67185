"""Files of memory checkpoints: the pieces of the state that a process holds, in a folder of its host that outlives the process.

    checkpoint.memory_dir/jaxllm-<user>-<hash of run.dir>/     mode 700
      host                          a random name: processes that find the same one share this memory
      37-<run>-<start>/3-of-8       the pieces of process 3 of 8 after step 37

A file has the length and the SHA-256 of its header, the header (JSON: metadata of the checkpoint, and of each piece its array,
index, offset and SHA-256), then the bytes of the pieces. It has another name until it is complete. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.arrays import names_of
from jaxllm.checkpoint.files import Meta, StoredMeta
from jaxllm.config import ConfigError
from jaxllm.display import readable
from jaxllm.mesh import HOST
from jaxllm.runtime.host_memory import host_memory
from jaxllm.untrusted import JSON_BYTES, Text, Whole, checked, parse_json, read_text

THREADS = min(8, os.cpu_count() or 1)
"""hashlib computes about 2 GB of SHA-256 a second and thread, without Python's lock."""
LENGTH_BYTES, DIGEST_BYTES = 8, 32
COPIES = 2
"""Generations that are there at a time: the newest complete one, and the one in progress."""
SHARED_MEMORY = Path("/dev/shm")


class Generation(NamedTuple):
    """One memory checkpoint, and the name of its folder."""

    step: int
    run: str
    """Random, the same for a run directory: a new run at its path has another."""
    start: str
    """Random, one for each start of the run: another start may have saved the same step from another number of processes."""

    def __str__(self) -> str:
        return f"{self.step}-{self.run}-{self.start}"

    @classmethod
    def parse(cls, name: str) -> Generation | None:
        found = re.fullmatch(r"(\d{1,10})-([0-9a-f]{16})-([0-9a-f]{16})", name, re.ASCII)
        return cls(int(found[1]), found[2], found[3]) if found else None


class Part(NamedTuple):
    """The file of one process."""

    generation: Generation
    writer: int
    count: int
    """Processes that wrote one."""

    @property
    def path(self) -> Path:
        """Below the run's folder."""
        return Path(str(self.generation), f"{self.writer}-of-{self.count}")


class Piece(NamedTuple):
    """One shard of an array."""

    names: tuple[Text, ...]
    """The array's path in the state."""
    dtype: Text
    shape: tuple[Whole, ...]
    """The whole array's."""
    index: tuple[tuple[Whole, Whole], ...]
    """[start, stop] of each dim."""
    offset: Whole = 0
    """Start of its bytes, from the end of the header."""
    sha256: Text = ""

    @property
    def own_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.index)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.own_shape) * jnp.dtype(self.dtype).itemsize

    def view(self, content: np.ndarray) -> np.ndarray:
        """Its bytes as an array, without a copy."""
        return content.view(jnp.dtype(self.dtype)).reshape(self.own_shape)


@dataclass(frozen=True)
class Header:
    meta: dict[str, Any]
    pieces: tuple[Piece, ...]


class PartFile:
    """A complete file, mapped into memory.

    Raises:
      OSError: it cannot be read.
      ValueError: its header or its length has changed.
    """

    def __init__(self, path: Path):
        self._content = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(self._content[:LENGTH_BYTES].tobytes(), "little")
        if length > min(JSON_BYTES, self._content.size):
            raise ValueError("torn")
        self._first = LENGTH_BYTES + DIGEST_BYTES + length
        self.digest = self._content[LENGTH_BYTES : LENGTH_BYTES + DIGEST_BYTES].tobytes().hex()
        self.text = self._content[LENGTH_BYTES + DIGEST_BYTES : self._first].tobytes()
        self.header = read_header(self.text, self.digest)
        if self._first + sum(piece.num_bytes for piece in self.header.pieces) != self._content.size:
            raise ValueError("torn")

    def content(self, piece: Piece) -> np.ndarray:
        start = self._first + piece.offset
        return self._content[start : start + piece.num_bytes]

    def require_intact(self) -> None:
        """Raises ValueError if the bytes of a piece have changed."""
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda piece: sha256(self.content(piece)) == piece.sha256, self.header.pieces))
        if not all(found):
            raise ValueError("changed")


def read_header(text: bytes, digest: str) -> Header:
    """Raises ValueError if it has another digest."""
    if hashlib.sha256(text).hexdigest() != digest:
        raise ValueError("changed")
    header = checked(parse_json(text, finite=False), Header)
    checked(header.meta, StoredMeta)
    return header


def copy_pieces(arrays: Any) -> list[tuple[Piece, np.ndarray]]:
    """Copies the shards that this process answers for, one of several equal ones, into memory that no step overwrites.

    Args:
      arrays: nested dicts of jax.Array.
    """
    found = [(path, x, shard) for path, x in jax.tree_util.tree_leaves_with_path(arrays) for shard in _own(x)]
    for *_, shard in found:
        shard.data.copy_to_host_async()
    copied = []
    for path, x, shard in found:
        index = tuple(each.indices(size)[:2] for each, size in zip(shard.index, x.shape, strict=True))
        here = np.asarray(shard.data)
        if shard.device.platform == "cpu" or x.sharding.memory_kind == HOST:
            # The array's own memory, which the next step overwrites.
            here = here.copy()
        copied.append((Piece(names_of(path), x.dtype.name, x.shape, index), here))
    return copied


def own_bytes(arrays: Any) -> int:
    """Bytes of the shards that this process answers for."""
    return sum(shard.data.nbytes for x in jax.tree.leaves(arrays) for shard in _own(x))


def _own(x: jax.Array) -> list[Any]:
    return [shard for shard in x.addressable_shards if shard.replica_id == 0]


def write_part(home: Path, part: Part, meta: Meta, pieces: list[tuple[Piece, np.ndarray]]) -> Path:
    """Writes a file, gives it its name when it is complete, and empties the list.

    Raises:
      OSError: there is no space, or the folder is gone.
    """
    contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for _, array in pieces]
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(sha256, contents))
    offsets = np.cumsum([0, *(content.size for content in contents)]).tolist()
    described = [
        piece._replace(offset=offset, sha256=digest)
        for (piece, _), offset, digest in zip(pieces, offsets, digests, strict=False)
    ]
    pieces.clear()
    text = json.dumps({"meta": meta, "pieces": described}).encode()
    path = home / part.path
    with new_file(path) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(text).digest() + text)
        contents.reverse()
        while contents:
            # Its memory is free as soon as it is in the file.
            file.write(contents.pop().data)
    return path


class new_file:
    """with new_file(path) as file: writes under another name, which becomes `path` at the end; after an error nothing stays."""

    def __init__(self, path: Path):
        self._path, self._aside = path, path.with_name(f".{path.name}-{uuid.uuid4().hex}")

    def __enter__(self):
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._file = os.fdopen(os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w+b")
        return self._file

    @property
    def aside(self) -> Path:
        return self._aside

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self._file.close()
            if kind is None:
                self._aside.replace(self._path)
        finally:
            self._aside.unlink(missing_ok=True)


def sha256(content: np.ndarray) -> str:
    return hashlib.sha256(content.data).hexdigest()


# -------------------------------------------------------------------------------------------------------------- the folder


def make_home(memory_dir: str, run_dir: Path) -> Path:
    """The folder of this run on this host.

    Raises:
      ConfigError: it cannot be made, or somebody else could read or change it.
    """
    name = f"jaxllm-{os.geteuid()}-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]}"
    home = Path(memory_dir).absolute() / name
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.memory_dir={memory_dir} cannot be used ({error.strerror}): name a folder in the memory, or on a disk, "
            f"of each host."
        ) from None
    # Anyone may write into /dev/shm.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{home} is not a folder of this user alone: remove it, or choose another checkpoint.memory_dir.")
    return home


def name_of_host(home: Path) -> str:
    """The same for all processes that share the folder."""
    aside = home / f".{uuid.uuid4().hex}"
    aside.write_text(uuid.uuid4().hex)
    # Unlike a rename it fails if there is one.
    with suppress(FileExistsError):
        os.link(aside, home / "host")
    aside.unlink()
    return read_text(home / "host", 64)


def parts_in(home: Path) -> list[Part]:
    """The complete files of all generations there."""
    found = []
    for path in home.glob("*/*-of-*"):
        generation, name = Generation.parse(path.parent.name), re.fullmatch(r"(\d{1,6})-of-(\d{1,6})", path.name, re.ASCII)
        if generation and name:
            found.append(Part(generation, int(name[1]), int(name[2])))
    return sorted(found)


def remove(home: Path, keep: Iterable[Generation] = (), before_step: int | None = None) -> None:
    """Removes generations, all or those before a step."""
    for folder in home.iterdir() if home.is_dir() else ():
        found = Generation.parse(folder.name)
        if found is not None and found not in set(keep) and (before_step is None or found.step < before_step):
            shutil.rmtree(folder, ignore_errors=True)


def remove_home(home: Path) -> None:
    remove(home)
    (home / "host").unlink(missing_ok=True)
    # Another process of this host may have been first, or still write.
    with suppress(OSError):
        home.rmdir()


def require_space(memory_dir: str, home: Path, share_bytes: int, own_bytes: int) -> None:
    """Compares what this host will hold with the space that is left.

    Args:
      share_bytes: own pieces and the neighbour's, of one generation.
      own_bytes: own pieces, which are copied from the devices before they are written.

    Raises:
      ConfigError: there is too little.
    """
    held = sum(path.stat().st_size for path in home.glob("*/*-of-*"))
    free = shutil.disk_usage(home).free + held
    # A tmpfs may be larger than what is left of the memory, and the system kills whatever exceeds that.
    if SHARED_MEMORY.is_dir() and home.stat().st_dev == SHARED_MEMORY.stat().st_dev:
        available = host_memory()[1]
        free = free if available is None else min(free, available + held - own_bytes)
    needed = COPIES * share_bytes
    if needed > free:
        raise ConfigError(
            f"checkpoint.memory_every_steps needs {readable(needed)} in checkpoint.memory_dir={memory_dir} ({COPIES} "
            f"generations of this host's pieces of the state and its neighbour's), and {readable(free)} are free: choose "
            f"another folder, such as a local disk, or remove checkpoint.memory_every_steps."
        )
