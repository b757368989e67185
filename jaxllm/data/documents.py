"""What every source of text gives: documents of token ids that can be read at random."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxllm.data.tokenizer import Tokenizer


class Documents(Protocol):
    """Documents 0 .. n-1 of one source. Safe to read from several threads."""

    lengths: np.ndarray
    """Integers [documents]: tokens of each, marks of its beginning and end included."""
    keys: np.ndarray
    """uint64 [documents]: a hash of each document that no machine and no order changes; decides which are held out."""
    tokenizer: Tokenizer | None
    """None where nobody knows which it was."""
    description: str
    """One line for people."""
    fingerprint: str
    """Hexadecimal digits: another text, tokenizer, choice of scored tokens or order of documents has others."""

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Token ids [start, stop) of each of these documents, integers of any type."""
        ...

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        """Which of the tokens that `read` gives count in the loss when they are to be predicted, bool; None: all of them."""
        return None


class DocumentsInMemory(Documents):
    """Documents that are tokenised already, one after another in two arrays."""

    def __init__(
        self,
        ids: Sequence[np.ndarray],
        keys: np.ndarray,
        tokenizer: Tokenizer,
        description: str,
        scored: Sequence[np.ndarray] | None = None,
    ):
        """
        Args:
          ids: of each document, integers of one type; at least one document.
          scored: bool, as long as `ids`; default: all.
        """
        self.keys, self.tokenizer, self.description = keys, tokenizer, description
        self.lengths = np.array([len(these) for these in ids], np.int64)
        self._ids = np.concatenate(ids)
        self._scored = None if scored is None else np.concatenate(scored)
        self._begins = np.cumsum(self.lengths) - self.lengths
        content = self._ids.tobytes() + self.lengths.tobytes() + self.keys.tobytes()
        if self._scored is not None:
            content += self._scored.tobytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return self._cut(self._ids, documents, starts, stops)

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        return None if self._scored is None else self._cut(self._scored, documents, starts, stops)

    def _cut(self, array: np.ndarray, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        begins = self._begins[documents]
        spans = zip((begins + starts).tolist(), (begins + stops).tolist(), strict=True)
        return [array[start:stop] for start, stop in spans]
