"""The reference of Direct Preference Optimization: its log-probabilities, and the files they are kept in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.cluster import distributed
from jaxllm.config import ConfigError
from jaxllm.data.loader import PackedDocuments, SampleStream
from jaxllm.data.manifest import read_npy
from jaxllm.run.hooks import Run
from jaxllm.untrusted import RefusedInput, reason_of

FILE = "reference.npy"


Score = Callable[[PackedDocuments, np.ndarray], np.ndarray]
"""(source, numbers of its samples) -> -log p of each target, float32 [samples, S]"""


def log_p(source: PackedDocuments, samples: np.ndarray, score: Score) -> np.ndarray:
    """log p of the answer in each text of these samples, float32 [samples, texts of a sample]; NaN where there is no text."""
    rows, losses = source.in_order(samples.tolist()), score(source, samples)
    segments, mask = rows["segments"], rows["mask"]
    # The first column is free space.
    sums, counts = np.zeros((2, len(samples), 1 + most_texts(source)))
    at = (np.arange(len(samples))[:, None], segments)
    np.add.at(sums, at, np.where(mask, -losses, 0.0))
    np.add.at(counts, at, mask)
    return np.where(counts > 0, sums, np.nan)[:, 1:].astype(np.float32)


def most_texts(source: PackedDocuments) -> int:
    """Texts of a sample at most."""
    return 2 * source.packing.most_pieces


@dataclass(frozen=True)
class Reference:
    """log p_ref of each text.

    Args:
      train, held_out: what `log_p` returns for all samples of each source.
    """

    train: list[np.ndarray]
    held_out: list[np.ndarray]

    @classmethod
    def compute(cls, train: Sequence[PackedDocuments], held_out: Sequence[PackedDocuments], score: Score) -> Reference:
        every = [[log_p(each, np.arange(each.packing.num_samples), score) for each in part] for part in (train, held_out)]
        return cls(*every)

    def save(self, run_dir: Path) -> None:
        """Writes FILE atomically."""
        aside = run_dir / f".{FILE}"
        with aside.open("wb") as file:
            np.save(file, np.concatenate([sums.reshape(-1) for sums in (*self.train, *self.held_out)]))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(run_dir / FILE)

    @classmethod
    def load(cls, run_dir: Path, train: Sequence[PackedDocuments], held_out: Sequence[PackedDocuments]) -> Reference:
        """The reference of a run with this text.

        Raises:
          ConfigError: FILE is missing, or not that of this run.
        """
        path, shapes = run_dir / FILE, [(each.packing.num_samples, most_texts(each)) for each in (*train, *held_out)]
        try:
            flat = read_npy(path, np.float32)
            if len(flat) != sum(map(math.prod, shapes)):
                raise RefusedInput("it is that of another text")
        except (OSError, RefusedInput) as error:
            raise ConfigError(
                f"{path}, which holds the reference's log-probabilities, cannot be used ({reason_of(error)}): restore it, or "
                f"begin again in another run.dir."
            ) from None
        parts = np.split(flat, np.cumsum(list(map(math.prod, shapes)))[:-1])
        every = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return cls(every[: len(train)], every[len(train) :])

    def samples(self, stream: SampleStream, ks: np.ndarray) -> dict[str, np.ndarray]:
        """Samples ks of the training stream, with `reference`."""
        batch, places = stream.samples(ks), [stream.locate(int(k)) for k in np.asarray(ks)]
        rows = zip(
            [self.train[source][sample] for source, sample, _ in places], batch["segments"], batch["positions"], strict=True
        )
        batch["reference"] = np.stack([_at_starts(*row) for row in rows])
        return batch


def _at_starts(sums: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    begins = (positions == 0) & (segments > 0)
    return np.where(begins, sums[np.maximum(segments - 1, 0)], np.float32(0.0))


def judge(log_p: np.ndarray, reference: np.ndarray, beta: float) -> np.ndarray:
    """(sum of losses, pairs, pairs whose chosen answer has gained more than the rejected), float64 [3].

    Args:
      log_p, reference: of the texts of the same samples, [samples, texts]; NaN where there is none.
    """
    ratios = log_p.astype(np.float64) - reference
    margins = beta * (ratios[:, ::2] - ratios[:, 1::2])
    margins = margins[~np.isnan(margins)]
    return np.array([np.logaddexp(0.0, -margins).sum(), len(margins), (margins > 0).sum()])


def register(run: Run) -> None:
    """Stores what the reference says of the text before the first step, and reads it when the run resumes."""
    trainer = run.trainer
    if trainer.config.train.loss != "dpo":
        return
    if trainer.reference is None:
        trainer.reference = Reference.load(run.folder, trainer.stream.sources, trainer.data.held_out())
    elif distributed.is_main_process():
        run.require()
        trainer.reference.save(run.folder)
