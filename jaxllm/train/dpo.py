"""Direct Preference Optimization (Rafailov et al., 2023): the loss, and the reference's log-probabilities.

For a pair with the chosen answer c and the rejected r of one prompt,

    loss = -log sigmoid(beta ((log p(c) - log p_ref(c)) - (log p(r) - log p_ref(r))))

where log p is the sum over an answer's tokens, and p_ref the model that training begins with. Its sums are computed once,
before the first step, and stored with the run. In a batch `reference` holds each text's sum at its first position, and 0
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.data.loader import PackedDocuments, SampleStream
from jaxllm.mesh import CONTEXT
from jaxllm.model.token_losses import differentiable_token_losses
from jaxllm.parallel.types import Loss, Rows

FILE = "reference.npz"
Arrays = Mapping[str, np.ndarray]
Score = Callable[[PackedDocuments, np.ndarray], np.ndarray]
"""(source, numbers of its samples) -> -log p of each target, float32 [samples, S]"""


def dpo_loss(config: Config) -> Loss:
    """The loss of a microbatch of pairs (data/loader.py), and the number of its pairs."""
    beta, model, train = config.train.dpo_beta, config.model, config.train

    def loss(h_BSD: jax.Array, head_VD: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        options = (model.vocab_size, train.loss_chunk_tokens)
        log_p_BS = -differentiable_token_losses(h_BSD, head_VD, rows["targets"], *options)
        ratio_BS = jnp.where(rows["mask"], log_p_BS, 0.0) - rows["reference"]
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
    sums, counts = np.zeros((2, len(samples), int(segments.max(initial=0)) + 1))
    at = (np.arange(len(samples))[:, None], segments)
    np.add.at(sums, at, np.where(mask, -losses, 0.0))
    np.add.at(counts, at, mask)
    return np.where(counts > 0, sums, np.nan)[:, 1:].astype(np.float32)


@dataclass(frozen=True)
class Reference:
    """log p_ref of each text.

    Args:
      sums: of each source of training and of held-out text what `log_p` returns for all samples.
    """

    sums: Mapping[str, np.ndarray]

    @classmethod
    def compute(cls, train: Sequence[PackedDocuments], held_out: Sequence[PackedDocuments], score: Score) -> Reference:
        sources = {_key("train", n): source for n, source in enumerate(train)}
        sources |= {_key("held_out", n): source for n, source in enumerate(held_out)}
        return cls({key: log_p(source, np.arange(source.packing.num_samples), score) for key, source in sources.items()})

    def save(self, run_dir: Path) -> None:
        """Writes FILE atomically."""
        aside = run_dir / f".{FILE}"
        with aside.open("wb") as file:
            np.savez(file, **self.sums)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(run_dir / FILE)

    @classmethod
    def load(cls, run_dir: Path, like: Sequence[PackedDocuments]) -> Reference:
        """The reference of a run.

        Args:
          like: its sources of training text.

        Raises:
          ConfigError: FILE is missing, or not that of this run.
        """
        try:
            with np.load(run_dir / FILE, allow_pickle=False) as found:
                sums = {name: found[name] for name in found.files}
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ConfigError(
                f"{run_dir / FILE}, the reference's log-probabilities, cannot be read ({error}): restore it, or begin again in "
                f"another run.dir."
            ) from None
        for number, source in enumerate(like):
            held = sums.get(_key("train", number))
            if held is None or held.shape[:1] != (source.packing.num_samples,):
                raise ConfigError(f"{run_dir / FILE} is that of another run: restore this run's, or use another run.dir.")
        return cls(sums)

    def held_out(self, number: int) -> np.ndarray:
        """Those of a source of held-out pairs, float32 [samples, texts]."""
        return self.sums[_key("held_out", number)]

    def samples(self, stream: SampleStream, ks: np.ndarray) -> dict[str, np.ndarray]:
        """Samples ks of the training stream, with `reference`."""
        batch, places = stream.samples(ks), [stream.locate(int(k)) for k in np.asarray(ks)]
        sums = [self.sums[_key("train", source)][sample] for source, sample, _ in places]
        batch["reference"] = np.stack(
            [_at_starts(*row) for row in zip(sums, batch["segments"], batch["positions"], strict=True)]
        )
        return batch


def _key(kind: str, number: int) -> str:
    return f"{kind}_{number}"


def _at_starts(sums: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    begins = (positions == 0) & (segments > 0)
    return np.where(begins, sums[np.maximum(segments - 1, 0)], np.float32(0.0))


def judge(log_p: np.ndarray, reference: np.ndarray, beta: float) -> np.ndarray:
    """(sum of losses, pairs, pairs whose chosen answer has gained more than the rejected), float64 [3].

    Args:
      log_p, reference: of the texts of the same samples, [samples, texts]; NaN where there is none.
    """
    ratios = log_p.astype(np.float64) - reference[:, : log_p.shape[1]]
    margins = beta * (ratios[:, ::2] - ratios[:, 1::2])
    margins = margins[~np.isnan(margins)]
    return np.array([np.logaddexp(0.0, -margins).sum(), len(margins), (margins > 0).sum()])
