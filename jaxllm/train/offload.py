"""Optimizer state in host memory: AdamW's moments, and optionally the fp32 master weights, stay there between steps. With
parallel.offload_state=all so do the layers' weights in the compute dtype and their gradients within a step
(parallel/layer_loop.py).

The update loads one piece at a time (a layer, or a part of the embedding or the head), so that the device never holds more
than a few. A loop reads from the arrays on the host and writes back into them. Within a piece XLA reads one parameter while it
writes another. Prefetching the next piece would read and write one array at the same time, which costs a copy of all of it.
Each rank works on its own shard, in a region that is manual over all axes: the compiler would otherwise gather a layer stack
that is sharded over `pipe`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxllm.config import Config
from jaxllm.config.types import MASTER_ON_HOST
from jaxllm.mesh.sharding import stack_dims
from jaxllm.parallel.parameters import trained, with_part
from jaxllm.parallel.types import Parallelized
from jaxllm.private_jax import empty_on_host
from jaxllm.train.optimizer import make_optimizer
from jaxllm.train.step import Clipping, TrainState, Update, clip_scale, make_update

PIECE_BYTES = 64 * 2**20
"""Maximum size of a piece of the embedding or head: 1.2 ms on a PCIe 5 link, far above the start-up cost of a copy."""

Space = jax.memory.Space
Tree = Any


def streamed_update(config: Config, table: Tree, shardings: TrainState, mesh: Mesh) -> Update:
    """The optimizer's update with moments (and params) on the host. It gives the same numbers as the plain update.

    Args:
      table: nested dict of Parameter.
      shardings: shardings of the state.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    params_on_host, all_on_host = (config.parallel.offload_state in states for states in (MASTER_ON_HOST, ("all",)))

    def update(gradients: Any, opt_state: Tree, params: Tree, rate: jax.Array, apply_update: jax.Array) -> tuple[Tree, Tree]:
        structure = StateStructure.of(opt_state, table)
        moments, counters = structure.take_apart(opt_state)
        moment_specs, counter_specs = structure.take_apart(specs.opt_state)
        gradients, scale = gradients if all_on_host else (gradients, None)
        parts = {}
        for name, part in table.items():
            on_host = params_on_host, all_on_host and name == "layers"
            state_specs = (specs.params[name], [tree[name] for tree in moment_specs], counter_specs)
            run = partial(_update_part, make_update(make_optimizer(config, part)), structure, part, on_host)
            in_specs = (specs.params[name], *state_specs, PartitionSpec(), PartitionSpec(), PartitionSpec())
            mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=state_specs, check_vma=False)
            held = gradients[name], params[name], [tree[name] for tree in moments], counters
            parts[name] = mapped(*held, scale, rate, apply_update)
        new_moments = [{name: new[i] for name, (_, new, _) in parts.items()} for i in range(len(moments))]
        # Each part has counted the step.
        *_, (_, _, new_counters) = parts.values()
        return {name: new for name, (new, _, _) in parts.items()}, structure.assemble(new_moments, new_counters)

    return update


def streamed_clipping(functions: Parallelized, mesh: Mesh) -> Clipping:
    """How gradients are clipped whose layers are on the host: their squares are summed, and the update, which gets
    (gradients, their scale or None), scales them, a layer at a time."""
    part = functions.table["layers"]
    specs = jax.tree.map(lambda sharding: sharding.spec, functions.master_shardings["layers"])
    run = partial(_squares, part, specs)
    squares = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)

    def norm(gradients: Tree) -> jax.Array:
        rest = {name: tree for name, tree in gradients.items() if name != "layers"}
        return jnp.sqrt(jnp.square(optax.tree.norm(rest)) + squares(gradients["layers"]))

    def clip(gradients: Tree, norm: jax.Array, limit: float | None) -> tuple[Tree, jax.Array | None]:
        return gradients, None if limit is None else clip_scale(norm, limit)

    return Clipping(norm, clip)


def loading_params(config: Config, functions: Parallelized, mesh: Mesh) -> Parallelized:
    """Wraps the functions for master weights on the host. The device gets a copy in the compute dtype; with
    parallel.offload_state=all that of the layers stays on the host."""
    specs = jax.tree.map(lambda sharding: sharding.spec, functions.master_shardings)

    def load(params: Tree) -> Tree:
        # Frozen weights are on the device already.
        loaded, own, own_specs = {}, trained(params, functions.table), trained(specs, functions.table)
        for name, part in trained(functions.table, functions.table).items():
            on_host = config.parallel.offload_state == "all" and name == "layers"
            run = partial(_cast_part, config.model.compute_dtype, on_host, part)
            mapped = jax.shard_map(run, mesh=mesh, in_specs=(own_specs[name],), out_specs=own_specs[name], check_vma=False)
            loaded[name] = mapped(own[name])
        return with_part(params, loaded)

    def loading(name: str) -> Any:
        return lambda params, batch: getattr(functions, name)(load(params), batch)

    of_params = ("value_and_grad", "value_grad_and_parts", "loss_sum", "token_losses", "layer_norms")
    return dataclasses.replace(functions, **{name: loading(name) for name in of_params})


