import threading
import time

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data.loader import Prefetcher, WindowLoader, held_out_batches, num_held_out_batches

NAMES = ["tokens", "targets", "mask", "positions"]
S = 16


def counting(length):
    """A stream in which every token says where it stands."""
    return np.arange(length, dtype=np.uint16)


@pytest.mark.parametrize("length", [2 * S, 2 * S + 1, 20 * S - 1, 20 * S, 500])
def test_an_epoch_visits_every_window_of_its_grid_once(length):
    loader = WindowLoader(counting(length), S, seed=3)
    n = loader.num_windows
    for epoch in range(3):
        starts = loader.samples(np.arange(epoch * n, (epoch + 1) * n))["tokens"][:, 0]
        np.testing.assert_array_equal(np.sort(starts), starts.min() + S * np.arange(n))


def test_every_token_is_reached_in_some_epoch():
    stream = counting(5 * S + 7)
    loader = WindowLoader(stream, S, seed=0)
    rows = loader.samples(np.arange(300 * loader.num_windows))
    assert set(rows["tokens"].ravel()) == set(stream[:-1])
    assert set(rows["targets"].ravel()) == set(stream[1:])


def test_rows_are_consecutive_text_with_targets_one_ahead():
    rows = WindowLoader(counting(999), S, seed=5).samples(np.arange(40))
    assert list(rows) == NAMES
    np.testing.assert_array_equal(rows["targets"], rows["tokens"] + 1)
    np.testing.assert_array_equal(rows["tokens"], rows["tokens"][:, :1] + np.arange(S))
    np.testing.assert_array_equal(rows["positions"], np.broadcast_to(np.arange(S), (40, S)))
    assert rows["mask"].all()
    assert [rows[name].dtype for name in NAMES] == [np.int32, np.int32, np.bool_, np.int32]
    assert {rows[name].shape for name in NAMES} == {(40, S)}


def test_sample_k_depends_on_seed_and_k_alone():
    stream = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    ks = np.arange(400)  # more than six epochs, more than the loader remembers
    whole = WindowLoader(stream, S, seed=7).samples(ks)
    loader = WindowLoader(stream, S, seed=7)
    order = np.random.default_rng(1).permutation(ks)
    shuffled = loader.samples(order)
    for name in NAMES:
        np.testing.assert_array_equal(shuffled[name], whole[name][order])
        np.testing.assert_array_equal(loader.samples(ks[3::8])[name], whole[name][3::8])
    for k in (399, 0, 61, 62, 63):
        sample = loader.sample(k)
        for name in NAMES:
            np.testing.assert_array_equal(sample[name], whole[name][k])


def test_order_is_pinned():
    # A resumed run must go on with the order it began with, on any numpy: a change here breaks users' runs.
    starts = WindowLoader(counting(200), S, seed=1).samples(np.arange(22))["tokens"][:, 0]
    epoch_0 = [55, 87, 39, 151, 119, 167, 135, 103, 183, 23, 71]
    epoch_1 = [149, 85, 165, 69, 37, 53, 133, 101, 117, 21, 5]
    assert starts.tolist() == epoch_0 + epoch_1


def test_seeds_and_epochs_differ():
    def starts(seed, epoch):
        loader = WindowLoader(counting(2000), S, seed)
        n = loader.num_windows
        return tuple(loader.samples(np.arange(epoch * n, (epoch + 1) * n))["tokens"][:, 0])

    runs = [starts(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in range(4)]
    assert len(set(runs)) == len(runs)
    assert len({min(run) for run in runs}) > 6  # the grid moves too


def test_no_samples_is_an_empty_batch():
    assert WindowLoader(counting(100), S, 0).samples(np.arange(0))["tokens"].shape == (0, S)


def test_samples_shared_by_threads_are_the_same():
    stream, ks = counting(300), np.arange(400).reshape(8, 50)
    expected = WindowLoader(stream, S, 0).samples(ks.ravel())["tokens"].reshape(8, 50, S)
    loader, results = WindowLoader(stream, S, 0), {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: loader.samples(ks[i])["tokens"]})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(np.stack([results[i] for i in range(8)]), expected)


