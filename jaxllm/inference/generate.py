"""Continues prompts with a model. It shows what a model has learnt; it is not a serving engine.

    generator = Generator(model)
    for ids_B in generator.ids(prompts, 20): ...                       one id per prompt, after each step
    complete(generator, tokenizer, prompts, new_tokens=20)             -> texts, cut at their stop token or text

Programs are compiled once per bucket: the length and the number of prompts are padded to powers of two, and so are the cache's
positions. Prompt lengths within a bucket and the sampling parameters do not cause compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.cost_model.inference_memory import SMALLEST_PROMPT, bucket, cache_positions
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.inference.cache import Cache, decode, prefill
from jaxllm.inference.sampling import Sampling, next_ids
from jaxllm.inference.text_stream import TextStream
from jaxllm.mesh.axes import DATA, TENSOR
from jaxllm.model.llama import Llama


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

        def start(params, ids_BS, lengths_B, numbers, *, rooms, kind):
            logits_BV, caches = prefill(nnx.merge(graph, params), ids_BS, lengths_B, rooms)
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

    def ids(self, prompts: Sequence[np.ndarray], new_tokens: int, sampling: Sampling = Sampling()) -> Iterator[np.ndarray]:
        """Yields the next id of each prompt, int32 [prompts], new_tokens times. The caller may stop earlier.

        Args:
          prompts: ids, at least one each, of any lengths. Each prompt is continued independently of the others.
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
        ids_B, caches = self._start(self._params, ids_BS, lengths_B, rooms=kept, **options)
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
) -> list[Completion]:
    """Continues each prompt until a stop token, a stop text or new_tokens.

    Args:
      prompts: ids.
      on_text: called with (number of the prompt, new text since the last call, whether the text has ended). It receives
        complete characters only, and nothing that may be the start of a stop text.
    """
    streams = [TextStream(tokenizer, prompt, stop_texts) for prompt in prompts]
    found: list[Completion | None] = [None] * len(prompts)
    texts, all_ids = [""] * len(prompts), [[] for _ in prompts]
    for done, ids_B in enumerate(generator.ids(prompts, new_tokens, sampling), start=1):
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


def sample(
    model: Llama, prompt: np.ndarray, new_tokens: int, *, window: int, temperature: float = 0.8, seed: int = 0
) -> np.ndarray:
    """Continues `prompt` (ids [T], T >= 1) by `new_tokens` sampled ids. Returns only these, int32 [new_tokens].

    Args:
      window: maximum number of positions that a token attends to, as in training. Of a longer prompt only the end is read.
    """
    sampling = Sampling(temperature=temperature, seed=seed)
    return np.concatenate(list(Generator(model, window=window).ids([prompt[-window:]], new_tokens, sampling)))
