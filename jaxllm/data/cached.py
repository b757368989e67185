"""Copies of objects of stores on a disk of this host, and prepared folders that are read through them.

All processes of the host may share the disk. A copy has its name when it is whole and verified, so that a kill leaves no half.
weights/stored_models.py keeps models so; prepared folders are kept as

  CACHE/NAME-0123456789abcdef/    NAME of the folder, and a hash of its address and its manifest
    manifest.json  tokenizer/  *.lengths.npy  *.keys.npy    copied when the folder is opened
    *.array_record                                          copied when first read, or before in the background

Training reads documents in a shuffled order, so a run soon needs every shard. The background therefore copies all of them, as
long as there is room, which it makes by removing shards of folders that no process of the host has open. A shard that a batch
needs now takes the room of the one that was read longest ago, whosever it is.
"""

import atexit
import fcntl
import hashlib
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np

from jaxllm.config import ConfigError, DataConfig
from jaxllm.data.manifest import DATA_ENDINGS, MANIFEST, TOKENIZER, placing, read_manifest, read_npy, remove_leftovers, writing
from jaxllm.data.parts import InputFile
from jaxllm.data.stores import blocks, find_in_store, is_address
from jaxllm.data.tokenizer import FILES
from jaxllm.untrusted import JSON_BYTES, MIB, RefusedInput, shown

log = logging.getLogger(__name__)
RECORDS, IN_USE = DATA_ENDINGS[0], ".in-use"
_QUESTIONS = 16
_LONGEST_WAIT_S = 10.0
_RECORDS_AT_ONCE = 64


def copy_name(name: str, identity: bytes) -> str:
    """The name of a folder's copy: it has another one when its identity changes."""
    return f"{name}-{hashlib.sha256(identity).hexdigest()[:16]}"


@contextmanager
def locked(file: Path, wait: bool) -> Iterator[bool | None]:
    """Whether no other thread or process has the lock of a file; with `wait` it waits until that is so. None where the disk has
    no locks: two copies are then equal, and the last one stays."""
    with ExitStack() as stack:
        is_ours = None
        with suppress(OSError):
            opened = stack.enter_context(open(file, "w"))
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                is_ours = True
            except BlockingIOError:
                is_ours = False
        yield is_ours


def write_blocks(target: Path, content: Iterable[bytes], took: Callable[[int], object] = lambda size: None) -> None:
    """Writes a file, and calls `took` with the size of each block. What that raises ends it."""
    with open(target, "wb") as file:
        for block in content:
            took(len(block))
            file.write(block)


def is_copy(path: Path, original: InputFile) -> bool:
    """Whether a file is there with the size of an object."""
    try:
        return path.stat().st_size == original.size
    except (FileNotFoundError, NotADirectoryError):
        return False


# -------------------------------------------------------------------------------------------------------- prepared folders


class ShardCache:
    """A folder of copies, with at most `most_bytes` of shards: what is being copied, and what is read, comes on top."""

    def __init__(self, folder: Path, most_bytes: float):
        self.folder, self.most_bytes = folder, most_bytes
        self._lock = threading.Lock()
        self.closers: list[Callable[[], None]] = []
        """Called after files were removed, perhaps by another process: an open one keeps its room on the disk."""
        self._threads: list[threading.Thread] = []
        self.stopped = threading.Event()

    def unwritable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"The cache {self.folder} cannot be written ({reason}): fix that, or name another folder by data.cache_dir."
        )

    def close(self) -> None:
        """Ends copying in the background."""
        self.stopped.set()
        for thread in self._threads:
            thread.join(_LONGEST_WAIT_S)

    def start(self, thread: threading.Thread) -> None:
        # A thread in the library's code must not outlive the interpreter.
        atexit.register(self.close)
        self._threads.append(thread)
        thread.start()

    def make_room(self, size: int, may_remove: bool) -> bool:
        """Whether a shard of so many bytes fits. Removes those that were read longest ago: any, if it may, so that it does;
        otherwise those of folders that no process has open, if that makes enough room.
        """
        with self._lock, ExitStack() as locks:
            there = []
            for file in self.folder.glob(f"*/*{RECORDS}"):
                try:
                    found = file.stat()
                except FileNotFoundError:
                    continue
                there.append((found.st_mtime_ns, found.st_size, file))

            @cache
            def may_go(folder: Path) -> bool:
                # No process opens it while this one has the lock.
                return may_remove or locks.enter_context(locked(folder / IN_USE, wait=False)) is True

            excess, dropped = size + sum(bytes_there for _, bytes_there, _ in there) - self.most_bytes, []
            for _, freed, file in sorted(there):
                if excess > 0 and may_go(file.parent):
                    dropped.append(file)
                    excess -= freed
            if excess > 0 and not may_remove:
                return False
            for file in dropped:
                file.unlink(missing_ok=True)
            for close in self.closers if may_remove else ():
                close()
            return True


