"""Batch schedules: phases of consumed tokens, the learning rate tied to them, and resuming inside each."""

import contextlib
import io
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import steps_of

import jaxllm
from jaxllm.checkpoint.files import read_meta
from jaxllm.cluster import progress
from jaxllm.config import ConfigError
from jaxllm.config.batch_schedule import Phase, done_by, phase_at, phases_of, sequences_before
from jaxllm.plan.estimate import estimate
from jaxllm.run import loop
from jaxllm.run.messages import batch_notes
from jaxllm.run.saving import require_same_batches
from jaxllm.train.optimizer import make_learning_rate

# Six steps: two of 8 sequences (128 tokens), two of 16, two of 32; on 8 data ranks in 1, 2 and 4 microbatches.
RAMP = ("train.batch_schedule=[[256, 16], [700, 32]]", "train.steps=6")
ROOT = ("train.batch_lr=sqrt", "optimizer.schedule=constant")
EIGHT = ("run.cpu_devices=8", "parallel.data=8", "data.held_out_fraction=0")
BATCHES, TOKENS = [8, 8, 16, 16, 32, 32], [128, 256, 512, 768, 1280, 1792]


# ------------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    "schedule",
    [
        (),
        ((256, 16), (700, 32)),
        # One step passes both thresholds: the batch of the later one follows.
        ((300, 16), (310, 24)),
        ((1, 16),),
        # A batch may become smaller again.
        ((128, 64), (1000, 8), (5000, 40)),
        # Nothing changes: from 128 tokens on, and if the phase of 16 ends before its first step.
        ((128, 8), (300, 16), (310, 8), (1000, 32)),
    ],
)
def test_phases_are_those_of_a_run_that_counts(schedule):
    """The batch of a step is the last one whose tokens are consumed when the step begins."""
    phases, sequences = phases_of(8, schedule, 16), 0
    for step in range(200):
        batch = [8, *(batch for tokens, batch in schedule if tokens <= 16 * sequences)][-1]
        assert sequences_before(phases, step) == sequences
        assert phase_at(phases, step).sequences == batch
        sequences += batch
    assert all(before.first_step < after.first_step for before, after in itertools.pairwise(phases))
    assert all(before.sequences != after.sequences for before, after in itertools.pairwise(phases))


def test_whole_numbers_stay_exact_over_trillions_of_tokens():
    """Llama 3 405B's batches, in sequences of 8,192 tokens."""
    phases = phases_of(512, ((252_000_000, 1024), (2_870_000_000_000, 2048)), 8192)
    assert phases == (Phase(0, 0, 512), Phase(61, 31_232, 1024), Phase(342_162, 350_342_656, 2048))
    for phase, tokens, step in zip(phases[1:], (252_000_000, 2_870_000_000_000), (512, 1024), strict=True):
        assert 0 <= phase.first_sequence * 8192 - tokens < step * 8192
    assert sequences_before(phases, 10**9) == 350_342_656 + (10**9 - 342_162) * 2048


def test_what_is_done_are_the_phases_that_had_a_step():
    phases = phases_of(8, ((256, 16), (700, 32)), 16)
    assert [len(done_by(phases, step)) for step in range(7)] == [0, 1, 1, 2, 2, 3, 3]


def test_a_config_counts_tokens_by_its_phases(tiny_config):
    config = tiny_config(*RAMP, "parallel.data=8")
    assert [config.tokens_before(step) for step in range(1, 7)] == TOKENS
    assert config.total_tokens == 1792
    assert config.step_tokens == 128
    assert [config.in_phase(phase).num_microbatches for phase in config.phases] == [1, 2, 4]
    assert {config.in_phase(phase).microbatch_sequences for phase in config.phases} == {1}
    largest = config.at_largest_batch
    assert (largest.train.global_batch_sequences, largest.num_microbatches, largest.train.batch_schedule) == (32, 4, ())
    # A batch that the run does not reach needs no memory.
    assert tiny_config(*RAMP, "train.steps=4", "parallel.data=8").at_largest_batch.train.global_batch_sequences == 16
    plain = tiny_config("parallel.data=8")
    assert plain.at_largest_batch is plain


