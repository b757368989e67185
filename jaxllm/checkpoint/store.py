"""Objects below an address of an object store, and the lock on it. stored_checkpoints.py keeps checkpoints there.

fsspec's libraries find credentials and servers by themselves (jaxllm/data/stores.py). Its asynchronous methods have a leading
underscore and take a time limit through `sync`: https://filesystem-spec.readthedocs.io/en/latest/async.html
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.run_lock import HOLDER_BYTES, Holder, HolderLock, this_process
from jaxllm.data.stores import filesystem, refusal
from jaxllm.runtime import distributed
from jaxllm.untrusted import MIB, RefusedInput

BEAT_S = 15.0
"""Between heartbeats: each is a request that stores bill."""
SILENT_S = 4 * BEAT_S
FILES_AT_ONCE, PIECES, PIECE = 4, 2, 16 * MIB
"""Files under way, pieces of one that S3 gets beside each other, and their bytes: about 128 MiB are in memory."""
ANSWER_S, SLOWEST = 30.0, MIB
"""Seconds for an answer, and bytes per second below which a store counts as silent."""


class StoreError(OSError):
    """A store did not do what it was asked to. The message is the reason and `fix` the remedy, as phrases."""

    def __init__(self, reason: str, fix: str = "remove the cause"):
        super().__init__(reason)
        # What credentials to set; not that a public bucket needs none, as it cannot be written.
        self.fix = fix.split(";")[0] if fix.startswith("set ") else "remove the cause, or leave checkpoint.store out"


class LostError(StoreError):
    """Another run holds the store."""


class Store:
    """The objects below an address s3://bucket/prefix or gs://bucket/prefix."""

    def __init__(self, address: str):
        self.address = address
        self._scheme = address.partition("://")[0]
        self._fs = filesystem(self._scheme)
        self._root = str(self._fs._strip_protocol(address)).rstrip("/")

    def ask(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S, **options: Any) -> Any:
        """
        Raises:
          FileNotFoundError, FileExistsError: as the method.
          StoreError: the store refuses, or does not answer in time.
        """
        from fsspec.asyn import sync

        try:
            return sync(self._fs.loop, getattr(self._fs, f"_{method}"), *arguments, timeout=timeout_s, **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            # The libraries raise many types.
            raise StoreError(*refusal(self.address, error)) from error

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str, limit: int) -> bytes:
        """Raises FileNotFoundError, RefusedInput for a larger one, StoreError."""
        content = self.ask("cat_file", self.path(name), start=0, end=limit + 1)
        if len(content) > limit:
            raise RefusedInput(f"{name} has more than {limit} bytes")
        return content

    def write(self, name: str, content: bytes, *, over: bool = True) -> None:
        """Raises FileExistsError if `over` is false and there is such an object, StoreError."""
        mode: dict[str, Any] = {} if over else {"mode": "create"}
        self.ask("pipe_file", self.path(name), content, timeout_s=ANSWER_S + len(content) / SLOWEST, **mode)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self.ask("rm_file", self.path(name))
            except FileNotFoundError:
                continue

    def steps(self) -> dict[int, dict[str, int]]:
        """{step: {name of a file in it: bytes}}, oldest first, complete or not. Lists all objects below the address."""
        try:
            found = self.ask("find", self._root, detail=True, timeout_s=10 * ANSWER_S)
        except FileNotFoundError:
            return {}
        steps: dict[int, dict[str, int]] = {}
        for path, info in found.items():
            step, _, name = path.removeprefix(f"{self._root}/").partition("/")
            if step.isdecimal() and str(int(step)) == step and name:
                steps.setdefault(int(step), {})[name] = info["size"]
        return dict(sorted(steps.items()))

    def copy_in(self, files: dict[str, Path]) -> None:
        sizes = [path.stat().st_size for path in files.values()]
        options: dict[str, Any] = {"chunksize": PIECE} | ({"max_concurrency": PIECES} if self._scheme == "s3" else {})
        self._move("put", [str(path) for path in files.values()], [self.path(name) for name in files], sum(sizes), **options)

    def copy_out(self, files: dict[str, Path], size: int) -> None:
        self._move("get", [self.path(name) for name in files], [str(path) for path in files.values()], size)

    def _move(self, method: str, sources: list[str], targets: list[str], size: int, **options: Any) -> None:
        limit_s = 2 * ANSWER_S + size / SLOWEST
        self.ask(method, sources, targets, timeout_s=limit_s, batch_size=FILES_AT_ONCE, **options)


class StoreLock(HolderLock):
    """Lock of this process on a store. Only the creation is atomic there: a takeover writes and reads again, as on a disk."""

    file = "holder.json"

    def __init__(self, store: Store):
        launch = distributed.launch_info()
        me = this_process(launch.launch_id, launch.attempt)
        super().__init__(f"checkpoint.store={store.address}", "checkpoint.store", me)
        self._store = store

    @property
    def times_s(self) -> tuple[float, float]:
        return BEAT_S, SILENT_S

    def take(self) -> None:
        """Returns when this process holds the store. Raises ConfigError if another run does, and StoreError."""
        self._take()
        self._beats.start()

    def require(self) -> None:
        """Raises LostError if another run has taken the store over, and StoreError."""
        if how := self.lost():
            raise LostError(how)

    def _content(self) -> bytes | None:
        try:
            return self._store.read(self.file, HOLDER_BYTES)
        except FileNotFoundError:
            return None

    def _read(self) -> Holder | None:
        try:
            return None if (content := self._content()) is None else Holder.from_json(content)
        except RefusedInput:
            return None

    def _is_free(self) -> bool:
        return self._content() is None

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
