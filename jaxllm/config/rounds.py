"""What a config says about DiLoCo's rounds (train/diloco.py), for the trainer and the cost model."""

from jaxllm.config import Config, TrainConfig

OUTER_BLOCK = 128
"""Numbers that share a step, where replicas send codes (train/outer_codes.py)."""


def are_codes(bits: int, replicas: int) -> bool:
    """Whether so many replicas with this train.diloco_bits send codes; a single one sends nothing."""
    return bits < 32 and replicas > 1


def sends_codes(config: Config) -> bool:
    """Whether replicas send codes in outer steps, and keep residuals."""
    return config.train.diloco_steps is not None and are_codes(config.train.diloco_bits, config.parallel.replica)


def exchanges_beside_steps(config: Config) -> bool:
    """Whether replicas exchange during steps; a single one sends nothing."""
    return config.train.diloco_overlap and config.parallel.replica > 1


def fragments_of(config: Config) -> int:
    """Number of outer steps in a round, each of a part of the weights (train/diloco.py)."""
    return 1 if config.train.diloco_steps is None else config.train.diloco_fragments


def steps_apart(train: TrainConfig) -> int:
    """Steps from one outer step to the next; 1 without rounds."""
    return 1 if train.diloco_steps is None else train.diloco_steps // train.diloco_fragments


def fragment_due(train: TrainConfig, step: int) -> int | None:
    """The fragment whose outer step is due after this step (the first is 1), if one is. It is a function of the step alone, so
    a resumed run continues its round."""
    done, apart = step - train.diloco_after_steps, steps_apart(train)
    return None if done % apart else done // apart % train.diloco_fragments


def fragments_after(train: TrainConfig, step: int) -> list[int]:
    """The fragments that are synchronised between this step and the next."""
    if step == train.steps:
        return list(range(train.diloco_fragments))
    return [] if train.diloco_overlap or (due := fragment_due(train, step)) is None else [due]


def fragment_beside(train: TrainConfig, done: int) -> int | None:
    """The fragment that is synchronised during the step that follows `done` steps; None if there is none."""
    # Where each step between exchanges, the first and the last do too: that saves a program. The first has no effect.
    # After the last all fragments are synchronised.
    is_inside = train.diloco_after_steps < done < train.steps - 1 or steps_apart(train) == 1
    return fragment_due(train, done) if train.diloco_overlap and is_inside and done < train.steps else None


def next_common_step(config: Config, step: int) -> int:
    """The first step after `step` whose end all processes wait for. In rounds these are the steps before an outer step, or
    beside it: until then each replica trains alone."""
    train = config.train
    if train.diloco_steps is None or config.parallel.replica == 1 or step < train.diloco_after_steps:
        return step + 1
    later = range(step + 1, train.steps)
    common = (n for n in later if fragments_after(train, n) or fragment_beside(train, n - 1) is not None)
    return next(common, max(step + 1, train.steps))


def without_rounds(config: Config) -> Config:
    """The config of the steps before the first round, in which replicas train synchronously."""
    train = config.train.model_copy(update={"diloco_steps": None, "diloco_overlap": False})
    return config.model_copy(update={"train": train})


EXCHANGE_SCOPE = "outer_step"
"""jax.named_scope around the exchange between replicas."""