@dataclass(frozen=True)
class StateStructure:
    """Structure of an optimizer state: trees with the shape of the parameters (Adam: two), and other arrays (a counter)."""

    structure: Any
    is_tree: tuple[bool, ...]
    """For each entry of the structure, whether it is such a tree."""

    @staticmethod
    def of(opt_state: Tree, table: Tree) -> StateStructure:
        def is_tree(x: Any) -> bool:
            return isinstance(x, dict) and x.keys() == table.keys()

        entries, structure = jax.tree.flatten(opt_state, is_leaf=is_tree)
        return StateStructure(structure, tuple(map(is_tree, entries)))

    def take_apart(self, opt_state: Tree) -> tuple[list[Tree], list[Any]]:
        """Splits a state into (trees, others)."""
        entries = list(zip(self.structure.flatten_up_to(opt_state), self.is_tree, strict=True))
        return [x for x, is_tree in entries if is_tree], [x for x, is_tree in entries if not is_tree]

    def assemble(self, trees: list[Tree], others: list[Any]) -> Tree:
        in_turn, beside = iter(trees), iter(others)
        return self.structure.unflatten([next(in_turn if is_tree else beside) for is_tree in self.is_tree])


# ------------------------------------------------------------------------------------------- one part, on a rank's own share


def _update_part(update: Update, structure: StateStructure, part, on_host, gradients, params, moments, counters, scale, *how):
    """Updates one top-level entry of the parameters, piece by piece: (params, moments, counters). on_host: whether its params
    and gradients are there, where its moments always are."""
    params_on_host, gradients_on_host = on_host
    shapes = jax.tree.map(jnp.shape, (params, moments))
    (numbers, gradients), (_, params), *cut = (_cut(part, tree) for tree in (gradients, params, *moments))
    moments = [pieces for _, pieces in cut]

    def body(carry, number):
        params, moments = carry
        at = partial(_read, number)
        # Not the carry's counters, because all pieces belong to the same step.
        state = structure.assemble(at(moments, True), counters)
        # Those of a single microbatch may be in the compute dtype.
        piece = jax.tree.map(lambda g: g.astype(jnp.float32), at(gradients, gradients_on_host))
        piece = piece if scale is None else jax.tree.map(lambda g: g * scale, piece)
        new_params, state = update(piece, state, at(params, params_on_host), *how)
        new_moments, new_counters = structure.take_apart(state)
        params = _write(number, params, new_params, params_on_host)
        return (params, _write(number, moments, new_moments, True)), new_counters

    carry, new_counters = jax.lax.scan(body, (params, moments), numbers)
    return *jax.tree.map(lambda x, shape: x.reshape(shape), carry, shapes), [x[-1] for x in new_counters]


def _cast_part(dtype: str, on_host: bool, part: Tree, params: Tree) -> Tree:
    """Copies one top-level entry of the parameters from the host in `dtype`, to the device or (on_host) back to the host."""
    numbers, pieces = _cut(part, params)

    def body(copy, number):
        cast = jax.tree.map(lambda x: x.astype(dtype), _read(number, pieces, True))
        return (_write(number, copy, cast, True), None) if on_host else (copy, cast)

    empty = jax.tree.map(lambda x: empty_on_host(x.shape, dtype), pieces) if on_host else None
    copy, loaded = jax.lax.scan(body, empty, numbers)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), copy if on_host else loaded, params)


def _squares(part: Tree, specs: Tree, gradients: Tree) -> jax.Array:
    """The sum of squares of all ranks' gradients of the layers, which are on the host; each element counts once."""
    numbers, pieces = _cut(part, gradients)

    def body(sums, number):
        add = lambda total, g: total + jnp.sum(jnp.square(g.astype(jnp.float32)))  # noqa: E731
        return jax.tree.map(add, sums, _read(number, pieces, True)), None

    sums, _ = jax.lax.scan(body, jax.tree.map(lambda _: jnp.zeros((), jnp.float32), pieces), numbers)
    of_ranks = jax.tree.map(lambda total, spec: jax.lax.psum(total, tuple(jax.tree.leaves(tuple(spec)))), sums, specs)
    return jnp.stack(jax.tree.leaves(of_ranks)).sum()


def _cut(part: Tree, arrays: Tree) -> tuple[jax.Array, Tree]:
    """The numbers of the pieces of a rank's shard, its layers or the fewest of at most PIECE_BYTES, and the arrays as
    [piece, ...]."""
    (first, *_), (array, *_) = jax.tree.leaves(part), jax.tree.leaves(arrays)
    # Cut across the flattened array: a vocabulary may have no small divisor, but a width mostly does.
    fits = (n for n in range(1, array.size + 1) if array.size % n == 0 and 4 * array.size // n <= PIECE_BYTES)
    stacked = stack_dims(first.dims)
    count = math.prod(array.shape[:stacked]) if stacked else next(fits)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(count, *x.shape[stacked:]) if stacked else x.reshape(count, -1)

    return jnp.arange(count), jax.tree.map(cut, arrays)


def _read(number: jax.Array, arrays: Tree, on_host: bool) -> Tree:
    def read(x: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
        return jax.device_put(piece, Space.Device) if on_host else piece

    return jax.tree.map(read, arrays)


def _write(number: jax.Array, arrays: Tree, pieces: Tree, on_host: bool) -> Tree:
    def write(x: jax.Array, piece: jax.Array) -> jax.Array:
        piece = jax.device_put(piece, Space.Host) if on_host else piece
        return jax.lax.dynamic_update_index_in_dim(x, piece, number, 0)

    return jax.tree.map(write, arrays, pieces)
