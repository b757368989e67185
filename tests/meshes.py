"""Runs one configuration on a mesh, for comparison with one device."""

import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.mesh.axes import axis_sizes, batch_sharding, make_mesh
from jaxllm.parallel.parameters import over_layers, stacking_of
from jaxllm.parallel.zigzag import order
from jaxllm.train.build import Given, build_training


class Run:
    """value_and_grad and the train step of a config. `batch(seed)` makes numpy arrays [microbatch, sequence, position]; step
    number `first` has seed `first`."""

    first = 0

    def __init__(self, config, batch, given=Given()):
        devices = jax.devices()[: math.prod(axis_sizes(config.parallel).values())]
        self.config, self.batch = config.resolve(len(devices)), batch
        self.mesh = make_mesh(self.config.parallel, devices)
        training = build_training(self.config, self.mesh, given)
        self.functions, self.step = training.functions, training.step
        with jax.set_mesh(self.mesh):
            self.state = training.create_state(self.config.train.seed)

    def place(self, arrays):
        dealt = order(self.config.train.sequence_length, self.config.parallel.context)
        sharding = batch_sharding(self.mesh)

        def put(a):
            a = a[:, :, dealt] if a.shape[2:3] == dealt.shape else a
            return jax.device_put(a, NamedSharding(self.mesh, PartitionSpec(*sharding.spec[: a.ndim])))

        return {name: put(a) for name, a in arrays.items()}

    def gradients(self, seed=0):
        """With rings of nan where they are undefined: what depends on a row that was not written is nan."""
        with jax.set_mesh(self.mesh), mock.patch.object(jax.lax, "empty", all_nan):
            return jax.jit(self.functions.value_and_grad)(self.state.params, self.place(self.batch(seed)))

    def plain(self, tree):
        """Parameters or gradients in the layout of one device: one stack of layers, without identity layers, padding rows and
        ZeRO's zeros, all of which must be 0."""
        table = self.functions.table
        if jax.tree.structure(tree) != jax.tree.structure(table):
            table = self.functions.trained(table)
        return in_one_stack(self.config, trimmed(unpadded(table, tree), self.config.model.vocab_size))

    def losses(self, steps):
        step, state, losses = jax.jit(self.step, donate_argnums=0), self.state, []
        with jax.set_mesh(self.mesh):
            for number in range(self.first, self.first + steps):
                state, metrics = step(state, self.place(self.batch(number)))
                losses.append(float(metrics["loss"]))
        # A program for other devices would take threads from the rest of this one (CPU_THREADS in xla_flags.py).
        self.state = jax.block_until_ready(state)
        return losses


def all_nan(shape, dtype):
    """An array as jax.lax.empty may give it on a GPU. On CPU devices that gives zeros."""
    return jnp.full(shape, jnp.nan, dtype) if jnp.issubdtype(dtype, jnp.floating) else ~jnp.zeros(shape, dtype)


def unequal_batch(seed, shape, least=0.0, ends=0):
    """Random tokens [microbatch, sequence, position]. The mask has about a share `least` of the first row's targets and all
    of the last row's, so ranks and microbatches hold different numbers of targets. Each row has `ends` + 1 documents.
    """
    rng = np.random.default_rng(seed)
    microbatches, rows, length = shape
    ids = rng.integers(0, 256, (microbatches, rows, length + 1)).astype(np.int32)
    keep = np.linspace(least, 1, microbatches * rows).reshape(microbatches, rows, 1)
    arrays = {
        "tokens": ids[..., :-1],
        "targets": ids[..., 1:],
        "mask": rng.random(shape) < keep,
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
    }
    if ends:
        cuts = rng.integers(1, length, (microbatches, rows, ends))
        arrays["segments"] = (np.arange(length) >= cuts[..., None]).sum(-2).astype(np.int32) + 1
    return arrays


def run_of_one_batch(config_of, shape, mesh, *more, zero, microbatches):
    """A run on (data, context, tensor, pipe) whose microbatches, however many, share one batch of sequences.

    Args:
      config_of: makes a config of overrides.
      shape: sequences, positions.
    """
    rows, length = shape
    axes = [f"parallel.{axis}={size}" for axis, size in zip(("data", "context", "tensor", "pipe"), mesh, strict=True)]
    sizes = (
        f"train.global_batch_sequences={rows}",
        f"train.microbatch_sequences={rows // mesh[0] // microbatches}",
        f"train.sequence_length={length}",
    )
    arrays = unequal_batch(0, (1, rows, length), ends=1)
    config = config_of(*axes, *sizes, f"parallel.zero={zero}", *more)
    return Run(config, lambda seed: {name: x.reshape(microbatches, -1, length) for name, x in arrays.items()})


def unpadded(table, tree):
    """Master arrays in the shapes of the train step. What ZeRO adds so that a dim divides must be 0."""

    def cut(parameter, x):
        kept = x[tuple(slice(size) for size in parameter.shape)]
        assert np.count_nonzero(x) == np.count_nonzero(kept), parameter.path
        return kept

    return jax.tree.map(cut, table, jax.device_get(tree))


def in_one_stack(config, tree):
    """Layers in one stack, without identity layers, which must be 0."""
    stacking = stacking_of(config)

    def plain(x):
        rows = np.asarray(x).reshape(-1, *x.shape[len(stacking.shape) :])
        assert (rows[stacking.layers :] == 0).all()
        return np.asarray(stacking.plain(np.asarray(x)))

    return over_layers(plain, jax.device_get(tree))


def trimmed(gradients, vocab_size):
    """The array without the rows that pad the vocabulary. Their gradient must be 0."""

    def trim(path, g):
        if path[0].key not in ("embedding", "head"):
            return g
        assert (g[vocab_size:] == 0).all()
        return g[:vocab_size]

    return jax.tree_util.tree_map_with_path(trim, jax.device_get(gradients))


def assert_close(found, expected, tolerance):
    """Compares each array by relative error in the Euclidean norm."""

    def close(path, a, b):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(close, found, expected)
