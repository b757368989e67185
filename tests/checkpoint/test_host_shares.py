"""Training on hosts that share no disk: each "host" is a process with a run directory of its own, and they share a store."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from outside import free_port, wait_until
from run_files import saved_state, steps_of
from tiny import TINY

from jaxllm.cli.app import app
from jaxllm.run.loop import fit

pytest.importorskip("obstore")
pytest.importorskip("moto")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
CHECKOUT = Path(__file__).parents[2]
COMMON = ("optimizer.schedule=constant", "checkpoint.every_steps=2", "data.held_out_fraction=0.0", "parallel.zero=3")
BEGAN = "s3://runs/began"
SIX = ("parallel.data=6", "train.steps=4", f"train.init_from={BEGAN}")
# These folders are on one host.
FIRST = """
from jaxllm.checkpoint import host_shares, stored_checkpoints
host_shares.SHARED_LIMIT_S, host_shares.LOOK_S, stored_checkpoints.WAITS_S = 1.0, 0.05, (0.01,)
"""


@pytest.fixture(scope="module")
def hosts(text_file, tmp_path_factory):
    """hosts(folders, devices, *overrides) -> processes, one for each folder, in which it works with run.dir=run; with absent=1
    the launch has one more host, which does not come."""
    recipe = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    train = TINY["train"] | {"global_batch_sequences": 24}
    recipe.write_text(yaml.safe_dump(TINY | {"train": train, "data": {"source": "files", "paths": [str(text_file)]}}))
    started = []

    def start(folders, devices, *overrides, absent=0, first=FIRST):
        port, command = free_port(), ["train", str(recipe), f"run.cpu_devices={devices}", "run.dir=run", *COMMON, *overrides]
        processes = []
        for rank, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            place = {
                "JAXLLM_COORDINATOR": f"127.0.0.1:{port}",
                "JAXLLM_NUM_PROCESSES": str(len(folders) + absent),
                "JAXLLM_PROCESS_ID": str(rank),
                "JAXLLM_HOSTS": ",".join(f"127.0.0.{host + 1}" for host in range(len(folders) + absent)),
                "XDG_CACHE_HOME": str(recipe.parent / "cache"),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", f"{first}\nfrom jaxllm.cli.app import main; main()", *command],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path]), **place},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        started.extend(processes)
        return processes

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(processes) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each."""
    outputs = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def objects(door, prefix) -> dict[str, int]:
    pages = door.client.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=f"{prefix}/")
    return {one["Key"].removeprefix(f"{prefix}/"): one["Size"] for page in pages for one in page.get("Contents", [])}


def committed(door, prefix) -> list[int]:
    return sorted(int(name.partition("/")[0]) for name in objects(door, prefix) if re.fullmatch(r"\d+/files.json", name))


def copy_of(door, prefix, step, folder) -> Path:
    """A step of the store, copied plainly to a disk."""
    for name in objects(door, prefix):
        if name.startswith(f"{step}/"):
            path = folder / "checkpoints" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(door.client.get_object(Bucket="runs", Key=f"{prefix}/{name}")["Body"].read())
    return folder


def weights_in(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def metrics(folder):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(folder / "run")]


@pytest.fixture(scope="module")
def began(door, tiny_config, tmp_path_factory):
    """The run from whose weights the others begin, in the store BEGAN."""
    folder, rest = tmp_path_factory.mktemp("began"), ("data.held_out_fraction=0.0", "train.steps=1")
    fit(tiny_config(f"run.dir={folder}", f"checkpoint.store={BEGAN}", *rest))
    assert committed(door, "began") == [1]


@pytest.fixture(scope="module")
def disk(door, hosts, began, tmp_path_factory):
    """Folder of an undisturbed run of two processes that share a disk, with a store."""
    folder = tmp_path_factory.mktemp("disk")
    for code, _, error in ends(hosts([folder, folder], 3, *SIX, "checkpoint.store=s3://runs/shared")):
        assert code == 0, error
    assert committed(door, "shared") == [2, 4]
    assert yaml.safe_load((folder / "run/config.yaml").read_text())["train"]["init_from"] == f"{BEGAN}/1"
    assert not (folder / "run/shares").exists()
    return folder


