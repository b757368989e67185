"""What a config says about DiLoCo's rounds (train/diloco.py), for the trainer and the cost model."""

from __future__ import annotations

from jaxllm.config import Config

OUTER_BLOCK = 128
"""Numbers that share a step, where replicas send codes (train/outer_codes.py)."""


def are_codes(bits: int, replicas: int) -> bool:
    """Whether so many replicas with this train.diloco_bits send codes; a single one sends nothing."""
    return bits < 32 and replicas > 1


def sends_codes(config: Config) -> bool:
    """Whether replicas send codes in outer steps, and keep residuals."""
    return config.train.diloco_steps is not None and are_codes(config.train.diloco_bits, config.parallel.replica)


def fragments_of(config: Config) -> int:
    """Number of outer steps in a round, each of a part of the weights (train/fragments.py)."""
    return 1 if config.train.diloco_steps is None else config.train.diloco_fragments


def steps_apart(config: Config) -> int:
    """Steps from one outer step to the next."""
    assert config.train.diloco_steps is not None, "there are no rounds"
    return config.train.diloco_steps // fragments_of(config)


def next_common_step(config: Config, step: int) -> int:
    """The first step after `step` whose end all processes wait for. In rounds these are the steps before an outer step, or
    beside it (train.diloco_overlap): until then each replica trains alone."""
    train = config.train
    if train.diloco_steps is None or config.parallel.replica == 1 or step < train.diloco_after_steps:
        return step + 1
    between, late = train.diloco_steps // fragments_of(config), int(train.diloco_overlap)
    done = max(step - train.diloco_after_steps - late, 0) // between
    return max(step + 1, min(train.diloco_after_steps + late + (done + 1) * between, train.steps))


def without_rounds(config: Config) -> Config:
    """The config of the steps before the first round, in which replicas train synchronously."""
    train = config.train.model_copy(update={"diloco_steps": None, "diloco_overlap": False})
    return config.model_copy(update={"train": train})
