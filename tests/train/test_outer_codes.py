"""DiLoCo's outer gradients as codes of 8 or 4 bits, with error feedback."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import records

import jaxllm
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.compile.hlo import Module
from jaxllm.config.rounds import OUTER_BLOCK, sends_codes
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.cost_model.replicas import exchange_lines, exchange_of
from jaxllm.mesh.axes import axis_sizes, make_mesh
from jaxllm.mesh.sharding import replica_spec
from jaxllm.plan.quote import checkpoint_bytes
from jaxllm.run.loop import fit
from jaxllm.run.rounds import Rounds
from jaxllm.train.build import build_training
from jaxllm.train.diloco import begin, outer_step
from jaxllm.train.outer_codes import coded_mean, decode, encode
from jaxllm.train.step import TrainState

FOUR = ("run.cpu_devices=8", "parallel.replica=4", "parallel.data=2", "parallel.zero=1")
MOST = {8: 127, 4: 7}


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ----------------------------------------------------------------------------------------------------------------- the codes


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_at_most_half_a_step(bits):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 50, OUTER_BLOCK)) * 10.0 ** np.array([-30, -6, 0, 3, 30, 0]).reshape(6, 1, 1)
    rows[5, :, 0] = 1e4
    x = np.asarray(rows, np.float32)
    records_ = jax.jit(encode, static_argnums=1)(x, bits)
    assert (records_.dtype, records_.shape) == (jnp.uint8, (6, 50, OUTER_BLOCK * bits // 8 + 4))
    found = np.asarray(decode(records_, bits), np.float64)
    step = np.abs(x).max(-1, keepdims=True).astype(np.float64) / MOST[bits]
    assert (np.abs(found - x) <= 0.5 * step * (1 + 1e-5)).all()
    np.testing.assert_allclose(found / step, np.round(found / step), atol=1e-4)
    # The largest has a code of its own.
    np.testing.assert_allclose(np.abs(found).max(-1), np.abs(x).max(-1), rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zero(bits):
    """ZeRO's zeros and identity layers rely on this, in blocks of zeros and in others."""
    x = np.zeros((3, OUTER_BLOCK), np.float32)
    x[1, ::2] = np.arange(OUTER_BLOCK // 2) - 30
    x[2, 5] = 1e-39
    found = np.asarray(decode(encode(x, bits), bits))
    assert np.isfinite(found).all()
    assert (found[x == 0] == 0).all()


@pytest.fixture(scope="module")
def mean_of_four(tiny_config):
    """(codes' bits) -> (the mean, a function that places arrays): four replicas of two devices."""
    mesh = make_mesh(tiny_config(*FOUR).resolve(8).parallel, jax.devices())
    spec = jax.sharding.PartitionSpec(None, "data")
    own = jax.sharding.NamedSharding(mesh, replica_spec(spec, 4))

    def mean_of_all(bits):
        mean = jax.jit(coded_mean(bits, mesh, {"w": spec}, {"w": own.spec}))

        def found(changes, residual, counts=(True,) * 4):
            number = {"number": np.array(counts, np.float32)}
            return mean(changes, residual, np.array(counts), number)[:2]

        return found

    mean = {bits: mean_of_all(bits) for bits in (8, 4)}
    return mean, lambda x: {"w": jax.device_put(jnp.asarray(x, jnp.float32), own)}


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_sent_is_the_sum_of_changes_up_to_the_last_residual(mean_of_four, bits):
    mean, place = mean_of_four[0][bits], mean_of_four[1]
    rng = np.random.default_rng(1)
    wanted = sent = np.zeros((7, 90))
    residual = place(np.zeros((4, 7, 90)))
    errors = []
    for _ in range(12):
        # Replicas of different sizes, and a part that is the same in all rounds.
        change = 0.3 + rng.normal(size=(4, 7, 90)) * np.array([0.1, 1, 1, 5]).reshape(4, 1, 1)
        applied, residual = mean(place(change), residual)
        wanted, sent = wanted + change.mean(0), sent + np.asarray(applied["w"], np.float64)
        np.testing.assert_allclose(sent + np.asarray(residual["w"], np.float64).mean(0), wanted, atol=1e-5)
        errors.append(np.abs(sent - wanted).max())
        # Replicas have the same to the bit.
        copies = {}
        for shard in applied["w"].addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert [len(parts) for parts in copies.values()] == [4, 4]
        assert all((part == parts[0]).all() for parts in copies.values() for part in parts)
    # The residual does not grow: half a step of a replica's codes, and of the mean's, with room for what both add.
    assert max(errors) < 20 / MOST[bits]
    assert 0 < np.mean(errors[6:]) < 2 * np.mean(errors[:6])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_residual_that_is_not_finite_is_not_sent(mean_of_four, bits):
    """Its bad numbers count as 0, whether its replica is in the mean or left out, so the next residuals are finite."""
    mean, place = mean_of_four[0][bits], mean_of_four[1]
    rng = np.random.default_rng(2)
    change, waits = rng.normal(size=(2, 4, 7, 90)).astype(np.float32)
    bad, sound = waits.copy(), waits.copy()
    for value, at in ((np.nan, (1, 0, 3)), (np.inf, (1, 6, 80)), (-np.inf, (2, 3, 3))):
        bad[at], sound[at] = value, 0
    for counts in ((True, True, True, True), (True, False, True, True)):
        found = mean(place(change), place(bad), counts)
        assert_equal(found, mean(place(change), place(sound), counts))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(found)))


