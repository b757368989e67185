import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxllm.run.evaluation import ngram_baseline


def brute_force(train, held_out, order):
    """The same formula with dictionaries, one byte at a time."""
    followers = defaultdict(Counter)
    for i in range(len(train)):
        for n in range(min(order, i + 1)):
            followers[train[i - n : i]][train[i]] += 1

    def probability(context, byte):
        lower = probability(context[1:], byte) if context else 1 / 256
        seen = followers.get(context)
        if not seen:
            return lower
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))

    contexts = [held_out[max(0, i - order + 1) : i] for i in range(len(held_out))]
    for context in contexts[:3]:
        assert math.isclose(sum(probability(context, byte) for byte in range(256)), 1)
    return -sum(math.log(probability(c, b)) for c, b in zip(contexts, held_out, strict=True)) / len(held_out)


def as_bytes(text):
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (b"the cat sat on the mat; the cat ate the rat\0" * 3, b"the bat sat on the cat\0zebra"),
        (b"abracadabra", b"a"),
        (b"abracadabra", b"ba"),
        (b"ab", b"zzzz\xff"),
        (b"a", b"aaa"),
        (b"", b"abc"),
    ],
)
def test_equals_brute_force(train, held_out, order):
    assert ngram_baseline(as_bytes(train), as_bytes(held_out), order) == pytest.approx(
        brute_force(train, held_out, order), rel=1e-12
    )


@pytest.mark.parametrize("order", [1, 2])
def test_random_bytes_cost_log_256(order):
    train, held_out = np.random.default_rng(0).integers(0, 256, (2, 2_000_000), np.uint8)
    # A bigram model learns its 65,536 frequencies from 30 draws each: its loss is about 1/60 nat too low.
    assert ngram_baseline(train, held_out, order) == pytest.approx(math.log(256), abs=0.02)


def test_a_longer_context_pays_where_there_is_structure():
    words = np.random.default_rng(0).choice(["for ", "in ", "range", "(n):\n", "return "], 20_000)
    text = as_bytes("".join(words).encode())
    losses = [ngram_baseline(text[:60_000], text[60_000:], order) for order in (1, 2, 3)]
    assert losses[0] > losses[1] + 0.5
    assert losses[1] > losses[2] + 0.1


def test_a_sequence_without_choice_costs_almost_nothing():
    text = as_bytes(b"abcdefgh" * 5_000)
    assert ngram_baseline(text, text, 2) < 0.001


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match=r"^There is no held-out text to score: raise data\.held_out_fraction\.$"):
        ngram_baseline(as_bytes(b"abc"), as_bytes(b""), 2)
