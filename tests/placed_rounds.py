"""DiLoCo's rounds of a config on eight devices, and random states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parameters import stacking_of
from jaxllm.run.rounds import Rounds
from jaxllm.train.build import build_training


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Placed:
    """The rounds of a config, and random states."""

    def __init__(self, config):
        self.config = config.resolve(8)
        self.mesh = make_mesh(self.config.parallel, jax.devices())
        self.training = build_training(self.config, self.mesh)
        self.rounds = Rounds(self.config, self.mesh, self.training.shardings)

    def state(self, seed=0, moved=1.0):
        """Weights, momentum and residuals, and replicas at a distance of `moved` from the weights."""
        rng = np.random.default_rng(seed)
        layout = self.training.layout()

        def draw(tree):
            return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)

        t = draw(layout.params)
        # Half of a change is common to all replicas.
        changes = jax.tree.map(lambda common, d: common[None] + d, draw(layout.params), draw(layout.islands.params))
        own = jax.tree.map(lambda x, d: x[None] + np.float32(moved) * d, t, changes)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), layout)
        found = dataclasses.replace(
            zeros,
            params=t,
            momentum=draw(layout.momentum) if moved else zeros.momentum,
            islands=dataclasses.replace(zeros.islands, params=own),
        )
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), found, layout)

    def outer_step(self, state, number):
        with jax.set_mesh(self.mesh):
            return self.rounds.jitted_step(jax.tree.map(jnp.copy, state), np.int32(number))

    def text(self):
        with jax.set_mesh(self.mesh):
            return self.rounds.jitted_step.lower(self.training.layout(), np.int32(0)).compile().as_text()


def belongs(placed, number, tree, leading=0):
    """Which numbers of a tree belong to a fragment: every F-th layer, and every F-th row of the rest."""
    stack_dims, count = len(stacking_of(placed.config).shape), placed.config.train.diloco_fragments

    def mask(path, x):
        dim = leading + (stack_dims - 1 if path[0].key == "layers" else 0)
        rows = np.arange(x.shape[dim]) % count == number
        return np.broadcast_to(np.expand_dims(rows, [at for at in range(x.ndim) if at != dim]), x.shape)

    return jax.tree_util.tree_map_with_path(mask, tree)
