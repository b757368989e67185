"""Loads folders into sharded arrays on any mesh, and starts runs from them."""

import dataclasses
import json
import logging
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
from golden.weights import to_ours
from hf_folders import DTYPES, HUB, LLAMA3_ROPE, model_of, random_weights, write_folder
from meshes import unpadded
from tiny import TINY

import jaxllm
from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.config import ConfigError, load_config
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import over_layers, parameter_table, stacking_of
from jaxllm.run.loop import fit
from jaxllm.run.saving import keep_companions
from jaxllm.weights import read_weights
from jaxllm.weights.folder import entries, open_folder
from jaxllm.weights.hf_convert import from_hf, to_hf
from jaxllm.weights.load_model import open_model
from jaxllm.weights.read_weights import load_params
from jaxllm.weights.safetensors import TensorFile
from jaxllm.weights.weights import initial_weights

# Nothing divides 7 layers and 259 rows, so meshes pad them.
CONFIG = {
    **HUB,
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "rope_scaling": LLAMA3_ROPE,
}
MESHES = {
    "one device": {"data": 1},
    "zero 3": {"data": 4, "zero": 3},
    "zero's zeros": {"data": 3, "tensor": 2, "zero": 3},
    "zero 1": {"data": 8, "zero": 1},
    "tensor": {"data": 2, "tensor": 4, "zero": 0},
    "context": {"context": 2, "data": 2, "zero": 3},
    "pipe": {"pipe": 4, "data": 2, "zero": 1},
    "interleaved": {"pipe": 2, "data": 2, "tensor": 2, "schedule": "interleaved", "virtual_stages": 2},
}


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG, "BF16")


@pytest.fixture(scope="module")
def folders(weights, tmp_path_factory):
    """Folders of the same weights: {kind: path}."""
    parent = tmp_path_factory.mktemp("folders")
    write_folder(parent / "hf", CONFIG, weights, shards=3)
    from_hf(str(parent / "hf"), str(parent / "ours"))
    return {"hf": str(parent / "hf"), "ours": str(parent / "ours")}


def laid_out(folder, parallel, dtype="float32"):
    """(config, `like` and `table` for load_params) on the first devices."""
    parallel, train = {"data": 1, **parallel}, {**TINY["train"], "microbatch_sequences": 1, "global_batch_sequences": 24}
    config = load_config({"model": open_folder("x", folder).model, "train": train, "parallel": parallel})
    config = config.resolve(config.devices)
    mesh = make_mesh(config.parallel, jax.devices()[: config.devices])
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
    return config, jax.tree.map(lambda x: x.update(dtype=dtype), functions.master), functions.table


def plain(config, table, params):
    """Parameters as the model has them, without padding."""
    params = over_layers(stacking_of(config).plain, unpadded(table, params))
    return params | {name: params[name][: config.model.vocab_size] for name in ("embedding", "head") if name in params}


