"""What a pipelined step keeps, and where: XLA's figures for the compiled step, on CPU devices and for H100s without one."""

import math
import re
from typing import NamedTuple

import jax
import pytest
from hlo_walk import inputs, until

from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import ON_HOST, Module
from jaxllm.config import load_config
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.activations import bytes_per_token_and_layer, is_blockwise
from jaxllm.mesh.axes import axis_sizes
from jaxllm.pipeline_schedule import make_schedule

needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
    "compute_dtype": "float32",
}
MEDIUM = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 4096,
    "compute_dtype": "bfloat16",
    "attention": "cudnn",
}
LLAMA_8B = {"name": "llama-3.1-8b", "attention": "cudnn"}
CPU = {"pipe": 4, "tensor": 1}
H100 = {"pipe": 4, "tensor": 2}


def configured(model, length, schedule, microbatches, remat="full", **parallel):
    """One sequence a microbatch."""
    train = {"steps": 1, "sequence_length": length, "global_batch_sequences": microbatches, "microbatch_sequences": 1}
    V = 2 if schedule == "interleaved" else 1
    parallel = {"data": 1, "schedule": schedule, "virtual_stages": V, "remat": remat, **parallel}
    base = {"model": model, "train": train, "data": {"mask_documents": False}, "parallel": parallel}
    return load_config(base, ["optimizer.warmup_tokens=0"])


def compiled(config):
    count = math.prod(axis_sizes(config.parallel).values())
    bfloat16 = config.model.compute_dtype == "bfloat16"
    return compile_step(config, gpu_devices(hosts=1, gpus_per_host=8) if bfloat16 else jax.devices()[:count])


def temporary(*arguments, **parallel):
    """Bytes. The batch is an argument, and so is not in them."""
    return compiled(configured(*arguments, **parallel)).memory_analysis().temp_size_in_bytes


def bytes_per_slot(config):
    """(on the device, in the host's memory) of one microbatch's residuals of one chunk: layers x tokens x named tensors."""
    model, parallel = config.model, config.parallel
    layers = -(-model.num_layers // (parallel.pipe * parallel.virtual_stages))
    held = bytes_per_token_and_layer(policy_of(parallel.remat, model), config, blockwise=is_blockwise(config))
    kept, offloaded = (sum(tensors.values()) for tensors in (held.kept, held.offloaded))
    return layers * config.train.sequence_length * kept, layers * config.train.sequence_length * offloaded


def hidden_bytes(config):
    """Of one rank's part of a hidden state: gpipe keeps one for each microbatch, whose loss waits for the last forward."""
    itemsize = 2 if config.model.compute_dtype == "bfloat16" else 4
    ranks = config.parallel.context * config.parallel.tensor
    return config.train.sequence_length * config.model.hidden_size * itemsize / ranks


# -------------------------------------------------------------------------------------------------- microbatches and memory


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_memory_does_not_grow_with_microbatches_on_cpu(schedule):
    at = {**SMALL, "num_layers": 16}
    eight, most = (temporary(at, 256, schedule, microbatches, **CPU) for microbatches in (8, 128))
    assert most == pytest.approx(eight, rel=0.01)


def test_gpipes_memory_grows_by_a_slot_for_each_microbatch_on_cpu():
    at = {**SMALL, "num_layers": 16}
    eight, many, most = (temporary(at, 256, "gpipe", microbatches, **CPU) for microbatches in (8, 32, 128))
    config = configured(at, 256, "gpipe", 8, **CPU)
    slot = bytes_per_slot(config)[0] + hidden_bytes(config)
    assert (many - eight) / 24 == pytest.approx(slot, rel=0.05)
    assert (most - many) / 96 == pytest.approx(slot, rel=0.05)


@needs_gpu_compiler
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("1f1b", marks=pytest.mark.slow),
        pytest.param("interleaved", marks=pytest.mark.nightly),
        pytest.param("gpipe", marks=pytest.mark.slow),
    ],
)
def test_memory_of_an_8b_model_on_eight_h100s(schedule):
    eight, most = (temporary(LLAMA_8B, 8192, schedule, microbatches, **H100) for microbatches in (8, 128))
    if schedule != "gpipe":
        assert most == pytest.approx(eight, rel=0.01)
        return
    config = configured(LLAMA_8B, 8192, "gpipe", 8, **H100)
    slot = bytes_per_slot(config)[0] + hidden_bytes(config)
    assert (most - eight) / 120 == pytest.approx(slot, rel=0.05)


