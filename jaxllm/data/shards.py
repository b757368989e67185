"""Writes shards of a prepared folder, each four files that are complete or absent, the shard's .json last; and the processes
that do so for `jaxllm data prepare`.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.manifest import (
    DATA_ENDINGS,
    Origin,
    adding_to,
    as_shard,
    check_same_origin,
    check_sizes,
    index_sha256,
    read_stored,
    replace_json,
    sync,
    temporary_path,
)
from jaxllm.data.parts import DamagedFile, Part
from jaxllm.data.records import read_part, records_before
from jaxllm.data.stores import has_changed
from jaxllm.data.tokenizer import DOCUMENT_END, ByteTokenizer, Tokenizer, load_tokenizer, token_dtype
from jaxllm.machine.host import variable
from jaxllm.untrusted import reason_of

BROKEN_KEPT = 1000
"""Number of broken records whose details a shard stores. It counts all of them."""
_BATCH_TEXTS, _BATCH_CHARACTERS = 1000, 1 << 20
# One record per chunk, so that reading one record decompresses only it. Ids in two or four bytes compress well.
_WRITER_OPTIONS = "group_size:1,zstd:1,max_parallelism:1"


@dataclass(frozen=True)
class Task:
    """The input of one shard."""

    shard: int
    shards: int
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Prefix of the names of its files."""
        return f"tokens-{self.shard:05d}-of-{self.shards:05d}"

    @property
    def size(self) -> int:
        """Input size in bytes."""
        return sum(part.size for part in self.parts)


def write_shard(
    folder: Path, origin: Origin, strict: bool, task: Task, tokenizer: Tokenizer, report: Callable[[int, int], None]
) -> None:
    """Writes the shard of a task, unless another process finishes it first.

    Args:
      report: receives the bytes of input and the tokens since its last call.

    Raises:
      ConfigError: an input cannot be read, the folder cannot be written or holds shards of another origin, or (strict) a record
        is broken.
    """
    temporary = {ending: temporary_path(folder, task.name + ending) for ending in DATA_ENDINGS}
    try:
        shard = _write(temporary, task, origin, tokenizer, strict, report)
        with adding_to(folder, origin):
            if read_shard(folder, task.name) is not None:
                return
            final = folder / f"{task.name}.json"
            # The .json of a damaged shard must not vouch for files that are being replaced.
            final.unlink(missing_ok=True)
            for ending in DATA_ENDINGS:
                os.replace(temporary[ending], folder / (task.name + ending))
            replace_json(final, shard)
    except OSError as error:
        # A faster process may have removed these files as leftovers.
        check_same_origin(folder, origin)
        if read_shard(folder, task.name) is None:
            raise unwritable(folder, reason_of(error)) from None
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)


def read_shard(folder: Path, name: str) -> dict[str, Any] | None:
    """Reads a shard's .json. Returns None unless it and its files exist with their recorded sizes."""
    shard: Any = read_stored(folder / f"{name}.json")
    if as_shard(shard) is None or shard["name"] != name:
        return None
    try:
        check_sizes(folder, shard["files"])
    except ConfigError:
        return None
    return shard


def unwritable(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"{folder} cannot be written ({reason}): fix that and run the command again, or choose another --out.")


def described(broken: dict[str, Any]) -> str:
    """Position of a broken record and why it is broken: FILE:LINE: REASON, FILE row ROW: REASON, or FILE: REASON. The path is
    relative to the working directory if it is inside. Bytes of it that are not UTF-8 are printed as \\xff."""
    path, here = broken["file"], Path.cwd()
    name = str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
    shown = name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="backslashreplace")
    place = f" row {broken['row']}" if "row" in broken else f":{broken['line']}" if "line" in broken else ""
    return f"{shown}{place}: {broken['reason']}"


def strict_error(broken: dict[str, Any]) -> ConfigError:
    return ConfigError(f"{described(broken)}; fix it, or skip such records: without --strict or --max-broken-share 0.")


