"""Continues prompts with a model. It shows what a model has learnt; it is not a serving engine.

    generator = Generator(model)
    for ids_B in generator.ids(prompts, 20): ...                       one id per prompt, after each step
    complete(generator, tokenizer, prompts, new_tokens=20)             -> texts, cut at their stop token or text

Programs are compiled once per bucket: the length and the number of prompts are padded to powers of two, and so are the cache's
positions. Prompt lengths within a bucket and the sampling parameters do not cause compilation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import SMALLEST_PROMPT, bucket, cache_positions
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.inference.cache import Cache, decode, prefill
from jaxllm.mesh.axes import DATA, TENSOR
from jaxllm.model.llama import Llama

# --------------------------------------------------------------------------------------------------------------- sampling

GREEDY, ALL, CUT = "greedy", "all", "cut"
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature is applied first, then top_k, then top_p to the rest."""

    temperature: float = 0.0
    """Divides the logits. 0 selects the likeliest token (greedy)."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens whose total probability reaches this value (Holtzman et al.,
    2020)."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens. None: from all."""
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} is not valid: use 0 for the likeliest token, or a positive value."
            )
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            raise ConfigError(
                f"temperature={self.temperature} is so small that logits overflow: use 0 for the likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is not a probability: use a number above 0, up to 1.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token to sample: use 1 or more.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed} is not in 0 .. 2^31 - 1: choose one in this range.")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k is not None):
            raise ConfigError("top_p and top_k limit sampling, but temperature=0 does not sample: set temperature.")

    @property
    def kind(self) -> str:
        """The static part, for which a program is compiled. The numbers are its inputs."""
        if self.temperature == 0:
            return GREEDY
        return ALL if self.top_p == 1 and self.top_k is None else CUT

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "temperature": np.float32(self.temperature),
            "top_p": np.float32(self.top_p),
            "top_k": np.int32(np.iinfo(np.int32).max if self.top_k is None else self.top_k),
            "seed": np.int32(self.seed),
        }


