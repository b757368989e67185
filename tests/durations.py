"""Recorded durations of the test files, and the time limit of a quick test.

pytest --record-durations     writes durations.json: seconds of each file that ran; the others keep theirs
"""

import json
import os
import resource
import time
from collections import Counter
from pathlib import Path

import covers
import pytest

FILE = Path(__file__).with_suffix(".json")
LIMIT = "JAXLLM_TEST_TIME_LIMIT"
LIMIT_S = 30.0
"""Limit in CPU seconds: 15 s of both cores of a small machine. Other work of the machine changes them by up to a factor of two
(shared caches and cores), so launch/test.sh --all, by which a change lands, allows four times as many."""
LONGER = ("slow", "gpu", "launcher", "notebook", "nightly")
UNKNOWN_S = 30.0


def recorded() -> dict[str, float]:
    """Seconds by file, from the folder of tests."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def name_of(path: Path) -> str:
    return path.relative_to(FILE.parent).as_posix()


def cpu_s() -> float:
    """CPU seconds of this process and of its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def too_long(taken_s: float, limit_s: float) -> str | None:
    """The message for a quick test above the limit of CPU time, else None. A limit of 0 means no limit."""
    if not 0 < limit_s < taken_s:
        return None
    return (
        f"This test took {taken_s:.0f} s of CPU time, and a quick one may take {limit_s:g}: make it smaller, or mark it slow "
        f"(pytest.mark.slow; CONTRIBUTING.md). {LIMIT} sets another limit, 0 none."
    )


class Durations:
    """A pytest plugin. With xdist, workers apply the limit, and the main process does the rest, because it has all reports."""

    def __init__(self, config: pytest.Config):
        self._root = config.rootpath
        self._record = config.getoption("record_durations") and not hasattr(config, "workerinput")
        self._limit_s = float(os.environ.get(LIMIT) or LIMIT_S)
        self._taken_s: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Long files first. Two processes run one file at a time (launch/test.sh), so a long last file would leave one idle."""
        known = recorded()
        items.sort(key=lambda item: -known.get(name_of(item.path), UNKNOWN_S))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        before_s = cpu_s()
        result = yield
        if not any(item.get_closest_marker(name) for name in LONGER):
            complaint = too_long(cpu_s() - before_s, self._limit_s)
            if complaint:
                pytest.fail(complaint, pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken_s[name_of(self._root / report.nodeid.partition("::")[0])] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._record:
            seconds = recorded() | {name: round(taken_s, 1) for name, taken_s in self._taken_s.items()}
            there = {name: taken_s for name, taken_s in sorted(seconds.items()) if (FILE.parent / name).exists()}
            FILE.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.write_line(f"Cases beside the covers were drawn by {covers.SEED}={covers.seed()}.")
