"""Recorded durations of the test files, and the CPU time of a quick test.

pytest --record-durations     writes durations.json: seconds of each file that ran; the others keep theirs

The quick tests of a file and its longer ones have an entry each, because a quick run takes only the first.

A quick test that takes long is named at the end of a run. It fails only where JAXLLM_TEST_TIME_LIMIT sets a limit, as .ci/run
does: a slow machine, or one that has compiled nothing yet, is no fault of the code.
"""

import json
import os
import resource
import time
from collections import Counter
from pathlib import Path

import covers
import pytest
import selection

FILE = Path(__file__).with_suffix(".json")
LIMIT = "JAXLLM_TEST_TIME_LIMIT"
NAMED_S = 30.0
"""CPU seconds above which a quick test is named: 15 s of both cores of a small machine. Other work of the machine changes them
by up to a factor of two (shared caches and cores), and an empty compilation cache by more."""
PROPERTY = "cpu_s"
OF_LONGER = " (longer)"
"""After the name of a file in durations.json: the seconds of its tests that a quick run leaves out."""
UNKNOWN_S = 30.0


def recorded() -> dict[str, float]:
    """Seconds by entry: a file from the folder of tests, or that with OF_LONGER."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def expected(longer_share: float) -> dict[str, float]:
    """Seconds by file, for a run that takes this part of the longer tests."""
    seconds: Counter[str] = Counter()
    for entry, taken_s in recorded().items():
        is_longer = entry.endswith(OF_LONGER)
        seconds[entry.removesuffix(OF_LONGER)] += taken_s * longer_share if is_longer else taken_s
    return dict(seconds)


def name_of(path: Path) -> str:
    return path.relative_to(FILE.parent).as_posix()


def file_of(entry: str) -> Path:
    return FILE.parent / entry.removesuffix(OF_LONGER)


def cpu_s() -> float:
    """CPU seconds of this process and of its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def too_long(taken_s: float, limit_s: float | None) -> str | None:
    """The message for a quick test above the limit of CPU time, else None. None means no limit."""
    if limit_s is None or taken_s <= limit_s:
        return None
    return (
        f"This test took {taken_s:.0f} s of CPU time, and a quick one may take {limit_s:g}: make it smaller, or mark it slow "
        f"(pytest.mark.slow; CONTRIBUTING.md). {LIMIT} sets another limit; without it there is none."
    )


class Durations:
    """A pytest plugin. With xdist, workers apply the limit, and the main process does the rest, because it has all reports."""

    def __init__(self, config: pytest.Config):
        self._root = config.rootpath
        self._record = config.getoption("record_durations") and not hasattr(config, "workerinput")
        self._longer_share = selection.longer_share(config.getoption("markexpr"))
        limit = os.environ.get(LIMIT)
        # 0 means no limit too.
        self._limit_s = float(limit or 0) or None
        self._taken_s: Counter[str] = Counter()
        self._long: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Long files first. Two processes run one file at a time (launch/test.sh), so a long last file would leave one idle."""
        known = expected(self._longer_share)
        items.sort(key=lambda item: -known.get(name_of(item.path), UNKNOWN_S))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        before_s = cpu_s()
        result = yield
        if not any(item.get_closest_marker(name) for name in selection.LONGER):
            taken_s = cpu_s() - before_s
            if taken_s > NAMED_S:
                item.user_properties.append((PROPERTY, taken_s))
            if complaint := too_long(taken_s, self._limit_s):
                pytest.fail(complaint, pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = name_of(self._root / report.nodeid.partition("::")[0])
        is_longer = any(mark in report.keywords for mark in selection.LONGER)
        self._taken_s[f"{name}{OF_LONGER}" if is_longer else name] += report.duration
        if report.when == "call" and PROPERTY in (properties := dict(report.user_properties)):
            self._long[report.nodeid] = properties[PROPERTY]

    def pytest_sessionfinish(self) -> None:
        if self._record:
            seconds = recorded() | {name: round(taken_s, 1) for name, taken_s in self._taken_s.items()}
            there = {name: taken_s for name, taken_s in sorted(seconds.items()) if file_of(name).exists()}
            FILE.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for name, taken_s in sorted(self._long.items(), key=lambda found: -found[1]):
            terminalreporter.write_line(f"{taken_s:.0f} s of CPU time, above the {NAMED_S:g} of a quick test: {name}")
        terminalreporter.write_line(f"Cases beside the covers were drawn by {covers.SEED}={covers.seed()}.")
