"""A run directory has one holder: when another run may take it, and that the old run then writes nothing more there."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml
from tiny import TINY

from jaxllm.checkpoint import run_lock as module
from jaxllm.checkpoint.files import read_meta, saved_steps
from jaxllm.checkpoint.manager import Checkpoints, SaveError
from jaxllm.checkpoint.run_lock import Holder, RunDirLock, hold_run_dir, holder_status, read_holder, this_process
from jaxllm.cluster import distributed, exit_codes
from jaxllm.cluster.launchers import LaunchInfo
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.run.metrics import JsonLines
from jaxllm.train.step import TrainState

CHECKOUT = Path(__file__).parents[2]
ELSEWHERE = Holder("job 7", 1, "h1", 1234, "another boot", "99", "theirs", "2026-01-01T00:00:00.000+00:00")


@pytest.fixture
def launch(monkeypatch):
    """launch(id, attempt): sets the launch of this process."""

    def set_launch(launch_id, attempt=0):
        monkeypatch.setattr(distributed, "launch_info", lambda: LaunchInfo("alone", attempt, launch_id, False, None))

    set_launch(None)
    return set_launch


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats in hundredths of a second, which a busy disk may not sync in time."""
    for name, seconds in (("BEAT_S", 0.05), ("SILENT_S", 1.0), ("SETTLE_S", 0.05)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def left(monkeypatch):
    """The sentences with which processes would have exited."""
    sentences = []
    monkeypatch.setattr(module, "leave", sentences.append)
    return sentences


def put(folder, holder: Holder) -> bytes:
    (folder / ".holder.json").write_text(json.dumps(vars(holder)))
    return (folder / ".holder.json").read_bytes()


def holder(folder) -> Holder | None:
    return read_holder(folder / ".holder.json")


def test_the_file_says_who_holds_the_directory_and_goes_with_it(launch, tmp_path):
    launch("job 7", 3)
    with closing_lock(RunDirLock.take(tmp_path)):
        found = holder(tmp_path)
        assert (found.launch_id, found.attempt, found.host, found.pid) == ("job 7", 3, socket.gethostname(), os.getpid())
        assert [path.name for path in tmp_path.iterdir()] == [".holder.json"]
    assert list(tmp_path.iterdir()) == []


def closing_lock(lock):
    lock.close = lock.release
    return closing(lock)


def test_a_living_holder_of_this_machine_refuses_at_once(launch, tmp_path):
    with hold_run_dir(tmp_path):
        before = (tmp_path / ".holder.json").read_bytes()
        sentence = (
            f"run.dir={tmp_path} is in use by pid {os.getpid()} on {socket.gethostname()}: wait for it, stop it, or choose "
            "another run.dir."
        )
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"), hold_run_dir(tmp_path):
            pass
        assert time.monotonic() - began < module.BEAT_S
        assert (tmp_path / ".holder.json").read_bytes() == before
    with hold_run_dir(tmp_path):
        pass


@pytest.mark.parametrize(("own", "code"), [("job 7", exit_codes.LOST), ("job 8", exit_codes.BAD_INPUT)])
def test_a_part_of_a_run_that_is_cut_off_from_the_holder_is_restarted(launch, tmp_path, own, code):
    put(tmp_path, this_process("job 7", 0))
    launch(own)
    with pytest.raises(ConfigError, match="is in use by") as error, hold_run_dir(tmp_path):
        pass
    assert error.value.exit_code == code


HERE = this_process("job 7", 2)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (replace(ELSEWHERE, attempt=1), "replaced"),
        (replace(ELSEWHERE, attempt=2), "unsure"),
        (replace(ELSEWHERE, attempt=3), "unsure"),
        (replace(ELSEWHERE, launch_id="job 8"), "unsure"),
        # Neither launch has a name, so they differ.
        (replace(ELSEWHERE, launch_id=None, attempt=0), "unsure"),
        (replace(HERE, attempt=1), "replaced"),
        (replace(HERE, launch_id=None), "holds"),
        (replace(HERE, launch_id=None, born="1"), "gone"),
        # There is nothing to wait for.
        (replace(HERE, attempt=1, born="1"), "gone"),
        (replace(HERE, launch_id=None, pid=2**30), "gone"),
        # The host name proves nothing, because containers may share it.
        (replace(HERE, attempt=2, machine="another"), "unsure"),
        (replace(HERE, machine=""), "unsure"),
    ],
)
def test_the_status_of_a_holder_at_once(found, verdict):
    assert holder_status(found, HERE) == verdict
    assert holder_status(found, replace(HERE, launch_id=None)) != "replaced"