@pytest.mark.parametrize("kind", ["hf", "ours"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gets_the_same_values_where_it_wants_them(mesh, kind, folders, weights):
    config, like, table = laid_out(folders[kind], MESHES[mesh])
    params = load_params(open_folder("x", folders[kind]), like, table)
    jax.tree.map(lambda x, want: x.sharding.is_equivalent_to(want.sharding, x.ndim) or pytest.fail("layout"), params, like)
    ours = to_ours({name: x.astype(np.float32) for name, x in weights.items()}, model_of(CONFIG))
    jax.tree.map(np.testing.assert_array_equal, plain(config, table, params), ours)
    # Padding is zero.
    totals = [
        sum(float(np.abs(np.asarray(x), dtype=np.float64).sum()) for x in jax.tree.leaves(tree)) for tree in (params, ours)
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)


@pytest.mark.parametrize("at_once", [2**33, 0], ids=["in one go", "device by device"])
@pytest.mark.parametrize("kind", ["hf", "ours"])
@pytest.mark.parametrize("mesh", ["zero 3", "zero's zeros", "tensor", "interleaved"])
def test_each_byte_is_read_once_however_many_devices_hold_it(mesh, kind, at_once, folders, monkeypatch):
    monkeypatch.setattr(read_weights, "AT_ONCE_BYTES", at_once)
    _, like, table = laid_out(folders[kind], MESHES[mesh])
    folder = open_folder("x", folders[kind])
    read = Counter()
    into = TensorFile.read_into
    monkeypatch.setattr(TensorFile, "read_into", lambda f, row, at: (read.update(bytes=row.size), into(f, row, at))[1])
    load_params(folder, like, table)
    assert read["bytes"] == 2 * sum(int(np.prod(entry.shape)) for entry in entries(folder.model))


@pytest.mark.parametrize("kind", ["hf", "ours"])
def test_a_process_reads_the_bytes_of_its_devices_alone(kind, folders, monkeypatch):
    """Acts as the second of two hosts: it holds the last four of eight devices."""
    _, like, _ = laid_out(folders[kind], {"data": 8, "zero": 3})
    folder, read = open_folder("x", folders[kind]), []
    monkeypatch.setattr(TensorFile, "read_into", lambda f, row, at: read.append(row.size))
    for path, whole in jax.tree_util.tree_leaves_with_path(like):
        names = tuple(key.key for key in path)
        boxes = {
            read_weights.box_of(index, whole.shape)
            for device, index in whole.sharding.devices_indices_map(whole.shape).items()
            if device.id >= 4
        }
        read.clear()
        for box in boxes:
            read_weights._read_padded(folder, names, whole.shape, 0, box)
        # Half of the elements, of two bytes each.
        assert sum(read) == int(np.prod(folder.entries[names].shape))


def test_the_names_are_those_of_the_model(folders):
    """The map is written by hand; the model declares its own parameters."""
    for tied in (False, True):
        section = {**open_folder("x", folders["hf"]).model, "tie_embeddings": tied}
        config = load_config({"model": section, "train": TINY["train"], "parallel": {"data": 1}})
        declared = {p.path: p.shape for p in jax.tree.leaves(parameter_table(config)[1])}
        assert {entry.name: entry.shape for entry in entries(section)} == declared


def test_another_models_folder_is_refused(folders):
    _, like, table = laid_out(folders["hf"], {"data": 1})
    folder = open_folder("x", folders["hf"])
    table["layers"]["mlp"]["gate"] = dataclasses.replace(table["layers"]["mlp"]["gate"], shape=(7, 32, 80))
    with pytest.raises(ConfigError, match=r"layers.mlp.gate has shape \(7, 32, 64\) in .* and \(7, 32, 80\) in this config"):
        load_params(folder, like, table)
    del like["head"], table["head"]
    with pytest.raises(ConfigError, match=r"has a parameter head, unlike this config's model"):
        load_params(folder, like, table)


# ------------------------------------------------------------------------------------------------- runs, and open_model


@pytest.fixture(scope="module")
def trainer(folders, text_file):
    """A run that names the folder, on a mesh that pads rows."""
    recipe = {
        "model": {"name": folders["hf"], "compute_dtype": "float32"},
        "train": TINY["train"],
        "data": {"source": "files", "paths": [str(text_file)]},
        "parallel": {"data": 2, "tensor": 4, "zero": 1},
    }
    return jaxllm.Trainer(load_config(recipe))


def test_a_run_starts_from_the_folder_it_names(trainer, folders, weights):
    assert (trainer.step, trainer.start.weights.description) == (0, folders["hf"])
    ours = to_ours({name: x.astype(np.float32) for name, x in weights.items()}, model_of(CONFIG))
    jax.tree.map(
        np.testing.assert_array_equal, plain(trainer.config, trainer.programs.functions.table, trainer.state.params), ours
    )


def test_a_run_with_another_rotary_base_is_told(folders, text_file, caplog):
    data = {"source": "files", "paths": [str(text_file)]}
    recipe = {"model": {"name": folders["hf"], "rope_theta": 1e6}, "train": TINY["train"], "data": data}
    with caplog.at_level(logging.WARNING):
        initial_weights(load_config(recipe))
    assert "come from a model with model.rope_theta=20000.0; this run sets 1000000.0." in caplog.text
    # The folder's scaling has fewer keys than this version's, with the same meaning.
    assert "model.rope_scaling" not in caplog.text


def test_a_trained_run_goes_out_whole(trainer, tmp_path):
    """From a mesh that pads rows, through a checkpoint, into a Hugging Face folder with exactly the model's rows."""
    run = tmp_path / "run"
    checkpoints = Checkpoints(run, trainer.config.checkpoint)
    checkpoints.save(3, trainer.state, describe_run(trainer.config, 3, ""))
    checkpoints.wait()
    checkpoints.close()
    keep_companions(run, trainer)
    to_hf(str(run), str(tmp_path / "hf"), largest_file=40_000)
    folder = open_folder("x", str(tmp_path / "hf"))
    # These values are from the config.json of the folder that the run started from.
    assert {key: folder.original_config[key] for key in HUB if key != "torch_dtype"} == {
        key: value for key, value in CONFIG.items() if key != "torch_dtype"
    }
    for path in folder.entries:
        ours = trainer.state.params
        for name in path:
            ours = ours[name]
        np.testing.assert_array_equal(folder.read(path), np.asarray(ours)[: folder.entries[path].shape[0]])


def test_a_run_goes_on_and_out_when_the_folder_it_names_has_gone(folders, text_file, tmp_path):
    model = shutil.copytree(folders["hf"], tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    original = (model / "config.json").read_text()
    recipe = {
        "model": {"name": str(model), "compute_dtype": "float32"},
        "train": TINY["train"] | {"steps": 1},
        "data": {"source": "files", "paths": [str(text_file)], "held_out_fraction": 0},
        "log": {"sample_tokens": 0},
        "run": {"dir": str(tmp_path / "run")},
    }
    fit(load_config(recipe))
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match=r"model.name=.*model is not a folder with a config.json: download the model to it"):
        load_config(recipe, [f"run.dir={tmp_path / 'elsewhere'}"])
    assert fit(load_config(recipe, ["train.steps=2"])).step == 2
    to_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    folder = open_folder("x", str(tmp_path / "out"))
    assert folder.generation == {"eos_token_id": [2, 5]}
    assert {key: folder.original_config[key] for key in HUB} == {key: json.loads(original)[key] for key in HUB}
    # A run or a checkpoint can be continued, like a model folder.
    for name in ("run", "run/checkpoints/2"):
        assert load_config(recipe, [f"model.name={tmp_path / name}"]).model.num_layers == CONFIG["num_hidden_layers"]


@pytest.fixture(scope="module")
def ids_BS():
    return np.random.default_rng(3).integers(0, CONFIG["vocab_size"], (2, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def logits(folders, ids_BS):
    return np.asarray(jaxllm.load_model(folders["ours"], "float32", {"data": 1})(ids_BS))


INTERLEAVED = {"pipe": 2, "schedule": "interleaved", "virtual_stages": 2}


@pytest.mark.parametrize("parallel", [None, {"tensor": 4}, INTERLEAVED, {"data": 3, "zero": 3}])
def test_load_model_gives_the_same_network_on_any_devices(parallel, folders, ids_BS, logits):
    model = jaxllm.load_model(folders["hf"], compute_dtype="float32", parallel=parallel)
    if parallel is None:
        assert len(model.embedding[...].sharding.device_set) == 8
        assert not model.embedding[...].sharding.is_fully_replicated
    np.testing.assert_allclose(np.asarray(model(ids_BS)), logits, atol=1e-5)


def test_load_model_takes_fewer_devices_where_the_weights_do_not_divide(tmp_path):
    config = {**HUB, "vocab_size": 7, "hidden_size": 12, "head_dim": 2, "num_attention_heads": 3, "num_key_value_heads": 3}
    config |= {"intermediate_size": 20}
    model = jaxllm.load_model(write_folder(tmp_path / "hf", config, random_weights(config)))
    # 12 is divisible by 6, but not by 8 or 7.
    assert len(model.embedding[...].sharding.device_set) == 6


def test_open_model_says_what_it_opened(folders, logits, ids_BS):
    loaded = open_model(folders["hf"], ["model.compute_dtype=float32", "parallel.tensor=4"], sequence_length=16)
    assert dict(loaded.mesh.shape) == {"pipe": 1, "data": 2, "context": 1, "tensor": 4}
    assert (loaded.config.train.global_batch_sequences, loaded.config.num_microbatches) == (2, 1)
    assert (loaded.tokenizer, loaded.generation, loaded.description) == (None, {}, folders["hf"])
    assert loaded.params["embedding"].dtype == DTYPES["BF16"]
    np.testing.assert_allclose(np.asarray(loaded.model(ids_BS)), logits, atol=1e-5)
    default = open_model(folders["hf"])
    assert (default.config.model.compute_dtype, default.config.parallel.zero, default.mesh.size) == ("bfloat16", 3, 8)
    with pytest.raises(ConfigError, match=r"^--model=.* is not a folder"):
        open_model("nowhere")
    with pytest.raises(ConfigError, match=r"^Unknown key model.compute_type: did you mean model.compute_dtype"):
        open_model(folders["hf"], ["model.compute_type=float32"])
    with pytest.raises(ConfigError, match=r"num_heads=4 cannot be split over parallel.tensor=3"):
        open_model(folders["hf"], ["parallel.tensor=3"])
