"""What a context-parallel step sends and keeps: compiled for H100s without one, and on CPU devices."""

import jax
import pytest

from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.config import load_config
from jaxllm.mesh.axes import axis_sizes

L = 3
MODEL = {
    "num_layers": L,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
    "compute_dtype": "bfloat16",
}
needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


def config(S, context, *overrides):
    train = {"steps": 1, "sequence_length": S, "global_batch_sequences": 2, "microbatch_sequences": 1}
    parallel = {"context": context, "context_method": "ring", "data": 1}
    return load_config({"model": MODEL, "train": train, "parallel": parallel}, overrides)


def temporary_mib(devices, S, context, *overrides):
    step = compile_step(config(S, context, "parallel.remat=full", *overrides), devices[:context])
    return step.memory_analysis().temp_size_in_bytes / 2**20


def on(target):
    return jax.devices() if target == "cpu" else gpu_devices(hosts=1, gpus_per_host=8)


@pytest.mark.parametrize(
    "target",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("h100", marks=[pytest.mark.nightly, needs_gpu_compiler])],
)
def test_memory_falls_as_the_context_grows_and_is_flat_at_a_fixed_share(target):
    """Temporaries at S = 65536 over 2, 4, 8 ranks, and with 4096 positions a rank. What does not depend on S is taken off."""
    devices, dtype = on(target), "float32" if target == "cpu" else "bfloat16"
    more = ("data.mask_documents=true", f"model.compute_dtype={dtype}", "train.loss_chunk_tokens=256")
    constant = temporary_mib(devices, 256, 2, *more)
    two, four, eight = (temporary_mib(devices, 65536, c, *more) - constant for c in (2, 4, 8))
    # A ring of two has no loop, and so one buffer less: its figures are a little below the line through the others.
    assert eight < 0.54 * four < 0.36 * two
    flat = [temporary_mib(devices, 4096 * c, c, *more) for c in (2, 4, 8)]
    # Nor has the backward of four: a loop of one turn is inlined. On CPU that is 6%.
    assert flat[2] < 1.07 * flat[1] < 1.28 * flat[0]


@needs_gpu_compiler
@pytest.mark.parametrize(("context", "tensor", "masks"), [(8, 1, "false"), (4, 2, "true")])
@pytest.mark.slow
def test_only_the_ring_crosses_the_context_behind_attention_and_weights_once_a_step(context, tensor, masks):
    chosen = config(8192, context, f"parallel.tensor={tensor}", f"data.mask_documents={masks}").resolve(8)
    compiled = compile_step(chosen, gpu_devices(hosts=1, gpus_per_host=8))
    assert "__cudnn$fmha" in compiled.as_text()
    found = Module(compiled.as_text(), axis_sizes(chosen.parallel)).collectives()
    over_context = [c for c in found if "context" in c.axes]
    keys = [c for c in over_context if c.kind == "collective-permute"]
    assert keys
    assert all(c.asynchronous and c.spans_matmul for c in keys)
    # Once forward and once backward for keys and values, once for their gradients: a hop, layer and microbatch each.
    sent = {d: sum(c.executed for c in keys for kind, _ in c.buffers if kind == d) for d in ("bf16", "f32")}
    hops = L * chosen.num_microbatches * (context - 1)
    assert sent == {"bf16": 2 * hops, "f32": hops}
    # Weights and gradients: once a step, a layer at a time. XLA takes one layer's turn out of the loop.
    in_layers = [c for c in over_context if c.kind != "collective-permute" and c.loops]
    assert {c.kind: c.loops for c in in_layers} == {"all-gather": (L - 1,), "reduce-scatter": (L - 1,)}
    assert len(in_layers) == 2
