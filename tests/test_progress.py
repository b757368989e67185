"""What a run prints while it runs, in a process with its own folder; the estimated time left."""

import re
import subprocess
import sys
from pathlib import Path

import durations
import outside
import progress
import pytest

CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
import durations, progress
from pathlib import Path

durations.FILE = Path(__file__).with_name("durations.json")
progress.EVERY_S = 0.0

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(config))
"""
CASES = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such disk")

def test_good():
    pass

def test_bad():
    assert 1 == 2, "not alike\\nsecond line"

def test_without_its_fixture(broken):
    pass

@pytest.mark.skip(reason="today")
def test_skipped():
    pass
"""
BAD = "FAILED test_cases.py::test_bad - AssertionError: not alike"
BROKEN = "ERROR before test_cases.py::test_without_its_fixture - OSError: no such disk"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(Path(durations.__file__).parent)))
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nconsole_output_style = classic\naddopts = -q\n")

    def start(*arguments) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *arguments]
        options = {"cwd": tmp_path, "env": outside.environment(), "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **options).stdout.splitlines()

    return start


@pytest.mark.parametrize("processes", [(), ("--numprocesses", "2", "--dist", "loadfile")], ids=["one process", "two workers"])
def test_failed_tests_are_named_at_once_and_progress_is_a_line(run, processes):
    said = [line for line in run(*processes) if line and not line.startswith("bringing up")]
    before_the_end = said[: next(number for number, line in enumerate(said) if "= ERRORS =" in line)]
    assert [re.sub("; [0-9]+ s gone, about [0-9]+ s left", "", line) for line in before_the_end] == [
        "25% of the tests, 1 of 4",
        BAD,
        "50% of the tests, 2 of 4; 1 failed",
        BROKEN,
        "75% of the tests, 3 of 4; 2 failed",
        "100% of the tests, 4 of 4; 2 failed",
    ]


def test_with_v_pytest_prints_a_line_for_each_test_instead(run):
    said = "\n".join(run("-vv"))
    assert "test_cases.py::test_good PASSED" in said
    assert " of the tests, " not in said


def test_the_time_left_follows_the_record_and_then_the_speed_of_this_run():
    ids = ["tests/test_long.py::test_a", "tests/test_long.py::test_b", "tests/test_short.py::test_a"]
    left = progress.TimeLeft(ids, {"test_long.py": 1200.0, "test_short.py": 0.0}, processes=2)
    assert left.after(0) == 600
    left.finish(ids[0])
    # Half of the record took 900 s, thrice what two processes need: so will the other half, but for the 60 s of trust.
    assert left.after(900) == pytest.approx(600 * (900 + 30) / (600 + 60))
    left.finish(ids[1])
    assert left.after(1800) == 0


def test_an_unknown_file_counts_like_an_average_one():
    left = progress.TimeLeft(["tests/test_new.py::test_a"], {}, processes=1)
    assert left.after(0) == durations.UNKNOWN_S
