"""Recorded durations, the resulting order, and the limit on a quick test; in a process with its own folder."""

import json
import subprocess
import sys
from pathlib import Path

import durations
import outside
import pytest

CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
import durations, selection
from pathlib import Path

durations.FILE = Path(__file__).with_name("durations.json")

def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true")

def pytest_configure(config):
    for mark in selection.LONGER:
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(durations.Durations(config))
"""
BUSY = """
import subprocess, sys, time
import pytest

SPIN = "import time\\nwhile time.process_time() < 0.5: pass"

def test_quick():
    pass

def test_sleeps():
    time.sleep(0.5)

def test_busy():
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass

def test_busy_child():
    subprocess.run([sys.executable, "-c", SPIN], check=True)

@pytest.mark.slow
def test_busy_and_slow():
    test_busy()
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(Path(durations.__file__).parent)))
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")

    def start(*arguments, **variables) -> str:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *arguments]
        options = {"cwd": tmp_path, "env": outside.environment(**variables), "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **options).stdout

    return start


def test_a_quick_test_that_computes_for_too_long_is_told_to_be_marked(run):
    said = run(JAXLLM_TEST_TIME_LIMIT="0.4")
    for name, verdict in (("quick", "PASSED"), ("sleeps", "PASSED"), ("busy", "FAILED"), ("busy_child", "FAILED")):
        assert f"test_busy.py::test_{name} {verdict}" in said
    assert "test_busy.py::test_busy_and_slow PASSED" in said
    assert "a quick one may take 0.4: make it smaller, or mark it slow" in said


def test_without_a_limit_a_long_test_passes_and_is_named(run, tmp_path):
    conftest = tmp_path / "conftest.py"
    conftest.write_text(conftest.read_text() + "\ndurations.NAMED_S = 0.4\n")
    said = run(JAXLLM_TEST_TIME_LIMIT="")
    assert "FAILED" not in said
    named = [line for line in said.splitlines() if "s of CPU time, above the 0.4 of a quick test: " in line]
    assert {line.split("::")[-1] for line in named} == {"test_busy", "test_busy_child"}


def test_no_limit():
    assert durations.too_long(1e9, None) is None
    assert durations.too_long(29, 30) is None


def test_files_are_recorded_and_the_longest_begins(run, tmp_path):
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"test_a.py": 5.0, "test_gone.py": 9.0}))
    said = run("--record-durations", "test_busy.py")
    found = json.loads(file.read_text())
    assert found.keys() == {"test_a.py", "test_busy.py", "test_busy.py (longer)"}
    assert found["test_a.py"] == 5.0
    assert 1.4 < found["test_busy.py"] < 60
    assert 0.4 < found["test_busy.py (longer)"] < 30
    file.write_text(json.dumps({"test_a.py": 5.0, "test_busy.py": 50.0}))
    said = run()
    assert said.index("test_busy.py::test_quick") < said.index("test_a.py::test_a")
    assert "JAXLLM_TEST_SEED=" in said


def test_a_run_expects_its_share_of_the_longer_tests(monkeypatch):
    known = {"test_a.py": 5.0, "test_a.py (longer)": 30.0, "test_b.py (longer)": 6.0}
    monkeypatch.setattr(durations, "recorded", lambda: known)
    assert durations.expected(0.0) == {"test_a.py": 5.0, "test_b.py": 0.0}
    assert durations.expected(1 / 3) == {"test_a.py": 15.0, "test_b.py": 2.0}


def test_the_record_names_files_that_are_there():
    """If it fails: launch/test.sh --all --record-durations"""
    names = set(durations.recorded())
    assert {name for name in names if not durations.file_of(name).exists()} == set()
    # A new file may wait for the next record, not most of them.
    files = {durations.name_of(path) for path in durations.FILE.parent.glob("**/test_*.py")} - {"gpu"}
    assert len({durations.name_of(durations.file_of(name)) for name in names}) > 0.9 * len(files)
