"""Compares the train step with its definition: accumulation, clipping, decay, schedules."""

import re
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.mesh.axes import make_mesh
from jaxllm.train.build import build_training
from jaxllm.train.optimizer import make_learning_rate, make_optimizer
from jaxllm.train.step import clip_by_norm, make_update

CHECKOUT = Path(__file__).parents[2]


def build(config):
    """(state, jitted step, functions, mesh) on one device."""
    config = config.resolve(1)
    mesh = make_mesh(config.parallel, jax.devices()[:1])
    training = build_training(config, mesh)
    with jax.set_mesh(mesh):
        return training.create_state(0), jax.jit(training.step), training.functions, mesh


def random_batch(microbatches, rows, S=16):
    """Masks differ strongly between rows. The first row has no targets."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (microbatches * rows, S + 1))
    mask = rng.random((microbatches * rows, S)) < np.linspace(0, 1, microbatches * rows)[:, None]
    arrays = {
        "tokens": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "mask": mask,
        "positions": np.tile(np.arange(S, dtype=np.int32), (microbatches * rows, 1)),
    }
    return {name: jnp.asarray(a.reshape(microbatches, rows, S)) for name, a in arrays.items()}


def test_microbatches_equal_one_batch(tiny_config):
    """With unequal masks the loss is the mean over all valid targets, not a mean of means."""
    results = {}
    for rows in (8, 2, 1):
        _, _, functions, mesh = build(tiny_config(f"train.microbatch_sequences={rows}"))
        params = functions.initialize(jax.random.key(0))
        with jax.set_mesh(mesh):
            results[rows] = jax.jit(functions.value_and_grad)(params, random_batch(8 // rows, rows))
            total, count = jax.jit(functions.loss_sum)(params, random_batch(8 // rows, rows))
        np.testing.assert_allclose(results[rows][0], total / count.astype(jnp.float32), rtol=1e-6)
        assert count == random_batch(1, 8)["mask"].sum()
    for rows in (2, 1):
        np.testing.assert_allclose(results[rows][0], results[8][0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), results[rows][1], results[8][1])


def test_a_batch_without_targets_changes_no_parameter(tiny_config):
    state, step, _, mesh = build(tiny_config("optimizer.weight_decay=0.0"))
    batch = random_batch(1, 8)
    batch["mask"] = jnp.zeros_like(batch["mask"])
    with jax.set_mesh(mesh):
        after, metrics = step(state, batch)
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


def test_bfloat16_computes_from_float32_masters(tiny_config):
    state, step, functions, mesh = build(tiny_config("model.compute_dtype=bfloat16"))
    _, _, exact, _ = build(tiny_config())
    batch = random_batch(2, 4)
    with jax.set_mesh(mesh):
        after, _ = step(state, batch)
        loss, gradients = jax.jit(functions.value_and_grad)(state.params, batch)
        exact_loss, exact_gradients = jax.jit(exact.value_and_grad)(state.params, batch)
    arrays = [*jax.tree.leaves((after.params, gradients)), *jax.tree.leaves(after.opt_state)]
    assert {str(a.dtype) for a in arrays} == {"float32", "int32"}
    np.testing.assert_allclose(loss, exact_loss, rtol=2e-3)

    def close(a, b):
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)

    jax.tree.map(close, gradients, exact_gradients)


def test_decay_is_on_matrices_only(tiny_config):
    config = tiny_config("optimizer.weight_decay=0.5")
    _, _, functions, _ = build(config)
    ones = jax.tree.map(lambda p: jnp.ones(p.shape), functions.table)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    optimizer = make_optimizer(config, functions.table)
    after, _ = make_update(optimizer)(zeros, optimizer.init(ones), ones, jnp.asarray(1.0), jnp.asarray(True))
    for path, param in jax.tree_util.tree_leaves_with_path(after):
        np.testing.assert_array_equal(param, 1.0 if "scale" in jax.tree_util.keystr(path) else 0.5)


def test_clipping_scales_the_whole_gradient():
    gradients = {"a": jnp.asarray([3.0]), "b": jnp.asarray([4.0])}
    norm = jnp.asarray(5.0)
    np.testing.assert_allclose(jax.tree.leaves(clip_by_norm(gradients, norm, 1.0)), [[0.6], [0.8]], rtol=1e-6)
    np.testing.assert_array_equal(jax.tree.leaves(clip_by_norm(gradients, norm, 10.0)), [[3.0], [4.0]])
    assert clip_by_norm(gradients, norm, None) is gradients


SCHEDULES = {
    # 100 steps of 128 tokens, peak 1, warm-up of 10 steps, floor 0.1: rate after steps 5, 10, 55, 80, 90, 100.
    "cosine": [0.5, 1.0, 0.55, 0.1 + 0.45 * (1 + np.cos(np.pi * 7 / 9)), 0.1 + 0.45 * (1 + np.cos(np.pi * 8 / 9)), 0.1],
    "linear": [0.5, 1.0, 0.55, 0.3, 0.2, 0.1],
    "wsd": [0.5, 1.0, 1.0, 1.0, 0.55, 0.1],
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("larger", [1, 2**22], ids=["thousands", "billions"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_counted_in_tokens(tiny_config, name, larger):
    # Warm-up of 5.4 billion tokens does not fit an int32.
    overrides = [f"optimizer.schedule={name}", "optimizer.learning_rate=1.0", "train.steps=100"]
    sizes = [f"optimizer.warmup_tokens={1280 * larger}", f"train.global_batch_sequences={8 * larger}"]
    rate = make_learning_rate(tiny_config(*overrides, *sizes))
    rates = [float(rate(jnp.asarray(step - 1))) for step in (5, 10, 55, 80, 90, 100)]
    np.testing.assert_allclose(rates, SCHEDULES[name], rtol=1e-5)


def test_the_readme_names_the_files_that_a_step_runs_in(tiny_config):
    """Nine tenths of the distinct lines that the trace of a step runs, give or take two in a hundred."""
    page = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    said = page.partition("Nine tenths of the lines that a step")[2].partition("\n\n")[0]
    files = re.findall(r"`(jaxllm/\S+\.py)`", said)
    lines = sum((CHECKOUT / file).read_text(encoding="utf-8").count("\n") for file in files)
    assert len(files) == 12
    assert f"twelve files of {round(lines, -2):,} lines" in said
    config = tiny_config("train.microbatch_sequences=4").resolve(1)
    # The first trace also fills caches, if no test did so before.
    first, training = (build_training(config, make_mesh(config.parallel, jax.devices()[:1])) for _ in range(2))
    jax.eval_shape(first.step, first.layout(), random_batch(2, 4))
    layout, run, before = training.layout(), set(), sys.gettrace()

    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if not file.startswith(f"{CHECKOUT}/jaxllm/"):
            return None
        run.add((file.removeprefix(f"{CHECKOUT}/"), frame.f_lineno))
        return note

    sys.settrace(note)
    try:
        jax.eval_shape(training.step, layout, random_batch(2, 4))
    finally:
        sys.settrace(before)
    assert len(run) > 500
    # JAX calls these two where it keeps a compiled program.
    run = [file for file, _ in run if file not in ("jaxllm/machine/program_cache.py", "jaxllm/private_jax.py")]
    share = sum(file in files for file in run) / len(run)
    assert 0.88 < share < 0.92, (share, sorted(Counter(run).items()))
