"""What a Trainer and a loaded model write when a program asks: Trainer.save, Trainer.export, save_pretrained."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from run_files import saved_state
from safetensors.numpy import load_file
from tiny import TINY

import jaxllm
from jaxllm.checkpoint.files import read_meta
from jaxllm.config import ConfigError, load_config
from jaxllm.run.loop import fit

MESH = ("parallel.pipe=2", "parallel.data=2", "parallel.tensor=2", "parallel.zero=2")


def config_of(tmp_path, name, *overrides):
    data = {"source": "python_stdlib", "held_out_fraction": 0.0}
    return load_config({**TINY, "data": data}, [*MESH, f"run.dir={tmp_path / name}", *overrides])


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, a Trainer after two steps, saved to the run directory `saved`, in which a model was exported)."""
    folder = tmp_path_factory.mktemp("trainer")
    trainer = jaxllm.Trainer(config_of(folder, "unused"))
    for _ in trainer.steps(2):
        pass
    saved = trainer.save(folder / "saved")
    assert saved == folder / "saved" / "checkpoints" / "2"
    trainer.export(folder / "hf")
    yield folder, trainer
    trainer.close()


def test_a_saved_run_continues_as_one_that_never_stopped(trained):
    folder, _ = trained
    assert not (folder / "unused").exists()
    whole = fit(config_of(folder, "whole"))
    resumed = fit(load_config(folder / "saved" / "config.yaml"))
    assert resumed.step == 4
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert saved_state(folder / "saved", 2).keys() == saved_state(folder / "whole", 4).keys()


def test_what_is_saved_already_stays(trained):
    """Also what is damaged, and what another Trainer saved, whatever its step."""
    folder, trainer = trained
    saved = folder / "saved" / "checkpoints" / "2"
    metadata = trainer.save(folder / "torn") / "meta" / "metadata"
    metadata.write_bytes(metadata.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=re.escape(f"{folder / 'torn'} has step 2 already, and this is step 2")):
        trainer.save(folder / "torn")
    before = files_of(saved)
    other = jaxllm.Trainer(config_of(folder, "saved", "optimizer.learning_rate=0.5"))
    for _ in other.steps(3):
        pass
    with pytest.raises(ConfigError, match=re.escape(f"{folder / 'saved'} has checkpoints: name another run_dir")):
        other.save()
    assert files_of(saved) == before
    other.config = config_of(folder, "stored", "checkpoint.store=s3://bucket/run")
    with pytest.raises(ConfigError, match=r"^checkpoint.store is filled by jaxllm.fit alone: leave it out for trainer.save"):
        other.save()
    assert not (folder / "stored").exists()
    other.close()


def test_a_save_between_steps_has_the_last_step_and_loses_no_metrics(tmp_path):
    """The averages of the noise scale are as after the same steps without saves."""
    config = config_of(tmp_path, "run", "log.noise_scale_every=1", "checkpoint.keep=4")
    plain, saving = jaxllm.Trainer(config), jaxllm.Trainer(config)
    expected, found = list(plain.steps(3)), []
    for record in saving.steps(3):
        found.append(record)
        if saving.step < 3 or record["step"] == 3:
            saved = saving.save()
    assert [(record["step"], record["loss"]) for record in found] == [(record["step"], record["loss"]) for record in expected]
    assert sorted(path.name for path in saved.parent.iterdir() if path.name.isdigit()) == ["2", "3"]
    assert read_meta(saved)["noise_scale"] == list(plain.metrics.noise.state())
    plain.close()
    saving.close()


def test_files_beside_the_first_weights_go_out_after_a_step(trained, tmp_path):
    """From a new Trainer, and from a hook of a resumed run, which holds its directory."""
    folder, _ = trained
    first = tmp_path / "first"
    shutil.copytree(folder / "hf", first)
    (first / "LICENSE").write_text("ours")
    said = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 512}))
    keys = (f"train.init_from={first}", "train.steps=2", "checkpoint.every_steps=1")
    trainer = jaxllm.Trainer(config_of(tmp_path, "run", *keys))
    list(trainer.steps(1))
    trainer.save(tmp_path / "saved")
    trainer.export(tmp_path / "exported")
    trainer.close()
    refused = []

    def hook(run):
        def write(moment):
            run.trainer.export(tmp_path / "of-hook")
            with pytest.raises(ConfigError, match="is in use by pid") as found:
                run.trainer.save()
            refused.append(found)

        run.every(2, write)

    fit(load_config(tmp_path / "saved" / "config.yaml"), hooks=[hook])
    assert refused
    for name in ("exported", "of-hook"):
        assert (tmp_path / name / "LICENSE").read_text() == "ours"
        assert json.loads((tmp_path / name / "config.json").read_text())["max_position_embeddings"] == 512


