"""What the shards of one prepared folder were made from. The first shard that is finished decides; others are refused."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.data.manifest import is_shard, read_stored


@dataclass(frozen=True)
class Origin:
    """Properties that all shards of one folder share, as recorded in their .json."""

    options: dict[str, Any]
    """tokenizer {name, sha256}, text_key, shard_bytes, record_tokens."""
    inputs: dict[str, Any]
    """count, bytes, and sha256 of names, sizes and dates, or versions."""
    stored: tuple[dict[str, Any], ...] = ()
    """What INPUTS keeps: path or address, bytes and version of each input, if any came from a store."""


def check_same_origin(folder: Path, origin: Origin, first_alone: bool = False) -> None:
    """Raises ConfigError if the folder holds shards of another origin. With `first_alone` it looks at one of them."""
    for file in folder.glob("tokens-*-of-*.json") if first_alone else sorted(folder.glob("tokens-*-of-*.json")):
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
        if first_alone:
            return


@contextmanager
def adding_to(folder: Path, origin: Origin) -> Iterator[None]:
    """A shard of this origin is added to the folder inside, where no other process adds one.

    Raises:
      ConfigError: the folder holds shards of another origin, as of another command that began at the same time.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            # A disk without locks leaves a moment between the look and the addition.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        check_same_origin(folder, origin, first_alone=True)
        yield
    finally:
        os.close(descriptor)


def _size(inputs: dict[str, Any]) -> str:
    return f"{inputs['bytes']:,} bytes in {inputs['count']:,} file{'s' if inputs['count'] != 1 else ''}"
