"""Skipped steps, spikes, and norms of each layer."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import Run
from run_files import records

import jaxllm
from jaxllm.checkpoint.files import read_meta
from jaxllm.config import ConfigError
from jaxllm.parallel.parameters import merge_model
from jaxllm.run.loop import fit
from jaxllm.run.step_metrics import Watch, by_layer
from jaxllm.run.trainer import Trainer
from jaxllm.train.instability import FEWEST, WINDOW, Recent, layer_grad_norms, skip_not_finite, skip_spikes
from jaxllm.train.step import TrainState, make_train_step, make_update

EIGHT = ("run.cpu_devices=8", "data.held_out_fraction=0", "optimizer.schedule=constant")
MESHES = {
    "zero 1": ("parallel.data=4", "parallel.tensor=2", "parallel.zero=1"),
    "pipeline": ("parallel.pipe=2", "parallel.data=2", "parallel.tensor=2", "model.num_layers=3"),
    "zero 3": ("parallel.data=4", "parallel.context=2", "parallel.zero=3"),
    "interleaved": (
        *("parallel.pipe=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved", "model.num_layers=7"),
        # Not tied: a tied poisoned row would be in the head too, and so in every step.
        *("parallel.data=4", "parallel.zero=2", "model.tie_embeddings=false"),
    ),
    "offload": ("parallel.data=8", "parallel.offload_state=optimizer"),
    "all on the host": ("parallel.data=4", "parallel.tensor=2", "parallel.zero=3", "parallel.offload_state=all"),
}
MARKS = {"zero 1": (), "pipeline": (), "interleaved": pytest.mark.nightly}
CASES = [pytest.param(mesh, marks=MARKS.get(mesh, pytest.mark.slow)) for mesh in MESHES]
POISON = 200
"""A token that no text here contains: its embedding row is set to NaN."""


def changed(array, place, value):
    """Runs on the host: trainers prefetch in a thread, where a program on all devices could collide with the step's."""
    host = np.array(array)
    host[place] = value
    return jax.device_put(host, array.sharding)


def two_microbatches(mesh):
    """Overrides: each step has eight sequences, over all data ranks."""
    (ranks,) = (int(size) for key, size in (override.split("=") for override in MESHES[mesh]) if key == "parallel.data")
    return "train.global_batch_sequences=16", f"train.microbatch_sequences={8 // ranks}"


def poison(trainer):
    params = trainer.state.params
    table = params["embedding"]
    spoilt = changed(table, POISON, np.nan)
    trainer.state = dataclasses.replace(trainer.state, params={**params, "embedding": spoilt})


def with_poison(batch, place):
    """The batch with one changed token in one row of one microbatch."""
    return {**batch, "tokens": changed(batch["tokens"], place, POISON)}


def copies(tree):
    """The shards of every array on every device."""
    return jax.tree.map(lambda x: [np.array(shard.data) for shard in x.addressable_shards], tree)


# -------------------------------------------------------------------------------------------------------------- in the step


@pytest.mark.parametrize("mesh", CASES)
def test_a_step_that_is_not_finite_changes_nothing_anywhere(tiny_config, mesh):
    """A NaN in one token of the second microbatch affects one data rank. No device changes a bit of weights or moments, and
    the next step is a usual one.
    """
    trainer = Trainer(tiny_config(*EIGHT, *MESHES[mesh], *two_microbatches(mesh)))
    poison(trainer)
    batches = [trainer.train_batch(0), with_poison(trainer.train_batch(1), (1, 5, 3)), trainer.train_batch(2)]
    with jax.set_mesh(trainer.mesh):
        trainer.compile_step(batches[0])
        # Moments that are not zero, so that a change would show.
        state, metrics = trainer.programs.current(trainer.state, batches[0])
        assert not metrics["skipped"]
        before = copies((state.params, state.opt_state))
        state, metrics = trainer.programs.current(state, batches[1])
        assert metrics["skipped"]
        assert np.isnan(metrics["loss"])
        after = copies((state.params, state.opt_state))
        state, metrics = trainer.programs.current(state, batches[2])
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert not metrics["skipped"]
    assert np.isfinite(metrics["loss"])
    assert state.step == 3
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), copies(state.params), before[0])
    assert all(jax.tree.leaves(moved))


