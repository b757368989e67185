import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import NumberedDocuments

from jaxllm.config import ConfigError
from jaxllm.data import loader
from jaxllm.data.loader import PERIOD, PackedDocuments, SampleStream, ahead, apportion, document_order

S = 16
NAMES = ["tokens", "targets", "positions", "mask", "segments"]


def stream(*sources, seed=0, weights=None, sequence_length=S, packing="concat", masks=True, vocab_size=2**31):
    """A SampleStream of NumberedDocuments, given as such or as lists of lengths."""
    documents = [s if isinstance(s, NumberedDocuments) else NumberedDocuments(s) for s in sources]
    packed = [
        PackedDocuments(
            f"source{i}", d, document_order(np.arange(len(d.lengths)), seed, i), sequence_length, packing, masks, vocab_size
        )
        for i, d in enumerate(documents)
    ]
    return SampleStream(packed, weights or [1.0] * len(packed), seed)


def epoch(samples, number=0, source=0):
    """Sample numbers of one epoch of a stream with one source."""
    n = samples.sources[source].packing.num_samples
    return np.arange(number * n, (number + 1) * n)


# ------------------------------------------------------------------------------------------------------------------- laws


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    sequence_length=st.integers(1, 24),
    seed=st.integers(0, 2**31 - 1),
    hosts=st.integers(1, 5),
    batch=st.integers(1, 7),
    packing=st.sampled_from(["concat", "best_fit"]),
    masks=st.booleans(),
)
def test_every_token_of_every_document_appears_exactly_once_per_epoch(
    lengths, sequence_length, seed, hosts, batch, packing, masks
):
    """The samples do not depend on the number of hosts, nor on a restart after each batch."""
    documents = NumberedDocuments(lengths, first=1)
    masks = masks or packing == "best_fit"

    def make():
        return stream(documents, seed=seed, sequence_length=sequence_length, packing=packing, masks=masks)

    for number in (0, 3):
        ks = epoch(make(), number)
        read = []
        for first in range(0, len(ks), batch):
            global_batch = ks[first : first + batch]
            for host in range(hosts):
                rows = make().samples(global_batch[host::hosts])
                # Free space is filled with 0, which is not the id of any token here.
                read += rows["tokens"][rows["tokens"] > 0].tolist()
        assert sorted(read) == list(range(1, documents.total))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    sequence_length=st.integers(1, 24),
    seed=st.integers(0, 2**31 - 1),
    packing=st.sampled_from(["concat", "best_fit"]),
)
def test_targets_are_the_next_token_of_the_same_document(lengths, sequence_length, seed, packing):
    """Each token but the last of its document is the input of one target."""
    documents = NumberedDocuments(lengths)
    samples = stream(documents, seed=seed, sequence_length=sequence_length, packing=packing)
    rows = samples.samples(epoch(samples, 1))
    assert list(rows) == NAMES
    mask, segments, positions = rows["mask"], rows["segments"], rows["positions"]
    np.testing.assert_array_equal(rows["targets"][mask], rows["tokens"][mask] + 1)
    # Targets are missing only at the ends of documents and in free space.
    ends = rows["tokens"][(segments > 0) & ~mask]
    assert sorted(ends.tolist()) == sorted(documents.ends().tolist())
    assert not rows["tokens"][segments == 0].any()
    assert not rows["targets"][~mask].any()
    # Inside a segment ids and positions count up by one. A segment begins at position 0.
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    np.testing.assert_array_equal(np.diff(rows["tokens"])[same], 1)
    np.testing.assert_array_equal(np.diff(positions)[same], 1)
    begins = np.diff(segments, axis=1, prepend=0) != 0
    assert not positions[begins].any()


@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=20), sequence_length=st.integers(1, 24))
def test_without_masks_a_sequence_is_one_text(lengths, sequence_length):
    samples = stream(lengths, sequence_length=sequence_length, masks=False)
    rows = samples.samples(epoch(samples))
    assert list(rows) == NAMES[:-1]
    np.testing.assert_array_equal(rows["positions"], np.broadcast_to(np.arange(sequence_length), rows["tokens"].shape))
    # The target of each token in a row, except the last, is the next token.
    inner = rows["mask"][:, :-1] & rows["mask"][:, 1:]
    np.testing.assert_array_equal(rows["targets"][:, :-1][inner], rows["tokens"][:, 1:][inner])
    full = rows["mask"].sum(axis=1) >= sequence_length - 1
    assert full.sum() >= len(full) - 1


