"""Optimizer state on the host: the same numbers, less memory on the device, and checkpoints that fit either way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import Run

import jaxllm
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.report import warnings
from jaxllm.cost_model.flops import parameter_count
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.mesh.axes import HOST, make_mesh
from jaxllm.run.loop import fit
from jaxllm.train import offload
from jaxllm.train.build import build_training
from jaxllm.train.optimizer import make_optimizer
from jaxllm.train.step import make_update, what_to_offload

needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
OFFLOADS = ("optimizer", "optimizer_and_master")
ALL_ON_HOST = ("one device", "tensor", "zero 3, context", "zero 3, tensor")
"""Meshes with parallel.offload_state=all."""
MESHES = {
    "one device": (),
    "tensor": ("parallel.tensor=2",),
    "zero 0": ("parallel.data=2", "parallel.zero=0"),
    "zero 1, tensor": ("parallel.data=2", "parallel.tensor=2", "parallel.zero=1", "model.tie_embeddings=true"),
    "zero 2, context": ("parallel.data=2", "parallel.context=2", "parallel.zero=2"),
    "zero 3, context": ("parallel.data=2", "parallel.context=2", "parallel.zero=3", "parallel.remat=offload"),
    "zero 3, tensor": ("parallel.data=2", "parallel.tensor=2", "parallel.zero=3", "model.vocab_size=257"),
}


def batch(seed):
    ids = np.random.default_rng(seed).integers(0, 256, (2, 4, 17)).astype(np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 4, 16))
    return {"tokens": ids[..., :-1], "targets": ids[..., 1:], "mask": ids[..., 1:] > 9, "positions": positions}


AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}
"""XLA's simplifier rewrites quotients depending on the number of uses of a scalar. Adam's bias correction serves all parameters
in the plain update, but one part in the streamed one: with this pass, embedding and head would differ in the last bit."""


def after_three_steps(config):
    """(params, optimizer state, losses, the last batch's loss by loss_sum). Gradients and update are compiled separately,
    because without the simplifier XLA's CPU compiler crashes on collectives.
    """
    run = Run(config, batch)
    config, state, table, losses = run.config, run.state, run.functions.table, []
    shardings = build_training(config, run.mesh).shardings
    plain = config.parallel.offload_state == "none"
    chosen = (
        make_update(make_optimizer(config, table)) if plain else offload.streamed_update(config, table, shardings, run.mesh)
    )
    gradient, params, opt_state = jax.jit(run.functions.value_and_grad), state.params, state.opt_state
    update = jax.jit(
        chosen, donate_argnums=(1, 2), out_shardings=(shardings.params, shardings.opt_state), compiler_options=AS_WRITTEN
    )
    with jax.set_mesh(run.mesh):
        for seed in range(3):
            loss, gradients = gradient(params, run.place(batch(seed)))
            if config.parallel.offload_state == "all":
                assert kinds(gradients["layers"]) == {HOST}
                gradients = gradients, None
            params, opt_state = update(gradients, opt_state, params, jnp.float32(1e-3), jnp.bool_(True))
            losses.append(float(loss))
        total, _ = jax.jit(run.functions.loss_sum)(params, run.place(batch(2)))
    return params, opt_state, losses, float(total)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.nightly if "zero 2" in mesh else pytest.mark.slow) for mesh in MESHES]
)
def test_same_numbers_bit_for_bit(tiny_config, monkeypatch, mesh):
    dtype = "bfloat16" if "tensor" in mesh else "float32"
    # Also cuts embedding and head into several pieces.
    monkeypatch.setattr(offload, "PIECE_BYTES", 4096)
    common = (*MESHES[mesh], "data.mask_documents=false", "train.microbatch_sequences=2", f"model.compute_dtype={dtype}")
    if "parallel.data=2" not in common:
        common = (*common, "train.microbatch_sequences=4", "parallel.data=1")
    plain = after_three_steps(tiny_config(*common))
    for where in (*OFFLOADS, "all") if mesh in ALL_ON_HOST else OFFLOADS:
        moved = after_three_steps(tiny_config(*common, f"parallel.offload_state={where}"))
        jax.tree.map(np.testing.assert_array_equal, moved, plain)
        assert kinds(moved[1]) == {HOST}
        assert kinds(moved[0]) == ({"device"} if where == "optimizer" else {HOST})


@pytest.mark.parametrize(
    ("rows", "mesh"), [(4, "one device"), (8, "one device"), (4, "zero 3, context"), (8, "zero 3, tensor")]
)
def test_gradients_on_the_host_have_the_norm_of_those_on_the_device(tiny_config, rows, mesh):
    """Steps with two microbatches and with one, clipped far below their norm."""
    axes = MESHES[mesh] or ("parallel.data=1",)
    own_rows = rows // (2 if MESHES[mesh] else 1)
    common = (*axes, f"train.microbatch_sequences={own_rows}", "optimizer.clip_norm=0.01", "train.seed=1")

    def steps(where):
        run = Run(tiny_config(*common, "data.mask_documents=false", f"parallel.offload_state={where}"), batch)
        step, state, norms = jax.jit(run.step, donate_argnums=0), run.state, []
        reshaped = lambda seed: {name: x.reshape(8 // rows, rows, -1) for name, x in batch(seed).items()}  # noqa: E731
        with jax.set_mesh(run.mesh):
            for seed in range(3):
                state, metrics = step(state, run.place(reshaped(seed)))
                norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return norms, jax.device_get(state.params), jax.device_get(state.opt_state)

    (norms, params, moments), (expected_norms, expected, expected_moments) = steps("all"), steps("none")
    assert min(norm for _, norm in norms) > 0.1
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)
    # The update hardly depends on the gradients' scale, their moments do.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-8), moments, expected_moments)


@pytest.mark.parametrize(
    ("before", "after"),
    [("none", "optimizer_and_master"), ("none", "all"), *((before, "none") for before in (*OFFLOADS, "all"))],
)
@pytest.mark.slow
def test_checkpoints_fit_whatever_is_offloaded(tiny_config, tmp_path, before, after):
    """Two steps, a checkpoint, and two more with another offload equal four steps without."""
    zero = 3 if "all" in (before, after) else 1
    common = ("run.cpu_devices=8", "parallel.data=4", "parallel.tensor=2", f"parallel.zero={zero}")
    common = (*common, "optimizer.schedule=constant", "checkpoint.every_steps=2", "train.eval_batches=1")
    folder = tmp_path / "moved"
    fit(tiny_config(*common, f"run.dir={folder}", "train.steps=2", f"parallel.offload_state={before}"))
    config = tiny_config(*common, f"run.dir={folder}", f"parallel.offload_state={after}")
    trainer = jaxllm.Trainer(config, resumes=True)
    trainer.restore(Checkpoints(folder, config.checkpoint))
    assert trainer.step == 2
    assert kinds(trainer.state.opt_state) == ({HOST} if after != "none" else {"device"})
    list(trainer.steps(2))
    trainer.close()
    whole = fit(tiny_config(*common, f"run.dir={tmp_path / 'whole'}"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), trainer.state, whole.state)


@pytest.mark.parametrize("what", ["optimizer_and_master", "all"])
def test_an_offloaded_model_can_be_used(tiny_config, what):
    """Evaluation and load_model read weights that are in host memory."""
    trainer = jaxllm.Trainer(tiny_config("parallel.data=8", "parallel.zero=3", f"parallel.offload_state={what}"))
    plain = jaxllm.Trainer(tiny_config("parallel.data=8"))
    assert trainer.evaluate(2).loss == plain.evaluate(2).loss
    tokens = jnp.ones((1, 8), jnp.int32)
    with jax.set_mesh(trainer.mesh):
        np.testing.assert_array_equal(trainer.model(tokens), plain.model(tokens))
    trainer.close()
    plain.close()


def test_devices_without_host_memory_keep_the_state(tiny_config, caplog):
    class Device:
        platform = "cpu"

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})()]

    class Mesh:
        devices = np.array([Device()])

    config = tiny_config("parallel.offload_state=optimizer")
    assert what_to_offload(config, Mesh()) == "none"
    assert "parallel.offload_state=optimizer changes nothing here" in caplog.text
    assert what_to_offload(config, make_mesh(config.resolve(8).parallel)) == "optimizer"


def test_none_may_be_written_as_null(tiny_config):
    assert tiny_config("parallel.offload_state=null").parallel.offload_state == "none"


# -------------------------------------------------------------------------------------------------- compiled for H100s

SIZES = ("model.hidden_size=512", "model.intermediate_size=2048", "model.num_layers=16", "model.vocab_size=512")
SMALL_BATCH = ("train.sequence_length=128", "parallel.remat=full", "model.compute_dtype=bfloat16")


@needs_gpu_compiler
@pytest.mark.slow
def test_the_device_holds_no_more_than_pieces(tiny_config, capfd):
    """By XLA's figures, arguments shrink by exactly the offloaded bytes, temporaries grow by at most a piece of each array, and
    nothing is computed or copied on the host.
    """
    parameters = parameter_count(tiny_config(*SIZES).model)

    def compiled(where):
        config = tiny_config(*SIZES, *SMALL_BATCH, f"parallel.offload_state={where}")
        program = compile_step(config, gpu_devices(1, 1))
        assert "host compute" not in program.as_text()
        return program.memory_analysis(), program.as_text()

    plain, _ = compiled("none")
    for where, moved in (("optimizer", 8 * parameters), ("optimizer_and_master", 12 * parameters)):
        memory, text = compiled(where)
        assert plain.argument_size_in_bytes - memory.argument_size_in_bytes == pytest.approx(moved, rel=1e-3)
        assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == pytest.approx(moved, rel=1e-3)
        assert memory.host_temp_size_in_bytes == 0
        assert memory.temp_size_in_bytes - plain.temp_size_in_bytes < 8 * parameters / 8
        assert "S(5)" in text
    assert "host compute" not in capfd.readouterr().err


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_on_the_host_leaves_a_few_layers_on_the_device(tiny_config, ranks):
    """By XLA's figures: the host has state, weights and sums once, and computes nothing; and eight layers more need no more on
    the device but their inputs."""

    def compiled(layers):
        batch = ("train.global_batch_sequences=8", f"train.microbatch_sequences={4 // ranks}", "parallel.zero=3")
        more = (*SIZES, *SMALL_BATCH, *batch, f"model.num_layers={layers}", "parallel.offload_state=all")
        config = tiny_config(*more, "data.mask_documents=false", "model.tie_embeddings=true").resolve(ranks)
        program = compile_step(config, gpu_devices(1, ranks))
        text, memory = program.as_text(), program.memory_analysis()
        assert not list(warnings(config, (), text, None, None, 0))
        assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes
        assert memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes == pytest.approx(
            estimate_memory(config).host_bytes, rel=1e-3
        )
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    few, many = compiled(8), compiled(16)
    inputs = 8 * 2 * 4 // ranks * 128 * 512
    assert 0 < many - few < 1.1 * inputs


@needs_gpu_compiler
@pytest.mark.slow
def test_the_update_alone_needs_a_few_layers(tiny_config):
    """Compiles the update alone, because the peak of the complete step would hide it: 32 layers need no more than 8."""

    def temporary_bytes(layers):
        overrides = (*SIZES, *SMALL_BATCH, f"model.num_layers={layers}", "parallel.offload_state=optimizer")
        config = tiny_config(*overrides).resolve(1)
        mesh = make_mesh(config.parallel, gpu_devices(1, 1))
        training = build_training(config, mesh)
        shardings = training.shardings
        update = offload.streamed_update(config, training.functions.table, shardings, mesh)

        def placed(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        with jax.set_mesh(mesh):
            state = jax.tree.map(placed, jax.eval_shape(training.create, 0), shardings)
            jitted = jax.jit(update, donate_argnums=(1, 2), out_shardings=(shardings.params, shardings.opt_state))
            how = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_))
            traced = jitted.trace(state.params, state.opt_state, state.params, *how)
            program = traced.lower(lowering_platforms=("cuda",)).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(32) < 1.1 * temporary_bytes(8)
