"""Models in stores: the folder of this host that commands read in their place."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_folders import HUB, random_weights, write_folder
from hosts_in_threads import Run
from store_servers import gcs_door, s3_door

from jaxllm.cli import app as cli
from jaxllm.cluster import distributed
from jaxllm.config import ConfigError
from jaxllm.data import buckets, stores
from jaxllm.data.tokenizer import save_byte_tokenizer
from jaxllm.run import fewer_hosts, trainer
from jaxllm.run.loop import fit
from jaxllm.run.trainer import Trainer
from jaxllm.weights import stored_models
from jaxllm.weights.pretrained import load_model
from jaxllm.weights.stored_models import with_commits
from jaxllm.weights.weights import export, find_weights, initial_weights

pytest.importorskip("obstore")
pytest.importorskip("moto")
# Clients of the libraries are left to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
KINDS = ("hf", "jaxllm", "run", "checkpoint")


@pytest.fixture(scope="module")
def door():
    with s3_door("models") as door:
        yield door


@pytest.fixture(scope="module")
def run(door, tiny_config, tmp_path_factory):
    """A run on bytes of four steps, with a checkpoint of two, in s3://models/first too."""
    folder, store = tmp_path_factory.mktemp("runs") / "run", "checkpoint.store=s3://models/first"
    fit(tiny_config(f"run.dir={folder}", "checkpoint.every_steps=2", "data.held_out_fraction=0.0", store))
    return folder


@pytest.fixture(scope="module")
def folders(run, tmp_path_factory):
    """What the addresses of KINDS hold, on this disk."""
    parent = tmp_path_factory.mktemp("folders")
    config = {**HUB, "vocab_size": 256, "hidden_size": 32}
    write_folder(parent / "hf", config, random_weights(config), shards=2)
    save_byte_tokenizer(parent / "hf")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"):
        (parent / "hf" / name).parent.mkdir(exist_ok=True)
        (parent / "hf" / name).write_bytes(b"not read")
    export(str(run), str(parent / "jaxllm"))
    return {"hf": parent / "hf", "jaxllm": parent / "jaxllm", "run": run, "checkpoint": run / "checkpoints/2"}