class EveryThird(NumberedDocuments):
    """Scores the tokens with an id divisible by three."""

    def scored(self, documents, starts, stops):
        return [ids % 3 == 0 for ids in self.read(documents, starts, stops)]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    sequence_length=st.integers(1, 24),
    packing=st.sampled_from(["concat", "best_fit"]),
    masks=st.booleans(),
)
def test_only_scored_targets_count(lengths, sequence_length, packing, masks):
    """The mask loses exactly the tokens that the source does not score. Everything else stays."""
    masks = masks or packing == "best_fit"
    every, third = (
        stream(kind(lengths, first=1), sequence_length=sequence_length, packing=packing, masks=masks)
        for kind in (NumberedDocuments, EveryThird)
    )
    every, third = every.samples(epoch(every, 1)), third.samples(epoch(third, 1))
    np.testing.assert_array_equal(third.pop("mask"), every.pop("mask") & (every["targets"] % 3 == 0))
    for name, array in every.items():
        np.testing.assert_array_equal(third[name], array)


def test_sample_k_depends_on_seed_and_k_alone():
    sources, ks = ([30, 5, 70, 20], [50, 9], [200]), np.arange(300)
    whole = stream(*sources, seed=7, weights=[3, 1, 2]).samples(ks)
    again = stream(*sources, seed=7, weights=[3, 1, 2])
    order = np.random.default_rng(1).permutation(ks)
    shuffled = again.samples(order)
    for name in NAMES:
        np.testing.assert_array_equal(shuffled[name], whole[name][order])
        np.testing.assert_array_equal(again.samples(ks[3::8])[name], whole[name][3::8])
        assert whole[name].shape == (300, S)
    assert [whole[name].dtype for name in NAMES] == [np.int32, np.int32, np.int32, np.bool_, np.int32]


def test_order_is_pinned():
    # A resumed run must keep its order on any numpy and Grain version: a change here breaks users' runs.
    one = stream([40, 100, 60], seed=1).samples(np.arange(26))["tokens"][:, 0].tolist()
    assert one == [
        *(174, 190, 110, 126, 94, 62, 158, 78, 142, 2, 46, 34, 18),
        *(52, 24, 100, 140, 164, 180, 8, 132, 148, 196, 84, 116, 68),
    ]
    two = stream([40, 100], NumberedDocuments([300], first=1000), seed=1).samples(np.arange(20))["tokens"][:, 0].tolist()
    assert two == [
        *(1072, 1271, 33, 1232, 58, 1257, 1191, 1234, 20, 1298),
        *(1029, 1256, 83, 1283, 1254, 1199, 1148, 1039, 1142, 1285),
    ]
    # Above 65,536 samples Grain's index_shuffle orders them.
    many = stream([10**6], seed=1, sequence_length=4).samples(np.arange(8))["tokens"][:, 0].tolist()
    assert many == [138726, 579606, 465450, 884434, 659166, 84586, 936594, 356350]


def test_seeds_and_epochs_differ():
    def order(seed, number):
        samples = stream([500, 800, 700], seed=seed)
        return tuple(samples.samples(epoch(samples, number))["tokens"][:, 0])

    runs = [order(seed, number) for seed in (0, 1, 2**31 - 1) for number in range(4)]
    assert len(set(runs)) == len(runs)
    # The cuts move too.
    assert len({frozenset(run) for run in runs}) > 6


def test_no_samples_is_an_empty_batch():
    for samples in (stream([100]), stream([100], [50])):
        assert samples.samples(np.arange(0))["tokens"].shape == (0, S)


def test_negative_samples_are_refused():
    with pytest.raises(ValueError, match=r"^Samples are numbered from 0, not -1\.$"):
        stream([100]).samples(np.array([-1]))


def test_samples_shared_by_threads_are_the_same():
    samples, ks = stream([300, 20, 7]), np.arange(400).reshape(8, 50)
    expected = stream([300, 20, 7]).samples(ks.ravel())["tokens"].reshape(8, 50, S)
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: samples.samples(ks[i])["tokens"]})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(np.stack([results[i] for i in range(8)]), expected)


@pytest.mark.parametrize(("vocab_size", "ids"), [(100, [100, 105]), (106, [-1])])
def test_ids_that_the_vocabulary_lacks_are_refused_by_source(vocab_size, ids):
    class Strange(NumberedDocuments):
        def read(self, documents, starts, stops):
            return [np.where(text == 50, ids[0], text) for text in super().read(documents, starts, stops)]

    samples = stream(Strange([90]), vocab_size=vocab_size)
    place = r"\(token 50 of document 0 of numbers\)"
    with pytest.raises(
        ConfigError, match=rf"^Source source0 holds the token id {ids[0]} and model\.vocab_size={vocab_size} {place}: "
    ):
        samples.samples(epoch(samples))


# --------------------------------------------------------------------------------------------------------------- mixtures


