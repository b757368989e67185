"""Checkpoints in an object store: what a new machine takes from there, and what a broken store does to a run."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from outside import free_port, wait_until
from run_files import saved_state, steps_of
from store_servers import gcs_door

from jaxllm.checkpoint import manager, run_lock, store, stored_checkpoints
from jaxllm.checkpoint.files import describe_files, saved_steps
from jaxllm.checkpoint.host_shares import DiskGroups
from jaxllm.checkpoint.joined_checkpoints import JoinedCheckpoints
from jaxllm.checkpoint.store import FILES_AT_ONCE, Store, StoreLock
from jaxllm.cluster import exit_codes
from jaxllm.config import ConfigError
from jaxllm.data import buckets
from jaxllm.run.loop import fit
from jaxllm.run.signals import SignalHandler, StepActions

pytest.importorskip("obstore")
pytest.importorskip("moto")
# Clients of the libraries are left to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
CHECKOUT = Path(__file__).parents[2]
COMMON = ("optimizer.schedule=constant", "checkpoint.every_steps=2", "data.held_out_fraction=0.0")
MESH = ("run.cpu_devices=8", "parallel.data=8", "parallel.zero=3", *COMMON)
OTHER_MESH = ("run.cpu_devices=8", "parallel.data=4", "parallel.tensor=2", *COMMON)


def objects(door, address) -> dict[str, int]:
    """{name: bytes} below an address."""
    prefix = address.removeprefix("s3://runs/") + "/"
    pages = door.client.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=prefix)
    return {one["Key"].removeprefix(prefix): one["Size"] for page in pages for one in page.get("Contents", [])}


def committed(door, address) -> list[int]:
    return sorted(int(name.partition("/")[0]) for name in objects(door, address) if name.endswith("files.json"))


def store_config(tiny_config, address, run_dir, *overrides, mesh=MESH):
    return tiny_config(*mesh, f"run.dir={run_dir}", f"checkpoint.store={address}", *overrides)


def metrics(folder):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(folder)]


def assert_same_end(folder, whole):
    assert metrics(folder) == metrics(whole)
    jax.tree.map(np.testing.assert_array_equal, saved_state(folder, 4), saved_state(whole, 4))


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """The run directory of four steps that nothing disturbed, without a store."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(tiny_config(*MESH, f"run.dir={folder}"))
    return folder


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(stored_checkpoints, "WAITS_S", (0.01,))
    monkeypatch.setattr(buckets, "TRIES", 1)


# -------------------------------------------------------------------------------------------------------------- a new machine


def test_a_new_machine_continues_bit_for_bit(door, bucket, whole, tiny_config, tmp_path, capsys):
    run = tmp_path / "run"
    fit(store_config(tiny_config, bucket, run, "train.steps=2"))
    names = {"files.json", "run/metrics.jsonl", "run/config.yaml", *json.loads((run / "checkpoints/2/files.json").read_text())}
    assert set(objects(door, bucket)) == {f"2/{name}" for name in names}
    shutil.rmtree(run)
    capsys.readouterr()
    fit(store_config(tiny_config, bucket, run))
    assert f"took checkpoint 2 from {bucket}\nresumed from step 2 in {run}\n" in capsys.readouterr().out
    assert_same_end(run, whole)
    assert committed(door, bucket) == [2, 4]
    # The lock is free, and a disk that has what the store has takes nothing.
    assert "holder.json" not in objects(door, bucket)
    fit(store_config(tiny_config, bucket, run))
    assert "took" not in capsys.readouterr().out

    other = tmp_path / "other"
    door.client.delete_object(Bucket="runs", Key=f"{bucket.removeprefix('s3://runs/')}/4/files.json")
    fit(store_config(tiny_config, bucket, other, mesh=OTHER_MESH))
    assert [step for step, *_ in metrics(other)] == [1, 2, 3, 4]
    assert metrics(other)[:2] == metrics(whole)[:2]
    np.testing.assert_allclose(metrics(other), metrics(whole), rtol=1e-4)


