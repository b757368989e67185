"""Training stream: returns sample k of a run, for any k, in any order, on any host.

Sample k is a pure function of (seed, k, sources and weights). There is no state to save. A global batch is samples
[start, start + size), independent of the number of hosts, microbatches and devices. A batch is a dict of

    tokens     int32 [B, S]   input of the model; 0 in free space at the end of a sequence
    targets    int32 [B, S]   the token after each input token
    mask       bool  [B, S]   True where the target counts in the loss. False at the end of a document, in free space, and
                              for tokens that the source does not score, such as questions in conversations
    positions  int32 [B, S]   counted from 0 in each piece of a document
    images     float32 [B, I, 3, height, width]     with a vision tower: of each sequence, in order of their places; then zeros
    segments   int32 [B, S]   1, 2, ... for each piece of a document, 0 in free space; of pairs, the text with the chosen answer
                              has an odd number and that with the rejected one the next

With data.mask_documents=false a sequence is one text: no segments, positions 0..S-1, and the last token of a document predicts
the first token of the next. At the end of a row that target is masked, because the next document is not read.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grain
import numpy as np
from grain.experimental import index_shuffle

from jaxllm.config import ConfigError
from jaxllm.data.documents import Documents
from jaxllm.data.packing import PACKINGS, Pieces

Batch = dict[str, np.ndarray]
Result = TypeVar("Result")

PERIOD = 4096
"""Samples over which a mixture has its exact weights: each weight is a whole number of 4096ths, at least one."""
# Rounds of the cipher behind index_shuffle, which permutes without a table. Grain's own shuffle uses the same number.
_ROUNDS = 4
# The cipher works on at least 16 bits and retries results out of range: 3 ms per index for 10 samples, 4 us from here on.
_SMALL = 2**16


class PackedDocuments:
    """Packed documents of one source. They return rows of a batch by sample and rotation."""

    def __init__(
        self,
        name: str,
        documents: Documents,
        order: np.ndarray,
        sequence_length: int,
        packing: str,
        mask_documents: bool,
        vocab_size: int,
        images: Any = None,
    ):
        """Packs the documents `order`, in this order. The name of the source is for messages; `images`: SequenceImages."""
        self.name, self._documents, self._masks = name, documents, mask_documents
        self._sequence_length, self._vocab_size, self._images = sequence_length, vocab_size, images
        lengths = documents.lengths if images is None else images.room(documents, sequence_length)
        self.packing = PACKINGS[packing](lengths, order, sequence_length)

    def in_order(self, samples: Sequence[int]) -> Batch:
        """Samples by number, in the given order of documents. Numbers past the last give empty rows. Raises as `rows`."""
        return self.rows([(sample, 0) if sample < self.packing.num_samples else None for sample in samples])

    def rows(self, wanted: Sequence[tuple[int, int] | None]) -> Batch:
        """Returns one row for each (sample, rotation). None gives an empty row. Raises ConfigError for an id outside the
        vocabulary.
        """
        nothing = Pieces(*np.zeros((3, 0), np.int64))
        found = [nothing if one is None else self.packing.pieces(*one) for one in wanted]
        pieces = Pieces(*map(np.concatenate, zip(*found, strict=True))) if found else nothing
        lengths = np.asarray(self._documents.lengths[pieces.documents], np.int64)
        # Read one token more than the row holds: the target of the last one. Images may take more room than their tokens.
        pieces = pieces._replace(stops=np.minimum(pieces.stops, lengths))
        spans = pieces.documents, pieces.starts, np.minimum(pieces.stops + 1, lengths)
        read = self._documents.read(*spans)
        self._check(read, pieces.documents, pieces.starts)
        scored = self._documents.scored(*spans)
        if scored is None:
            scored = [np.ones(len(ids), bool) for ids in read]
        batch = empty_rows(len(found), self._sequence_length, segments=self._masks)
        texts = iter(zip(read, scored, (pieces.stops - pieces.starts).tolist(), strict=True))
        for row, here in enumerate(found):
            of_row = [next(texts) for _ in here.documents]
            if (chosen := self._documents.chosen_tokens) is not None:
                # Pairs are never cut.
                whole, of_row = zip(of_row, chosen[here.documents].tolist(), strict=True), []
                for (ids, targets, size), border in whole:
                    of_row += [(ids[:border], targets[:border], border), (ids[border:], targets[border:], size - border)]
            self._fill({key: array[row] for key, array in batch.items()}, of_row)
        if self._images is not None:
            batch["images"] = self._images.pixels(self._documents, [here.documents.tolist() for here in found])
        return batch

    def _check(self, read: list[np.ndarray], documents: np.ndarray, starts: np.ndarray) -> None:
        """Raises ConfigError at the first id outside the vocabulary."""
        # Checked as they were read: in the batch a large id would be cut to 32 bits.
        ids = np.concatenate([np.zeros(0, np.uint8), *read])
        if ids.min(initial=0) >= 0 and ids.max(initial=0) < self._vocab_size:
            return
        place = int(np.argmax((ids < 0) | (ids >= self._vocab_size)))
        begins = np.cumsum([0, *map(len, read)])
        piece = int(np.searchsorted(begins, place, side="right")) - 1
        where = self._documents.where(int(documents[piece]), int(starts[piece]) + place - int(begins[piece]))
        raise ConfigError(
            f"Source {self.name} holds the token id {ids[place]} and model.vocab_size={self._vocab_size} ({where}): "
            f"it was tokenised for another model; prepare it again or change the model."
        )

    def _fill(self, row: Batch, texts: list[tuple[np.ndarray, np.ndarray, int]]) -> None:
        """Writes the pieces of one row. Each text is (ids plus the next one if the document has it, which of them are scored,
        number of ids that belong to the row).
        """
        at = with_target = 0
        for number, (ids, scored, size) in enumerate(texts, start=1):
            stop = at + size
            row["tokens"][at:stop] = ids[:size]
            if not self._masks and with_target < at:
                row["targets"][at - 1], row["mask"][at - 1] = ids[0], scored[0]
            with_target = at + len(ids) - 1
            row["targets"][at:with_target] = ids[1:]
            row["mask"][at:with_target] = scored[1:]
            if self._masks:
                row["positions"][at:stop] = np.arange(size)
                row["segments"][at:stop] = number
            at = stop
        if not self._masks:
            row["positions"][:] = np.arange(self._sequence_length)


def empty_rows(num_rows: int, sequence_length: int, segments: bool) -> Batch:
    shape = (num_rows, sequence_length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions")} | {"mask": np.zeros(shape, bool)}
    return batch | ({"segments": np.zeros(shape, np.int32)} if segments else {})


class SampleStream:
    """Endless samples of one source or of a mixture. Each epoch reads a source in a new order.

    The documents of a source are shuffled once. Every epoch cuts them into samples at different places, and reads the samples
    in a new order.
    """

    def __init__(self, sources: Sequence[PackedDocuments], weights: Sequence[float], seed: int):
        """Each source has at least one sample. Raises ConfigError if a weight is below 1/PERIOD of all."""
        self.sources = tuple(sources)
        # Keep a few epochs and periods: a batch touches two of each source, and a prefetching thread may be ahead.
        size = max(64, 4 * len(self.sources) + 8)
        self._permutation = functools.lru_cache(maxsize=size)(permutation)
        # Two words per epoch: one for its cut, one for its order.
        self._word = functools.lru_cache(maxsize=2 * size)(functools.partial(random_word, seed))
        self.counts = apportion(weights, PERIOD)
        if 0 in self.counts:
            name = self.sources[self.counts.index(0)].name
            raise ConfigError(
                f"The weight of {name} in data.mixture is less than 1/{PERIOD}: raise it or leave the source out."
            )
        self._offsets = np.cumsum([0, *self.counts])

    def samples(self, ks: np.ndarray) -> Batch:
        """Returns samples ks (integers [B] in any order), stacked to [B, S].

        Raises:
          ValueError: a sample number is negative.
          ConfigError: the text does not fit the vocabulary, or cannot be read.
        """
        wanted: list[list[Any]] = [[] for _ in self.sources]
        rows: list[list[int]] = [[] for _ in self.sources]
        for row, k in enumerate(np.asarray(ks).tolist()):
            source, *place = self.locate(k)
            wanted[source].append(tuple(place))
            rows[source].append(row)
        parts = [source.rows(these) for source, these in zip(self.sources, wanted, strict=True)]
        if len(parts) == 1:
            return parts[0]
        batch = {name: np.empty((len(ks), *array.shape[1:]), array.dtype) for name, array in parts[0].items()}
        for part, here in zip(parts, rows, strict=True):
            for name, array in part.items():
                batch[name][here] = array
        return batch

    def locate(self, k: int) -> tuple[int, int, int]:
        """Finds sample k of the run: (source, sample, rotation)."""
        if k < 0:
            raise ValueError(f"Samples are numbered from 0, not {k}.")
        period, place = divmod(k, PERIOD)
        source, number = 0, k
        if len(self.sources) > 1:
            slot = self._permuted(place, PERIOD, self._word("mixture", period))
            source = int(np.searchsorted(self._offsets, slot, side="right")) - 1
            number = period * self.counts[source] + slot - int(self._offsets[source])
        packing = self.sources[source].packing
        epoch, sample = divmod(number, packing.num_samples)
        rotation = self._word("cut", source, epoch) % packing.num_rotations
        return source, self._permuted(sample, packing.num_samples, self._word("samples", source, epoch)), rotation

    def _permuted(self, index: int, size: int, word: int) -> int:
        """Position of `index` in a permutation of 0 .. size-1."""
        if size <= _SMALL:
            return int(self._permutation(size, word)[index])
        return index_shuffle(index, max_index=size - 1, seed=word % 2**32, rounds=_ROUNDS)

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Epochs read of each source after `num_samples` samples. Assumes an even mixture within each period."""
        return {
            source.name: num_samples * count / PERIOD / source.packing.num_samples
            for source, count in zip(self.sources, self.counts, strict=True)
        }