@pytest.fixture(scope="module")
def resumed(door, hosts, disk, tmp_path_factory):
    """Two hosts' folders: a run with the store s3://runs/parts that was killed again and again, and ended on these."""
    home, store = tmp_path_factory.mktemp("hosts"), "checkpoint.store=s3://runs/parts"

    def kill_at(method, pattern, folders, there=lambda: True):
        reached, hold = threading.Event(), threading.Event()

        def rule(asked, path):
            if asked == method and re.search(pattern, path):
                reached.set()
                hold.wait(60)
                return 503

        door.rule = rule
        processes = hosts(folders, 3, *SIX, store)
        wait_until(reached.is_set, processes[0], 200)
        wait_until(there, processes[0], 50)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        ends(processes)
        hold.set()
        door.rule = None
        assert committed(door, "parts") == [2]

    # A file of process 1 does not arrive, and one of process 0 has.
    kill_at(
        "PUT", "/4/.*/process_1$", [home / "a", home / "b"], lambda: any(name[:2] == "4/" for name in objects(door, "parts"))
    )
    # The run from which this one began has a newer checkpoint.
    for name in objects(door, "began"):
        source = {"Bucket": "runs", "Key": f"began/{name}"}
        door.client.copy_object(Bucket="runs", Key=f"began/3{name.removeprefix('1')}", CopySource=source)
    del door.seen[:]
    # On other hosts: while they fetch, and when all parts have arrived. Then one of the two is lost.
    kill_at("GET", "/2/state/", [home / "c", home / "d"])
    kill_at("PUT", "/4/files.json", [home / "c", home / "d"])
    left = [home / "c", home / "e"]
    (code, out, error), (other_code, _, other_error) = ends(hosts(left, 3, *SIX, store))
    assert (code, other_code) == (0, 0), error + other_error
    # The host that is lost has the other part.
    lacking = rf"{home}/c/run/shares of each host has 1 of the 2 parts of checkpoint 4 intact: a start with all of them "
    assert re.search(f"took checkpoint 2 from s3://runs/parts\n{lacking}.*\nresumed from step 2 in run", out), out
    assert [path for _, path in door.seen if "began" in path] == []
    for folder in left:
        assert yaml.safe_load((folder / "run/config.yaml").read_text())["train"]["init_from"] == f"{BEGAN}/1"
        assert list((folder / "run/shares").rglob("files.json")) == []
    return left


@pytest.mark.slow
def test_killed_again_and_again_a_run_ends_bit_for_bit_as_on_a_shared_disk(door, disk, resumed, tmp_path):
    assert metrics(resumed[0]) == metrics(disk)
    assert not (resumed[1] / "run/metrics.jsonl").exists()
    assert committed(door, "parts") == [2, 4]
    listed = json.loads(door.client.get_object(Bucket="runs", Key="parts/4/files.json")["Body"].read())
    whole = {"4/files.json", "4/run/metrics.jsonl", "4/run/config.yaml", *(f"4/{name}" for name in listed)}
    assert {name for name in objects(door, "parts") if name.startswith("4/")} == whole
    # A plain copy is an ordinary checkpoint.
    copied = copy_of(door, "parts", 4, tmp_path / "copied")
    jax.tree.map(np.testing.assert_array_equal, saved_state(copied, 4), saved_state(disk / "run", 4))
    for name, source in (("joined", copied), ("ordinary", disk / "run")):
        app(["export", str(source / "checkpoints/4"), str(tmp_path / name)], standalone_mode=False)
    joined, ordinary = (weights_in(tmp_path / name) for name in ("joined", "ordinary"))
    assert joined == ordinary
    assert joined