def test_a_step_is_sound_if_loss_and_norm_are_finite():
    for loss, norm, skipped in ((2.0, 1.0, 0), (np.nan, 1.0, 1), (2.0, np.inf, 1), (-np.inf, 1.0, 1), (2.0, 0.0, 1)):
        sound, recent, metrics = skip_not_finite(None, jnp.float32(loss), jnp.float32(norm))
        assert (bool(sound), recent, int(metrics["skipped"])) == (not skipped, None, skipped)


@pytest.mark.parametrize("policy", [skip_not_finite, skip_spikes(6.0)])
def test_a_step_without_targets_moves_nothing_and_has_no_loss(policy):
    """The moments of AdamW and its decay would move the weights without any gradient."""
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))

    def loss_and_gradients(params, batch):
        return (batch * params["w"]).sum(), {"w": batch * jnp.ones_like(params["w"])}

    step = make_train_step(loss_and_gradients, make_update(optimizer), lambda step: jnp.float32(0.1), 1.0, should_apply=policy)
    params = {"w": jnp.arange(1.0, 4.0)}
    recent = None if policy is skip_not_finite else filled(3, jnp, jnp.float32)
    start, _ = step(TrainState(jnp.int32(0), params, optimizer.init(params), recent), jnp.float32(2.0))
    state, metrics = step(start, jnp.float32(0.0))
    jax.tree.map(
        np.testing.assert_array_equal,
        (state.params, state.opt_state, state.recent),
        (start.params, start.opt_state, start.recent),
    )
    assert metrics["skipped"]
    assert (float(metrics["grad_norm"]), int(state.step)) == (0.0, 2)
    _, metrics = step(state, jnp.float32(2.0))
    assert np.isfinite(metrics["loss"])
    assert not metrics["skipped"]


def test_steps_without_targets_are_neither_skipped_steps_nor_usual_ones(tiny_config):
    watch = Watch(tiny_config("train.max_skips_in_a_row=2"))
    empty = {"loss": 0.0, "grad_norm": 0.0, "skipped": 1.0}
    for step in range(1, 5):
        found = watch.see(step, empty)
        assert np.isnan(found.pop("loss"))
        assert found == {"skipped": 0, "skipped_steps": 0, "loss_spike": 0, "no_targets": 1}
        assert watch.first_without_targets == 1
        watch.require_progress()
    assert watch._recent.count == 0
    # They are no progress either: what is not finite before and after them is in a row.
    bad = {"loss": np.nan, "grad_norm": np.nan, "skipped": 1.0}
    for step, values in enumerate((bad, empty, bad), start=5):
        watch.see(step, values)
    with pytest.raises(ConfigError, match="skipped, with a loss or gradients that are not finite"):
        watch.require_progress()


# ------------------------------------------------------------------------------------------------------------------- spikes

USUAL = np.random.default_rng(0).normal((2.0, 0.5), (0.1, 0.05), (3 * WINDOW, 2))


def filled(count, xp, dtype):
    recent = Recent.empty(xp, dtype)
    after = jax.jit(lambda recent, new: recent.after(new)) if xp is jnp else lambda recent, new: recent.after(new, np)
    for new in USUAL[:count]:
        recent = after(recent, xp.asarray(new, dtype))
    return recent


@pytest.mark.parametrize(("xp", "dtype"), [(np, np.float64), (jnp, jnp.float32)])
@pytest.mark.parametrize("count", [FEWEST, WINDOW + 40])
def test_a_spike_is_far_above_the_mean_of_the_last_steps(xp, dtype, count):
    recent = filled(count, xp, dtype)
    last = USUAL[:count][-WINDOW:]
    mean, deviation = last.mean(0), last.std(0, ddof=1)
    for which in (0, 1):
        for distance, spike in ((5.9, False), (6.1, True), (-20, False)):
            new = mean.copy()
            new[which] += distance * deviation[which]
            assert bool(recent.is_spike(xp.asarray(new, dtype), 6.0, xp)) is spike
    for new in ((np.inf, 0.5), (2.0, np.nan)):
        assert not recent.is_spike(xp.asarray(new, dtype), 6.0, xp)


