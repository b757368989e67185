"""DiLoCo's replicas that an outer step leaves out, and those that join or leave when a run resumes."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxllm
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.mesh.axes import make_mesh
from jaxllm.mesh.sharding import replica_spec
from jaxllm.run import rounds
from jaxllm.run.loop import fit
from jaxllm.run.messages import who_was_left_out
from jaxllm.run.step_metrics import Watch
from jaxllm.train.diloco import begin, combine_fragments, outer_step
from jaxllm.train.instability import Recent
from jaxllm.train.outer_codes import coded_mean
from jaxllm.train.step import TrainState


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ------------------------------------------------------------------------------------------------------------------ left out


def replicas(own, moments):
    """A state of replicas with weights `own` [replica, ...]; t is 1 and v is 2."""
    plain = TrainState(jnp.zeros((), jnp.int32), {"w": jnp.ones((3, 4)), "u": jnp.ones((5,))}, {"w": jnp.zeros((3, 4))})
    state = begin(plain, len(moments))
    islands = dataclasses.replace(state.islands, params=own, opt_state={"w": moments})
    return dataclasses.replace(state, momentum=jax.tree.map(lambda t: 2 * t, state.params), islands=islands)


def drawn(count=4):
    rng = np.random.default_rng(0)
    own = {name: jnp.asarray(rng.normal(size=(count, *shape)), jnp.float32) for name, shape in (("w", (3, 4)), ("u", (5,)))}
    return own, jnp.asarray(rng.normal(size=(count, 3, 4)), jnp.float32)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_mean_leaves_out_a_replica_that_is_not_finite(bad):
    """It is the outer step of the others. The replica continues from their weights."""
    own, moments = drawn()
    poisoned = own | {"u": own["u"].at[2, 1].set(bad)}
    found, metrics = jax.jit(outer_step)(replicas(poisoned, moments.at[2, 0, 0].set(bad)), 0.7, 0.9)
    others = np.array([0, 1, 3])
    expected, of_others = jax.jit(outer_step)(replicas(jax.tree.map(lambda x: x[others], own), moments[others]), 0.7, 0.9)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)  # noqa: E731
    jax.tree.map(close, (found.params, found.momentum), (expected.params, expected.momentum))
    assert_equal(found.islands.params, jax.tree.map(lambda t: np.stack([t] * 4), found.params))
    assert_equal(found.islands.opt_state["w"], moments.at[2].set(0.0))
    assert (int(metrics.pop("islands_left_out")), int(of_others.pop("islands_left_out"))) == (1, 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics, of_others)


def test_one_moment_that_is_not_finite_clears_all_of_a_replica_that_is_left_out():
    """Else v would be 0 beside a living m. Finite moments stay, and so do those of replicas that count, and single numbers."""
    own, m = drawn()
    own = own | {"u": own["u"].at[1:3, 0].set(np.nan)}
    state = replicas(own, m)
    before = {"m": m, "v": jnp.square(m).at[2, 1, 1].set(np.nan).at[3, 0, 0].set(np.inf)}
    before |= {"count": jnp.full(4, 7, jnp.int32), "rate": jnp.full(4, 0.1)}
    state = dataclasses.replace(state, islands=dataclasses.replace(state.islands, opt_state=before))
    found = jax.jit(outer_step)(state, 0.7, 0.9)[0].islands.opt_state
    assert_equal(found, before | {name: before[name].at[2].set(0.0) for name in ("m", "v")})


def test_without_any_finite_replica_the_outer_step_is_skipped():
    own, moments = drawn(2)
    state = replicas(jax.tree.map(lambda x: x.at[:, 0].set(np.nan), own), moments)
    found, metrics = outer_step(state, 0.7, 0.9)
    assert_equal((found.params, found.momentum), (state.params, state.momentum))
    assert_equal(found.islands.params, jax.tree.map(lambda t: np.stack([t, t]), state.params))
    assert {name: float(value) for name, value in metrics.items()} == {
        **{"outer_grad_norm": 0.0, "island_drift": 0.0, "island_cosine": 0.0, "islands_left_out": 2.0}
    }


def test_beside_an_inner_step_a_replica_keeps_its_change_unless_it_is_left_out():
    """And the moments that the inner step leaves are repaired, not those from before."""
    own, moments = drawn()
    own = own | {"u": own["u"].at[2, 1].set(np.nan)}
    state = replicas(own, moments)
    change, new = drawn()[0], drawn()[1] + 1
    moved = jax.tree.map(lambda x, d: x + 0.1 * d, own, change)
    after = dataclasses.replace(state.islands, params=moved, opt_state={"w": new.at[2, 0, 0].set(np.inf)})
    waited, metrics = jax.jit(outer_step)(state, 0.7, 0.9)
    found, beside = jax.jit(outer_step)(state, 0.7, 0.9, after=after)
    assert_equal((found.params, found.momentum, beside), (waited.params, waited.momentum, metrics))
    others, t = np.array([0, 1, 3]), jax.device_get(found.params)
    for name in ("u", "w"):
        kept = t[name] + 0.1 * np.asarray(change[name])[others]
        np.testing.assert_allclose(np.asarray(found.islands.params[name])[others], kept, atol=1e-5)
        assert_equal(found.islands.params[name][2], t[name])
    assert_equal(found.islands.opt_state["w"], new.at[2].set(0.0))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_a_replica_that_is_left_out_are_zeros(tiny_config, bits):
    """What is applied and what waits are the mean of the others. What the replica itself has not sent, waits."""
    mesh = make_mesh(tiny_config("parallel.replica=4", "parallel.data=2").resolve(8).parallel, jax.devices())
    spec = jax.sharding.PartitionSpec(None, "data")
    own = jax.sharding.NamedSharding(mesh, replica_spec(spec, 4))
    mean = jax.jit(coded_mean(bits, mesh, {"w": spec}, {"w": own.spec}))
    rng = np.random.default_rng(1)
    change, waits = (rng.normal(size=(4, 8, 640)).astype(np.float32) for _ in range(2))
    poisoned = change.copy()
    poisoned[1, 0, 0], poisoned[1, 7, 639] = np.nan, np.inf
    counts = np.array([True, False, True, True])
    others = {"number": counts.astype(np.float32)}
    applied, residual, _ = mean(*({"w": jax.device_put(x, own)} for x in (poisoned, waits)), counts, others)
    applied, residual = np.asarray(applied["w"]), np.asarray(residual["w"])
    np.testing.assert_allclose(3 * applied + residual.sum(0), change[counts].sum(0) + waits.sum(0), atol=1e-4)
    # Apart from the errors of the mean, which it adds to the quarter that it summed up: two of eight rows, on each device.
    elsewhere = [0, 1, 4, 5, 6, 7]
    assert_equal(residual[1, elsewhere], waits[1, elsewhere])
    error = np.abs(applied - (change + waits)[counts].mean(0)).max()
    assert error < 2 * np.abs(change + waits)[counts].max() / {8: 127, 4: 7}[bits]


def test_a_replica_may_skip_the_steps_of_a_round(tiny_config):
    """The outer step after them may repair it. Before the first round nothing does."""
    rounds, together = "train.diloco_steps=8", "train.diloco_after_steps=4"
    for more, first, last, limit in (
        ((), 1, 3, "3"),
        ((rounds,), 1, 9, "3, and more than train.diloco_steps=8"),
        ((rounds, together), 1, 3, "3"),
        ((rounds, together), 5, 13, "3, and more than train.diloco_steps=8"),
        (("train.diloco_steps=2",), 1, 3, "3"),
        ((rounds, "train.diloco_overlap=true"), 1, 10, "3, and more than train.diloco_steps=8 + 1"),
    ):
        watch = Watch(tiny_config("train.steps=20", "train.max_skips_in_a_row=3", *more))
        for step in range(first, last + 1):
            watch.require_progress()
            watch.see(step, {"skipped": True, "loss": np.nan, "grad_norm": np.nan})
        text = re.escape(f"(train.max_skips_in_a_row={limit}): lower")
        with pytest.raises(jaxllm.ConfigError, match=rf"Steps {first} to {last} were skipped, .*{text}"):
            watch.require_progress()


# ------------------------------------------------------------------------------------------------------- joining and leaving

EIGHT = ("run.cpu_devices=8", "train.steps=8", "train.global_batch_sequences=8", "model.scan_layers=false")
ROUNDS = (*EIGHT, "train.diloco_steps=3", "train.diloco_after_steps=2", "train.diloco_bits=4")
TWO = (*ROUNDS, "parallel.replica=2", "parallel.data=4")
KEPT = ("checkpoint.every_steps=1", "checkpoint.keep=8", "train.eval_batches=1", "log.baselines=false")


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """(run directory, trainer) of two synchronous steps, then rounds of two replicas that end with steps 5 and 8."""
    folder = tmp_path_factory.mktemp("replicas") / "run"
    return folder, fit(tiny_config(*TWO, *KEPT, f"run.dir={folder}"))


def checkpoints(folder, target, step):
    """A copy of a run that ended after a step."""
    copy = Path(shutil.copytree(folder, target / str(step)))
    for later in range(step + 1, 9):
        shutil.rmtree(copy / "checkpoints" / str(later))
    return copy


def taken_up(trainer, folder, target, step):
    trainer.restore(Checkpoints(checkpoints(folder, target, step), trainer.config.checkpoint))
    assert trainer.step == step
    return jax.device_get(trainer.state)


def test_a_run_continues_without_a_replica_and_takes_it_back(whole, tmp_path):
    folder, trainer = whole
    taken_up(trainer, folder, tmp_path, 6)
    own = trainer.state.islands
    spoil = lambda x: jax.device_put(np.stack([x[0], np.full_like(x[1], np.nan)]), x.sharding)  # noqa: E731
    trainer.state = dataclasses.replace(trainer.state, islands=dataclasses.replace(own, params=jax.tree.map(spoil, own.params)))
    found = list(trainer.steps(2))
    assert [line["skipped"] for line in found] == [1, 1]
    assert found[1]["islands_left_out"] == 1
    assert who_was_left_out(found[1]).startswith("step 8: the outer step left out 1 of the replicas")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(trainer.state)))
    assert_equal(trainer.state.islands.params, jax.tree.map(lambda t: np.stack([t, t]), trainer.state.params))


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_each_number_of_replicas_that_joins_begins_alike(tiny_config, saved):
    """With t, and with the moments, the step and the usual level of losses of replica 0."""
    mesh = make_mesh(tiny_config("parallel.replica=4", "parallel.data=2").resolve(8).parallel, jax.devices())
    drawn_state, rng = replicas(*drawn()), np.random.default_rng(2)
    islands = dataclasses.replace(drawn_state.islands, step=jnp.arange(7, 11), recent=Recent(*rng.normal(size=(2, 4, 3))))
    state = dataclasses.replace(drawn_state, islands=islands, residual=jax.tree.map(jnp.cos, islands.params))
    of_replica = (state.islands, state.residual)
    place = lambda tree, *axes: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    islands, residual = place(jax.tree.map(lambda x: np.asarray(x) * at_rows(np.arange(4) < saved, x), of_replica), "replica")
    read = dataclasses.replace(place(state), islands=islands, residual=residual)
    shardings, before = jax.tree.map(lambda x: x.sharding, read), jax.device_get(read)
    meta = {"config": {"train": {}, "parallel": {"replica": saved}}}
    found = rounds.completed(read, jax.tree.map(jnp.asarray, state), meta)
    assert jax.tree.map(lambda x: x.sharding, found) == shardings
    assert_equal((found.step, found.params, found.momentum), (before.step, before.params, before.momentum))
    new = jax.tree.map(lambda x: x[:1], before.islands)
    new = dataclasses.replace(new, params=jax.tree.map(lambda t: t[None], before.params))
    rows = lambda old, new: np.concatenate([old[:saved], *[new] * (4 - saved)])  # noqa: E731
    assert_equal(found.islands, jax.tree.map(rows, before.islands, new))
    assert_equal(found.residual, before.residual)
    assert not any(x[saved:].any() for x in jax.tree.leaves(jax.device_get(found.residual)))


def test_a_single_replica_has_no_residual_that_a_run_of_several_could_read():
    """It sends nothing, with any bits. Those of several begin at 0."""
    own, moments = drawn()
    state = dataclasses.replace(replicas(own, moments), residual=own)
    layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jnp.asarray(x).sharding), state)
    for replica, bits, is_there in ((1, 4, False), (2, 4, True), (2, 32, False)):
        meta = {"config": {"train": {"diloco_bits": bits}, "parallel": {"replica": replica}}}
        assert (rounds.layout_in(meta, layout).residual is not None) == is_there
    found = rounds.completed(dataclasses.replace(state, residual=None), layout, meta)
    assert_equal(found.residual, jax.tree.map(lambda x: np.zeros(x.shape), layout.residual))


def at_rows(mask, x):
    return mask.reshape(-1, *[1] * (np.ndim(x) - 1))


@pytest.mark.slow
def test_replicas_join_and_leave(whole, tiny_config, tmp_path, caplog):
    """At the end of a round, two become four that all have the weights of the outer step, whose momentum stays. Inside a round
    the first two keep their own weights. One of two leaves."""
    folder, two = whole
    four = jaxllm.Trainer(tiny_config(*ROUNDS, "parallel.replica=4", "parallel.data=2"), resumes=True)
    for step in (7, 5):
        before = taken_up(two, folder, tmp_path / "two", step)
        caplog.clear()
        state = taken_up(four, folder, tmp_path / "four", step)
        assert "has 2 DiLoCo replicas and the run 4: the first 2 continue, 2 begin from the weights of the last" in caplog.text
        assert_equal((state.params, state.momentum, state.step), (before.params, before.momentum, before.step))
        first = jax.tree.map(lambda x: x[:2], (state.islands, state.residual))
        assert_equal(first, (before.islands, before.residual))
        for number in (2, 3):
            assert_equal(jax.tree.map(lambda x, n=number: x[n], state.islands.params), state.params)
            assert_equal(
                *(jax.tree.map(lambda x, n=n: x[n], (state.islands.step, state.islands.opt_state)) for n in (number, 0))
            )
            assert not any(x[number].any() for x in jax.tree.leaves(state.residual))
        at_end = all(
            (a == t).all() for a, t in zip(jax.tree.leaves(first[0].params), jax.tree.leaves(state.params), strict=True)
        )
        assert at_end == (step == 5)
    assert [m["step"] for m in four.steps(3) if "outer_grad_norm" in m] == [8]
    assert_equal(four.state.islands.params, jax.tree.map(lambda t: np.stack([t] * 4), four.state.params))
    one = jaxllm.Trainer(tiny_config(*ROUNDS, "parallel.replica=1", "parallel.data=8"), resumes=True)
    before = taken_up(two, folder, tmp_path / "again", 7)
    state = taken_up(one, folder, tmp_path / "one", 7)
    assert_equal((state.params, state.momentum), (before.params, before.momentum))
    assert_equal(state.islands, jax.tree.map(lambda x: x[:1], before.islands))
    assert state.residual is None


def test_metrics_of_fragments_keep_the_most_that_were_left_out():
    one = {"outer_grad_norm": np.float32(3), "island_drift": np.float32(1), "islands_left_out": np.int32(0)}
    assert combine_fragments([one, one | {"islands_left_out": np.int32(2)}])["islands_left_out"] == 2
