"""`jaxllm data prepare`: tokenises text files into a prepared folder. jaxllm/data/prepared.py describes its format.

The division into shards depends only on the names and sizes of the inputs. Any number of processes, on any number of
machines, therefore make the same folder, and a stopped run resumes where it was.
"""

from __future__ import annotations

import glob
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jaxllm.config_errors import ConfigError
from jaxllm.data.prepared import FORMAT, MANIFEST, RECORD_TOKENS, TOKENIZER, VERSION
from jaxllm.data.records import InputFile, Part, is_parquet, is_splittable, row_groups
from jaxllm.data.shards import (
    Origin,
    Task,
    for_manifest,
    is_shard,
    position_of,
    read_json,
    read_shard,
    remove_leftovers,
    remove_shard,
    replace_json,
    strict_error,
    temporary_path,
    unwritable,
    write_shard,
)
from jaxllm.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, load_tokenizer, token_dtype
from jaxllm.plan.hardware import available_cpus

MIN_SHARD_MIB, MAX_SHARD_MIB, USUAL_SHARDS = 4, 256, 64
"""The input is cut into 64 shards, unless they would be outside these sizes. 64 is enough for as many processes."""
BROKEN_SHOWN = 10
_SECONDS_BETWEEN_LINES = 10.0
_COUNTS = ("documents", "tokens", "text_bytes", "broken", "empty")


