"""What the compiled step sends, how often and behind what; and what it keeps. On CPU devices, and compiled for eight H100s
without one (skipped where the extra `aot` is not installed).
"""

import math

import jax
import pytest

from jaxllm.compile import aot
from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.config import ConfigError
from jaxllm.cost_model.flops import parameter_count
from jaxllm.mesh.axes import axis_sizes, make_mesh
from jaxllm.parallel.parameters import parameter_table
from jaxllm.train.build import build_training

L, M, DEVICES = 4, 4, 8
SIZES = (
    f"model.num_layers={L}",
    "model.hidden_size=512",
    "model.intermediate_size=1024",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.vocab_size=2048",
    "model.compute_dtype=bfloat16",
    "train.sequence_length=1024",
    "optimizer.warmup_tokens=0",
)
REDUCTIONS = ("all-reduce", "reduce-scatter")
NORM = 512 * (jax.__version_info__ >= (0, 11))
"""XLA of JAX 0.12 reduces one norm's vector by itself, and `Step.over` leaves out so small a transfer."""
needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


class Step:
    """A compiled step and its collectives."""

    def __init__(self, config, devices):
        self.config = config.resolve(len(devices))
        compiled = compile_step(config, devices)
        self.memory = compiled.memory_analysis()
        self.collectives = Module(compiled.as_text(), axis_sizes(self.config.parallel)).collectives()
        self.parameters = parameter_count(config.model)
        self.layer_parameters = sum(p.size for p in jax.tree.leaves(parameter_table(config)[1]["layers"])) // L

    def over(self, *axes, large=1000):
        """Collectives over exactly these axes that move more than counters and norms."""
        return [c for c in self.collectives if c.axes == axes and c.elements >= large]


def on(tiny_config, devices, zero, data=DEVICES, tensor=1, loop=False, reduce_dtype="float32"):
    batch = (f"train.global_batch_sequences={M * DEVICES}", f"train.microbatch_sequences={DEVICES // data}")
    axes = (f"parallel.zero={zero}", f"parallel.data={data}", f"parallel.tensor={tensor}")
    axes += (f"parallel.reduce_dtype={reduce_dtype}",)
    return Step(tiny_config(*SIZES, *batch, *axes, *(["model.scan_layers=true"] if loop else [])), devices)


@pytest.fixture(scope="module")
def gpu_step(tiny_config):
    cache = {}

    def make(zero, data=DEVICES, tensor=1, loop=False, reduce_dtype="float32"):
        key = (zero, data, tensor, loop, reduce_dtype)
        if key not in cache:
            cache[key] = on(tiny_config, gpu_devices(hosts=1, gpus_per_host=DEVICES), *key)
        return cache[key]

    return make


@pytest.fixture(scope="module")
def cpu_step(tiny_config):
    cache = {}

    def make(zero):
        if zero not in cache:
            small = ("model.hidden_size=64", "model.intermediate_size=128", "train.sequence_length=32")
            batch = (f"train.global_batch_sequences={M * DEVICES}", "train.microbatch_sequences=1")
            config = tiny_config(*SIZES, *small, *batch, f"parallel.zero={zero}", "model.compute_dtype=float32")
            cache[zero] = Step(config, jax.devices())
        return cache[zero]

    return make


# --------------------------------------------------------------------------------------------------- zero 0, 1: once a step


@pytest.mark.parametrize("zero", [0, 1])
def test_every_gradient_is_reduced_once_a_step_on_cpu(cpu_step, zero):
    """In a loop over layers, and in none over microbatches."""
    step = cpu_step(zero)
    moved = step.over("data", large=0)
    # The last layer's turn is outside the loop over layers.
    assert {c.executed for c in moved if c.loops} == {L - 1}
    assert {len(c.loops) for c in moved} == {0, 1}
    reductions = [c for c in moved if c.kind in REDUCTIONS]
    reduced = sum(c.elements * c.executed * (DEVICES if c.kind == "reduce-scatter" else 1) for c in reductions)
    # Besides the gradients: loss, token count and norms.
    assert step.parameters <= reduced < step.parameters + 100


