"""How well a model predicts a text: loss, perplexity, bits per byte.

The text is cut into windows of S tokens that begin every `stride` tokens. With stride = S windows do not overlap, and the first
token of each, which has nothing before it, is not scored. With a smaller stride the first window scores all but its first
token, and every later one its last `stride` tokens alone: each token counts once, and sees S - stride others or more. Tokens at
the end that fill no window are dropped, as is usual; how many is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.config_errors import ConfigError
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.mesh import DATA, PIPE, REPLICA, replicated
from jaxllm.parallel.batches import put_global_batch
from jaxllm.parallel.types import Parallelized

ROWS_TOKENS = 8192
"""Tokens that an accelerator reads at once, about."""


@dataclass(frozen=True)
class Score:
    loss: float
    """Nats per scored token."""
    tokens: int
    """How many were scored."""
    bytes: int
    """What they are in UTF-8."""
    windows: int
    dropped_tokens: int
    """At the end, in no window."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss of all scored tokens in bits, over their bytes: comparable between tokenizers. Infinite where the scored
        tokens are but the first parts of characters, which count with their last.
        """
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else math.inf

    def to_json(self) -> dict[str, Any]:
        # JSON knows no infinity.
        derived = {name: getattr(self, name) for name in ("perplexity", "bits_per_byte")}
        return {
            "loss": self.loss,
            **{name: value if math.isfinite(value) else None for name, value in derived.items()},
            "tokens": self.tokens,
            "bytes": self.bytes,
            "windows": self.windows,
            "dropped_tokens": self.dropped_tokens,
        }

    def lines(self) -> list[str]:
        plural = "s" if self.windows > 1 else ""
        return [
            f"loss {self.loss:.6f} nats per token, perplexity {self.perplexity:.4f}, {self.bits_per_byte:.6f} bits per byte",
            f"{self.tokens:,} tokens of {self.bytes:,} bytes scored in {self.windows:,} window{plural}; "
            f"{self.dropped_tokens:,} at the end fill no window",
        ]


@dataclass(frozen=True)
class Windows:
    """A text in windows; see above for what each scores.

    Raises:
      ConfigError: the text does not fill one, or the stride is none.
    """

    ids: np.ndarray
    """Of the whole text, [tokens]."""
    starts: np.ndarray
    """Where in the text's UTF-8 each token begins, [tokens + 1]; the last is where the text ends."""
    length: int
    """S, at least 2."""
    stride: int

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(f"--sequence-length={self.length} leaves no token to predict from another: use 2 or more.")
        if not 1 <= self.stride <= self.length:
            raise ConfigError(
                f"--stride={self.stride} is not in 1 .. {self.length}, the sequence length, so tokens would be left out: use "
                f"one that is."
            )
        if len(self.ids) < self.length:
            shorter = f"set --sequence-length={len(self.ids)} or less" if len(self.ids) > 1 else "give a longer one"
            raise ConfigError(f"The text is {len(self.ids)} tokens, no whole window of {self.length}: {shorter}.")

    @property
    def count(self) -> int:
        return 1 + (len(self.ids) - self.length) // self.stride

    @property
    def dropped(self) -> int:
        return len(self.ids) - self.length - (self.count - 1) * self.stride

    def scored(self, window: int) -> tuple[int, int]:
        """[first, last) of the tokens that a window scores, by their place in it."""
        return (1 if window == 0 else max(1, self.length - self.stride)), self.length

    @property
    def scored_bytes(self) -> int:
        firsts = np.arange(self.count) * self.stride
        begin, end = np.array([self.scored(window) for window in range(self.count)]).T
        return int((self.starts[firsts + end] - self.starts[firsts + begin]).sum())

    def rows(self, numbers: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Windows as a batch [len(numbers), width] for the loss. A number from `count` on is a row that scores nothing.

        Args:
          width: at least `length`; what is beyond comes after every token, and so changes none.
        """
        tokens, targets = (np.zeros((len(numbers), width), np.int32) for _ in range(2))
        mask = np.zeros((len(numbers), width), bool)
        for row, number in enumerate(numbers):
            if number < self.count:
                window = self.ids[number * self.stride :][: self.length]
                tokens[row, : self.length], targets[row, : self.length - 1] = window, window[1:]
                begin, end = self.scored(number)
                # Position j predicts token j + 1.
                mask[row, begin - 1 : end - 1] = True
        positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
        return {"tokens": tokens, "targets": targets, "mask": mask, "positions": positions}


def tokenize(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids, starts) as Windows takes them. No mark of a beginning is added. A character that several tokens make counts with
    the last of them, and what a tokenizer passes over with the token before it.
    """
    ((ids, characters),) = tokenizer.encode_with_starts([text], parse_special=False)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # Of UTF-8: one byte, and one more from each of these code points on.
    sizes = np.uint8(1) + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return ids, before[np.maximum.accumulate(np.append(characters, len(text)))]


def read_text(path: str | Path) -> str:
    """A file as it is, line ends too.

    Raises:
      ConfigError: it is not there, or not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (at byte {error.start:,}): convert it, or give another file.") from None
    except OSError as error:
        raise ConfigError(f"The text {path} cannot be read ({error.strerror}): give a file of UTF-8 text.") from None


def evaluate(
    functions: Parallelized,
    params: Any,
    mesh: Mesh,
    windows: Windows,
    *,
    width: int | None = None,
    rows: int | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Score:
    """Scores all windows with the forward pass of training, sharded as that is.

    Args:
      functions, params: of a model on this mesh.
      width: positions of a row: the windows' length, filled up to what divides over the mesh.
      rows: windows that one data rank reads at once; default: 1 on CPU, else about 8192 tokens, and no more than there are.
      progress: called with (what, windows done, of how many).

    Raises:
      ConfigError: the loss is not a number.
    """
    width = windows.length if width is None else width
    # A pipeline takes as many microbatches as it has stages, or it would stand still most of the time.
    M, ranks = mesh.shape[PIPE], mesh.shape.get(REPLICA, 1) * mesh.shape[DATA]
    if rows is None:
        most = 1 if mesh.devices.flat[0].platform == "cpu" else max(1, ROWS_TOKENS // width)
        rows = min(most, -(-windows.count // (M * ranks)))
    batch_rows = rows * ranks
    loss_sum = jax.jit(functions.loss_sum, out_shardings=replicated(mesh))

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        return windows.rows(numbers, width)

    # Float64, as the sum over a large text would lose the last digits otherwise.
    total, tokens = 0.0, 0
    progress("windows", 0, windows.count)
    with jax.set_mesh(mesh):
        for first in range(0, windows.count, M * batch_rows):
            numbers = (first + np.arange(M * batch_rows)).reshape(M, batch_rows)
            part, count = loss_sum(params, put_global_batch(mesh, read, numbers, width))
            total, tokens = total + float(part), tokens + int(count)
            progress("windows", min(first + M * batch_rows, windows.count), windows.count)
    if not math.isfinite(total):
        raise ConfigError("The loss is not a number: the model's weights are damaged, or overflow in this compute dtype.")
    return Score(total / tokens, tokens, windows.scored_bytes, windows.count, windows.dropped)
