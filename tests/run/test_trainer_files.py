"""What a Trainer and a loaded model write when a program asks: Trainer.save, Trainer.export, save_pretrained."""

import re

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
    folder, trainer = trained
    before = files_of(folder / "saved" / "checkpoints" / "2")
    with pytest.raises(ConfigError, match=re.escape(f"{folder / 'saved'} has step")):
        trainer.save(folder / "saved")
    assert files_of(folder / "saved" / "checkpoints" / "2") == before
    other = jaxllm.Trainer(config_of(folder, "saved", "train.seed=5"))
    with pytest.raises(ConfigError, match="holds a run with train"):
        other.save()
    stored = config_of(folder, "stored", "checkpoint.store=s3://bucket/run")
    other.config = stored
    with pytest.raises(ConfigError, match=r"^checkpoint.store is filled by jaxllm.fit alone: leave it out for trainer.save"):
        other.save()
    assert not (folder / "stored").exists()


def test_an_export_is_that_of_the_saved_run(trained):
    folder, trainer = trained
    jaxllm.export(folder / "saved", folder / "of-run", to="hf", step=2)
    assert files_of(folder / "hf") == files_of(folder / "of-run")
    assert not list(folder.glob(".*"))
    with pytest.raises(ConfigError, match="exists already, and nothing is overwritten"):
        trainer.export(folder / "hf")
    with pytest.raises(ConfigError, match="--to=onnx is not one of the choices: use jaxllm, hf, peft, gguf"):
        trainer.export(folder / "onnx", to="onnx")
    assert not list(folder.glob("onnx*"))


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
    model.origin = (str(folder / "gone"), None, ())
    with pytest.raises(ConfigError, match=r"gone is not a folder: give a run directory"):
        model.save_pretrained(folder / "moved")
    assert not (folder / "moved").exists()
    assert not (folder / "adapted").exists()