@dataclass(frozen=True)
class Summary:
    """Counts of a prepared folder, over its finished shards."""

    folder: str
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents, without BOS and EOS tokens."""
    broken: int
    """Records that could not be read."""
    empty: int
    """Records with empty text. They give no document."""
    broken_records: tuple[str, ...]
    """The first broken records, as FILE:LINE: reason."""
    shards: int
    """Number of shards of the complete folder."""
    shards_done: int
    shards_written: int
    """Number of shards that this call wrote."""
    complete: bool
    """True if all shards and the manifest are written."""
    seconds: float

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / max(self.text_bytes, 1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_byte": self.tokens_per_byte}

    def lines(self) -> list[str]:
        """Text lines for the terminal."""
        lines = [f"broken: {record}" for record in self.broken_records]
        if self.broken > len(self.broken_records):
            lines.append(f"broken: {self.broken - len(self.broken_records):,} more; the shards' .json files name them")
        if not self.shards_written and self.complete:
            lines.append(f"all {self.shards} shards were prepared already; nothing was changed")
        lines.append(
            f"{self.documents:,} documents, {self.tokens:,} tokens of {self.text_bytes:,} bytes "
            f"({self.tokens_per_byte:.3f} tokens per byte), {self.broken:,} broken and {self.empty:,} empty records skipped, "
            f"{self.seconds:.1f} s, in {self.folder}"
        )
        if not self.complete:
            missing = f"{self.shards_done} of {self.shards} shards are prepared; the other --shard parts make the rest"
            return [*lines, missing]
        paths = json.dumps([self.folder], ensure_ascii=False)
        return [*lines, "to train on it:", "data:", "  source: prepared", f"  paths: {paths}"]


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str,
    text_key: str = "text",
    workers: int | None = None,
    shard: tuple[int, int] = (0, 1),
    shard_bytes: int | None = None,
    record_tokens: int = RECORD_TOKENS,
    strict: bool = False,
    progress: bool = True,
) -> Summary:
    """Tokenises files into a folder that PreparedDocuments reads. Resumes a stopped run.

    With several workers the calling script needs Python's usual `if __name__ == "__main__"`.

    Args:
      inputs: files or glob patterns (** for folders). .jsonl, .json and .ndjson hold one object per line, .parquet holds
        rows, any other file is one document. .gz and .zst are decompressed. Documents are ordered by the files' sorted paths.
      out: the output folder.
      tokenizer: a folder with tokenizer.json, or bytes.
      text_key: the field or column that holds the text.
      workers: number of processes; default: one per available CPU. With 1 this process does the work.
      shard: (i, n): make every n-th shard starting at the i-th, so that n calls with one `out` share the work.
      shard_bytes: approximate input bytes per shard. Files of JSON lines and Parquet are cut at shard boundaries.
        Default: a 64th of the input, but 4 to 256 MiB.
      record_tokens: ids per stored record.
      strict: stop at the first broken record.
      progress: show the progress.

    Raises:
      ConfigError: the inputs, the tokenizer or the folder are invalid; the message says what to change. Finished shards stay.
      KeyboardInterrupt: the message says how many shards are prepared.
    """
    started = time.monotonic()
    part, parts = shard
    if not 0 <= part < parts:
        raise ConfigError(f"--shard {part}/{parts} does not exist: use 0/{max(parts, 1)} to {_last(parts)}.")
    at_least_1 = (("--workers", workers, 1), ("--shard-megabytes", shard_bytes, 2**20), ("record_tokens", record_tokens, 1))
    for name, number, unit in at_least_1:
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number // unit} is not valid: it should be at least 1.")
    folder = Path(out)
    loaded = load_tokenizer(tokenizer)
    files = find_inputs(inputs, folder)
    if shard_bytes is None:
        total_mib = sum(file.size for file in files) >> 20
        shard_bytes = min(max(total_mib // USUAL_SHARDS, MIN_SHARD_MIB), MAX_SHARD_MIB) << 20
    tasks = cut(files, text_key, shard_bytes)
    origin = _origin(files, loaded, text_key, shard_bytes, record_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_same_origin(folder, origin)
        remove_leftovers(folder)
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from None

    done = {task.shard: found for task in tasks if (found := read_shard(folder, task.name))}
    mine = [task for task in tasks if task.shard % parts == part]
    todo = [task for task in mine if task.shard not in done]
    if strict:
        for task in mine:
            if task.shard in done and done[task.shard]["broken"]:
                raise strict_error(done[task.shard]["broken_records"][0])
    if todo:
        job = _Job(folder, tokenizer, origin, strict)
        try:
            with _Progress(todo, progress) as shows:
                _run(job, loaded, todo, min(workers or available_cpus(), len(todo)), shows)
        except KeyboardInterrupt:
            there = sum(read_shard(folder, task.name) is not None for task in tasks)
            raise KeyboardInterrupt(
                f"stopped; {there} of {len(tasks)} shards are prepared: run the same command again to resume."
            ) from None
        finally:
            remove_leftovers(folder)

    shards = {task.shard: found for task in tasks if (found := read_shard(folder, task.name))}
    complete = len(shards) == len(tasks)
    if complete:
        _check_same_origin(folder, origin)
        _finish(folder, [shards[i] for i in range(len(tasks))], loaded, origin)
    broken = [record for i in sorted(shards) for record in shards[i]["broken_records"][:BROKEN_SHOWN]][:BROKEN_SHOWN]
    total = {key: sum(found[key] for found in shards.values()) for key in _COUNTS}
    return Summary(
        folder=str(out),
        **total,
        broken_records=tuple(f"{position_of(record)}: {record['reason']}" for record in broken),
        shards=len(tasks),
        shards_done=len(shards),
        shards_written=len(todo),
        complete=complete,
        seconds=time.monotonic() - started,
    )


def parse_shard(text: str) -> tuple[int, int]:
    """Parses "i/n" into (i, n).

    Raises:
      ConfigError: the text has another form, or i is not in 0..n-1.
    """
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal()) or int(part) >= int(parts):
        raise ConfigError(f"--shard {text} is not i/n with 0 <= i < n: use 0/4 to 3/4 to share the work among four.")
    return int(part), int(parts)


# ---------------------------------------------------------------------------------------------------- what is to do


def find_inputs(patterns: Sequence[str], out: Path) -> list[InputFile]:
    """Finds the files that match, each once, sorted by absolute path. Files inside `out` are excluded.

    Raises:
      ConfigError: a pattern matches nothing, or is a folder.
    """
    inside = os.path.abspath(out) + os.sep
    paths = set()
    for pattern in patterns:
        # The name of an existing file may contain wildcard characters.
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if os.path.isdir(pattern):
            raise ConfigError(f"{pattern} is a folder: name the files in it, such as '{pattern.rstrip('/')}/**/*.jsonl'.")
        found = {os.path.abspath(match) for match in matches if os.path.isfile(match)}
        found = {path for path in found if not path.startswith(inside)}
        if not found:
            raise ConfigError(f"No file matches {pattern!r}: check the path (it is relative to {Path.cwd()}).")
        paths |= found
    if not paths:
        raise ConfigError("No inputs are given: name files or patterns such as 'books/**/*.txt'.")
    stats = [(path, os.stat(path)) for path in sorted(paths)]
    return [InputFile(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def cut(files: Sequence[InputFile], text_key: str, shard_bytes: int) -> list[Task]:
    """Cuts the files, in order, into shards of about shard_bytes of input each."""
    shares: list[list[Part]] = [[]]
    room = shard_bytes

    def take(part: Part) -> None:
        nonlocal room
        last = shares[-1][-1] if shares[-1] else None
        if last is not None and last.file == part.file:
            shares[-1][-1] = Part(part.file, last.start, part.stop, last.size + part.size)
        else:
            shares[-1].append(part)
        room -= part.size
        if room <= 0:
            shares.append([])
            room = shard_bytes

    for file in files:
        if is_parquet(file.path):
            for group, size in enumerate(row_groups(file.path, text_key)):
                take(Part(file, group, group + 1, size))
        elif is_splittable(file.path):
            start = 0
            while start < file.size:
                stop = min(file.size, start + room)
                take(Part(file, start, stop, stop - start))
                start = stop
        else:
            take(Part(file, 0, file.size, file.size))
    shares = [share for share in shares if share]
    return [Task(i, len(shares), tuple(share)) for i, share in enumerate(shares)]


def _origin(files: Sequence[InputFile], tokenizer: Tokenizer, text_key: str, shard_bytes: int, record_tokens: int) -> Origin:
    listing = json.dumps([(file.path, file.size, file.modified_ns) for file in files])
    return Origin(
        options={
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "text_key": text_key,
            "shard_bytes": shard_bytes,
            "record_tokens": record_tokens,
        },
        inputs={
            "count": len(files),
            "bytes": sum(file.size for file in files),
            "sha256": hashlib.sha256(listing.encode()).hexdigest(),
        },
    )


def _check_same_origin(folder: Path, origin: Origin) -> None:
    """Raises ConfigError if the folder holds shards of another origin."""
    for file in sorted(folder.glob("tokens-*-of-*.json")):
        there: Any = read_json(file)
        # A .json without its origin is made again, as a shard without a .json.
        if not is_shard(there):
            continue
        ours, theirs = origin.options, there["options"]
        if theirs["tokenizer"]["sha256"] != ours["tokenizer"]["sha256"]:
            names = theirs["tokenizer"]["name"], ours["tokenizer"]["name"]
            which = f"the tokenizer {names[0]}, not {names[1]}" if names[0] != names[1] else f"another tokenizer {names[0]}"
            raise ConfigError(f"{folder} holds shards made with {which}: choose another --out, or use that tokenizer again.")
        if there["inputs"] != origin.inputs:
            counts = [_size(inputs) for inputs in (there["inputs"], origin.inputs)]
            which = f"{counts[0]}, not {counts[1]}" if counts[0] != counts[1] else "their names or dates differ"
            raise ConfigError(
                f"{folder} holds shards of other inputs ({which}): choose another --out, or give the same inputs."
            )
        # Compared after the inputs, because the shard size depends on them.
        for key, flag in (("text_key", "--text-key"), ("shard_bytes", "--shard-megabytes"), ("record_tokens", "record_tokens")):
            if theirs[key] != ours[key]:
                values = [_megabytes(v) if key == "shard_bytes" else v for v in (theirs[key], ours[key])]
                raise ConfigError(
                    f"{folder} holds shards made with {flag} {values[0]}, not {values[1]}: "
                    f"choose another --out, or use {flag} {values[0]} again."
                )


def _size(inputs: dict[str, Any]) -> str:
    return f"{inputs['bytes']:,} bytes in {inputs['count']:,} file{'s' if inputs['count'] != 1 else ''}"


def _megabytes(count: int) -> str:
    return f"{count / 2**20:g}"


def _last(parts: int) -> str:
    return f"{max(parts, 1) - 1}/{max(parts, 1)}"


# -------------------------------------------------------------------------------------------------------- doing it


@dataclass(frozen=True)
class _Job:
    """Input of each worker process."""

    folder: Path
    tokenizer: str
    origin: Origin
    strict: bool


def _run(job: _Job, tokenizer: Tokenizer, tasks: Sequence[Task], count: int, shows: _Progress) -> None:
    """Runs the tasks in `count` processes. With one, this process does the work."""
    if count == 1:
        _run_here(job, tokenizer, tasks, shows)
    else:
        _run_workers(job, tasks, count, shows)


def _run_here(job: _Job, tokenizer: Tokenizer, tasks: Sequence[Task], shows: _Progress) -> None:
    with _one_thread_for_tokenizers():
        for task in tasks:
            write_shard(job.folder, task, job.origin, tokenizer, job.strict, shows.advance)
            shows.finished()


def _run_workers(job: _Job, tasks: Sequence[Task], count: int, shows: _Progress) -> None:
    """Gives each worker one task at a time. The first error stops all workers."""
    spawn = multiprocessing.get_context("spawn")
    waiting = iter(tasks)
    workers: dict[Any, Any] = {}
    """Connection -> process."""
    try:
        # The terminal sends Ctrl-C to the workers too. They ignore it, and this process stops them.
        with _interrupts_ignored():
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                worker = spawn.Process(target=_work, args=(theirs, job), daemon=True)
                worker.start()
                theirs.close()
                workers[ours] = worker
        while workers:
            ready: list[Any] = wait(list(workers))
            for connection in ready:
                try:
                    kind, *content = connection.recv()
                    if kind in ("ready", "written"):
                        task = next(waiting, None)
                        connection.send(task)
                        if task is None:
                            workers.pop(connection).join()
                except (EOFError, OSError):
                    workers[connection].join()
                    raise ConfigError(
                        f"A worker was killed (exit code {workers[connection].exitcode}), perhaps because memory ran out: "
                        f"run the command again with fewer --workers to resume."
                    ) from None
                if kind == "read":
                    shows.advance(*content)
                elif kind == "written":
                    shows.finished()
                elif kind == "refused":
                    raise ConfigError(content[0])
                elif kind == "failed":
                    raise RuntimeError(f"A worker failed:\n{content[0]}")
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join()


def _work(connection: Connection, job: _Job) -> None:
    """Worker loop: reports that it is ready and makes the shards it is given. Ends when its parent process is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def say(*message) -> None:
        try:
            connection.send(message)
        except OSError:
            # Not an OSError, because that would be reported as a full disk.
            raise _ParentGone from None

    try:
        try:
            tokenizer = load_tokenizer(job.tokenizer)
            say("ready")
            while (task := connection.recv()) is not None:
                write_shard(job.folder, task, job.origin, tokenizer, job.strict, lambda *counts: say("read", *counts))
                say("written")
        except ConfigError as error:
            say("refused", str(error))
        except Exception as error:
            if not isinstance(error, _ParentGone | EOFError | ConnectionResetError):
                say("failed", traceback.format_exc())
    except _ParentGone:
        pass