def test_an_export_is_that_of_the_saved_run(trained):
    folder, trainer = trained
    jaxllm.export(folder / "saved", folder / "of-run", to="hf", step=2)
    assert files_of(folder / "hf") == files_of(folder / "of-run")
    assert not list(folder.glob(".*"))
    wrong = {"to": "peft"}, {"step": 1}, {"to": "onnx"}
    sentences = "has no model.lora: choose another format", "step= has no effect: trainer.export writes", "--to=onnx is not one"
    for options, sentence in zip(wrong, sentences, strict=True):
        with pytest.raises(ConfigError, match=sentence):
            trainer.export(folder / "refused", **options)
    with pytest.raises(ConfigError, match="exists already, and nothing is overwritten"):
        trainer.export(folder / "hf")
    assert not list(folder.glob("refused*"))


@pytest.mark.parametrize("source", ["hf", "saved"])
def test_a_loaded_model_is_written_as_it_was_read(trained, source):
    folder, _ = trained
    jaxllm.load_model(folder / source, step=2 if source == "saved" else None).save_pretrained(folder / f"again-{source}")
    assert files_of(folder / f"again-{source}") == files_of(folder / "hf")


def test_what_was_changed_is_written(trained):
    """Also by an optimizer of NNX, under its transformations."""
    folder, _ = trained
    model = jaxllm.load_model(folder / "hf", "float32", {"tensor": 2})
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    ids = jnp.arange(32).reshape(2, 16)
    _, gradients = nnx.jit(nnx.value_and_grad(lambda model, ids: model(ids).var()))(model, ids)
    optimizer.update(model, gradients)
    model.save_pretrained(folder / "changed")
    again = jaxllm.load_model(folder / "changed", "float32")
    np.testing.assert_allclose(again(ids), model(ids), rtol=1e-5, atol=1e-6)
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hf", "changed"))
    np.testing.assert_array_equal(after["model.norm.weight"], np.asarray(model.final_norm.scale[...]))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
    model.save_pretrained(folder / "narrow", dtype="bfloat16")
    assert jaxllm.load_model(folder / "narrow").final_norm.scale.dtype == jnp.bfloat16


def test_another_network_or_no_origin_is_a_sentence(trained):
    folder, _ = trained
    model = jaxllm.load_model(folder / "hf")
    with pytest.raises(ConfigError, match="exists already, and nothing is overwritten"):
        model.save_pretrained(folder / "hf")
    model.adapter = nnx.Param(jnp.zeros(3))
    with pytest.raises(ConfigError, match=r"The model has other parameters than .*: adapter is one of them"):
        model.save_pretrained(folder / "adapted")
    del model.adapter
    embedding = model.embedding[...]
    for wrong in (embedding[:-1], embedding.astype(jnp.float8_e4m3fn)):
        model.embedding = nnx.Param(wrong)
        with pytest.raises(ConfigError, match=r"^embedding is float.* of shape .*: only \[256, 32\] of float32, bfloat16 or"):
            model.save_pretrained(folder / "adapted")
    model.embedding = nnx.Param(embedding)
    model.origin.outline.companions = folder / "gone"
    with pytest.raises(ConfigError, match=r"gone is gone, which has the tokenizer of .*: put it back"):
        model.save_pretrained(folder / "adapted")
    assert not (folder / "adapted").exists()


def test_models_of_two_folders_have_one_structure(trained):
    folder, _ = trained
    one, other = (jaxllm.load_model(folder / name, step=step) for name, step in (("hf", None), ("saved", 2)))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, nnx.state(one), nnx.state(other))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    np.testing.assert_array_equal(mean["embedding"][...], one.embedding[...])
