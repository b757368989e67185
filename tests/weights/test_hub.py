"""Models by their name on the Hub, from a server that answers as the Hub does."""

import json
import sys

import numpy as np
import pytest
from hf_folders import HUB, random_weights, write_folder
from store_servers import Hub, serving
from tiny import TINY

from jaxllm.cluster import distributed
from jaxllm.config import ConfigError, load_config
from jaxllm.data.disk_documents import PreparedDocuments
from jaxllm.data.prepare import prepare
from jaxllm.data.shards import run_tasks
from jaxllm.data.sources import load_data
from jaxllm.run.loop import fit
from jaxllm.weights.folder import open_folder
from jaxllm.weights.hf_convert import adapter_to_peft, from_hf
from jaxllm.weights.stored_models import with_commits
from jaxllm.weights.weights import initial_weights

pytest.importorskip("huggingface_hub")
CONFIG = {**HUB, "vocab_size": 259}
NAME = "people/small"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The files of a model as it was first, and later."""
    parent = tmp_path_factory.mktemp("versions")
    return [files_of(write_folder(parent / str(seed), CONFIG, random_weights(CONFIG, seed=seed), 2)) for seed in (0, 1)]


@pytest.fixture
def hub(versions, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(Hub()) as server, server.is_the_hub(tmp_path / "cache"):
        server.first = server.push("models", NAME, versions[0])
        yield server


def recipe(tmp_path, text_file, **model):
    return {
        "model": {"name": NAME, "compute_dtype": "float32", **model},
        "train": TINY["train"] | {"steps": 1},
        "data": {"source": "files", "paths": [str(text_file)], "held_out_fraction": 0},
        "log": {"sample_tokens": 0},
        "run": {"dir": str(tmp_path / "run")},
    }


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text("law mesh ring axis " * 100)
    return tmp_path / "text.txt"


def embedding(config):
    return np.asarray(initial_weights(config).outline.read(("embedding",)))


def test_the_shape_needs_no_weights_and_a_run_keeps_its_commit(hub, versions, tmp_path, text_file, caplog):
    config = load_config(recipe(tmp_path, text_file, lora={"rank": 2}))
    assert config.model.name == config.train.init_from == f"{NAME}@{hub.first}"
    assert (config.model.num_layers, config.model.vocab_size) == (3, 259)
    assert not any("safetensors" in path and "index" not in path for method, path in hub.seen if "resolve" in path)
    expected = random_weights(CONFIG, seed=0)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding(config)[: len(expected)], expected)
    fit(config)

    second = hub.push("models", NAME, versions[1])
    assert load_config(recipe(tmp_path, text_file)).model.name == f"{NAME}@{hub.first}"
    assert caplog.messages == []
    moved = load_config(recipe(tmp_path, text_file), [f"model.name={NAME}@main"])
    assert moved.model.name == moved.train.init_from == config.model.name
    stays = f"The run in {tmp_path / 'run'} stays at model.name={config.model.name}"
    assert caplog.messages == [f"{stays}: choose another run.dir for {NAME}@main of today."]
    # PEFT would ask the Hub for a model of the name with its commit.
    adapter_to_peft(str(tmp_path / "run"), str(tmp_path / "adapter"))
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, hub.first)

    newer = load_config(recipe(tmp_path, text_file), [f"run.dir={tmp_path / 'other'}"])
    assert newer.model.name == f"{NAME}@{second}"
    assert not np.array_equal(embedding(newer), embedding(config))
    named = load_config(recipe(tmp_path, text_file), [f"run.dir={tmp_path / 'other'}", f"model.name={NAME}@{hub.first}"])
    np.testing.assert_array_equal(embedding(named), embedding(config))


def test_commands_take_names(hub, tmp_path):
    from_hf(NAME, str(tmp_path / "converted"))
    expected = random_weights(CONFIG, seed=0)["model.norm.weight"]
    np.testing.assert_array_equal(open_folder("x", str(tmp_path / "converted")).read(("final_norm", "scale")), expected)


def test_without_a_network_the_cache_serves_and_else_the_way_out_is_named(hub, tmp_path, text_file, monkeypatch):
    from huggingface_hub import constants

    values = recipe(tmp_path, text_file)
    before = embedding(load_config(values))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    np.testing.assert_array_equal(embedding(load_config(values)), before)
    with pytest.raises(ConfigError, match=r"^model.name=a/b is not a folder here, .*: run `hf download a/b` where there is a"):
        load_config(values, ["model.name=a/b"])
    with pytest.raises(ConfigError, match=r"^SRC=a/b@v1 is not .*`hf download a/b --revision v1` where"):
        open_folder("SRC", "a/b@v1")


def test_what_the_hub_refuses_is_one_sentence(hub, tmp_path, text_file):
    hub.gated = {"people/gated"}
    hub.push("models", "people/gated", {"config.json": b"{}"})
    for name, says in {
        "people/none": "is neither a folder here nor a model that the Hub shows: check the name, or set HF_TOKEN",
        f"{NAME}@v9": f": the Hub has {NAME}, but no revision v9: name another",
        "people/gated": "is given to those who accept its terms: do so on its page, and set HF_TOKEN",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(recipe(tmp_path, text_file), [f"model.name={name}"])
        assert str(caught.value).startswith(f"model.name={name}")
        assert says in str(caught.value)


def test_a_repository_of_something_else_is_refused(hub, tmp_path, text_file):
    hub.push("models", "people/words", {"README.md": b"words"})
    with pytest.raises(ConfigError, match=r"holds no model: give a folder with config.json"):
        load_config(recipe(tmp_path, text_file), ["model.name=people/words"])


def test_without_the_library_the_extra_is_named(tmp_path, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"load the model from the Hub with pip install 'jaxllm\[stores\]'"):
        load_config(recipe(tmp_path, text_file))


def test_a_folder_that_a_run_began_with_and_that_is_gone_is_not_sought_on_the_hub(hub, tmp_path, text_file):
    values = recipe(tmp_path, text_file) | {"model": TINY["model"]}
    values["train"] = values["train"] | {"init_from": "models/gone"}
    with pytest.raises(ConfigError, match=r"^train\.init_from=models/gone is neither a folder here nor a model that the Hub"):
        with_commits(load_config(values))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("train: {init_from: models/gone}")
    hub.seen.clear()
    assert with_commits(load_config(values)).train.init_from == "models/gone"
    assert hub.seen == []


def words(names):
    """The files of a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": b'{"eos_token": "<end>"}'}


