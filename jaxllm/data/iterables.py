"""jaxllm.prepare: writes the texts of a Python iterable into a prepared folder, once.

Training on the folder is then exact and resumes, which no iterable promises: each sample is a function of its number.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from glob import iglob
from operator import length_hint
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError
from jaxllm.data.manifest import read_manifest, writing
from jaxllm.data.parts import check_text
from jaxllm.data.prepare import BROKEN_SHOWN, Summary, existing
from jaxllm.data.prepare import prepare as prepare_files
from jaxllm.data.records import BROKEN_SHARE, require_few_broken, require_share
from jaxllm.data.shards import unwritable
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.untrusted import shown

_FILE = re.compile(r"\S{1,1000}\.(txt|json|jsonl|ndjson|csv|parquet|arrow|gz|zst)")


def prepare(
    texts: Iterable[str | Mapping[str, Any]],
    folder: str | Path,
    *,
    tokenizer: str,
    text_key: str = "text",
    reuse: bool = False,
    workers: int | None = None,
    max_broken_share: float = BROKEN_SHARE,
    progress: bool = True,
) -> Summary:
    """Writes a prepared folder, as `jaxllm data prepare` does from JSON lines of the same texts. It is complete or absent.

    The texts are first written to the disk of the folder, and removed at the end. With several workers the calling script
    needs Python's usual `if __name__ == "__main__"`.

    Args:
      texts: each a document; strings, or rows as of Hugging Face's `datasets` and of Grain, read once and in order. A row
        whose text is None is counted as broken.
      folder: the folder to write, for data.source=prepared and data.paths.
      tokenizer: a folder with tokenizer.json, ORG/NAME or ORG/NAME@REVISION of the Hub, or bytes.
      text_key: the column of rows that holds the text.
      reuse: if the folder is there, return what it holds and leave `texts` unread. It is not compared with them.
      workers: number of processes; default: one per available CPU.
      max_broken_share: refuse texts of which a larger share is None, as `jaxllm data prepare` does.
      progress: show the progress.

    Raises:
      ConfigError: the folder exists (without `reuse`) or has another tokenizer, cannot be written, or `texts` holds something
        else or has no end.
    """
    require_share(max_broken_share, "max_broken_share")
    if isinstance(texts, str | Path):
        raise ConfigError(f"texts is a text itself: give a list of texts, or `jaxllm data prepare {shown(str(texts), 100)}`.")
    folder = Path(folder)
    if os.path.lexists(folder):
        return _again(folder, tokenizer, reuse)
    if length_hint(texts) >= sys.maxsize:
        # Grain's word for a dataset that repeats.
        raise ConfigError("texts has no end: give them once, and let train.steps say how often they are read.")
    # Only around what is ours: reading `texts` may raise OSError too.
    with writing(partial(unwritable, folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another call may be making the same folder: in a thread of this process, or in a container with its number.
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        broken, first, count = 0, [], 0
        with open(work / "texts.jsonl", "w", encoding="utf-8") as file:
            for count, row in enumerate(texts, 1):
                text, reason = check_text(_text(row, text_key, count - 1), text_key)
                if text is None:
                    broken += 1
                    first += [f"row {count - 1} of texts: {reason}"] if broken <= BROKEN_SHOWN else []
                file.write(json.dumps({text_key: text}) + "\n")
        if broken == count:
            raise ConfigError(f"texts holds no text ({first[0] if first else 'it is empty'}): check it and text_key.")
        if broken:
            require_few_broken("texts", broken, count, first[0], max_broken_share, "max_broken_share")
        summary = prepare_files(
            [str(work / "texts.jsonl")],
            work / "prepared",
            tokenizer=tokenizer,
            text_key=text_key,
            workers=workers,
            max_broken_share=1,
            progress=progress,
        )
        with writing(partial(unwritable, folder)):
            try:
                os.rename(work / "prepared", folder)
            except OSError:
                if not os.path.lexists(folder):
                    raise
                # Another call was faster.
                return _again(folder, tokenizer, reuse)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return replace(summary, folder=str(folder), broken_records=tuple(first))


def _text(text: Any, text_key: str, number: int) -> str | None:
    if isinstance(text, Mapping):
        if text_key not in text:
            raise ConfigError(
                f"Row {number} of texts has no {text_key}: set text_key to one of {shown(', '.join(map(str, text)), 400)}."
            )
        text = text[text_key]
        if text is None:
            return None
    if not number and isinstance(text, str) and _FILE.fullmatch(text) and any(iglob(text)):
        raise ConfigError(f"Row 0 of texts names a file ({shown(text)}): give its text, or use `jaxllm data prepare`.")
    if not isinstance(text, str):
        raise ConfigError(f"Row {number} of texts is {type(text).__name__}, not a string: give texts, or rows with text_key.")
    return text


def _again(folder: Path, tokenizer: str, reuse: bool) -> Summary:
    if not reuse:
        raise ConfigError(f"{folder} exists: pass reuse=True to train on what it holds, name another folder, or delete it.")
    manifest = read_manifest(folder)
    if manifest.tokenizer.sha256 != load_tokenizer(tokenizer).sha256:
        raise ConfigError(f"{folder} holds tokens of {manifest.tokenizer.name}, not of {tokenizer}: name another folder.")
    return existing(folder, [shard.name for shard in manifest.shards])