def test_the_estimate_is_of_the_largest_batch(tiny_config):
    ramp = estimate(tiny_config(*RAMP, "parallel.data=8"))
    constant = estimate(tiny_config("train.global_batch_sequences=32", "train.microbatch_sequences=1", "parallel.data=8"))
    assert ramp.memory.peak_bytes == constant.memory.peak_bytes


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["train.batch_schedule=[[512, 16], [512, 32]]"],
            "train.batch_schedule goes from 512 tokens to 512: its from_tokens must rise; put them in order.",
        ),
        (
            ["train.batch_schedule=[[512, 12]]", "parallel.data=4"],
            "train.batch_schedule has 12 sequences from 512 tokens on, which do not divide into data ranks x microbatch = 4 x "
            "2 = 8: use 8 or 16, or change train.microbatch_sequences or parallel.data.",
        ),
        (
            ["train.batch_schedule=[[512, 4]]", "parallel.data=4"],
            "= 8: use 8, or change train.microbatch_sequences or parallel.data.",
        ),
        (
            [
                "train.batch_schedule=[[512, 24]]",
                *("parallel.data=1", "parallel.pipe=2", "model.num_layers=4", "train.microbatch_sequences=4"),
                *("parallel.virtual_stages=2", "parallel.schedule=interleaved", "train.global_batch_sequences=16"),
            ],
            None,
        ),
        (
            [
                "train.batch_schedule=[[512, 20]]",
                *("parallel.data=1", "parallel.pipe=2", "model.num_layers=4", "train.microbatch_sequences=4"),
                *("parallel.virtual_stages=2", "parallel.schedule=interleaved", "train.global_batch_sequences=16"),
            ],
            "train.batch_schedule has 20 sequences from 512 tokens on, in 5 microbatches, and parallel.schedule=interleaved "
            "takes them in rounds of parallel.pipe=2: use a multiple of 8 sequences, or another train.microbatch_sequences.",
        ),
        (
            ["train.batch_lr=sqrt"],
            "train.batch_lr=sqrt needs train.batch_schedule, and there is none: set one, or set batch_lr=none.",
        ),
        (["train.batch_schedule=[[0, 16]]"], "train.batch_schedule[0][0]=0 is not valid"),
        (
            ["train.batch_schedule=[512, 16]"],
            "train.batch_schedule=[512, 16] is not a list of pairs: write [[from_tokens, global_batch_sequences], ...], such "
            "as [[1000000000, 2048]].",
        ),
    ],
)
def test_every_phase_is_checked_at_the_start(tiny_config, overrides, sentence):
    if sentence is None:
        assert tiny_config(*overrides).phases[-1].sequences == 24
        return
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tiny_config(*overrides)


def test_phases_are_checked_again_once_the_devices_are_known(tiny_config):
    config = tiny_config("train.batch_schedule=[[512, 12]]", "train.microbatch_sequences=1")
    assert config.resolve(1).phases[-1].sequences == 12
    with pytest.raises(ConfigError, match=r"12 sequences from 512 tokens on, which do not divide into .* use 8 or 16"):
        config.resolve(8)


