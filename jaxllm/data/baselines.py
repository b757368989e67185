"""What counting alone achieves: the loss a byte-level model has to beat before it has learnt anything interesting."""

from __future__ import annotations

import numpy as np

# Counts are dense, 256**order numbers of 8 bytes: 128 MiB for trigrams, 32 GiB for the next.
_MAX_ORDER = 3


def ngram_baseline(train: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Held-out cross entropy of an n-gram model of bytes, in nats per byte.

    Interpolated Witten-Bell smoothing (Witten and Bell, 1991; Chen and Goodman, 1998, section 2.5):

        p(b | h) = (count(h b) + distinct(h) p(b | h')) / (count(h) + distinct(h))

    with distinct(h) the number of different bytes seen after h, h' the context one byte shorter, and 1/256 below the
    single byte. Chosen because it is a proper distribution with nothing to tune: no held-out text is spent on it.

    Args:
      train: uint8 [bytes], counted.
      held_out: uint8 [bytes], at least one; all are scored, the first order - 1 of them with the context there is.
      order: bytes in an n-gram: 1, 2 (bigram) or 3 (trigram).

    Raises:
      ValueError: another order, or nothing to score.
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
        # A context never seen says nothing: the shorter one's probability stands.
        np.divide(
            counts.reshape(-1)[ngram] + distinct[context] * lower,
            total[context] + distinct[context],
            out=lower,
            where=total[context] > 0,
        )
    return float(-np.log(probability).mean())


def _ngrams(text: np.ndarray, n: int) -> np.ndarray:
    """Each run of n bytes as one number, base 256: int64 [bytes - n + 1]."""
    length = max(len(text) - n + 1, 0)
    codes = np.zeros(length, np.int64)
    for i in range(n):
        codes = codes * 256 + text[i : i + length]
    return codes
