"""Mixtures of experts on every kind of mesh: loss and gradients equal one device's, with uneven and empty experts."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import assert_close, run_of_one_batch

from jaxllm.model import layers

ROWS, S = 24, 16
NETWORK = (
    *("model.num_layers=3", "model.vocab_size=258", "model.num_experts=6", "model.experts_per_token=2"),
    *("model.intermediate_size=24", "model.balance_loss_weight=0.3", "model.router_z_loss_weight=0.02"),
    *("model.normalize_expert_weights=true", "model.qk_norm=head"),
)
CASES = [
    # data, context, tensor, pipe; ZeRO; microbatches
    ((8, 1, 1, 1), 0, 1, "parallel.remat=selective"),
    ((4, 1, 2, 1), 1, 2, "parallel.remat=none"),
    ((3, 1, 1, 1), 1, 1, "model.scan_layers=false"),
    ((2, 1, 4, 1), 3, 2, "parallel.remat=full"),
    ((1, 2, 2, 1), 2, 2, "parallel.remat=offload"),
    ((2, 2, 1, 1), 3, 1, "parallel.context_method=all_gather"),
    ((1, 1, 2, 2), 1, 4, "parallel.remat=full"),
    ((2, 1, 1, 2), 3, 2, "model.num_layers=4 parallel.schedule=interleaved parallel.virtual_stages=2"),
    ((1, 2, 1, 2), 2, 2, "parallel.schedule=gpipe"),
    ((2, 1, 1, 1), 3, 1, "parallel.replica=2 train.microbatch_sequences=6"),
    pytest.param((2, 1, 1, 1), 3, 2, "parallel.offload_state=all", marks=pytest.mark.slow),
    # Tokens travel, in buffers that hold all.
    ((2, 1, 1, 1), 3, 2, "parallel.expert=2 parallel.expert_buffer=null"),
    ((6, 1, 1, 1), 3, 1, "parallel.expert=3 parallel.expert_buffer=null parallel.remat=full"),
    ((6, 1, 1, 1), 3, 2, "parallel.expert=2 parallel.expert_buffer=null parallel.remat=none"),
    ((2, 1, 2, 1), 3, 1, "parallel.expert=2 parallel.expert_buffer=null"),
    ((2, 1, 2, 1), 3, 1, "parallel.expert=2 parallel.expert_buffer=null train.freeze=[layers.mlp.*]"),
    (
        (2, 1, 1, 1),
        3,
        1,
        "parallel.expert=2 parallel.expert_buffer=null parallel.replica=2 model.scan_layers=false train.microbatch_sequences=6",
    ),
    # Experts and routers without gradients, as LoRA on attention leaves them.
    ((2, 1, 2, 1), 3, 2, "train.freeze=[layers.mlp.*]"),
]


@pytest.fixture(autouse=True)
def decided_routers(monkeypatch):
    """Routers whose choices are wide apart: no sum in another order makes another choice. The last experts have few rows."""
    plain = layers.parameter

    def parameter(rngs, model, spec, zero_rows=0):
        made = plain(rngs, model, spec, zero_rows)
        if spec.name != "router":
            return made
        return type(made)(jnp.array([[100.0, 80, 60, 40, 20, 0]]) * made[...], **made.get_metadata())

    monkeypatch.setattr(layers, "parameter", parameter)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    """Makes runs whose microbatches, however many, share one batch of ROWS sequences."""

    def make(mesh, *more, zero=0, microbatches=1):
        of_model = partial(tiny_config, *NETWORK)
        return run_of_one_batch(of_model, (ROWS, S), mesh, *more, zero=zero, microbatches=microbatches)

    return make


@pytest.fixture(scope="module")
def one_device(make_run):
    @functools.cache
    def gradients(*of_model):
        run = make_run((1, 1, 1, 1), *of_model)
        loss, found = run.gradients()
        return loss, run.plain(found)

    return gradients


@pytest.mark.parametrize(("mesh", "zero", "microbatches", "more"), CASES, ids=str)
def test_loss_and_gradients_equal_one_device(make_run, one_device, mesh, zero, microbatches, more):
    run = make_run(mesh, *more.split(), zero=zero, microbatches=microbatches)
    loss, gradients = run.gradients()
    expected = one_device(*(key for key in more.split() if "num_layers" in key or "freeze" in key))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(run.plain(gradients), expected[1], 1e-5)


@pytest.mark.parametrize(("mesh", "zero", "microbatches"), [((2, 2, 1, 1), 3, 1), ((1, 1, 2, 2), 1, 1)], ids=str)
def test_what_is_said_of_the_layers_equals_one_device(make_run, mesh, zero, microbatches):
    """Loads of experts too, with the batch as one microbatch."""
    found = []
    for run in (make_run((1, 1, 1, 1)), make_run(mesh, zero=zero, microbatches=microbatches)):
        with jax.set_mesh(run.mesh):
            found.append(jax.jit(run.functions.layer_norms)(run.state.params, run.place(run.batch(0))))
    assert set(found[0]) == {"layer_activation_norm", "experts_used", "expert_load_max"}
    jax.tree.map(lambda one, many: np.testing.assert_allclose(many, one, rtol=1e-4), *found)
    assert (found[0]["expert_load_max"] > 1.3).all()
    assert (found[0]["experts_used"] < 5.8).all()