# ------------------------------------------------------------------------------------------------- bytes, by the names' sum


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("remat", "parallel"),
    [
        pytest.param("full", H100, marks=pytest.mark.slow),
        pytest.param("selective", H100, marks=pytest.mark.nightly),
        pytest.param({"mlp_up": "keep", "query": "keep"}, H100, marks=pytest.mark.nightly),
        pytest.param("full", {"pipe": 2, "context": 2, "tensor": 2, "context_method": "ring"}, marks=pytest.mark.nightly),
        pytest.param("selective", {"pipe": 2, "context": 2, "tensor": 2, "context_method": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_a_slot_is_the_sum_of_the_named_tensors(remat, parallel):
    """Under gpipe each microbatch more is a slot more, and nothing else but its finished hidden state: XLA's difference is the
    closed form of cost_model/activations.py. `full` keeps 2 S D / (c t) bytes a layer.
    """
    at = {**MEDIUM, "num_layers": 6 * parallel["pipe"]}
    few, many = (configured(at, 2048, "gpipe", microbatches, remat, **parallel) for microbatches in (8, 24))
    difference = compiled(many).memory_analysis().temp_size_in_bytes - compiled(few).memory_analysis().temp_size_in_bytes
    kept, offloaded = bytes_per_slot(few)
    assert offloaded == 0
    if remat == "full":
        assert kept == 6 * 2 * 2048 * 1024 / (parallel["tensor"] * parallel.get("context", 1))
    assert difference / 16 == pytest.approx(kept + hidden_bytes(few), rel=0.05)


# -------------------------------------------------------------------------------------------------------------- the host


class HostCopy(NamedTuple):
    to_host: bool
    executed: int
    loops: tuple[int, ...]
    asynchronous: bool
    spans_matmul: bool


def host_copies(module):
    """Slices of arrays in host memory that are copied to or from the device. XLA fuses the slice with the copy, and starts it
    as `fusion-start` if it can."""
    for at in module.walk():
        asynchronous = at.instruction.op == "fusion-start"
        if asynchronous or at.instruction.op in ("fusion", "copy", "dynamic-slice", "dynamic-update-slice"):
            between, end = until(at, "fusion-done") if asynchronous else ([], at.instruction)
            to_host = ON_HOST in end.result
            if to_host or any(ON_HOST in one.result for one in inputs(at)):
                spans_matmul = any(module.has_matmul(one) for one in between)
                yield HostCopy(to_host, at.executed, at.loops, asynchronous, spans_matmul)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("1f1b", "offload"),
        pytest.param("interleaved", "offload", marks=pytest.mark.slow),
        pytest.param("1f1b", {"block_input": "offload", "mlp_gate": "offload", "mlp_up": "keep"}, marks=pytest.mark.slow),
    ],
)
def test_offloaded_tensors_wait_in_the_host_and_move_behind_matmuls(capfd, schedule, remat):
    V, M, layers = 2 if schedule == "interleaved" else 1, 16, 6
    config = configured({**MEDIUM, "num_layers": layers * 4 * V}, 2048, schedule, M, remat, **H100)
    step = compiled(config)
    text, warnings = step.as_text(), capfd.readouterr().err
    assert not re.search(r"host.?compute|compute_type", text + warnings, re.IGNORECASE)
    assert ON_HOST in text
    slots = make_schedule(schedule, 4, M, V).slots
    assert slots == 4 * V + 4
    assert step.memory_analysis().host_temp_size_in_bytes == slots * bytes_per_slot(config)[1]

    tensors = len(policy_of(config.parallel.remat, config.model).offload)
    copies = list(host_copies(Module(text, axis_sizes(config.parallel))))
    units = M * V + 3
    stores, loads = ([copy for copy in copies if copy.to_host is to_host] for to_host in (True, False))
    assert sum(copy.executed for copy in stores) == units * layers * tensors
    # Read one layer ahead: the last turn of a chunk reads one for nothing.
    assert sum(copy.executed for copy in loads) == units * (layers + 1) * tensors
    assert all(copy.asynchronous for copy in copies)
    in_layers = [copy for copy in copies if copy.loops[-1:] in ((layers,), (layers - 1,))]
    assert len(in_layers) >= 2 * tensors
    assert all(copy.spans_matmul for copy in in_layers)
