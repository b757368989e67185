"""Evaluates a model on a text: loss, perplexity, bits per byte.

The text is cut into windows of S tokens that begin every `stride` tokens. With stride = S windows do not overlap, and the first
token of each window is not scored, because it has no context. With a smaller stride the first window scores all but its first
token, and each later window only its last `stride` tokens: each token counts once, and has at least S - stride tokens of
context. Tokens at the end that do not fill a window are dropped, as is usual; the result reports how many.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import evaluation_rows
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.mesh.axes import DATA, PIPE, REPLICA, replicated
from jaxllm.parallel.device_batches import put_global_batch
from jaxllm.parallel.types import Batch, Parallelized, Params


@dataclass(frozen=True)
class PositionBucket:
    """Scored tokens with `first` to `last` tokens of their window before them."""

    first: int
    last: int
    tokens: int
    """Number of scored tokens."""
    nats: float
    """Sum of their losses."""

    @property
    def loss(self) -> float | None:
        """Nats per scored token; None without any."""
        return self.nats / self.tokens if self.tokens else None


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
    by_position: tuple[PositionBucket, ...] = ()
    """The same tokens by powers of two of the tokens before them: 1, 2 to 3, 4 to 7, and so on. The sum of `nats` over the sum
    of `tokens` is the loss. () if it was not asked for."""

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
        found = {"loss": self.loss, **finite, **asdict(self)}
        del found["by_position"]
        buckets = [{"loss": bucket.loss, **asdict(bucket)} for bucket in self.by_position]
        return found | ({"by_position": buckets} if buckets else {})

    def lines(self) -> list[str]:
        plural = "s" if self.windows > 1 else ""
        lines = [
            f"loss {self.loss:.6f} nats per token, perplexity {self.perplexity:.4f}, {self.bits_per_byte:.6f} bits per byte",
            f"{self.tokens:,} tokens of {self.bytes:,} bytes scored in {self.windows:,} window{plural}; "
            f"{self.dropped_tokens:,} at the end fill no window",
        ]
        if self.by_position:
            lines += ["", f"{'tokens before it':>17}{'tokens':>12}{'loss':>10}"]
        for bucket in self.by_position:
            before = f"{bucket.first:,} to {bucket.last:,}" if bucket.last > bucket.first else f"{bucket.first:,}"
            lines.append(f"{before:>17}{bucket.tokens:>12,}{'-' if bucket.loss is None else f'{bucket.loss:.4f}':>10}")
        return lines


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
    by_position: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Score:
    """Scores all windows with the forward pass of training and its sharding.

    Args:
      functions, params: of a model on this mesh.
      width: positions per row: the window length, padded to a multiple that the mesh can divide.
      rows: windows per data rank in one call; default: 1 on CPU, else about 8192 tokens, at most all windows.
      by_position: also fill Score.by_position. It costs next to nothing: the model runs once for all buckets.
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
    # The first token with this many tokens before it, of each bucket; a bucket ends before the next one.
    firsts = 2 ** np.arange((windows.length - 1).bit_length()) if by_position else np.array([1])
    program = partial(_sums_by_position, functions, firsts) if by_position else functions.loss_sum
    loss_sum = jax.jit(program, out_shardings=replicated(mesh))
    read = partial(windows.rows, width=width)
    # Float64, because a float32 sum over a large text would lose its last digits.
    nats, tokens = np.zeros(len(firsts)), np.zeros(len(firsts), np.int64)
    progress("windows", 0, windows.count)
    with jax.set_mesh(mesh):
        for first in range(0, windows.count, M * batch_rows):
            numbers = (first + np.arange(M * batch_rows)).reshape(M, batch_rows)
            parts, counts = jax.device_get(loss_sum(params, put_global_batch(mesh, read, numbers, width)))
            nats, tokens = nats + parts, tokens + counts
            progress("windows", min(first + M * batch_rows, windows.count), windows.count)
    if not np.isfinite(nats).all():
        raise ConfigError("The loss is not a number: the model's weights are damaged, or overflow in this compute dtype.")
    lasts = [*(firsts[1:] - 1), windows.length - 1]
    buckets = map(PositionBucket, firsts.tolist(), map(int, lasts), tokens.tolist(), nats.tolist())
    total, count = math.fsum(nats), int(tokens.sum())
    found = tuple(buckets) if by_position else ()
    return Score(total / count, count, windows.scored_bytes, windows.count, windows.dropped, found)


def _sums_by_position(functions: Parallelized, firsts: np.ndarray, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """loss_sum of each bucket, [buckets]. Of a vmap over masks only the last product, loss times mask, has another dim: all
    else does not depend on the mask, and is computed once."""
    # Position j predicts token j + 1, which has j + 1 tokens before it.
    before = batch["positions"] + 1

    def of_bucket(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        return functions.loss_sum(params, batch | {"mask": batch["mask"] & (before >= first) & (before < 2 * first)})

    return jax.vmap(of_bucket)(jnp.asarray(firsts, jnp.int32))
