"""FP8 in the train step: within rounding of float32, and of one device, on every kind of mesh; and as compiled for H100s."""

import re
from collections import Counter

import numpy as np
import pytest
from meshes import Run, assert_close
from tiny import SMALL_MODEL

from jaxllm.compile import aot
from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.compile.kernels import kernels, part_of
from jaxllm.compile.overlap import by_kind, simulate_overlap
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.mesh.axes import axis_sizes

M, ROWS, S = 2, 8, 32
FP8 = "model.matmul_dtype=fp8"
SIZES = (
    *("model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=4", "model.num_kv_heads=2", "model.num_layers=2"),
    *(f"train.sequence_length={S}", f"train.global_batch_sequences={M * ROWS}"),
    *("optimizer.learning_rate=1e-2", "train.steps=20"),
)
MESHES = {
    "data, zero 3, tensor": ("parallel.data=4", "parallel.tensor=2", "parallel.zero=3"),
    "data, unrolled": ("parallel.data=4", "model.scan_layers=false"),
    "pipe, tensor": ("parallel.pipe=2", "parallel.data=1", "parallel.tensor=2"),
    "context, tensor past the key-value heads": ("parallel.data=1", "parallel.context=2", "parallel.tensor=4"),
}
needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


def batch():
    rng = np.random.default_rng(0)
    shape = (M, ROWS, S)
    ids = rng.integers(0, 256, (M, ROWS, S + 1)).astype(np.int32)
    return {
        "tokens": ids[..., :-1],
        "targets": ids[..., 1:],
        "mask": rng.random(shape) < 0.9,
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), shape).copy(),
        "segments": (np.arange(S) >= rng.integers(1, S, (M, ROWS, 1))).astype(np.int32) + 1,
    }


@pytest.fixture(scope="module")
def make_run(tiny_config):
    """With one batch in every step: so a dozen steps learn it."""
    return lambda *overrides: Run(tiny_config(*SIZES, *overrides), lambda seed: batch())


@pytest.fixture(scope="module")
def one(make_run):
    return make_run(FP8, "parallel.data=1", f"train.microbatch_sequences={ROWS}")


@pytest.fixture(scope="module")
def gradients_of_one(one):
    loss, gradients = one.gradients()
    return float(loss), one.plain(gradients)


def test_one_device_is_within_rounding_of_float32(make_run, gradients_of_one):
    exact = make_run("parallel.data=1", f"train.microbatch_sequences={ROWS}")
    loss, gradients = exact.gradients()
    assert gradients_of_one[0] == pytest.approx(float(loss), rel=2e-3)
    assert gradients_of_one[0] != float(loss)
    assert_close(gradients_of_one[1], exact.plain(gradients), 0.2)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_is_within_rounding_of_one_device(make_run, gradients_of_one, name):
    overrides = MESHES[name]
    data = int(next(o for o in overrides if o.startswith("parallel.data="))[-1])
    run = make_run(FP8, f"train.microbatch_sequences={ROWS // data}", *overrides)
    loss, gradients = run.gradients()
    assert float(loss) == pytest.approx(gradients_of_one[0], rel=2e-3)
    assert_close(run.plain(gradients), gradients_of_one[1], 0.2)


def test_layers_with_arrays_of_their_own_have_the_gradients_of_a_loop(make_run, gradients_of_one):
    """Rounding a matrix once, and adding in the matmul, changes nothing in float32."""
    own = make_run(FP8, "parallel.data=1", f"train.microbatch_sequences={ROWS}", "model.scan_layers=false")
    loss, gradients = own.gradients()
    assert float(loss) == pytest.approx(gradients_of_one[0], rel=1e-6)
    assert_close(own.plain(gradients), gradients_of_one[1], 1e-6)


def test_it_learns(one):
    losses = one.losses(12)
    assert losses[-1] < losses[0] - 0.3


# --------------------------------------------------------------------------------------------------- compiled for H100s