def start(recipe, *overrides) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxllm.cli", "train", recipe, "run.cpu_devices=8", *overrides]
    # With the XLA_FLAGS of this process, so that the numbers are bit-equal.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_kill_inside_a_copy_leaves_the_checkpoint_before(door, bucket, whole, tiny_config, tmp_path, capsys):
    run, reached, hold = tmp_path / "run", threading.Event(), threading.Event()

    def rule(method, path):
        # One of the files of step 4 never arrives, while others do.
        if method == "PUT" and "/4/" in path and "manifest" in path:
            reached.set()
            hold.wait(60)
            return 503

    door.rule = rule
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(store_config(tiny_config, bucket, run).model_dump(mode="json")))
    process = start(recipe)
    wait_until(reached.is_set, process, 100)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    hold.set()
    door.rule = None
    assert saved_steps(run / "checkpoints") == [2, 4]
    assert committed(door, bucket) == [2]
    assert any(name.startswith("4/") for name in objects(door, bucket))
    shutil.rmtree(run)
    fit(store_config(tiny_config, bucket, run))
    assert f"took checkpoint 2 from {bucket}" in capsys.readouterr().out
    assert_same_end(run, whole)
    # What the killed copy left is gone.
    listed = json.loads((run / "checkpoints/4/files.json").read_text())
    assert {name for name in objects(door, bucket) if re.match("4/(state|meta)/", name)} == {f"4/{name}" for name in listed}


def two_processes(recipe, run, *overrides) -> str:
    """Trains with two processes that share a run directory. Returns the output of the first."""
    port, processes = free_port(), []
    for rank in range(2):
        place = {"JAXLLM_COORDINATOR": f"127.0.0.1:{port}", "JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": str(rank)}
        command = [sys.executable, "-m", "jaxllm.cli", "train", recipe, "run.cpu_devices=4", f"run.dir={run}", *overrides]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **place}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=variables, **pipes))
    try:
        (out, error), (_, other_error) = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], error + other_error
    return out


