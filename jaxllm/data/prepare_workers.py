"""The processes that write shards for `jaxllm data prepare`, and their progress."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.data.shards import Task
from jaxllm.data.tokenizer import Tokenizer, load_tokenizer
from jaxllm.machine.host import variable

_THREADS = "TOKENIZERS_PARALLELISM"


Write = Callable[[Task, Tokenizer, Callable[[int, int], None]], None]
"""write_shard, given all but these."""


def run(name: str, tokenizer: Tokenizer, write: Write, tasks: Sequence[Task], count: int, shows: PrepareProgress) -> None:
    """Makes the shards in `count` processes, which load the tokenizer by its name. With 1, in this process."""
    if count > 1:
        return _run_workers(name, write, tasks, count, shows)
    with variable(_THREADS, "false"):
        for task in tasks:
            write(task, tokenizer, shows.advance)
            shows.advance(shards=1)


def _run_workers(name: str, write: Write, tasks: Sequence[Task], count: int, shows: PrepareProgress) -> None:
    """Gives each worker one task at a time; the first error ends all workers."""
    spawn = multiprocessing.get_context("spawn")
    waiting = iter(tasks)
    workers: dict[Any, Any] = {}
    """Connection -> process."""
    begun = set()
    try:
        # A terminal sends Ctrl-C to the workers too. They ignore it, and this process ends them.
        with _interrupts_ignored(), variable("PYTHONSAFEPATH", "1"), variable(_THREADS, "false"):
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                worker = spawn.Process(target=_work, args=(theirs, name, write), daemon=True)
                worker.start()
                theirs.close()
                workers[ours] = worker
        while workers:
            ready: list[Any] = wait(list(workers))
            for connection in ready:
                try:
                    kind, *content = connection.recv()
                    begun.add(connection)
                    if kind in ("ready", "written"):
                        task = next(waiting, None)
                        connection.send(task)
                        if task is None:
                            workers.pop(connection).join()
                except (EOFError, OSError):
                    workers[connection].join()
                    if connection not in begun and workers[connection].exitcode == 1:
                        raise ConfigError(
                            "A worker failed while it imported the script that started it: call jaxllm.prepare under "
                            "`if __name__ == '__main__':` in a file, not from standard input, or set workers=1."
                        ) from None
                    raise ConfigError(
                        f"A worker was killed (exit code {workers[connection].exitcode}), perhaps because memory ran out: "
                        f"run the command again with fewer --workers to resume."
                    ) from None
                if kind == "read":
                    shows.advance(*content)
                elif kind == "written":
                    shows.advance(shards=1)
                elif kind == "refused":
                    raise ConfigError(content[0])
                elif kind == "failed":
                    raise RuntimeError(f"A worker failed:\n{content[0]}")
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join()


def _work(connection: Connection, name: str, write: Write) -> None:
    """Runs a worker: it reports that it is ready, and makes the shards that it receives. It ends when its parent exits."""

    def say(*message) -> None:
        try:
            connection.send(message)
        except OSError:
            # An OSError would look like a full disk.
            raise SystemExit from None

    try:
        tokenizer = load_tokenizer(name)
        say("ready")
        while (task := connection.recv()) is not None:
            write(task, tokenizer, lambda *counts: say("read", *counts))
            say("written")
    except ConfigError as error:
        say("refused", str(error))
    except Exception as error:
        if not isinstance(error, EOFError | ConnectionResetError):
            say("failed", traceback.format_exc())


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class PrepareProgress:
    """Counts what is done, and shows it."""

    def __init__(self, tasks: Sequence[Task], show: Callable[..., None]):
        self._total, self._shards, self._show = sum(task.size for task in tasks), len(tasks), show
        self._read = self._tokens = self._finished = 0
        self._started = time.monotonic()

    def advance(self, read: int = 0, tokens: int = 0, shards: int = 0) -> None:
        """Counts bytes of input that were read, tokens that were made of them, and shards that are finished."""
        self._read += read
        self._tokens += tokens
        self._finished += shards
        speed = self._tokens / max(time.monotonic() - self._started, 1e-9)
        note = f"{self._finished}/{self._shards} shards  {speed / 1e6:.2f}M tokens/s"
        self._show("prepare", self._read, self._total, note)
