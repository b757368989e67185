"""Objects below an address of an object store, and the lock on it. stored_checkpoints.py keeps checkpoints there.

Requests run in fsspec's loop, where they can be cancelled. jaxllm/data/buckets.py finds credentials and servers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.checkpoint.files import by_step, committed_steps
from jaxllm.checkpoint.run_lock import HOLDER_BYTES, Holder, HolderLock, this_process
from jaxllm.cluster import distributed, exit_codes
from jaxllm.config import ConfigError
from jaxllm.data.buckets import asked, listed, open_bucket
from jaxllm.data.stores import refusal
from jaxllm.untrusted import MIB, RefusedInput, reason_of

T = TypeVar("T")
Version = dict[str, str]
"""What obstore writes over: the ETag of an object on S3, its generation on Google's."""
BEAT_S = 15.0
"""Between heartbeats: each is a request that stores bill."""
SILENT_S = 4 * BEAT_S
FILES_AT_ONCE, PIECES, PIECE = 4, 2, 16 * MIB
"""Files under way, pieces of one that are sent beside each other, and their bytes: 275 MiB are in memory, measured."""
ANSWER_S, SLOWEST = 30.0, MIB
"""Seconds for an answer, and bytes per second below which a store counts as silent."""


class StoreError(OSError):
    """A store did not do what it was asked to. The message is the reason and `fix` the remedy, as phrases. `exit_code` is LOST
    if the cause may pass by itself, so that a restart can help.
    """

    def __init__(self, reason: str, fix: str = "remove the cause", *, passes: bool = False):
        super().__init__(reason)
        self.exit_code = exit_codes.LOST if passes else exit_codes.BAD_INPUT
        # What credentials to set; not that a public bucket needs none, as it cannot be written.
        self.fix = fix.split(";")[0] if fix.startswith("set ") else "remove the cause, or leave checkpoint.store out"


class LostError(StoreError):
    """Another run holds the store."""


class GoneError(Exception):
    """The local checkpoint was deleted before it was copied."""

    exit_code = exit_codes.BAD_INPUT

    def __str__(self) -> str:
        return "it was deleted here before it was copied: raise checkpoint.keep, or save less often"


def unusable(address: str, error: OSError) -> ConfigError:
    missing = "the bucket is not there" if isinstance(error, FileNotFoundError) else reason_of(error)
    found = error if isinstance(error, StoreError) else StoreError(missing)
    return ConfigError(f"checkpoint.store={address} cannot be used ({found}): {found.fix}.").with_code(found.exit_code)


