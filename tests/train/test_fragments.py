"""DiLoCo's outer steps of one fragment of the weights at a time."""

import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from placed_rounds import Placed, assert_equal, belongs
from run_files import records

from jaxllm.compile.hlo import Module
from jaxllm.config import ConfigError
from jaxllm.config.rounds import fragments_after
from jaxllm.cost_model.replicas import exchange_lines, exchange_of
from jaxllm.mesh.axes import axis_sizes, replicated
from jaxllm.run.loop import fit
from jaxllm.train.diloco import combine_fragments, combine_replicas, outer_step

SIZES = ("train.global_batch_sequences=16", "train.microbatch_sequences=1", "model.vocab_size=1024", "model.num_layers=8")
MESHES = {
    "data, ZeRO 1": ("parallel.replica=4", "parallel.data=2", "parallel.zero=1"),
    "data x tensor, ZeRO 3": ("parallel.replica=2", "parallel.data=2", "parallel.tensor=2", "parallel.zero=3"),
    "pipe x data, ZeRO 2": ("parallel.replica=2", "parallel.pipe=2", "parallel.data=2", "parallel.zero=2"),
    "pipe in chunks, ZeRO 1": (
        *("parallel.replica=2", "parallel.pipe=2", "parallel.data=2", "parallel.zero=1"),
        *("parallel.virtual_stages=2", "parallel.schedule=interleaved"),
    ),
}


# ----------------------------------------------------------------------------------------------------- the step of a fragment


@pytest.mark.parametrize("mesh", MESHES)
def test_a_fragments_step_is_the_plain_one_of_its_numbers(tiny_config, mesh):
    """And all other numbers of t, v and the replicas stay, to the bit."""
    plain = Placed(tiny_config(*SIZES, *MESHES[mesh], "train.diloco_steps=4"))
    cut = Placed(tiny_config(*SIZES, *MESHES[mesh], "train.diloco_steps=4", "train.diloco_fragments=2"))
    before = plain.state()
    whole, of_whole = plain.outer_step(before, 0)
    found, metrics = zip(*(cut.outer_step(before, number) for number in range(2)), strict=True)
    for number in range(2):
        for leading, get in enumerate((lambda s: (s.params, s.momentum), lambda s: (s.islands.params,))):
            for old, new, own in zip(get(before), get(whole), get(found[number]), strict=True):
                mine = belongs(cut, number, old, leading)
                expected = jax.tree.map(lambda m, a, b: np.where(m, np.asarray(a), np.asarray(b)), mine, new, old)
                assert_equal(own, expected)
        assert jax.tree.map(lambda x: x.sharding, found[number]) == jax.tree.map(lambda x: x.sharding, before)
    combined = combine_replicas({"outer": metrics})
    assert combined.keys() == of_whole.keys()
    for key, value in of_whole.items():
        assert combined[key] == pytest.approx(float(value), rel=1e-4), key


def test_one_fragment_is_the_plain_outer_step(tiny_config):
    """The same program as without fragments, so the same bits."""
    one = Placed(tiny_config(*SIZES, *MESHES["data, ZeRO 1"], "train.diloco_steps=4", "train.diloco_fragments=1"))
    step = partial(outer_step, rate=0.7, momentum=0.9)
    shardings = (one.training.shardings, replicated(one.mesh))
    plain = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    with jax.set_mesh(one.mesh):
        texts = [plain.lower(layout := one.training.layout()), one.rounds.jitted_step.lower(layout, np.int32(0))]
    assert texts[0].as_text() == texts[1].as_text()
    steps = [step for step in range(1, 5) if fragments_after(one.config.train, step)]
    assert steps == [4]


def test_a_cycle_over_equal_replicas_changes_nothing(tiny_config):
    """In 32 bits and in 4."""
    for bits in (32, 4):
        rounds = ("train.diloco_steps=4", "train.diloco_fragments=2", f"train.diloco_bits={bits}")
        cut = Placed(tiny_config(*SIZES, *MESHES["data, ZeRO 1"], *rounds))
        before = state = cut.state(moved=0.0)
        for number in range(2):
            state, metrics = cut.outer_step(state, number)
            assert float(metrics["island_drift"]) == 0.0
        assert_equal(state, before)


def test_what_codes_leave_out_waits_in_the_residual_of_its_fragment(tiny_config):
    """With rate 1 and no momentum: what is applied and the mean residual are the mean change; elsewhere there is neither."""
    outer = ("train.diloco_steps=4", "train.diloco_fragments=2", "train.diloco_bits=4", "train.diloco_lr=1.0")
    cut = Placed(tiny_config(*SIZES, *MESHES["data x tensor, ZeRO 3"], *outer, "train.diloco_momentum=0.0"))
    before = jax.device_get(cut.state())
    after = jax.device_get(cut.outer_step(cut.state(), 1)[0])
    mine = belongs(cut, 1, before.params)
    assert any(np.abs(x).max() > 0.01 for x in jax.tree.leaves(after.residual))

    def law(mine, t, own, new, residual):
        change = (t[None] - own).mean(0)
        np.testing.assert_allclose(t - new + residual.mean(0), np.where(mine, change, 0), atol=1e-5)

    jax.tree.map(law, mine, before.params, before.islands.params, after.params, after.residual)
    jax.tree.map(lambda mine, r: np.testing.assert_array_equal(r[:, ~mine], 0), mine, after.residual)


