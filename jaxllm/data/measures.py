"""What can be said of a text without a model: how much of a step's positions it uses, and the loss that byte counts achieve."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.data.sources import Source, load_data

# ------------------------------------------------------------------------------------------------------------------------- fill
# `jaxllm data fill`: padded, each document begins a sequence, takes as many as it needs, and the rest of its last one is empty;
# packed, as the run reads them (packing.py). Both have the same targets, because documents do not see each other.


@dataclass(frozen=True)
class Fill:
    """An epoch of one source in sequences of S positions."""

    source: str
    way: str
    """`padded`, or data.packing."""
    sequences: int
    tokens: int
    targets: int
    """Tokens that are predicted. The first of a document is not, nor are those that the source does not score."""
    positions: int
    """sequences x S."""
    targets_a_step: float
    """Mean over steps with the config's first batch."""
    token_share: float
    target_share: float
    """Shares of the positions that hold a token, and that have a loss."""


@dataclass(frozen=True)
class FillReport:
    description: str
    sequence_length: int
    batch_sequences: int
    rows: list[Fill]
    """Two for each source: `padded`, then the run's packing."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Text lines for the terminal."""
        left = max(len(f"{row.source}, {row.way}") for row in self.rows)
        pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
        return [
            self.description,
            f"{self.batch_sequences:,} sequences of {self.sequence_length:,} positions in a step",
            *(
                f"{f'{row.source}, {row.way}':<{left}}  {row.sequences:>11,} sequences; {row.token_share:6.1%} of positions "
                f"hold a token, {row.target_share:6.1%} have a loss: {row.targets_a_step:,.0f} tokens a step"
                for row in self.rows
            ),
            *(
                f"{padded.source}: padded, the same tokens take {padded.sequences / packed.sequences:.2f} times the steps"
                for padded, packed in pairs
            ),
        ]


def fill(config: Config) -> FillReport:
    """Counts the training documents of a config, padded and packed.

    Raises:
      ConfigError: the data cannot be read, or there are no documents to keep apart.
    """
    if not config.data.mask_documents:
        raise ConfigError("data.mask_documents=false makes one text of all documents, and pads nothing: set it to true.")
    data = load_data(config)
    if not data.sources:
        raise ConfigError(f"data.source={config.data.source} has no text here: name one.")
    S, B, packed = config.train.sequence_length, config.train.global_batch_sequences, data.stream().sources
    rows: list[Fill] = []
    for source, here in zip(data.sources, packed, strict=True):
        which = data.whole(source, source.train)
        lengths = np.asarray(source.documents.lengths[which], np.int64)
        targets = _targets(source, which, lengths)
        for way, sequences in (("padded", int((-(-lengths // S)).sum())), (config.data.packing, here.packing.num_samples)):
            tokens, positions = int(lengths.sum()), sequences * S
            shares = targets / sequences * B, tokens / positions, targets / positions
            rows.append(Fill(source.name, way, sequences, tokens, targets, positions, *shares))
    return FillReport(data.description, S, B, rows)


def _targets(source: Source, which: np.ndarray, lengths: np.ndarray) -> int:
    scored = source.documents.scored(which, np.zeros_like(lengths), lengths)
    if scored is None:
        return int(np.maximum(lengths - 1, 0).sum())
    borders = source.documents.chosen_tokens
    # A pair is two texts, and each has a first token.
    firsts = [] if borders is None else [int(one[border]) for one, border in zip(scored, borders[which], strict=True)]
    return int(sum(int(one[1:].sum()) for one in scored) - sum(firsts))


# --------------------------------------------------------------------------------------------------------------------- baseline
# A useful byte-level model must do better.


def ngram_baseline(train: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Held-out cross entropy of an n-gram model of bytes, in nats per byte.

    Interpolated Witten-Bell smoothing (Witten and Bell, 1991; Chen and Goodman, 1998, section 2.5):

        p(b | h) = (count(h b) + distinct(h) p(b | h')) / (count(h) + distinct(h))

    with distinct(h) the number of different bytes seen after h, and h' the context shortened by one byte. The single-byte
    model backs off to 1/256. This is a proper distribution without parameters, so no held-out text is needed to tune it.

    Args:
      train: uint8 [bytes], the text that is counted.
      held_out: uint8 [bytes], at least one byte. All bytes are scored; the first order - 1 of them have a shorter context.
      order: length of an n-gram in bytes, such as 3 (trigram). Counts are dense arrays of 256**order 8-byte integers: 128 MiB
        for trigrams, 32 GiB for order 4.

    Raises:
      ValueError: `held_out` is empty.
    """
    if not len(held_out):
        raise ValueError("There is no held-out text to score: raise data.held_out_fraction.")
    probability = np.full(len(held_out), 1 / 256)
    for n in range(1, order + 1):
        counts = np.bincount(_ngrams(train, n), minlength=256**n).reshape(-1, 256)
        total, distinct = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
        ngram = _ngrams(held_out, n)
        context = ngram // 256
        lower = probability[n - 1 :]
        # For a context that was never seen, keep the probability of the shorter context.
        np.divide(
            counts.reshape(-1)[ngram] + distinct[context] * lower,
            total[context] + distinct[context],
            out=lower,
            where=total[context] > 0,
        )
    return float(-np.log(probability).mean())


def _ngrams(text: np.ndarray, n: int) -> np.ndarray:
    """Encodes each run of n bytes as one base-256 number: int64 [bytes - n + 1]."""
    length = max(len(text) - n + 1, 0)
    codes = np.zeros(length, np.int64)
    for i in range(n):
        codes = codes * 256 + text[i : i + length]
    return codes
