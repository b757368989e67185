"""From a stream of token ids to the rows of a batch.

Sample k of a run is a pure function of (seed, k): no state to save, and any host can make any rows. A row is a dict of

    tokens     int32 [S]   what the model reads
    targets    int32 [S]   the token after each of them
    mask       bool  [S]   targets that count in the loss
    positions  int32 [S]   0..S-1

and a batch stacks B of them. In names here, B is sequences and S sequence_length.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxllm.config import ConfigError

Result = TypeVar("Result")


class WindowLoader:
    """Training samples: windows of S + 1 tokens cut from a stream, in a new order every epoch.

    Neighbouring windows share one token, the last target of one and the first input of the next, so no token goes
    unpredicted. An epoch visits each of `num_windows` windows once, in a seeded order, on a grid that starts at a
    seeded place: windows differ from epoch to epoch, and the ends of the stream get their turn.
    """

    def __init__(self, stream: np.ndarray, sequence_length: int, seed: int):
        """
        Args:
          stream: integer token ids, [tokens].
          sequence_length: S, in tokens.
          seed: a whole number from 0.

        Raises:
          ConfigError: fewer than 2 S tokens.
        """
        self.num_windows = len(stream) // sequence_length - 1
        if self.num_windows < 1:
            raise ConfigError(
                f"The training text has {len(stream)} tokens, and train.sequence_length={sequence_length} needs at "
                f"least {2 * sequence_length}: give more text or use sequences of at most {len(stream) // 2}."
            )
        self.sequence_length = sequence_length
        self._seed = seed % 2**64
        self._num_offsets = len(stream) - self.num_windows * sequence_length
        self._windows = sliding_window_view(stream, sequence_length + 1)
        # A batch touches two epochs at most (or the corpus is tiny), and a prefetching thread may be an epoch ahead.
        self._starts = functools.lru_cache(maxsize=4)(self._draw_starts)

    def sample(self, k: int) -> dict[str, np.ndarray]:
        """Sample k of the run, from 0: the arrays above without a batch dim."""
        return {name: rows[0] for name, rows in self.samples(np.array([k])).items()}

    def samples(self, ks: np.ndarray) -> dict[str, np.ndarray]:
        """Samples ks, integers [B] in any order, stacked to [B, S].

        Raises:
          ValueError: a negative sample number.
        """
        ks = np.asarray(ks)
        if ks.size and ks.min() < 0:
            raise ValueError(f"Samples are numbered from 0, not {ks.min()}.")
        epochs, places = np.divmod(ks, self.num_windows)
        starts_B = np.empty(len(ks), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts_B[here] = self._starts(int(epoch))[places[here]]
        window_BS1 = self._windows[starts_B]
        return _rows(window_BS1[:, :-1], window_BS1[:, 1:], np.ones((len(ks), self.sequence_length), np.bool_))

    def _draw_starts(self, epoch: int) -> np.ndarray:
        """Where each window of an epoch starts, in the order of its samples: int64 [num_windows], 8 bytes a window."""
        # Ordering raw random words instead of calling Generator.permutation: numpy promises to keep a bit generator's
        # words from version to version but not what Generator makes of them, and a run may outlive a numpy upgrade.
        words = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(self.num_windows + 1)
        offset = int(words[0] % np.uint64(self._num_offsets))
        return offset + self.sequence_length * np.argsort(words[1:], kind="stable")


def num_held_out_batches(stream: np.ndarray, sequence_length: int, batch_sequences: int) -> int:
    """Batches that held_out_batches yields; 0 for a stream without a single target (fewer than 2 tokens)."""
    return math.ceil(max(len(stream) - 1, 0) / (sequence_length * batch_sequences))


def held_out_batches(stream: np.ndarray, sequence_length: int, batch_sequences: int) -> Iterator[dict[str, np.ndarray]]:
    """The whole of a stream in order, as batches [batch_sequences, S] of one shape.

    Every token but the very first is a target exactly once. What the last batch lacks is filled with token 0 and mask
    False.
    """
    shape_BS = (batch_sequences, sequence_length)
    batch_tokens = batch_sequences * sequence_length
    for first in range(0, len(stream) - 1, batch_tokens):
        text = stream[first : first + batch_tokens + 1]
        num_targets = len(text) - 1
        tokens, targets = np.zeros((2, batch_tokens), np.int32)
        tokens[:num_targets], targets[:num_targets] = text[:-1], text[1:]
        mask = np.arange(batch_tokens) < num_targets
        yield _rows(tokens.reshape(shape_BS), targets.reshape(shape_BS), mask.reshape(shape_BS))


def _rows(tokens_BS: np.ndarray, targets_BS: np.ndarray, mask_BS: np.ndarray) -> dict[str, np.ndarray]:
    num_sequences, sequence_length = tokens_BS.shape
    return {
        "tokens": tokens_BS.astype(np.int32),
        "targets": targets_BS.astype(np.int32),
        "mask": mask_BS,
        "positions": np.tile(np.arange(sequence_length, dtype=np.int32), (num_sequences, 1)),
    }


class Prefetcher(Generic[Result]):
    """Iterates over make(start), ..., make(stop - 1), computed ahead of time by one background thread.

    At most `depth` results wait or are being made. An exception in `make` reaches the consumer in its turn, after the
    results before it. Use it in a `with` block, or call close().
    """

    def __init__(self, make: Callable[[int], Result], start: int, stop: int, depth: int = 2):
        if depth < 1:
            raise ValueError(f"A prefetcher works at least one step ahead, not {depth}.")
        self._make, self._depth = make, depth
        self._results: deque[Result] = deque()
        self._error: BaseException | None = None
        self._finished = self._closed = False
        # Guards the four above; notified whenever one of them changes.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(range(start, stop),), name="prefetcher", daemon=True)
        self._thread.start()

    def _work(self, steps: range) -> None:
        error = None
        try:
            for step in steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._results) < self._depth)
                    if self._closed:
                        return
                result = self._make(step)
                with self._changed:
                    self._results.append(result)
                    self._changed.notify_all()
        except BaseException as caught:
            error = caught
        finally:
            with self._changed:
                self._error, self._finished = error, True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._finished or self._closed)
            if self._closed:
                raise StopIteration
            if self._results:
                self._changed.notify_all()
                return self._results.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Drop what is ready and stop the thread; returns when it has ended, after the `make` it may be in."""
        with self._changed:
            self._closed = True
            self._results.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetcher[Result]:
        return self

    def __exit__(self, *_) -> None:
        self.close()