def test_a_process_that_has_ended_holds_nothing_even_before_its_parent_has_noticed():
    child = subprocess.Popen(["sleep", "100"])
    try:
        found = replace(HERE, launch_id=None, pid=child.pid, born=module.start_time_of(child.pid))
        assert holder_status(found, HERE) == "holds"
        child.kill()
        deadline = time.monotonic() + 10
        while holder_status(found, HERE) != "gone":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert child.returncode is None
    finally:
        child.kill()
        child.wait()
    assert holder_status(found, HERE) == "gone"


def test_a_silent_holder_is_replaced_whatever_its_clock_said(launch, quick, tmp_path, caplog):
    put(tmp_path, replace(ELSEWHERE, time="2100-01-01T00:00:00.000+00:00"))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), closing_lock(RunDirLock.take(tmp_path)):
        assert time.monotonic() - began >= module.SILENT_S
        assert holder(tmp_path).pid == os.getpid()
    assert caplog.messages == [f"run.dir={tmp_path} was held by pid 1234 on h1: watching up to 1 s for a sign of life."]


def test_a_lock_file_of_an_earlier_version_is_understood(tmp_path):
    (tmp_path / ".holder.json").write_text(
        '{"launch_id": "job 7", "attempt": 1, "host": "h1", "pid": 1234, "machine": "another boot", "born": "99", '
        '"token": "theirs", "time": "2026-01-01T00:00:00.000+00:00"}\n'
    )
    assert holder(tmp_path) == ELSEWHERE


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "7",
        "[" * 30_000,
        '{"a":' * 10_000,
        json.dumps(vars(ELSEWHERE) | {"pid": "1\0"}),
        json.dumps(vars(ELSEWHERE) | {"pid": -1}),
        json.dumps(vars(ELSEWHERE) | {"pid": 10**30}),
        json.dumps(vars(ELSEWHERE) | {"attempt": "many"}),
        json.dumps(vars(ELSEWHERE) | {"born": None}),
        json.dumps(vars(ELSEWHERE) | {"host": "h" * 100_000}),
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_is_no_holder_s_is_replaced_after_a_while(launch, quick, tmp_path, monkeypatch, content):
    monkeypatch.setattr(module, "SILENT_S", 0.2)
    (tmp_path / ".holder.json").write_text(content)
    assert holder(tmp_path) is None
    with closing_lock(RunDirLock.take(tmp_path)):
        assert holder(tmp_path).pid == os.getpid()


def test_a_pipe_in_the_place_of_the_file_is_replaced_after_a_while(launch, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.2)
    os.mkfifo(tmp_path / ".holder.json")
    with closing_lock(RunDirLock.take(tmp_path)):
        assert holder(tmp_path).pid == os.getpid()


def test_a_link_to_nothing_is_refused(launch, tmp_path):
    (tmp_path / ".holder.json").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"\.holder\.json is a link to a file that does not exist: remove it\.$"):
        RunDirLock.take(tmp_path)


def test_control_characters_of_a_holder_are_not_printed(tmp_path):
    put(tmp_path, replace(ELSEWHERE, host="h1\x1b[2J"))
    assert holder(tmp_path).name == r"pid 1234 on h1\x1b[2J"


