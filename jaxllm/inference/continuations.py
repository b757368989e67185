"""Scores given continuations of texts: their log-probability, and whether the model itself would continue so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cost_model.inference_memory import SMALLEST_PROMPT, bucket, evaluation_rows, rooms
from jaxllm.inference.cache import attention_of, look_up
from jaxllm.inference.generate import mesh_of
from jaxllm.mesh.axes import DATA
from jaxllm.model.layers import Ops
from jaxllm.model.llama import Llama
from jaxllm.model.loss import VocabularySlice, cut_positions, joined_positions, scores

CHUNK_TOKENS = 4096
"""Tokens of all rows whose logits exist at once."""
MOST_ROWS = 8
"""Rows per data rank of one call on CPU; accelerators take evaluation_rows."""


class Scorer:
    """A model with its scoring programs, one for each power of two of positions. Parameters may have any sharding: the compiler
    partitions the work accordingly, rows over `data`.

    Args:
      model: its parameters are used in their dtype, cast to the compute dtype in each call.
    """

    def __init__(self, model: Llama):
        graph, self._params = nnx.split(model)
        mesh = mesh_of(self._params)
        self._ranks = 1 if mesh is None else mesh.shape[DATA]
        self._on_cpu = jax.default_backend() == "cpu"
        by_rows, whole = (None, None) if mesh is None else (NamedSharding(mesh, PartitionSpec(d)) for d in (DATA, None))

        def program(params, ids_BS, targets_BS):
            if by_rows is not None:
                ids_BS = jax.lax.with_sharding_constraint(ids_BS, by_rows)
            return score_tokens(nnx.merge(graph, params), ids_BS, targets_BS)

        self._program = jax.jit(program, out_shardings=whole)

    def __call__(self, pairs: Sequence[tuple[np.ndarray, int]]) -> list[tuple[float, bool]]:
        """(log-probability of the last tokens of each text, in nats, whether each of them is the likeliest).

        Args:
          pairs: (ids, how many of the last are scored: at least 1, at most all but the first). Texts of similar length belong
            together: all have as many positions as the longest, rounded up to a power of two.
        """
        S = bucket(max(len(ids) for ids, _ in pairs) - 1, SMALLEST_PROMPT)
        B = self._ranks * (MOST_ROWS if self._on_cpu else bucket(evaluation_rows(S)))
        found: list[tuple[float, bool]] = []
        for first in range(0, len(pairs), B):
            some = pairs[first : first + B]
            ids_BS, targets_BS = np.zeros((B, S), np.int32), np.zeros((B, S), np.int32)
            for row, (ids, _) in enumerate(some):
                ids_BS[row, : len(ids) - 1], targets_BS[row, : len(ids) - 1] = ids[:-1], ids[1:]
            losses_BS, greedy_BS = map(np.asarray, self._program(self._params, ids_BS, targets_BS))
            for row, (ids, count) in enumerate(some):
                last = slice(len(ids) - 1 - count, len(ids) - 1)
                found.append((-float(losses_BS[row, last].sum()), bool(greedy_BS[row, last].all())))
        return found


def score_tokens(
    model: Llama, ids_BS: Int[Array, "B S"], targets_BS: Int[Array, "B S"]
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """(-log p(target) in nats, whether the target is the likeliest id) of each position, float32 and bool."""
    config, (B, S) = model.config, ids_BS.shape
    attend = attention_of(rooms(config, S), S)
    h_BSD, head_VD = model.hidden(ids_BS, ops=Ops(attend=attend, look_up=look_up)), model.head_matrix()
    ids_V = jnp.arange(head_VD.shape[0])

    def chunk(inputs):
        h_BCD, targets_BC = inputs
        logits_BCV, _, log_z_BC, target_BC = scores(h_BCD, head_VD, targets_BC, ids_V, config.vocab_size, VocabularySlice())
        return log_z_BC - target_BC, logits_BCV.argmax(axis=-1) == targets_BC

    cut = partial(cut_positions, chunks=min(S, -(-B * S // CHUNK_TOKENS)))
    losses, greedy = jax.lax.map(chunk, (cut(h_BSD), cut(targets_BS)))
    return joined_positions(losses, S), joined_positions(greedy, S)