@pytest.mark.slow
def test_three_hosts_and_one_resume_and_no_part_is_lost(door, hosts, disk, resumed, tiny_config, tmp_path, capfd, monkeypatch):
    store, six = "checkpoint.store=s3://runs/parts", "train.steps=6"
    # The newest is damaged, and later a file of process 2 does not arrive.
    key = next(name for name in objects(door, "parts") if re.match(r"4/state/params[^/]*/[\d.]+$", name))
    content = door.client.get_object(Bucket="runs", Key=f"parts/{key}")["Body"].read()
    door.client.put_object(Bucket="runs", Key=f"parts/{key}", Body=content[:-1] + bytes([content[-1] ^ 1]))
    door.rule = lambda method, path: 403 if method == "PUT" and "/6/" in path and "process_2" in path else None
    three, mesh = [tmp_path / "e", *resumed], ("parallel.data=3", "parallel.tensor=2", store, six)
    # A fourth host is lost.
    four = ("parallel.data=4", "parallel.tensor=2", store, six, "launch.least_hosts=3", "launch.wait_s=5")
    (code, out, error), *others = ends(hosts(three, 2, *four, absent=1))
    door.rule = None
    assert [code, *(other for other, *_ in others)] == [2, 2, 2], error
    assert "127.0.0.4 is missing: training on without, the same batches in " in out
    damaged = f"checkpoint 4 in s3://runs/parts is damaged ({key[2:]} has changed): it stays there, unused"
    assert f"{damaged}\ntook checkpoint 2 from s3://runs/parts\nresumed from step 2 in run\n" in out
    assert "Checkpoint 6 is not in s3://runs/parts (access is refused, for process 2 on " in error
    assert re.search(r"Checkpoint 6 could not be copied to .*: it is safe in \S*/run/shares of each host;", error)
    assert committed(door, "parts") == [2, 4]

    # One host, alone, which has no part of step 6.
    alone = ("run.cpu_devices=8", "parallel.data=4", "parallel.tensor=2", *COMMON, "train.global_batch_sequences=24", six)
    fit(tiny_config(*alone, store, f"run.dir={tmp_path / 'f/run'}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fit(tiny_config(*alone, f"run.dir={tmp_path / 'g/run'}", f"train.init_from={BEGAN}/1"))
    assert "took checkpoint 4 from s3://runs/parts\nresumed from step 4 in " in capfd.readouterr().out
    assert committed(door, "parts") == [4, 6]
    assert metrics(tmp_path / "f")[:2] == metrics(disk)[:2]
    np.testing.assert_allclose(metrics(tmp_path / "f"), metrics(tmp_path / "g"), rtol=1e-4)

    # The three have all parts of it: the same command, in another order of processes, copies them.
    for name in objects(door, "parts"):
        if name.startswith("6/"):
            door.client.delete_object(Bucket="runs", Key=f"parts/{name}")
    (code, out, error), *others = ends(hosts([three[1], three[2], three[0]], 2, *mesh))
    assert [code, *(other for other, *_ in others)] == [0, 0, 0], error
    assert "copied checkpoint 6, of which the hosts had all parts, to s3://runs/parts\n" in out
    assert "resumed from step 6 in run\nnothing to train" in out
    assert committed(door, "parts") == [4, 6]
    assert [path for folder in three for path in (folder / "run/shares").rglob("files.json")] == []


# Each process stops for ever before it saves step 4, when it has its part of step 3.
STOPS = f"""{FIRST}
import pathlib, time
from jaxllm.checkpoint.manager import Checkpoints
real = Checkpoints.save

def save(self, step, *rest):
    if step == 4:
        self._settle()
        pathlib.Path("stopped").touch()
        time.sleep(600)
    real(self, step, *rest)

Checkpoints.save = save
"""


@pytest.mark.slow
def test_temporary_checkpoints_stay_on_the_hosts_and_the_same_hosts_resume_from_them(door, hosts, disk, tmp_path):
    """checkpoint.store_every_steps=2, and all hosts die with their parts of step 3; what the store has is lost."""
    folders = [tmp_path / "a", tmp_path / "b"]
    keys = (*SIX, "checkpoint.every_steps=1", "checkpoint.store_every_steps=2", "checkpoint.store=s3://runs/temporary")
    processes = hosts(folders, 3, *keys, first=STOPS)
    for folder in folders:
        wait_until((folder / "stopped").exists, processes[0], 200)
    wait_until(lambda: committed(door, "temporary") == [2], processes[0], 60)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    ends(processes)
    assert {int(name.partition("/")[0]) for name in objects(door, "temporary") if name[0].isdecimal()} == {2}
    for name in objects(door, "temporary"):
        if name.startswith("2/"):
            door.client.delete_object(Bucket="runs", Key=f"temporary/{name}")
    del door.seen[:]
    (code, out, error), (other_code, _, other_error) = ends(hosts(folders, 3, *keys))
    assert (code, other_code) == (0, 0), error + other_error
    # A run that resumes does not read what it began with.
    assert [path for _, path in door.seen if "began" in path] == []
    assert "copied checkpoint 3, of which the hosts had all parts, to s3://runs/temporary\n" in out
    assert "resumed from step 3 in run\n" in out
    assert metrics(folders[0]) == metrics(disk)
    copied = copy_of(door, "temporary", 4, tmp_path / "copied")
    jax.tree.map(np.testing.assert_array_equal, saved_state(copied, 4), saved_state(disk / "run", 4))
    assert committed(door, "temporary") == [3, 4]
