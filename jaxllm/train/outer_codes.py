"""Outer gradients of DiLoCo in 8 or 4 bits, with error feedback (train.diloco_bits).

Each replica k has a residual e_k: what it has not sent yet. An exchange of its change d_k, over K replicas:

    x_k = d_k + e_k                   in K pieces; replica j adds up piece j of all
    all-to-all of Q(x_k)              D = mean over k of Q(x_k), one piece on each replica
    all-gather of Q(D)                all replicas decode the same bytes, so their outer steps are equal to the bit
    e_k <- x_k - Q(x_k),              and on piece k also + K (D - Q(D)), which this replica alone knows

So mean(e_k) is all that is missing from what was applied: over any number of rounds, the sum of Q(D) is the sum of the mean
changes minus the last mean residual, up to rounding, as long as the number of replicas in the mean stays. If it changes,
residuals get another weight than they had. A replica that is left out sends zeros and keeps its residual, and D is the mean of
the others. Numbers of a residual that are not finite become 0, or its replica would send them in every later round. One
residual keeps both errors (Tang et al., 2019, DoubleSqueeze, has one on each side).

Q stores blocks of 128 numbers: each a whole multiple, from -127 to 127 or -7 to 7, of the block's step, which is its largest
magnitude / 127 or / 7. The error is at most half a step. A block travels as one record: its codes, then its step in float32.
Blocks are of one array. The records of all arrays travel in one buffer, so an exchange is one all-to-all and one all-gather on
any mesh: each device sends its own part of every array.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from jaxllm.config.rounds import OUTER_BLOCK as BLOCK
from jaxllm.mesh.axes import REPLICA


def encode(x: jax.Array, bits: int) -> jax.Array:
    """Blocks [..., BLOCK], float32 -> records [..., BLOCK * bits / 8 + 4], uint8."""
    most = 2 ** (bits - 1) - 1
    step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / most
    # Of a smaller step XLA makes 0 on some devices. Such a block is all residual. NaN stays NaN on all replicas.
    usable = ~(step < jnp.finfo(jnp.float32).tiny)
    codes = jnp.clip(jnp.round(x / jnp.where(usable, step, jnp.inf)), -most, most).astype(jnp.int8)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    if bits == 4:
        low, high = jnp.split(codes, 2, axis=-1)
        codes = (low & 15) | (high << 4)
    scale = jax.lax.bitcast_convert_type(jnp.where(usable, step, 0.0)[..., 0], jnp.uint8)
    return jnp.concatenate([codes, scale], axis=-1)


def decode(records: jax.Array, bits: int) -> jax.Array:
    """Records of `encode` -> blocks [..., BLOCK], float32."""
    codes, scale = jnp.split(records, [BLOCK * bits // 8], axis=-1)
    if bits == 4:
        codes = jnp.concatenate([codes << 4, codes & 240], axis=-1)
    signed = jax.lax.bitcast_convert_type(codes, jnp.int8)
    if bits == 4:
        signed = jax.lax.shift_right_arithmetic(signed, jnp.int8(4))
    return signed.astype(jnp.float32) * jax.lax.bitcast_convert_type(scale, jnp.float32)[..., None]


def at_once(collective: Callable[[jax.Array], jax.Array], records: Any) -> Any:
    """One collective of a whole tree of arrays, each [pieces, ...], uint8.

    Args:
      collective: [pieces, bytes] -> [replica, bytes]
    """
    _, unflatten = ravel_pytree(jax.tree.map(lambda x: x[0], records))
    return jax.vmap(unflatten)(collective(jax.vmap(lambda piece: ravel_pytree(piece)[0])(records)))


def own_square(mesh: Mesh, arrays: Any, specs: Any) -> jax.Array:
    """A device's part of the sum of squares of sharded arrays, shared by the devices of a replica that have the same.

    Args:
      specs: a tree of PartitionSpecs.
    """

    def share(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        parts = math.prod(mesh.shape[name] for name in jax.tree.leaves(tuple(spec)))
        return jnp.square(x).sum() * (parts / mesh.size)

    return jax.tree.reduce(jnp.add, jax.tree.map(share, arrays, specs))


def coded_mean(bits: int, mesh: Mesh, shared: Any, own: Any) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """A diloco.Mean: what is applied is equal on all replicas, to the bit. The other numbers travel beside the codes. To their
    sums it adds the squares of the replicas' codes, `coded_square`, and of their mean before it is coded, `mean_square`.

    Args:
      shared, own: trees of PartitionSpecs, of what is applied and of the others.
    """
    replicas, within = mesh.shape[REPLICA], tuple(name for name in mesh.axis_names if name != REPLICA)

    def of_device(changes: Any, residuals: Any, counts: jax.Array, others: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
        def in_pieces(change: jax.Array, residual: jax.Array) -> jax.Array:
            x = jnp.where(counts[0], change, 0) + jnp.where(jnp.isfinite(residual), residual, 0)
            return jnp.pad(x.reshape(-1), (0, -x.size % (replicas * BLOCK))).reshape(replicas, -1, BLOCK)

        def rest(x: jax.Array, sent: jax.Array, mean: jax.Array, answer: jax.Array) -> jax.Array:
            return (x - decode(sent, bits)).at[jax.lax.axis_index(REPLICA)].add(number * (mean - decode(answer, bits)))

        def as_before(pieces: Any) -> Any:
            return jax.tree.map(lambda x, d: x.reshape(-1)[: d.size].reshape(d.shape), pieces, changes)

        x = jax.tree.map(in_pieces, changes, residuals)
        sent = jax.tree.map(lambda x: encode(jnp.where(counts[0], x, 0), bits), x)
        beside = jax.tree.map(lambda n: jnp.repeat(jax.lax.bitcast_convert_type(n, jnp.uint8), replicas, 0), others)
        received, beside = at_once(lambda rows: jax.lax.all_to_all(rows, REPLICA, 0, 0, tiled=True), (sent, beside))
        sums = jax.tree.map(lambda n: jax.lax.bitcast_convert_type(n, jnp.float32).sum(0), beside)
        number = jnp.maximum(sums["number"], 1)
        coded = jax.tree.map(lambda records: decode(records, bits), received)
        mean = jax.tree.map(lambda x: x.sum(0) / number, coded)
        answer = jax.tree.map(lambda x: encode(x, bits), mean)
        squares = jax.lax.bitcast_convert_type(jnp.stack([own_square(mesh, each, own) for each in (coded, mean)]), jnp.uint8)
        gathered = jax.tree.map(lambda x: x[None], (answer, squares))
        answers, squares = at_once(partial(jax.lax.all_gather, axis_name=REPLICA, tiled=True), gathered)
        squares = jax.lax.psum(jax.lax.bitcast_convert_type(squares, jnp.float32).sum(0), within)
        sums |= {"coded_square": squares[0], "mean_square": squares[1]}
        applied = as_before(jax.tree.map(lambda records: decode(records, bits), answers))
        return jax.tree.map(lambda x: x[0], applied), as_before(jax.tree.map(rest, x, sent, mean, answer)), sums

    # The result is equal on all replicas, which JAX cannot see.
    each = PartitionSpec(REPLICA)
    return jax.shard_map(
        of_device, mesh=mesh, in_specs=(own, own, each, each), out_specs=(shared, own, PartitionSpec()), check_vma=False
    )
