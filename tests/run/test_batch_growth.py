"""train.batch_grows_to: the rule, its bounds, the tokens of a run that grows, and resuming at every stage."""

import json
import math
import re

import jax
import numpy as np
import pytest
from run_files import steps_of

from jaxllm.checkpoint.files import read_meta
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.noise_reading import NoiseEstimate
from jaxllm.run import loop
from jaxllm.run.batch_growth import EVERY, doubles, resumed, with_schedule
from jaxllm.run.metrics import spike_line
from jaxllm.run.noise_scale import NoiseScale
from jaxllm.run_report.history import read_run

GROWS = ("train.batch_grows_to=16", "log.noise_scale_every=1", "train.microbatch_sequences=1")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, False),
        (NoiseEstimate(300.0, 255.0, 400.0), False),
        (NoiseEstimate(300.0, 256.0, 400.0), True),
        (NoiseEstimate(math.inf, 256.0, math.inf), True),
        # An interval without a lower end says nothing.
        (NoiseEstimate(1e9, 0.0, math.inf), False),
    ],
)
def test_a_batch_of_128_tokens_doubles_when_the_noise_scale_is_surely_256(found, expected):
    assert doubles(128, found) is expected


@pytest.mark.parametrize("schedule", [(), ((1280, 16),), ((1280, 16), (1536, 32)), ((128, 32),), ((128, 16), (12_000, 32))])
def test_a_grown_run_reads_the_tokens_that_were_asked_for_in_as_few_steps_as_that_takes(tiny_config, schedule):
    asked = tiny_config("train.steps=100", *GROWS[1:])
    config = with_schedule(asked, schedule)
    assert config.total_tokens >= asked.total_tokens > config.tokens_before(config.train.steps - 1)
    assert (config == asked) == (not schedule)


