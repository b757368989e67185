"""Documents of token ids with random access: the interface that every text source implements, and those in memory.
disk_documents.py has those of files.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

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
    largest_id: int = -1
    """The largest id of those in memory."""
    chosen_tokens: np.ndarray | None = None
    """Integers [documents] if each is a pair, a text with the chosen answer and then one with the rejected: tokens of the first
    text."""
    images: Sequence[Sequence[Any]] | None = None
    """The images of each document, in order of their places (images.py)."""

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
        tokenizer: Tokenizer | None,
        description: str,
        scored: Sequence[np.ndarray] | None = None,
        chosen_tokens: np.ndarray | None = None,
        images: Sequence[Sequence[Any]] | None = None,
    ):
        """
        Args:
          ids: token ids of each document, integers of one type. At least one document.
          scored: for each document, a bool array as long as its ids. Default: every token is scored.
          chosen_tokens, images: see Documents.
        """
        self.chosen_tokens, self.images = chosen_tokens, images
        self.keys, self.tokenizer, self.description = keys, tokenizer, description
        self.lengths = np.array([len(these) for these in ids], np.int64)
        self._ids = np.concatenate(ids)
        self.largest_id = int(self._ids.max(initial=0))
        self._scored = None if scored is None else np.concatenate(scored)
        self._begins = np.cumsum(self.lengths) - self.lengths
        arrays = (self._ids, self.lengths, self.keys, self._scored, chosen_tokens)
        self.fingerprint = hashlib.sha256(b"".join(array.tobytes() for array in arrays if array is not None)).hexdigest()

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return cut(self._ids, self._begins[documents], starts, stops)

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        return None if self._scored is None else cut(self._scored, self._begins[documents], starts, stops)


def text_documents(texts: dict[str, bytes], tokenizer: Tokenizer, description: str) -> DocumentsInMemory:
    """Tokenises texts in memory, one document each. Keys are hashes of their names."""
    ids = tokenizer.encode_documents([text.decode() for text in texts.values()])
    # A name may contain bytes that are not UTF-8, which Python reads as surrogates.
    digests = [hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest() for name in texts]
    keys = np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)
    return DocumentsInMemory(ids, keys, tokenizer, description)


class ChainedDocuments(Documents):
    """Several folders or files of one source, concatenated. See Documents."""

    def __init__(self, parts: Sequence[Documents]):
        self._parts = tuple(parts)
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.keys = np.concatenate([part.keys for part in parts])
        self._firsts = np.cumsum([0, *(len(part.lengths) for part in parts)])
        self.tokenizer = parts[0].tokenizer
        more = f" and {len(parts) - 3:,} more" if len(parts) > 3 else ""
        self.description = ", ".join(part.description for part in parts[:3]) + more
        self.fingerprint = hashlib.sha256("/".join(part.fingerprint for part in parts).encode()).hexdigest()

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return gather(self._firsts, documents, starts, stops, lambda part, *spans: self._parts[part].read(*spans))

    def where(self, document: int, token: int) -> str:
        part = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return self._parts[part].where(document - int(self._firsts[part]), token)


class SplitDocument(Documents):
    """A single document split into two: its first tokens for training, its last tokens held out. See Documents."""

    def __init__(self, whole: Documents, held_out_tokens: int):
        length = int(whole.lengths[0])
        self._whole, self._begins = whole, np.array([0, length - held_out_tokens])
        self.lengths = np.array([length - held_out_tokens, held_out_tokens])
        self.keys = np.repeat(whole.keys, 2)
        self.tokenizer, self.description, self.fingerprint = whole.tokenizer, whole.description, whole.fingerprint

    def read(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        return self._whole.read(*self._in_whole(documents, starts, stops))

    def scored(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray] | None:
        return self._whole.scored(*self._in_whole(documents, starts, stops))

    def where(self, document: int, token: int) -> str:
        return self._whole.where(0, int(self._begins[document]) + token)

    def _in_whole(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, ...]:
        begins = self._begins[documents]
        return np.zeros_like(documents), begins + starts, begins + stops


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
