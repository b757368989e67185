"""Each optimizer.name is optax's optimizer, and every mesh updates like one device."""

import math
import re
from collections import Counter

import jax
import optax
import optax.contrib
import pytest
from meshes import Run, assert_close, unequal_batch
from optax.contrib import MuonDimensionNumbers as Dims

from jaxllm.cost_model.flops import moments_per_parameter, parameter_count, state_bytes
from jaxllm.cost_model.memory import Step
from jaxllm.mesh.axes import axis_sizes, make_mesh
from jaxllm.train.build import build_training
from jaxllm.train.optimizer import make_optimizer
from jaxllm.train.step import make_update

RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-5
"""With optax's 1e-8, gradients that are rounding errors make steps of full size and of either sign: errors of 2e-4."""
FLAT = (
    f"optimizer.learning_rate={RATE}",
    f"optimizer.epsilon={EPSILON}",
    "optimizer.schedule=constant",
    "optimizer.clip_norm=null",
    "model.hidden_size=36",
    "model.head_dim=10",
)
"""A width of 36 over eight ranks: ZeRO pads it."""
INTERLEAVED = ("model.num_layers=4", "parallel.schedule=interleaved", "parallel.pipe=2", "parallel.virtual_stages=2")
MESHES = {
    "muon": (8, ("parallel.zero=3",)),
    "muon in an interleaved pipeline": (2, (*INTERLEAVED, "parallel.tensor=2")),
    "lion": (2, ("parallel.pipe=2", "parallel.tensor=2")),
    "sgd": (4, ("parallel.context=2", "parallel.zero=2", "parallel.offload_state=optimizer")),
}
MATRICES = {"query": Dims(1, (2, 3)), "key": Dims(1, (2, 3)), "value": Dims(1, (2, 3)), "out": Dims((1, 2), 3)}
MATRICES |= {name: Dims(1, 2) for name in ("gate", "up", "down")}


def batch(seed):
    return unequal_batch(seed, (2, 8, 16), least=0.2)


def of_optax(name, params):
    """optax's optimizer with its own learning rate and weight decay."""
    keys = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)
    decayed = jax.tree.map(lambda key: key in (*MATRICES, "embedding", "head"), keys)
    if name == "muon":
        dims = jax.tree.map(MATRICES.get, keys)
        muon = {"weight_decay": DECAY, "consistent_rms": 0.2, "muon_weight_dimension_numbers": dims}
        both = optax.contrib.muon(RATE, **muon), optax.adamw(RATE, 0.9, 0.95, EPSILON, weight_decay=DECAY, mask=decayed)

        def update(gradients, states, params):
            updates, states = zip(*(x.update(gradients, own, params) for x, own in zip(both, states, strict=True)), strict=True)
            return jax.tree.map(lambda key, m, a: m if key in MATRICES else a, keys, *updates), states

        # optax's Muon would give the rest to Adam with Nesterov's momentum.
        return optax.GradientTransformation(lambda params: tuple(x.init(params) for x in both), update)
    if name == "lion":
        return optax.lion(RATE, 0.9, 0.95, weight_decay=DECAY, mask=decayed)
    return optax.chain(optax.trace(0.95), optax.add_decayed_weights(DECAY, decayed), optax.scale(-RATE))


@pytest.mark.parametrize("case", MESHES)
def test_it_is_optaxs_on_every_mesh(tiny_config, case):
    name = case.split()[0]

    def make(data=1, *overrides):
        sizes = (f"parallel.data={data}", "train.global_batch_sequences=16", f"train.microbatch_sequences={8 // data}")
        return Run(tiny_config(*FLAT, f"optimizer.name={name}", *sizes, *overrides), batch)

    data, overrides = MESHES[case]
    model = [key for key in overrides if key.startswith("model.")]
    one, run = make(1, *model), make(data, *overrides)
    optimizer = of_optax(name, one.state.params)

    @jax.jit
    def step(params, state, arrays):
        _, gradients = one.functions.value_and_grad(params, arrays)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = one.state.params, optimizer.init(one.state.params)
    with jax.set_mesh(one.mesh):
        for seed in range(3):
            params, state = step(params, state, one.place(batch(seed)))
    expected = one.plain(params)
    run.losses(3)
    assert_close(run.plain(run.state.params), expected, 1e-5)


@pytest.mark.parametrize(
    "mesh", [("parallel.data=8",), ("parallel.data=2", "parallel.context=2", "parallel.tensor=2")], ids=str
)
def test_muon_sends_matrices_to_their_owner_and_back(tiny_config, mesh):
    """Twice a stack of matrices, and twice more over tensor; nothing is gathered over data."""
    config = tiny_config("optimizer.name=muon", "parallel.zero=1", *mesh).resolve(8)
    devices = make_mesh(config.parallel, jax.devices())
    training = build_training(config, devices)
    optimizer = make_optimizer(config, training.functions.table, mesh=devices)
    state, number = training.layout(), jax.ShapeDtypeStruct((), jax.numpy.float32)
    arguments = (state.params, state.opt_state, state.params, number, jax.ShapeDtypeStruct((), bool))
    shardings = (training.shardings.params, training.shardings.opt_state)
    text = jax.jit(make_update(optimizer), out_shardings=shardings).lower(*arguments).compile().as_text()
    sent = Counter(re.findall(r" (all-gather|all-to-all|collective-permute)\(", text))
    times = 2 * (1 + (config.parallel.tensor > 1))
    assert sent == {"all-to-all": times * len(MATRICES)}


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
@pytest.mark.parametrize(
    "mesh", [(), ("parallel.pipe=2", "parallel.zero=3"), ("parallel.tensor=2", "parallel.zero=1")], ids=str
)
def test_the_estimate_knows_the_bytes_of_the_state(tiny_config, name, mesh):
    config = tiny_config(f"optimizer.name={name}", "parallel.data=4", *mesh)
    run = config.resolve(math.prod(axis_sizes(config.parallel).values()))
    devices = make_mesh(run.parallel, jax.devices()[: run.devices])
    state = build_training(run, devices).layout().opt_state
    on_a_device = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
    # Beside counters.
    assert 0 <= on_a_device - Step(run).resident()["optimizer"] < 64
    whole = 4 * (1 + moments_per_parameter(run)) * parameter_count(run.model)
    assert state_bytes(run) == pytest.approx(whole)


def test_without_momentum_sgd_keeps_nothing(tiny_config):
    config = tiny_config("optimizer.name=sgd", "optimizer.momentum=0", "parallel.data=1").resolve(1)
    assert state_bytes(config) == 4 * parameter_count(config.model)
    training = build_training(config, make_mesh(config.parallel, jax.devices()[:1]))
    assert jax.tree.leaves(training.layout().opt_state) == []
