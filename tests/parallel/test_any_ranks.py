"""ZeRO over numbers of ranks that divide no dim: the stored arrays end with zeros, which nothing reads and nothing changes."""

import functools
import itertools
import subprocess
import sys

import jax
import numpy as np
import outside
import pytest
from covers import pairwise
from meshes import Run, assert_close, unequal_batch

from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.config import CheckpointConfig, config_folder
from jaxllm.config.types import zero_shard
from jaxllm.mesh.sharding import stack_dims

S, MICROBATCHES = 24, 4
# None of 32, 64, 8 and 262 divides by these.
MESHES = [(3, 1, 1, 1), (3, 2, 1, 1), (7, 1, 1, 1), (3, 1, 2, 1), (3, 1, 1, 2)]
LARGE = [(12, 1, 1, 1), (6, 1, 1, 2), (3, 1, 2, 2), (3, 2, 2, 1)]
MODELS = ("model.vocab_size=262", "model.tie_embeddings=true")
CASES, LARGE_CASES = (pairwise(list(itertools.product((1, 2, 3), meshes, MODELS))) for meshes in (MESHES, LARGE))


def rows_of(data):
    """Sequences of a microbatch of all ranks: one number for several meshes, so that one device computes it once."""
    return data if data == 7 else 12


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(level, mesh, *more):
        data, context, tensor, pipe = mesh
        rows = rows_of(data)
        axes = (f"parallel.data={data}", f"parallel.context={context}", f"parallel.tensor={tensor}", f"parallel.pipe={pipe}")
        batch = (f"train.global_batch_sequences={MICROBATCHES * rows}", f"train.microbatch_sequences={rows // data}")
        sizes = (f"train.sequence_length={S}", "model.num_layers=3", "optimizer.learning_rate=1e-2")
        config = tiny_config(*axes, *batch, *sizes, f"parallel.zero={level}", *more)
        return Run(config, functools.partial(unequal_batch, shape=(MICROBATCHES, rows, S), ends=1))

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    @functools.cache
    def gradients(data, *more):
        # The sequences of this number of ranks, all on one.
        rows = rows_of(data)
        run = make_run(0, (1, 1, 1, 1), *more, f"train.global_batch_sequences={MICROBATCHES * rows}",
                       f"train.microbatch_sequences={rows}")  # fmt: skip
        run.batch = functools.partial(unequal_batch, shape=(MICROBATCHES, rows, S), ends=1)
        return run.gradients()

    return gradients


def is_padded(run):
    """Every matrix of the layers."""
    pairs = zip(*map(jax.tree.leaves, (run.functions.table["layers"], run.functions.master["layers"])), strict=True)
    return all(
        parameter.shape != stored.shape for parameter, stored in pairs if len(parameter.dims) - stack_dims(parameter.dims) > 1
    )


def named(cases):
    return [pytest.param(*case, id=f"zero{case[0]}-{'x'.join(map(str, case[1]))}-{case[2].split('.')[1]}") for case in cases]


@pytest.mark.parametrize(("level", "mesh", "model"), named(CASES))
def test_loss_and_gradients_equal_one_device(make_run, one_device, level, mesh, model):
    check(make_run(level, mesh, model), one_device, mesh, model)


@pytest.mark.skipif(jax.device_count() < 12, reason="run by test_twelve_devices")
@pytest.mark.parametrize(("level", "mesh", "model"), named(LARGE_CASES))
def test_loss_and_gradients_on_twelve_devices(make_run, one_device, level, mesh, model):
    check(make_run(level, mesh, model), one_device, mesh, model)


def check(run, one_device, mesh, model):
    assert is_padded(run)
    expected_loss, expected = one_device(mesh[0], model)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(run.plain(gradients), jax.device_get(expected), 2e-6)


def test_a_replica_with_weights_of_its_own(make_run, one_device):
    """DiLoCo: gradients have a leading replica dim."""
    run = make_run(1, (7, 1, 1, 1), MODELS[0], "train.diloco_steps=2", "train.steps=4")
    assert is_padded(run)
    with jax.set_mesh(run.mesh):
        found = jax.jit(run.functions.value_and_grad)(run.state.islands.params, run.place(run.batch(0)))
    loss, gradients = jax.tree.map(lambda x: x[0], found)
    expected_loss, expected = one_device(7, MODELS[0])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(run.plain(gradients), jax.device_get(expected), 2e-6)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() > 8, reason="this is the process it starts")
