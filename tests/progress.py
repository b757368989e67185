"""What a run of the tests prints while it runs: a line of progress every half minute, and each failed test at once.

12% of the tests, 712 of 5,920; 2 min gone, about 9 min left; 1 failed
FAILED tests/mesh/test_mesh.py::test_one - AssertionError: assert 1 == 2

Such lines read well in a log too. pytest's own dots and letters are left out. With -v pytest prints a line for each test
instead, and so nothing here does.
"""

import time
from collections import Counter
from collections.abc import Sequence

import durations
import pytest
import selection

EVERY_S = 30.0
TRUSTED_S = 60.0
"""Recorded seconds of finished tests from which on the speed of this run counts more than that of the record."""
REASON_LETTERS = 200
WORDS = {"setup": "ERROR before", "teardown": "ERROR after"}


class TimeLeft:
    """Estimates the time left by tests/durations.json and by how long the finished tests took.

    Args:
      ids: of all tests of the run.
      known: seconds by file, for the tests of the run.
      processes: that run tests.
    """

    def __init__(self, ids: Sequence[str], known: dict[str, float], processes: int):
        self._tests = Counter(file_of(name) for name in ids)
        self._known = known
        self._usual = 1 / processes
        self._done_s, self._all_s = 0.0, sum(self._recorded_s(name) for name in ids)

    def _recorded_s(self, name: str) -> float:
        """A file's seconds, divided evenly among its tests."""
        file = file_of(name)
        return self._known.get(file, durations.UNKNOWN_S) / max(1, self._tests[file])

    def finish(self, name: str) -> None:
        """A test has ended."""
        self._done_s += self._recorded_s(name)

    def after(self, elapsed_s: float) -> float:
        """Seconds left, if the run began `elapsed_s` ago."""
        wall_of_recorded = (elapsed_s + TRUSTED_S * self._usual) / (self._done_s + TRUSTED_S)
        return max(0.0, self._all_s - self._done_s) * wall_of_recorded


def file_of(name: str) -> str:
    """A test's file from the folder of tests, as durations.json has it."""
    return name.partition("::")[0].removeprefix("tests/")


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def reason_of(report: pytest.TestReport) -> str:
    """The first line of the error, shortened."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash else str(report.longrepr or "")).strip()
    line = text.partition("\n")[0]
    return line if len(line) <= REASON_LETTERS else f"{line[:REASON_LETTERS]} ..."


class Progress:
    """A pytest plugin. With xdist, for the main process."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._is_on = config.get_verbosity(pytest.Config.VERBOSITY_TEST_CASES) <= 0
        self._left: TimeLeft | None = None
        self._total = self._done = self._failed = 0
        self._began_s = self._said_s = time.monotonic()

    def _begin(self, ids: Sequence[str]) -> None:
        longer_share = selection.longer_share(self._config.getoption("markexpr"))
        processes = getattr(self._config.option, "numprocesses", None) or 1
        self._left = TimeLeft(ids, durations.expected(longer_share), processes)
        self._total, self._began_s = len(ids), time.monotonic()
        self._said_s = self._began_s

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if self._left is None:
            self._begin(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, letter, word = yield
        return category, "" if self._is_on else letter, word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed += 1
            self._say(f"{WORDS.get(report.when, 'FAILED')} {report.nodeid} - {reason_of(report)}")
        if report.when == "teardown" and self._left:
            self._done += 1
            self._left.finish(report.nodeid)
            if time.monotonic() - self._said_s >= EVERY_S:
                self._say(self._line())
                self._said_s = time.monotonic()

    def _line(self) -> str:
        assert self._left is not None
        elapsed_s = time.monotonic() - self._began_s
        tests = f"{self._done / self._total:.0%} of the tests, {self._done:,} of {self._total:,}"
        failed = f"; {self._failed} failed" if self._failed else ""
        return f"{tests}; {minutes(elapsed_s)} gone, about {minutes(self._left.after(elapsed_s))} left{failed}"

    def _say(self, line: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._is_on and terminal:
            terminal.write_line(line)
            terminal.flush()