def test_too_few_steps_say_nothing_of_what_is_usual():
    assert not filled(FEWEST - 1, np, np.float64).is_spike(np.array([1e6, 1e6]), 6.0, np)


def test_what_is_not_finite_is_not_remembered():
    recent = filled(3, jnp, jnp.float32)
    after = recent.after(jnp.array([jnp.nan, 1.0]))
    jax.tree.map(np.testing.assert_array_equal, after, recent)


def test_a_spike_is_skipped_and_remembered():
    should_apply = jax.jit(skip_spikes(6.0))
    recent = filled(FEWEST, jnp, jnp.float32)
    sound, after, metrics = should_apply(recent, jnp.float32(9.0), jnp.float32(0.5))
    assert (bool(sound), bool(metrics["skipped"]), bool(metrics["loss_spike"])) == (False, True, True)
    assert (after.count, after.values[0, FEWEST]) == (FEWEST + 1, 9.0)
    sound, _, metrics = should_apply(after, jnp.float32(2.0), jnp.float32(0.5))
    assert (bool(sound), bool(metrics["skipped"]), bool(metrics["loss_spike"])) == (True, False, False)
    sound, after, metrics = should_apply(recent, jnp.float32(jnp.nan), jnp.float32(0.5))
    assert (bool(sound), bool(metrics["skipped"]), bool(metrics["loss_spike"])) == (False, True, False)
    assert after.count == FEWEST


def see_usual(watch, count):
    for step, (loss, norm) in enumerate(USUAL[:count], 1):
        row = watch.see(step, {"loss": loss, "grad_norm": norm, "skipped": 0.0})
    return row


def test_the_host_marks_spikes_and_counts_skipped_steps(tiny_config):
    watch = Watch(tiny_config())
    assert see_usual(watch, 100) == {"skipped": 0, "skipped_steps": 0, "loss_spike": 0}
    assert watch.see(101, {"loss": 2.0, "grad_norm": 5.0, "skipped": 0.0})["loss_spike"] == 1
    nan = {"loss": np.nan, "grad_norm": np.nan, "skipped": 1.0}
    assert watch.see(102, nan) == {"skipped": 1, "skipped_steps": 1, "loss_spike": 0}
    # If the step itself looks for spikes, its decision counts.
    row = watch.see(103, {"loss": 2.0, "grad_norm": 0.5, "skipped": 1.0, "loss_spike": 1.0})
    assert row == {"skipped": 1, "skipped_steps": 2, "loss_spike": 1}
    quiet = Watch(tiny_config("train.spike_deviations=null"))
    see_usual(quiet, 100)
    assert quiet.see(101, {"loss": 2.0, "grad_norm": 5.0, "skipped": 0.0})["loss_spike"] == 0