@pytest.fixture(scope="module")
def recipe(tiny_config, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(*MESH).model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def whole_of_two(recipe, tmp_path_factory):
    """The run directory of an undisturbed run of two processes, without a store."""
    folder = tmp_path_factory.mktemp("whole-of-two") / "run"
    two_processes(recipe, folder)
    return folder


@pytest.mark.slow
def test_two_processes_on_a_new_disk_resume_from_the_store_bit_for_bit(place, whole_of_two, recipe, tiny_config, tmp_path):
    run = tmp_path / "run"
    with copier(place.address, whole_of_two, tiny_config()) as stored:
        stored.offer(2)
        assert stored.wait() is None
    out = two_processes(recipe, run, f"checkpoint.store={place.address}")
    assert f"took checkpoint 2 from {place.address}\nresumed from step 2 in {run}\n" in out
    assert_same_end(run, whole_of_two)
    assert [step for step, files in place.steps().items() if "files.json" in files] == [2, 4]


def change_a_byte(door, key):
    content = bytearray(door.client.get_object(Bucket="runs", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    door.client.put_object(Bucket="runs", Key=key, Body=bytes(content))


@pytest.fixture(scope="module")
def filled(door, tiny_config, tmp_path_factory):
    """A finished run with its store."""
    folder = tmp_path_factory.mktemp("filled") / "run"
    fit(store_config(tiny_config, "s3://runs/filled", folder))
    return folder


@pytest.fixture
def copied(door, bucket, filled):
    """A store with checkpoints 2 and 4: a copy of the finished run's."""
    for name in objects(door, "s3://runs/filled"):
        target = f"{bucket.removeprefix('s3://runs/')}/{name}"
        door.client.copy_object(Bucket="runs", Key=target, CopySource={"Bucket": "runs", "Key": f"filled/{name}"})
    return bucket


def array_of(door, address, step) -> str:
    """The key of a checkpoint's largest file."""
    of_step = {name: size for name, size in objects(door, address).items() if name.startswith(f"{step}/state/")}
    return f"{address.removeprefix('s3://runs/')}/{max(of_step, key=of_step.get)}"


@pytest.mark.parametrize("kind", ["changed", "missing"])
def test_a_damaged_checkpoint_is_named_and_passed_over(door, copied, whole, tiny_config, tmp_path, capsys, caplog, kind):
    key = array_of(door, copied, 4)
    name = key.partition("/4/")[2]
    if kind == "changed":
        change_a_byte(door, key)
    else:
        door.client.delete_object(Bucket="runs", Key=key)
    fit(store_config(tiny_config, copied, tmp_path / "run"))
    reason = f"{name} has changed" if kind == "changed" else f"{name} is missing"
    said = capsys.readouterr().out
    assert f"checkpoint 4 in {copied} is damaged ({reason}): it stays there, unused\ntook checkpoint 2 from {copied}" in said
    assert_same_end(tmp_path / "run", whole)
    assert f"The damaged checkpoint 4 in {copied} is replaced." in caplog.text
    assert json.loads((tmp_path / "run/checkpoints/4/files.json").read_text()).keys() == {
        one[2:] for one in objects(door, copied) if re.match("4/(state|meta)/", one)
    }


def test_a_run_without_an_intact_checkpoint_anywhere_is_refused(door, copied, tiny_config, tmp_path):
    for step in (2, 4):
        change_a_byte(door, array_of(door, copied, step))
    before = objects(door, copied)
    with pytest.raises(
        ConfigError, match=rf"^No checkpoint in {copied} is intact: 4 \(.* has changed\), 2 \(.*; restore a copy"
    ):
        fit(store_config(tiny_config, copied, tmp_path / "run"))
    assert objects(door, copied) == before
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def make_unreadable(checkpoint):
    """Other bytes from the beginning, with the right sizes and checksums: only reading the arrays shows it."""
    manifest = checkpoint / "state/manifest.ocdbt"
    manifest.write_bytes(bytes(len(manifest.read_bytes())))
    describe_files(checkpoint)


@pytest.mark.parametrize("steps", [(4,), (2, 4)])
def test_a_checkpoint_that_orbax_cannot_read_is_damaged(door, bucket, whole, filled, tiny_config, tmp_path, capsys, steps):
    source, run = Path(shutil.copytree(filled, tmp_path / "source")), tmp_path / "run"
    for step in steps:
        make_unreadable(source / f"checkpoints/{step}")
    with copier(bucket, source, tiny_config()) as stored:
        for step in (2, 4):
            stored.offer(step)
            assert stored.wait() is None
    before = objects(door, bucket)
    capsys.readouterr()
    if len(steps) == 1:
        fit(store_config(tiny_config, bucket, run))
        said = capsys.readouterr().out
        assert f"took checkpoint 4 from {bucket}\ntook checkpoint 2 from {bucket}\ncheckpoint 4 is damaged (" in said
        assert f"resumed from step 2 in {run}\n" in said
        assert_same_end(run, whole)
        # What the run saved again is in its place.
        listed = Store(bucket).read("4/files.json", 2**20)
        assert listed == (run / "checkpoints/4/files.json").read_bytes() != (source / "checkpoints/4/files.json").read_bytes()
        return
    sentence = rf"^No checkpoint in {bucket} is intact: 4 \(.+\), 2 \(.+\); restore a copy of one there, or choose"
    with pytest.raises(ConfigError, match=sentence) as error:
        fit(store_config(tiny_config, bucket, run))
    assert error.value.exit_code == exit_codes.BAD_INPUT
    assert objects(door, bucket) == before
    # The same on hosts that share no disk.
    config, place = tiny_config().checkpoint, Store(bucket)
    with held(place) as lock, closing(JoinedCheckpoints(place, lock, tmp_path / "host", config, DiskGroups((0,)))) as joined:
        found = manager.Checkpoints(tmp_path / "host", config, joined=joined)
        assert found.latest == 4
        with pytest.raises(ConfigError, match=sentence) as error:
            found.restore({}, {})
    assert error.value.exit_code == exit_codes.BAD_INPUT


@pytest.mark.parametrize("key", ["model", "text"])
def test_another_runs_store_is_refused_before_anything_is_fetched(door, copied, tiny_config, tmp_path, key):
    del door.seen[:]
    if key == "model":
        changes, sentence = (
            ["model.rope_theta=7"],
            rf"{copied} holds a run with model.rope_theta=.*, not 7.0: resume with that value",
        )
    else:
        (tmp_path / "other.txt").write_text("other words " * 2000)
        changes = [f"data.paths=[{tmp_path / 'other.txt'}]"]
        sentence = f"{copied} holds a run on other text: the files of data.* have changed since; restore them"
    with pytest.raises(ConfigError, match=f"^{sentence}, or choose another checkpoint.store.$"):
        fit(store_config(tiny_config, copied, tmp_path / "run", *changes))
    assert [path for method, path in door.seen if method in ("GET", "HEAD") and "/4/state" in path] == []
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    assert committed(door, copied) == [2, 4]


def test_a_run_that_is_further_than_another_does_not_displace_its_checkpoints(door, copied, tiny_config, tmp_path):
    further = ["model.rope_theta=7", "train.steps=6", "checkpoint.keep=1"]
    fit(store_config(tiny_config, copied, tmp_path / "run", *further, "checkpoint.store=null"))
    before = objects(door, copied)
    with pytest.raises(ConfigError, match=f"^{copied} holds a run with model.rope_theta=.* choose another checkpoint.store.$"):
        fit(store_config(tiny_config, copied, tmp_path / "run", *further))
    assert objects(door, copied) == before
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["6"]


def damage_array(checkpoint, kind):
    array = max((checkpoint / "state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = array.read_bytes()
    array.write_bytes(content[:-1] + {"changed": bytes([content[-1] ^ 1]), "torn": b""}[kind])


@pytest.mark.parametrize(("kind", "reason"), [("changed", ".* has changed"), ("torn", "it is not whole")])
def test_the_store_stands_in_for_a_damaged_local_checkpoint(copied, whole, filled, tiny_config, tmp_path, capsys, kind, reason):
    run = Path(shutil.copytree(filled, tmp_path / "run"))
    damage_array(run / "checkpoints/4", kind)
    fit(store_config(tiny_config, copied, run))
    said = capsys.readouterr().out
    assert re.search(rf"took checkpoint 4 from {copied}\nthe local checkpoint 4 is damaged \({reason}\): moved aside\n", said)
    assert [path.name for path in (run / "checkpoints-damaged").iterdir()] == ["4-1"]
    assert_same_end(run, whole)


def test_a_damaged_local_checkpoint_does_not_displace_one_of_the_store(
    door, copied, whole, filled, tiny_config, tmp_path, capsys
):
    run = Path(shutil.copytree(filled, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/2")
    damage_array(run / "checkpoints/4", "changed")
    Store(copied).remove(name for name in objects(door, copied) if name.startswith("4/"))
    fit(store_config(tiny_config, copied, run, "checkpoint.keep=1"))
    assert f"took checkpoint 2 from {copied}\n" in capsys.readouterr().out
    assert_same_end(run, whole)


def test_names_that_lead_out_of_the_folder_are_damage(door, copied, tiny_config, tmp_path, capsys):
    for step in (2, 4):
        key = f"{copied.removeprefix('s3://runs/')}/{step}/files.json"
        door.client.put_object(Bucket="runs", Key=key, Body=json.dumps({"state/../../out": [1, 1]}).encode())
    with pytest.raises(ConfigError, match=r"4 \(files.json names state/../../out\)"):
        fit(store_config(tiny_config, copied, tmp_path / "run"))


def test_no_file_but_those_that_a_run_copies_is_taken_beside_a_checkpoint(door, copied, tiny_config, tmp_path):
    place, run, key = Store(copied), tmp_path / "run", copied.removeprefix("s3://runs/")
    for name in ("out", "checkpoints/9/files.json", "tokenizer/vocab.json"):
        door.client.put_object(Bucket="runs", Key=f"{key}/4/run/{name}", Body=b"{}")
    with held(place) as lock:
        stored = stored_checkpoints.StoredCheckpoints(place, lock, run, tiny_config().checkpoint)
        assert stored.fetch(newer_than=-1)[0] == 4
    assert {path.name for path in run.iterdir()} == {"checkpoints", "config.yaml", "metrics.jsonl", "tokenizer"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["4"]
    assert [path.name for path in (run / "tokenizer").iterdir()] == ["vocab.json"]


@pytest.mark.parametrize("name", ["/tmp/out", "../out", "tokenizer/../../out"])
def test_a_name_that_is_no_path_is_named(door, copied, tiny_config, tmp_path, name):
    key = f"{copied.removeprefix('s3://runs/')}/4/run/{name}"
    door.client.put_object(Bucket="runs", Key=key, Body=b"{}")
    with pytest.raises(
        ConfigError, match=r"cannot be used \(Encountered object with invalid path: .*a_name_that_is_no_path.*\): remove"
    ):
        fit(store_config(tiny_config, copied, tmp_path / "run"))
    assert not (tmp_path / "run/checkpoints").exists()


# ------------------------------------------------------------------------------------------------------------------- the lock


ELSEWHERE = run_lock.Holder("job 7", 1, "h1", 1234, "another boot", "99", "theirs", "2026-01-01T00:00:00.000+00:00")


@pytest.fixture(scope="module")
def gs_door():
    with gcs_door("runs") as door:
        yield door


@pytest.fixture(params=["s3", "gs"])
def place(request):
    """An empty store of each kind."""
    prefix = re.sub(r"\W", "-", request.node.name)
    if request.param == "s3":
        request.getfixturevalue("door")
        yield Store(f"s3://runs/{prefix}")
        return
    request.getfixturevalue("gs_door")
    yield Store(f"gs://runs/{prefix}")


@contextmanager
def held(place):
    lock = StoreLock(place)
    lock.take()
    try:
        yield lock
    finally:
        lock.release()


def test_one_run_holds_a_store(place, monkeypatch, tiny_config, tmp_path):
    for name, seconds in (("BEAT_S", 0.05), ("SILENT_S", 2.0)):
        monkeypatch.setattr(store, name, seconds)
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.05)
    # A part of the same launch that was cut off: a restart joins it, once it reaches the other again.
    config = tiny_config(f"checkpoint.store={place.address}").checkpoint
    for launch, code in (("a job", exit_codes.LOST), (None, exit_codes.BAD_INPUT)):
        me = run_lock.this_process(launch, 0)
        place.write("holder.json", me.beat())
        monkeypatch.setattr(store, "this_process", lambda *_, me=me: replace(me, token="another"))
        with pytest.raises(ConfigError, match="is in use by") as error, stored_checkpoints.hold_store(tmp_path, config):
            pass
        assert error.value.exit_code == code
    monkeypatch.setattr(store, "this_process", run_lock.this_process)
    place.remove(["holder.json"])
    with held(place):
        in_use = rf"^checkpoint.store={place.address} is in use by pid {os.getpid()} on .*: wait for it, stop it, or choose"
        with pytest.raises(ConfigError, match=in_use), held(place):
            pass
    # The holder's process has ended, or was silent.
    for ended in (replace(run_lock.this_process(None, 0), pid=2**30), ELSEWHERE):
        place.write("holder.json", ended.beat())
        with held(place):
            assert json.loads(place.read("holder.json", 2**16))["pid"] == os.getpid()
    # Bytes that could be taken for an end of a line.
    place.write("ends", b"1\r")
    assert place.read("ends", 9) == b"1\r"
    # What is too large for a holder is not overwritten.
    foreign = bytes(store.HOLDER_BYTES + 1)
    place.write("holder.json", foreign)
    said = rf"^{place.address}/holder.json is another program's \(holder.json has more than .*\): move it away, or "
    with pytest.raises(ConfigError, match=said), held(place):
        pass
    assert place.read("holder.json", 2**20) == foreign
    place.remove(["holder.json"])
    # Of two starts that both see no holder one creates it.
    place.write("holder.json", b"{}", over=False)
    with pytest.raises(FileExistsError):
        place.write("holder.json", b"{}", over=False)
    # The library asks again when an answer is lost, and then finds the object of its first try.
    lock, write = StoreLock(place), place.write
    with monkeypatch.context() as patch:

        def twice(name, content, *, over=True):
            write(name, content, over=over)
            if not over:
                write(name, content, over=False)

        patch.setattr(place, "write", twice)
        place.remove(["holder.json"])
        lock.take()
    lock.release()
    with pytest.raises(FileNotFoundError):
        place.read("holder.json", 2**16)
    # A run of another machine that shows signs of life.
    place.write("holder.json", ELSEWHERE.beat())
    stop = threading.Event()

    def live():
        while not stop.wait(0.05):
            place.write("holder.json", ELSEWHERE.beat())

    alive = threading.Thread(target=live)
    alive.start()
    try:
        with pytest.raises(ConfigError, match=r"is in use by pid 1234 on h1"), held(place):
            pass
    finally:
        stop.set()
        alive.join()


def test_of_two_starts_one_takes_a_silent_store_over_and_the_old_holder_cannot_return(place, monkeypatch):
    old, first, second = (StoreLock(place) for _ in range(3))
    old._write_holder(over=False)
    for lock in (old, first, second):
        assert lock._read().token == old._me.token
    first._write_holder(over=True)
    with pytest.raises(FileExistsError):
        second._write_holder(over=True)
    # The old holder had read its own token, was stopped, and writes its heartbeat now.
    with pytest.raises(FileExistsError):
        old._write_beat()
    assert old.lost().startswith("was taken over by pid")
    old._write_beat()
    assert first._read().token == first._me.token
    # So does one that was not, and each of its heartbeats is written over the one before.
    for _ in range(2):
        first._write_beat()
        first.require()
    # The answer of a takeover is lost, and the library asks again.
    write = place.write

    def twice(name, content, *, over=True):
        write(name, content, over=over)
        write(name, content, over=over)

    second._read()
    monkeypatch.setattr(place, "write", twice)
    second._write_holder(over=True)
    monkeypatch.undo()
    assert first.lost().startswith("was taken over by pid")
    assert second.lost() == ""

    # A server that refuses each version.
    def never(name, content, *, over=True):
        raise FileExistsError(name)

    first._read()
    monkeypatch.setattr(place, "write", never)
    with pytest.raises(store.StoreError, match="it does not write over an object that has not changed"):
        first._write_holder(over=True)


def test_a_checkpoint_comes_back_from_each_kind_of_store(place, filled, tiny_config, tmp_path):
    with held(place) as lock:
        config, run = tiny_config().checkpoint, tmp_path / "run"
        there = stored_checkpoints.StoredCheckpoints(place, lock, filled, config)
        for step in (2, 4):
            there.offer(step)
            assert there.wait() is None
        there.close()
        here = stored_checkpoints.StoredCheckpoints(place, lock, run, config)
        assert here.fetch(newer_than=3) == (4, [f"took checkpoint 4 from {place.address}"])
    names = json.loads((filled / "checkpoints/4/files.json").read_text())
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["4"]
    for name in ("files.json", *names):
        assert (run / "checkpoints/4" / name).read_bytes() == (filled / "checkpoints/4" / name).read_bytes()
    assert metrics(run) == metrics(filled)


def test_a_run_that_lost_its_store_writes_nothing_more_there(door, bucket, filled, tiny_config, caplog):
    place = Store(bucket)
    config = store_config(tiny_config, bucket, filled).checkpoint
    with held(place) as lock:
        stored = stored_checkpoints.StoredCheckpoints(place, lock, filled, config)
        stored.offer(2)
        assert stored.wait() is None
        place.write("holder.json", ELSEWHERE.beat())
        before = objects(door, bucket)
        stored.offer(4)
        why = "the store was taken over by pid 1234 on h1"
        failure = stored.wait()
        assert str(failure).startswith(f"Checkpoint 4 could not be copied to {bucket} ({why}): it is safe in {filled}/")
        assert failure.exit_code == exit_codes.BAD_INPUT
        assert f"Checkpoint 4 is not in {bucket} ({why}): training continues." in caplog.text
        stored.close()
    assert objects(door, bucket) == before


# ------------------------------------------------------------------------------------------------------------ a broken store


@pytest.mark.parametrize("fault", ["busy", "refused", "gone"])
def test_training_continues_without_the_store_and_says_so_at_the_end(
    door, bucket, whole, quick, tiny_config, tmp_path, caplog, monkeypatch, fault
):
    run, behind = tmp_path / "run", door.behind

    def rule(method, path):
        if method == "PUT" and "/4/" in path:
            if fault == "gone":
                # Nothing listens there: the connection breaks off.
                door.behind = 1
                return None
            return {"busy": 503, "refused": 403}[fault]

    door.rule = rule
    reason = {"busy": ".* 503 .*", "refused": "access is refused", "gone": "it does not answer as it should, .*"}[fault]
    sentence = (
        rf"^Checkpoint 4 could not be copied to {bucket} \({reason}\): it is safe in {run}/checkpoints; remove the cause,"
    )
    try:
        with pytest.raises(manager.SaveError, match=sentence) as error:
            fit(store_config(tiny_config, bucket, run))
    finally:
        door.behind, door.rule = behind, None
    # A supervisor restarts what may pass: the run then has nothing to train and copies the rest.
    assert error.value.exit_code == (exit_codes.BAD_INPUT if fault == "refused" else exit_codes.LOST)
    assert len(re.findall(rf"Checkpoint 4 is not in {bucket} \({reason}\): training continues.", caplog.text)) == 1
    assert committed(door, bucket) == [2]
    # The run has trained to its end, and the same command copies what is missing.
    assert_same_end(run, whole)
    if fault == "busy":
        fit(store_config(tiny_config, bucket, run))
        assert committed(door, bucket) == [2, 4]


def test_a_slow_store_does_not_hold_up_training(door, bucket, whole, tiny_config, tmp_path):
    run, trained = tmp_path / "run", []

    def rule(method, path):
        # Each file of step 2 arrives when step 4 is saved, and not before.
        if method == "PUT" and "/2/" in path:
            deadline = time.monotonic() + 60
            while not (saved := (run / "checkpoints/4").exists()) and time.monotonic() < deadline:
                time.sleep(0.01)
            trained.append(saved)

    door.rule = rule
    fit(store_config(tiny_config, bucket, run))
    assert trained
    assert all(trained)
    assert_same_end(run, whole)
    assert committed(door, bucket) == [2, 4]


UNAVAILABLE = "it does not answer as it should, Server returned non-2xx status code: 503 Service Unavailable"
UNKNOWN = "Server returned non-2xx status code: 501 Not Implemented"


@pytest.mark.parametrize(
    ("status", "reason", "fix", "code"),
    [
        (403, "access is refused", "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.", exit_codes.BAD_INPUT),
        (503, UNAVAILABLE, "remove the cause, or leave checkpoint.store out.", exit_codes.LOST),
        (507, "it is full", "remove the cause, or leave checkpoint.store out.", exit_codes.BAD_INPUT),
        # Conditional writes are not known.
        (501, UNKNOWN, "remove the cause, or leave checkpoint.store out.", exit_codes.BAD_INPUT),
    ],
)
def test_a_start_tells_at_once_what_the_store_refuses(
    door, bucket, quick, tiny_config, tmp_path, monkeypatch, status, reason, fix, code
):
    # Reading is allowed.
    door.rule = lambda method, path: status if method == "PUT" else None
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("a device was used"))
    with pytest.raises(ConfigError) as error:
        fit(store_config(tiny_config, bucket, tmp_path / "run"))
    assert str(error.value) == f"checkpoint.store={bucket} cannot be used ({reason}): {fix}"
    assert error.value.exit_code == code


def test_a_store_that_is_away_at_a_start_is_restartable(door, bucket, quick, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(door, "behind", 1)
    with pytest.raises(ConfigError, match=r"cannot be used \(it does not answer as it should, ") as error:
        fit(store_config(tiny_config, bucket, tmp_path / "run"))
    assert error.value.exit_code == exit_codes.LOST


@pytest.mark.parametrize(("status", "code"), [(503, None), (403, exit_codes.BAD_INPUT)])
def test_a_stopped_run_ends_as_a_signal_does_unless_the_store_refuses(
    door, bucket, quick, tiny_config, tmp_path, monkeypatch, caplog, status, code
):
    monkeypatch.setattr(SignalHandler, "actions_after", lambda self, step: StepActions(True, "SIGTERM"))
    run = tmp_path / "run"
    config = store_config(tiny_config, bucket, run, "checkpoint.every_steps=null")
    door.rule = lambda method, path: status if method == "PUT" and "/1/" in path else None
    sentence = f"Checkpoint 1 could not be copied to {bucket} ("
    if code is None:
        assert fit(config).stopped_by == "SIGTERM"
        assert sentence in caplog.text
    else:
        with pytest.raises(manager.SaveError, match=re.escape(sentence)) as error:
            fit(config)
        assert error.value.exit_code == code
    assert saved_steps(run / "checkpoints") == [1]
    assert committed(door, bucket) == []


def test_a_host_without_the_library_says_so_when_all_ask(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    place = Store("s3://runs/without")
    with pytest.raises(ConfigError, match=r"^s3:// needs obstore: pip install 'jaxllm\[stores\]'\.$"):
        place.steps()
    config = tiny_config("checkpoint.store=s3://runs/without").checkpoint
    with pytest.raises(ConfigError, match=r"^s3:// needs obstore"), stored_checkpoints.hold_store(tmp_path, config):
        pass


def test_a_bucket_must_exist(door, tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"^checkpoint.store=s3://nowhere/run cannot be used \(the bucket is not there\): "):
        fit(store_config(tiny_config, "s3://nowhere/run", tmp_path / "run"))


@contextmanager
def copier(address, run_dir, config):
    """Copies of a run's checkpoints, and the lock."""
    place = Store(address)
    with held(place) as lock:
        stored = stored_checkpoints.StoredCheckpoints(place, lock, run_dir, config.checkpoint)
        try:
            yield stored
        finally:
            stored.close()


class Hold:
    """A rule of a server: holds requests of a method whose path has a word until `go`. `reached`: it holds `count`."""

    def __init__(self, method, word, count=1):
        self._method, self._word, self._missing = method, word, threading.Semaphore(count - 1)
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, method, path):
        if method == self._method and self._word in path:
            if not self._missing.acquire(blocking=False):
                self.reached.set()
            self.go.wait(60)


def no_links(source, target, **_):
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("deleted", ["before", "inside"])
def test_a_checkpoint_that_is_deleted_before_it_is_copied_is_given_up(
    door, bucket, filled, tiny_config, tmp_path, caplog, deleted, monkeypatch
):
    run = Path(shutil.copytree(filled, tmp_path / "run"))
    monkeypatch.setattr(os, "link", no_links)
    hold = Hold("GET", "prefix")
    with copier(bucket, run, store_config(tiny_config, bucket, run)) as stored:
        if deleted == "inside":
            door.rule = hold
            stored.offer(2)
            assert hold.reached.wait(60)
        shutil.rmtree(run / "checkpoints/2")
        hold.go.set()
        stored.offer(2) if deleted == "before" else None
        failure = stored.wait()
        assert "it was deleted here before it was copied" in str(failure)
        assert failure.exit_code == exit_codes.BAD_INPUT
        stored.offer(4)
        assert stored.wait() is None
    assert committed(door, bucket) == [4]
    assert caplog.text.count("it was deleted here before it was copied") == 1


def test_what_waits_or_is_being_copied_outlives_checkpoint_keep(door, bucket, filled, tiny_config, tmp_path):
    """checkpoint.keep=1 and copies that are slower than saves: the run deletes each checkpoint before its copy is done."""
    run, source = tmp_path / "run", filled / "checkpoints/4"
    hold = door.rule = Hold("PUT", "/1/state")
    with copier(bucket, run, store_config(tiny_config, bucket, run, "checkpoint.keep=1")) as stored:
        # Left by a run that was killed.
        (run / ".to-store/7").mkdir(parents=True)
        for step in (1, 2, 3):
            shutil.copytree(source, run / "checkpoints" / str(step))
            stored.offer(step)
            assert step > 1 or hold.reached.wait(60)
            shutil.rmtree(run / "checkpoints" / str(step))
        # Of those that wait the newest does.
        assert sorted(path.name for path in (run / ".to-store").iterdir()) == ["1", "3"]
        hold.go.set()
        assert stored.wait() is None
        assert list((run / ".to-store").iterdir()) == []
    assert committed(door, bucket) == [3]
    written = {path for method, path in door.seen if method == "PUT" and bucket.removeprefix("s3:/") in path}
    assert any("/1/files.json" in path for path in written)
    assert not any("/2/" in path for path in written)
    assert not (run / ".to-store").exists()


def test_a_run_that_fails_ends_the_copy_under_way(door, bucket, filled, tiny_config):
    # All that are under way: one that the server takes after the end would look like a new one.
    hold = door.rule = Hold("PUT", "/4/state", FILES_AT_ONCE)
    with copier(bucket, filled, store_config(tiny_config, bucket, filled)) as stored:
        stored.offer(4)
        assert hold.reached.wait(60)
        stored.close()
        # The request is given up, before the server has answered.
        assert not hold.go.is_set()
        assert not stored._thread.is_alive()
        del door.seen[:]
        hold.go.set()
    assert {path for method, path in door.seen if method == "PUT"} == set()
    assert committed(door, bucket) == []


def test_a_copy_lists_the_store_twice(door, bucket, filled, tiny_config):
    with copier(bucket, filled, store_config(tiny_config, bucket, filled)) as stored:
        stored.offer(2)
        assert stored.wait() is None
        del door.seen[:]
        stored.offer(4)
        assert stored.wait() is None
        listed = [path for method, path in door.seen if method == "GET" and "list-type=2" in path]
    assert len(listed) == 2
    assert "%2F4%2F" in listed[1]


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_that_is_damaged_in_the_store_is_copied_again(door, copied, filled, tiny_config, known):
    whole, key = objects(door, copied), array_of(door, copied, 4)
    place = Store(copied)
    with held(place) as lock:
        stored = stored_checkpoints.StoredCheckpoints(place, lock, filled, tiny_config().checkpoint)
        if known:
            change_a_byte(door, key)
            stored.damaged[4] = "its bytes have changed"
        else:
            door.client.delete_object(Bucket="runs", Key=key)
        stored.offer(4)
        assert stored.wait() is None
        assert stored.damaged == {}
        stored.close()
    assert objects(door, copied) == whole
    name = key.partition("/4/")[2]
    assert place.read(f"4/{name}", 2**30) == (filled / "checkpoints/4" / name).read_bytes()


def test_keep_and_keep_every_steps_hold_in_the_store(door, bucket, filled, tiny_config, tmp_path):
    run = tmp_path / "run"
    for step in range(1, 8):
        shutil.copytree(filled / "checkpoints/4", run / "checkpoints" / str(step))
    place, config = Store(bucket), store_config(tiny_config, bucket, run, "checkpoint.keep=2", "checkpoint.keep_every_steps=3")
    with held(place) as lock:
        stored = stored_checkpoints.StoredCheckpoints(place, lock, run, config.checkpoint)
        found = []
        for step in range(1, 8):
            stored.offer(step)
            assert stored.wait() is None
            found.append(committed(door, bucket))
        stored.close()
    assert found == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7]]
    # Nothing of the others is left.
    assert {name.partition("/")[0] for name in objects(door, bucket)} == {"3", "6", "7"}


# ------------------------------------------------------------------------------------------------------------------ the config


def test_a_run_needs_a_local_folder_and_an_address_with_a_prefix(tiny_config):
    with pytest.raises(ConfigError, match=r"^run.dir=s3://runs/first is an address, .* checkpoint.store=s3://runs/first\.$"):
        tiny_config("run.dir=s3://runs/first")
    for address in ("runs/first", "s3://runs", "s3://runs/", "https://host/runs", "s3://runs/a*", "gs://runs/a#1"):
        with pytest.raises(ConfigError, match=r"^checkpoint.store=.* is not an address of a store: write s3://BUCKET/PREFIX"):
            tiny_config(f"checkpoint.store={address!r}")
