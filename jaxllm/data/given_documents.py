"""Documents of token ids that a program hands to Trainer or fit: lists, arrays, or rows as of Hugging Face's datasets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from operator import length_hint
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.documents import DocumentsInMemory
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.untrusted import shown

IDS, PADDING, LABELS = "input_ids", "attention_mask", "labels"
SCORED = ("completion_mask", "assistant_masks")
"""TRL's columns: 1 where a token counts in the loss."""
NOT_SCORED = -100
"""The label of a token that does not count, as in PyTorch and transformers."""


def given_documents(items: Iterable[Any], tokenizer: Tokenizer | None, vocab_size: int) -> DocumentsInMemory:
    """Reads all documents once, in order, into memory: two bytes for each id, four from 65,537 ids on.

    Args:
      items: of each document its ids [tokens], or a row with input_ids. Of a row's other columns, tokens whose attention_mask
        is 0 are left out, and those whose labels are -100 or whose completion_mask or assistant_masks is 0 are not scored.
        The description names columns that have no effect.
      tokenizer: whose ids they are, if that is known.

    Raises:
      ConfigError: an item is something else or has an id outside the vocabulary, or there is none, or no end of them.
    """
    if isinstance(items, str | bytes | Mapping):
        raise ConfigError(f"documents= is {type(items).__name__}: give a list of documents, each a list of token ids.")
    if length_hint(items) >= sys.maxsize:
        raise ConfigError("documents= has no end: give them once, and let train.steps say how often they are read.")
    # PyTorch's map-style datasets have no __iter__, and may raise no IndexError at their end.
    by_number: Any = items
    rows = items if hasattr(items, "__iter__") else (by_number[number] for number in range(len(by_number)))
    ids, scored, padded, empty, unused = list[np.ndarray](), list[np.ndarray](), 0, 0, set[str]()
    for number, item in enumerate(rows):
        row = item if isinstance(item, Mapping) else {IDS: item}
        found = _ids(row, number, vocab_size)
        counts = _scored(row, found, number)
        unused |= row.keys() - {IDS, PADDING, LABELS, *SCORED}
        if row.get(PADDING) is not None:
            kept = _beside(row, PADDING, found, number) != 0
            padded += len(kept) - int(kept.sum())
            found, counts = found[kept], counts[kept]
        empty += not len(found)
        if len(found):
            ids.append(found.astype(np.uint16 if vocab_size <= 2**16 else np.uint32))
            scored.append(counts)
    if not ids:
        raise ConfigError("documents= holds no token ids: give at least one document.")
    keys = [int.from_bytes(hashlib.sha256(these.tobytes()).digest()[:8]) for these in ids]
    left_out = [
        *([f"{padded:,} padding tokens"] if padded else []),
        *([f"{empty:,} empty documents"] if empty else []),
        *([f"the columns {shown(', '.join(sorted(unused)), 200)}"] if unused else []),
    ]
    description = "documents of the caller" + (f" (without {' and '.join(left_out)})" if left_out else "")
    all_count = all(counts.all() for counts in scored)
    return DocumentsInMemory(ids, np.array(keys, np.uint64), tokenizer, description, None if all_count else scored)


def _ids(row: Mapping[str, Any], number: int, vocab_size: int) -> np.ndarray:
    if row.get(IDS) is None:
        names = shown(", ".join(map(str, row)), 400)
        raise _refusal(number, f"has the columns {names}: it needs {IDS}, the token ids; of texts, make them by jaxllm.prepare")
    if isinstance(row[IDS], str | bytes):
        raise _refusal(number, "is a text: give its token ids, or write texts once by jaxllm.prepare, for data.source=prepared")
    ids = _numbers(row[IDS])
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _refusal(number, f"is {ids.dtype} of shape {list(ids.shape)}: it needs integers, one for each token")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise _refusal(number, f"has the id {bad}, and model.vocab_size={vocab_size}: give the ids of the model's tokenizer")
    return ids


def _scored(row: Mapping[str, Any], ids: np.ndarray, number: int) -> np.ndarray:
    """Whether each token counts in the loss as a target."""
    counts = np.ones(len(ids), bool)
    for name in SCORED:
        if row.get(name) is not None:
            counts &= _beside(row, name, ids, number) != 0
    if row.get(LABELS) is not None:
        labels = _beside(row, LABELS, ids, number)
        counts &= labels != NOT_SCORED
        if (others := np.flatnonzero(counts & (labels != ids))).size:
            raise _refusal(number, f"has {LABELS} other than {IDS} at {others[0]}: give such targets by batches=")
    return counts


def _beside(row: Mapping[str, Any], name: str, ids: np.ndarray, number: int) -> np.ndarray:
    found = _numbers(row[name])
    if found.shape != ids.shape or (found.size and found.dtype.kind not in "biu"):
        raise _refusal(number, f"has {name} of shape {list(found.shape)}, and {len(ids)} token ids: it needs one for each")
    return found


def _numbers(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:
        # Lists of unlike lengths.
        return np.asarray(value, object)


def _refusal(number: int, what: str) -> ConfigError:
    return ConfigError(f"Document {number} of documents= {what}.")
