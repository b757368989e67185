"""What a pipeline refuses, and what it leaves as it was: exact zeros, the order of data, initial values, trainer.model."""

from functools import cache

import jax
import numpy as np
import pytest
from meshes import Run

import jaxllm
from jaxllm.config import ConfigError
from jaxllm.parallel.parameters import build_model

S, ROWS, MICROBATCHES = 16, 2, 4
INTERLEAVED = ("parallel.pipe=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2")
FOUR_LAYERS = "model.num_layers=4"

REFUSALS = {
    ("parallel.virtual_stages=2",): ("parallel.virtual_stages=2 needs a pipeline: set parallel.pipe, or virtual_stages=1."),
    ("parallel.pipe=2", "parallel.virtual_stages=2", FOUR_LAYERS): (
        "parallel.schedule=1f1b and parallel.virtual_stages=2 do not go together: interleaved takes 2 or more, "
        "1f1b and gpipe take 1."
    ),
    ("parallel.pipe=2", "parallel.schedule=gpipe", "parallel.virtual_stages=3"): (
        "parallel.schedule=gpipe and parallel.virtual_stages=3 do not go together"
    ),
    ("parallel.pipe=2", "parallel.schedule=interleaved"): (
        "parallel.schedule=interleaved and parallel.virtual_stages=1 do not go together"
    ),
    ("parallel.pipe=4",): (
        "model.num_layers=2 leaves a chunk of parallel.pipe=4 x virtual_stages=1 = 4 without a layer: set parallel.pipe=2."
    ),
    # Two layers on each of four: the fourth would hold none.
    ("parallel.pipe=4", "model.num_layers=5"): (
        "model.num_layers=5 leaves a chunk of parallel.pipe=4 x virtual_stages=1 = 4 without a layer: set parallel.pipe=3."
    ),
    INTERLEAVED: (
        "model.num_layers=2 leaves a chunk of parallel.pipe=2 x virtual_stages=2 = 4 without a layer: set "
        "parallel.virtual_stages=1 and schedule=1f1b."
    ),
    ("parallel.schedule=1F1B",): "parallel.schedule=1F1B is not one of the choices: use gpipe, 1f1b, interleaved.",
    ("parallel.pipe=0",): "parallel.pipe=0",
    (*INTERLEAVED, FOUR_LAYERS, "parallel.data=2", "train.microbatch_sequences=4"): (
        "parallel.schedule=interleaved takes microbatches in rounds of parallel.pipe=2, and a step has 1: make it 2, with "
        "train.global_batch_sequences=16 or another microbatch_sequences."
    ),
    (*INTERLEAVED, FOUR_LAYERS, "parallel.data=1", "train.microbatch_sequences=2", "train.global_batch_sequences=10"): (
        "parallel.schedule=interleaved takes microbatches in rounds of parallel.pipe=2, and a step has 5: make it 4 or 6, with "
        "train.global_batch_sequences=8 or 12 or another microbatch_sequences."
    ),
}


@pytest.mark.parametrize("overrides", REFUSALS, ids=" ".join)
def test_pipelines_that_cannot_be_are_refused(tiny_config, overrides):
    with pytest.raises(ConfigError) as error:
        tiny_config(*overrides)
    assert REFUSALS[overrides] in str(error.value)
    assert "\n" not in str(error.value)


def test_interleaved_rounds_are_refused_once_the_data_ranks_are_known(tiny_config):
    config = tiny_config(*INTERLEAVED, FOUR_LAYERS, "train.global_batch_sequences=24", "train.microbatch_sequences=2")
    assert config.resolve(4).num_microbatches == 6
    with pytest.raises(ConfigError) as error:
        config.resolve(8)
    assert str(error.value) == (
        "parallel.schedule=interleaved takes microbatches in rounds of parallel.pipe=2, and a step has 3: make it 2 or 4, with "
        "train.global_batch_sequences=16 or 32 or another microbatch_sequences."
    )


@pytest.mark.parametrize("virtual_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_gradient_crosses_a_document_or_a_microbatch_or_goes_back_in_time(tiny_config, virtual_stages):
    """Through the whole step: only the tokens that a position may see have a gradient in the embedding from its loss."""
    shape = (MICROBATCHES, ROWS, S)
    # Every token of the batch has an id of its own; documents end after 6 and 11 tokens.
    arrays = {
        "tokens": np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
        "targets": np.full(shape, 7, np.int32),
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), shape).copy(),
        "segments": np.broadcast_to(np.repeat(np.int32([1, 2, 3]), (6, 5, 5)), shape).copy(),
    }
    schedule = f"parallel.schedule={'interleaved' if virtual_stages > 1 else '1f1b'}"
    sizes = ("train.global_batch_sequences=8", "train.microbatch_sequences=2", "parallel.data=1", FOUR_LAYERS)
    config = tiny_config("parallel.pipe=2", f"parallel.virtual_stages={virtual_stages}", schedule, *sizes)
    run = Run(config, lambda _: arrays)
    for place, first in (((0, 1, 3), 0), ((2, 0, 8), 6), ((3, 1, 15), 11)):
        arrays["mask"] = np.zeros(shape, bool)
        arrays["mask"][place] = True
        _, gradients = run.gradients()
        reached = np.abs(np.asarray(gradients["embedding"])).sum(axis=1) > 0
        *row, position = place
        seen = np.zeros(256, bool)
        seen[arrays["tokens"][*row, first : position + 1]] = True
        np.testing.assert_array_equal(reached, seen)


MODEL = ("model.num_layers=7", "model.vocab_size=257")
PIPELINES = {
    # Of eight devices; seven layers leave both pipelines one identity layer, and 257 ids padded rows.
    "none": (),
    "1f1b": ("parallel.pipe=2", "train.microbatch_sequences=1"),
    "interleaved": (*INTERLEAVED, "train.microbatch_sequences=1"),
}


@pytest.fixture(scope="module")
def train(tiny_config):
    """name -> (config, first batch, logits of the first parameters, metrics of two steps, held-out loss after them)."""

    @cache
    def run(name):
        trainer = jaxllm.Trainer(tiny_config("run.cpu_devices=8", *MODEL, *PIPELINES[name]))
        batch = {name: np.asarray(array).reshape(-1, S) for name, array in trainer.train_batch(0).items()}
        logits = logits_of(trainer.model)
        metrics = list(trainer.steps(2))
        evaluation = trainer.evaluate(max_batches=2)
        trainer.close()
        return trainer.config, batch, logits, metrics, evaluation

    return run


def logits_of(model):
    ids = np.arange(2 * S, dtype=np.int32).reshape(2, S) * 7 % 257
    return np.asarray(jax.jit(lambda model, ids: model(ids))(model, ids))


@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved"])
def test_data_initial_values_and_losses_do_not_depend_on_the_pipeline(tiny_config, train, name):
    _, batch, _, metrics, evaluation = train("none")
    config, its_batch, logits, its_metrics, its_evaluation = train(name)
    assert (config.num_microbatches, config.parallel.data) == (2, 4)
    assert batch.keys() == its_batch.keys()
    for key in batch:
        np.testing.assert_array_equal(its_batch[key], batch[key])
    one = tiny_config(*MODEL)
    np.testing.assert_allclose(logits, logits_of(build_model(one, jax.random.key(one.train.seed))), atol=2e-6)
    for key in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose([m[key] for m in its_metrics], [m[key] for m in metrics], rtol=2e-6)
    assert its_evaluation.tokens == evaluation.tokens
    assert its_evaluation.loss == pytest.approx(evaluation.loss, rel=1e-6)
