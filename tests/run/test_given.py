"""Batches, a loss, an optimizer and a callback that a Python program gives to Trainer and fit."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import assert_close, in_one_stack, unpadded
from tiny import TINY

import jaxllm
from jaxllm.config import ConfigError, load_config
from jaxllm.run.given import GivenBatches, adopted
from jaxllm.train.build import Given

MESHES = {
    "data": ("parallel.data=8",),
    "pipeline": ("parallel.pipe=2", "parallel.context=2", "parallel.data=2", "train.microbatch_sequences=1"),
}


def config_of(*overrides):
    return load_config({**TINY, "data": {"source": "given", "mask_documents": False}}, overrides)


def batch_of(step, rows=8, length=16):
    """Random texts, and a weight for each sequence."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 256, (rows, length + 1))
    mask = rng.random((rows, length)) < 0.7
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": mask, "weight": rng.random(rows)}


def weighted(h_BSD, head_VD, rows):
    log_p_BSV = jax.nn.log_softmax(jnp.einsum("BSD,VD->BSV", h_BSD, head_VD, preferred_element_type=jnp.float32))
    loss_BS = -jnp.take_along_axis(log_p_BSV, rows["targets"][..., None], axis=-1)[..., 0]
    weights_BS = jnp.where(rows["mask"], rows["weight"][:, None], 0.0)
    return (loss_BS * weights_BS).sum(), weights_BS.sum()


def optimizer():
    return optax.chain(optax.clip(0.5), optax.adafactor(1e-2, min_dim_size_to_factor=8))


def test_all_together_on_a_pipeline_equal_data_ranks():
    """Four steps of all four seams. Adafactor's state is factored: rows and columns of the whole stack."""
    params, seen = {}, {}
    for name, overrides in MESHES.items():
        told = seen[name] = []
        trainer = jaxllm.Trainer(
            config_of(*overrides),
            batches=batch_of,
            loss=weighted,
            optimizer=optimizer(),
            on_step=lambda metrics, trainer, told=told: told.append((metrics["step"], trainer.step, metrics["loss"])),
        )
        losses = [metrics["loss"] for metrics in trainer.steps(4)]
        assert [(step, at) for step, at, _ in told] == [(1, 2), (2, 3), (3, 4), (4, 4)]
        assert [loss for _, _, loss in told] == losses
        params[name] = in_one_stack(trainer.config, unpadded(trainer.programs.functions.table, trainer.state.params))
        trainer.close()
    np.testing.assert_allclose([x[2] for x in seen["pipeline"]], [x[2] for x in seen["data"]], rtol=1e-5)
    assert_close(params["pipeline"], params["data"], 1e-4)


IDS = np.arange(16, dtype=np.int32)[None]
GIVEN = {"loss": weighted, "optimizer": optax.lion(1e-2)}


def test_resuming_equals_never_stopping(tmp_path):
    """4 steps = 2 + restore + 2, bit for bit. The batches of the resumed run are an iterable, whose first two are dropped."""
    whole, halves = (config_of("parallel.data=8", f"run.dir={tmp_path / name}") for name in ("whole", "halves"))
    expected = jaxllm.fit(whole, batches=batch_of, **GIVEN)
    shorter = halves.model_copy(update={"train": halves.train.model_copy(update={"steps": 2})})
    jaxllm.fit(shorter, batches=batch_of, **GIVEN)
    resumed = jaxllm.fit(halves, batches=map(batch_of, itertools.count()), **GIVEN)
    assert resumed.step == 4
    jax.tree.map(np.testing.assert_array_equal, resumed.state, expected.state)
    network = jaxllm.load_model(tmp_path / "halves")
    np.testing.assert_allclose(network(IDS), resumed.model(IDS), atol=1e-5)
    refusals = {
        "optimizer.name=given, not adamw: set optimizer.name=given": {"batches": batch_of, "loss": weighted},
        "train.loss=given, not cross_entropy": {"batches": batch_of, "optimizer": GIVEN["optimizer"]},
        "data.source=given needs batches": GIVEN,
    }
    for sentence, given in refusals.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            jaxllm.fit(halves, **given)


