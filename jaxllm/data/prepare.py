"""`jaxllm data prepare`: tokenises text files into a prepared folder. jaxllm/data/disk_documents.py describes its format.

The division into shards depends only on the names and sizes of the inputs. Any number of processes, on any number of
machines, therefore make the same folder, and a stopped run resumes where it was.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.config.file_patterns import Listing
from jaxllm.config.hub import pin
from jaxllm.data.disk_documents import RECORD_TOKENS
from jaxllm.data.manifest import (
    FOR_MANIFEST,
    FORMAT,
    INPUTS,
    MANIFEST,
    TOKENIZER,
    VERSION,
    Origin,
    OriginInputs,
    OriginOptions,
    OriginTokenizer,
    check_same_origin,
    placing,
    read_stored,
    remove_leftovers,
    replace_json,
    writing,
)
from jaxllm.data.parts import InputFile, Part, is_splittable, kind_of
from jaxllm.data.records import BROKEN_SHARE, inspected, require_ends, require_few_broken, require_share
from jaxllm.data.shards import PrepareProgress, Task, described, read_shard, run_tasks, strict_error, unwritable, write_shard
from jaxllm.data.stores import find_in_store, is_address
from jaxllm.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, load_tokenizer, token_dtype
from jaxllm.machine.host import available_cpus
from jaxllm.terminal import progress_shown
from jaxllm.untrusted import INT32, MIB, RefusedInput, shown, whole_number

# ----------------------------------------------------------------------------------------------------------------- inputs
# Inputs of `jaxllm data prepare`: the files, and their division into shards.

_QUESTIONS = 16
"""Files of a store that are looked into at once."""


def find_inputs(patterns: Sequence[str], out: Path) -> list[InputFile]:
    """Finds the files that match, each once, sorted by absolute path or address. Files inside `out` are left out.

    Raises ConfigError if nothing matches a pattern, it is a folder, a store does not answer, or two addresses have one name.
    """
    inside = os.path.abspath(out) + os.sep
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        if is_address(pattern):
            for file in find_in_store(pattern):
                if files.setdefault(file.path, file).address != file.address:
                    raise ConfigError(
                        f"Two of the inputs are called {file.path}, because a query or a revision is no part of a name: "
                        f"download one, and give the copy."
                    )
            continue
        # The name of a file may contain wildcard characters.
        matches = [pattern] if os.path.exists(pattern) else Listing().files(pattern)
        if os.path.isdir(pattern):
            raise ConfigError(f"{pattern} is a folder: name the files in it, such as '{pattern.rstrip('/')}/**/*.jsonl'.")
        found = {os.path.abspath(match) for match in matches if os.path.isfile(match)}
        found = {path for path in found if not path.startswith(inside)}
        if not found:
            raise ConfigError(f"No file matches {pattern!r}: check the path (it is relative to {Path.cwd()}).")
        for path in found:
            there = os.stat(path)
            files[path] = InputFile(path, there.st_size, there.st_mtime_ns, kind_of(path))
    if not files:
        raise ConfigError("No inputs are given: name files or patterns such as 'books/**/*.txt'.")
    return [files[path] for path in sorted(files)]


def cut(files: Sequence[InputFile], text_key: str, shard_bytes: int) -> list[Task]:
    """Divides the files, in order, into tasks: shards with about shard_bytes of input each."""
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

    # Questions to a store, which take their time to answer, are asked many at once.
    with ThreadPoolExecutor(_QUESTIONS if any(file.address for file in files) else 1) as pool:
        looked = list(pool.map(lambda file: inspected(file, text_key), files))
    for file, sizes in looked:
        if file.kind == "parquet":
            for group, size in enumerate(sizes):
                take(Part(file, group, group + 1, size))
        elif is_splittable(file):
            start = 0
            while start < file.size:
                stop = min(file.size, start + room)
                take(Part(file, start, stop, stop - start))
                start = stop
        else:
            take(Part(file, 0, file.size, file.size))
    shares = [share for share in shares if share]
    return [Task(i, len(shares), tuple(share)) for i, share in enumerate(shares)]


def origin_of(files: Sequence[InputFile], tokenizer: Tokenizer, text_key: str, shard_bytes: int, record_tokens: int) -> Origin:
    listed = json.dumps([(file.path, file.size, file.version if file.address else file.modified_ns) for file in files])
    return Origin(
        OriginOptions(OriginTokenizer(tokenizer.name, tokenizer.sha256), text_key, shard_bytes, record_tokens),
        OriginInputs(len(files), sum(file.size for file in files), hashlib.sha256(listed.encode()).hexdigest()),
        stored=tuple(map(_listed, files)) if any(file.address for file in files) else (),
    )


def _listed(file: InputFile) -> dict[str, Any]:
    # An address of the Hub has the commit in it; others may have a signature.
    name = file.address if file.address.startswith("hf://") else file.path
    return {"file": name, "bytes": file.size, **({"version": file.version} if file.version else {})}


# ---------------------------------------------------------------------------------------------------------------- prepare

MIN_SHARD_MIB, MAX_SHARD_MIB, USUAL_SHARDS = 4, 256, 64
"""The input is cut into 64 shards, unless they would be outside these sizes. 64 is enough for as many processes."""
BROKEN_SHOWN = 10
MOST_WORKERS = 4096
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
    max_broken_share: float = BROKEN_SHARE,
    progress: bool = True,
) -> Summary:
    """Tokenises files into a folder that PreparedDocuments reads. Resumes a stopped run.

    With several workers the calling script needs Python's usual `if __name__ == "__main__"`.

    Args:
      inputs, out, tokenizer, text_key, workers, max_broken_share: as `jaxllm data prepare --help` says. Documents are ordered
        by the files' sorted paths. With one worker this process does the work.
      shard: (i, n): make every n-th shard starting at the i-th, so that n calls with one `out` share the work.
      shard_bytes: approximate input bytes per shard. Files of JSON lines and Parquet are cut at shard boundaries.
        Default: a 64th of the input, but 4 to 256 MiB.
      record_tokens: ids per stored record.

    Raises:
      ConfigError: the inputs, the tokenizer or the folder are invalid; the message says what to change. Finished shards stay.
      KeyboardInterrupt: the message says how many shards are prepared.
    """
    started = time.monotonic()
    folder, part, parts = Path(out), *shard
    if not 0 <= part < parts:
        n = max(parts, 1)
        raise ConfigError(f"--shard {part}/{parts} is not a part of the work: use 0/{n} to {n - 1}/{n}.")
    _check_numbers(workers, shard_bytes, record_tokens)
    require_share(max_broken_share, "--max-broken-share")
    # The workers load it too, at the same commit.
    tokenizer = pin("--tokenizer", tokenizer)
    loaded = load_tokenizer(tokenizer)
    files = find_inputs(inputs, folder)
    total_mib = sum(file.size for file in files) >> 20
    shard_bytes = shard_bytes or min(max(total_mib // USUAL_SHARDS, MIN_SHARD_MIB), MAX_SHARD_MIB) << 20
    tasks = cut(files, text_key, shard_bytes)
    origin = origin_of(files, loaded, text_key, shard_bytes, record_tokens)
    with writing(partial(unwritable, folder)):
        folder.mkdir(parents=True, exist_ok=True)
        check_same_origin(folder, origin)
        remove_leftovers(folder)

    mine = [task for task in tasks if task.shard % parts == part]
    strict = max_broken_share == 0
    todo = _not_done(folder, mine, strict)
    if todo:
        write = partial(write_shard, folder, origin, strict)
        try:
            with progress_shown(progress) as show:
                count = min(workers or available_cpus(), len(todo))
                run_tasks(tokenizer, loaded, write, todo, count, PrepareProgress(todo, show))
        except KeyboardInterrupt:
            there = len(_shards_there(folder, tasks))
            raise KeyboardInterrupt(
                f"stopped; {there} of {len(tasks)} shards are prepared: run the same command again to resume."
            ) from None
        finally:
            remove_leftovers(folder)

    shards = list(_shards_there(folder, tasks).values())
    # Another command may have made shards with these names meanwhile.
    check_same_origin(folder, origin)
    if len(shards) == len(tasks):
        _finish(folder, shards, loaded, origin, max_broken_share)
    return _summary(out, shards, len(tasks), len(todo), time.monotonic() - started)


def existing(folder: Path, names: Sequence[str]) -> Summary:
    """The counts of a complete folder with shards of these names."""
    return _summary(folder, [shard for name in names if (shard := read_shard(folder, name))], len(names), 0, 0.0)


def _total(shards: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(shard[key] for shard in shards) for key in _COUNTS}


def _summary(out: str | Path, shards: Sequence[dict[str, Any]], count: int, written: int, seconds: float) -> Summary:
    broken = [record for shard in shards for record in shard["broken_records"][:BROKEN_SHOWN]][:BROKEN_SHOWN]
    return Summary(
        folder=str(out),
        **_total(shards),
        broken_records=tuple(map(described, broken)),
        shards=count,
        shards_done=len(shards),
        shards_written=written,
        complete=len(shards) == count,
        seconds=seconds,
    )


def _check_numbers(workers: int | None, shard_bytes: int | None, record_tokens: int) -> None:
    for name, number, unit, at_most in (
        ("--workers", workers, 1, MOST_WORKERS),
        ("--shard-megabytes", shard_bytes, MIB, INT32 * MIB),
        ("record_tokens", record_tokens, 1, INT32),
    ):
        if number is not None and not 1 <= number <= at_most:
            limit = "at least 1" if number < 1 else f"at most {at_most // unit:,}"
            raise ConfigError(f"{name}={shown(number // unit)} is not valid: it should be {limit}.")


def _shards_there(folder: Path, tasks: Sequence[Task]) -> dict[int, dict[str, Any]]:
    """The metadata of existing shards, by shard number."""
    return {task.shard: found for task in tasks if (found := read_shard(folder, task.name))}


def _not_done(folder: Path, mine: Sequence[Task], strict: bool) -> list[Task]:
    """The tasks whose shards do not exist. Raises ConfigError if `strict` and an existing shard has a broken record."""
    done = _shards_there(folder, mine)
    for found in done.values() if strict else ():
        if found["broken"]:
            raise strict_error(found["broken_records"][0])
    return [task for task in mine if task.shard not in done]


def parse_shard(text: str) -> tuple[int, int]:
    """Parses "i/n" into (i, n). Raises ConfigError if the text has another form, or i is not in 0..n-1."""
    part, _, parts = text.partition("/")
    try:
        count = whole_number(parts, at_least=1)
        return whole_number(part, at_most=count - 1), count
    except RefusedInput:
        raise ConfigError(
            f"--shard {shown(text)} is not i/n with 0 <= i < n: use 0/4 to 3/4 to share the work among four."
        ) from None


def _finish(folder: Path, shards: list[dict[str, Any]], tokenizer: Tokenizer, origin: Origin, max_broken_share: float) -> None:
    """Writes the tokenizer and the manifest unless they exist. Several processes may do this at once."""
    total = _total(shards)
    first = next((described(one) for shard in shards for one in shard["broken_records"]), "")
    if not total["documents"]:
        hint = f", the first {first}" if first else ""
        # Empty shards would make the next run with correct options fail.
        for file in (file for shard in shards for file in (f"{shard['name']}.json", *shard["files"])):
            (folder / file).unlink(missing_ok=True)
        raise ConfigError(
            f"The inputs hold no text ({total['broken']:,} broken and {total['empty']:,} empty records{hint}): check them and "
            f"--text-key."
        )
    records = total["documents"] + total["broken"] + total["empty"]
    cut = [one for shard in shards for one in shard["broken_records"] if one.get("lost_bytes")]
    if cut:
        lost = sum(one["lost_bytes"] for one in cut)
        require_ends("the inputs", lost, origin.inputs.bytes, described(cut[0]), max_broken_share, "--max-broken-share")
    require_few_broken("the inputs", total["broken"], records, first, max_broken_share, "--max-broken-share")
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
        "record_tokens": origin.options.record_tokens,
        **total,
        "inputs": {"count": origin.inputs.count, "bytes": origin.inputs.bytes},
        "options": {"text_key": origin.options.text_key, "shard_bytes": origin.options.shard_bytes},
        "shards": [{key: shard[key] for key in FOR_MANIFEST if key in shard} for shard in shards],
    }
    with writing(partial(unwritable, folder)):
        remove_leftovers(folder, of_other_hosts=True)
        _save_tokenizer(folder, tokenizer)
        if origin.stored and read_stored(folder / INPUTS) != (listed := {"files": list(origin.stored)}):
            replace_json(folder / INPUTS, listed)
        if read_stored(folder / MANIFEST) != manifest:
            replace_json(folder / MANIFEST, manifest)


def _save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    def is_there() -> bool:
        with suppress(ConfigError):
            return load_tokenizer(folder.absolute() / TOKENIZER).sha256 == tokenizer.sha256
        return False

    if isinstance(tokenizer, ByteTokenizer) or is_there():
        return
    try:
        with placing(folder, TOKENIZER) as aside:
            tokenizer.save(aside)
    except OSError:
        # Another process of the same work may have been faster.
        if not is_there():
            raise