def test_what_is_usual_is_recalled_from_the_metrics(tiny_config, tmp_path):
    lines = [{"step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in enumerate(USUAL[:100])]
    lines[50:50] = [{"step": 49, "eval_loss": 2.0}, {"step": 50, "loss": None, "grad_norm": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tiny_config())
    watch.recall(tmp_path / "metrics.jsonl")
    assert watch.see(101, {"loss": 2.0, "grad_norm": 5.0, "skipped": 0.0})["loss_spike"] == 1
    # The run has no metrics yet.
    watch.recall(tmp_path / "none.jsonl")


def test_skips_in_a_row_end_a_run(tiny_config):
    watch = Watch(tiny_config("train.max_skips_in_a_row=3"))
    skipped, sound = ({"loss": np.nan, "grad_norm": 1.0, "skipped": float(skip)} for skip in (1, 0))
    for step, values in enumerate([skipped, skipped, sound, skipped, skipped], 1):
        watch.see(step, values)
        watch.require_progress()
    watch.see(6, skipped)
    with pytest.raises(ConfigError, match=re.escape("Steps 4 to 6 were skipped, with a loss or gradients that are not finite")):
        watch.require_progress()
    watch = Watch(tiny_config("train.max_skips_in_a_row=1"))
    watch.see(1, skipped)
    with pytest.raises(
        ConfigError, match=r"^Step 1 was skipped, .* lower optimizer.learning_rate, or look at the samples that"
    ):
        watch.require_progress()


def test_skipping_spikes_needs_a_rule(tiny_config):
    with pytest.raises(ConfigError, match=r"train.skip_spikes=true needs train.spike_deviations: set it, such as 6.0"):
        tiny_config("train.skip_spikes=true", "train.spike_deviations=null")


# --------------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def poisonous(monkeypatch):
    """In this test the second and third batch of any run contain the poisoned token, and its embedding is NaN."""
    begin, read = Trainer.__init__, Trainer.train_batch

    def poisoned_from_the_start(self, *arguments, **options):
        begin(self, *arguments, **options)
        poison(self)

    def poisoned_batch(self, step):
        batch = read(self, step)
        return with_poison(batch, (0, 2, 7)) if step in (1, 2) else batch

    monkeypatch.setattr(Trainer, "__init__", poisoned_from_the_start)
    monkeypatch.setattr(Trainer, "train_batch", poisoned_batch)


def test_skipped_steps_are_counted_and_leave_what_replays_them(tiny_config, tmp_path, poisonous, capsys):
    """The counters survive a resume: steps 2 and 3 of four are skipped, then a fifth step follows."""
    config = (*EIGHT, "parallel.data=8", "train.batch_schedule=[[256, 16]]", f"run.dir={tmp_path}")
    fit(tiny_config(*config, "train.steps=4"))
    assert "step 3 is not finite: loss nan, gradient norm nan; skipped, 2 so far" in capsys.readouterr().out
    assert read_meta(tmp_path / "checkpoints" / "4")["skipped_steps"] == 2
    trainer = fit(tiny_config(*config, "train.steps=5"))
    lines = records(tmp_path)
    assert [line["skipped"] for line in lines] == [0, 1, 1, 0, 0]
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2, 2, 2]
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False]
    # Weights and moments have had three updates, the data five steps.
    assert int(trainer.state.opt_state[0].count) == 3
    assert [line["tokens"] for line in lines] == [128, 256, 512, 768, 1024]
    spikes = records(tmp_path, "spikes.jsonl")
    assert [(line["step"], line["first_sequence"], line["sequences"]) for line in spikes] == [(2, 8, 8), (3, 16, 16)]
    for line in spikes:
        expected = trainer.stream.samples(line["first_sequence"] + np.arange(line["sequences"]))["tokens"]
        # The recipe of docs/instability.md, except for the poisoned embedding.
        found = np.asarray(trainer.train_batch(line["step"] - 1)["tokens"]).reshape(-1, 16)
        assert (found != expected).sum() == 1


def test_a_run_that_only_skips_ends(tiny_config, tmp_path, poisonous):
    config = tiny_config(*EIGHT, "parallel.data=8", "train.max_skips_in_a_row=2", "train.steps=6", f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"^Steps 2 to 3 were skipped, .*\(train.max_skips_in_a_row=2\)"):
        fit(config)
    assert [line["step"] for line in records(tmp_path, "spikes.jsonl")] == [2, 3]


@pytest.mark.slow
def test_what_is_usual_is_part_of_the_state(tiny_config, tmp_path):
    """4 steps = 2 + restore + 2, bit for bit. A resumed run may also turn skipping of spikes on or off."""
    common = (*EIGHT, "parallel.data=8")
    skips = "train.skip_spikes=true"
    whole = fit(tiny_config(*common, skips, f"run.dir={tmp_path / 'whole'}"))
    fit(tiny_config(*common, skips, f"run.dir={tmp_path / 'halves'}", "train.steps=2"))
    halves = fit(tiny_config(*common, skips, f"run.dir={tmp_path / 'halves'}"))
    jax.tree.map(np.testing.assert_array_equal, halves.state, whole.state)
    losses = [line["loss"] for line in records(tmp_path / "whole")]
    np.testing.assert_array_equal(np.asarray(whole.state.recent.values)[0, :5], np.float32([*losses, 0]))
    fit(tiny_config(*common, f"run.dir={tmp_path / 'later'}", "train.steps=2"))
    later = fit(tiny_config(*common, skips, f"run.dir={tmp_path / 'later'}"))
    assert later.state.recent.count == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), later.state.params, whole.state.params)
    ended = fit(tiny_config(*common, f"run.dir={tmp_path / 'later'}", "train.steps=5"))
    assert ended.state.recent is None


