"""Temporary checkpoints stay in run.dir, and those of checkpoint.store_every_steps go to the store too."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import store_servers
import yaml
from run_files import saved_state, steps_of

from jaxllm.checkpoint import stored_checkpoints
from jaxllm.checkpoint.files import describe_run, saved_steps
from jaxllm.checkpoint.host_shares import HostShares
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.checkpoint.store import Store, StoreLock
from jaxllm.config import ConfigError
from jaxllm.data import buckets
from jaxllm.run import exports
from jaxllm.run.loop import fit
from jaxllm.run.signals import SignalHandler, StepActions
from jaxllm.weights.hf_convert import to_hf

pytest.importorskip("obstore")
pytest.importorskip("moto")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
MESH = ("run.cpu_devices=8", "parallel.data=8", "optimizer.schedule=constant", "data.held_out_fraction=0.0", "train.steps=6")
SOME = ("checkpoint.every_steps=1", "checkpoint.store_every_steps=2", "checkpoint.asynchronous=false")


def committed(address) -> list[int]:
    return store_servers.committed(Store(address))


def ever_written(door, address) -> set[int]:
    """The steps of which any file was sent."""
    prefix = address.removeprefix("s3:/")
    found = (re.match(rf"{prefix}/(\d+)/", path) for method, path in door.seen if method in ("PUT", "POST"))
    return {int(one[1]) for one in found if one}


@contextmanager
def both_places(run, config):
    """The local checkpoints of a run and those in its store."""
    place = Store(config.checkpoint.store)
    lock = StoreLock(place)
    lock.take()
    stored = stored_checkpoints.StoredCheckpoints(place, lock, run, config.checkpoint)
    checkpoints = Checkpoints(run, config.checkpoint, stored=stored)
    try:
        yield checkpoints, stored
    finally:
        checkpoints.close()
        stored.close()
        lock.release()


def save(checkpoints, config, step):
    checkpoints.save(step, {"weight": jnp.full(4, step)}, describe_run(config, step, "text"))


# ----------------------------------------------------------------------------------------------------------- which goes where


def test_keep_holds_in_each_place_and_what_is_kept_for_good_in_the_store_alone(door, bucket, tiny_config, tmp_path):
    keys = [*SOME, "checkpoint.keep=2", "checkpoint.keep_every_steps=3", f"checkpoint.store={bucket}"]
    config, found = tiny_config(*keys, f"run.dir={tmp_path}"), []
    with both_places(tmp_path, config) as (checkpoints, stored):
        for step in range(1, 9):
            save(checkpoints, config, step)
            assert stored.wait() is None
            found.append((saved_steps(tmp_path / "checkpoints"), committed(bucket)))
        save(checkpoints, config, 9 + 2)
        # The last one is copied, whatever its step.
        assert ever_written(door, bucket) == {2, 3, 4, 6, 8}
        checkpoints.wait()
    assert [local for local, _ in found] == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [5, 6], [6, 7], [6, 7, 8]]
    assert [there for _, there in found] == [[], [2], [2, 3], [3, 4], [3, 4], [3, 4, 6], [3, 4, 6], [3, 6, 8]]
    assert saved_steps(tmp_path / "checkpoints") == [8, 11]
    assert committed(bucket) == [3, 6, 8, 11]


def test_one_that_the_store_lacks_is_not_given_up_and_the_next_one_stands_in(door, bucket, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_checkpoints, "WAITS_S", ())
    monkeypatch.setattr(buckets, "TRIES", 1)
    keys = [*SOME, "checkpoint.keep=1", "checkpoint.keep_every_steps=2", f"checkpoint.store={bucket}"]
    config = tiny_config(*keys, f"run.dir={tmp_path}")
    with both_places(tmp_path, config) as (checkpoints, stored):
        door.rule = lambda method, path: 403 if method == "PUT" and "/2/" in path else None
        for step in (2, 3, 4, 5, 6, 7, 8):
            save(checkpoints, config, step)
            stored.wait()
        assert ever_written(door, bucket) == {2, 3, 4, 6, 8}
        assert committed(bucket) == [4, 6, 8]
        assert saved_steps(tmp_path / "checkpoints") == [2, 8]
    door.rule = None
    with both_places(tmp_path, config) as (checkpoints, stored):
        checkpoints.offer_saved()
        assert stored.wait() is None
        assert committed(bucket) == [2, 4, 6, 8]
        save(checkpoints, config, 9)
        save(checkpoints, config, 10)
        assert stored.wait() is None
        assert saved_steps(tmp_path / "checkpoints") == [10]
    assert committed(bucket) == [2, 4, 6, 8, 10]


def test_after_a_failed_copy_and_a_kill_the_newest_stands_in_for_what_is_gone(door, bucket, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_checkpoints, "WAITS_S", ())
    config = tiny_config(*SOME, "checkpoint.keep=1", f"checkpoint.store={bucket}", f"run.dir={tmp_path}")
    (tmp_path / ".to-store/1").mkdir(parents=True)
    with both_places(tmp_path, config) as (checkpoints, stored):
        door.rule = lambda method, path: 403 if method == "PUT" and re.search(r"/\d+/", path) else None
        for step in (2, 3):
            save(checkpoints, config, step)
            stored.wait()
    door.rule = None
    assert (saved_steps(tmp_path / "checkpoints"), committed(bucket)) == ([3], [])
    with both_places(tmp_path, config) as (checkpoints, stored):
        checkpoints.offer_saved()
        assert stored.wait() is None
    assert committed(bucket) == [3]
    with both_places(tmp_path, config) as (checkpoints, stored):
        checkpoints.offer_saved()
        assert stored.wait() is None
    assert committed(bucket) == [3]
    assert not (tmp_path / ".to-store").exists()


def test_an_older_one_of_another_machine_stays_in_the_store(door, bucket, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_checkpoints, "WAITS_S", ())
    first, second = tmp_path / "first", tmp_path / "second"
    config = tiny_config(*SOME, f"checkpoint.store={bucket}")
    with both_places(first, config) as (checkpoints, stored):
        door.rule = lambda method, path: 403 if method == "PUT" and "/2/" in path else None
        save(checkpoints, config, 2)
        stored.wait()
    door.rule = None
    with both_places(second, config) as (checkpoints, stored):
        for step in (2, 3):
            checkpoints.save(step, {"weight": jnp.full(4, 10 * step)}, describe_run(config, step, "text"))
        checkpoints.wait()
    assert committed(bucket) == [2, 3]
    listed = Store(bucket).read("2/files.json", 10**6)
    with both_places(first, config) as (checkpoints, stored):
        assert checkpoints.latest == 3
        checkpoints.offer_saved()
        assert stored.wait() is None
    assert listed != (first / "checkpoints/2/files.json").read_bytes()
    assert Store(bucket).read("2/files.json", 10**6) == listed


def test_one_that_is_to_be_exported_waits(bucket, tiny_config, tmp_path):
    keys = [*SOME, "checkpoint.keep=1", "checkpoint.keep_every_steps=2", "checkpoint.export_every_steps=2"]
    config, found = tiny_config(*keys, f"checkpoint.store={bucket}", f"run.dir={tmp_path}"), []
    awaited = {2, 4}
    with both_places(tmp_path, config) as (checkpoints, stored):
        checkpoints.is_awaited = awaited.__contains__
        for step in range(2, 7):
            save(checkpoints, config, step)
            assert stored.wait() is None
            found.append(saved_steps(tmp_path / "checkpoints"))
            if step == 4:
                awaited.remove(2)
    assert found == [[2], [2, 3], [2, 4], [4, 5], [4, 6]]


def test_parts_that_wait_for_their_turn_stay_on_hosts_that_share_no_disk(tiny_config, tmp_path):
    """A copy is slower than several saves: the part of a checkpoint that is to be copied is not deleted for temporary ones."""
    config = tiny_config(*SOME, "checkpoint.store_every_steps=4", "checkpoint.keep=1", "checkpoint.store=s3://runs/parts")
    shares = HostShares(tmp_path, config.checkpoint, Store("s3://runs/parts"))
    for step in range(1, 8):
        (shares.folder / str(step)).mkdir(parents=True)
        shares._prune()
    assert saved_steps(shares.folder) == [4, 6, 7]
    shares.done, shares.committed = {4}, 4
    shares._prune()
    assert saved_steps(shares.folder) == [6, 7]


def test_a_save_never_waits_for_the_store(door, bucket, tiny_config, tmp_path):
    asked, answered, go = threading.Event(), [], threading.Event()

    def rule(method, path):
        if "holder.json" not in path:
            asked.set()
            go.wait(30)
            answered.append(path)

    config = tiny_config(f"checkpoint.store={bucket}", f"run.dir={tmp_path}")
    with both_places(tmp_path, config) as (checkpoints, _):
        door.rule = rule
        save(checkpoints, config, 1)
        # Nothing is sent before a checkpoint is complete.
        assert not asked.is_set()
        save(checkpoints, config, 2)
        assert asked.wait(30)
        for step in (3, 4):
            save(checkpoints, config, step)
        assert saved_steps(tmp_path / "checkpoints")[-1] >= 3
        assert answered == []
        go.set()
        checkpoints.wait()
    assert committed(bucket)[-1] == 4


# ---------------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """The run directory of six steps that nothing disturbed, without a store."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(tiny_config(*MESH, "checkpoint.keep_every_steps=4", f"run.dir={folder}"))
    return folder