def test_a_holder_elsewhere_that_beats_refuses(launch, quick, tmp_path):
    other = RunDirLock(tmp_path, ELSEWHERE)
    with closing_lock(other):
        other._take()
        other._beats.start()
        with pytest.raises(ConfigError, match=r" is in use by pid 1234 on h1: "):
            RunDirLock.take(tmp_path)
        assert holder(tmp_path).token == "theirs"


def test_a_holder_elsewhere_that_ends_while_it_is_watched_gives_the_directory(launch, quick, tmp_path):
    other = RunDirLock(tmp_path, ELSEWHERE)
    other._take()
    threading.Timer(0.1, other.release).start()
    with closing_lock(RunDirLock.take(tmp_path)):
        assert holder(tmp_path).pid == os.getpid()


def test_a_later_attempt_takes_over_and_the_earlier_one_touches_nothing_any_more(launch, quick, left, tmp_path):
    earlier = RunDirLock(tmp_path, ELSEWHERE)
    earlier._take()
    launch("job 7", 2)
    later = RunDirLock.take(tmp_path)
    with closing_lock(later):
        assert left == []
        # Its next heartbeat goes to a file without a name.
        earlier._beats.start()
        deadline = time.monotonic() + 10
        while not left:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        me = f"pid {os.getpid()} on {socket.gethostname()}"
        assert left[0] == f"run.dir={tmp_path} was taken over by {me}: pid 1234 on h1 writes nothing more there."
        earlier.release()
        assert holder(tmp_path).attempt == 2
        later.require()
        assert set(left) == {left[0]}


def test_of_many_starts_at_once_one_holds(launch, tmp_path):
    barrier, taken, refused = threading.Barrier(8), [], []

    def start():
        barrier.wait()
        try:
            taken.append(RunDirLock.take(tmp_path))
        except ConfigError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)
    assert [path.name for path in tmp_path.iterdir()] == [".holder.json"]
    taken[0].release()


