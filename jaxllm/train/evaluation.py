"""Held-out loss during a run: cross-entropy of text, or DPO's loss of pairs (dpo.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.data.loader import PackedDocuments, SampleStream
from jaxllm.data.sources import Data
from jaxllm.mesh import CONTEXT
from jaxllm.parallel.device_batches import put_global_batch
from jaxllm.parallel.zigzag import inverse
from jaxllm.runtime import progress
from jaxllm.train.build import State
from jaxllm.train.dpo import Reference, judge, log_p


class Scoring(Protocol):
    """What evaluation reads of a Trainer."""

    config: Config
    mesh: jax.sharding.Mesh
    data: Data
    stream: SampleStream
    state: State
    reference: Reference | None
    loss_sum: Callable[..., Any]
    token_losses: Callable[..., Any]


class Evaluation(NamedTuple):
    """Losses on held-out text."""

    loss: float
    """Nats per token; of pairs, nats per pair."""
    tokens: int
    """Number of scored tokens; of pairs, their number."""
    by_source: dict[str, float]
    """The loss of each source of a mixture."""
    accuracy: float | None = None
    """Share of pairs whose chosen answer gained more log-probability over the reference than the rejected; None for text."""


def evaluate(trainer: Scoring, max_batches: int | None, stop: Callable[[], bool]) -> Evaluation | None:
    """See Trainer.evaluate."""
    # A pipeline gets as many microbatches as it has stages; with fewer, most stages would be idle.
    together = trainer.config.parallel.pipe * trainer.config.microbatch_rows
    score = _pairs if trainer.config.train.loss == "dpo" else _text
    sums: dict[str, np.ndarray] = {}
    with jax.set_mesh(trainer.mesh):
        for number, source in enumerate(trainer.data.held_out()):
            # In float64, because a float32 sum over a million tokens would lose its last digits.
            total = np.zeros(3)
            for first in itertools.islice(range(0, source.packing.num_samples, together), max_batches):
                # Each batch counts as progress for the watchdog, because an evaluation may take hours.
                with progress.phase("evaluate"):
                    total += score(trainer, number, source, first + np.arange(together))
                if stop():
                    return None
            sums[source.name] = total
    loss, count, right = sum(sums.values(), start=np.zeros(3))
    if not count:
        raise ConfigError("Nothing is held out to evaluate on: set data.held_out_fraction above 0, or give more files.")
    by_source = {name: float(total[0] / total[1]) for name, total in sums.items() if total[1]}
    return Evaluation(float(loss / count), int(count), by_source, float(right / count) if score is _pairs else None)


def reference_of(trainer: Scoring) -> Reference:
    """The log-probabilities of all pairs, by the present weights."""
    with jax.set_mesh(trainer.mesh):
        return Reference.compute(trainer.stream.sources, trainer.data.held_out(), partial(token_losses, trainer))


def token_losses(trainer: Scoring, source: PackedDocuments, samples: np.ndarray) -> np.ndarray:
    """-log p of each target of these samples, float32 [samples, S], on every process."""
    config = trainer.config
    M, R, S = config.parallel.pipe, config.microbatch_rows, config.train.sequence_length
    # Numbers past the last sample give empty rows.
    padded = np.concatenate([samples, np.full(-len(samples) % (M * R), source.packing.num_samples)])
    found = []
    for numbers in padded.reshape(-1, M, R):
        with progress.phase("evaluate"):
            batch = put_global_batch(trainer.mesh, source.in_order, numbers, S)
            found.append(np.asarray(trainer.token_losses(trainer.state.params, batch)).reshape(M * R, S))
    return np.concatenate(found)[: len(samples), inverse(S, trainer.mesh.shape[CONTEXT])]


def _text(trainer: Scoring, number: int, source: PackedDocuments, samples: np.ndarray) -> np.ndarray:
    config = trainer.config
    rows = samples.reshape(config.parallel.pipe, config.microbatch_rows)
    batch = put_global_batch(trainer.mesh, source.in_order, rows, config.train.sequence_length)
    loss, tokens = trainer.loss_sum(trainer.state.params, batch)
    return np.array([float(loss), int(tokens), 0])


def _pairs(trainer: Scoring, number: int, source: PackedDocuments, samples: np.ndarray) -> np.ndarray:
    assert trainer.reference is not None, "computed or read before the first step"
    samples = samples[samples < source.packing.num_samples]
    now = log_p(source, samples, partial(token_losses, trainer))
    return judge(now, trainer.reference.held_out[number][samples], trainer.config.train.dpo_beta)
