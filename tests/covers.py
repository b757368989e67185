"""Small subsets of a full product: a pairwise cover of its values, and some more cases by a seed."""

import itertools
import os
import random
import subprocess
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)
SEED = "JAXLLM_TEST_SEED"
DRAWN = 8


def flat(case) -> tuple:
    """The values of a case. Values inside a tuple, such as a mesh, count one by one."""
    return tuple(v for value in case for v in (value if isinstance(value, tuple) else (value,)))


def held(cases: Iterable[Case], size: int, values: Callable[[Case], tuple] = flat) -> set:
    """All groups of `size` values, each with its position, that occur together in a case."""
    return {group for case in cases for group in itertools.combinations(enumerate(values(case)), size)}


def cover(
    cases: Sequence[Case],
    size: int,
    *,
    start: Sequence[Case] = (),
    values: Callable[[Case], tuple] = flat,
    most: int | None = None,
) -> list[Case]:
    """`start`, then greedily the cases with the most missing groups of `size` values, until no group is missing or there are
    `most` cases."""
    groups = {case: held([case], size, values) for case in cases}
    missing = held(cases, size, values) - held(start, size, values)
    chosen = list(start)
    while missing and len(chosen) - len(start) != most:
        chosen.append(max(cases, key=lambda case: len(groups[case] & missing)))
        missing -= groups[chosen[-1]]
    return chosen


def pairwise(cases: Sequence[Case], **options) -> list[Case]:
    """A pairwise cover: every two values that occur together in a case also do so in a chosen case."""
    return cover(cases, 2, **options)


def with_triples(cases: Sequence[Case], pairs: Sequence[Case], count: int = 3) -> list[Case]:
    """A pairwise cover, and the few cases with the most triples that it lacks."""
    return cover(cases, 3, start=pairs, most=count)


def drawn(cases: Sequence[Case], beside: Sequence[Case], count: int = DRAWN) -> list[Case]:
    """A few of the other cases, different ones for each commit."""
    rest = [case for case in cases if case not in beside]
    return random.Random(seed()).sample(rest, min(count, len(rest)))


@cache
def seed() -> str:
    """The seed: the hash of the commit, unless the environment sets one."""
    if os.environ.get(SEED):
        return os.environ[SEED]
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return done.stdout.strip()
