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


def next_common_step(config: Config, step: int) -> int:
    """The first step after `step` whose end all processes wait for. In rounds these are the steps before an outer step: until
    then each replica trains alone."""
    train = config.train
    if train.diloco_steps is None or config.parallel.replica == 1 or step < train.diloco_after_steps:
        return step + 1
    between, done = train.diloco_steps // fragments_of(config), step - train.diloco_after_steps
    return max(step + 1, min(step + between - done % between, train.steps))


def hides_exchanges(config: Config) -> bool:
    """Whether the compiled step has a fragment's exchange behind its layers: with train.diloco_overlap, if a resolved config's
    replicas are single GPUs. Otherwise XLA starts it only after the last collective inside the replica."""
    return config.train.diloco_overlap and config.devices == config.parallel.replica


def without_rounds(config: Config) -> Config:
    """The config of the steps before the first round, in which replicas train synchronously."""
    train = config.train.model_copy(update={"diloco_steps": None, "diloco_overlap": False})
    return config.model_copy(update={"train": train})