# ---------------------------------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(("rule", "power"), [("none", 0), ("sqrt", 0.5), ("linear", 1)])
def test_the_learning_rate_goes_with_the_batch(tiny_config, rule, power):
    """Relative to the last batch, in addition to a schedule in tokens."""
    rate = make_learning_rate(tiny_config(*RAMP, f"train.batch_lr={rule}", "optimizer.learning_rate=1.0"))
    rates = [float(rate(jnp.asarray(step))) for step in range(6)]
    cosine = 0.1 + 0.45 * (1 + np.cos(np.pi * np.array(TOKENS) / 1792))
    np.testing.assert_allclose(rates, cosine * (np.array(BATCHES) / 32) ** power, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """(trainer, run folder, printed text) of one uninterrupted run through three phases."""
    folder, printed = tmp_path_factory.mktemp("ramp") / "whole", io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = loop.fit(tiny_config(*EIGHT, *RAMP, *ROOT, f"run.dir={folder}"))
    return trainer, folder, printed.getvalue()


def test_metrics_follow_the_tokens_consumed(whole):
    lines = steps_of(whole[1])
    assert [line["tokens"] for line in lines] == TOKENS
    assert [line["batch_sequences"] for line in lines] == BATCHES
    np.testing.assert_allclose([line["learning_rate"] for line in lines], 3e-4 * np.sqrt(np.array(BATCHES) / 32), rtol=1e-6)


def test_each_number_of_microbatches_is_compiled_once(whole):
    assert whole[0].programs.traces == 3


@pytest.mark.slow
def test_a_batch_that_comes_back_is_not_compiled_again(tiny_config):
    """8, 16 and 8 sequences: the metrics of each step arrive, also those before a compilation."""
    trainer = jaxllm.Trainer(tiny_config(*EIGHT, "train.batch_schedule=[[128, 16], [384, 8]]"))
    assert [line["tokens"] for line in trainer.steps(4)] == [128, 384, 512, 640]
    trainer.close()
    assert trainer.programs.traces == 2


def test_steps_of_another_batch_say_nothing_of_how_long_these_take():
    """The watchdog and the straggler log use only the last steps."""
    for step in range(1001, 1006):
        progress.at_step(step)
    assert len(progress.last_steps()) == 3
    progress.forget_steps()
    assert progress.last_steps() == []
    for step in range(1006, 1009):
        progress.at_step(step)
    # The first two steps of a start never count.
    assert len(progress.last_steps()) == 1


def test_the_phases_are_announced(whole):
    for line in (
        "after step 2 (256 tokens) batch of 16 sequences, 256 tokens a step in 2 microbatches, compiled then",
        "after step 4 (768 tokens) batch of 32 sequences, 512 tokens a step in 4 microbatches, compiled then",
        "learning rate proportional to the square root of the batch; optimizer.learning_rate is that of 32 sequences",
        "batch of 16 sequences, 256 tokens a step in 2 microbatches from here on",
    ):
        assert line in whole[2]
    assert "note: the run ends before" not in whole[2]


def test_a_batch_the_run_does_not_come_to_is_announced(tiny_config):
    config = tiny_config(*RAMP, "train.steps=4").resolve(8)
    assert list(batch_notes(config))[-1] == (
        "note: the run ends before its schedule reaches a batch of 32 sequences, 512 tokens a step in 4 microbatches"
    )


def test_no_sample_is_left_out_or_read_twice(whole):
    """Steps read consecutive samples with any batch. The number of rows per microbatch stays the same."""
    trainer, first = whole[0], 0
    for step, batch in enumerate(BATCHES):
        expected = trainer.stream.samples(np.arange(first, first + batch))["tokens"].reshape(-1, 8, 16)
        np.testing.assert_array_equal(trainer.train_batch(step)["tokens"], expected)
        first += batch
    assert read_meta(whole[1] / "checkpoints" / "6")["samples"] == first == 112


@pytest.mark.slow
def test_resuming_inside_each_phase_equals_never_stopping(tiny_config, whole, tmp_path):
    """Stopped after steps 1, 3 and 5: the state is equal bit for bit, and so is every line of the metrics."""
    parts = (*EIGHT, *RAMP, *ROOT, f"run.dir={tmp_path / 'parts'}")
    for steps in (1, 3, 5, 6):
        trainer = loop.fit(tiny_config(*parts, f"train.steps={steps}"))
    jax.tree.map(np.testing.assert_array_equal, trainer.state, whole[0].state)
    keys = ("step", "tokens", "batch_sequences", "loss", "grad_norm", "learning_rate")
    told = [[[line[key] for key in keys] for line in steps_of(folder)] for folder in (tmp_path / "parts", whole[1])]
    assert told[0] == told[1]


def test_what_is_done_of_a_schedule_stays_and_what_comes_may_change(tiny_config):
    """A run of three steps, so inside its second batch."""
    meta = {"step": 3, "config": tiny_config(*RAMP).model_dump(mode="json")}

    def go_on(schedule):
        require_same_batches(Path("run"), meta, tiny_config(f"train.batch_schedule={schedule}"))

    go_on("[[256, 16], [4000, 64]]")
    # Another threshold that gives the same steps.
    go_on("[[200, 16]]")
    sentence = (
        "run holds a run of 3 steps that began with train.global_batch_sequences=8 and train.batch_schedule=[[256, 16]], but "
        "the given schedule differs for them: begin it with these, or choose another run.dir."
    )
    for other in ("[]", "[[256, 32]]", "[[512, 16]]"):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            go_on(other)
    # A run from a version without schedules.
    del meta["config"]["train"]["batch_schedule"]
    go_on("[[384, 16]]")
    with pytest.raises(ConfigError, match=r"began with train.global_batch_sequences=8 and train.batch_schedule=\[\], but"):
        go_on("[[256, 16]]")
