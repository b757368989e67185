"""What the quick run holds: tests that are there, and each law."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import durations
import outside
import pytest
import selection

CHECKOUT = Path(durations.FILE).parents[1]
QUICK_MARKERS = "not slow and not gpu and not launcher and not notebook and not nightly"
NAMED = re.compile(r"`tests/([\w/]+\.py)::(\w+)`")


def laws() -> dict[str, list[tuple[str, str]]]:
    """By law in CONTRIBUTING.md: (file, test) of the tests that hold it."""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## The laws")[2].partition("\n\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if NAMED.search(line)]
    return {row[1].strip(): NAMED.findall(row[2]) for row in rows}


@cache
def collected(markers: str, *files: str) -> dict[str, set[str]]:
    """Names of tests by file."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", markers]
    command += [f"tests/{file}" for file in files]
    environment = outside.environment(PYTEST_ADDOPTS="-o addopts=")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=CHECKOUT)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if line.startswith(("E ", "ERROR"))]
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        file, is_test, name = line.partition("::")
        if is_test:
            found.setdefault(file.removeprefix("tests/"), set()).add(name)
    return found


def quick_tests() -> dict[str, set[str]]:
    """Those in the files of QUICK and of the laws."""
    return collected(QUICK_MARKERS, *sorted({*selection.QUICK, *(file for held in laws().values() for file, _ in held)}))


def test_files_and_tests_that_are_named_are_there():
    quick, slow = quick_tests(), collected("slow", *selection.SLOW)
    assert selection.QUICK.keys() & selection.SLOW.keys() == set()
    for table, tests in ((selection.QUICK, quick), (selection.SLOW, slow)):
        for file, names in table.items():
            text = (durations.FILE.parent / file).read_text(encoding="utf-8")
            assert [entry for entry in names if f"def {entry.partition('[')[0]}(" not in text] == []
            # None: an extra that the whole file needs is not installed.
            if there := tests.get(file):
                assert [entry for entry in names if not any(selection.is_named(name, [entry]) for name in there)] == []
    assert all((durations.FILE.parent / file).exists() for file in selection.IN_EACH_RUN)


def test_what_security_says_is_held_by_tests_that_are_there():
    named = NAMED.findall((CHECKOUT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) >= 8
    tests = CHECKOUT / "tests"
    assert [name for file, name in named if f"def {name}(" not in (tests / file).read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("law", laws())
def test_a_case_of_each_law_is_quick(law):
    quick = quick_tests()
    assert any(name.partition("[")[0] == test for file, test in laws()[law] for name in quick.get(file, ()))


def test_a_name_stands_for_all_its_cases_and_a_beginning_for_some():
    assert selection.is_named("test_a[1-x]", ["test_a"])
    assert selection.is_named("test_a", ["test_a"])
    assert not selection.is_named("test_ab", ["test_a"])
    assert selection.is_named("test_a[1-x]", ["test_a[1-"])
    assert not selection.is_named("test_a[2-x]", ["test_a[1-"])


def test_each_longer_test_has_its_turn_and_no_two_commits_draw_alike():
    names = [f"test_a[{number}]" for number in range(300)]
    drawn = [{name for name in names if selection.is_of_this_run("test_a.py", name, 3, f"{seed:012x}")} for seed in range(40)]
    assert all(60 < len(part) < 140 for part in drawn)
    assert set.union(*drawn) == set(names)
    assert len({frozenset(part) for part in drawn}) == len(drawn)


def test_one_part_is_all_of_them():
    assert all(selection.is_of_this_run("test_a.py", f"test_a[{number}]", 1, "0") for number in range(20))


@pytest.mark.parametrize(
    ("markers", "share"), [("not slow and not gpu", 0.0), ("not gpu and not nightly", 0.25), ("not gpu", 1.0), ("", 1.0)]
)
def test_the_share_of_longer_tests_in_a_run(monkeypatch, markers, share):
    monkeypatch.setenv(selection.PARTS, "4")
    assert selection.longer_share(markers) == share