def _write(
    files: dict[str, Path], task: Task, origin: Origin, tokenizer: Tokenizer, strict: bool, report: Callable[[int, int], None]
) -> dict[str, Any]:
    text_key = origin.options.text_key
    output = _Output(files, token_dtype(tokenizer.vocab_size), origin.options.record_tokens)
    texts: list[str] = []
    characters = broken = empty = reported = before = 0
    kept: list[dict[str, Any]] = []

    def encode(read: int) -> None:
        nonlocal characters, reported
        tokens = sum(output.add(text, ids) for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True))
        report(read - reported, tokens)
        texts.clear()
        characters, reported = 0, read

    for part in task.parts:
        first = None
        for record in read_part(part, text_key, in_blocks=isinstance(tokenizer, ByteTokenizer)):
            if record.blocks:
                # The texts before it come first.
                encode(before)
                output.add_blocks(part, record.blocks(), report)
                encode(before + record.read)
            elif record.text:
                texts.append(record.text)
                characters += len(record.text)
                if len(texts) >= _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
                    encode(before + record.read)
            elif record.text is None:
                broken += 1
                if len(kept) < BROKEN_KEPT or record.lost:
                    where = {}
                    if record.number is not None:
                        first = records_before(part) if first is None else first
                        where["line" if part.file.kind == "lines" else "row"] = first + record.number
                    lost = {"lost_bytes": record.lost} if record.lost else {}
                    kept.append({"file": part.file.path, **where, "reason": record.reason, **lost})
                if strict:
                    raise strict_error(kept[0])
            else:
                empty += 1
        before += part.size
    encode(before)
    output.close()
    return {
        "name": task.name,
        "documents": len(output.lengths),
        "tokens": sum(output.lengths),
        "text_bytes": output.text_bytes,
        "records": output.records,
        "broken": broken,
        "empty": empty,
        "sha256": output.digest.hexdigest(),
        "index_sha256": index_sha256(*output.index),
        "files": {task.name + ending: files[ending].stat().st_size for ending in DATA_ENDINGS},
        "broken_records": kept,
        "options": asdict(origin.options),
        "inputs": asdict(origin.inputs),
    }


class _Output:
    """Writes the three data files of a shard, one document at a time."""

    def __init__(self, files: dict[str, Path], dtype: np.dtype, record_tokens: int):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._files, self._dtype, self._record_bytes = files, dtype, record_tokens * dtype.itemsize
        self._pending = bytearray()
        self.lengths, self._keys = array("I"), array("Q")
        self.text_bytes = self.records = 0
        self.digest = hashlib.sha256()
        """SHA-256 of all ids and, once closed, of all lengths."""
        self._writer = self._call(lambda: ArrayRecordWriter(str(files[".array_record"]), _WRITER_OPTIONS))

    def add(self, text: str, ids: np.ndarray) -> int:
        """Appends a document and returns its number of tokens."""
        utf8 = text.encode()
        self._append(ids.astype(self._dtype, copy=False).tobytes())
        self._end(len(ids), hashlib.blake2b(utf8), len(utf8))
        return len(ids)

    def add_blocks(self, part: Part, blocks: Iterator[bytes], report: Callable[[int, int], None]) -> None:
        """Appends a document of bytes, as the tokenizer of bytes encodes it, block by block."""
        size, key = 0, hashlib.blake2b()
        try:
            for block in blocks:
                self._append(block)
                key.update(block)
                size += len(block)
                report(0, len(block))
        except (DamagedFile, OSError):
            raise has_changed(part.file) from None
        self._append(DOCUMENT_END)
        self._end(size + len(DOCUMENT_END), key, size)

    def _append(self, content: bytes) -> None:
        self._pending += content
        while len(self._pending) >= self._record_bytes:
            self._write_record()
        self.digest.update(content)

    def _end(self, tokens: int, key: hashlib.blake2b, text_bytes: int) -> None:
        self.lengths.append(tokens)
        self._keys.append(int.from_bytes(key.digest()[:8], "little"))
        self.text_bytes += text_bytes

    def close(self) -> None:
        """Closes the three files. They are on the disk when this returns."""
        if self._pending:
            self._write_record()
        self._call(self._writer.close)
        with open(self._files[".array_record"], "rb") as file:
            os.fsync(file.fileno())
        self.index = lengths, keys = np.array(self.lengths, "<u4"), np.array(self._keys, "<u8")
        self.digest.update(lengths.tobytes())
        for ending, numbers in ((".lengths.npy", lengths), (".keys.npy", keys)):
            with open(self._files[ending], "wb") as file:
                np.save(file, numbers)
                sync(file)

    def _write_record(self) -> None:
        record = bytes(self._pending[: self._record_bytes])
        self._call(lambda: self._writer.write(record))
        del self._pending[: self._record_bytes]
        self.records += 1

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except RuntimeError as error:
            reason = str(error).split(";")[0].removeprefix("write() failed: ").removeprefix("open() failed: ")
            raise unwritable(self._files[".array_record"].parent, reason) from None


# ------------------------------------------------------------------------------------------------- processes and progress

_THREADS = "TOKENIZERS_PARALLELISM"


Write = Callable[[Task, Tokenizer, Callable[[int, int], None]], None]
"""write_shard, given all but these."""


def run_tasks(name: str, tokenizer: Tokenizer, write: Write, tasks: Sequence[Task], count: int, shows: PrepareProgress) -> None:
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