@pytest.fixture
def place(door, folders, tmp_path, monkeypatch):
    """An address of this test alone, to which `put(kind)` copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(buckets, "TRIES", 1)
    yield lambda kind: address_of(door, folders, tmp_path.name, kind)
    door.rule = None
    door.failures.clear()


def address_of(door, folders, prefix, kind):
    if kind in ("run", "checkpoint"):
        for page in door.client.get_paginator("list_objects_v2").paginate(
            Bucket="models", Prefix=f"first/{'2/' * (kind == 'checkpoint')}"
        ):
            for key in (one["Key"] for one in page["Contents"]):
                target = f"{prefix}/{key}"
                door.client.copy_object(Bucket="models", Key=target, CopySource={"Bucket": "models", "Key": key})
        return f"s3://models/{prefix}/first" + ("/2" if kind == "checkpoint" else "")
    for path in folders[kind].rglob("*"):
        if path.is_file():
            key = f"{prefix}/{kind}/{path.relative_to(folders[kind]).as_posix()}"
            door.client.put_object(Bucket="models", Key=key, Body=path.read_bytes())
    return f"s3://models/{prefix}/{kind}"


def key_of(address, name):
    return f"{address.removeprefix('s3://models/')}/{name}"


def arrays(source):
    folder = find_weights("--model", str(source)).as_folder()
    return {path: folder.read(path) for path in folder.entries}


def gets(door, ending=""):
    return [path for method, path in door.seen if method == "GET" and "list-type" not in path and path.endswith(ending)]


def cached(tmp_path):
    return sorted(path for path in (tmp_path / "cache/jaxllm/models").iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_values_and_companions_of_the_local_one(door, folders, place, tmp_path, kind):
    address = place(kind)
    np.testing.assert_equal(arrays(address), arrays(folders[kind]))
    ours, theirs = (find_weights("--model", str(one)) for one in (address, folders[kind]))
    assert ours.model == theirs.model
    assert ours.outline.trained_on_bytes == theirs.outline.trained_on_bytes == (kind != "hf")
    assert (ours.outline.tokenizer is None) == (theirs.outline.tokenizer is None) == (kind != "hf")
    assert ours.description == ours.as_folder().description == address + ("/4" if kind == "run" else "")
    (home,) = cached(tmp_path)
    names = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    if kind == "hf":
        left_out = {"consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"}
        assert names == {path.relative_to(folders[kind]).as_posix() for path in folders[kind].rglob("*.*")} - left_out
    elif kind != "jaxllm":
        step = "4" if kind == "run" else "2"
        assert {name.split("/")[0] for name in names} == {"checkpoints", "config.yaml"}
        assert os.listdir(home / "checkpoints") == [step]
        assert set(os.listdir(home / "checkpoints" / step)) == {"state", "meta", "files.json"}

    # What is unchanged is not asked for again. What is changed is.
    door.seen.clear()
    np.testing.assert_equal(arrays(address), arrays(folders[kind]))
    assert gets(door) == []
    if kind in ("hf", "jaxllm"):
        name = "config.json" if kind == "hf" else "model.json"
        body = (folders[kind] / name).read_bytes().replace(b'"rope_theta": 20000.0', b'"rope_theta": 30000.0')
        door.client.put_object(Bucket="models", Key=key_of(address, name), Body=body.replace(b"10000.0", b"40000.0"))
        assert find_weights("--model", address).model["rope_theta"] == (30000 if kind == "hf" else 40000)
        assert len(cached(tmp_path)) == 2
        assert home in cached(tmp_path)


def test_a_step_is_chosen(folders, place, tmp_path):
    address = place("run")
    np.testing.assert_equal(arrays(folders["checkpoint"]), arrays(f"{address}/2"))
    assert find_weights("--model", address, 2).description == f"{address}/2"
    with pytest.raises(ConfigError, match=rf"^--model={address} has no checkpoint of step 3: it has 2, 4\.$"):
        find_weights("--model", address, 3)
    with pytest.raises(ConfigError, match=rf"^--step=2 selects a checkpoint of a run, and {address}/2 is not a run: leave it"):
        find_weights("--model", f"{address}/2", 2)


def change_a_byte(door, address, step):
    found = door.client.list_objects_v2(Bucket="models", Prefix=key_of(address, f"{step}/state/"))["Contents"]
    key = max(found, key=lambda one: one["Size"])["Key"]
    content = bytearray(door.client.get_object(Bucket="models", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    door.client.put_object(Bucket="models", Key=key, Body=bytes(content))
    return key


def test_a_damaged_checkpoint_is_named_and_passed_over(door, folders, place, tmp_path, caplog):
    address = place("run")
    name = change_a_byte(door, address, 4).partition("/4/")[2]
    np.testing.assert_equal(arrays(address), arrays(folders["checkpoint"]))
    assert f"The checkpoint {address}/4 is damaged ({name} has changed): it is not used." in caplog.messages
    with pytest.raises(ConfigError, match=rf"^--model={address}/4 is damaged \({name} has changed\): give another checkpoint"):
        find_weights("--model", f"{address}/4")
    door.client.delete_object(Bucket="models", Key=key_of(address, "2/meta/metadata"))
    with pytest.raises(ConfigError, match=r"no checkpoint in .*/first is intact: 4 \(.* has changed\), 2 \(meta/metadata is m"):
        find_weights("--model", address)
    # One without files.json is not complete; names that lead elsewhere are not written.
    door.client.delete_object(Bucket="models", Key=key_of(address, "4/files.json"))
    door.client.put_object(Bucket="models", Key=key_of(address, "2/files.json"), Body=b'{"state/../../../out": [1, 1]}')
    with pytest.raises(ConfigError, match=r"is intact: 2 \(files.json names state/../../../out\); give another\.$"):
        find_weights("--model", address)
    door.client.put_object(Bucket="models", Key=key_of(address, "2/run/tokenizer/../../../../out"), Body=b"{}")
    with pytest.raises(
        ConfigError, match=r"\(Encountered object with invalid path: .*/first/2/run/tokenizer/../../.*\): check the address"
    ):
        find_weights("--model", address)
    assert list(tmp_path.rglob("out*")) == []


def test_two_at_once_copy_once(door, folders, place, tmp_path):
    address, begun, waits = place("hf"), threading.Event(), threading.Event()

    def rule(method, path):
        if method == "GET" and path.endswith("tokenizer.json"):
            begun.set()
            waits.wait(30)

    door.rule = rule
    door.seen.clear()
    command = [sys.executable, "-c", "import sys; from jaxllm.weights.weights import find_weights"]
    command[-1] += f"; print('ready'); find_weights('--model', {address!r})"
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        assert begun.wait(60)
        ours = threading.Thread(target=find_weights, args=("--model", address))
        ours.start()
        waits.set()
        ours.join(60)
        assert (other.wait(60), ours.is_alive()) == (0, False)
    assert len(gets(door, "tokenizer.json")) == 1
    np.testing.assert_equal(arrays(address), arrays(folders["hf"]))


def test_what_did_not_arrive_whole_is_not_there(door, folders, place, tmp_path, monkeypatch):
    address = place("hf")
    door.rule = lambda method, path: 403 if method == "GET" and path.endswith("-00002-of-00002.safetensors") else None
    with pytest.raises(
        ConfigError, match=r"^s3://.*-00002-of-00002.safetensors cannot be read \(access is refused\): set AWS_"
    ):
        find_weights("--model", address)
    assert cached(tmp_path) == []
    door.rule = None
    home = stored_models.copied("--model", address)[0]
    # Someone deleted a file; a process of the past was killed while it copied, and another one still runs.
    (home / "model.safetensors.index.json").unlink()
    dead, running = (
        home.with_name(f".{home.name}.{socket.gethostname()}-{process}.tmp") for process in (2**22 + 1, os.getppid())
    )
    dead.mkdir()
    running.mkdir()
    np.testing.assert_equal(arrays(address), arrays(folders["hf"]))
    assert cached(tmp_path) == sorted([home, running])

    def changing(file, blocks=stores.blocks):
        yield from blocks(file)
        if file.path.endswith("config.json"):
            door.client.put_object(Bucket="models", Key=key_of(address, "config.json"), Body=b'{"architectures": []}')

    shutil.rmtree(home)
    monkeypatch.setattr(stored_models, "blocks", changing)
    with pytest.raises(ConfigError, match=r"/hf/config.json has changed while it was being read: run the command again"):
        find_weights("--model", address)
    assert cached(tmp_path) == [running]


def test_what_a_store_refuses_is_one_sentence(door, place, tmp_path, monkeypatch):
    address = place("hf")
    other = f"s3://models/{tmp_path.name}"
    with pytest.raises(ConfigError) as caught:
        find_weights("--model", other)
    wanted = (
        "there is neither config.json (Hugging Face) nor model.json (jaxllm) nor STEP/files.json (a run's checkpoint.store)"
    )
    assert str(caught.value) == f"--model={other} holds no model: {wanted} below it."
    with pytest.raises(ConfigError) as caught:
        find_weights("--model", f"{other}/none/")
    assert str(caught.value) == f"--model={other}/none holds no model: {wanted} below it, nor anything else."
    with pytest.raises(ConfigError, match=r"^s3://no-bucket/x is not there: check the address\.$"):
        find_weights("--model", "s3://no-bucket/x")
    for text in ("s3://", "s3://models/*", "https://host/model", "hf://datasets/a/b"):
        with pytest.raises(ConfigError, match=r"is not the address of a model: write s3://BUCKET/FOLDER or gs://BUCKET/FOLDER"):
            find_weights("--model", text)
    with pytest.raises(
        ConfigError, match=r"^s3://models/x has no user or password before it: remove them, and set AWS_PROFILE"
    ):
        find_weights("--model", "s3://me:secret@models/x")
    door.failures[:] = [403, 403]
    with pytest.raises(ConfigError, match=rf"^{address} cannot be read \(access is refused\): set AWS_PROFILE, or AWS_ACCESS"):
        find_weights("--model", address)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
        with pytest.raises(
            ConfigError, match=r"needs 0.00.* GB, and the disk of .*models has 1e-06 GB left: make room, or set"
        ):
            find_weights("--model", address)
    with monkeypatch.context() as patch:
        patch.setattr(stored_models, "blocks", lambda file: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        with pytest.raises(
            ConfigError, match=r"cannot be stored in .*models \(No space left on device\): fix that, or set XDG_"
        ):
            find_weights("--model", address)
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"cannot be stored in .*models \(Not a directory\): fix that, or set XDG_CACHE_HOME"):
        find_weights("--model", address)


def test_a_run_keeps_the_checkpoint_that_it_began_from(door, place, tiny_config, tmp_path):
    address = place("run")
    config = tiny_config(f"train.init_from={address}", f"run.dir={tmp_path / 'run'}")
    pinned = with_commits(config)
    assert pinned.train.init_from == f"{address}/4"
    expected = arrays(f"{address}/4")
    np.testing.assert_equal(initial_weights(pinned).as_folder().read(("embedding",)), expected[("embedding",)])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(f"train: {{init_from: {address}/2}}")
    door.seen.clear()
    assert with_commits(config).train.init_from == f"{address}/2"
    assert door.seen == []
    # An address of one checkpoint is another run's beginning.
    (tmp_path / "run/config.yaml").write_text(f"train: {{init_from: {address}-other/2}}")
    assert with_commits(config).train.init_from == f"{address}/4"


def test_process_0_pins_for_all_and_a_new_disk_takes_the_pin_of_the_runs_store(door, place, tiny_config, tmp_path, monkeypatch):
    address, store, key = place("run"), f"s3://models/{tmp_path.name}/own", f"{tmp_path.name}/own"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.yaml").write_text(f"train: {{init_from: {address}/2}}")
    configs = [tiny_config(f"train.init_from={address}", f"run.dir={tmp_path / host}") for host in "ab"]

    def pinned(*configs):
        del door.seen[:]
        processes = Run(monkeypatch, None, [config.run.dir for config in configs], configs[0])
        return [config.train.init_from for config in processes.on_all(lambda rank: with_commits(configs[rank]))]

    assert pinned(*configs) == [f"{address}/4"] * 2
    assert sum("list-type" in path for _, path in door.seen) == 1
    with_store = [
        config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"store": store})}) for config in configs
    ]
    assert pinned(*with_store) == [f"{address}/4"] * 2
    # The newest checkpoint that can be read says what the run began with.
    for step, meta in ((2, json.dumps({"config": {"train": {"init_from": f"{address}/2"}}})), (4, "{torn")):
        door.client.put_object(Bucket="models", Key=f"{key}/{step}/meta/metadata", Body=meta.encode())
        door.client.put_object(Bucket="models", Key=f"{key}/{step}/files.json", Body=b"{}")
    assert pinned(*with_store) == [f"{address}/2"] * 2
    assert not any("/first" in path for _, path in door.seen)
    door.rule = lambda method, path: 403 if "own" in path else None
    with pytest.raises(ConfigError, match=rf"^checkpoint.store={store} cannot be used \(access is refused\): set AWS_"):
        pinned(*with_store)


def test_several_processes_meet_before_one_asks(tiny_config, monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "has_backends", lambda: False)
    monkeypatch.setattr(fewer_hosts, "meet", lambda config: asked.append("meet"))

    def ask(config):
        asked.append("ask")
        raise ConfigError("Enough.")

    monkeypatch.setattr(trainer, "with_commits", ask)
    for variables in ({}, {"JAXLLM_COORDINATOR": "h0:1", "JAXLLM_NUM_PROCESSES": "2", "JAXLLM_PROCESS_ID": "1"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=r"^Enough\.$"):
            Trainer(tiny_config("train.init_from=s3://models/first"))
    assert asked == ["ask", "meet", "ask"]


def test_weights_that_are_replaced_while_processes_read_them_are_refused(door, place, tiny_config, monkeypatch):
    address = place("jaxllm")
    before, again = (find_weights("train.init_from", address).version for _ in range(2))
    body = door.client.get_object(Bucket="models", Key=key_of(address, "model.json"))["Body"].read()
    door.client.put_object(Bucket="models", Key=key_of(address, "model.json"), Body=body + b" ")
    after = find_weights("train.init_from", address).version
    assert before == again != after
    # As if this process were the second, and the first had read them before.
    monkeypatch.setattr(distributed, "require_same_config", lambda config: None)
    monkeypatch.setattr(distributed, "exchange", lambda text, combine: combine([before if text == after else text, text]))
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("a device was used"))
    with pytest.raises(ConfigError, match=r"^Process 1 and process 0 read different weights at train.init_from, which someone"):
        Trainer(tiny_config(f"train.init_from={address}"))


def called(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["jaxllm", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    return said.out


def test_commands_take_addresses(folders, place, tmp_path, monkeypatch, capsys):
    address, model = place("run"), place("hf")
    for source, name in ((address, "remote"), (folders["run"], "local")):
        called(monkeypatch, capsys, "export", source, tmp_path / name)
        called(monkeypatch, capsys, "convert", "to-hf", source, tmp_path / f"{name}-hf")
    for one in ("", "-hf"):
        weights = "weights.safetensors" if not one else "model.safetensors"
        assert (tmp_path / f"remote{one}" / weights).read_bytes() == (tmp_path / f"local{one}" / weights).read_bytes()
    said = called(monkeypatch, capsys, "convert", "from-hf", model, tmp_path / "ours")
    assert said.startswith(f"converted {model} to {tmp_path / 'ours'}: ")
    assert json.loads((tmp_path / "ours/model.json").read_text())["source"] == model
    prompt = ["--prompt", "def ", "--max-new-tokens", "3", "--json"]
    answers = [called(monkeypatch, capsys, "generate", "--model", one, *prompt) for one in (model, folders["hf"])]
    assert answers[0] == answers[1]


def test_a_model_name_in_a_recipe_is_no_address(tiny_config):
    with pytest.raises(
        ConfigError, match=r"^model.name=s3://b/x is an address: set train.init_from to it, and model.name to a"
    ):
        tiny_config("model.name=s3://b/x", "model.num_layers=null")


def test_google_cloud_storage(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with gcs_door("models") as door:
        for path in (path for path in folders["hf"].iterdir() if path.is_file()):
            door.client.put_object(Bucket="models", Key=f"mine/{path.name}", Body=path.read_bytes())
        np.testing.assert_equal(arrays("gs://models/mine"), arrays(folders["hf"]))
        # The name and the size stay, and the ETag does not.
        file = folders["hf"] / "model-00001-of-00002.safetensors"
        door.client.put_object(Bucket="models", Key=f"mine/{file.name}", Body=file.read_bytes()[:-1] + b"\1")
        assert len(cached(tmp_path)) == 1
        assert arrays("gs://models/mine").keys() == arrays(folders["hf"]).keys()
        assert len(cached(tmp_path)) == 2
    assert load_model(Path(cached(tmp_path)[0]), compute_dtype="float32").config.vocab_size == 256
