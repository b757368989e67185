"""The loop over a chunk of layers, forward and backward. What the backward pass needs is kept in a ring that the caller owns.

    loop = LayerLoop(block, length, policy, access)
    ring = loop.new_ring(slots, layers, h, block_context)
    h, ring, _ = loop.forward(layers, Pass(chunk, h, block_context, slot), ring)
    dh, sums, _ = loop.backward(layers, Pass(chunk, dh, block_context, slot), ring, sums)

Autodiff of a scan would stack a chunk's residuals, and the caller would have to copy them into and out of a buffer. It would
also make all gradients of a chunk before they are added. Here each layer writes its residuals into the ring and adds its
gradients to `sums` in place. Weights are not stored as residuals: they are put back into the VJP when the backward pass runs
(vjp_residuals.py).

One slot of the ring holds one chunk and microbatch, a layer per row:

    slot       |       0       |       1       |       2       |
    row        | 0   1   2   3 | 4   5   6   7 | 8   9  10  11 |     length 4: row = 4 slot + number of the layer
    forward    |               | -> -> -> -> writes 4, 5, 6, 7, with slot 1
    backward   |               | <- <- <- <- reads 7, 6, 5, 4, some ticks later; then the slot is free

With ZeRO 3, the transfers of a turn hide behind its compute. Nothing in a column waits for anything else in it:

    turn        forward  0     1     2     3          backward  0     1     2     3    end
    gather            L1    L2    L3   (next)                  L2    L1    L0    L0
    compute           L0    L1    L2    L3                     L3    L2    L1    L0
    scatter                                                  zeros   L3    L2    L1     L0

Where a step sends each layer once (ZeRO 0 and 1), the first microbatch's forward pass keeps the weights that it gathers, and
the last one's backward pass scatters what all have summed. The last layer's turn is then outside these loops: it gathers
nothing and scatters no zeros.

Residuals that a policy offloads are in a part of the ring in the host's pinned memory. They are moved explicitly: written as a
layer makes them, read one layer before they are used. With the library's offload policies the host would read the ring.

Shapes: `layers` has the rank's layers, [chunks x length, ...]; `chunk` and `slot` are traced integers; the leaves of the ring
are [slots x length, ...]; `sums` have the shapes of gradients that `access` has scattered.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.config import BLOCK_INPUT, Config
from jaxllm.config.remat_policy import Policy, policy_of
from jaxllm.config.types import EXPERT_CHOICE
from jaxllm.model.layers import Losses
from jaxllm.model.llama import BlockContext, BlockFunction
from jaxllm.parallel.grad_square_norms import GradSquareNorms
from jaxllm.parallel.ordering import after, hidden_token, weights_token
from jaxllm.parallel.types import Accumulators, Tree, WeightAccess
from jaxllm.parallel.vjp_residuals import extract, kept_names, restore, waits_on_host
from jaxllm.private_jax import empty_on_host

# --------------------------------------------------------------------------------------------------------- layers on the host
# The layers' weights and gradient sums in the host's pinned memory (parallel.offload_state=all). A layer is one row of each
# stack there. The loop moves weights a turn before they are needed, and adds gradients a turn after they are made:
#
#     turn, backward   3     2     1     0    end
#     weights in       L2    L1    L0    L0             with ZeRO 3 a rank's shard, which is then gathered
#     compute          L3    L2    L1    L0
#     sums in, out     L3    L3    L2    L1    L0       in the first turn zeros are added
#
# So the device holds a few rows, however many layers there are. A turn reads sums behind recomputation and the gradients of
# activations; then it writes sums, and reads weights, behind the gradients of weights (compiled for an H100, JAX 0.10.2).


def to_device(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def from_host(access: WeightAccess, layouts: Tree) -> WeightAccess:
    """`access` to layers that are on the host: a rank's weights of a layer are fetched, and then gathered by `access`.

    Args:
      layouts: of one layer.
    """
    gather = access.gather or (lambda row: row)
    return dataclasses.replace(access, gather=lambda row: gather(to_device(row)), token=partial(weights_token, layouts=layouts))


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "begun"], meta_fields=[])
@dataclass(frozen=True)
class HostSums:
    """Sums of a rank's gradients, an array [layer, ...] on the host for each weight."""

    rows: Tree
    begun: jax.Array | None
    """Float32: 1 once the sums of all layers are written, until then 0 and `rows` are undefined. None: there is a single
    microbatch, so that nothing is read."""

    @classmethod
    def empty(cls, shapes: Tree, microbatches: int) -> HostSums:
        rows = jax.tree.map(lambda x: empty_on_host(x.shape, x.dtype), shapes)
        return cls(rows, jnp.zeros((), jnp.float32) if microbatches > 1 else None)

    def read(self, number: Any) -> Tree:
        """A layer's sums, on the device; None if nothing is read."""
        if self.begun is None:
            return None
        return to_device(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), self.rows))

    @jax.named_scope("gradient_sums")
    def add(self, number: Any, row: Tree, gradients: Tree) -> HostSums:
        """With the gradients of a layer added to its sums, which `read` returned as `row`."""

        def one(stack: jax.Array, gradient: jax.Array, before: jax.Array | None = None) -> jax.Array:
            new = gradient.astype(stack.dtype)
            if before is not None and self.begun is not None:
                new = new + jnp.where(self.begun > 0, before, 0)
            return jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(new, jax.memory.Space.Host), number, 0)

        rows = jax.tree.map(one, self.rows, gradients, *([] if row is None else [row]))
        return dataclasses.replace(self, rows=rows)

    def complete(self) -> HostSums:
        """After the gradients of all layers of a microbatch are added."""
        return self if self.begun is None else dataclasses.replace(self, begun=jnp.ones((), jnp.float32))