def test_twelve_devices():
    command = [sys.executable, "-m", "pytest", "-v", "-k", "test_loss_and_gradients_on_twelve_devices", __file__]
    environment = outside.environment(JAXLLM_TEST_DEVICES="12")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=config_folder().parent, timeout=500)
    assert result.returncode == 0, result.stdout[-4000:]
    assert f"{len(LARGE_CASES)} passed" in result.stdout


@pytest.mark.parametrize(
    ("level", "mesh", "more"),
    [
        (1, (3, 1, 1, 1), ("model.scan_layers=false",)),
        (1, (3, 1, 2, 1), ("parallel.offload_state=optimizer_and_master",)),
        (2, (3, 1, 1, 1), ("parallel.replica=2", "train.microbatch_sequences=2")),
    ],
    ids=["unrolled", "on the host", "replicas"],
)
def test_steps_leave_the_zeros_zero(make_run, twelve_rows, level, mesh, more):
    """In weights and moments, with weight decay and clipping."""
    run = make_run(level, mesh, MODELS[0], "train.steps=4", *more)
    assert is_padded(run)
    np.testing.assert_allclose(run.losses(4), twelve_rows, rtol=1e-5)
    trees = [run.state.params, *(x for x in jax.tree.leaves(run.state.opt_state, is_leaf=is_tree) if is_tree(x))]
    assert len(trees) == 3
    jax.tree.map(run.plain, trees, is_leaf=is_tree)


def is_tree(x):
    return isinstance(x, dict)


@pytest.fixture(scope="module")
def twelve_rows(make_run):
    """Losses of one device."""
    return make_run(0, (1, 1, 1, 1), MODELS[0], "train.steps=4", "train.microbatch_sequences=12").losses(4)


# --------------------------------------------------------------------------------------------------------------- checkpoints

SEQUENCES = 168


@pytest.fixture(scope="module")
def of_ranks(tiny_config):
    """Makes runs on numbers of ranks, all with the same batches."""
    batch = functools.partial(unequal_batch, shape=(1, SEQUENCES, 8), ends=1)

    def make(ranks, level):
        sizes = (f"train.global_batch_sequences={SEQUENCES}", f"train.microbatch_sequences={SEQUENCES // ranks}")
        rates = ("train.sequence_length=8", "train.steps=8", "optimizer.learning_rate=1e-2", *MODELS[:1])
        return Run(tiny_config(*sizes, *rates, f"parallel.data={ranks}", f"parallel.zero={level}"), batch)

    return make


def test_a_run_goes_on_with_other_ranks(of_ranks, tmp_path):
    """Eight steps on 8 ranks equal two each on 8, 7, 6 and 8, each from the checkpoint of the one before, bit for bit as it was
    saved."""
    expected, found, before = of_ranks(8, 1).losses(8), [], None
    for ranks, level in ((8, 3), (7, 1), (6, 2), (8, 3)):
        run = of_ranks(ranks, level)
        if before is not None:
            layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state)
            run.state = Checkpoints(tmp_path, CheckpointConfig()).restore(layout, run.functions.table)
            jax.tree.map(np.testing.assert_array_equal, run.plain(run.state.params), before)
        run.first = len(found)
        found += run.losses(2)
        before = run.plain(run.state.params)
        checkpoints = Checkpoints(tmp_path, CheckpointConfig())
        checkpoints.save(len(found), run.state, describe_run(run.config, len(found), ""))
        checkpoints.wait()
        checkpoints.close()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_first_dim_with_few_zeros_is_padded_else_the_one_with_fewest():
    of_matrix = functools.partial(zero_shard, is_matrix=True)
    sizes = {"mlp": 14336, "embed": 4096, "head_dim": 128}
    assert of_matrix(sizes, {}, 256) == ("embed", 0)
    assert of_matrix(sizes, {}, 56) == ("mlp", 0)
    assert of_matrix(sizes, {}, 12) == ("embed", 8)
    assert of_matrix({"vocab": 12, "embed": 4096}, {}, 12) == ("embed", 8)
    assert of_matrix({"vocab": 1000, "embed": 10}, {}, 1000) == ("vocab", 0)
    # 904 zeros are too many of 4096, and 664 fewer of 14336.
    assert of_matrix(sizes, {}, 1000) == ("mlp", 664)
    assert of_matrix({"heads": 8, "embed": 4096}, {"embed": 2}, 12) == ("heads", 4)
    # A norm's scale, and what other axes split, stay as they are.
    assert zero_shard({"layers": 8, "embed": 4096}, {}, 12, is_matrix=False) is None
    assert of_matrix({"vocab": 8, "embed": 12}, {"vocab": 2, "embed": 2}, 12) is None
    assert of_matrix({"layers": 8}, {}, 12) is None
