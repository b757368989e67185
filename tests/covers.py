"""Small subsets of a full product: every two values that occur together do so again, and some cases more by a seed."""

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
    """A case's values; those of a tuple in it, such as a mesh, count one by one."""
    return tuple(v for value in case for v in (value if isinstance(value, tuple) else (value,)))


def held(cases: Iterable[Case], size: int, values: Callable[[Case], tuple] = flat) -> set:
    """Every `size` values, each with its place, that occur together in a case."""
    return {group for case in cases for group in itertools.combinations(enumerate(values(case)), size)}


def cover(
    cases: Sequence[Case],
    size: int,
    *,
    start: Sequence[Case] = (),
    values: Callable[[Case], tuple] = flat,
    most: int | None = None,
) -> list[Case]:
    """`start` and, greedily, the cases that hold most groups of `size` values not seen yet: until none is missing, or `most` of
    them."""
    groups = {case: held([case], size, values) for case in cases}
    missing = held(cases, size, values) - held(start, size, values)
    chosen = list(start)
    while missing and len(chosen) - len(start) != most:
        chosen.append(max(cases, key=lambda case: len(groups[case] & missing)))
        missing -= groups[chosen[-1]]
    return chosen


def pairwise(cases: Sequence[Case], **options) -> list[Case]:
    """Every two values that occur together do so again."""
    return cover(cases, 2, **options)


def with_triples(cases: Sequence[Case], pairs: Sequence[Case], count: int = 3) -> list[Case]:
    """A pairwise cover, and the few cases that hold most triples that it lacks."""
    return cover(cases, 3, start=pairs, most=count)


def drawn(cases: Sequence[Case], beside: Sequence[Case], count: int = DRAWN) -> list[Case]:
    """Some of the rest, other ones for each commit."""
    rest = [case for case in cases if case not in beside]
    return random.Random(seed()).sample(rest, min(count, len(rest)))


@cache
def seed() -> str:
    """The commit's hash, unless the environment has another."""
    if os.environ.get(SEED):
        return os.environ[SEED]
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return done.stdout.strip()
