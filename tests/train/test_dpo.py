"""DPO: on every mesh its loss and gradients are those of its definition on one device; a run's reference, and its resume."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import Run, assert_close, unequal_batch
from run_files import records
from tiny import TINY

from jaxllm.config import ConfigError, load_config
from jaxllm.parallel.parameters import merge_model
from jaxllm.run.evaluation import FILE, Reference
from jaxllm.run.loop import fit
from jaxllm.run.trainer import Trainer

AXES = ("replica", "pipe", "data", "context", "tensor", "zero")
MESHES = {
    "pipe-tensor-interleaved": ((1, 2, 1, 1, 2, 1), ("parallel.schedule=interleaved", "parallel.virtual_stages=2")),
    "pipe-context-zero3-tied": ((1, 2, 1, 2, 1, 3), ("model.tie_embeddings=true",)),
    "data-context-tensor-once": ((1, 1, 2, 2, 2, 1), ()),
    "hybrid-zero3": ((2, 1, 2, 1, 1, 3), ()),
}
MICROBATCHES, ROWS, S = 2, 4, 32
BETA = 0.5


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}?", "chosen": f"{2 * n}", "rejected": f"no {n}"}) for n in range(60)))
    return str(path)


@pytest.fixture(scope="module")
def config_of(pairs, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("model"))

    def make(*overrides, init_from=folder, **train):
        data = {"source": "preferences", "paths": pairs, "tokenizer": "bytes", "packing": "best_fit", "held_out_fraction": 0.3}
        settings = {"loss": "dpo", "dpo_beta": BETA, "sequence_length": S, "init_from": init_from}
        return load_config(TINY | {"data": data, "train": TINY["train"] | settings | train}, list(overrides))

    return make


# ---------------------------------------------------------------------------------------------------------------- on meshes


def batch(seed=0):
    """Rows of no pair, one, two or three pairs of random lengths, and references."""
    arrays, rng = unequal_batch(seed, (MICROBATCHES, ROWS, S), least=0.7), np.random.default_rng(seed + 1)
    arrays["segments"] = np.zeros((MICROBATCHES, ROWS, S), np.int32)
    arrays["reference"] = np.zeros((MICROBATCHES, ROWS, S), np.float32)
    for row in np.ndindex(MICROBATCHES, ROWS):
        texts = 2 * int(rng.integers(0, 4)) if any(row) else 0
        ends = np.sort(rng.choice(np.arange(1, S // 2), max(texts, 1), replace=False) * 2) if texts else []
        begin = 0
        for number, end in enumerate(ends, start=1):
            arrays["segments"][row][begin:end] = number
            arrays["positions"][row][begin:end] = np.arange(end - begin)
            arrays["reference"][row][begin] = -5.5 * (end - begin) + rng.normal()
            # Each answer has a token.
            arrays["mask"][row][begin] = True
            begin = end
        arrays["mask"][row][begin:] = False
    return arrays


def definition(config, arrays):
    """params -> the mean loss, pair after pair, from whole rows of logits."""
    rows = {name: array.reshape(-1, S) for name, array in arrays.items()}

    def mean(params):
        network = merge_model(config, params)
        inputs = [jnp.asarray(rows[name]) for name in ("tokens", "positions", "segments")]
        log_p_BSV = jax.nn.log_softmax(network(*inputs))
        log_p_BS = jnp.take_along_axis(log_p_BSV, rows["targets"][..., None], axis=-1)[..., 0]
        losses = []
        for number in range(len(rows["tokens"])):

            def of(segment, number=number):
                here = rows["segments"][number] == segment
                reference = rows["reference"][number][here].sum()
                return jnp.where(here & rows["mask"][number], log_p_BS[number], 0.0).sum() - reference

            pairs = range(1, int(rows["segments"][number].max()) + 1, 2)
            losses += [-jax.nn.log_sigmoid(BETA * (of(chosen) - of(chosen + 1))) for chosen in pairs]
        return jnp.stack(losses).mean()

    return mean


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_on_a_mesh_are_those_of_the_definition(config_of, name):
    sizes, overrides = MESHES[name]
    by_axis = dict(zip(AXES, sizes, strict=True))
    config = config_of(
        *(f"parallel.{axis}={size}" for axis, size in by_axis.items()),
        *("model.num_layers=4", "model.vocab_size=258", "train.loss_chunk_tokens=40", *overrides),
        global_batch_sequences=MICROBATCHES * ROWS,
        microbatch_sequences=ROWS // (by_axis["data"] * by_axis["replica"]),
    )
    run = Run(config, batch)
    one = Run(config.model_copy(update={"parallel": type(config.parallel)(data=1)}), batch)
    with jax.set_mesh(one.mesh):
        mean = jax.jit(jax.value_and_grad(definition(one.config, batch())))
        expected, expected_gradients = mean(one.state.params)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_close(run.plain(gradients), one.plain(expected_gradients), 5e-5)


# --------------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def first(config_of, tmp_path_factory, text_file):
    """The run directory of a model that has learnt a little."""
    folder = tmp_path_factory.mktemp("first") / "run"
    values = TINY | {"data": {"source": "files", "paths": str(text_file)}, "run": {"dir": str(folder), "cpu_devices": 8}}
    fit(load_config(values))
    return str(folder)


def run_of(config_of, first, folder, *overrides, **train):
    settings = {"steps": 12, "global_batch_sequences": 8, "init_from": first} | train
    fixed = ("run.cpu_devices=8", f"run.dir={folder}", "optimizer.learning_rate=0.003", "optimizer.schedule=constant")
    return config_of(*fixed, *overrides, **settings)


@pytest.fixture(scope="module")
def whole(config_of, first, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(run_of(config_of, first, folder))
    return folder


def test_a_run_begins_at_log_2_and_learns_what_is_preferred(whole, config_of, first):
    found = records(whole)
    steps = [record for record in found if "loss" in record]
    # Each pair's two sums equal the reference's.
    np.testing.assert_allclose(steps[0]["loss"], np.log(2), rtol=1e-6)
    assert steps[-1]["loss"] < 0.6
    (end,) = (record for record in found if "eval_loss" in record)
    assert end["eval_loss"] < np.log(2)
    assert end["eval_accuracy"] > 0.7


def test_the_reference_is_what_the_first_model_says(whole, config_of, first):
    config = run_of(config_of, first, whole, "parallel.pipe=2", "parallel.context=2")
    trainer = Trainer(config)
    source, model = trainer.stream.sources[0], trainer.model
    stored = Reference.load(whole, trainer.stream.sources, trainer.data.held_out)
    for found, kept in ((trainer.reference.train, stored.train), (trainer.reference.held_out, stored.held_out)):
        np.testing.assert_allclose(found[0], kept[0], rtol=1e-5)
    expected = stored.train[0]
    rows = source.in_order(range(3))
    log_p_BSV = jax.nn.log_softmax(model(*(jnp.asarray(rows[name]) for name in ("tokens", "positions", "segments"))))
    log_p_BS = np.take_along_axis(np.asarray(log_p_BSV), rows["targets"][..., None], axis=-1)[..., 0]
    for row in range(3):
        for text in range(1, int(rows["segments"][row].max()) + 1):
            here = (rows["segments"][row] == text) & rows["mask"][row]
            np.testing.assert_allclose(log_p_BS[row][here].sum(), expected[row, text - 1], rtol=1e-4)
    assert trainer.evaluate().accuracy == 0.0
    np.testing.assert_allclose(trainer.evaluate().loss, np.log(2), rtol=1e-5)
    trainer.close()


def test_a_resumed_run_keeps_its_reference_bit_for_bit(whole, config_of, first, tmp_path):
    folder = tmp_path / "run"
    fit(run_of(config_of, first, folder, steps=5))
    fit(run_of(config_of, first, folder))
    losses = [[record["loss"] for record in records(path) if "loss" in record] for path in (whole, folder)]
    assert losses[0] == losses[1]
    (folder / FILE).unlink()
    with pytest.raises(
        ConfigError, match=rf"{FILE}, which holds the reference's log-probabilities, cannot be used \(No such file"
    ):
        fit(run_of(config_of, first, folder, steps=14))