def test_a_tokenizer_of_the_hub_is_pinned_where_it_is_kept(hub, tmp_path, text_file, monkeypatch):
    name = "people/words"
    first = hub.push("models", name, words(["<end>", "?", "law", "mesh", "ring", "axis"]))

    def prepared(out):
        prepare([str(text_file)], out, tokenizer=name, workers=1, progress=False)
        return json.loads((out / "manifest.json").read_text())["tokenizer"]["name"]

    names = []
    monkeypatch.setattr("jaxllm.data.prepare.run_tasks", lambda name, *more: (names.append(name), run_tasks(name, *more)))
    assert prepared(tmp_path / "one") == f"{name}@{first}"
    # What the workers load.
    assert names == [f"{name}@{first}"]
    from_folder = tmp_path / "here/words"
    from_folder.mkdir(parents=True)
    for file, content in words(["<end>", "?", "law", "mesh", "ring", "axis"]).items():
        (from_folder / file).write_bytes(content)
    prepare([str(text_file)], tmp_path / "two", tokenizer=str(from_folder), workers=1, progress=False)
    assert PreparedDocuments(tmp_path / "one").fingerprint == PreparedDocuments(tmp_path / "two").fingerprint

    values = recipe(tmp_path, text_file) | {"model": {**TINY["model"], "vocab_size": 16}}
    values["data"] = values["data"] | {"tokenizer": name}
    values["train"] = {**values["train"], "init_from": NAME}
    config = with_commits(load_config(values))
    assert config.data.tokenizer == f"{name}@{first}"
    assert config.train.init_from == f"{NAME}@{hub.first}"
    assert load_data(config).tokenizer.name == f"{name}@{first}"
    fit(load_config(values, ["train.init_from=null"]))

    # A process that asks later gets another commit. What all processes compare at the start names the key.
    second = hub.push("models", name, words(["<end>", "?", "mesh", "law", "ring", "axis"]))
    later = with_commits(load_config(values, [f"run.dir={tmp_path / 'other'}"]))
    assert later.data.tokenizer == f"{name}@{second}"
    same_place = later.model_copy(update={"run": config.run})
    said = distributed._verdict(config.model_dump_json(), {1: same_place.model_dump_json()})
    assert said.startswith("The processes were given different configs: data.tokenizer of process 1 is not that of process 0")
    # The run keeps its own, and reports need no network.
    hub.seen.clear()
    assert with_commits(load_config(values, ["train.init_from=null"])).data.tokenizer == f"{name}@{first}"
    assert load_config(tmp_path / "run/config.yaml").data.tokenizer == f"{name}@{first}"
    assert hub.seen == []
    with pytest.raises(ConfigError, match=r"^--tokenizer=people/none is neither a folder here nor a model that the Hub shows"):
        prepare([str(text_file)], tmp_path / "three", tokenizer="people/none", workers=1, progress=False)