@pytest.mark.parametrize("bits", [32, 4])
def test_each_fragments_bytes_are_a_share_of_the_round(tiny_config, bits):
    """Counted in the compiled programs, and as the estimate says. Nothing else crosses, and no fragment moves in a replica."""
    given = (*SIZES, *MESHES["pipe x data, ZeRO 2"], "train.diloco_steps=8", f"train.diloco_bits={bits}")
    plain, cut = (Placed(tiny_config(*given, f"train.diloco_fragments={count}")) for count in (1, 4))

    def crossing(placed):
        found = Module(placed.text(), axis_sizes(placed.config.parallel)).collectives()
        # Beside a few numbers of metrics, and for each array of moments whether it is finite.
        large = [c for c in found if c.elements > 20 and {dtype for dtype, _ in c.buffers} != {"pred"}]
        assert {c.axes for c in large} == {("replica",)}
        kinds = {c.kind for c in large}
        assert kinds == ({"all-reduce"} if bits == 32 else {"all-to-all", "all-gather"})
        size = 4 if bits == 32 else 1
        return size * sum(c.elements * c.executed for c in large) // len(kinds)

    whole, each = crossing(plain), crossing(cut)
    exchange = exchange_of(cut.config)
    # In codes each array's last blocks are filled: here by half a block for each of 12 arrays and 2 replicas.
    assert each == pytest.approx(whole / 4, rel=0.01 if bits == 32 else 0.1)
    assert exchange.rank_bytes == pytest.approx(each, rel=0.01 if bits == 32 else 0.1)
    assert exchange.sent_bytes == exchange_of(plain.config).sent_bytes // 4
    assert (exchange.steps, exchange_of(plain.config).steps) == (2, 8)
    assert "of weights" in (text := "\n".join(exchange_lines(cut.config, 3.0)))
    assert ", one of 4 fragments, every 2 steps, and receives as much: 6 s exposed, 3 s a step" in text


def test_arrays_with_fewer_rows_than_fragments(tiny_config):
    """The last norm has four numbers on each of eight ranks."""
    given = ("model.num_layers=8", "parallel.data=4", "parallel.replica=2", "parallel.zero=1", "train.diloco_steps=8")
    for bits in (32, 8):
        outer = ("train.diloco_fragments=8", f"train.diloco_bits={bits}", "train.diloco_lr=1.0", "train.diloco_momentum=0.0")
        cut = Placed(tiny_config(*given, "model.hidden_size=16", *outer))
        assert cut.state().params["final_norm"]["scale"].addressable_shards[0].data.shape == (4,)
        before = cut.state()
        after, _ = cut.outer_step(before, 7)
        assert_equal(after.params["final_norm"], before.params["final_norm"])
        assert (np.asarray(after.params["embedding"])[7] != np.asarray(before.params["embedding"])[7]).any()


def test_metrics_of_fragments_are_those_of_all_weights():
    assert combine_fragments([]) == {}
    assert combine_fragments([{"outer_grad_norm": np.float32(3)}]) == {"outer_grad_norm": np.float32(3)}
    one = {
        "outer_grad_norm": np.float32(3),
        "island_drift": np.float32(1),
        "island_cosine": np.float32(1),
        "islands_left_out": 0,
    }
    two = {
        "outer_grad_norm": np.float32(4),
        "island_drift": np.float32(2),
        "island_cosine": np.float32(0),
        "islands_left_out": 0,
    }
    assert combine_fragments([one, two]) == pytest.approx(
        {"outer_grad_norm": 5.0, "island_drift": 5**0.5, "island_cosine": 0.2, "islands_left_out": 0}
    )


# ----------------------------------------------------------------------------------------------------------------- the loop

EIGHT = ("run.cpu_devices=8", "parallel.replica=2", "parallel.data=4", "train.steps=9", "train.global_batch_sequences=8")
ROUNDS = (*EIGHT, "train.diloco_steps=4", "train.diloco_after_steps=1", "train.diloco_fragments=2", "train.diloco_bits=4")
KEPT = ("checkpoint.every_steps=1", "checkpoint.keep=9", "train.eval_batches=1", "log.baselines=false")


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """(run directory, trainer) of one synchronous step, then rounds of four steps in two fragments and 4 bits."""
    folder = tmp_path_factory.mktemp("fragments") / "run"
    return folder, fit(tiny_config(*ROUNDS, *KEPT, f"run.dir={folder}"))


def test_fragments_take_turns_and_the_last_step_takes_all(whole):
    folder, trainer = whole
    assert trainer.programs.traces == 2
    found = [r["step"] for r in records(folder) if "outer_grad_norm" in r]
    assert found == [3, 5, 7, 9]
    assert [fragments_after(trainer.config.train, step) for step in (2, 3, 5, 7, 8, 9)] == [[], [1], [0], [1], [], [0, 1]]
    assert_equal(trainer.state.islands.params, jax.tree.map(lambda x: np.stack([x, x]), trainer.state.params))
    assert all(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(trainer.state.momentum))


@pytest.mark.parametrize("step", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_a_run_killed_inside_a_cycle_resumes_exactly(whole, tiny_config, tmp_path, step):
    """Between the outer steps of two fragments, and after one of them."""
    folder, trainer = whole
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    for later in range(step + 1, 10):
        shutil.rmtree(copy / "checkpoints" / str(later))
    resumed = fit(tiny_config(*ROUNDS, *KEPT, f"run.dir={copy}"))
    assert_equal(resumed.state, trainer.state)
    by_step = [{r["step"]: r["loss"] for r in records(run) if "loss" in r} for run in (folder, copy)]
    assert by_step[0] == by_step[1]


def test_what_cannot_be_is_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"diloco_fragments=3 does not divide train.diloco_steps=4: use one of 1, 2\."):
        tiny_config("train.diloco_steps=4", "train.diloco_fragments=3")
    with pytest.raises(ConfigError, match=r"diloco_fragments=2 is above 1, the layers of a stage's chunk: use one of 1\."):
        tiny_config("train.diloco_steps=4", "train.diloco_fragments=2", "parallel.pipe=2")
