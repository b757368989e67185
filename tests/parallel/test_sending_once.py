"""ZeRO 0 and 1: weights that the first microbatch gathers and gradients that the last one reduces, a layer at a time, equal
those of one device.
"""

import functools
from unittest import mock

import jax
import numpy as np
import pytest
from meshes import Run, assert_close, unequal_batch

from jaxllm.mesh.axes import CONTEXT, DATA, TENSOR
from jaxllm.parallel import parallelize

ROWS, S = 24, 16
MODELS = {
    "untied": ("model.num_kv_heads=2", "model.vocab_size=258"),
    "tied": ("model.num_kv_heads=1", "model.tie_embeddings=true"),
}
LOOP, UNROLLED = "model.scan_layers=true", "model.scan_layers=false"
# With SEVERAL and test_a_model_of_one_layer, all pairs of one or several microbatches, loops, models, and the last column, but
# not (tied, offload), (untied, full), (UNROLLED, offload), nor num_layers=1 with tied or UNROLLED.
CASES = [
    ((4, 1, 2), "untied", LOOP, "parallel.remat=offload"),
    # Stored matrices that end with zeros, as 32, 64 and 258 do not divide by 3 or 6.
    ((3, 2, 1), "tied", LOOP, "parallel.remat=none"),
    ((3, 1, 2), "tied", UNROLLED, "parallel.remat=selective"),
    ((4, 1, 1), "tied", UNROLLED, "parallel.remat=full"),
    ((4, 1, 1), "tied", UNROLLED, "parallel.replica=2"),
    ((4, 1, 1), "untied", UNROLLED, "parallel.zero=0"),
]
SEVERAL = [
    (2, (8, 1, 1), "untied", LOOP, "parallel.remat=selective"),
    (3, (2, 2, 2), "tied", LOOP, "parallel.remat=full"),
    (4, (3, 1, 2), "untied", LOOP, "parallel.remat=offload"),
    (2, (2, 1, 2), "untied", LOOP, "parallel.replica=2"),
    (3, (2, 2, 2), "tied", LOOP, "parallel.zero=0"),
    (2, (4, 1, 1), "untied", LOOP, "model.num_layers=1"),
    (2, (4, 1, 1), "tied", UNROLLED, "parallel.remat=selective"),
    (3, (3, 2, 1), "untied", UNROLLED, "parallel.remat=none"),
    (3, (2, 1, 2), "untied", UNROLLED, "parallel.zero=0"),
]


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(mesh, model, *more, level=1, microbatches=1):
        axes = [f"parallel.{axis}={size}" for axis, size in zip((DATA, CONTEXT, TENSOR), mesh, strict=True)]
        # A ring gathers nothing and reduces nothing, so that `sends_inside` sees what ZeRO sends.
        axes += ["parallel.context_method=ring"] if mesh[1] > 1 else []
        replicas = 2 if "parallel.replica=2" in more else 1
        batch = (
            f"train.global_batch_sequences={microbatches * ROWS}",
            f"train.microbatch_sequences={ROWS // mesh[0] // replicas}",
        )
        sizes = (f"train.sequence_length={S}", "model.num_layers=3", "optimizer.learning_rate=1e-2")
        config = tiny_config(*MODELS[model], *axes, *batch, *sizes, f"parallel.zero={level}", *more)
        return Run(config, functools.partial(unequal_batch, shape=(microbatches, ROWS, S), ends=1))

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    return functools.cache(lambda model, *more, **sizes: make_run((1, 1, 1), model, *more, level=0, **sizes).gradients())


def sends_inside(run):
    """Whether the region reduces itself, and gathers at ZeRO 1. Otherwise XLA does, outside it, and the jaxpr shows nothing."""
    region = mock.patch.object(parallelize, "once_gradient_region", wraps=parallelize.once_gradient_region)
    with jax.set_mesh(run.mesh), region as made:
        text = str(jax.make_jaxpr(run.functions.value_and_grad)(run.state.params, run.place(run.batch(0))))
    if run.config.parallel.zero == 0:
        return made.called and "psum[" in text.split("scan[", 1)[1]
    return made.called and "all_gather[" in text and "reduce_scatter[" in text


def check(run, expected, sends):
    assert sends_inside(run) == sends
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(run.plain(gradients), jax.device_get(expected[1]), 2e-6)


@pytest.mark.parametrize(("mesh", "model", "layers", "more"), CASES, ids=str)
def test_loss_and_gradients_equal_one_device(make_run, one_device, mesh, model, layers, more):
    check(make_run(mesh, model, layers, more), one_device(model), sends=True)


@pytest.mark.parametrize(("microbatches", "mesh", "model", "layers", "more"), SEVERAL, ids=str)
def test_several_microbatches_equal_one_device(make_run, one_device, microbatches, mesh, model, layers, more):
    of_model = (more,) if more.startswith("model.") else ()
    expected = one_device(model, *of_model, microbatches=microbatches)
    # Unrolled layers do so without documents that XLA's attention computes in blocks (layer_stack.sends_once).
    documents = f"data.mask_documents={str(layers == LOOP).lower()}"
    check(make_run(mesh, model, layers, more, documents, microbatches=microbatches), expected, sends=True)


def test_unrolled_layers_with_documents_in_blocks_send_at_both_ends(make_run, one_device):
    run = make_run((4, 1, 1), "tied", UNROLLED, microbatches=2)
    check(run, one_device("tied", microbatches=2), sends=False)


def test_a_model_of_one_layer(make_run):
    """The loops over the other layers are empty."""
    one_layer = "model.num_layers=1"
    check(
        make_run((4, 1, 1), "untied", LOOP, one_layer),
        make_run((1, 1, 1), "untied", one_layer, level=0).gradients(),
        sends=True,
    )


def test_the_same_functions_take_several_microbatches(make_run, one_device):
    """As in a run whose batch grows from one microbatch to two."""
    run = make_run((4, 1, 1), "tied", LOOP)
    run.batch = functools.partial(unequal_batch, shape=(2, ROWS, S), ends=1)
    check(run, one_device("tied", microbatches=2), sends=True)


def test_a_step_that_measures_the_noise_scale_has_the_same_gradients(make_run, one_device):
    run, expected = make_run((4, 1, 2), "untied", LOOP), one_device("untied")
    with jax.set_mesh(run.mesh):
        loss, gradients, _ = jax.jit(run.functions.value_grad_and_parts)(run.state.params, run.place(run.batch(0)))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(run.plain(gradients), jax.device_get(expected[1]), 2e-6)


@pytest.fixture(scope="module")
def losses_of_one_device(make_run):
    return make_run((1, 1, 1), "tied", level=0).losses(3)


@pytest.mark.parametrize("layers", [LOOP, UNROLLED])
def test_steps_with_state_on_the_host_equal_one_device(make_run, losses_of_one_device, layers):
    run = make_run((3, 2, 1), "tied", layers, "parallel.offload_state=optimizer_and_master")
    assert sends_inside(run)
    np.testing.assert_allclose(run.losses(3), losses_of_one_device, rtol=1e-5)