@pytest.mark.parametrize("bits", [8, 4])
def test_arrays_that_travel_together_are_as_each_alone(tiny_config, bits):
    """Up to the rounding of another program; also an array that is empty. The numbers beside them are sums."""
    mesh = make_mesh(tiny_config(*FOUR).resolve(8).parallel, jax.devices())
    spec, rng = jax.sharding.PartitionSpec(None, "data"), np.random.default_rng(3)
    own, shapes = replica_spec(spec, 4), {"a": (7, 90), "b": (3, 700), "c": (3, 700), "d": (0, 4)}
    change, waits = ({name: rng.normal(size=(4, *s)).astype(np.float32) for name, s in shapes.items()} for _ in range(2))
    counts = np.array([True, True, False, True])
    beside = {"number": counts.astype(np.float32), "square": np.array([0.1, 2.0, 0.0, 40.0], np.float32)}

    def mean_of(*names):
        mean = jax.jit(coded_mean(bits, mesh, dict.fromkeys(names, spec), dict.fromkeys(names, own)))
        return mean(*({name: tree[name] for name in names} for tree in (change, waits)), counts, beside)

    found = mean_of(*shapes)
    for name in shapes:
        alone = mean_of(name)
        for tree, expected in zip(found[:2], alone[:2], strict=True):
            np.testing.assert_allclose(tree[name], expected[name], rtol=1e-5, atol=1e-5)
    assert float(found[2]["number"]) == 3
    assert float(found[2]["square"]) == pytest.approx(42.1)


