"""Packs documents into sequences of S tokens: concatenated (`Concat`), or without cutting documents (`BestFit`).

The packing is a function of the document lengths and their order. It numbers the samples of one epoch and gives the pieces
of documents in each. It reads no text, so samples have random access.
"""

from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

import numpy as np

BEST_FIT_WINDOW = 65_536
"""Number of documents that best-fit packing considers together. A few thousand already fill 99.9 % of all sequences; larger
windows fill no more, but put documents of equal length into the same sequences."""

_CHUNK = 2**20
"""Documents that most_pieces counts at once."""
# Free sizes per word of best_fit's two-level search. With very long sequences there are about as many words as bits.
_WORD_BITS = 9


class Pieces(NamedTuple):
    """Tokens [start, stop) of consecutive documents: integers [pieces]. No piece is empty."""

    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Concat:
    """Concatenates documents and cuts them where a sequence is full. Only the last sample may have free space."""

    def __init__(self, lengths: np.ndarray, order: np.ndarray, sequence_length: int):
        """Packs the documents `order`, indices into `lengths`, in this order."""
        # Empty documents would make empty pieces.
        self._order = order[lengths[order] > 0]
        self._lengths = lengths[self._order].astype(np.int64)
        self._ends = np.cumsum(self._lengths)
        self._sequence_length = sequence_length
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        """Total tokens of all documents. Each token is in exactly one sample."""
        self.num_samples = -(-self.num_tokens // sequence_length)
        self.num_rotations = max(min(sequence_length, self.num_tokens), 1)
        """Number of ways to cut the same documents into samples, numbered from 0."""

    @cached_property
    def most_pieces(self) -> int:
        """Pieces of a sample at most, in any rotation; free space at its end counts as one."""
        if not self.num_tokens:
            return 1
        # Most documents begin in a sample that starts with the last token of another. Documents follow each other in a circle.
        count, most = len(self._ends), 0
        for first in range(0, count, _CHUNK):
            # Document d ends where d + 1 starts. Counted are the ends from a start on, up to the sample's last token but one.
            ends = self._ends[first : first + _CHUNK]
            last = ends - self._lengths[first : first + _CHUNK] + min(self._sequence_length, self.num_tokens) - 2
            around = np.where(last < self.num_tokens, 0, count)
            before = np.searchsorted(self._ends, np.where(last < self.num_tokens, last, last - self.num_tokens), side="right")
            most = max(most, int((around + before - np.arange(first, first + len(ends))).max()))
        return most + 2 + (self.num_tokens % self._sequence_length > 0)

    def pieces(self, sample: int, rotation: int = 0) -> Pieces:
        """Pieces that fill one sample, at most S tokens. Samples 0 .. num_samples-1 of one rotation hold each token once."""
        # Rotation r moves the first r tokens to the end, so every cut moves.
        first = sample * self._sequence_length + rotation
        last = min((sample + 1) * self._sequence_length, self.num_tokens) + rotation
        spans = [(first, min(last, self.num_tokens)), (max(first - self.num_tokens, 0), last - self.num_tokens)]
        found = [self._between(start, stop) for start, stop in spans if start < stop]
        return found[0] if len(found) == 1 else Pieces(*map(np.concatenate, zip(*found, strict=True)))

    def _between(self, start: int, stop: int) -> Pieces:
        """Tokens [start, stop) of the concatenation of all documents."""
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
        here = slice(first, last + 1)
        begins = self._ends[here] - self._lengths[here]
        return Pieces(self._order[here], np.maximum(start - begins, 0), np.minimum(stop - begins, self._lengths[here]))


class BestFit:
    """Best-fit decreasing (Johnson, 1973) as in Ding et al. (2024, "Fewer Truncations Improve Language Modeling"): each
    document, longest first, goes into the fullest sequence that has room for it. A document longer than S first fills
    complete sequences; its remainder is packed like a document.

    Packing works within windows of consecutive documents, so neighbours stay close. It packs about a million documents per
    second, for any sequence length. The interface is that of Concat.
    """

    num_rotations = 1

    def __init__(self, lengths: np.ndarray, order: np.ndarray, sequence_length: int):
        """Takes the same arguments as Concat."""
        windows = [
            _pack_window(order[first : first + BEST_FIT_WINDOW], lengths, sequence_length)
            for first in range(0, len(order), BEST_FIT_WINDOW)
        ]
        self._pieces = Pieces(*(np.concatenate([getattr(pieces, f) for pieces, _ in windows]) for f in Pieces._fields))
        self._ends = np.cumsum(np.concatenate([counts for _, counts in windows]))
        self.num_tokens = int((self._pieces.stops - self._pieces.starts).sum())
        self.num_samples = len(self._ends)

    @cached_property
    def most_pieces(self) -> int:
        return int(np.diff(self._ends, prepend=0).max(initial=0)) + 1

    def pieces(self, sample: int, rotation: int = 0) -> Pieces:
        here = slice(self._ends[sample - 1] if sample else 0, self._ends[sample])
        return Pieces(*(array[here] for array in self._pieces))


def _pack_window(documents: np.ndarray, lengths: np.ndarray, sequence_length: int) -> tuple[Pieces, np.ndarray]:
    """Pieces sorted by sample, and the number of pieces of each sample."""
    sizes = lengths[documents].astype(np.int64)
    full, rest = np.divmod(sizes, sequence_length)
    num_full = int(full.sum())
    whole = np.repeat(documents, full)
    # Start offsets 0, S, 2 S, ... within each document.
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
    """Puts each item, in the given order, into the fullest bin with room for it: (bin of each item, int64; number of bins)."""
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    # Bit r % 512 of word r // 512 is set if some bin has r tokens free; bit w of `used` is set if word w is not 0. The
    # fullest bin that fits is the lowest set bit from `size` upwards. One number for all sizes would be S bits to shift.
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
