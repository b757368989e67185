"""Matmuls between the two layouts of a sequence over tensor ranks, whose transfers hide behind the matmuls themselves.

Between the halves of a block each of t tensor ranks has 1/t of the sequence; inside a half it has all of it, of 1/t of the
width. XLA gathers the whole sequence, then multiplies; and it multiplies, then sums and scatters. Nothing else can run
meanwhile. Here the sequence is multiplied in t chunks, while another chunk travels to the next rank:

    gather_matmul      step 0 .. t-1    rank r multiplies chunk r - step, and sends it on
    matmul_scatter     step 1 .. t      rank r makes its part of chunk r - step, and sends on the sum of the steps before

The backward pass of one is the other, and then a matmul of whole sequences for the weights. The bytes are those of XLA's
collectives, less those that it gathers twice. The idea is that of Wang et al. (2023), "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models".

A rank gets the chunks in the order of its steps, r, r-1, ..., r+1: ring order. Only attention needs the order of positions.
Elsewhere activations stay in ring order (`in_order=False`), where chunks are cut at fixed places.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.mesh.axes import TENSOR
from jaxllm.mesh.sharding import split_spec, tensor_shard_map
from jaxllm.model.fp8 import letters
from jaxllm.parallel.ordering import zero_of
from jaxllm.private_jax import in_row_major

SHARDED = P(None, TENSOR)
"""PartitionSpec of hidden states between the halves of a block."""


class TensorRing:
    """Both matmuls, over `ranks` tensor ranks. Specs are einsum's, of activations [B, S, ...] and weights.

    Args:
      split: letters of the dims that are split over tensor, in weights and in activations inside a half.
    """

    def __init__(self, ranks: int, split: str):
        self._ranks, self._split = ranks, split
        self._gather_matmul = jax.custom_vjp(self._gather_forward, nondiff_argnums=(0, 1))
        self._gather_matmul.defvjp(lambda *args: (self._gather_forward(*args), args[2:]), self._gather_backward)
        self._matmul_scatter = jax.custom_vjp(self._scatter_forward, nondiff_argnums=(0, 1))
        self._matmul_scatter.defvjp(lambda *args: (self._scatter_forward(*args), args[2:]), self._scatter_backward)

    def gather_matmul(
        self, specs: tuple[str, ...], x_BSD: jax.Array, weights: tuple[jax.Array, ...], in_order: bool
    ) -> tuple[jax.Array, ...]:
        """x, whose sequence is sharded over ranks, times each of the weights [D, ...]."""
        return self._gather_matmul(specs, in_order, x_BSD, weights)

    def matmul_scatter(self, spec: str, y: jax.Array, weight: jax.Array, in_order: bool) -> jax.Array:
        """y times a weight, summed over ranks, as hidden states whose sequence is sharded."""
        return self._matmul_scatter(spec, in_order, y, weight)

    def _gather_forward(self, specs, in_order: bool, x_BSD: jax.Array, weights: tuple[jax.Array, ...]):
        of_weights, of_results = self._specs(specs)

        def local(x_BSD, *weights):
            groups = self._groups(specs, weights)
            matrices = [_joined([weights[n] for n in group], 1) for group in groups]
            _, found = self._gathered(x_BSD, lambda chunk: [chunk @ matrix for matrix in matrices])
            results = {}
            for group, chunks in zip(groups, zip(*found, strict=True), strict=True):
                parts = _split(self._whole(chunks, in_order), [weights[n] for n in group], 2)
                results |= {n: y.reshape(*y.shape[:2], *weights[n].shape[1:]) for n, y in zip(group, parts, strict=True)}
            return tuple(results[n] for n in range(len(weights)))

        return tensor_shard_map(local, (SHARDED, *of_weights), of_results)(x_BSD, *weights)

    def _gather_backward(self, specs, in_order: bool, kept, dys: tuple[jax.Array, ...]):
        of_weights, of_results = self._specs(specs)
        # A weight that is not split makes its complete gradient of x on each rank, which is not summed.
        summed = [n for n, spec in enumerate(of_weights) if TENSOR in spec]
        complete = [n for n, spec in enumerate(of_weights) if TENSOR not in spec]

        def local(x_BSD, weights, dys):
            tokens, width = self._ranks * x_BSD.shape[0] * x_BSD.shape[1], sum(math.prod(weights[n].shape[1:]) for n in summed)
            # A joined copy of the matrices moves 4 D x width bytes or so, the sum of their products 8 D x tokens.
            one_matmul = 2 * tokens > width

            def dx_of(numbers: list[int], step: int) -> jax.Array:
                chunks = {n: self._chunk(dys[n], step, in_order) for n in numbers}
                groups = [numbers] if one_matmul else [[n] for n in numbers]
                found = [
                    jnp.einsum("BSF,DF->BSD", _joined([chunks[n] for n in group], 2), _joined([weights[n] for n in group], 1))
                    for group in groups
                ]
                return sum(found[1:], found[0])

            dx_BSD = self._scattered(partial(dx_of, summed))
            if complete:
                dx_BSD = dx_BSD + dx_of(complete, 0)
            x_BSD = jax.lax.all_gather(x_BSD, TENSOR, axis=1, tiled=True)
            x_BSD = x_BSD if in_order else self._turned(jnp.split(x_BSD, self._ranks, axis=1))
            gradients = {}
            for group in self._groups(specs, weights):
                matrix = jnp.einsum("BSF,BSD->DF", _joined([dys[n] for n in group], 2), x_BSD)
                parts = _split(matrix, [weights[n] for n in group], 1)
                gradients |= {n: dw.reshape(weights[n].shape) for n, dw in zip(group, parts, strict=True)}
            return dx_BSD, tuple(gradients[n] for n in range(len(weights)))

        return tensor_shard_map(local, (SHARDED, of_weights, of_results), (SHARDED, of_weights))(*kept, dys)

    def _groups(self, specs: Sequence[str], weights: Sequence[jax.Array]) -> list[list[int]]:
        """Numbers of the weights that are multiplied as one matrix. Narrow keys and values join the queries: a chunk times one
        of them would leave most of a GPU idle. Gate and up stay apart, because joining copies them."""
        joins = len({w.size for w in weights}) > 1 and all(TENSOR in spec for spec in self._specs(specs)[0])
        numbers = range(len(weights))
        return [list(numbers)] if joins else [[n] for n in numbers]

    def _scatter_forward(self, spec: str, in_order: bool, y: jax.Array, weight: jax.Array):
        (of_weight,), _ = self._specs([spec])

        def local(y, weight):
            return self._scattered(lambda step: jnp.einsum(spec, self._chunk(y, step, in_order), weight))

        return tensor_shard_map(local, (self._spec(letters(spec)[0]), of_weight), SHARDED)(y, weight)

    def _scatter_backward(self, spec: str, in_order: bool, kept, dx_BSD: jax.Array):
        of_y, of_w, of_x = letters(spec)

        def local(y, weight, dx_BSD):
            chunks, found = self._gathered(dx_BSD, lambda chunk: [jnp.einsum(f"{of_x},{of_w}->{of_y}", chunk, weight)])
            # As one array: otherwise each kernel that reads it joins the chunks again.
            dy = jax.lax.optimization_barrier(self._whole([dy for (dy,) in found], in_order))
            return dy, jnp.einsum(f"{of_x},{of_y}->{of_w}", self._whole(chunks, in_order), y)

        specs = self._spec(of_y), self._spec(of_w)
        return tensor_shard_map(local, (*specs, SHARDED), specs)(*kept, dx_BSD)

    def _gathered(
        self, x_BSD: jax.Array, use: Callable[[jax.Array], list[jax.Array]]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """(chunks of the sequence, use(chunk) of each), in ring order."""
        # XLA would put several sequences' positions before the sequences, and copy whole stacks of kept hidden states into that
        # layout: 246 GiB instead of 200 for a step of 70B with 32 sequences (JAX 0.10.2).
        x_BSD = in_row_major(x_BSD)
        chunks, found = [x_BSD], [use(x_BSD)]
        for step in range(1, self._ranks):
            chunk = self._sent_on(chunks[-1])
            # XLA's scheduler takes transfers for slower than they are: it would send several chunks before the first matmul.
            chunks.append(_after(chunk, found[-1]) if step < self._ranks - 1 else chunk)
            found.append(use(chunks[-1]))
        return chunks, found

    def _scattered(self, part: Callable[[int], jax.Array]) -> jax.Array:
        """This rank's chunk of the sum over ranks, where part(step) is a rank's part of the chunk `step` ranks behind it."""
        total = part(1)
        for step in range(2, self._ranks + 1):
            # A matmul that adds to the sum would wait for the transfer that it should hide.
            total = jax.lax.optimization_barrier(part(step)) + self._sent_on(total)
        return total

    def _chunk(self, y: jax.Array, step: int, in_order: bool) -> jax.Array:
        length = y.shape[1] // self._ranks
        number = (jax.lax.axis_index(TENSOR) - step) % self._ranks if in_order else step % self._ranks
        return jax.lax.dynamic_slice_in_dim(y, number * length, length, axis=1)

    def _whole(self, chunks: Sequence[jax.Array], in_order: bool) -> jax.Array:
        return self._turned(chunks) if in_order else jnp.concatenate(chunks, axis=1)

    def _turned(self, chunks: Sequence[jax.Array]) -> jax.Array:
        """Chunks in ring order as one array in the order of positions, and the reverse: n is chunk r - n of the other."""
        twice = jnp.concatenate([*chunks, *chunks][::-1], axis=1)
        length = chunks[0].shape[1]
        start = (self._ranks - 1 - jax.lax.axis_index(TENSOR)) * length
        return jax.lax.dynamic_slice_in_dim(twice, start, self._ranks * length, axis=1)

    def _sent_on(self, x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, TENSOR, [(rank, (rank + 1) % self._ranks) for rank in range(self._ranks)])

    def _specs(self, specs: Sequence[str]) -> tuple[tuple[P, ...], tuple[P, ...]]:
        """(of the weights, of the results inside a half) of einsum specs."""
        parts = [letters(spec) for spec in specs]
        return tuple(self._spec(w) for _, w, _ in parts), tuple(self._spec(y) for _, _, y in parts)

    def _spec(self, dims: str) -> P:
        return split_spec(dims, self._split)


def _joined(arrays: Sequence[jax.Array], leading: int) -> jax.Array:
    """The arrays side by side, each with one dim after the first `leading`."""
    return jnp.concatenate([x.reshape(*x.shape[:leading], -1) for x in arrays], axis=leading)


def _split(joined: jax.Array, weights: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """The part of each weight of an array that has the columns of all along `axis`."""
    widths = [math.prod(w.shape[1:]) for w in weights]
    return jnp.split(joined, [sum(widths[: n + 1]) for n in range(len(widths) - 1)], axis=axis)


def _after(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """`x`, once the others are computed. Unlike ordering.after it changes one element in place, and copies none."""
    first = x[:1, :1, :1] + zero_of(others).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, first, (0, 0, 0))
