"""What the system refuses, in processes of their own: one sentence, code 2, no traceback."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import outside
import pytest
import yaml
from tiny import TINY

from jaxllm.cli.errors import ending_in_one_sentence
from jaxllm.cluster import exit_codes
from jaxllm.cluster.exit_codes import exit_code_for
from jaxllm.config import ConfigError
from jaxllm.machine import host

JAXLLM = f"{sys.executable} -m jaxllm.cli"
NOT_ALMIGHTY = "setpriv --bounding-set=-dac_override,-dac_read_search"
"""A prefix under which root may read and write only what the modes of files say."""
without_setpriv = pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")


@pytest.fixture
def folder(tmp_path, text_file):
    recipe = {**TINY, "data": {"source": "files", "paths": str(text_file)}, "run": {"dir": "run", "cpu_devices": 1}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    words = ["bash", "-c", f"set -o pipefail; {command}"]
    return subprocess.run(words, cwd=folder, env=outside.environment(), capture_output=True, text=True, timeout=120)


def last_line(done: subprocess.CompletedProcess) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return (done.stderr.splitlines() or [""])[-1]


@pytest.mark.slow
def test_closed_output_is_no_error(folder):
    done = shell(f"{JAXLLM} train base.yaml >&-", folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) >= 4


@pytest.mark.slow
def test_a_reader_that_stops(folder):
    done = shell(f"{JAXLLM} train base.yaml train.steps=400 optimizer.schedule=constant log.every_steps=1 | head -1", folder)
    assert done.returncode == 2
    assert last_line(done).startswith("jaxllm: Nobody reads what this run prints any more (broken pipe): print into a file.")
    quick = shell(f"{JAXLLM} estimate base.yaml --gpus 2 | head -1", folder)
    assert quick.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"mkdir gone; cd gone; rmdir ../gone; {JAXLLM} train ../base.yaml", "The working directory does not exist any more"),
        (f"ulimit -n 20; {JAXLLM} train base.yaml", "This process may open only 20 files, and a run needs about 64: raise"),
    ],
    ids=["working directory", "descriptors"],
)
def test_limits_of_the_system(command, sentence, folder):
    done = shell(command, folder)
    assert (done.returncode, sentence in last_line(done)) == (2, True), done.stderr[-2000:]


@pytest.mark.slow
@without_setpriv
def test_permissions(folder):
    (folder / "closed.yaml").touch(0o000)
    done = shell(f"{NOT_ALMIGHTY} {JAXLLM} train closed.yaml", folder)
    assert done.returncode == 2
    assert last_line(done) == "jaxllm: closed.yaml cannot be used (Permission denied): remove the cause, or name another path."
    (folder / "run" / "checkpoints").mkdir(parents=True, mode=0o000)
    done = shell(f"{NOT_ALMIGHTY} {JAXLLM} train base.yaml", folder)
    assert done.returncode == 2
    assert "run/checkpoints cannot be used (Permission denied)" in last_line(done)
    (folder / "run" / "checkpoints").chmod(0o500)
    done = shell(f"{NOT_ALMIGHTY} {JAXLLM} train base.yaml", folder)
    assert done.returncode == 2
    assert "Checkpoint 4 could not be written to" in last_line(done)


def test_threads_and_files_are_counted_before_jax_starts(monkeypatch):
    host.require_threads_and_files()
    started = []

    class Thread:
        def __init__(self, **_):
            if len(started) == 5:
                raise RuntimeError("can't start new thread")

        def start(self):
            started.append(self)

        def join(self):
            pass

    monkeypatch.setattr(host.threading, "Thread", Thread)
    with pytest.raises(ConfigError, match=r"starts only 5 more threads for this user, and JAX needs about 64: raise `ulimit"):
        host.require_threads_and_files()
    monkeypatch.undo()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    host.require_threads_and_files()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    with pytest.raises(ConfigError, match="may open only 30 files"):
        host.require_threads_and_files()


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (PermissionError(13, "Permission denied", "x/y"), 2, "x/y cannot be used (Permission denied): remove the cause, or"),
        (OSError(36, "File name too long", "a" * 5000), 2, "cannot be used (File name too long)"),
        (OSError(24, "Too many open files"), 2, "This process may not open more files: raise `ulimit -n`."),
        (OSError(116, "Stale file handle", "x"), 1, "x cannot be used (Stale file handle)"),
        (MemoryError(), 2, "This machine has too little memory for this: use a larger one."),
        (RuntimeError("can't start new thread"), 2, "The system starts no more threads for this user: raise `ulimit -u`."),
        (KeyboardInterrupt(), 130, "interrupted."),
        (ZeroDivisionError("x"), 1, "this is a defect of jaxllm: please open an issue with the lines above."),
        (OSError(22, "Invalid argument"), 1, "a system call failed where jaxllm does not expect it: please open an issue"),
    ],
)
def test_errors_end_in_a_sentence(error, code, sentence, capsys):
    with pytest.raises(SystemExit) as ended, ending_in_one_sentence():
        raise error
    err = capsys.readouterr().err
    assert (ended.value.code, sentence in err.splitlines()[-1]) == (code, True), err
    assert ("Traceback" in err) == ("open an issue" in err)
    assert code in (130, exit_code_for(error))


def test_a_broken_pipe_that_is_not_the_output_may_be_gone_after_a_restart(capsys):
    with pytest.raises(SystemExit) as ended, ending_in_one_sentence():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert ended.value.code == 1
    assert "Nobody reads" not in capsys.readouterr().err


def test_what_a_restart_may_help():
    for number in (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.EAGAIN, errno.ENOENT, errno.EBUSY):
        assert exit_code_for(OSError(number, os.strerror(number))) == 1
    assert exit_code_for(OSError("Orbax says so")) == 1
    assert exit_code_for(ConfigError("x")) == exit_codes.BAD_INPUT
