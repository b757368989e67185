"""Inputs of `jaxllm data prepare`: the files, their division into shards, and the check for shards of other inputs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.data.manifest import is_shard, read_stored
from jaxllm.data.records import InputFile, Part, is_parquet, is_splittable, row_groups, unreadable
from jaxllm.data.shards import Origin, Task
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.file_patterns import Listing


def find_inputs(patterns: Sequence[str], out: Path) -> list[InputFile]:
    """Finds the files that match, each once, sorted by absolute path. Files inside `out` are left out.

    Raises:
      ConfigError: nothing matches a pattern, or it is a folder.
    """
    inside = os.path.abspath(out) + os.sep
    paths = set()
    for pattern in patterns:
        # The name of a file may contain wildcard characters.
        matches = [pattern] if os.path.exists(pattern) else Listing().files(pattern)
        if os.path.isdir(pattern):
            raise ConfigError(f"{pattern} is a folder: name the files in it, such as '{pattern.rstrip('/')}/**/*.jsonl'.")
        found = {os.path.abspath(match) for match in matches if os.path.isfile(match)}
        found = {path for path in found if not path.startswith(inside)}
        if not found:
            raise ConfigError(f"No file matches {pattern!r}: check the path (it is relative to {Path.cwd()}).")
        paths |= found
    if not paths:
        raise ConfigError("No inputs are given: name files or patterns such as 'books/**/*.txt'.")
    return [_input_file(path) for path in sorted(paths)]


def _input_file(path: str) -> InputFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return InputFile(path, found.st_size, found.st_mtime_ns)


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


def origin_of(files: Sequence[InputFile], tokenizer: Tokenizer, text_key: str, shard_bytes: int, record_tokens: int) -> Origin:
    listed = json.dumps([(file.path, file.size, file.modified_ns) for file in files])
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
    )


def check_same_origin(folder: Path, origin: Origin) -> None:
    """Raises ConfigError if the folder holds shards of another origin."""
    for file in sorted(folder.glob("tokens-*-of-*.json")):
        there: Any = read_stored(file)
        # A shard without a recorded origin is made again, like one without its .json.
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
        # Checked after the inputs, because the default shard size depends on them.
        for key, flag in (("text_key", "--text-key"), ("shard_bytes", "--shard-megabytes"), ("record_tokens", "record_tokens")):
            if theirs[key] != ours[key]:
                values = [f"{v / 2**20:g}" if key == "shard_bytes" else v for v in (theirs[key], ours[key])]
                raise ConfigError(
                    f"{folder} holds shards made with {flag} {values[0]}, not {values[1]}: "
                    f"choose another --out, or use {flag} {values[0]} again."
                )


def _size(inputs: dict[str, Any]) -> str:
    return f"{inputs['bytes']:,} bytes in {inputs['count']:,} file{'s' if inputs['count'] != 1 else ''}"
