"""Direct Preference Optimization (Rafailov et al., 2023): the loss, and the reference's log-probabilities.

For a pair with the chosen answer c and the rejected r of one prompt,

    loss = -log sigmoid(beta ((log p(c) - log p_ref(c)) - (log p(r) - log p_ref(r))))

where log p is the sum over an answer's tokens, and p_ref the model that training begins with. Its sums are computed once,
before the first step, and stored with the run. In a batch `reference` holds each text's sum at its first position, and 0
elsewhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.data.loader import PackedDocuments, SampleStream
from jaxllm.data.npy import read_npy
from jaxllm.mesh import CONTEXT
from jaxllm.model.token_losses import differentiable_token_losses
from jaxllm.parallel.types import Loss, Rows
from jaxllm.untrusted import RefusedInput, reason_of

FILE = "reference.npy"
Score = Callable[[PackedDocuments, np.ndarray], np.ndarray]
"""(source, numbers of its samples) -> -log p of each target, float32 [samples, S]"""


def dpo_loss(config: Config) -> Loss:
    """The loss of a microbatch of pairs (data/loader.py), and the number of its pairs."""
    beta, model, train = config.train.dpo_beta, config.model, config.train

    def loss(h_BSD: jax.Array, head_VD: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        options = (model.vocab_size, train.loss_chunk_tokens)
        losses_BS: jax.Array = differentiable_token_losses(h_BSD, head_VD, rows["targets"], *options)
        ratio_BS = jnp.where(rows["mask"], -losses_BS, 0.0) - rows["reference"]
        # Each text has a position at least, so there are no more than positions. The texts of a context rank's sequences may
        # be partly on others. Each rank then has all pairs, and each counts them: so sum, count and gradients grow alike.
        texts = train.sequence_length + 2 - train.sequence_length % 2
        add = jax.vmap(lambda x, segments: jnp.zeros(texts, x.dtype).at[segments - 1].add(x, mode="drop"))
        here_BS, is_text_BS = (
            jax.lax.psum(add(x, jnp.where(rows["segments"] > 0, rows["segments"], texts + 1)), CONTEXT)
            for x in (ratio_BS, rows["mask"].astype(jnp.float32))
        )
        margins_BP, is_pair_BP = beta * (here_BS[:, ::2] - here_BS[:, 1::2]), is_text_BS[:, ::2] > 0
        return jnp.where(is_pair_BP, jax.nn.softplus(-margins_BP), 0.0).sum(), is_pair_BP.sum().astype(jnp.float32)

    return loss


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
