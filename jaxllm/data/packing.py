"""How documents fill sequences of S tokens: one after another, or put together so that none is cut.

A packing is fixed by the lengths of its documents and their order. It numbers its samples, an epoch's worth, and says for each
which pieces of which documents fill it; no text is read for that, so samples can be read at random.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, Protocol

import numpy as np

BEST_FIT_WINDOW = 65_536
"""Documents that best-fit packing looks at together. Larger windows fill sequences no better (99.9 % and more are full at a few
thousand documents), but put documents of one length into the same sequences."""

# Rooms that share a word of best_fit's two-level search: about as many as there are words where sequences are very long.
_WORD_BITS = 9


class Pieces(NamedTuple):
    """Tokens [start, stop) of a document, one after another: integers [pieces], none of them empty."""

    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Packing(Protocol):
    num_tokens: int
    """Of all documents, each of them in exactly one sample."""
    num_samples: int
    num_rotations: int
    """Ways to cut the same documents into samples, numbered from 0."""

    def pieces(self, sample: int, rotation: int = 0) -> Pieces:
        """What fills one sample: at most S tokens. Samples 0 .. num_samples-1 of one rotation hold every token once."""
        ...


class Concat:
    """Documents one after another, cut where a sequence is full; only the last sample may have room left."""

    def __init__(self, lengths: np.ndarray, order: np.ndarray, sequence_length: int):
        """
        Args:
          lengths: tokens of every document.
          order: the documents to pack, in their order: indices into `lengths`.
          sequence_length: S.
        """
        # Empty documents would make pieces of nothing.
        self._order = order[lengths[order] > 0]
        self._lengths = lengths[self._order].astype(np.int64)
        self._ends = np.cumsum(self._lengths)
        self._sequence_length = sequence_length
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        self.num_samples = -(-self.num_tokens // sequence_length)
        self.num_rotations = max(min(sequence_length, self.num_tokens), 1)

    def pieces(self, sample: int, rotation: int = 0) -> Pieces:
        # Rotation r moves the first r tokens behind the last one: every cut moves.
        first = sample * self._sequence_length + rotation
        last = min((sample + 1) * self._sequence_length, self.num_tokens) + rotation
        spans = [(first, min(last, self.num_tokens)), (max(first - self.num_tokens, 0), last - self.num_tokens)]
        found = [self._between(start, stop) for start, stop in spans if start < stop]
        return found[0] if len(found) == 1 else Pieces(*map(np.concatenate, zip(*found, strict=True)))

    def _between(self, start: int, stop: int) -> Pieces:
        """Tokens [start, stop) of all documents in a row."""
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
        here = slice(first, last + 1)
        begins = self._ends[here] - self._lengths[here]
        return Pieces(self._order[here], np.maximum(start - begins, 0), np.minimum(stop - begins, self._lengths[here]))


class BestFit:
    """Best-fit decreasing (Johnson, 1973), as Ding et al. (2024, "Fewer Truncations Improve Language Modeling") use it: each
    document, longest first, goes into the fullest sequence that has room for it. Documents longer than S give whole sequences
    first; what is left of them is packed like a document.

    Within windows of documents in their given order, so that neighbours stay neighbours; about a million documents a second,
    however long sequences are.
    """

    num_rotations = 1

    def __init__(self, lengths: np.ndarray, order: np.ndarray, sequence_length: int):
        """Arguments as Concat's."""
        windows = [
            _pack_window(order[first : first + BEST_FIT_WINDOW], lengths, sequence_length)
            for first in range(0, len(order), BEST_FIT_WINDOW)
        ]
        self._pieces = Pieces(*(np.concatenate([getattr(pieces, f) for pieces, _ in windows]) for f in Pieces._fields))
        self._ends = np.cumsum(np.concatenate([counts for _, counts in windows]))
        self.num_tokens = int((self._pieces.stops - self._pieces.starts).sum())
        self.num_samples = len(self._ends)

    def pieces(self, sample: int, rotation: int = 0) -> Pieces:
        here = slice(self._ends[sample - 1] if sample else 0, self._ends[sample])
        return Pieces(*(array[here] for array in self._pieces))


def _pack_window(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> tuple[Pieces, np.ndarray]:
    """Pieces in the order of their samples, and the number of pieces of each sample."""
    sizes = lengths[documents].astype(np.int64)
    full, rest = np.divmod(sizes, sequence_length)
    num_full = int(full.sum())
    whole = np.repeat(documents, full)
    # 0, S, 2 S, ... within each document.
    starts = sequence_length * (np.arange(num_full) - np.repeat(np.cumsum(full) - full, full))
    longest_first = np.argsort(-rest, kind="stable")
    longest_first = longest_first[rest[longest_first] > 0]
    bins, num_bins = best_fit(rest[longest_first].tolist(), sequence_length)
    by_bin = np.argsort(bins, kind="stable")
    tails = longest_first[by_bin]
    pieces = Pieces(
        np.concatenate([whole, documents[tails]]),
        np.concatenate([starts, sizes[tails] - rest[tails]]),
        np.concatenate([starts + sequence_length, sizes[tails]]),
    )
    return pieces, np.concatenate([np.ones(num_full, np.int64), np.bincount(bins, minlength=num_bins)])


def best_fit(sizes: list[int], capacity: int) -> tuple[np.ndarray, int]:
    """The bin of each item, in the order given, each into the fullest bin with room for it: (int64 [items], number of bins)."""
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    # Where some bin has room for r more, bit r % 512 of word r // 512 is set, and bit w of `used` where word w is not 0: the
    # fullest bin that fits is the lowest bit from `size` up. One number of all rooms is as many bits to shift as S is long.
    words, used, num_bins = [0] * ((capacity >> _WORD_BITS) + 1), 0, 0
    in_word = (1 << _WORD_BITS) - 1
    bins = np.empty(len(sizes), np.int64)
    for item, size in enumerate(sizes):
        word = size >> _WORD_BITS
        room = capacity
        if fitting := words[word] >> (size & in_word):
            room = size + (fitting & -fitting).bit_length() - 1
        elif later := used >> (word + 1):
            word += (later & -later).bit_length()
            room = (word << _WORD_BITS) + (words[word] & -words[word]).bit_length() - 1
        if room < capacity:
            bin = with_room[room].pop()
            if not with_room[room]:
                words[word] ^= 1 << (room & in_word)
                if not words[word]:
                    used ^= 1 << word
        else:
            bin = num_bins
            num_bins += 1
        bins[item] = bin
        if left := room - size:
            with_room[left].append(bin)
            words[left >> _WORD_BITS] |= 1 << (left & in_word)
            used |= 1 << (left >> _WORD_BITS)
    return bins, num_bins


PACKINGS = {"concat": Concat, "best_fit": BestFit}