# -------------------------------------------------------------------------------------------------------------- layer norms


def random_batch(seed=0):
    """Two microbatches of eight rows, with two documents per row."""
    ids = np.random.default_rng(seed).integers(0, 256, (2, 8, 17)).astype(np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 8, 16)).copy()
    segments = np.broadcast_to((np.arange(16) >= 5).astype(np.int32), (2, 8, 16)).copy()
    mask = np.ones((2, 8, 16), bool)
    return {"tokens": ids[..., :-1], "targets": ids[..., 1:], "mask": mask, "positions": positions, "segments": segments}


def expected_norms(run):
    """Root mean square of each block's output, layer by layer, computed by the unmodified network."""
    found, rows = [], {name: jnp.asarray(x[0]) for name, x in random_batch().items()}

    def run_layers(block, layers, h_BSD, side):
        for number in range(run.config.model.num_layers):
            h_BSD, _ = block(jax.tree.map(lambda x, n=number: x[n], layers), h_BSD, side)
            found.append(jnp.sqrt(jnp.mean(jnp.square(h_BSD))))
        return h_BSD

    model = merge_model(run.config, run.state.params)
    model.hidden(rows["tokens"], rows["positions"], rows["segments"], run_layers=run_layers)
    return np.array(found)


@pytest.mark.parametrize("mesh", [case for case in CASES if case.values != ("offload",)])
def test_norms_of_layers_are_those_of_one_device(tiny_config, mesh):
    """Norms of outputs by the diagnostic pass, and norms of gradients for any division of the stack."""
    layers = [override for override in MESHES[mesh] if override.startswith("model.")]
    wide = "model.initializer_std=0.2"
    batch = ("train.global_batch_sequences=16", "train.microbatch_sequences=8")
    one = Run(tiny_config(wide, *layers, "parallel.data=1", *batch), random_batch)
    many = Run(tiny_config(wide, *MESHES[mesh], *two_microbatches(mesh)), random_batch)
    outputs, stacks, gradients = [], [], []
    for run in (one, many):
        norms = layer_grad_norms(run.functions.table, run.config.model.num_layers)
        stacks.append(run.gradients()[1])
        with jax.set_mesh(run.mesh):
            found = jax.jit(run.functions.layer_norms)(run.state.params, run.place(random_batch()))
            outputs.append(found["layer_activation_norm"])
            gradients.append(jax.jit(norms)(stacks[-1]))
    np.testing.assert_allclose(outputs[0], expected_norms(one), rtol=1e-5)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4)
    squares = [np.square(x).reshape(x.shape[0], -1).sum(1) for x in map(np.asarray, jax.tree.leaves(stacks[0]["layers"]))]
    np.testing.assert_allclose(gradients[0], np.sqrt(sum(squares)), rtol=1e-5)
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-4)


def test_norms_of_layers_are_logged_where_they_are_due(tiny_config):
    trainer = jaxllm.Trainer(tiny_config(*EIGHT, "log.layer_norms_every=2"))
    lines = list(trainer.steps(4))
    trainer.close()
    names = {f"{kind}/{layer}" for kind in ("layer_grad_norm", "layer_activation_norm") for layer in (0, 1)}
    for line in lines:
        assert {name for name in line if name.startswith("layer_")} == (names if line["step"] % 2 == 0 else set())
    due = lines[1]
    assert all(due[name] > 0 for name in names)
    # The rest of the gradient belongs to embedding, head and the last norm.
    assert due["layer_grad_norm/0"] ** 2 + due["layer_grad_norm/1"] ** 2 < due["grad_norm"] ** 2


def test_metrics_of_all_layers_get_a_name_each():
    assert by_layer({"loss": np.float32(2), "x": np.array([1.0, 3.0])}) == {"loss": 2.0, "x/0": 1.0, "x/1": 3.0}
