"""`jaxllm data fill`: how much of a step's positions a text uses.

Padded, each document begins a sequence, takes as many as it needs, and the rest of its last one is empty; packed, as the run
reads them (packing.py). Both have the same targets, because documents do not see each other.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxllm.config import Config, ConfigError
from jaxllm.data.sources import Source, load_data


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
