"""Evaluates a model on a text: loss, perplexity, bits per byte.

The text is cut into windows of S tokens that begin every `stride` tokens. With stride = S windows do not overlap, and the first
token of each window is not scored, because it has no context. With a smaller stride the first window scores all but its first
token, and each later window only its last `stride` tokens: each token counts once, and has at least S - stride tokens of
context. Tokens at the end that do not fill a window are dropped, as is usual; the result reports how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import evaluation_rows
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.mesh import DATA, PIPE, REPLICA, replicated
from jaxllm.parallel.device_batches import put_global_batch
from jaxllm.parallel.types import Parallelized


@dataclass(frozen=True)
class Score:
    loss: float
    """Nats per scored token."""
    tokens: int
    """Number of scored tokens."""
    bytes: int
    """UTF-8 bytes of the scored tokens."""
    windows: int
    dropped_tokens: int
    """Tokens at the end that are not in a window."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Loss of all scored tokens in bits, divided by their bytes. It is comparable between tokenizers. It is infinite if the
        scored tokens are only first parts of characters, because a character counts with its last token.
        """
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else math.inf

    def to_json(self) -> dict[str, Any]:
        # JSON has no infinity.
        derived = {name: getattr(self, name) for name in ("perplexity", "bits_per_byte")}
        finite = {name: value if math.isfinite(value) else None for name, value in derived.items()}
        return {"loss": self.loss, **finite, **asdict(self)}

    def lines(self) -> list[str]:
        plural = "s" if self.windows > 1 else ""
        return [
            f"loss {self.loss:.6f} nats per token, perplexity {self.perplexity:.4f}, {self.bits_per_byte:.6f} bits per byte",
            f"{self.tokens:,} tokens of {self.bytes:,} bytes scored in {self.windows:,} window{plural}; "
            f"{self.dropped_tokens:,} at the end fill no window",
        ]


@dataclass(frozen=True)
class Windows:
    """A text cut into windows; the module docstring says what each scores.

    Raises:
      ConfigError: the text is shorter than a window, or the stride is invalid.
    """

    ids: np.ndarray
    """Ids of the complete text, [tokens]."""
    starts: np.ndarray
    """Start of each token in the text's UTF-8, [tokens + 1]. The last entry is the end of the text."""
    length: int
    """S, at least 2."""
    stride: int

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(f"--sequence-length={self.length} leaves no token to predict: use 2 or more.")
        if not 1 <= self.stride <= self.length:
            raise ConfigError(
                f"--stride={self.stride} is not in 1 .. {self.length}, the sequence length, so tokens would be skipped: choose "
                f"one in this range."
            )
        if len(self.ids) < self.length:
            shorter = f"set --sequence-length={len(self.ids)} or less" if len(self.ids) > 1 else "give a longer text"
            raise ConfigError(f"The text has {len(self.ids)} tokens, less than one window of {self.length}: {shorter}.")

    @property
    def count(self) -> int:
        return 1 + (len(self.ids) - self.length) // self.stride

    @property
    def dropped(self) -> int:
        return len(self.ids) - self.length - (self.count - 1) * self.stride

    def scored(self, window: int) -> tuple[int, int]:
        """[first, last) of the tokens that a window scores, as positions in the window."""
        return (1 if window == 0 else max(1, self.length - self.stride)), self.length

    @property
    def scored_bytes(self) -> int:
        firsts = np.arange(self.count) * self.stride
        begin, end = np.array([self.scored(window) for window in range(self.count)]).T
        return int((self.starts[firsts + end] - self.starts[firsts + begin]).sum())

    def rows(self, numbers: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Windows as a batch [len(numbers), width] for the loss. A number from `count` on gives a row that scores nothing.

        Args:
          width: at least `length`. The padding comes after all tokens and does not affect them.
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
    """(ids, starts) for Windows, without a BOS token. A character made of several tokens counts with the last of them. Text
    that the tokenizer skips counts with the token before it.
    """
    ((ids, characters),) = tokenizer.encode_with_starts([text], parse_special=False)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # UTF-8 length: one byte, plus one from each of these code points on.
    sizes = np.uint8(1) + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return ids, before[np.maximum.accumulate(np.append(characters, len(text)))]


def read_text(path: str | Path) -> str:
    """Reads a file unchanged, including line ends.

    Raises:
      ConfigError: the file does not exist or is not UTF-8.
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
    """Scores all windows with the forward pass of training and its sharding.

    Args:
      functions, params: of a model on this mesh.
      width: positions per row: the window length, padded to a multiple that the mesh can divide.
      rows: windows per data rank in one call; default: 1 on CPU, else about 8192 tokens, at most all windows.
      progress: called with (description, windows done, total).

    Raises:
      ConfigError: the loss is not a number.
    """
    width = windows.length if width is None else width
    # A pipeline gets as many microbatches as it has stages; with fewer, most stages would be idle.
    M, ranks = mesh.shape[PIPE], mesh.shape.get(REPLICA, 1) * mesh.shape[DATA]
    if rows is None:
        most = 1 if mesh.devices.flat[0].platform == "cpu" else evaluation_rows(width)
        rows = min(most, -(-windows.count // (M * ranks)))
    batch_rows = rows * ranks
    loss_sum = jax.jit(functions.loss_sum, out_shardings=replicated(mesh))

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        return windows.rows(numbers, width)

    # Float64, because a float32 sum over a large text would lose its last digits.
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