class _ParentGone(Exception):
    """The parent process is gone."""


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


@contextmanager
def _one_thread_for_tokenizers() -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _finish(folder: Path, shards: list[dict[str, Any]], tokenizer: Tokenizer, origin: Origin) -> None:
    """Writes the tokenizer and the manifest unless they exist. Several processes may do this at once."""
    documents = sum(shard["documents"] for shard in shards)
    if not documents:
        broken, empty = (sum(shard[key] for shard in shards) for key in ("broken", "empty"))
        first = next((record for shard in shards for record in shard["broken_records"]), None)
        hint = f", the first {position_of(first)}: {first['reason']}" if first else ""
        # Empty shards would make the next run with correct options fail.
        for shard in shards:
            remove_shard(folder, shard["name"])
        raise ConfigError(
            f"The inputs hold no text ({broken:,} broken and {empty:,} empty records{hint}): check them and --text-key."
        )
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "kind": BYTES if isinstance(tokenizer, ByteTokenizer) else "folder",
        },
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "record_tokens": origin.options["record_tokens"],
        **{key: sum(shard[key] for shard in shards) for key in _COUNTS},
        "inputs": {key: origin.inputs[key] for key in ("count", "bytes")},
        "options": {key: origin.options[key] for key in ("text_key", "shard_bytes")},
        "shards": [for_manifest(shard) for shard in shards],
    }
    try:
        remove_leftovers(folder, of_other_hosts=True)
        _save_tokenizer(folder, tokenizer)
        if read_json(folder / MANIFEST) != manifest:
            replace_json(folder / MANIFEST, manifest)
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from None


