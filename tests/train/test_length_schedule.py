"""train.length_schedule: short sequences first, by consumed tokens. What a token sees changes, and not which tokens a step
has.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import steps_of

import jaxllm
from jaxllm.config import ConfigError
from jaxllm.config.batch_schedule import phase_at, phases_of, sequences_before
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.device_batches import evaluated_microbatches
from jaxllm.parallel.zigzag import order
from jaxllm.run import loop
from jaxllm.run.messages import batch_notes
from jaxllm.run.programs import run_programs
from jaxllm.run.saving import require_same_batches
from jaxllm.train.optimizer import make_learning_rate

# Six steps of 128 tokens: two with sequences of 4, two of 8, two of 16.
SCHEDULE = ("train.length_schedule=[[256, 4], [512, 8]]", "train.steps=6", "data.held_out_fraction=0")
# Four steps: two with sequences of 4, two of 16.
SHORT = ("train.length_schedule=[[256, 4]]", "train.steps=4", "data.held_out_fraction=0", "optimizer.schedule=constant")
SHORT += ("data.mask_documents=false",)
LENGTHS = [4, 4, 16, 16]
ONE, MESH = ("run.cpu_devices=8", "parallel.data=8"), ("run.cpu_devices=8", "parallel.data=4", "parallel.context=2")


@pytest.mark.parametrize("schedule", [(), ((256, 16), (700, 32)), ((300, 16), (310, 8))])
@pytest.mark.parametrize("lengths", [((1, 4),), ((256, 4), (700, 8)), ((100, 16), (2000, 4))])
def test_phases_are_those_of_a_run_that_counts(schedule, lengths):
    """The length of a step is the first one whose tokens are not consumed when the step begins."""
    phases, sequences = phases_of(8, schedule, 16, lengths), 0
    for step in range(200):
        batch = [8, *(batch for tokens, batch in schedule if tokens <= 16 * sequences)][-1]
        length = next((length for until, length in lengths if 16 * sequences < until), 16)
        phase = phase_at(phases, step)
        assert (sequences_before(phases, step), phase.sequences, 16 // phase.parts) == (sequences, batch, length)
        sequences += batch


def test_tokens_and_learning_rates_are_those_without_it(tiny_config):
    ramp = ("parallel.data=8", "train.batch_schedule=[[300, 16]]", "train.batch_lr=sqrt")
    config, plain = tiny_config(*SCHEDULE, *ramp), tiny_config(*SCHEDULE[1:], *ramp)
    assert [config.tokens_before(step) for step in range(7)] == [plain.tokens_before(step) for step in range(7)]
    rates = [make_learning_rate(one) for one in (plain, config, config.cut(4), config.cut(2))]
    for step in range(6):
        assert len({float(rate(jnp.asarray(step))) for rate in rates}) == 1
    for phase in config.phases:
        own = config.in_phase(phase)
        assert own.step_tokens == phase.sequences * 16
        assert own.num_microbatches == phase.sequences // 8
    # Memory is that of whole sequences, once the run has them.
    assert config.at_largest_batch.train.sequence_length == 16
    assert tiny_config(*SCHEDULE, *ramp, "train.steps=2").at_largest_batch.train.sequence_length == 4


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """(trainer, run folder) of one uninterrupted run on a mesh."""
    folder = tmp_path_factory.mktemp("lengths") / "whole"
    return loop.fit(tiny_config(*MESH, *SHORT, f"run.dir={folder}")), folder


def test_a_step_has_the_same_tokens_in_shorter_rows(whole):
    trainer = whole[0]
    for step, length in enumerate(LENGTHS):
        samples = trainer.stream.samples(np.arange(8 * step, 8 * step + 8))
        dealt = order(length, 2)
        for name, array in trainer.train_batch(step).items():
            # A row of a microbatch holds consecutive tokens of one sample.
            np.testing.assert_array_equal(array, samples[name].reshape(1, -1, length)[..., dealt])


def test_each_length_is_compiled_once_and_logged(whole):
    lines = steps_of(whole[1])
    assert whole[0].programs.traces == 2
    assert [line["sequence_length"] for line in lines] == LENGTHS
    assert [line["tokens"] for line in lines] == [128 * step for step in range(1, 5)]


def test_losses_are_those_of_short_texts_on_every_mesh(tiny_config, whole):
    trainer, losses = jaxllm.Trainer(tiny_config(*ONE, *SHORT)), []
    for step in (0, 2):
        rows = trainer.train_batch(step)
        logits_BSV = trainer.model(rows["tokens"][0])
        loss_BS = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits_BSV)), np.asarray(rows["targets"])[0, ..., None], -1)
        expected = loss_BS[..., 0][np.asarray(rows["mask"])[0]].mean()
        losses += [line["loss"] for line in trainer.steps(2)]
        np.testing.assert_allclose(losses[step], expected, rtol=1e-5)
    trainer.close()
    np.testing.assert_allclose([line["loss"] for line in steps_of(whole[1])], losses, rtol=1e-5)


def test_resuming_inside_a_length_equals_never_stopping(tiny_config, whole, tmp_path):
    for steps in (1, 4):
        trainer = loop.fit(tiny_config(*MESH, *SHORT, f"run.dir={tmp_path / 'parts'}", f"train.steps={steps}"))
    jax.tree.map(np.testing.assert_array_equal, trainer.state, whole[0].state)


def test_the_programs_before_a_run_are_those_of_its_lengths(tiny_config):
    config = tiny_config(*MESH, *SCHEDULE, "log.layer_norms_every=2").resolve(8)
    found = list(run_programs(config, make_mesh(config.parallel, jax.devices())))
    for name in ("train step of 1 microbatch, sequences of {}", "layer norms, sequences of {}"):
        for length in (4, 8, 16):
            (one,) = [program for program in found if program.name == name.format(length)]
            assert one.arguments[1]["tokens"].shape == (1, 128 // length, length)
    (evaluation,) = [program for program in found if program.name == "evaluation"]
    assert evaluation.arguments[1]["tokens"].shape[-1] == 16


@pytest.mark.parametrize("loss", ["cross_entropy", "dpo"])
def test_the_evaluation_made_before_a_run_is_of_the_microbatches_that_it_scores_together(tiny_config, loss):
    pipeline = ("parallel.pipe=2", "train.global_batch_sequences=16", "train.microbatch_sequences=1")
    text = (
        "train.loss=dpo",
        "data.source=preferences",
        "data.packing=best_fit",
        "train.init_from=runs/first",
        "data.tokenizer=x",
    )
    config = tiny_config(*pipeline, "train.batch_schedule=[[256, 32]]", *(text if loss == "dpo" else ())).resolve(8)
    (_initial, first, *_, evaluation) = run_programs(config, make_mesh(config.parallel, jax.devices()))
    assert first.arguments[1]["tokens"].shape[0] == 4
    assert evaluation.name == ("token losses" if loss == "dpo" else "evaluation")
    assert evaluation.arguments[1]["tokens"].shape[0] == evaluated_microbatches(config) == 4


def test_the_lengths_are_announced(tiny_config):
    assert list(batch_notes(tiny_config(*MESH, *SCHEDULE, "train.steps=3").resolve(8))) == [
        "at first a batch of 32 sequences of 4 tokens, 128 tokens a step in 1 microbatch",
        "after step 2 (256 tokens) batch of 16 sequences of 8 tokens, 128 tokens a step in 1 microbatch, compiled then",
        "note: the run ends before its schedule reaches a batch of 8 sequences of 16 tokens, 128 tokens a step in 1 microbatch",
    ]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["train.length_schedule=[[256, 5]]"],
            "train.length_schedule has a length of 5, which does not divide train.sequence_length=16: use one of [1, 2, 4, 8, "
            "16].",
        ),
        (
            ["train.length_schedule=[[256, 4], [256, 8]]"],
            "train.length_schedule goes from 256 tokens to 256: its until_tokens must rise; put them in order.",
        ),
        (
            ["train.length_schedule=[[256, 2]]", "parallel.context=2"],
            "train.length_schedule has a length of 2, which does not divide over parallel.context=2 and tensor=1: use a "
            "multiple of 4.",
        ),
        (["train.length_schedule=256"], "train.length_schedule=256 is not a list of pairs: write [[until_tokens, "),
    ],
)
def test_mistakes_end_in_one_sentence(tiny_config, overrides, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tiny_config(*overrides)


def test_the_lengths_of_done_steps_stay(tiny_config):
    meta = {"step": 3, "config": tiny_config(*SCHEDULE).model_dump(mode="json")}

    def go_on(*overrides):
        require_same_batches(Path("run"), meta, tiny_config(*overrides))

    go_on("train.length_schedule=[[256, 4], [1024, 8]]")
    sentence = "run holds a run of 3 steps with train.length_schedule=[[256, 4], [512, 8]], but the given schedule differs"
    for other in ("[]", "[[256, 8]]", "[[384, 4], [512, 8]]"):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            go_on(f"train.length_schedule={other}")