# ------------------------------------------------------------------------------------------------------------------ remat
# Remat policies, applied to a block: which of its named tensors are saved for the backward pass, and which are recomputed.


def remat(policy: Policy, block: Callable, in_loop: bool) -> Callable:
    """The block with a policy applied. Tensors to be offloaded are saved by name; the loop that stores them moves them.

    A plain JAX block saves about 67 bytes per token and unit of width, because norms, SiLU and casts save their inputs. The
    named tensors are a third of that.

    Args:
      in_loop: the block runs in a loop of several turns. XLA then cannot merge the recomputation with the forward pass. In an
        unrolled loop it would merge them, and keep everything after all.
    """
    if policy.everything:
        return block
    # The block's input is saved without a policy.
    names = [name for name in policy.keep + policy.offload if name != BLOCK_INPUT]
    saves = jax.checkpoint_policies.save_only_these_names(*names, EXPERT_CHOICE)
    return jax.checkpoint(block, policy=saves, prevent_cse=not in_loop)


# ------------------------------------------------------------------------------------------------------------- layer loop


@partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["on_host"])
@dataclass(frozen=True)
class Ring:
    """Residuals of the layers of several chunks."""

    kept: Tree
    """The result of extract(), with a leading dim of rows."""
    on_host: tuple[bool, ...]
    """For each leaf, whether it is in the host's memory."""

    def write(self, number, kept: Tree) -> Ring:
        kept = self._moved(kept, jax.memory.Space.Host)
        update = lambda r, x: jax.lax.dynamic_update_index_in_dim(r, x, number, 0)  # noqa: E731
        return Ring(jax.tree.map(update, self.kept, kept), self.on_host)

    def read(self, number) -> Tree:
        kept = jax.tree.map(lambda r: jax.lax.dynamic_index_in_dim(r, number, keepdims=False), self.kept)
        return self._moved(kept, jax.memory.Space.Device)

    def _moved(self, tree: Tree, space: Any) -> Tree:
        """`tree` with the leaves that wait on the host moved to `space`."""
        leaves, structure = jax.tree.flatten(tree)
        moved = [jax.device_put(x, space) if away else x for x, away in zip(leaves, self.on_host, strict=True)]
        return structure.unflatten(moved)