@needs_gpu_compiler
@pytest.mark.parametrize("loop", [False, True], ids=["unrolled", "loop"])
@pytest.mark.parametrize(("zero", "kind", "share"), [(0, "all-reduce", 1), (1, "reduce-scatter", DEVICES)])
def test_every_gradient_is_reduced_once_a_step_behind_others_in_float32(gpu_step, zero, kind, share, loop):
    step = gpu_step(zero, loop=loop)
    reductions = [c for c in step.over("data") if c.kind in REDUCTIONS]
    assert {c.kind for c in reductions} == {kind}
    assert {dtype for c in reductions for dtype, _ in c.buffers} == {"f32"}
    assert sum(c.elements * share * c.executed for c in reductions) == pytest.approx(step.parameters, abs=100 + NORM)
    hides_layers(step, reductions, share, loop)


@needs_gpu_compiler
@pytest.mark.parametrize("loop", [False, True], ids=["unrolled", "loop"])
def test_zero_1_gathers_weights_once_a_step_behind_others_in_the_compute_dtype(gpu_step, loop):
    step = gpu_step(1, loop=loop)
    gathers = [c for c in step.over("data") if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype, _ in c.buffers} == {"bf16"}
    assert sum(c.elements * c.executed for c in gathers) == step.parameters
    hides_layers(step, gathers, 1, loop)


def hides_layers(step, transfers, share, loop):
    """Asserts that matmuls hide all layers but the first, whose weights and gradients have nothing to hide behind. Outside a
    loop the first layer waits for the second one's weights too, and some of the second one's gradients leave with the first
    one's."""
    least = L - 1 if loop else L - 2
    behind = [c for c in transfers if c.asynchronous and c.spans_matmul]
    assert sum(c.elements * share * c.executed for c in behind) >= least * step.layer_parameters
    assert sum(c.executed for c in behind) >= least
    assert {c.executed for c in transfers if c.loops} == ({L - 1} if loop else set())