def _save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    final = folder / TOKENIZER
    if isinstance(tokenizer, ByteTokenizer):
        return
    if final.is_dir():
        try:
            if load_tokenizer(final).sha256 == tokenizer.sha256:
                return
        except ConfigError:
            pass
        shutil.rmtree(final)
    temporary = temporary_path(folder, TOKENIZER)
    tokenizer.save(temporary)
    try:
        os.rename(temporary, final)
    except OSError:
        # Another process was faster. It wrote the same files.
        if not final.is_dir():
            raise
        shutil.rmtree(temporary)


# --------------------------------------------------------------------------------------------------------- showing it


class _Progress:
    """Progress display: a bar over input bytes on a terminal, a line from time to time elsewhere, or nothing."""

    def __init__(self, tasks: Sequence[Task], visible: bool):
        self._total, self._shards = sum(task.size for task in tasks), len(tasks)
        self._visible, self._bar = visible, None
        self._read = self._tokens = self._finished = 0

    def __enter__(self) -> _Progress:
        self._started = self._last_line = time.monotonic()
        if self._visible:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(highlight=False, soft_wrap=True, markup=False)
            if console.is_terminal and not console.is_dumb_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True))
                self._bar = Progress(*columns, console=console, transient=True)
                self._task = self._bar.add_task("starting", total=self._total)
                self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, read: int, tokens: int) -> None:
        self._read += read
        self._tokens += tokens
        self._show()

    def finished(self) -> None:
        self._finished += 1
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        speed = self._tokens / max(now - self._started, 1e-9)
        text = f"{self._finished}/{self._shards} shards  {speed / 1e6:.2f}M tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._read, description=text)
        elif self._visible and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{100 * self._read / max(self._total, 1):.0f}%  {text}", flush=True)
