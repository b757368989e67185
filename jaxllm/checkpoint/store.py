"""Objects below an address of an object store, and the lock on it. stored_checkpoints.py keeps checkpoints there.

fsspec's libraries find credentials and servers by themselves (jaxllm/data/stores.py). Its asynchronous methods have a leading
underscore and run in its loop, where they can be cancelled: https://filesystem-spec.readthedocs.io/en/latest/async.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.files import by_step, committed_steps
from jaxllm.checkpoint.run_lock import HOLDER_BYTES, Holder, HolderLock, this_process
from jaxllm.cluster import distributed, exit_codes
from jaxllm.config import ConfigError
from jaxllm.data.stores import filesystem, may_pass, refusal, status_of
from jaxllm.untrusted import MIB, RefusedInput, reason_of

BEAT_S = 15.0
"""Between heartbeats: each is a request that stores bill."""
SILENT_S = 4 * BEAT_S
FILES_AT_ONCE, PIECES, PIECE = 4, 2, 16 * MIB
"""Files under way, pieces of one that S3 gets beside each other, and their bytes: about 128 MiB are in memory."""
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
    refused = ConfigError(f"checkpoint.store={address} cannot be used ({found}): {found.fix}.")
    refused.exit_code = found.exit_code
    return refused


class Store:
    """The objects below an address s3://bucket/prefix or gs://bucket/prefix."""

    def __init__(self, address: str):
        self.address = address
        self._scheme = address.partition("://")[0]
        self._fs = filesystem(self._scheme)
        self._root = str(self._fs._strip_protocol(address)).rstrip("/")
        self._asked: set[Future] = set()
        self._closed = False

    def close(self) -> None:
        """Cancels what is under way, in other threads too, and refuses all that follows."""
        self._closed = True
        for future in tuple(self._asked):
            future.cancel()

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """
        Args:
          timeout_s: None: ANSWER_S.

        Raises:
          FileNotFoundError, FileExistsError: as the method.
          StoreError: the store refuses, or does not answer in time, or is closed.
        """
        return self._wait_for(lambda: getattr(self._fs, f"_{method}")(*arguments, **options), timeout_s or ANSWER_S)

    def _wait_for(self, request: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(request(), timeout_s)

        future = asyncio.run_coroutine_threadsafe(limited(), self._fs.loop)
        self._asked.add(future)
        try:
            if self._closed:
                future.cancel()
            # The loop itself may hang, in a library's search for credentials.
            return future.result(timeout_s + ANSWER_S)
        except (FileNotFoundError, FileExistsError):
            raise
        except CancelledError:
            raise StoreError("the run has ended") from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in exit_codes.LASTING and error.__cause__ is None:
                # The disk of this host: the libraries' own errors have a cause, or no number.
                raise
            # The libraries raise many types.
            raise StoreError(*refusal(self.address, error), passes=may_pass(error)) from error
        finally:
            self._asked.discard(future)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str, limit: int) -> bytes:
        """Raises FileNotFoundError, RefusedInput for a larger one, StoreError."""
        try:
            content = self.ask("cat_file", self.path(name), start=0, end=limit + 1)
        except StoreError as error:
            if error.__cause__ is None or status_of(error.__cause__) != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            # An empty object has no first byte.
            content = b""
        if len(content) > limit:
            raise RefusedInput(f"{name} has more than {limit} bytes")
        return content

    def write(self, name: str, content: bytes, *, over: bool = True) -> None:
        """Raises FileExistsError if `over` is false and there is such an object, StoreError."""
        mode: dict[str, Any] = {} if over else {"mode": "create"}
        self.ask("pipe_file", self.path(name), content, timeout_s=ANSWER_S + len(content) / SLOWEST, **mode)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self.ask("rm_file", self.path(name))

    def steps(self, step: int | None = None) -> dict[int, dict[str, int]]:
        """{step: {name of a file in it: bytes}}, oldest first, complete or not. Lists all objects below the address, or of a
        step."""
        try:
            found = self.ask("find", self._root if step is None else self.path(str(step)), detail=True, timeout_s=10 * ANSWER_S)
        except FileNotFoundError:
            return {}
        return by_step({path.removeprefix(f"{self._root}/"): info["size"] for path, info in found.items()})

    def committed(self) -> list[int]:
        """The complete steps, oldest first."""
        return committed_steps(self.steps())

    def copy_in(self, files: dict[str, Path]) -> None:
        size = sum(path.stat().st_size for path in files.values())
        options: dict[str, Any] = {"chunksize": PIECE} | ({"max_concurrency": PIECES} if self._scheme == "s3" else {})
        self._move("put", {str(path): self.path(name) for name, path in files.items()}, size, **options)

    def copy_out(self, files: dict[str, Path], size: int) -> None:
        for folder in {path.parent for path in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        self._move("get", {self.path(name): str(path) for name, path in files.items()}, size)

    def _move(self, method: str, targets: dict[str, str], size: int, **options: Any) -> None:
        """Copies files, {source: target}. The first that fails, and `close`, end the others before this returns."""

        async def move() -> None:
            gate = asyncio.Semaphore(FILES_AT_ONCE)

            async def one(source: str, target: str) -> None:
                async with gate:
                    await getattr(self._fs, f"_{method}_file")(source, target, **options)

            try:
                async with asyncio.TaskGroup() as group:
                    for source, target in targets.items():
                        group.create_task(one(source, target))
            except BaseExceptionGroup as errors:
                raise (first := errors.exceptions[0]) from first.__cause__

        self._wait_for(move, 2 * ANSWER_S + size / SLOWEST)


class StoreLock(HolderLock):
    """Lock of this process on a store. Only the creation is atomic there: a takeover writes and reads again, as on a disk."""

    file = "holder.json"

    def __init__(self, store: Store):
        launch = distributed.launch_info()
        me = this_process(launch.launch_id, launch.attempt)
        super().__init__(f"checkpoint.store={store.address}", "checkpoint.store", me, (BEAT_S, SILENT_S))
        self._store = store

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
            return Holder.from_json(self._store.read(self.file, HOLDER_BYTES))
        except FileNotFoundError:
            return None
        except RefusedInput as error:
            # An object is written in whole, so this is none of jaxllm's, or of a newer one.
            raise ConfigError(
                f"{self._store.address}/{self.file} is another program's ({error}): move it away, or choose another "
                f"checkpoint.store."
            ) from None

    def _write_holder(self, over: bool) -> None:
        with suppress(FileExistsError):
            self._store.write(self.file, self._me.beat(), over=over)
        # The object may be this process's: the library asks again when no answer came. A server that ignores the condition
        # overwrites: the last of two starts holds the store.
        if not over and ((found := self._read()) is None or found.token != self._me.token):
            raise FileExistsError(self.file)

    def _write_beat(self) -> None:
        self._store.write(self.file, self._me.beat())

    def _remove(self) -> None:
        self._store.remove([self.file])