@needs_gpu_compiler
@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_that_divide_no_dim_send_the_zeros_and_no_more(tiny_config, zero):
    """Seven ranks: 512 + 6, which is 1.2% more."""
    batch = (f"train.global_batch_sequences={7 * M}", "train.microbatch_sequences=1")
    mesh = ("parallel.data=7", f"parallel.zero={zero}", *(["model.scan_layers=true"] if zero == 3 else []))
    step = Step(tiny_config(*SIZES, *batch, *mesh), gpu_devices(hosts=1, gpus_per_host=7))
    scatters, gathers = ([c for c in step.over("data") if c.kind == kind] for kind in ("reduce-scatter", "all-gather"))
    # Norms alone are reduced whole.
    assert all(c.elements < 10_000 for c in step.over("data") if c.kind == "all-reduce")
    stored = sum(p.size * 518 // 512 for p in jax.tree.leaves(parameter_table(step.config)[1]) if p.size > 10_000)
    if zero == 1:
        assert sum(7 * c.elements * c.executed for c in scatters) == stored
        assert sum(c.elements * c.executed for c in gathers) == stored
    else:
        of_layers = (step.layer_parameters - 2 * 512) * 518 // 512
        assert {c.elements for c in gathers if len(c.loops) == 2} == {of_layers}


@needs_gpu_compiler
@pytest.mark.parametrize("layers", ["loop", "unrolled"])
def test_a_single_microbatch_sends_each_layer_once_behind_others(tiny_config, layers):
    """ZeRO 1: weights arrive behind the forward pass of the layer before, gradients leave behind the backward pass of the next.
    As many bytes are sent as outside the layers."""
    batch = (f"train.global_batch_sequences={DEVICES}", "train.microbatch_sequences=1", "parallel.zero=1", "parallel.data=8")
    scan = f"model.scan_layers={str(layers == 'loop').lower()}"
    step = Step(tiny_config(*SIZES, *batch, scan), gpu_devices(hosts=1, gpus_per_host=DEVICES))
    gathers, scatters = ([c for c in step.over("data") if c.kind == kind] for kind in ("all-gather", "reduce-scatter"))
    assert {dtype for c in gathers for dtype, _ in c.buffers} == {"bf16"}
    assert {dtype for c in scatters for dtype, _ in c.buffers} == {"f32"}
    assert sum(c.elements * c.executed for c in gathers) == step.parameters
    assert step.parameters - NORM <= sum(c.elements * DEVICES * c.executed for c in scatters) <= step.parameters
    for found, share in ((gathers, 1), (scatters, DEVICES)):
        hides_layers(step, found, share, layers == "loop")


# ------------------------------------------------------------------------------------------------- zero 2, 3: layer by layer


@needs_gpu_compiler
@pytest.mark.parametrize(("zero", "dtype"), [(2, "f32"), (3, "f32"), (2, "bf16")])
@pytest.mark.slow
def test_gradients_are_scattered_per_layer_and_microbatch_behind_matmuls(gpu_step, zero, dtype):
    step = gpu_step(zero, loop=True, reduce_dtype={"f32": "float32", "bf16": "bfloat16"}[dtype])
    scatters = [c for c in step.over("data") if c.kind == "reduce-scatter"]
    assert not [c for c in step.over("data") if c.kind == "all-reduce"]
    assert {found for c in scatters for found, _ in c.buffers} == {dtype}
    scattered = sum(c.elements * DEVICES * c.executed for c in scatters)
    # Each microbatch scatters each parameter once, and at most one layer of zeros where the loop begins.
    assert M * step.parameters <= scattered <= M * (step.parameters + step.layer_parameters)
    in_layers = [c for c in scatters if len(c.loops) == 2]
    assert in_layers
    assert all(c.asynchronous and c.spans_matmul for c in in_layers)
    assert all(c.elements * DEVICES == step.layer_parameters for c in in_layers)


@needs_gpu_compiler
def test_unrolled_layers_of_zero_3_are_sent_one_by_one_behind_matmuls(gpu_step):
    """Forward each layer's weights, backward all but the last one's again, and each layer's gradients."""
    step = gpu_step(3)
    for kind, share, count in (("all-gather", 1, 2 * L - 1), ("reduce-scatter", DEVICES, L)):
        found = [c for c in step.over("data") if c.kind == kind and c.elements * share == step.layer_parameters]
        assert {(c.executed, c.asynchronous) for c in found} == {(M, True)}
        # XLA may join one with what is outside the layers; and at the first layer there is nothing to hide one.
        assert count - 1 <= len(found) <= count
        assert sum(c.spans_matmul for c in found) >= count - 2


@needs_gpu_compiler
def test_zero_3_gathers_one_layer_at_a_time_behind_matmuls(gpu_step):
    step = gpu_step(3, loop=True)
    gathers = [c for c in step.over("data") if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype, _ in c.buffers} == {"bf16"}
    in_layers = [c for c in gathers if len(c.loops) == 2]
    # One loop forward, of two layers a turn, and one backward, of which XLA may take one turn out.
    assert sorted(c.executed for c in in_layers)[:2] == [M * L // 2] * 2
    assert len(in_layers) == 3
    for c in in_layers:
        assert c.asynchronous
        assert c.spans_matmul
        assert c.elements == step.layer_parameters
        assert c.executed in (M * L // 2, M * L, M * (L - 1))
    largest = max(math.prod(shape) for c in gathers for _, shape in c.buffers)
    assert largest <= 2048 * 512  # the embedding; never a stack of layers
    total = sum(c.elements * c.executed for c in gathers)
    layers, rest = L * step.layer_parameters, step.parameters - L * step.layer_parameters
    assert total <= M * (2 * (layers + step.layer_parameters) + rest)


# ---------------------------------------------------------------------------------------------------------------- tensor


@needs_gpu_compiler
@pytest.mark.parametrize("zero", [1, 3])
def test_sequence_parallelism_gathers_and_scatters(gpu_step, zero):
    """Per layer: forward 2 all-gathers and 2 reduce-scatters of the hidden states (Megatron's count), backward as many and 2
    gathers more, of inputs that were kept in parts. In the layers no all-reduce; nowhere a weight, or anything transposed.
    """
    step = gpu_step(zero, data=2, tensor=4)
    hidden = 4 * 1024 * 512  # B S D of one data rank
    moved = step.over("tensor", large=hidden // 8)
    assert {c.kind for c in moved if c.loops} == {"all-gather", "reduce-scatter"}
    for c in moved:
        assert all(shape in ((4, 1024, 512), (4, 256, 512)) for _, shape in c.buffers)
    if zero == 1:  # zero 3's loop loses a turn to XLA, which does not change what a layer does
        gathered, scattered = (
            sum(len(c.buffers) * c.executed for c in moved if (c.kind == "all-gather") == gathers) for gathers in (True, False)
        )
        # Two more of each at the two ends of the network, one of which is not scattered but reduced.
        assert (gathered, scattered) == ((6 * L + 2) * M, (4 * L + 2) * M)


# ----------------------------------------------------------------------------------------------------------------- bytes


def test_state_falls_with_the_level(cpu_step):
    """Arguments are the state (12 bytes a parameter, shared out from level 1 on), the step's counters and the batch."""
    parameters = cpu_step(0).parameters
    batch = M * 32 * (4 * 4 + 1)  # of one device: four int32 and a bool a token
    for zero in (0, 1, 2, 3):
        share = 1 if zero == 0 else DEVICES
        assert cpu_step(zero).memory.argument_size_in_bytes == 12 * parameters // share + batch + 2 * 4


@needs_gpu_compiler
def test_gradients_and_weights_fall_with_the_level(gpu_step):
    """Temporaries: level 2 drops the whole float32 accumulator (and its sum's copy), level 3 the whole bfloat16 weights."""
    one, two, three = (gpu_step(zero).memory.temp_size_in_bytes for zero in (1, 2, 3))
    parameters, layer = gpu_step(1).parameters, gpu_step(1).layer_parameters
    spared = 1 - 1 / DEVICES
    # In exchange both keep a layer or two of gradients and, at level 3, of weights. Level 1 unrolls its layers, and needs less
    # than a loop by half a layer.
    assert one - two > 4 * parameters * spared - 3.5 * 4 * layer
    assert two - three > 2 * parameters * spared - 3 * 2 * layer - 2 * 2048 * 512 * 2


def test_the_state_is_born_in_shares(tiny_config):
    """No device computes more than its share of the initial state, and a little for the random numbers."""
    config = tiny_config(*SIZES, "parallel.zero=1", "parallel.data=8", "train.global_batch_sequences=8").resolve(DEVICES)
    mesh = make_mesh(config.parallel)
    training = build_training(config, mesh)
    with jax.set_mesh(mesh):
        memory = jax.jit(training.create, out_shardings=training.shardings).lower(0).compile().memory_analysis()
    share = 12 * parameter_count(config.model) // DEVICES
    assert memory.output_size_in_bytes == pytest.approx(share, rel=0.01)
    assert memory.temp_size_in_bytes < share


@pytest.mark.parametrize("zero", [1, 3])
def test_the_step_does_not_grow_with_depth(tiny_config, zero):
    """HLO of the train step with 32 layers is within 5% of that with 4."""

    def size(layers):
        config = tiny_config(f"model.num_layers={layers}", f"parallel.zero={zero}")
        return len(aot.trace_step(config, jax.devices()).lowered.as_text())

    assert size(32) == pytest.approx(size(4), rel=0.05)


def test_missing_gpu_packages_are_named(monkeypatch):
    """As on a machine with none of them, where even asking for a submodule fails."""

    def find_spec(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("jaxllm.compile.aot.importlib.util.find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"needs NVIDIA's packages: pip install 'jaxllm\[aot\]'"):
        gpu_devices(hosts=1, gpus_per_host=1)
