"""What every source of text gives: documents of token ids that can be read at random."""

from __future__ import annotations

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
    """Hexadecimal digits: another text, tokenizer or order of documents has others."""

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Token ids [start, stop) of each of these documents, integers of any type."""
        ...
