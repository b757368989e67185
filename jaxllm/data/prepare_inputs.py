"""Inputs of `jaxllm data prepare`: the files, and their division into shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.config.errors import ConfigError
from jaxllm.data.origin import Origin
from jaxllm.data.parts import InputFile, Part, is_splittable, kind_of
from jaxllm.data.records import require_column, with_kind
from jaxllm.data.rows import row_groups
from jaxllm.data.shards import Task
from jaxllm.data.stores import find_in_store, is_address, unreadable
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.file_patterns import Listing

T = TypeVar("T")
_QUESTIONS = 16
"""Files of a store that are looked into at once."""


def find_inputs(patterns: Sequence[str], out: Path) -> list[InputFile]:
    """Finds the files that match, each once, sorted by absolute path or address. Files inside `out` are left out.

    Raises:
      ConfigError: nothing matches a pattern, it is a folder, a store does not answer, or two addresses have one name.
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
        files |= {path: _input_file(path) for path in found}
    if not files:
        raise ConfigError("No inputs are given: name files or patterns such as 'books/**/*.txt'.")
    return _each(with_kind, [files[path] for path in sorted(files)])


def _each(function: Callable[[InputFile], T], files: Sequence[InputFile]) -> list[T]:
    """The results in order. Questions to a store, which take their time to answer, are asked many at once."""
    if not any(file.address for file in files):
        return [function(file) for file in files]
    with ThreadPoolExecutor(_QUESTIONS) as pool:
        return list(pool.map(function, files))


def _input_file(path: str) -> InputFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return InputFile(path, found.st_size, found.st_mtime_ns, kind_of(path))


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

    _each(lambda file: require_column(file, text_key), files)
    groups = _each(lambda file: row_groups(file, text_key) if file.kind == "parquet" else [], files)
    for file, sizes in zip(files, groups, strict=True):
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
        options={
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "text_key": text_key,
            "shard_bytes": shard_bytes,
            "record_tokens": record_tokens,
        },
        inputs={
            "count": len(files),
            "bytes": sum(file.size for file in files),
            "sha256": hashlib.sha256(listed.encode()).hexdigest(),
        },
        stored=tuple(map(_listed, files)) if any(file.address for file in files) else (),
    )


def _listed(file: InputFile) -> dict[str, Any]:
    # An address of the Hub has the commit in it; others may have a signature.
    name = file.address if file.address.startswith("hf://") else file.path
    return {"file": name, "bytes": file.size, **({"version": file.version} if file.version else {})}