@pytest.mark.parametrize("noise", [0.02, 3.0])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_cosine_is_that_of_the_codes(tiny_config, bits, noise):
    """Each number counts once, whatever devices of a replica hold it, and a replica that is left out not at all."""
    mesh = make_mesh(tiny_config(*FOUR).resolve(8).parallel, jax.devices())
    specs = {"cut": jax.sharding.PartitionSpec("data"), "whole": jax.sharding.PartitionSpec()}
    mean = coded_mean(bits, mesh, specs, {name: replica_spec(spec, 4) for name, spec in specs.items()})
    rng = np.random.default_rng(4)
    common = {name: rng.normal(size=(6, OUTER_BLOCK)) for name in specs}
    own = {name: np.float32(x + noise * rng.normal(size=(4, *x.shape))) for name, x in common.items()}
    plain = TrainState(jnp.zeros((), jnp.int32), {name: jnp.zeros(x.shape) for name, x in common.items()}, ())
    own["whole"][2, 3, 5] = np.nan
    state = begin(plain, 4, codes=True)
    state = dataclasses.replace(state, islands=dataclasses.replace(state.islands, params=own))
    metrics = jax.jit(partial(outer_step, rate=0.7, momentum=0.9, mean=mean))(state)[1]
    # Rows are whole blocks, so how they are cut does not change the codes.
    sent = [np.float64([decode(encode(-x[k], bits), bits) for x in own.values()]).ravel() for k in (0, 1, 3)]
    products = [np.dot(sent[i], sent[j]) for i in range(3) for j in range(i)]
    expected = np.mean(products) / np.mean([np.dot(x, x) for x in sent])
    assert float(metrics["island_cosine"]) == pytest.approx(expected, abs=1e-4)
    assert -0.5 <= float(metrics["island_cosine"]) <= 1


# ------------------------------------------------------------------------------------------------------------- what is sent

MESHES = {
    "data, ZeRO 1": ("parallel.replica=4", "parallel.data=2", "parallel.zero=1"),
    "data x tensor, ZeRO 3": ("parallel.replica=2", "parallel.data=2", "parallel.tensor=2", "parallel.zero=3"),
    "pipe x data, ZeRO 2": ("parallel.replica=2", "parallel.pipe=2", "parallel.data=2", "parallel.zero=2"),
}
SIZES = ("train.global_batch_sequences=16", "train.microbatch_sequences=1", "model.vocab_size=2048", "train.diloco_steps=5")