class Pass(NamedTuple):
    """A microbatch's pass through a chunk of layers, forward or backward."""

    chunk: Any
    x_BSD: jax.Array
    """Forward: hidden states. Backward: the gradient of those that the forward pass returned."""
    block_context: BlockContext
    slot: Any
    """Slot of the ring."""
    losses_scale: Any = None
    """Backward: the gradient of the objective by a loss of a layer's own, for each of the rank's layers."""


class BackwardCarry(NamedTuple):
    """State of the backward loop between two layers."""

    dh_BSD: jax.Array
    """Gradient of the output of the layer whose turn comes next."""
    weights: Tree
    """That layer's gathered weights; None where each turn reads its own."""
    kept: Tree
    """Its residuals, if some wait on the host; else None, and each turn reads its own."""
    pending: Tree
    """Gradients of the last turn's layer, to be scattered or added on the host; None where each turn adds its own."""
    sums: Tree
    """The rank's gradients so far; HostSums where they are on the host."""
    squares: Any
    """What the tap took so far; None without a tap."""


class LayerLoop:
    """`block` under the config's remat policy, over chunks of `length` layers.

    Args:
      trained: the tree of one layer -> its trained part, which has gradients.
    """

    def __init__(
        self,
        block: BlockFunction,
        length: int,
        config: Config,
        access: WeightAccess,
        tap: GradSquareNorms | None,
        trained: Callable[[Tree], Tree],
    ):
        self.length, self._access, self._tap, self._trained = length, access, tap, trained
        self._policy = policy_of(config.parallel.remat, config.model)
        # Layers per turn of the loop, as `lax.scan` takes it. True: all.
        self._unroll = True if config.model.scan_layers is False else 1
        # In turns of two layers, what a forward pass gathers ahead has two places. With one, XLA copies it into the carry. But
        # beside context ranks its scheduler leaves gathers bare: 70B with `offload` on 64 H100s would wait 2.4 s, not 0.8.
        gathers_ahead = access.gather and not access.once and config.parallel.context == 1
        in_pairs = gathers_ahead and self._unroll is not True and length > 2 and length % 2 == 0
        self._unroll_forward = 2 if in_pairs else self._unroll
        # Zeros would be written in each microbatch, and copied where stacks are alike: 25 of 1,555 ms for 8B with ZeRO 3. But
        # XLA does not shard an empty stack over tensor ranks, and beside it unrolled layers take 4% more memory.
        self._empty = jnp.zeros if config.parallel.tensor > 1 or self._unroll is True else jax.lax.empty
        # The last layer's turns outside the loops follow each other, so that XLA would merge recomputation and forward pass.
        both_outside = self._keeps and access.scatter is not None
        self._block = remat(self._policy, block, in_loop=self._unroll == 1 and length > 1 and not both_outside)

    def new_ring(self, slots: int, layers: Tree, h_BSD: jax.Array, block_context: BlockContext) -> Ring:
        """Room for the residuals of `slots` chunks, undefined. Only shapes of the arguments matter."""
        weights, block_context = self._weights_shape(layers), block_context.of_layer(0)
        kept = jax.eval_shape(lambda w, h, s: extract(jax.vjp(self._block, w, h, s)[1]), weights, h_BSD, block_context)
        on_host = (False,) * len(jax.tree.leaves(kept))
        if self._policy.offload:
            on_host = waits_on_host(kept_names(self._block, weights, h_BSD, block_context, self._policy), self._policy)
        leaves, structure = jax.tree.flatten(kept)
        # Microbatches that have a loop of their own would otherwise have a ring each from the start of the step on.
        empty = partial(jnp.full, fill_value=hidden_token(h_BSD)) if self._access.once else self._empty
        places = (empty_on_host if away else empty for away in on_host)
        room = [place((slots * self.length, *x.shape), dtype=x.dtype) for place, x in zip(places, leaves, strict=True)]
        return Ring(structure.unflatten(room), on_host)

    def forward(self, layers: Tree, ahead: Pass, ring: Ring | None = None, then: Any = None):
        """(h, losses, ring, weights): the chunk's output; the sums of its layers' own losses; the ring with its residuals, if
        there is a ring; and, where weights are gathered, those of the rank's layer number `then`, for the pass that follows, or
        if they are kept those of all layers.
        """
        turn, kept = self._forward_turn(layers, ahead, then), None
        if self._keeps:
            kept = jax.tree.map(lambda w: jnp.zeros((self.length, *w.shape), w.dtype), self._weights_shape(layers))
        own = jax.eval_shape(self._block, self._weights_shape(layers), ahead.x_BSD, ahead.block_context.of_layer(0))[1]
        weights = self._read(layers, ahead.chunk * self.length) if self._access.gather else None
        carry = (ahead.x_BSD, jax.tree.map(jnp.zeros_like, own), weights, ring, kept)
        h_BSD, losses, weights, ring, kept = self._scan(turn, carry)
        return h_BSD, losses, ring, kept if self._keeps else weights

    def backward(
        self, layers: Tree, back: Pass, ring: Ring, sums: Tree, weights: Tree = None, valid: Any = True, adds: bool = False
    ):
        """(dh, sums, squares): the gradient of the chunk's input; `sums` with the gradients of its weights added if `valid`;
        and what the tap took of them, 0 if not `valid`, None without a tap.

        Args:
          weights: of the chunk's last layer, if they are gathered already.
          adds: `sums` are full ones of earlier microbatches, which are scattered with this one's gradients. The rank's shard
            takes the place of their first elements.
        """
        turn = self._backward_turn(layers, back, ring, valid, adds)
        carry = self._before_backward(layers, back, ring, sums, weights)
        return self._after_backward(back.chunk, self._scan(turn, carry, reverse=True), valid)

    def _scan(self, turn, carry, *, reverse: bool = False):
        """Runs turn(number of a layer in its chunk, carry) -> carry over the layers of a chunk."""
        scanned = lambda carry, number: (turn(number, carry), None)  # noqa: E731
        sends = self._access.scatter if reverse else self._access.gather
        scan = partial(jax.lax.scan, scanned, reverse=reverse, unroll=self._unroll if reverse else self._unroll_forward)
        if not self._access.once or sends is None:
            return scan(carry, jnp.arange(self.length))[0]
        last, others = self.length - 1, jnp.arange(self.length - 1)
        return scan(turn(last, carry), others)[0] if reverse else turn(last, scan(carry, others)[0])

    def _forward_turn(self, layers, ahead: Pass, then):
        first, gather, last = ahead.chunk * self.length, self._access.gather, self.length - 1

        def turn(number, carry):
            h_BSD, losses, weights, ring, kept = carry
            following, block_context = None, ahead.block_context.of_layer(first + number)
            if gather is None:
                weights = self._read(layers, first + number)
            elif not isinstance(number, int):  # the last layer's turn, outside the loop
                at = first + jnp.minimum(number + 1, last)
                following = self._read(layers, at if then is None else jnp.where(number < last, at, then))
            if kept is not None:
                kept = _write(kept, number, weights)
            if ring is None:
                h_BSD, own = self._block(weights, h_BSD, block_context)
            else:
                (h_BSD, own), vjp = jax.vjp(self._block, weights, h_BSD, block_context)
                ring = ring.write(ahead.slot * self.length + number, extract(vjp))
            return h_BSD, jax.tree.map(jnp.add, losses, own), following, ring, kept

        return turn

    def _backward_turn(self, layers, back: Pass, ring: Ring, valid, adds: bool):
        first, last = back.chunk * self.length, self.length - 1
        gather, on_host = self._access.gather, self._access.on_host
        shapes, block_context = self._weights_shape(layers), back.block_context.of_layer(0)
        (_, own), template = jax.eval_shape(lambda w, h: jax.vjp(self._block, w, h, block_context), shapes, back.x_BSD)

        def turn(number, carry: BackwardCarry) -> BackwardCarry:
            dh_BSD, weights, kept, pending, sums, squares = carry
            read = self._from_ring(ring, back.slot, number)
            at = first + (jnp.maximum(number - 1, 0) if gather else number)
            here, ahead = (weights, self._read(layers, at)) if gather else (self._read(layers, at), None)
            kept, kept_ahead = (read, None) if kept is None else (kept, read)
            behind, due = first + jnp.minimum(number + 1, last), None
            if pending is not None:
                # The gradients of the layer after this one; in the first turn of a loop over all layers zeros.
                due = self._access.scatter(pending) if self._access.scatter else pending
                if not on_host:
                    sums = self._add(sums, behind, due, valid)
            vjp = restore(template, here, back.block_context.of_layer(first + number), kept)
            gradients, dh_BSD, _ = vjp((dh_BSD, {name: back.losses_scale[name][first + number] for name in own}))
            gradients = self._trained(gradients)
            if self._tap:
                squares = squares + self._tap.on_layer(gradients)
            if on_host:
                sums = self._add_on_host(sums, behind, due, hidden_token(dh_BSD))
                if (token := self._access.token) and not self._access.scatter:
                    # On a single rank, which gathers nothing, XLA's scheduler would end the fetch before the matmuls of the
                    # weights' gradients, bare.
                    ahead = after(ahead, token(gradients))
            elif not self._adds_behind:
                sums = self._add(sums, first + number, gradients, valid)
            elif adds:
                with jax.named_scope("gradient_sums"):
                    before = _row(sums, first + number)
                    gradients = jax.tree.map(lambda total, g: total + g.astype(total.dtype), before, gradients)
            return BackwardCarry(dh_BSD, ahead, kept_ahead, gradients if self._adds_behind else None, sums, squares)

        return turn

    def _before_backward(self, layers, back: Pass, ring: Ring, sums: Tree, weights: Tree = None) -> BackwardCarry:
        last, adds_next = self.length - 1, self._adds_behind and not self._access.once
        if weights is None and self._access.gather:
            weights = self._read(layers, back.chunk * self.length + last)
        kept = ring.read(back.slot * self.length + last) if any(ring.on_host) else None
        pending = jax.tree.map(jnp.zeros_like, self._trained(self._weights_shape(layers))) if adds_next else None
        return BackwardCarry(back.x_BSD, weights, kept, pending, sums, self._tap.zeros() if self._tap else None)

    def _from_ring(self, ring: Ring, slot, number) -> Tree:
        """Residuals that a backward turn reads: its own layer's, or if some wait on the host those of the turn after it."""
        kept = ring.read(slot * self.length + (jnp.maximum(number - 1, 0) if any(ring.on_host) else number))
        # Where a turn is outside the loop, XLA would copy the whole ring into the layout in which the loop reads a row: 5 GiB
        # of 91 for 8B at tensor 2 with two sequences of 32,768, and 15 of 156 for 16 of 4,096 at tensor 8 (JAX 0.10.2).
        return jax.lax.optimization_barrier(kept) if self._access.once else kept

    def _after_backward(self, chunk, carry: BackwardCarry, valid):
        sums, squares = carry.sums, carry.squares
        if self._adds_behind:
            at = chunk * self.length
            due = self._access.scatter(carry.pending) if self._access.scatter else carry.pending
            sums = self._add_on_host(sums, at, due) if self._access.on_host else self._add(sums, at, due, valid)
        return carry.dh_BSD, sums, None if squares is None else jnp.where(valid, squares, 0.0)

    @property
    def _keeps(self) -> bool:
        """Whether the forward pass keeps the weights that it gathers."""
        return self._access.once and self._access.gather is not None

    @property
    def _adds_behind(self) -> bool:
        """Whether a layer's gradients are added to the sums a turn later."""
        return self._access.scatter is not None or self._access.on_host

    @jax.named_scope("gradient_sums")
    def _add_on_host(self, sums: HostSums, number, gradients: Tree, *tokens: jax.Array) -> HostSums:
        """`sums` with a layer's gradients added, once all its sums are read and these tokens are there. Otherwise XLA's
        scheduler reads one array after the other, each just before it is written, bare."""
        row, token = sums.read(number), self._access.token
        assert token is not None, "it is there where sums are on the host"
        tokens = (*tokens, *([] if row is None else [token(row)]))
        return sums.add(number, row, after(gradients, *tokens) if tokens else gradients)

    @jax.named_scope("gradient_sums")
    def _add(self, sums: Tree, number, gradients: Tree, valid) -> Tree:
        """`sums` with a layer's gradients added in place. If not `valid`, zeros are added."""

        def add(stack, gradient):
            row = jax.lax.dynamic_index_in_dim(stack, number, keepdims=self._access.scatter is None)
            new = row + jnp.where(valid, gradient, 0).astype(row.dtype).reshape(row.shape)
            return jax.lax.dynamic_update_slice_in_dim(stack, new.reshape(1, *gradient.shape), number, 0)

        if self._access.once:
            # These are a layer's first or last. XLA would also move an all-reduce out of a loop that adds its results.
            return _write(sums, number, jax.tree.map(lambda stack, g: g.astype(stack.dtype), sums, gradients))
        # One kernel reads and writes a full sum if nothing reshapes its row: 113 of 6,637 ms of 8B in two stages. With sums of
        # shards nothing is gained: XLA copies gathered weights instead.
        return jax.tree.map(add, sums, gradients)

    def _read(self, layers: Tree, number) -> Tree:
        weights = _row(layers, number)
        return self._access.gather(weights) if self._access.gather else weights

    def _weights_shape(self, layers: Tree) -> Tree:
        return jax.eval_shape(lambda layers: self._read(layers, 0), layers)

    def run(
        self, layers: Tree, own: Accumulators | None, h_BSD: jax.Array, block_context: BlockContext, adds: bool = False
    ) -> tuple[jax.Array, Losses, Tree]:
        """(h, losses, the layers' full weights if they are kept): all layers, as one function with gradients of its own. Those
        of the layers are added to their accumulators, or scattered with these, as in `backward`."""
        keeps, behind = self._keeps, copy.copy(self)
        if keeps:
            # The backward pass reads the full weights that the forward pass kept.
            behind._access = dataclasses.replace(self._access, gather=None)

        @jax.custom_vjp
        def stack(layers, own, h_BSD, block_context):
            h_BSD, losses, _, weights = self.forward(layers, Pass(0, h_BSD, block_context, 0))
            return h_BSD, losses, weights if keeps else None

        def stack_forward(layers, own, h_BSD, block_context):
            ring = self.new_ring(1, layers, h_BSD, block_context)
            h_BSD, losses, ring, weights = self.forward(layers, Pass(0, h_BSD, block_context, 0), ring)
            layers, last = (weights, None) if keeps else (layers, weights)
            return (h_BSD, losses, weights if keeps else None), (layers, own.sums, block_context, ring, last)

        def stack_backward(saved, cotangents):
            layers, sums, block_context, ring, last = saved
            scales = jax.tree.map(lambda x: jnp.broadcast_to(x, self.length), cotangents[1])
            back = Pass(0, cotangents[0], block_context, 0, scales)
            dh_BSD, sums, squares = behind.backward(layers, back, ring, sums, last, adds=adds)
            sums = sums.complete() if behind._access.on_host else sums
            return None, Accumulators(sums, squares), dh_BSD, None

        stack.defvjp(stack_forward, stack_backward)
        return stack(layers, own, h_BSD, block_context)


def _row(stacks: Tree, number) -> Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stacks)


def _write(stacks: Tree, number, row: Tree) -> Tree:
    """`stacks` with the first elements of a row replaced by `row`, which may have less of one dim."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice(x, new[None], (number, *[0] * new.ndim)), stacks, row)
