"""train.batch_grows_to: the global batch doubles when the gradient noise scale says that this wastes little.

Let B be the tokens of a step and b the noise scale (noise_scale.py). A step wastes B / (B + b) of its tokens. Once
train.batch_schedule and train.length_schedule have made their last change, after every EVERY-th step B doubles if the lower end
of the 95% interval of b is at least 2 B: then a doubled step wastes at most half. It never exceeds the bound and never shrinks.

The decisions become entries of the config's train.batch_schedule. Checkpoints store that config and the state of the averages,
so a resumed run has the batches, and makes the decisions, of one that never stopped. train.steps of the config that was asked
for gives the tokens of the run: grown batches read at least these, in the fewest steps. The learning rate's schedule is a
function of tokens that ends with the last of those steps.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from jaxllm.checkpoint.files import Meta
from jaxllm.cluster import distributed
from jaxllm.config import Config, ConfigError
from jaxllm.config.batch_schedule import phases_of, sequences_before
from jaxllm.cost_model.noise_reading import NoiseEstimate
from jaxllm.run.hooks import Moment, Run
from jaxllm.run.messages import describe_phase
from jaxllm.run.metrics import Record

EVERY = 20
"""Steps between decisions. At each, the loop waits for the running step."""


def doubles(batch_tokens: int, found: NoiseEstimate | None) -> bool:
    """The rule above, without the bound."""
    return found is not None and found.low >= 2 * batch_tokens


def with_schedule(asked: Config, schedule: Sequence[Sequence[int]]) -> Config:
    """`asked` with this train.batch_schedule, and the fewest steps that read at least its tokens."""
    config = asked.model_copy(update={"train": asked.train.model_copy(update={"batch_schedule": tuple(map(tuple, schedule))})})
    # Doubled batches need no more steps.
    steps = bisect_left(range(asked.train.steps), asked.total_tokens, key=config.tokens_before)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def resumed(asked: Config, meta: Meta) -> Config:
    """`asked` with the batches that the checkpoint's run had come to, if they begin as the schedule of `asked` does. They are
    refused beyond train.batch_grows_to."""
    if (most := asked.train.batch_grows_to) is None:
        return asked
    train, given = meta["config"]["train"], asked.train.batch_schedule
    before = tuple(map(tuple, train.get("batch_schedule", ())))
    phases = phases_of(train["global_batch_sequences"], before, train["sequence_length"])
    done = sequences_before(phases, meta["step"]) * train["sequence_length"]
    # A change that was to come may be another one now. Growths come after all changes that are given.
    before = tuple(pair for pair in before if pair[0] < done)
    config = with_schedule(asked, before if before[: len(given)] == given else given)
    if (batch := config.batches[-1]) > most:
        raise ConfigError(
            f"The batch of this run has grown to {batch} sequences, beyond train.batch_grows_to={most}: set {batch} or more."
        )
    return config


def grow(trainer: Any) -> Record | None:
    """Doubles the batch of a Trainer from the next step on, if it is time to decide and the rule says so. Returns the metrics
    of the running step if it had to wait for them."""
    config, step = trainer.config, trainer.step
    if config.train.batch_grows_to is None or step == 0 or step % EVERY:
        return None
    phase, tokens = config.phases[-1], config.tokens_before(step)
    # Changes that the config gives come first.
    if phase.first_step > step or 2 * phase.sequences > config.train.batch_grows_to:
        return None
    record = trainer.finish()
    grows = doubles(phase.sequences * config.train.sequence_length, trainer.metrics.noise.found)
    # Their processors may round an average differently.
    if distributed.broadcast("yes" if grows else ""):
        trainer.adopt(with_schedule(trainer.asked, (*config.train.batch_schedule, (tokens, 2 * phase.sequences))))
    return record


def register(run: Run) -> None:
    """Says when a phase of train.batch_schedule or train.length_schedule begins, and when the batch grows."""
    trainer, console = run.trainer, run.console
    shown = trainer.config

    def announce() -> None:
        if trainer.step > 0 and (phase := trainer.config.phase_at(trainer.step)).first_step == trainer.step:
            console.say(f"{describe_phase(trainer.config, phase)} from here on")

    def grown(moment: Moment) -> None:
        nonlocal shown
        if (config := trainer.config) is not shown:
            shown = config
            console.resize(config.train.steps)
            console.say(f"{describe_phase(config, config.phases[-1])} from step {moment.step} to {config.train.steps}")

    run.on("before", announce)
    run.on("begun", grown)