def assert_same_end(folder, whole):
    numbers = [[(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(one)] for one in (folder, whole)]
    assert numbers[0] == numbers[1]
    jax.tree.map(np.testing.assert_array_equal, saved_state(folder, 6), saved_state(whole, 6))


KILLED = """
import os, signal, sys
from jaxllm import fit, load_config
from jaxllm.checkpoint.store import Store

config = load_config(sys.argv[1])

def on_step(metrics, trainer):
    if metrics["step"] == 4:
        while "files.json" not in Store(config.checkpoint.store).steps().get(2, {}):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

fit(config, on_step=on_step)
"""


def test_a_killed_run_takes_the_newer_local_one_and_a_new_machine_the_last_stored_one(
    door, bucket, whole, tiny_config, tmp_path, capsys
):
    def config(address, run):
        return tiny_config(*MESH, *SOME, f"checkpoint.store={address}", f"run.dir={run}")

    recipe, killed, fresh = tmp_path / "tiny.yaml", tmp_path / "killed", tmp_path / "fresh"
    recipe.write_text(yaml.safe_dump(config(bucket, killed).model_dump(mode="json")))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", KILLED, recipe], env=variables, capture_output=True, text=True, timeout=200)
    assert ended.returncode == -9, ended.stderr
    assert saved_steps(killed / "checkpoints") == [2, 3]
    assert committed(bucket) == [2]
    for name in ("files.json", *Store(bucket).steps()[2]):
        source = {"Bucket": "runs", "Key": f"{bucket.removeprefix('s3://runs/')}/2/{name}"}
        door.client.copy_object(Bucket="runs", Key=f"copy/2/{name}", CopySource=source)
    for address, run, said in (
        (bucket, killed, f"resumed from step 3 in {killed}\n"),
        ("s3://runs/copy", fresh, f"took checkpoint 2 from s3://runs/copy\nresumed from step 2 in {fresh}\n"),
    ):
        capsys.readouterr()
        fit(config(address, run))
        out = capsys.readouterr().out
        assert said in out
        assert ("took" in out) == (run is fresh)
        assert_same_end(run, whole)
        assert committed(address) == [4, 6]
        assert saved_steps(run / "checkpoints") == [5, 6]
        assert yaml.safe_load((run / "config.yaml").read_text())["checkpoint"]["store_every_steps"] == 2
    assert ever_written(door, bucket) == {2, 4, 6}


def test_a_stopped_run_leaves_its_newest_in_the_store(bucket, tiny_config, tmp_path, monkeypatch):
    def stops(self, step):
        return StepActions(step == 3, "SIGTERM" if step == 3 else None)

    monkeypatch.setattr(SignalHandler, "actions_after", stops)
    keys = ("checkpoint.store_every_steps=5", f"checkpoint.store={bucket}", f"run.dir={tmp_path}")
    assert fit(tiny_config(*MESH, *keys)).stopped_by == "SIGTERM"
    assert committed(bucket) == [3]
    # The next start has nothing new to copy, and trains on; multiples are saved without checkpoint.every_steps.
    monkeypatch.undo()
    fit(tiny_config(*MESH, *keys, "checkpoint.keep=3"))
    assert committed(bucket) == [3, 5, 6]


def test_what_a_stop_left_unexported_is_exported_as_if_undisturbed(bucket, whole, tiny_config, tmp_path, monkeypatch):
    """An older checkpoint too, which the store has. It stays in run.dir for that: the export is slower than the run."""

    def stops(self, step):
        return StepActions(step == 5, "SIGTERM" if step == 5 else None)

    keys = ("export_every_steps=4", "keep_every_steps=4", "store_every_steps=4", "keep=1", f"store={bucket}")
    config = tiny_config(*MESH, *(f"checkpoint.{key}" for key in keys), f"run.dir={tmp_path / 'run'}")
    with monkeypatch.context() as patch:
        patch.setattr(exports, "BESIDE_TRAINING", (sys.executable, "-c", "import time; time.sleep(60)"))
        patch.setattr(SignalHandler, "actions_after", stops)
        assert fit(config).stopped_by == "SIGTERM"
    assert (committed(bucket), list((tmp_path / "run/exports").iterdir())) == ([4, 5], [])
    slow = f'while [ ! -e {tmp_path}/run/checkpoints/6 ]; do sleep 0.1; done; exec "$0" "$@"'
    monkeypatch.setattr(exports, "BESIDE_TRAINING", ("sh", "-c", slow, *exports.BESIDE_TRAINING))
    fit(config)
    assert saved_steps(tmp_path / "run/checkpoints") == [4, 6]
    to_hf(str(whole), str(tmp_path / "undisturbed"), step=4)
    found, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (tmp_path / "run/exports/4", tmp_path / "undisturbed")
    )
    assert found == expected
    assert [path.name for path in (tmp_path / "run/exports").iterdir()] == ["4"]


# ----------------------------------------------------------------------------------------------------------------- the config


def test_without_a_store_the_key_is_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"^checkpoint.store_every_steps=5 chooses what is copied to a store, .*: set check"):
        tiny_config("checkpoint.store_every_steps=5")