def document_order(documents: np.ndarray, seed: int, source: int) -> np.ndarray:
    """Shuffles the documents into the order in which a run packs them: a function of the seed and the source number only."""
    return documents[permutation(len(documents), random_word(seed, "documents", source))]


def random_word(seed: int, *what: str | int) -> int:
    """64 random bits for one purpose: a pure function of its arguments."""
    text = "/".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permutation(size: int, word: int) -> np.ndarray:
    # Sorts raw random words instead of calling Generator.permutation: numpy promises to keep the words of a bit generator
    # between versions, but not the results of Generator. A run may outlive a numpy upgrade.
    return np.argsort(np.random.Philox(key=word).random_raw(size), kind="stable")


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Integers that add up to `total` and are closest to the weights (largest remainders)."""
    exact = np.asarray(weights, float) / np.sum(weights) * total
    counts = np.floor(exact).astype(int)
    largest_remainders = np.argsort(counts - exact, kind="stable")
    counts[largest_remainders[: total - counts.sum()]] += 1
    return counts.tolist()


def ahead(make: Callable[[int], Result], start: int) -> grain.DatasetIterator:
    """Iterates over make(start), make(start + 1), ..., computed two ahead in a background thread. The caller must `close()` it.

    An exception in `make` reaches the consumer at that item.
    """
    endless = grain.MapDataset.range(start, 2**62).map(make)
    return iter(endless.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