class Store:
    """The objects below an address s3://bucket/prefix or gs://bucket/prefix. Each request raises ConfigError if a library, a
    key or a setting is missing, so that processes which ask together fail together.
    """

    def __init__(self, address: str):
        self.address = address
        self._asked: set[Future] = set()
        self._closed = False

    def close(self) -> None:
        """Cancels what is under way, in other threads too, and refuses all that follows."""
        self._closed = True
        for future in tuple(self._asked):
            future.cancel()

    def _ask(self, request: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        """The answer of the bucket within `timeout_s`, None for ANSWER_S. Raises FileNotFoundError, FileExistsError, and
        StoreError if the store refuses, does not answer in time, or is closed.
        """
        bucket = open_bucket(self.address)
        from fsspec.asyn import get_loop

        async def limited() -> T:
            return await asyncio.wait_for(asked(lambda: request(bucket)), timeout_s or ANSWER_S)

        future = asyncio.run_coroutine_threadsafe(limited(), get_loop())
        self._asked.add(future)
        try:
            if self._closed:
                future.cancel()
            return future.result()
        except (FileNotFoundError, FileExistsError, RefusedInput):
            raise
        except CancelledError:
            raise StoreError("the run has ended") from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in exit_codes.LASTING and error.__cause__ is None:
                # The disk of this host: those of buckets have no number.
                raise
            why, fix, passes = refusal(self.address, error)
            raise StoreError(why, fix, passes=passes) from error
        finally:
            self._asked.discard(future)

    def read(self, name: str, limit: int) -> bytes:
        """Raises FileNotFoundError, RefusedInput for a larger one, StoreError."""
        return self.read_version(name, limit)[0]

    def read_version(self, name: str, limit: int) -> tuple[bytes, Version]:
        """As `read`, and what `write` takes to write over these very bytes."""

        async def read(bucket: Any) -> tuple[bytes, Version]:
            found = await bucket.get_async(name)
            if found.meta["size"] > limit:
                raise RefusedInput(f"{name} has more than {limit} bytes")
            version = {key: found.meta[key] for key in ("e_tag", "version") if found.meta[key]}
            return bytes(await found.bytes_async()), version

        return self._ask(read)

    def write(self, name: str, content: bytes, *, over: bool | Version = True) -> None:
        """Writes over any object of this name, over none (False), or over one version alone. Raises FileExistsError if there is
        another, StoreError.
        """
        # Conditions need one request.
        options = {"use_multipart": False, "mode": over if isinstance(over, dict) else "overwrite" if over else "create"}
        self._ask(lambda bucket: bucket.put_async(name, content, **options), ANSWER_S + len(content) / SLOWEST)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._ask(lambda bucket, name=name: bucket.delete_async(name))

    def steps(self, step: int | None = None) -> dict[int, dict[str, int]]:
        """{step: {name of a file in it: bytes}}, oldest first, complete or not. Lists all objects below the address, or of a
        step."""
        try:
            found = self._ask(lambda bucket: listed(bucket, "" if step is None else str(step)), 10 * ANSWER_S)
        except FileNotFoundError:
            return {}
        return by_step({one["path"]: one["size"] for one in found})

    def committed(self) -> list[int]:
        """The complete steps, oldest first."""
        return committed_steps(self.steps())

    def copy_in(self, files: dict[str, Path]) -> None:
        self._copy(
            lambda bucket, name, path: bucket.put_async(name, path, chunk_size=PIECE, max_concurrency=PIECES),
            files,
            sum(path.stat().st_size for path in files.values()),
        )

    def copy_out(self, files: dict[str, Path], size: int) -> None:
        async def fetch(bucket: Any, name: str, path: Path) -> None:
            found = await bucket.get_async(name)
            with open(path, "wb") as file:
                async for piece in found.stream(MIB):
                    file.write(piece)

        for folder in {path.parent for path in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        self._copy(fetch, files, size)

    def _copy(self, copy: Callable[[Any, str, Path], Awaitable[Any]], files: dict[str, Path], size: int) -> None:
        """Copies files, {name: path}. The first that fails, and `close`, end the others before this returns."""
        waiting = [*files.items()]

        async def some(bucket: Any) -> None:
            while waiting:
                await copy(bucket, *waiting.pop(0))

        async def all_files(bucket: Any) -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(FILES_AT_ONCE):
                        group.create_task(some(bucket))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

        self._ask(all_files, 2 * ANSWER_S + size / SLOWEST)


class StoreLock(HolderLock):
    """Lock of this process on a store. It is created, taken over and renewed by conditional writes (compare-and-swap): of two
    starts that see the same holder, or none, one writes, and a holder that was taken over cannot write over the new one.
    """

    file = "holder.json"

    def __init__(self, store: Store):
        launch = distributed.launch_info()
        me = this_process(launch.launch_id, launch.attempt)
        super().__init__(f"checkpoint.store={store.address}", "checkpoint.store", me, (BEAT_S, SILENT_S))
        self._store = store
        self._seen: tuple[str, Version] = ("", {})
        """Token and version of the holder that was read last, together: the heartbeat reads in a thread of its own."""

    def take(self) -> None:
        """Returns when this process holds the store. Raises ConfigError if another run does, and StoreError."""
        self._take()
        self._beats.start()

    def require(self) -> None:
        """Raises LostError if another run has taken the store over, ConfigError if another program has, and StoreError."""
        if how := self.lost():
            raise LostError(f"the store {how}")

    def _read(self) -> Holder | None:
        try:
            content, version = self._store.read_version(self.file, HOLDER_BYTES)
            found = Holder.from_json(content)
            self._seen = found.token, version
            return found
        except FileNotFoundError:
            self._seen = "", {}
            return None
        except RefusedInput as error:
            # An object is written in whole, so this is none of jaxllm's, or of a newer one.
            raise ConfigError(
                f"{self._store.address}/{self.file} is another program's ({error}): move it away, or choose another "
                f"checkpoint.store."
            ) from None

    def _write_holder(self, over: bool) -> None:
        seen = self._seen
        with suppress(FileExistsError):
            self._store.write(self.file, self._me.beat(), over=(over and seen[1]) or False)
        # The object may be this process's: the library asks again when no answer came. A server that ignores the condition
        # overwrites: the last of two starts holds the store.
        if (found := self._read()) is None or found.token != self._me.token:
            if over and found is not None and self._seen == seen:
                raise StoreError("it does not write over an object that has not changed (If-Match)")
            raise FileExistsError(self.file)

    def _write_beat(self) -> None:
        token, version = self._seen
        if token == self._me.token:
            self._store.write(self.file, self._me.beat(), over=version)

    def _remove(self) -> None:
        self._store.remove([self.file])
