"""Loss and gradients of every mesh and ZeRO level equal one device's, and so does the loss over 20 steps."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import drawn, pairwise, with_triples
from meshes import Run, assert_close, trimmed, unequal_batch

MICROBATCHES, ROWS, S = 2, 8, 16
VARIANTS = {
    # Key-value heads: fewer than tensor ranks (1 on 2 and 4, 2 on 4), and as many. Vocabulary: 258 does not divide by 4.
    "gqa-untied": ("model.num_kv_heads=2", "model.vocab_size=258"),
    "mqa-tied": ("model.num_kv_heads=1", "model.tie_embeddings=true"),
}
MESHES = [(data, tensor) for data in (1, 2, 4, 8) for tensor in (1, 2, 4) if data * tensor <= 8]
COMBINATIONS = list(itertools.product((0, 1, 2, 3), MESHES, VARIANTS))
DEFAULT = pairwise(COMBINATIONS)


def batch(seed=0):
    return unequal_batch(seed, (MICROBATCHES, ROWS, S), ends=1)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(level, mesh, variant, *more):
        data, tensor = mesh
        axes = (f"parallel.data={data}", f"parallel.tensor={tensor}", f"parallel.zero={level}")
        sizes = ("train.global_batch_sequences=16", f"train.microbatch_sequences={8 // data}", "model.num_layers=3")
        return Run(
            tiny_config(*VARIANTS[variant], *axes, *sizes, "optimizer.learning_rate=1e-2", "train.steps=20", *more), batch
        )

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    cache = {}

    def reference(variant):
        if variant not in cache:
            run = make_run(0, (1, 1), variant)
            cache[variant] = (*run.gradients(), run.state.params)
        return cache[variant]

    return reference


def check(run, variant, one_device):
    expected_loss, expected, expected_params = one_device(variant)
    vocab = run.config.model.vocab_size
    initial = trimmed(run.state.params, vocab)
    jax.tree.map(np.testing.assert_array_equal, initial, trimmed(expected_params, vocab))
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(trimmed(gradients, vocab), trimmed(expected, vocab), 2e-6)


def parameters():
    """The cover by default; three triples, and some of the rest by the commit's hash, slow."""
    always = with_triples(COMBINATIONS, DEFAULT)
    for combination in always + drawn(COMBINATIONS, always):
        level, (data, tensor), variant = combination
        marks = () if combination in DEFAULT else (pytest.mark.slow,)
        yield pytest.param(*combination, marks=marks, id=f"zero{level}-data{data}-tensor{tensor}-{variant}")


@pytest.mark.parametrize(("level", "mesh", "variant"), parameters())
def test_loss_and_gradients_equal_one_device(make_run, one_device, level, mesh, variant):
    check(make_run(level, mesh, variant), variant, one_device)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("level", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_layer_loop_by_hand_takes_every_remat_policy(make_run, one_device, level, remat):
    check(make_run(level, (2, 2), "gqa-untied", f"parallel.remat={remat}"), "gqa-untied", one_device)


@pytest.mark.parametrize(
    ("level", "mesh"), [pytest.param(0, (2, 2), marks=pytest.mark.slow), (1, (4, 1)), (2, (4, 1)), (3, (2, 2))]
)
def test_unrolled_layers_take_every_level(make_run, one_device, level, mesh):
    """Each layer has arrays of its own: what GPUs run on meshes of data ranks."""
    check(make_run(level, mesh, "mqa-tied", "model.scan_layers=false"), "mqa-tied", one_device)


def test_a_forward_pass_in_pairs_of_layers_equals_one_device(make_run):
    """Four layers: a loop over three, as above, is not in pairs."""
    expected_loss, expected = make_run(0, (1, 1), "gqa-untied", "model.num_layers=4").gradients()
    loss, gradients = make_run(3, (4, 1), "gqa-untied", "model.num_layers=4").gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(trimmed(gradients, 258), trimmed(expected, 258), 2e-6)


def test_gradients_of_ranks_are_added_in_bfloat16_on_request(make_run, one_device):
    """Within four roundings to 8 bits, of a microbatch's gradients and of their sums."""
    run = make_run(3, (4, 1), "mqa-tied", "parallel.reduce_dtype=bfloat16")
    expected = trimmed(one_device("mqa-tied")[1], 256)
    found = trimmed(run.gradients()[1], 256)
    assert_close(found, expected, 4 * 2**-9)
    errors = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), found, expected)
    assert min(jax.tree.leaves(errors)) > 2**-12, "float32"


@pytest.fixture(scope="module")
def twenty_losses(make_run):
    return functools.cache(lambda variant: make_run(0, (1, 1), variant).losses(20))


@pytest.mark.parametrize(("level", "mesh"), [(1, (4, 2)), (3, (2, 2))])
def test_twenty_steps_equal_one_device(make_run, twenty_losses, level, mesh):
    expected = twenty_losses("gqa-untied")
    np.testing.assert_allclose(make_run(level, mesh, "gqa-untied").losses(20), expected, rtol=2e-5)
    assert expected[0] == pytest.approx(np.log(258), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "mesh", "variant"), DEFAULT[::2])
def test_twenty_steps_equal_one_device_over_half_the_cover(make_run, twenty_losses, level, mesh, variant):
    np.testing.assert_allclose(make_run(level, mesh, variant).losses(20), twenty_losses(variant), rtol=2e-5)


@pytest.mark.parametrize(
    ("level", "mesh", "scan"), [(1, (2, 4), "true"), (1, (2, 2), "false"), (3, (4, 2), "true"), (3, (4, 1), "false")]
)
def test_bfloat16_on_a_mesh_follows_float32(make_run, one_device, level, mesh, scan):
    """Collectives and casts in bfloat16, within its rounding (2^-8 a product)."""
    loss, gradients = make_run(level, mesh, "mqa-tied", "model.compute_dtype=bfloat16", f"model.scan_layers={scan}").gradients()
    expected_loss, expected, _ = one_device("mqa-tied")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    assert_close(trimmed(gradients, 256), trimmed(expected, 256), 0.02)


def test_evaluation_equals_one_device(make_run):
    totals = []
    cases = ((0, (1, 1), "true"), (1, (4, 2), "false"), (2, (4, 1), "false"), (3, (4, 2), "true"), (3, (4, 1), "false"))
    for level, mesh, scan in cases:
        run = make_run(level, mesh, "gqa-untied", f"model.scan_layers={scan}")
        with jax.set_mesh(run.mesh):
            found = jax.jit(run.functions.loss_sum)(run.state.params, run.place(batch()))
        totals.append(jnp.stack([x.astype(jnp.float32) for x in found]))
    np.testing.assert_allclose(totals[1:], [totals[0]] * (len(cases) - 1), rtol=1e-6)