def test_what_the_callback_raises_ends_the_loop():
    def stop(metrics, trainer):
        if metrics["step"] == 2:
            raise RuntimeError("enough")

    trainer = jaxllm.Trainer(config_of("parallel.data=8"), batches=batch_of, **GIVEN, on_step=stop)
    with pytest.raises(RuntimeError, match="enough"):
        for _ in trainer.steps(4):
            pass
    assert trainer.step == int(trainer.state.step) == 3
    trainer.close()


BATCHES = {
    "has no mask: it needs tokens, targets and mask": {"mask": None},
    "has tokens of shape [8, 15]: it needs [8, 16]": {"tokens": np.zeros((8, 15), np.int32)},
    "has weight of shape [7]: it needs [8, 16]": {"weight": np.zeros(7)},
    "has mask of int64: it needs bool": {"mask": np.ones((8, 16), np.int64)},
    "has targets of float64: it needs integers": {"targets": np.ones((8, 16))},
    "has weight of <U1: it needs numbers": {"weight": np.full(8, "x")},
    "has the id 256 in tokens, and model.vocab_size=256": {"tokens": np.full((8, 16), 256)},
    "has the id -100 in targets, and model.vocab_size=256": {"targets": np.full((8, 16), -100)},
    "has tokens that do not fit into 32 bits": {"tokens": np.full((8, 16), 2**32)},
    "has segments, and data.mask_documents=false: leave them out, or set it to true": {"segments": np.ones((8, 16), np.int32)},
    "differs from the first in weight: all need the same arrays, dtypes and shapes": {"weight": None},
}


@pytest.mark.parametrize("sentence", BATCHES)
def test_a_batch_is_refused_in_one_sentence(sentence):
    """The second batch is; None takes an array away."""

    def batch(step):
        given = batch_of(step) | (BATCHES[sentence] if step else {})
        return {name: array for name, array in given.items() if array is not None}

    batches = GivenBatches(config_of("parallel.data=1").resolve(1), batch, device())
    batches.at(0)
    with pytest.raises(ConfigError) as error:
        batches.at(1)
    assert str(error.value) == f"The batch of step 2 from batches= {sentence}."


def device():
    return jax.local_devices()[0]


def test_an_iterable_is_read_once_in_order():
    config = config_of("parallel.data=1").resolve(1)
    batches = GivenBatches(config, (batch_of(step) for step in range(12)), device())
    for step in (2, 3, 2, 11, 4):
        np.testing.assert_array_equal(batches.at(step)["tokens"], batch_of(step)["tokens"])
    with pytest.raises(ConfigError, match=r"cannot return to step 3: give a function of the step"):
        batches.at(2)
    with pytest.raises(ConfigError, match=r"ended after 12 batches, and train.steps=4"):
        batches.at(12)


def test_batches_for_the_loader_are_filled_in():
    """Positions are counted, numbers have 32 bits, and arrays may have more dims."""
    config = config_of("parallel.data=1").resolve(1)
    found = GivenBatches(config, lambda step: batch_of(step) | {"teacher": np.zeros((8, 16, 4))}, device()).at(0)
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "tokens": ("int32", (8, 16)),
        "targets": ("int32", (8, 16)),
        "mask": ("bool", (8, 16)),
        "positions": ("int32", (8, 16)),
        "weight": ("float32", (8,)),
        "teacher": ("float32", (8, 16, 4)),
    }
    np.testing.assert_array_equal(found["positions"][3], np.arange(16))


def test_the_config_says_what_is_given():
    config = adopted(config_of(), Given(batch_of, weighted, optax.adam(1e-3)))
    assert (config.train.loss, config.data.source, config.optimizer.name) == ("given", "given", "given")
    assert config.optimizer.moments == pytest.approx(2, abs=1e-3)
    assert load_config(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match=r"takes the place of data.source=files: set data.source=given"):
        adopted(load_config({**TINY, "data": {"source": "files", "paths": [__file__]}}), Given(batch_of))


def test_the_page_runs():
    """The code of docs/extending.md, in order, as one program. Each run begins near the entropy of uniform bytes."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    names, found = {}, []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(
                compile(block.replace('"data": {"source"', '"run": {"cpu_devices": 8}, "data": {"source"'), "page", "exec"),
                names,
            )
            found += [names["losses"]] if "losses =" in block else []
    # Of 256 tokens; the teacher's eight likeliest of them.
    np.testing.assert_allclose(found, np.full((4, 2), np.log(256)), rtol=0.05)
    assert [step for step, _ in names["seen"]] == [1, 2]