def test_memory_and_checks_are_of_the_largest_batch_it_may_grow_to(tiny_config):
    config = tiny_config(*GROWS, "train.batch_grows_to=64", "parallel.data=2")
    assert config.at_largest_batch.train.global_batch_sequences == 64
    assert config.at_largest_batch.train.batch_grows_to is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["train.batch_grows_to=16"],
            "train.batch_grows_to=16 follows the gradient noise scale, which is not measured: set log.noise_scale_every=1.",
        ),
        (
            [*GROWS, "train.batch_grows_to=4"],
            "train.batch_grows_to=4 is not 8 doubled: use 16.",
        ),
        ([*GROWS, "train.batch_grows_to=100"], "train.batch_grows_to=100 is not 8 doubled: use 64 or 128."),
        (
            [*GROWS, "train.steps=100", "log.profile_steps=[40, 60]"],
            "log.profile_steps=[40, 60] may come after the last step, as train.batch_grows_to=16 may leave 50.",
        ),
        (
            [*GROWS, "train.diloco_steps=2"],
            "train.batch_grows_to=16 does not go with train.diloco_steps=2: leave one of them out.",
        ),
        (
            [*GROWS, "data.source=given", "data.paths=[]", "data.held_out_fraction=0"],
            "train.batch_grows_to=16 does not go with batches that the caller gives: leave it out.",
        ),
    ],
)
def test_what_it_cannot_follow_is_refused(tiny_config, overrides, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tiny_config(*overrides)


def test_averages_that_went_through_a_file_go_on_alike():
    rng = np.random.default_rng(0)
    before, whole = NoiseScale(), NoiseScale()
    for step in range(40):
        if step == 17:
            before = NoiseScale(json.loads(json.dumps(before.state())))
        values = rng.normal(1.0, 0.3), rng.normal(500.0, 90.0)
        before.add(*values)
        whole.add(*values)
    assert before.found == whole.found


def test_a_spike_in_a_grown_batch_names_the_samples_it_read(tiny_config):
    asked = tiny_config(*GROWS, "train.steps=100")
    grown = with_schedule(asked, ((1280, 16),))
    record = {"step": 13, "tokens": grown.tokens_before(13), "batch_sequences": 16, "skipped": True, "loss_spike": False}
    line = spike_line(asked, record)
    assert line is not None
    assert (line["first_sequence"], line["sequences"]) == (grown.sequences_before(12), 16) == (80 + 2 * 16, 16)


# -------------------------------------------------------------------------------------------------------------------- runs

RUN = (
    *("data.held_out_fraction=0", "run.cpu_devices=8", "parallel.data=4", "parallel.tensor=2", "train.sequence_length=4"),
    *("train.global_batch_sequences=4", "train.batch_lr=sqrt", "optimizer.schedule=constant", "optimizer.warmup_tokens=100"),
    "optimizer.learning_rate=0.0042",
)
FOLLOWS = (*RUN, "train.batch_grows_to=8", "log.noise_scale_every=1")
KEYS = ("step", "tokens", "batch_sequences", "loss", "grad_norm", "learning_rate", "noise_scale_tokens", "noise_scale_low")


@pytest.fixture(scope="module")
def grown(tiny_config, tmp_path_factory):
    """(trainer, run folder, steps before the growth) of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("grown") / "whole"
    trainer = loop.fit(tiny_config(*FOLLOWS, "train.steps=100", f"run.dir={folder}"))
    ((tokens, batch),) = trainer.config.train.batch_schedule
    assert batch == 8
    return trainer, folder, tokens // 16


def test_it_doubled_at_the_first_decision_that_the_rule_allows(grown):
    trainer, folder, first = grown
    lines = steps_of(folder)
    batches = [line["batch_sequences"] for line in lines]
    assert batches == [4] * first + [8] * (len(lines) - first)
    lows = {line["step"]: line["noise_scale_low"] for line in lines if line["step"] % EVERY == 0 and line["step"] <= first}
    assert [step for step, low in lows.items() if low >= 32] == [first]
    assert trainer.config.total_tokens == lines[-1]["tokens"] == 100 * 16
    assert read_meta(folder / "checkpoints" / str(len(lines)))["samples"] == 100 * 4


def test_it_is_the_run_of_the_schedule_that_came_of_it(grown, tiny_config, tmp_path):
    """To rounding, as the programs hold other constants. The config that a grown run leaves resumes it, too."""
    trainer, folder, first = grown
    schedule = f"train.batch_schedule=[[{first * 16}, 8]]"
    steps = f"train.steps={trainer.config.train.steps}"
    plain = loop.fit(tiny_config(*RUN, schedule, steps, "log.noise_scale_every=1", f"run.dir={tmp_path}"))
    assert plain.step == trainer.step
    told = [[[line[key] for key in KEYS] for line in steps_of(run)] for run in (tmp_path, folder)]
    np.testing.assert_allclose(*told, rtol=1e-3)
    kept = load_config(folder / "config.yaml")
    assert (kept.train.batch_schedule, kept.train.steps) == (((first * 16, 8),), trainer.config.train.steps)
    assert loop.fit(kept).step == trainer.step
    assert read_run(folder).config.phases == kept.phases


def test_a_bound_below_the_batch_it_has_and_a_change_that_was_to_come(tiny_config):
    began = tiny_config(*GROWS, "train.batch_schedule=[[512, 16]]", "train.steps=40")
    grown = with_schedule(began, ((512, 16), (2048, 32)))
    meta = {"step": 30, "config": grown.model_dump(mode="json")}
    with pytest.raises(ConfigError, match=r"has grown to 32 sequences, beyond train.batch_grows_to=16: set 32 or more"):
        resumed(began, meta)
    # At step 2 neither the change nor the growth has come.
    other = tiny_config(*GROWS, "train.steps=40")
    assert resumed(other, meta | {"step": 2}).train.batch_schedule == ()
    wider = tiny_config(*GROWS, "train.batch_grows_to=32", "train.batch_schedule=[[512, 16]]", "train.steps=40")
    assert resumed(wider, meta).train.batch_schedule == ((512, 16), (2048, 32))


def test_stopped_before_at_and_after_the_growth_it_continues_alike(grown, tiny_config, tmp_path):
    trainer, folder, first = grown
    for steps in (first - 1, first, first + 10, 100):
        resumed = loop.fit(tiny_config(*FOLLOWS, f"train.steps={steps}", f"run.dir={tmp_path}"))
    jax.tree.map(np.testing.assert_array_equal, resumed.state, trainer.state)
    told = [[[line[key] for key in KEYS] for line in steps_of(run)] for run in (tmp_path, folder)]
    assert told[0] == told[1]