@settings(deadline=None, max_examples=10)
@given(
    weights=st.lists(st.floats(0.05, 10), min_size=2, max_size=5),
    seed=st.integers(0, 2**31 - 1),
    period=st.integers(0, 10**6),
)
def test_a_mixture_keeps_its_weights_in_every_period_and_reads_each_source_in_turn(weights, seed, period):
    samples = stream(*([1000] for _ in weights), weights=weights, seed=seed)
    # Within a period sources alternate at random. Each source gives its own next samples, each once.
    places = [samples.locate(period * PERIOD + p) for p in range(PERIOD)]
    counts = np.bincount([source for source, *_ in places], minlength=len(weights))
    np.testing.assert_allclose(counts / PERIOD, np.array(weights) / sum(weights), atol=1 / PERIOD)
    assert counts.tolist() == samples.counts
    for source, count in enumerate(samples.counts):
        n = samples.sources[source].packing.num_samples
        read = sorted(sample for s, sample, _ in places if s == source)
        # Consecutive numbers of the source: complete epochs, and parts of two.
        numbers = np.bincount(read, minlength=n)
        assert numbers.max() - numbers.min() <= 2
        assert len(read) == count


def test_a_mixture_reads_every_token_of_an_epoch_once():
    """The epoch of the smallest source ends with a period, at 2048 samples. In a mixture it is read completely."""
    first, second = NumberedDocuments([2048 * S]), NumberedDocuments([5000, 300], first=10**6)
    samples = stream(first, second, seed=3)
    rows = samples.samples(np.arange(PERIOD))
    tokens = rows["tokens"][(rows["tokens"] < 10**6) & (rows["segments"] > 0)]
    assert sorted(tokens.tolist()) == list(range(first.total))


def test_a_mixture_of_many_sources_makes_each_permutation_once(monkeypatch):
    made = []
    permutation = loader.permutation
    monkeypatch.setattr(loader, "permutation", lambda size, word: made.append(size) or permutation(size, word))
    samples = stream(*[[50 * S]] * 150)
    made.clear()
    for k in range(PERIOD):
        samples.locate(k)
    # One word for the first period of the mixture, and those of the first epoch of each source.
    assert sorted(made) == [50] * 150 + [PERIOD]


def test_sources_of_a_mixture_are_shuffled_apart():
    samples = stream([500, 700], [500, 700], seed=0)
    tokens = [samples.sources[i].rows([samples.locate(k)[1:] for k in range(400) if samples.locate(k)[0] == i]) for i in (0, 1)]
    length = min(len(rows["tokens"]) for rows in tokens)
    assert (tokens[0]["tokens"][:length, 0] != tokens[1]["tokens"][:length, 0]).any()


def test_epochs_are_those_read():
    samples = stream([160], [3200], weights=[1, 3])
    assert samples.epochs(0) == {"source0": 0, "source1": 0}
    assert samples.epochs(PERIOD) == {"source0": 1024 / 10, "source1": 3072 / 200}


@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=20))
def test_shares_add_up_and_are_within_one_of_exact(weights):
    counts = apportion(weights, PERIOD)
    assert sum(counts) == PERIOD
    assert (np.abs(np.array(counts) - np.array(weights) / sum(weights) * PERIOD) < 1).all()


def test_a_weight_below_one_sample_in_a_period_is_refused():
    with pytest.raises(ConfigError, match=r"^The weight of source1 in data\.mixture is less than 1/4096: raise it or leave"):
        stream([100], [100], weights=[1, 1e-5])


# --------------------------------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_held_out_samples_in_order_hold_every_token_once(packing):
    documents = NumberedDocuments([40, 3, 16, 75])
    packed = PackedDocuments("text", documents, np.array([0, 2, 3]), S, packing, True, 1000)
    n = packed.packing.num_samples
    rows = packed.in_order(range(n + 2))
    tokens = rows["tokens"][rows["segments"] > 0]
    assert sorted(tokens.tolist()) == [*range(40), *range(43, 134)]
    if packing == "concat":
        assert (np.diff(tokens) > 0).all()
    assert not rows["mask"][n:].any()
    assert not rows["segments"][n:].any()


# ------------------------------------------------------------------------------------------------------------------ ahead


def test_ahead_yields_in_order_and_works_two_ahead():
    made = []

    def make(step):
        made.append(step)
        return step * step

    results = ahead(make, 5)
    assert [next(results) for _ in range(20)] == [step * step for step in range(5, 25)]
    deadline = time.monotonic() + 20
    while len(made) < 22 and time.monotonic() < deadline:
        time.sleep(0.01)
    # Further errors would come now.
    time.sleep(0.1)
    assert made == list(range(5, 27))
    results.close()


def test_ahead_raises_in_turn_what_make_raised():
    def make(step):
        if step == 2:
            raise ConfigError("the disk is gone")
        return step

    results = ahead(make, 0)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ConfigError) as error:
        next(results)
    assert str(error.value) == "the disk is gone"
    results.close()