def config(*overrides):
    train = {"steps": 2, "sequence_length": 512, "global_batch_sequences": 16, "microbatch_sequences": 2}
    sections = {"model": SMALL_MODEL, "parallel": {"tensor": 2}, "train": train, "data": {"mask_documents": False}}
    return load_config(sections, overrides)


@pytest.fixture(scope="module")
def compiled():
    devices = gpu_devices(1, 8)
    return {dtype: compile_step(config(f"model.matmul_dtype={dtype}"), devices).as_text() for dtype in ("compute_dtype", "fp8")}


@needs_gpu_compiler
@pytest.mark.slow
def test_xla_multiplies_fp8(compiled):
    """Seven products of a layer forward, and both gradients of each: in a loop, over two tensor ranks, without a device to time
    kernels on. The head's and attention's stay bfloat16."""

    def products(text):
        calls = [line for line in text.splitlines() if '"__cublas$lt$matmul$f8"' in line]
        return len(calls), sum('"operand_precision":["HIGHEST","HIGHEST"]' in line for line in calls)

    assert products(compiled["fp8"]) == (3 * 7, 2 * 7)
    assert products(compiled["compute_dtype"]) == (0, 0)
    plain = [line for line in compiled["fp8"].splitlines() if '"__cublas$lt$matmul"' in line]
    assert not [line for line in plain if re.search(r"(mlp|query|key|value|output)/", line.partition("op_name=")[2])]


@needs_gpu_compiler
@pytest.mark.slow
def test_layers_with_arrays_of_their_own_round_matrices_once_and_add_in_the_matmul():
    """Two layers of seven matrices, two microbatches: forward, the gradients of inputs, those of weights."""
    own = config(FP8, "parallel.tensor=1", "train.global_batch_sequences=32").resolve(8)
    text = compile_step(own, gpu_devices(1, 8)).as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="__cublas$lt$matmul$f8"' in line]
    assert len(calls) == 3 * 2 * 7
    of_weights = [line for line in calls if re.search(r"= \(f32\[", line)]
    assert len(of_weights) == 2 * 7
    assert all('"beta":1' in line for line in of_weights)
    module = Module(text, axis_sizes(own.parallel))
    inside = [kernel for kernel in kernels(module) if kernel.runs > 1]
    # What is rounded in the loop has tokens; no FP8 array is copied into another layout, and no sum of a matrix takes a kernel.
    types = {i.name: i.result for among in module.computations.values() for i in among}
    rounded = [types[kernel.name] for kernel in inside if "f8e" in types[kernel.name] and kernel.kind != "matmul"]
    assert rounded
    assert all(re.search(r"f8e\w+\[[\d,]*\b512\b", result) for result in rounded)
    assert not [kernel.name for kernel in inside if kernel.kind == "copy" and "f8e" in types[kernel.name]]
    assert sum(kernel.moved_bytes for kernel in inside if part_of(kernel) == "sums") < 2**16


@needs_gpu_compiler
@pytest.mark.slow
def test_nothing_more_is_sent(compiled):
    def sent(text):
        sizes = axis_sizes(config().resolve(8).parallel)
        found = Counter()
        for line in by_kind(simulate_overlap(Module(text, sizes), GPUS["h100-80gb"], 8)):
            # Without FP8 a few sums over tensor are reduced that are scattered with it.
            found[line.axes] += line.sent_bytes
        return found

    plain, fp8 = sent(compiled["compute_dtype"]), sent(compiled["fp8"])
    assert fp8.keys() == plain.keys()
    for axes, size in fp8.items():
        assert size <= 1.01 * plain[axes], axes


@needs_gpu_compiler
def test_a_kind_of_gpu_without_it_is_refused_before_anything_is_compiled():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU of Ada, Hopper or later"):
        aot.trace_step(config(FP8), gpu_devices(1, 8, GPUS["a100-80gb"]))