class CachedFolder:
    """The copy of one prepared folder."""

    def __init__(self, cache: ShardCache, address: str):
        """
        Raises:
          ConfigError: the address is of no store that lists files, the store does not give the folder, it is not complete, or
            the cache cannot be written.
        """
        self.cache = cache
        if not address.startswith(("s3://", "gs://", "hf://")):
            # What follows a question mark may be a signature.
            raise ConfigError(
                f"{shown(address.partition('?')[0])} is not read as a prepared folder: use s3://, gs:// or hf://datasets/, or "
                f"copy the folder to a disk."
            )
        # A dataset of the Hub is listed by its name, at one commit.
        self.address = re.sub(r"^(hf://datasets/[^/]+/[^/@]+)@[^/]+", r"\1", address.rstrip("/"))
        self.name = self.address.rpartition("/")[2]
        listed = find_in_store(f"{address.rstrip('/')}/**")
        self._files = {file.path.removeprefix(self.address + "/"): file for file in listed}
        if MANIFEST not in self._files:
            parts = sum(bool(re.fullmatch(r"tokens-[0-9]+-of-[0-9]+\.json", name)) for name in self._files)
            says = f"it has {parts} shards and no {MANIFEST}" if parts else f"it has no {MANIFEST}"
            raise ConfigError(
                f"{address} is not a prepared folder ({says}): copy the whole output of jaxllm data prepare there, or name "
                f"another folder."
            )
        content = b"".join(blocks(self._small(MANIFEST)))
        self.folder = cache.folder / copy_name(self.name, self.address.encode() + b"\0" + content)
        with writing(cache.unwritable):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            # Tells other processes, as long as this object lives, that the folder is open.
            in_use = open(self.folder / IN_USE, "w")  # noqa: SIM115
            weakref.finalize(self, in_use.close)
            with suppress(OSError):
                # A disk that has no locks: nothing is removed there in the background.
                fcntl.flock(in_use, fcntl.LOCK_SH)
            self._place(MANIFEST, [content])
        try:
            self.manifest = read_manifest(self.folder)
        except ConfigError as error:
            (self.folder / MANIFEST).unlink(missing_ok=True)
            raise ConfigError(str(error).replace(str(self.folder), self.address)) from None
        self._shards = {shard.name + RECORDS: shard for shard in self.manifest.shards}
        self._copy_small()
        if (size := sum(self._files[name].size for name in self._shards)) > cache.most_bytes:
            log.warning(
                "%s has %.1f GiB of shards and data.cache_gib=%g: documents are read in a shuffled order, so shards will be "
                "copied again and again. Raise data.cache_gib, or copy the folder to a disk of every host.",
                address,
                size / 2**30,
                cache.most_bytes / 2**30,
            )
        self._background: threading.Thread | None = None

    def fetch(self, file: Path) -> None:
        """Copies the shard's file from the store if it is not there. It may leave again before it is open. Raises ConfigError
        if the store does not give it, or the cache cannot be written.
        """
        with writing(self.cache.unwritable):
            try:
                # The order of removal. Times of access are not kept on every disk.
                os.utime(file)
            except FileNotFoundError:
                self._copy_shard(file.name, in_background=False)
        if self._background is None:
            self._background = threading.Thread(target=self._copy_others, args=(file.name,), daemon=True)
            self.cache.start(self._background)

    def damaged(self, file: Path, reason: str) -> ConfigError:
        """Deletes a damaged copy. Returns the error to raise."""
        file.unlink(missing_ok=True)
        return ConfigError(
            f"{file} is damaged ({reason}) and was deleted: start again to copy {self.address}/{file.name} again, or prepare "
            f"it again if it is damaged there too."
        )

    def _copy_small(self) -> None:
        """Copies all but the shards' records, and compares all sizes."""
        sizes = {name: size for shard in self.manifest.shards for name, size in shard.files.items()}
        for name, size in sizes.items():
            found = self._files[name].size if name in self._files else None
            if found != size:
                says = "is missing" if found is None else f"has {found:,} bytes and should have {size:,}"
                raise ConfigError(f"{self.address}/{name} {says}: prepare it again, or copy the complete folder.")
        wanted = [name for name in sizes if name not in self._shards]
        if self.manifest.tokenizer.kind == "folder":
            there = [f"{TOKENIZER}/{name}" for name in FILES if f"{TOKENIZER}/{name}" in self._files]
            wanted += [self._small(name).path.removeprefix(self.address + "/") for name in there]
        missing = [name for name in wanted if not is_copy(self.folder / name, self._files[name])]
        with writing(self.cache.unwritable), ThreadPoolExecutor(_QUESTIONS) as pool:
            (self.folder / TOKENIZER).mkdir(exist_ok=True)
            list(pool.map(lambda name: self._place(name, blocks(self._files[name])), missing))

    def _small(self, name: str) -> InputFile:
        if self._files[name].size > JSON_BYTES:
            raise ConfigError(f"{self.address}/{name} has more than {JSON_BYTES // MIB} MiB: prepare the folder again.")
        return self._files[name]

    def _copy_others(self, first: str) -> None:
        """Copies the shards after `first`, and then those before it, as long as there is room."""
        names = list(self._shards)
        at = names.index(first)
        for name in names[at + 1 :] + names[:at]:
            try:
                if self.cache.stopped.is_set() or not self._copy_shard(name, in_background=True):
                    return
            except (ConfigError, RuntimeError) as error:
                # The batch that needs it asks again and says so. Python starts no thread once the program ends.
                log.info("%s is not copied in advance: %s", name, error)
                return

    def _copy_shard(self, name: str, in_background: bool) -> bool:
        """Copies a shard that is not there; in the background not one that is being copied. False: there is no room."""
        final, shard = self.folder / name, self._shards[name]
        with writing(self.cache.unwritable), locked(self.folder / f".{name}.lock", wait=not in_background) as ours:
            if ours is False or final.exists():
                return True
            if not self.cache.make_room(shard.files[name], may_remove=not in_background):
                return False

            def go_on(size: int) -> None:
                if in_background and self.cache.stopped.is_set():
                    raise RuntimeError("the run has ended")

            with placing(self.folder, name) as aside:
                write_blocks(aside, blocks(self._files[name]), go_on)
                try:
                    found = _sha256(aside, self.folder / (shard.name + DATA_ENDINGS[1]))
                except (RuntimeError, IndexError, ValueError, RefusedInput):
                    found = None
                if found != shard.sha256:
                    raise ConfigError(
                        f"{self.address}/{name} is not what {MANIFEST} beside it describes: prepare it again, or copy the "
                        f"complete folder."
                    )
            return True

    def _place(self, name: str, content: Iterable[bytes]) -> None:
        with placing(self.folder, name) as aside:
            write_blocks(aside, content)


def _sha256(file: Path, lengths: Path) -> str:
    """Checksum of a shard's ids and lengths, as the manifest has it."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader, digest = ArrayRecordReader(str(file)), hashlib.sha256()
    count = reader.num_records()
    for start in range(0, count, _RECORDS_AT_ONCE):
        for record in reader.read(list(range(start, min(start + _RECORDS_AT_ONCE, count)))):
            digest.update(record)
    digest.update(read_npy(lengths, np.uint32).tobytes())
    return digest.hexdigest()


def shard_cache(data: DataConfig, default: Callable[[], Path] | None) -> ShardCache | None:
    """The cache of data.cache_dir, or else in `data` of what `default` gives; None if nothing is read from a store. Raises
    ConfigError if there is neither.
    """
    paths = [path for part in data.sources if part.source == "prepared" for path in part.paths]
    if not any(map(is_address, paths)):
        return None
    try:
        folder = Path(data.cache_dir).expanduser() if data.cache_dir else default() / "data" if default else None
    except RuntimeError:
        # A user without a home, as in containers.
        folder = None
    if folder is None:
        raise ConfigError("There is no home folder to cache shards of a store in: set data.cache_dir to a folder of each host.")
    return ShardCache(folder.absolute(), data.cache_gib * 2**30)
