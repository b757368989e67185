"""The covers of full products, compared with a count."""

import itertools

import covers
import pytest

PRODUCT = list(itertools.product((0, 1, 2, 3), [(1, 1), (2, 1), (4, 2), (2, 4)], "abc", (False, True)))


def pairs(case):
    level, (data, tensor), letter, flag = case
    return set(itertools.combinations([("level", level), ("data", data), ("tensor", tensor), letter, flag], 2))


def test_a_pairwise_cover_holds_every_two_values_in_few_cases():
    chosen = covers.pairwise(PRODUCT)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, PRODUCT))
    # At least the product of the two largest factors: levels and letters.
    assert 12 <= len(chosen) == len(set(chosen)) <= 14


def test_a_cover_begins_with_the_cases_it_is_given():
    start = PRODUCT[5:8]
    chosen = covers.pairwise(PRODUCT, start=start)
    assert chosen[:3] == start
    assert covers.held(chosen, 2) == covers.held(PRODUCT, 2)


def test_values_may_be_coarser_than_the_cases():
    chosen = covers.pairwise(PRODUCT, values=lambda case: (case[0] > 1, case[2]))
    assert len(chosen) == 6


def test_triples_come_after_the_pairs():
    chosen = covers.pairwise(PRODUCT)
    more = covers.with_triples(PRODUCT, chosen)
    assert more[: len(chosen)] == chosen
    assert len(more) == len(chosen) + 3
    assert len(covers.held(more, 3)) > len(covers.held(chosen, 3))


def test_the_draw_is_of_its_seed_and_of_the_rest(monkeypatch):
    covers.seed.cache_clear()
    monkeypatch.setenv(covers.SEED, "one")
    chosen = covers.pairwise(PRODUCT)
    first = covers.drawn(PRODUCT, chosen)
    assert covers.drawn(PRODUCT, chosen) == first
    assert len(set(first)) == 8
    assert not set(first) & set(chosen)
    covers.seed.cache_clear()
    monkeypatch.setenv(covers.SEED, "two")
    assert covers.drawn(PRODUCT, chosen) != first
    assert covers.drawn(PRODUCT, PRODUCT) == []
    covers.seed.cache_clear()


@pytest.mark.parametrize("found", [True, False])
def test_without_git_the_seed_is_fixed(monkeypatch, tmp_path, found):
    covers.seed.cache_clear()
    monkeypatch.delenv(covers.SEED, raising=False)
    if not found:
        monkeypatch.setattr(covers, "__file__", str(tmp_path / "covers.py"))
        assert covers.seed() == "0"
    else:
        assert len(covers.seed()) == 12 or covers.seed() == "0"
    covers.seed.cache_clear()
