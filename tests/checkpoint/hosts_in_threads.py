"""Processes of a run as threads, each with a run directory: they share a board and a store, and train nothing."""

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from jaxllm.checkpoint import host_shares, stored_checkpoints
from jaxllm.checkpoint.files import describe_files, describe_run
from jaxllm.checkpoint.host_shares import DiskGroups
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints
from jaxllm.checkpoint.store import Store
from jaxllm.cluster import distributed


class Board:
    """distributed.Board without a coordinator."""

    def __init__(self, texts):
        self._texts = texts

    def put(self, name, text):
        self._texts[name] = text

    def read(self):
        return dict(self._texts)


class Run:
    """One start of a run on hosts with these run directories, a process for each.

    Attributes:
      joined: JoinedCheckpoints of each process, after `begin`.
      said: sentences of process 0 on what was chosen.
    """

    def __init__(self, patch, store, folders, config, accept=lambda address, meta: None):
        self.folders, self.said = [Path(folder) for folder in folders], []
        self.joined: list[Any] = [None] * len(folders)
        self.latest: int | None = None
        self._store, self._config, self._accept = store, config, accept
        self._here = threading.local()
        self._texts, self._result = [""] * len(folders), [""]
        self._barrier = threading.Barrier(len(folders))
        texts: dict[str, str] = {}
        patch.setattr(jax, "process_index", lambda: getattr(self._here, "rank", 0))
        patch.setattr(jax, "process_count", lambda: len(folders))
        patch.setattr(distributed, "exchange", self._exchange)
        patch.setattr(distributed, "Board", lambda: Board(texts))
        patch.setattr(host_shares, "LOOK_S", 0.01)
        patch.setattr(stored_checkpoints, "WAITS_S", (0.01,))

    def _exchange(self, text, combine):
        self._texts[self._here.rank] = text
        self._barrier.wait(30)
        if self._here.rank == 0:
            self._result[0] = combine(list(self._texts))
        self._barrier.wait(30)
        result = self._result[0]
        # A process that fails after this one has its result, perhaps before another is awake, whose own error counts.
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(30)
        return result

    def on_all(self, work) -> list:
        """work(rank) of all processes, at once. Raises the error of the first that has one of its own."""
        found = [None] * len(self.folders)

        def one(rank):
            self._here.rank = rank
            try:
                found[rank] = work(rank)
            except BaseException as error:
                found[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=[rank]) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors := [each for each in found if isinstance(each, BaseException)]:
            raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
        return found

    def begin(self) -> int | None:
        """Starts the run. Returns the step that it resumes from."""
        self.groups = DiskGroups(tuple(map(self.folders.index, self.folders)))
        self.on_all(lambda rank: (self.choose(rank), self.joined[rank].begin(self.latest)))
        return self.latest

    def choose(self, rank) -> None:
        folder = self.folders[rank]
        folder.mkdir(parents=True, exist_ok=True)
        lock = SimpleNamespace(require=lambda: None)
        self.joined[rank] = JoinedCheckpoints(self._store, lock, folder, self._config.checkpoint, self.groups)
        self.joined[rank].accept = self._accept
        step, said = self.joined[rank].choose()
        if rank == 0:
            self.latest, self.said = step, said
        distributed.exchange("", lambda texts: "")

    def save(self, step, ranks=None, content=b"") -> None:
        """Each of these processes writes its part of a checkpoint."""
        for rank in range(len(self.folders)) if ranks is None else ranks:
            meta = describe_run(self._config, step, "a text")
            write_part(self.joined[rank].shares.folder / str(step), rank, meta, content)

    def copy(self, step):
        """Has process 0 copy a checkpoint. Returns the error, if it could not."""
        self.joined[0].offer(step)
        return self.joined[0].wait()

    def look(self) -> None:
        """Each process sees what is on the board."""
        for joined in self.joined:
            joined.shares.look()

    def end(self) -> None:
        for joined in filter(None, self.joined):
            joined.close()
            if joined.shares._thread.ident:
                joined.shares._thread.join(30)


def arrays(step, rank, content=b"") -> dict[str, bytes]:
    """The pieces of arrays that a process has in a checkpoint, by their files."""
    return {f"small/{rank}": b"%d" % step, f"large/{rank}": b"%d" % step * 4000 + content}


def write_part(folder, rank, meta, content=b"") -> None:
    """As Orbax and manager.py write it."""
    aside = folder.with_name(f"{folder.name}.aside")
    files = {f"state/{name}": value for name, value in arrays(int(folder.name), rank, content).items()}
    if rank == 0:
        files |= {f"state/{name}/.zarray": b"of all" for name in ("small", "large")}
    files |= {f"state/array_metadatas/process_{rank}": b"of %d" % rank, "state/_METADATA": b"of all"}
    for name, value in (files | {"meta/metadata": json.dumps(meta).encode()}).items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(value)
    describe_files(aside)
    os.rename(aside, folder)


def values_in(checkpoint) -> dict[str, bytes]:
    """All pieces of arrays of a whole checkpoint."""
    assert all((checkpoint / f"state/{name}/.zarray").exists() for name in ("small", "large"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in (checkpoint / "state").glob("[sl]*/[0-9]*")}


def whole_values(step, ranks, content=b"") -> dict[str, bytes]:
    return {name: value for rank in range(ranks) for name, value in arrays(step, rank, content).items()}


def plain_copy(store: Store, step, folder) -> Path:
    """A step of the store as a checkpoint on a disk."""
    target = folder / "checkpoints" / str(step)
    shutil.rmtree(target, ignore_errors=True)
    there = store.steps(step)[step]
    store.copy_out({f"{step}/{name}": target / name for name in there}, sum(there.values()))
    return target
