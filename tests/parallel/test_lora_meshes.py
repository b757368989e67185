"""LoRA and frozen parameters: loss and gradients of every mesh equal one device's, and nothing is computed in vain."""

import dataclasses

import jax
import numpy as np
import pytest
from meshes import Run, assert_close, in_one_stack, trimmed, unequal_batch, unpadded

import jaxllm.model.layers
from jaxllm.compile.jaxpr_flops import matmul_flops
from jaxllm.config.model_spec import parameters
from jaxllm.cost_model.flops import layer_matmul_parameters
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import trained

MICROBATCHES, ROWS, S = 4, 8, 16
KINDS = {
    "lora": ("model.lora.rank=2", "model.lora.alpha=6"),
    "some": ("model.lora.rank=3", "model.lora.targets=[down_proj, q_proj]", "model.tie_embeddings=true"),
    "freeze": ("train.freeze=[embedding, layers.*.mlp.*, head]",),
    "tied": ("train.freeze=[embedding, layers.attention]", "model.tie_embeddings=true", "model.num_kv_heads=1"),
    "layers": ("train.freeze=layers",),
}
# kind, ZeRO, (pipe, data, context, tensor), keys of parallel: a pairwise cover of the first three with every schedule.
CASES = [
    ("lora", 1, (1, 4, 1, 2), ()),
    ("lora", 3, (1, 2, 1, 4), ("remat=none",)),
    ("lora", 3, (2, 2, 1, 2), ("schedule=interleaved", "virtual_stages=2", "remat=full")),
    ("lora", 0, (1, 1, 1, 2), ("remat=offload",)),
    ("some", 2, (1, 2, 2, 2), ()),
    ("some", 0, (2, 1, 2, 2), ("schedule=gpipe",)),
    ("freeze", 3, (1, 8, 1, 1), ()),
    ("freeze", 1, (2, 2, 1, 2), ()),
    ("tied", 2, (2, 4, 1, 1), ()),
    ("tied", 0, (1, 2, 1, 2), ("replica=2",)),
    ("layers", 2, (1, 2, 1, 2), ()),
]
QUICK = CASES[:3] + CASES[4:6] + CASES[7:9]


def batch(seed=0):
    return unequal_batch(seed, (MICROBATCHES, ROWS, S), ends=1)


@pytest.fixture(scope="module")
def make_run(tiny_config):
    def make(kind, level, axes, more=()):
        keys = [f"{axis}={size}" for axis, size in zip(("pipe", "data", "context", "tensor"), axes, strict=True)]
        keys = [f"parallel.{key}" for key in (*keys, f"zero={level}", *more)]
        micro = ROWS // axes[1] // (2 if "replica=2" in more else 1)
        sizes = ("train.global_batch_sequences=32", f"train.microbatch_sequences={micro}", "model.num_layers=4")
        return Run(tiny_config(*KINDS[kind], *keys, *sizes), batch)

    with pytest.MonkeyPatch.context() as patch:
        # B is zero at the start, where A has no gradient.
        plain = jaxllm.model.layers.parameter
        begun = {"zeros": "normal"}
        patch.setattr(
            jaxllm.model.layers,
            "parameter",
            lambda rngs, model, spec: plain(
                rngs, model, dataclasses.replace(spec, initial=begun.get(spec.initial, spec.initial))
            ),
        )
        yield make


@pytest.fixture(scope="module")
def one_device(make_run):
    cache = {}

    def reference(kind):
        if kind not in cache:
            run = make_run(kind, 0, (1, 1, 1, 1))
            cache[kind] = (*run.gradients(), run.plain(run.state.params))
        return cache[kind]

    return reference


@pytest.mark.parametrize(
    ("kind", "level", "axes", "more"),
    [pytest.param(*case, marks=() if case in QUICK else (pytest.mark.slow,)) for case in CASES],
)
def test_loss_and_gradients_equal_one_device(make_run, one_device, kind, level, axes, more):
    expected_loss, expected, expected_params = one_device(kind)
    run = make_run(kind, level, axes, more)
    jax.tree.map(np.testing.assert_array_equal, run.plain(run.state.params), expected_params)
    loss, gradients = run.gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(plain(run, gradients), jax.device_get(expected), 1e-5)


def plain(run, gradients):
    """Gradients in the layout of one device."""
    table = trained(run.functions.table, run.functions.table)
    return in_one_stack(run.config, trimmed(unpadded(table, gradients), run.config.model.vocab_size))


def flops(config):
    """FLOPs of all matmuls of a step's gradients, as traced on one device."""
    run = config.resolve(1)
    mesh = make_mesh(run.parallel, jax.devices()[:1])
    functions = parallelize(run, mesh)
    rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()}
    with jax.set_mesh(mesh):
        return matmul_flops(jax.make_jaxpr(functions.value_and_grad)(functions.master, rows))


def test_no_matmul_makes_the_gradient_of_a_frozen_matrix(tiny_config):
    sizes = ("train.global_batch_sequences=32", "train.microbatch_sequences=8", "parallel.remat=none")
    full = tiny_config(*sizes)
    per_token = 2 * MICROBATCHES * ROWS * S
    layer = per_token * full.model.num_layers * layer_matmul_parameters(full.model)
    head = per_token * full.model.vocab_size * full.model.hidden_size
    mlp = per_token * full.model.num_layers * 3 * full.model.hidden_size * full.model.intermediate_size
    assert flops(full) - flops(tiny_config(*sizes, "train.freeze=[layers.mlp.*, head]")) == mlp + head
    lora = tiny_config(*sizes, *KINDS["lora"])
    adapters = sum(spec.size for spec in parameters(lora.model) if spec.is_lora)
    assert flops(lora) == flops(full) - layer - head + 3 * per_token * full.model.num_layers * adapters
