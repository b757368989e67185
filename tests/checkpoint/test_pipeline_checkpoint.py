"""Any pipeline reads the checkpoint of any other: layers are cut into other chunks, identity layers added or removed."""

import subprocess
import sys

import jax
import numpy as np
import outside
import pytest
from meshes import in_one_stack, unpadded

from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.mesh.axes import axis_sizes, make_mesh
from jaxllm.run.trainer import Trainer
from jaxllm.train.build import build_training
from jaxllm.weights.weights import find_weights, read_weights

ONE = ("parallel.data=1",)
TWO = ("parallel.pipe=2", "parallel.data=2")
FOUR = ("parallel.pipe=4", "parallel.data=2", "parallel.zero=3")
HALVES = ("parallel.pipe=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved", "parallel.data=2")
THIRDS = ("parallel.pipe=2", "parallel.virtual_stages=3", "parallel.schedule=interleaved", "parallel.data=2", "parallel.zero=3")
ON_HOST = (*HALVES, "parallel.offload_state=optimizer_and_master")
# ZeRO pads what does not divide over three ranks.
THREE = (*THIRDS, "parallel.data=3", "train.global_batch_sequences=6")
# All pipelines but the first pad the 11 layers to 12.
PIPELINES = {"one": ONE, "two": TWO, "four": FOUR, "halves": HALVES, "thirds": THIRDS, "on the host": ON_HOST, "three": THREE}
PAIRS = [
    *[("one", "halves"), ("halves", "one"), ("halves", "thirds"), ("thirds", "four"), ("four", "two"), ("two", "on the host")],
    *[("on the host", "three"), ("three", "two"), ("thirds", "one")],
]


@pytest.fixture(scope="module")
def state_of(tiny_config):
    """pipeline -> (config, its training functions, a state in which all numbers differ), made once."""
    cache = {}

    def make(name):
        if name not in cache:
            sizes = ("model.num_layers=11", "train.global_batch_sequences=8", "train.microbatch_sequences=1")
            config = tiny_config(*sizes, *PIPELINES[name])
            devices = jax.devices()[: np.prod(list(axis_sizes(config.parallel).values()))]
            mesh = make_mesh(config.parallel, devices)
            training = build_training(config, mesh)
            with jax.set_mesh(mesh):
                state = training.create_state(0)
            # Moments as after a step: as large as the parameters, and 0 where those are 0.
            stages = iter(range(1, 100))
            is_tree = lambda x: isinstance(x, dict)  # noqa: E731
            fill = lambda x: jax.tree.map(lambda p, n=next(stages): n * p, state.params) if is_tree(x) else x  # noqa: E731
            opt_state = jax.tree.map(fill, state.opt_state, is_leaf=is_tree)
            state = jax.device_put(type(state)(state.step, state.params, opt_state), training.shardings)
            cache[name] = config, training, state
        return cache[name]

    return make


def trees(config, training, state):
    """Parameters and both moments."""
    is_tree = lambda x: isinstance(x, dict)  # noqa: E731
    found = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_tree) if is_tree(x)]
    assert len(found) == 2
    return [in_one_stack(config, unpadded(training.functions.table, tree)) for tree in (state.params, *found)]


@pytest.mark.parametrize(("saved", "read"), PAIRS)
def test_every_pipeline_reads_every_others_checkpoint(state_of, tmp_path, saved, read):
    config, theirs, state = state_of(saved)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, state, describe_run(config, 3, ""))
    checkpoints.wait()
    checkpoints.close()
    other, training, like = state_of(read)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, training.shardings)
    found = Checkpoints(tmp_path, CheckpointConfig()).restore(shapes, training.functions.table)
    jax.tree.map(lambda x, s: s.is_equivalent_to(x.sharding, x.ndim) or pytest.fail(str(x.sharding)), found, training.shardings)
    for ours, read in zip(trees(config, theirs, state), trees(other, training, found), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, read)


def test_weights_are_exported_from_virtual_stages_and_taken_up_by_others(state_of, tmp_path):
    config, training, state = state_of("three")
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    checkpoints.save(3, state, describe_run(config, 3, ""))
    checkpoints.wait()
    checkpoints.close()
    # On one device, so in a new process.
    command = [sys.executable, "-m", "jaxllm.cli", "export", str(tmp_path / "run"), str(tmp_path / "weights")]
    subprocess.run(command, check=True, env=outside.environment(), timeout=100)
    other, of_others, _ = state_of("thirds")
    source = find_weights("train.init_from", str(tmp_path / "weights"))
    found = read_weights(source, of_others.functions.master, of_others.functions.table)
    ours = in_one_stack(config, unpadded(training.functions.table, state.params))
    jax.tree.map(np.testing.assert_array_equal, ours, in_one_stack(other, found))


def test_a_model_of_other_layers_is_refused(tiny_config, state_of, tmp_path):
    """Identity layers are added and removed without a message; real layers are not."""
    config, _, state = state_of("two")
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, state, describe_run(config, 3, ""))
    checkpoints.wait()
    checkpoints.close()
    trainer = Trainer(tiny_config("model.num_layers=5"))
    with pytest.raises(ConfigError, match=r"has a model with model.num_layers=11, not 5: set model.num_layers=11"):
        trainer.restore(Checkpoints(tmp_path, CheckpointConfig()))
