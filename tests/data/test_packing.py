import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.data import packing
from jaxllm.data.packing import BestFit, Concat, best_fit

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)
PACKINGS = pytest.mark.parametrize("packed", [Concat, BestFit])


def slots(pieces):
    """(document, token) of all tokens in a sample, in order."""
    return [(d, t) for d, a, b in zip(*map(list, pieces), strict=True) for t in range(a, b)]


@PACKINGS
@given(lengths=LENGTHS, sequence_length=st.integers(1, 24), rotation=st.integers(0, 100), order_seed=st.integers(0, 5))
def test_every_token_of_every_document_is_in_one_sample(packed, lengths, sequence_length, rotation, order_seed):
    order = np.random.default_rng(order_seed).permutation(len(lengths))
    found = packed(np.array(lengths), order, sequence_length)
    samples = [slots(found.pieces(n, rotation % found.num_rotations)) for n in range(found.num_samples)]
    assert sorted(slot for sample in samples for slot in sample) == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    assert all(1 <= len(sample) <= sequence_length for sample in samples)
    assert found.num_tokens == sum(lengths)


@PACKINGS
@given(lengths=LENGTHS, chosen=st.sets(st.integers(0, 29)), sequence_length=st.integers(1, 24))
def test_only_the_documents_asked_for_are_packed(packed, lengths, chosen, sequence_length):
    order = np.array([d for d in chosen if d < len(lengths)] or [0])
    found = packed(np.array(lengths), order, sequence_length)
    documents = {d for n in range(found.num_samples) for d in found.pieces(n).documents.tolist()}
    assert documents == {d for d in order.tolist() if lengths[d]}


@given(lengths=LENGTHS, sequence_length=st.integers(1, 24), rotation=st.integers(0, 100))
def test_concat_fills_every_sample_but_the_last(lengths, sequence_length, rotation):
    found = Concat(np.array(lengths), np.arange(len(lengths)), sequence_length)
    sizes = [len(slots(found.pieces(n, rotation % found.num_rotations))) for n in range(found.num_samples)]
    assert all(size == sequence_length for size in sizes[:-1])


@given(lengths=LENGTHS, sequence_length=st.integers(2, 24))
def test_concat_rotated_is_the_same_text_begun_elsewhere(lengths, sequence_length):
    found = Concat(np.array(lengths), np.arange(len(lengths)), sequence_length)

    def text(rotation):
        return [slot for n in range(found.num_samples) for slot in slots(found.pieces(n, rotation))]

    for rotation in range(found.num_rotations):
        assert text(rotation) == text(0)[rotation:] + text(0)[:rotation]


@given(lengths=LENGTHS, sequence_length=st.integers(1, 24), window=st.integers(1, 8))
def test_best_fit_cuts_no_document_that_fits(lengths, sequence_length, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BEST_FIT_WINDOW", window)
        found = BestFit(np.array(lengths), np.arange(len(lengths)), sequence_length)
    for n in range(found.num_samples):
        for d, start, stop in zip(*found.pieces(n), strict=True):
            if lengths[d] <= sequence_length:
                assert (start, stop) == (0, lengths[d])
            else:
                assert start % sequence_length == 0
                assert stop == min(start + sequence_length, lengths[d])
        # All documents of a sample are from one window.
        assert len({d // window for d in found.pieces(n).documents.tolist()}) == 1


@PACKINGS
@given(lengths=LENGTHS, sequence_length=st.integers(1, 24))
def test_no_sample_has_more_pieces_than_said(packed, lengths, sequence_length):
    """Two more than the fullest sample has, at most: free space, and a place where no sample begins."""
    found = packed(np.array(lengths), np.arange(len(lengths)), sequence_length)
    samples = [found.pieces(n, r) for r in range(found.num_rotations) for n in range(found.num_samples)]
    sizes = [sum(p.stops - p.starts) for p in samples]
    counts = [len(p.documents) + (size < sequence_length) for p, size in zip(samples, sizes, strict=True)]
    assert max(counts, default=1) <= found.most_pieces <= max(counts, default=0) + 2


@given(
    sizes=st.lists(st.integers(1, 20), max_size=60).map(lambda sizes: sorted(sizes, reverse=True)),
    word_bits=st.sampled_from([1, 2, 9]),
)
def test_best_fit_takes_the_fullest_bin_with_room(sizes, word_bits):
    """Compares with the definition: a search through all bins. Equally full bins are equivalent."""
    with pytest.MonkeyPatch.context() as patch:
        # Free sizes that need several words, as with longer sequences.
        patch.setattr(packing, "_WORD_BITS", word_bits)
        bins, count = best_fit(sizes, 20)
    room, choices = [], []
    for size in sizes:
        fitting = [r for r in room if r >= size]
        choices.append(min(fitting, default=20))
        if fitting:
            room[room.index(min(fitting))] -= size
        else:
            room.append(20 - size)
    left = dict.fromkeys(range(count), 20)
    for size, bin, choice in zip(sizes, bins.tolist(), choices, strict=True):
        assert left[bin] == choice
        left[bin] -= size
    assert sorted(left.values()) == sorted(room)


def test_best_fit_packs_real_lengths_tightly():
    """Log-normal lengths, similar to web pages. The sum of lengths is a lower bound for the number of sequences."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 5000).astype(int) + 1
    found = BestFit(lengths, np.arange(5000), 2048)
    assert found.num_samples < 1.002 * lengths.sum() / 2048 + 1


def test_best_fit_bins_are_those_of_a_search_in_one_number():
    """The samples of a run must not depend on the algorithm that searches the bins."""
    sizes = np.sort(np.random.default_rng(0).integers(1, 20_000, 3000))[::-1].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_WORD_BITS", 20)
        one_word = best_fit(sizes, 20_000)
    bins, count = best_fit(sizes, 20_000)
    assert (bins == one_word[0]).all()
    assert count == one_word[1]
