"""Expert parallelism: tokens that travel give what those that stay give, but for rows that find no place, which are counted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import run_of_one_batch

from jaxllm.config import ConfigError
from jaxllm.mesh.axes import DATA
from jaxllm.model.experts import Routes, deliver_here, expert_mlp, grouped_matmul
from jaxllm.parallel.expert_parallel import DeliverToRanks, alike, neighbours
from jaxllm.run.messages import who_dropped

T, K, E, D, F = 20, 2, 8, 8, 16
"""Tokens of a rank."""
MESHES = [(2, 2), (4, 2), (4, 4), (8, 2)]
"""data, expert"""


def inputs(data):
    """Tokens, their experts and weights, for all ranks; and the experts' matrices. Most rows go to the first experts; the last
    has none."""
    random = np.random.default_rng(data)
    preferred = np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0])
    ids = np.array([random.choice(E, K, replace=False, p=preferred) for _ in range(data * T)], np.int32)
    shapes = (data * T, D), (data * T, K), (E, D, F), (E, D, F), (E, F, D)
    x, weights, *matrices = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    return x, ids, weights, matrices


def kept_rows(ids, data, expert, capacity):
    """A loop over each rank's rows: whether one is among the first `capacity` that go to its rank, sorted by expert."""
    kept = np.zeros(ids.shape, bool)
    computes = {}
    for place, ranks in enumerate(alike(data, expert)):
        for number, rank in enumerate(ranks):
            computes |= {rank * (E // data) + i: (place, number * (E // data) + i) for i in range(E // data)}
    for rank in range(data):
        of_rank = range(rank * T, (rank + 1) * T)
        rows = sorted((computes[ids[t, k]], t, k) for t in of_rank for k in range(K))
        for place in range(expert):
            for _, t, k in [row for row in rows if row[0][0] == place][:capacity]:
                kept[t, k] = True
    return kept


def mlp(deliver, x, ids, weights, matrices):
    routes = Routes(ids[None], weights[None])
    return expert_mlp(jax.nn.silu, grouped_matmul, deliver, x[None], routes, *matrices)[0]


def travelling(data, expert, buffer):
    """(x, ids, weights, matrices) -> (result, rows dropped on all ranks)"""
    deliver = DeliverToRanks(E, data, expert, buffer)
    mesh = jax.make_mesh((data,), (DATA,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:data])

    def local(x, ids, weights, matrices):
        if data > expert:
            gather = lambda w: jax.lax.all_gather(w, DATA, tiled=True, axis_index_groups=alike(data, expert))  # noqa: E731
            matrices = [gather(w) for w in matrices]
        return mlp(deliver, x, ids, weights, matrices), jax.lax.psum(deliver.rows_dropped(ids[None]), DATA)

    return jax.shard_map(local, mesh=mesh, in_specs=P(DATA), out_specs=(P(DATA), P()), check_vma=False)


@pytest.mark.parametrize(("data", "expert"), MESHES)
def test_groups_are_neighbours_and_cover_all_ranks(data, expert):
    for groups in (near := neighbours(data, expert), same := alike(data, expert)):
        assert sorted(rank for group in groups for rank in group) == list(range(data))
    assert all(max(group) - min(group) == expert - 1 for group in near)
    # A rank meets each rank that has other experts once, and none that has the same ones.
    assert all(len(set(group) & set(others)) == 1 for group in near for others in same)


@pytest.mark.parametrize(("data", "expert", "buffer"), [(2, 2, 1.0), (4, 2, 1.0), (4, 4, 1.0), (8, 2, None), (4, 4, None)])
def test_rows_travel_and_those_without_a_place_count_for_nothing(data, expert, buffer):
    """Result and gradients equal those of all experts here, with a weight of 0 for each row that is dropped."""
    x, ids, weights, matrices = inputs(data)
    capacity = T * K if buffer is None else -(-int(np.ceil(buffer * T * K / expert)) // 8) * 8
    kept = kept_rows(ids, data, expert, capacity)
    there = travelling(data, expert, buffer)
    slopes = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def of(function):
        loss = lambda x, weights, matrices: jnp.vdot(slopes, function(x, weights, matrices))  # noqa: E731
        return jax.jit(lambda *of: (function(*of), jax.grad(loss, argnums=(0, 1, 2))(*of)))(x, weights, matrices)

    found = of(lambda x, weights, matrices: there(x, ids, weights, matrices)[0])
    expected = of(lambda x, weights, matrices: mlp(deliver_here, x, ids, jnp.where(kept, weights, 0), matrices))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    assert int(jax.jit(there)(x, ids, weights, matrices)[1]) == (~kept).sum()
    assert (buffer is None) == kept.all()


NETWORK = (
    *("model.num_layers=3", "model.vocab_size=258", "model.num_experts=8", "model.experts_per_token=2"),
    *("model.intermediate_size=24", "model.hidden_size=48"),
)
TOKENS, HIDDEN = 4 * 16, 48


@pytest.fixture(scope="module")
def run_of(tiny_config):
    def run(data, *more):
        def config_of(*keys):
            return tiny_config(*NETWORK, *keys)

        return run_of_one_batch(config_of, (4 * data, 16), (data, 1, 1, 1), *more, zero=3, microbatches=1)

    return run


def test_two_all_to_alls_a_layer_and_pass_and_no_gather_of_experts(run_of):
    """Rows take two; their weights and counts go beside them. With as many ranks as data has, each keeps its experts."""
    run = run_of(4, "parallel.expert=4", "parallel.expert_buffer=1.5", "parallel.remat=none")
    with jax.set_mesh(run.mesh):
        text = jax.jit(run.functions.value_and_grad).lower(run.state.params, run.place(run.batch(0))).as_text()
    slots = 4 * int(1.5 * TOKENS * 2 / 4)
    sent = re.findall(r'"stablehlo.all_to_all".*-> tensor<(\S+)>', text)
    assert sent.count(f"{slots}x{HIDDEN}xf32") == 4
    assert set(sent) == {f"{slots}x{HIDDEN}xf32", f"{slots}x1xf32", "4x2xi32"}
    gathered = re.findall(r'"stablehlo.all_gather".*-> tensor<(\S+)>', text)
    assert gathered
    assert not [shape for shape in gathered if re.search(r"(^|x)(24x48|48x24)x", shape)]
    assert f"{slots}x24xf32" in text


def test_dropped_rows_are_in_the_metrics_and_said(run_of):
    run = run_of(4, "parallel.expert=2", "parallel.expert_buffer=1.0")
    with jax.set_mesh(run.mesh):
        found = jax.jit(run.functions.layer_norms)(run.state.params, run.place(run.batch(0)))
    shares = found["expert_rows_dropped"]
    assert shares.shape == (3,)
    assert ((shares > 0) & (shares < 0.5)).all()
    record = {"step": 7} | {f"expert_rows_dropped/{layer}": float(share) for layer, share in enumerate(shares)}
    worst = int(jnp.argmax(shares))
    assert who_dropped(record, run.config.parallel) == (
        shares[worst],
        f"step 7: layer {worst} drops {100 * shares[worst]:.2g}% of its rows, whose tokens do without that expert: raise "
        f"parallel.expert_buffer=1.0, or set parallel.expert_buffer=null",
    )
    # Said again when it is far worse.
    assert who_dropped(record, run.config.parallel, float(shares[worst]) / 2.5) is not None
    assert who_dropped(record, run.config.parallel, float(shares[worst]) / 1.5) is None
    assert who_dropped({"step": 7, "expert_rows_dropped/0": 0.0}, run.config.parallel) is None
    assert who_dropped({"step": 7}, run.config.parallel) is None


REFUSED = {
    "model.num_experts=null model.experts_per_token=null": "parallel.expert=2 has no effect without model.num_experts",
    "parallel.zero=1": "parallel.expert=2 does not go together with parallel.zero=1: set zero=3, or expert=1.",
    "parallel.context=2": "does not go together with parallel.context=2: set context=1",
    "parallel.pipe=3": "does not go together with parallel.pipe=3: set pipe=1",
    "log.noise_scale_every=5": "log.noise_scale_every=5: set noise_scale_every=null",
    "parallel.data=3": "must divide parallel.data=3, which must divide model.num_experts=8: change one of them.",
    "model.num_experts=6": "must divide parallel.data=4, which must divide model.num_experts=6: change one of them.",
    "train.batch_grows_to=48": "does not go together with train.batch_grows_to=48: set batch_grows_to=null",
    "parallel.offload_state=all": "rows, which a run does not count with parallel.offload_state=all: set expert_buffer=null",
    "train.freeze=[layers.*]": "rows, which a run does not count with train.freeze of all layers: set expert_buffer=null",
}


def test_ranks_that_a_machine_decides_are_checked_too(tiny_config):
    config = tiny_config(*NETWORK, "parallel.zero=3", "parallel.expert=4", "train.global_batch_sequences=24")
    assert config.resolve(8).parallel.data == 8
    with pytest.raises(
        ConfigError, match=re.escape("parallel.expert=4 must divide parallel.data=2, which must divide model.num_")
    ):
        config.resolve(2)


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_it_does_not_go_with_is_refused_by_name(tiny_config, overrides):
    keys = ("parallel.data=4", "parallel.zero=3", "parallel.expert=2", "train.global_batch_sequences=24")
    with pytest.raises(ConfigError, match=re.escape(REFUSED[overrides])):
        tiny_config(*NETWORK, *keys, *overrides.split())
