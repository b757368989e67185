"""DiLoCo's outer steps beside the next inner step (train.diloco_overlap)."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_walk import inputs
from meshes import unequal_batch
from placed_rounds import Placed, assert_equal, belongs
from run_files import records

from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.config.rounds import fragments_after, next_common_step
from jaxllm.mesh.axes import axis_sizes, batch_sharding
from jaxllm.run.loop import fit

SIZES = ("train.global_batch_sequences=8", "train.microbatch_sequences=1", "model.num_layers=4", "optimizer.epsilon=1e-3")
MESHES = {
    "one GPU": (),
    "data, ZeRO 1": ("parallel.replica=4", "parallel.data=2", "parallel.zero=1"),
    "data x tensor, ZeRO 3": ("parallel.replica=2", "parallel.data=2", "parallel.tensor=2", "parallel.zero=3"),
}
SMALL = ("model.num_layers=2", "train.global_batch_sequences=4", "model.compute_dtype=bfloat16")
OVERLAP = ("train.diloco_steps=4", "train.diloco_fragments=2", "train.diloco_overlap=true")


def assert_near(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize(("mesh", "bits"), [("data, ZeRO 1", 8), ("data x tensor, ZeRO 3", 32)])
def test_one_program_is_the_outer_step_and_the_inner_step(tiny_config, mesh, bits):
    """Both from the same state. Of the fragment's numbers a replica keeps its change in the inner step, on top of the common
    ones; all others are those of the inner step."""
    placed = Placed(tiny_config(*SIZES, *MESHES[mesh], *OVERLAP, f"train.diloco_bits={bits}"))
    config, training, before = placed.config, placed.training, placed.state(moved=0.1)
    arrays = unequal_batch(0, (config.num_microbatches, config.microbatch_rows, config.train.sequence_length), least=0.2)
    batch = {name: jax.device_put(a, batch_sharding(placed.mesh)) for name, a in arrays.items()}
    synced, outer = placed.outer_step(before, 1)
    with jax.set_mesh(placed.mesh):
        after, inner = training.jit_step(training.step)(jax.tree.map(jnp.copy, before), batch)
        step = training.jit_step(training.step, exchanges=True)
        found, metrics = step(jax.tree.map(jnp.copy, before), batch, placed.rounds.number(1))
    assert_near((found.params, found.momentum, found.residual), (synced.params, synced.momentum, synced.residual))
    assert (np.asarray(found.params["embedding"]) != np.asarray(before.params["embedding"])).any()

    def kept(mine, t, old, new):
        t, old, new = map(np.asarray, (t, old, new))
        return np.where(mine, t[None] + (new - old), new)

    mine = belongs(placed, 1, before.islands.params, leading=1)
    params = jax.tree.map(kept, mine, synced.params, before.islands.params, after.islands.params)
    assert_near(found.islands, dataclasses.replace(after.islands, params=params))
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, before)
    assert int(found.step) == int(before.step) + 1
    assert_near(metrics, {**inner, "outer": [outer]})
    assert float(outer["island_drift"]) > 1


@pytest.mark.slow
@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
@pytest.mark.parametrize(("mesh", "bits"), [("one GPU", 32), ("data, ZeRO 1", 4), ("data x tensor, ZeRO 3", 32)])
def test_on_gpus_the_exchange_runs_beside_the_whole_inner_step(tiny_config, mesh, bits):
    """It waits for nothing of that step, though XLA fuses what has the same operands, such as the changes with the update, and
    combines all-reduces of one kind, such as those of two norms."""
    given = (*SIZES, *MESHES[mesh], "parallel.replica=2", *OVERLAP, f"train.diloco_bits={bits}", *SMALL)
    config = tiny_config(*given)
    devices = gpu_devices(2, config.parallel.tensor * (int(config.parallel.data) if mesh != "one GPU" else 1))
    module = Module(compile_step(config, devices).as_text(), axis_sizes(config.resolve(len(devices)).parallel))
    entry = {at.instruction.name: at for at in module.walk() if at.among is module.computations[module.entry]}
    kinds = {name: at.instruction.op.removesuffix("-start") for name, at in entry.items()}
    between = [one for one in module.collectives() if "replica" in one.axes]
    sent = [one.name for one in between if one.elements > 100]
    needed, waiting = set(), list(sent)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [one.name for one in inputs(entry[name])]
    products = {name for name, kind in kinds.items() if kind in ("custom-call", "dot", "while")}
    assert products
    assert not needed & products
    assert [one.kind for one in between if one.name in sent] == (["all-reduce"] if bits == 32 else ["all-to-all", "all-gather"])
    assert between[-1].flops_behind > 0.95 * module.flops(module.entry)


def test_which_steps_exchange(tiny_config):
    given = (*SIZES, *MESHES["data, ZeRO 1"], "train.steps=9", "train.diloco_after_steps=1", "train.diloco_overlap=true")
    # (steps of a round, fragments) -> the fragment beside the step that follows so many steps
    expected = {
        (4, 2): [None, None, 1, None, 0, None, 1, None, None],
        (4, 1): [None, None, None, None, 0, None, None, None, None],
        (2, 2): [0, 1, 0, 1, 0, 1, 0, 1, None],
        # Before the last step, after which all are synchronised.
        (7, 1): [None] * 9,
    }
    for (length, count), fragments in expected.items():
        placed = Placed(tiny_config(*given, f"train.diloco_steps={length}", f"train.diloco_fragments={count}"))
        assert [placed.rounds.fragment_beside(done) for done in range(1, 10)] == fragments
        assert [fragments_after(placed.config.train, step) for step in range(2, 10)] == [[]] * 7 + [list(range(count))]
    waits = Placed(tiny_config(*given, "train.diloco_steps=4", "train.diloco_overlap=false")).rounds
    assert [waits.fragment_beside(done) for done in range(1, 10)] == [None] * 9


def test_what_a_checkpoint_has_done_is_not_done_again_and_all_else_is(tiny_config):
    """Fragment 0 is due after step 5. Whether the run before has synchronised it then, its own rounds tell."""
    given = (*SIZES, *MESHES["data, ZeRO 1"], "train.steps=9", "train.diloco_after_steps=1", "train.diloco_overlap=true")
    waits = {"diloco_steps": 4, "diloco_after_steps": 1, "steps": 9}
    cases = {
        1: [
            (waits | {"diloco_overlap": True}, 0),
            (waits | {"diloco_overlap": True, "steps": 5}, None),
            (waits | {"diloco_overlap": False}, None),
            (waits, None),
            (waits | {"diloco_steps": 2}, None),
            (waits | {"diloco_steps": 3}, 0),
            (waits | {"diloco_after_steps": 0}, 0),
        ],
        2: [
            (waits | {"diloco_fragments": 2}, None),
            # After step 5 it synchronised the other fragment, or none.
            (waits | {"diloco_fragments": 2, "diloco_steps": 8}, 0),
            (waits | {"diloco_fragments": 2, "diloco_steps": 6}, 0),
            (waits | {"diloco_fragments": 4}, None),
            (waits, None),
            (waits | {"diloco_steps": 8}, 0),
        ],
    }
    for count, befores in cases.items():
        rounds = Placed(tiny_config(*given, "train.diloco_steps=4", f"train.diloco_fragments={count}")).rounds
        for train, beside in befores:
            assert rounds.resumed({"config": {"train": train}, "step": 5}).fragment_beside(5) == beside, (count, train)
            assert rounds.fragment_beside(7) == (1 if count == 2 else None)


@pytest.mark.parametrize(("length", "common"), [(4, [6, 10, 12]), (1, list(range(2, 13)))])
def test_all_wait_for_the_steps_that_have_an_exchange_beside_them(length, common, tiny_config):
    rounds = ("train.steps=12", "train.diloco_after_steps=1", "train.diloco_overlap=true", f"train.diloco_steps={length}")
    config = tiny_config("parallel.replica=2", "parallel.data=4", *rounds)
    assert sorted({next_common_step(config, step) for step in range(1, 12)}) == common
    assert next_common_step(config, 0) == 1


# ----------------------------------------------------------------------------------------------------------------- the loop

EIGHT = ("run.cpu_devices=8", "parallel.replica=2", "parallel.data=4", "train.steps=9", "train.global_batch_sequences=8")
ROUNDS = (*EIGHT, *OVERLAP, "train.diloco_after_steps=1", "train.diloco_bits=4")
KEPT = ("checkpoint.every_steps=1", "checkpoint.keep=9", "train.eval_batches=1", "log.baselines=false")


def test_a_run_killed_before_a_due_exchange_resumes_exactly(tiny_config, tmp_path):
    """After step 3, whose exchange belongs to step 4. Metrics of an exchange are in the line of the step beside it."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    trainer = fit(tiny_config(*ROUNDS, *KEPT, f"run.dir={folder}"))
    # A synchronous step, and steps of rounds without and with an exchange.
    assert trainer.programs.traces == 3
    assert [r["step"] for r in records(folder) if "outer_grad_norm" in r] == [4, 6, 8, 9]
    assert_equal(trainer.state.islands.params, jax.tree.map(lambda x: np.stack([x, x]), trainer.state.params))
    assert all(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(trainer.state.momentum))
    shutil.copytree(folder, copy)
    for later in range(4, 10):
        shutil.rmtree(copy / "checkpoints" / str(later))
    resumed = fit(tiny_config(*ROUNDS, *KEPT, f"run.dir={copy}"))
    assert_equal(resumed.state, trainer.state)
    lines = [{r["step"]: (r["loss"], r.get("outer_grad_norm")) for r in records(run) if "loss" in r} for run in (folder, copy)]
    assert lines[0] == lines[1]