def crossing(config):
    """[(kind, dtype, bytes that a rank sends)] of the outer step's collectives between replicas, but of metrics."""
    mesh = make_mesh(config.parallel, jax.devices())
    training = build_training(config, mesh)
    with jax.set_mesh(mesh):
        text = Rounds(config, mesh, training.shardings).jitted_step.lower(training.layout(), np.int32(0)).compile().as_text()
    found = [c for c in Module(text, axis_sizes(config.parallel)).collectives() if "replica" in c.axes and c.elements > 20]
    assert {axes for c in found for axes in c.axes} == {"replica"}
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "mesh", [name if name == "data, ZeRO 1" else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_what_crosses_is_codes_and_the_estimate_knows_how_many(tiny_config, mesh, bits):
    config = tiny_config(*SIZES, *MESHES[mesh], f"train.diloco_bits={bits}").resolve(8)
    found = crossing(config)
    assert [(c.kind, c.executed) for c in found] == [("all-to-all", 1), ("all-gather", 1)]
    assert {dtype for c in found for dtype, _ in c.buffers} == {"u8"}
    exchange = exchange_of(config)
    # The last block of each of twelve arrays is filled, on each replica.
    most = 12 * config.parallel.replica * OUTER_BLOCK * (bits / 8 + 4 / OUTER_BLOCK)
    for kind in ("all-to-all", "all-gather"):
        sent = sum(c.elements * c.executed for c in found if c.kind == kind)
        assert exchange.rank_bytes <= sent <= exchange.rank_bytes + most


def test_fewer_bits_are_fewer_bytes_and_more_memory(tiny_config):
    bits = {b: tiny_config(*SIZES, *FOUR, f"train.diloco_bits={b}").resolve(8) for b in (32, 8, 4)}
    plain = tiny_config(*SIZES, *FOUR).resolve(8)
    assert exchange_of(bits[32]) == exchange_of(plain)
    numbers = exchange_of(plain).rank_bytes / 4
    for b, each in ((8, 1 + 1 / 32), (4, 0.5 + 1 / 32)):
        assert exchange_of(bits[b]).rank_bytes == round(numbers * each)
        more = [estimate_memory(c).stages[0].terms_bytes["outer_state"] for c in (plain, bits[b])]
        assert more[1] == 1.5 * more[0] == 12 * numbers
        # A residual for each of four replicas.
        assert checkpoint_bytes(bits[b]) - checkpoint_bytes(plain) == pytest.approx(4 * 4 * 2 * numbers, rel=1e-3)
        assert f"of weights in {b} bits every 5 steps" in "\n".join(exchange_lines(bits[b], None))
    # A single replica sends nothing, and keeps nothing.
    alone = tiny_config("train.diloco_steps=5", "train.diloco_bits=4", "parallel.data=8").resolve(8)
    assert not sends_codes(alone)


# ----------------------------------------------------------------------------------------------------------------- the loop

EIGHT = ("run.cpu_devices=8", "parallel.replica=2", "parallel.data=4", "train.steps=8", "train.global_batch_sequences=8")
ROUNDS = (*EIGHT, "train.diloco_steps=3", "train.diloco_after_steps=2", "model.scan_layers=false")
KEPT = ("checkpoint.every_steps=1", "checkpoint.keep=8", "train.eval_batches=1", "log.baselines=false")


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """(run directory, trainer) of two synchronous steps, then rounds in 4 bits that end with steps 5 and 8."""
    folder = tmp_path_factory.mktemp("codes") / "run"
    return folder, fit(tiny_config(*ROUNDS, *KEPT, "train.diloco_bits=4", f"run.dir={folder}"))


def shortened(folder, target, step):
    """A copy of a run that ended after a step."""
    copy = Path(shutil.copytree(folder, target))
    for later in range(step + 1, 9):
        shutil.rmtree(copy / "checkpoints" / str(later))
    return copy


@pytest.mark.parametrize("step", [6, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_killed_inside_a_round_or_between_rounds_goes_back_exactly(whole, tiny_config, tmp_path, step):
    """Its residuals are those of the first outer step, and the second one sends them."""
    folder, trainer = whole
    copy = shortened(folder, tmp_path / "run", step)
    resumed = fit(tiny_config(*ROUNDS, *KEPT, "train.diloco_bits=4", f"run.dir={copy}"))
    assert any(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(trainer.state.residual))
    assert_equal(resumed.state, trainer.state)
    by_step = [{r["step"]: r["loss"] for r in records(run) if "loss" in r} for run in (folder, copy)]
    assert by_step[0] == by_step[1]


@pytest.mark.slow
def test_a_run_may_change_its_bits(whole, tiny_config, tmp_path):
    folder, _ = whole
    copy = shortened(folder, tmp_path / "run", 6)

    def resumed(bits):
        config = tiny_config(*ROUNDS, f"train.diloco_bits={bits}")
        trainer = jaxllm.Trainer(config, resumes=True)
        trainer.restore(Checkpoints(copy, config.checkpoint))
        return trainer

    trainers = {bits: resumed(bits) for bits in (32, 8, 4)}
    states = {bits: trainer.state for bits, trainer in trainers.items()}
    for bits in (32, 8):
        assert_equal(states[bits].islands, states[4].islands)
        assert_equal(states[bits].params, states[4].params)
    assert states[32].residual is None
    assert_equal(states[8].residual, states[4].residual)
    # A checkpoint of 32 bits, as older ones are, has no residuals: they begin at 0.
    plain = fit(tiny_config(*ROUNDS, *KEPT, "train.steps=6", f"run.dir={tmp_path / 'plain'}"))
    config = tiny_config(*ROUNDS, "train.diloco_bits=4")
    trainer = jaxllm.Trainer(config, resumes=True)
    trainer.restore(Checkpoints(tmp_path / "plain", config.checkpoint))
    assert_equal(trainer.state.islands, plain.state.islands)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(trainer.state.residual))
    shapes = [jax.tree.map(lambda x: (x.shape, x.sharding), tree) for tree in (trainer.state.residual, states[4].residual)]
    assert shapes[0] == shapes[1]
    assert [m["step"] for m in trainer.steps(2) if "outer_grad_norm" in m] == [8]
    trainer.close()