def test_too_short_a_text_is_refused_with_a_length_that_works():
    with pytest.raises(
        ConfigError,
        match=r"^The training text has 31 tokens, and train\.sequence_length=16 needs at least 32: "
        r"give more text or use sequences of at most 15\.$",
    ):
        WindowLoader(counting(31), 16, 0)
    assert WindowLoader(counting(31), 15, 0).num_windows == 1


def test_negative_samples_are_refused():
    with pytest.raises(ValueError, match=r"^Samples are numbered from 0, not -1\.$"):
        WindowLoader(counting(100), S, 0).sample(-1)


@pytest.mark.parametrize("length", [2, 3, S, S + 1, S + 2, 3 * S, 3 * S + 1, 3 * S + 2, 100])
def test_held_out_batches_score_each_token_but_the_first_once(length):
    batches = list(held_out_batches(counting(length) + 1, S, 3))
    assert len(batches) == num_held_out_batches(counting(length), S, 3)
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in NAMES}
    mask = rows["mask"]
    np.testing.assert_array_equal(rows["targets"][mask], np.arange(2, length + 1))
    np.testing.assert_array_equal(rows["tokens"][mask], np.arange(1, length))
    assert not rows["tokens"][~mask].any()
    assert not rows["targets"][~mask].any()
    for batch in batches:
        assert list(batch) == NAMES
        assert {batch[name].shape for name in NAMES} == {(3, S)}
        assert [batch[name].dtype for name in NAMES] == [np.int32, np.int32, np.bool_, np.int32]
        assert batch["mask"].any()
        np.testing.assert_array_equal(batch["positions"], np.broadcast_to(np.arange(S), (3, S)))


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_to_score_is_no_batch(length):
    assert num_held_out_batches(counting(length), S, 3) == 0
    assert list(held_out_batches(counting(length), S, 3)) == []


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_prefetcher_yields_in_order(depth):
    with Prefetcher(lambda step: step * step, 5, 25, depth) as results:
        assert list(results) == [step * step for step in range(5, 25)]
        assert list(results) == []


def test_prefetcher_works_depth_ahead_and_no_further():
    made, third = [], threading.Event()

    def make(step):
        made.append(step)
        if len(made) == 3:
            third.set()
        return step

    with Prefetcher(make, 0, 100, depth=3) as results:
        assert third.wait(5)
        time.sleep(0.05)
        assert made == [0, 1, 2]
        third.clear()
        assert next(results) == 0
        while len(made) < 4:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_prefetcher_raises_in_turn_what_make_raised():
    def make(step):
        if step == 2:
            raise OSError("the disk is gone")
        return step

    with Prefetcher(make, 0, 10, depth=5) as results:
        assert [next(results), next(results)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match=r"^the disk is gone$"):
                next(results)


def test_closing_stops_a_thread_that_waits_for_room():
    results = Prefetcher(lambda step: step, 0, 10**9, depth=2)
    assert next(results) == 0
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 1
    assert not results._thread.is_alive()
    assert list(results) == []
    results.close()


def test_closing_wakes_a_consumer_that_waits():
    busy, release, seen = threading.Event(), threading.Event(), []

    def make(step):
        busy.set()
        release.wait(5)

    results = Prefetcher(make, 0, 10)
    consumer = threading.Thread(target=lambda: seen.extend(results))
    consumer.start()
    assert busy.wait(5)
    closer = threading.Thread(target=results.close)
    closer.start()
    consumer.join(5)
    assert not consumer.is_alive()
    release.set()
    closer.join(5)
    assert not closer.is_alive()
    assert seen == []


def test_prefetcher_thread_is_a_daemon():
    with Prefetcher(lambda step: step, 0, 1) as results:
        assert results._thread.daemon


def test_prefetcher_refuses_depth_zero():
    with pytest.raises(ValueError, match=r"^A prefetcher works at least one step ahead, not 0\.$"):
        Prefetcher(lambda step: step, 0, 1, depth=0)
