"""The interface that every text source implements: documents of token ids with random access."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxllm.data.tokenizer import Tokenizer
from jaxllm.untrusted import shown


class Documents(Protocol):
    """Documents 0 .. n-1 of one source. Reading is thread-safe."""

    lengths: np.ndarray
    """Integers [documents]: tokens of each document, including its BOS and EOS tokens."""
    keys: np.ndarray
    """uint64 [documents]: a hash of each document, independent of machine and order. It decides which are held out."""
    tokenizer: Tokenizer | None
    """None if the source does not record its tokenizer."""
    description: str
    """One line of text for logs."""
    fingerprint: str
    """Hexadecimal digits. They change with the text, the tokenizer, the scored tokens or the order of documents."""
    chosen_tokens: np.ndarray | None = None
    """Integers [documents] if each is a pair, a text with the chosen answer and then one with the rejected: tokens of the first
    text."""

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Reads the token ids [start, stop) of each given document, as integers of any type."""
        ...

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        """Tells for each token that `read` returns whether it counts in the loss as a target (bool). None means all of them."""
        return None

    def where(self, document: int, token: int) -> str:
        """Names a token in a message."""
        return f"token {token:,} of document {document:,} of {shown(self.description)}"


class DocumentsInMemory(Documents):
    """Documents that are already tokenised, concatenated in memory."""

    def __init__(
        self,
        ids: Sequence[np.ndarray],
        keys: np.ndarray,
        tokenizer: Tokenizer,
        description: str,
        scored: Sequence[np.ndarray] | None = None,
        chosen_tokens: np.ndarray | None = None,
    ):
        """
        Args:
          ids: token ids of each document, integers of one type. At least one document.
          scored: for each document, a bool array as long as its ids. Default: every token is scored.
          chosen_tokens: see Documents.
        """
        self.chosen_tokens = chosen_tokens
        self.keys, self.tokenizer, self.description = keys, tokenizer, description
        self.lengths = np.array([len(these) for these in ids], np.int64)
        self._ids = np.concatenate(ids)
        self._scored = None if scored is None else np.concatenate(scored)
        self._begins = np.cumsum(self.lengths) - self.lengths
        content = self._ids.tobytes() + self.lengths.tobytes() + self.keys.tobytes()
        if self._scored is not None:
            content += self._scored.tobytes()
        if chosen_tokens is not None:
            content += chosen_tokens.tobytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return cut(self._ids, self._begins[documents], starts, stops)

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        return None if self._scored is None else cut(self._scored, self._begins[documents], starts, stops)


def cut(array: np.ndarray, begins: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
    """Parts [start, stop) of the documents that begin at `begins` in an array."""
    spans = zip((begins + starts).tolist(), (begins + stops).tolist(), strict=True)
    return [array[start:stop] for start, stop in spans]


def gather(
    firsts: np.ndarray, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray, read: Callable[..., Iterable[np.ndarray]]
) -> list[np.ndarray]:
    """Reads ranges of documents that are stored in several parts, each part once.

    Args:
      firsts: number of the first document of each part.
      read: reads (part, numbers within the part, starts, stops).
    """
    found: list = [None] * len(documents)
    parts = np.searchsorted(firsts, documents, side="right") - 1
    for part in np.unique(parts).tolist():
        here = np.flatnonzero(parts == part)
        texts = read(part, documents[here] - firsts[part], starts[here], stops[here])
        for place, text in zip(here.tolist(), texts, strict=True):
            found[place] = text
    return found