def next_ids(logits_BV: Float[Array, "B V"], kind: str, numbers: dict[str, Any], step: Int[Array, ""]) -> Int[Array, " B"]:
    """Chooses one id per row. A sample depends on the seed, the step and the row's number.

    Args:
      kind, numbers: of a Sampling.
      step: number of ids chosen before.
    """
    if kind == GREEDY:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(numbers["seed"]), step)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits_BV.shape[0]))
    scaled_BV = logits_BV / numbers["temperature"]
    if kind == ALL:
        return jax.vmap(jax.random.categorical)(keys_B, scaled_BV).astype(jnp.int32)
    ids_BV = jnp.argsort(scaled_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, ids_BV, axis=-1)
    sorted_BV = jnp.where(jnp.arange(sorted_BV.shape[1])[None] < numbers["top_k"], sorted_BV, -jnp.inf)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    sorted_BV = jnp.where(before_BV < numbers["top_p"], sorted_BV, -jnp.inf)
    ranks_B = jax.vmap(jax.random.categorical)(keys_B, sorted_BV)
    return jnp.take_along_axis(ids_BV, ranks_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


# -------------------------------------------------------------------------------------------------------------- generation


class Generator:
    """A model with its compiled generation programs. Parameters may have any sharding: the compiler partitions the work
    accordingly, rows over `data` and heads over `tensor`.

    Args:
      model: its parameters are copied in the compute dtype, unless they have it already.
      window: a token attends to this many positions at most, its own included. None: as the model's windows say.
    """

    def __init__(self, model: Llama, *, window: int | None = None):
        self._windows = [min(w for w in (window, of_kind, math.inf) if w is not None) for of_kind in model.config.kinds]
        graph, params = nnx.split(model)
        dtype, mesh = model.config.compute_dtype, mesh_of(params)
        # Cast once, not in each step. Norms are cast too, as in training.
        self._params = jax.tree.map(lambda p: p if p.dtype == dtype else p.astype(dtype), params)
        self._graph = graph
        self._ranks = mesh.shape[DATA] if mesh is not None else 1

        def laid_out(*spec) -> Any:
            return None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))

        split_heads = mesh is not None and model.config.num_kv_heads % mesh.shape[TENSOR] == 0
        cached = laid_out(None, DATA, None, TENSOR if split_heads else None)
        # Set explicitly, so that the output of one program has the sharding that the next was compiled for.
        shardings = (laid_out(), (Cache(cached, cached),) * len(self._windows))

        def start(params, ids_BS, lengths_B, numbers, images=None, *, rooms, kind):
            logits_BV, caches = prefill(nnx.merge(graph, params), ids_BS, lengths_B, rooms, images)
            return next_ids(logits_BV, kind, numbers, jnp.int32(0)), caches

        def step(params, caches, ids_B, lengths_B, done, numbers, *, kind):
            positions_B = lengths_B + done - 1
            logits_BV, caches = decode(nnx.merge(graph, params), ids_B, positions_B, caches)
            return next_ids(logits_BV, kind, numbers, done), caches

        self._start = jax.jit(start, static_argnames=("rooms", "kind"), out_shardings=shardings)
        self._step = jax.jit(step, static_argnames="kind", donate_argnames="caches", out_shardings=shardings)

    @property
    def model(self) -> Llama:
        """The model with the generator's parameters, in the compute dtype."""
        return nnx.merge(self._graph, self._params)

    def ids(
        self,
        prompts: Sequence[np.ndarray],
        new_tokens: int,
        sampling: Sampling = Sampling(),
        images: np.ndarray | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the next id of each prompt, int32 [prompts], new_tokens times. The caller may stop earlier.

        Args:
          prompts: ids, at least one each, of any lengths. Each prompt is continued independently of the others.
          images: pixels for the image tokens of the prompts, float32 [images, 3, height, width], prompt after prompt.
        """
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) < 1 or new_tokens < 1:
            raise ValueError("Generator.ids needs prompts of at least one id, and at least one new token.")
        B, S = self._ranks * bucket(-(-len(prompts) // self._ranks)), bucket(max(lengths), SMALLEST_PROMPT)
        ids_BS, lengths_B = np.zeros((B, S), np.int32), np.ones(B, np.int32)
        for row, prompt in enumerate(prompts):
            ids_BS[row, : len(prompt)], lengths_B[row] = prompt, len(prompt)
        options = {"kind": sampling.kind, "numbers": sampling.numbers}
        positions = cache_positions(max(lengths), new_tokens)
        kept = tuple(int(min(positions, window)) for window in self._windows)
        ids_B, caches = self._start(self._params, ids_BS, lengths_B, images=images, rooms=kept, **options)
        for done in range(1, new_tokens + 1):
            chosen_B = ids_B
            if done < new_tokens:
                # Dispatched before the last ids are read, so that the device does not wait for the reader.
                ids_B, caches = self._step(self._params, caches, ids_B, lengths_B, np.int32(done), **options)
            yield np.asarray(chosen_B)[: len(prompts)]


def mesh_of(params) -> Mesh | None:
    """The mesh of the parameters; None for one device without a mesh."""
    meshes = (p.sharding.mesh for p in jax.tree.leaves(params) if isinstance(p.sharding, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and TENSOR in mesh.shape), None)


# ---------------------------------------------------------------------------------------------------------- ids as text

CONTEXT_IDS = 8
"""Number of prompt ids decoded together with new ids: some tokenizers drop the space before the first decoded word."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Result of decoding bytes that do not form a complete character (yet)."""


class TextStream:
    """The new ids of one row as text. A character made of several tokens is returned with its last token. A possible start of
    a stop text is held back until it is decided.

    Args:
      prompt: the ids before the new ones.
      stop_texts: the text ends before the first of them.

    Attributes:
      stopped: True after a stop text. No text is returned after that.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stop_texts: Sequence[str] = ()):
        self._tokenizer, self._stop_texts = tokenizer, tuple(stop_texts)
        self.stopped = False
        # `_before`: ids with final text, enough to decode the next ones. `_new`: ids whose text may still change.
        self._before, self._new = [int(i) for i in prompt[-CONTEXT_IDS:]], []
        self._text, self._given = "", 0

    def push(self, token: int) -> str:
        """Adds an id and returns the text that is now final."""
        self._new.append(token)
        return self._final(last=False)

    def rest(self) -> str:
        """Returns the text that was held back, after the last id."""
        return self._final(last=True)

    def _final(self, last: bool) -> str:
        """Decodes the new ids, unless their end may still change: byte tokens decode to half characters, including earlier
        complete characters, until the last token of a character arrives. Returns the text that is decided and was not returned
        before.
        """
        before, text = (self._tokenizer.decode(ids) for ids in (self._before, self._before + self._new))
        if len(text) > len(before) and (last or not text.endswith(HALF_CHARACTER)):
            self._text += text[len(before) :]
            self._before, self._new = self._new, []
        if self.stopped:
            return ""
        text = self._text
        if (end := min((at for stop in self._stop_texts if (at := text.find(stop)) >= 0), default=None)) is not None:
            self.stopped, text = True, text[:end]
        elif not last:
            held = (n for stop in self._stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n]))
            text = text[: len(text) - max(held, default=0)]
        new, self._given = text[self._given :], max(self._given, len(text))
        return new


def printable(text: str) -> str:
    """Replaces control characters by U+FFFD, because a terminal would execute those that a model writes."""
    return "".join(c if c.isprintable() or c in "\n\t" else HALF_CHARACTER for c in text)


class InTurn:
    """Shows texts that grow at the same time one after the other. The first unfinished text is shown live, each later one in
    its turn. Output is printable.

    Args:
      headings: shown before each text.
      write: writes a string at once.
    """

    def __init__(self, headings: Sequence[str], write: Callable[[str], None]):
        self._write = write
        self._waiting, self._ended = list(headings), [False] * len(headings)
        self._row = 0

    def __call__(self, row: int, text: str, ended: bool) -> None:
        """Takes the new part of a text, and whether the text has ended."""
        self._waiting[row] += text
        self._ended[row] = ended
        while self._row < len(self._waiting):
            text, self._waiting[self._row] = self._waiting[self._row], ""
            self._write(printable(text))
            if not self._ended[self._row]:
                break
            self._write("\n")
            self._row += 1


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt."""

    text: str
    """Text without special tokens, cut before the stop text."""
    ids: list[int]
    """All new ids, including the stop token if one ended the text."""
    ended_by: str
    """stop_token, stop_text, or length (new_tokens was reached)."""

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": len(self.ids), "ids": self.ids, "ended_by": self.ended_by}


def complete(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling = Sampling(),
    stop_ids: frozenset[int] = frozenset(),
    stop_texts: Sequence[str] = (),
    on_text: Callable[[int, str, bool], None] = lambda row, text, ended: None,
    images: np.ndarray | None = None,
) -> list[Completion]:
    """Continues each prompt until a stop token, a stop text or new_tokens.

    Args:
      prompts: ids.
      on_text: called with (number of the prompt, new text since the last call, whether the text has ended). It receives
        complete characters only, and nothing that may be the start of a stop text.
      images: as in Generator.ids.
    """
    streams = [TextStream(tokenizer, prompt, stop_texts) for prompt in prompts]
    found: list[Completion | None] = [None] * len(prompts)
    texts, all_ids = [""] * len(prompts), [[] for _ in prompts]
    for done, ids_B in enumerate(generator.ids(prompts, new_tokens, sampling, images), start=1):
        for row, stream in enumerate(streams):
            if found[row] is not None:
                continue
            token = int(ids_B[row])
            text = "" if token in stop_ids else stream.push(token)
            ended_by = "stop_token" if token in stop_ids else "stop_text" if stream.stopped else None
            if ended_by is None and done == new_tokens:
                ended_by = "length"
            if ended_by is not None:
                text += stream.rest()
            texts[row] += text
            all_ids[row].append(token)
            if text or ended_by is not None:
                on_text(row, text, ended_by is not None)
            if ended_by is not None:
                found[row] = Completion(texts[row], all_ids[row], ended_by)
        if None not in found:
            break
    return [completion for completion in found if completion is not None]


def sample(model: Llama, prompt: np.ndarray, new_tokens: int, *, window: int) -> np.ndarray:
    """Continues `prompt` (ids [T], T >= 1) by `new_tokens` sampled ids. Returns only these, int32 [new_tokens].

    Args:
      window: maximum number of positions that a token attends to, as in training. Of a longer prompt only the end is read.
    """
    sampling = Sampling(temperature=0.8)
    return np.concatenate(list(Generator(model, window=window).ids([prompt[-window:]], new_tokens, sampling)))
