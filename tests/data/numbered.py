"""Documents in which each token id gives its position."""

import numpy as np

from jaxllm.data.documents import Documents


class NumberedDocuments(Documents):
    """Document d of the given lengths. Token ids count through all documents."""

    tokenizer, description, fingerprint = None, "numbers", "0"

    def __init__(self, lengths, first=0):
        self.lengths = np.asarray(lengths, np.int64)
        self.keys = np.arange(len(self.lengths), dtype=np.uint64)
        self.starts = first + np.cumsum(self.lengths) - self.lengths
        self.total = first + int(self.lengths.sum())

    def read(self, documents, starts, stops):
        assert (starts < stops).all()
        assert (stops <= self.lengths[documents]).all()
        first = self.starts[documents]
        return [np.arange(a, b) for a, b in zip(first + starts, first + stops, strict=True)]

    def ends(self):
        """Ids of the last tokens of all documents."""
        return (self.starts + self.lengths - 1)[self.lengths > 0]