def test_where_there_are_no_links_the_name_is_given_all_the_same(launch, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with hold_run_dir(tmp_path):
        assert holder(tmp_path).pid == os.getpid()
        with pytest.raises(FileExistsError):
            module.rename_if_free(tmp_path / "aside", tmp_path / ".holder.json")


def test_the_run_that_took_over_may_have_ended_by_now(launch, left, tmp_path):
    with hold_run_dir(tmp_path) as require:
        require()
        assert left == []
        name = holder(tmp_path).name
        (tmp_path / ".holder.json").unlink()
        require()
        how = "was taken over, or its .holder.json removed"
        assert left == [f"run.dir={tmp_path} {how}: {name} writes nothing more there."]


def test_a_save_in_progress_when_the_run_fails_finishes_in_a_directory_that_no_run_took(launch, left, tmp_path):
    with hold_run_dir(tmp_path) as require:
        pass
    require()
    assert left == []
    put(tmp_path, ELSEWHERE)
    require()
    assert [sentence.split(": ")[0] for sentence in left] == [f"run.dir={tmp_path} was taken over by pid 1234 on h1"]


# ---------------------------------------------------------------------------------------------- who has lost it writes nothing


class Lost(Exception):
    """Raised instead of exiting the process."""


class Guard:
    """RunDirLock.require of a run that loses its directory after this many calls."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise Lost


STATE = TrainState(jnp.zeros((), jnp.int32), {"w": jnp.ones((4, 4))}, ())


def test_no_checkpoint_gets_its_name_and_no_old_one_goes(tmp_path):
    """Lost before a save: nothing is written. Lost during it: the checkpoint gets no name. Both times 1 of keep=1 stays."""
    guard = Guard(2)
    config = CheckpointConfig(keep=1, asynchronous=False)
    checkpoints = Checkpoints(tmp_path, config, guard)
    checkpoints.save(1, STATE, {"format": 1})
    assert saved_steps(tmp_path / "checkpoints") == [1]
    guard.left = 0
    with pytest.raises(SaveError):
        checkpoints.save(2, STATE, {"format": 1})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    guard.left = 1
    with pytest.raises(SaveError, match=r"^Checkpoint 3 could not be written .*: the newest complete checkpoint is 1; "):
        checkpoints.save(3, STATE, {"format": 1})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "3.orbax-checkpoint-tmp"]


def test_no_line_of_metrics_is_written_and_none_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLines(path, 0, Guard(2))) as sink:
        sink.write({"step": 1})
        with pytest.raises(Lost):
            sink.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n'
    with pytest.raises(Lost):
        JsonLines(path, 0, Guard(0))
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.launcher
def test_a_process_that_lost_its_directory_leaves_as_lost(tmp_path):
    """It notices before it writes a line; without one its next heartbeat would notice."""
    program = """
import pathlib, sys
from jaxllm.checkpoint.run_lock import hold_run_dir
from jaxllm.run.metrics import JsonLines
folder = pathlib.Path(sys.argv[1])
with hold_run_dir(folder) as require:
    sink = JsonLines(folder / "metrics.jsonl", 0, require)
    sink.write({"step": 1})
    print("holds", flush=True)
    input()
    sink.write({"step": 2})
    print("wrote", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "holds\n"
        name = holder(tmp_path).name
        after = put(tmp_path, ELSEWHERE)
        out, error = process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == exit_codes.LOST
    assert (out, error) == (
        "",
        f"jaxllm: run.dir={tmp_path} was taken over by pid 1234 on h1: {name} writes nothing more there.\n",
    )
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / ".holder.json").read_bytes() == after


def train(recipe, folder, steps, attempt) -> subprocess.Popen:
    overrides = (f"run.dir={folder}", f"train.steps={steps}", "checkpoint.every_steps=50", "checkpoint.keep=100")
    fixed = ("run.cpu_devices=1", "optimizer.schedule=constant", "data.held_out_fraction=0.0")
    return subprocess.Popen(
        [sys.executable, "-m", "jaxllm.cli", "train", recipe, *fixed, *overrides],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "JAXLLM_LAUNCH_ID": "job 7", "JAXLLM_ATTEMPT": str(attempt)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.launcher
def test_a_frozen_run_that_thaws_after_its_place_was_given_away_changes_nothing(text_file, tmp_path):
    recipe, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(TINY | {"data": {"source": "files", "paths": [str(text_file)]}}))
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    earlier = train(recipe, folder, 1_000_000, attempt=0)
    later = None
    try:
        deadline = time.monotonic() + 120
        while not saved_steps(checkpoints):
            assert earlier.poll() is None, earlier.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        earlier.send_signal(signal.SIGSTOP)
        last = saved_steps(checkpoints)[-1] + 7
        later = train(recipe, folder, last, attempt=1)
        out, error = later.communicate(timeout=120)
        assert (later.returncode, error) == (0, "")
        assert f"resumed from step {last - 7} in {folder}" in out
        before = metrics.read_bytes(), saved_steps(checkpoints), read_meta(checkpoints / str(last))
        steps = [json.loads(line)["step"] for line in before[0].splitlines()]
        assert steps == list(range(1, last + 1))
        # The later run has ended and freed the directory. The earlier one must not resume from the later one's output.
        earlier.send_signal(signal.SIGCONT)
        _, error = earlier.communicate(timeout=60)
    finally:
        for process in filter(None, (earlier, later)):
            process.kill()
            process.communicate()
    assert earlier.returncode == exit_codes.LOST
    assert re.search(rf"^jaxllm: run.dir={folder} was taken over, or its .holder.json removed: ", error, re.MULTILINE)
    assert (metrics.read_bytes(), saved_steps(checkpoints), read_meta(checkpoints / str(last))) == before
