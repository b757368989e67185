"""N-gram baseline: the loss that byte counts alone achieve. A useful byte-level model must do better."""

from __future__ import annotations

import numpy as np

# Counts are dense arrays of 256**order 8-byte integers: 128 MiB for trigrams, 32 GiB for order 4.
_MAX_ORDER = 3


def ngram_baseline(train: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Held-out cross entropy of an n-gram model of bytes, in nats per byte.

    Interpolated Witten-Bell smoothing (Witten and Bell, 1991; Chen and Goodman, 1998, section 2.5):

        p(b | h) = (count(h b) + distinct(h) p(b | h')) / (count(h) + distinct(h))

    with distinct(h) the number of different bytes seen after h, and h' the context shortened by one byte. The single-byte
    model backs off to 1/256. This is a proper distribution without parameters, so no held-out text is needed to tune it.

    Args:
      train: uint8 [bytes], the text that is counted.
      held_out: uint8 [bytes], at least one byte. All bytes are scored; the first order - 1 of them have a shorter context.
      order: length of an n-gram in bytes: 1, 2 (bigram) or 3 (trigram).

    Raises:
      ValueError: `order` is not 1, 2 or 3, or `held_out` is empty.
    """
    if not 1 <= order <= _MAX_ORDER:
        raise ValueError(f"The order of an n-gram baseline is 1 to {_MAX_ORDER}, not {order}.")
    if not len(held_out):
        raise ValueError("There is no held-out text to score: raise data.held_out_fraction.")
    probability = np.full(len(held_out), 1 / 256)
    for n in range(1, order + 1):
        counts = np.bincount(_ngrams(train, n), minlength=256**n).reshape(-1, 256)
        total, distinct = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
        ngram = _ngrams(held_out, n)
        context = ngram // 256
        lower = probability[n - 1 :]
        # For a context that was never seen, keep the probability of the shorter context.
        np.divide(
            counts.reshape(-1)[ngram] + distinct[context] * lower,
            total[context] + distinct[context],
            out=lower,
            where=total[context] > 0,
        )
    return float(-np.log(probability).mean())


def _ngrams(text: np.ndarray, n: int) -> np.ndarray:
    """Encodes each run of n bytes as one base-256 number: int64 [bytes - n + 1]."""
    length = max(len(text) - n + 1, 0)
    codes = np.zeros(length, np.int64)
    for i in range(n):
        codes = codes * 256 + text[i : i + length]
    return codes
