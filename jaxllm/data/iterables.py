"""Python iterables as data: jaxllm.prepare writes texts into a prepared folder, once; `given_documents` reads token ids into
memory. Training on either is exact and resumes, which no iterable promises: each sample is a function of its number.
"""

import hashlib
import json
import logging
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

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.documents import DocumentsInMemory
from jaxllm.data.manifest import read_manifest, writing
from jaxllm.data.parts import check_text
from jaxllm.data.prepare import BROKEN_SHOWN, Summary, existing
from jaxllm.data.prepare import prepare as prepare_files
from jaxllm.data.records import BROKEN_SHARE, require_few_broken, require_share
from jaxllm.data.shards import unwritable
from jaxllm.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from jaxllm.untrusted import shown

log = logging.getLogger(__name__)
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
    _require_end("texts", texts)
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


def _require_end(name: str, items: Iterable[Any]) -> None:
    if length_hint(items) >= sys.maxsize:
        # Grain's word for a dataset that repeats.
        raise ConfigError(f"{name} has no end: give them once, and let train.steps say how often they are read.")


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


# ------------------------------------------------------------------------------------------------------------- token ids

IDS, PADDING, LABELS = "input_ids", "attention_mask", "labels"
SCORED = "completion_mask", "assistant_masks"
"""TRL's columns: 1 where a token counts in the loss."""
KNOWN = IDS, PADDING, LABELS, *SCORED
NOT_SCORED = -100
"""The label of a token that does not count, as in PyTorch and transformers."""


def given_documents(items: Iterable[Any], tokenizer: Tokenizer | None, vocab_size: int) -> DocumentsInMemory:
    """Reads all documents once, in order.

    Args:
      items: of each document its ids [tokens], or a row with input_ids. Of a row's other columns, tokens whose attention_mask
        is 0 are left out, and those whose labels are -100 or whose completion_mask or assistant_masks is 0 are not scored.
        A warning counts what is left out, and names columns that have no effect.
      tokenizer: whose ids they are, if that is known.

    Raises:
      ConfigError: an item is something else or has an id outside the vocabulary, or there is none, or no end of them.
    """
    if isinstance(items, str | bytes | Mapping) or not (hasattr(items, "__iter__") or hasattr(items, "__getitem__")):
        raise ConfigError(f"documents= is {type(items).__name__}: give a list of documents, each a list of token ids.")
    _require_end("documents=", items)
    # PyTorch's map-style datasets have no __iter__, and may raise no IndexError at their end.
    numbered: Any = items
    rows = items if hasattr(items, "__iter__") else (numbered[number] for number in range(len(numbered)))
    ids, scored, padded, empty, unused = list[np.ndarray](), list[np.ndarray](), 0, 0, set[str]()
    for number, item in enumerate(rows):
        row = item if isinstance(item, Mapping) else {IDS: item}
        columns = _columns(row, number, vocab_size)
        unused |= row.keys() - {*KNOWN}
        kept = columns.get(PADDING, np.ones(len(columns[IDS]))) != 0
        padded += len(kept) - int(kept.sum())
        counts = kept & (columns.get(LABELS, 0) != NOT_SCORED)
        for name in SCORED:
            counts &= columns.get(name, 1) != 0
        if LABELS in columns and (columns[LABELS] != columns[IDS])[counts].any():
            raise _refusal(number, f"has other {LABELS} than {IDS}: give such targets by batches=")
        empty += not kept.any()
        if kept.any():
            ids.append(columns[IDS][kept].astype(token_dtype(vocab_size)))
            scored.append(counts[kept])
    if not ids:
        raise ConfigError("documents= holds no token ids: give at least one document.")
    if not any(map(np.any, scored)):
        raise ConfigError("documents= has no token that is learnt: all labels or masks leave it out.")
    keys = [int.from_bytes(hashlib.sha256(these.tobytes()).digest()[:8]) for these in ids]
    without = [f"{padded:,} padding tokens"] if padded else []
    without += [f"{empty:,} empty documents"] if empty else []
    without += [f"the columns {shown(', '.join(sorted(unused)), 200)}"] if unused else []
    if without:
        log.warning("documents= is read without %s.", ", ".join(without))
    all_count = all(map(np.all, scored))
    what = "documents of the caller"
    return DocumentsInMemory(ids, np.array(keys, np.uint64), tokenizer, what, None if all_count else scored)


def _columns(row: Mapping[str, Any], number: int, vocab_size: int) -> dict[str, np.ndarray]:
    """What a row says of its tokens, each [tokens]."""
    columns = {}
    for name in KNOWN:
        if (value := row.get(name)) is None:
            continue
        try:
            columns[name] = found = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            # Lists of unlike lengths, or a tensor that is not in this process's memory.
            columns[name] = found = np.array(value, object)
        kinds = "iu" if name in (IDS, LABELS) else "biu"
        if found.ndim != 1 or found.shape != columns.get(IDS, found).shape or (found.size and found.dtype.kind not in kinds):
            what = f"has {name} of {found.dtype} and shape {list(found.shape)}: it needs an integer for each token"
            raise _refusal(number, f"{what}; texts are made into ids by jaxllm.prepare")
        if kinds == "biu" and ((found != 0) & (found != 1)).any():
            raise _refusal(number, f"has {name} other than 0 and 1, whose meaning is not known: leave it out, or give 0 and 1")
    if IDS not in columns:
        raise _refusal(number, f"has the columns {shown(', '.join(map(str, row)), 400)}: it needs {IDS}, the token ids")
    outside = columns[IDS][(columns[IDS] < 0) | (columns[IDS] >= vocab_size)]
    if outside.size:
        raise _refusal(number, f"has the id {outside[0]}, and model.vocab_size={vocab_size}: give the model's own ids")
    return columns


def _refusal(number: int, what: str) -> ConfigError:
    return ConfigError(f"Document {number} of documents= {what}.")
