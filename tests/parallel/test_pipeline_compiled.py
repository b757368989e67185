"""What a pipelined step does, counted where it can be seen: chunks and FLOPs in its jaxpr, messages in the HLO compiled for
eight H100s without one.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from covers import drawn
from jax.interpreters.partial_eval import dce_jaxpr
from jaxpr_walk import walk
from step_flops import step_matmul_flops

from jaxllm.compile.aot import can_compile_for_gpus, compile_step, gpu_devices
from jaxllm.compile.hlo import Module
from jaxllm.compile.jaxpr_flops import matmul_flops
from jaxllm.config import load_config
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.mesh.axes import axis_sizes, make_mesh
from jaxllm.mesh.sharding import layout, weight_rules
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import parameter_table

needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")

# --------------------------------------------------------------------------------------------- what the jaxpr of a step runs

# No two sizes alike, so that a matmul is known by its shapes.
D, F, B, S = 48, 80, 2, 64
SMALL = {"hidden_size": D, "intermediate_size": F, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 257}


def traced(layers, microbatches, *overrides):
    """(resolved config, jaxpr of value_and_grad, how attention is computed). What nobody reads is left out of the jaxpr, as XLA
    leaves it out: the layer loop asks for the gradient of the rotary angles, which takes queries and keys before they turned.
    """
    train = {"steps": 1, "sequence_length": S, "global_batch_sequences": B * microbatches, "microbatch_sequences": B}
    base = {"model": {**SMALL, "num_layers": layers, "compute_dtype": "float32"}, "train": train}
    config = load_config({**base, "data": {"mask_documents": False}, "parallel": {"data": 1}}, overrides)
    devices = jax.devices()[: math.prod(axis_sizes(config.parallel).values())]
    config = config.resolve(len(devices))
    mesh = make_mesh(config.parallel, devices)
    shape = (config.num_microbatches, config.train.global_batch_sequences // config.num_microbatches, S)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "mask": jnp.bool_}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    with jax.set_mesh(mesh):
        functions = parallelize(config, mesh)
        params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), functions.table)
        program = jax.make_jaxpr(functions.value_and_grad)(params, batch).jaxpr
    live, _ = dce_jaxpr(program, [True] * len(program.outvars))
    return config, live, functions.attention


def matmuls_with(program, weight, contracted):
    """How often each rank multiplies by a matrix of this shape, summing over its dim `contracted`."""

    def is_one(equation):
        if equation.primitive.name != "dot_general":
            return False
        sides = zip(equation.invars, equation.params["dimension_numbers"][0], strict=True)
        return any(side.aval.shape == weight and tuple(dims) == (contracted,) for side, dims in sides)

    return sum(visit.executed for visit in walk(program) if is_one(visit.equation))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "P", "V", "M"),
    [
        ("gpipe", 4, 1, 6),
        ("1f1b", 4, 1, 6),
        ("1f1b", 2, 1, 1),
        ("1f1b", 8, 1, 3),
        ("interleaved", 4, 2, 8),
        ("interleaved", 2, 3, 4),
    ],
)
def test_every_stage_runs_as_many_chunks_as_theory_says(schedule, P, V, M, remat):
    """M V + P - 1 forward and as many backward, whatever the schedule; the head once a microbatch. The last matmul of a block
    is in no policy's recomputation, so it tells a forward; a backward is told by that matmul's gradient.
    """
    layers = 2 * P * V - 1  # two a chunk, one of them identity
    overrides = (
        f"parallel.pipe={P}",
        f"parallel.virtual_stages={V}",
        f"parallel.schedule={schedule}",
        f"parallel.remat={remat}",
    )
    _, program, _ = traced(layers, M, *overrides)
    forward, backward = (matmuls_with(program, (F, D), dim) / 2 for dim in (0, 1))
    assert (forward, backward) == (M * V + P - 1, M * V + P - 1)
    rows = -(-257 // P)
    assert matmuls_with(program, (rows, D), 1) == M  # logits
    assert matmuls_with(program, (rows, D), 0) == M  # their gradient


MESHES = {
    "one device": (),
    "tensor": ("parallel.tensor=2",),
    "data": ("parallel.data=2", "parallel.zero=3", "train.global_batch_sequences=32"),
    "pipe 4": ("parallel.pipe=4",),
    "gpipe": ("parallel.pipe=2", "parallel.schedule=gpipe"),
    "pipe 2, tensor 2": ("parallel.pipe=2", "parallel.tensor=2"),
    "pipe 2, keys on every tensor rank": ("parallel.pipe=2", "parallel.tensor=4"),
    "V 2": ("parallel.pipe=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved"),
    "pipe 2, ring": ("parallel.pipe=2", "parallel.context=2", "parallel.context_method=ring"),
    "pipe 2, ring of 4": ("parallel.pipe=2", "parallel.context=4", "parallel.context_method=ring"),
    "pipe 2, gathered keys": ("parallel.pipe=2", "parallel.context=2", "parallel.context_method=all_gather"),
    "pipe 2, ZeRO 3": ("parallel.pipe=2", "parallel.data=2", "parallel.zero=3", "train.global_batch_sequences=32"),
}
POLICIES = ("none", "selective", "full", "offload", "{query: keep, mlp_up: keep}")
MORE = ("tensor", "data", "pipe 2, ring of 4", "pipe 2, gathered keys")
REST = [(mesh, remat) for mesh in MORE for remat in POLICIES]
SLOW = [("gpipe", remat) for remat in POLICIES] + REST[::4]
"""Every mesh, every policy, and gpipe with every policy."""


def counted():
    for mesh, remat in ((mesh, remat) for mesh in MESHES for remat in POLICIES if mesh not in ("gpipe", *MORE)):
        yield pytest.param(mesh, remat, id=f"{mesh}-{remat}")
    for mesh, remat in SLOW + drawn(REST, SLOW):
        yield pytest.param(mesh, remat, marks=pytest.mark.slow, id=f"{mesh}-{remat}")


@pytest.mark.parametrize(("mesh", "remat"), counted())
def test_no_recomputation_is_hidden(mesh, remat):
    """FLOPs of the step's matmuls, loops multiplied out, are those of the closed form."""
    config, program, attention = traced(8, 8, *MESHES[mesh], f"parallel.remat={remat}")
    counted, expected = matmul_flops(program), step_matmul_flops(config, attention)
    # In blocks attention's backward sums output x gradient over the head size, as a matmul: 1 / (5 S) of what it does.
    assert counted == (expected if attention == "xla" else pytest.approx(expected, rel=0.01))


def test_without_pipeline_or_recomputation_they_are_the_model_flops():
    config, program, _ = traced(8, 8, "model.vocab_size=256", "parallel.remat=none")
    tokens = config.train.global_batch_sequences * S
    assert matmul_flops(program) == tokens * train_flops_per_token(config.model, S, causal=False)


def test_kernels_that_count_for_themselves_have_no_closed_form():
    config, _, _ = traced(2, 2)
    with pytest.raises(ValueError, match="cudnn ring"):
        step_matmul_flops(config, "cudnn ring")


# ----------------------------------------------------------------------------------------------- messages, compiled for H100s


GROUPS = {
    "{{0,2},{1,3},{4,6},{5,7}}": ("data",),
    "[4,2]<=[8]": ("tensor",),
    "[4,2]<=[2,4]T(1,0)": ("pipe",),
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1','axis_2'}": ("data", "tensor"),
    # Mesh dims in another order than the devices': axis_0 is what is second among them.
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2], device_ids=([2,2,2]T(1,0,2)) {'axis_0'}": ("data",),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_axes_are_read_from_every_spelling_of_replica_groups(groups):
    line = f"  %all-reduce.1 = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    text = "\n".join(["HloModule m", "ENTRY %main (x: f32[4]) -> f32[4] {", line, "}"])
    (found,) = Module(text, {"pipe": 2, "data": 2, "tensor": 2}).collectives()
    assert found.axes == GROUPS[groups]


# Layers, vocabulary and sequences of Llama 3.1 8B: XLA combines and overlaps messages by their sizes.
CHUNK, M = 7, 12
WIDTH, LENGTH, VOCABULARY = 4096, 8192, 128256
MODEL = {"name": "llama-3.1-8b", "attention": "cudnn"}
STEPS = {
    "1f1b": {"pipe": 2, "data": 2, "tensor": 2, "zero": 1},
    "interleaved, tied": {"pipe": 2, "data": 2, "tensor": 2, "zero": 1, "virtual_stages": 2},
    "ring": {"pipe": 2, "context": 2, "tensor": 2, "zero": 1, "context_method": "ring"},
    "ZeRO 0": {"pipe": 2, "data": 2, "tensor": 2, "zero": 0},
    "ZeRO 2": {"pipe": 2, "data": 2, "tensor": 2, "zero": 2},
    "ZeRO 3": {"pipe": 2, "data": 2, "tensor": 2, "zero": 3},
    "interleaved, ZeRO 3": {"pipe": 2, "data": 2, "tensor": 2, "zero": 3, "virtual_stages": 2},
    "tensor 1": {"pipe": 4, "data": 2, "zero": 1},
    "pipe 4": {"pipe": 4, "tensor": 2},
}


class Step:
    """A compiled step. Loops over layers are told by their turns, CHUNK or, where XLA has taken one out, one less: no other
    loop has as many."""

    def __init__(self, name):
        parallel = {"data": 1, "remat": "selective", **STEPS[name]}
        P, V, data = parallel["pipe"], parallel.get("virtual_stages", 1), parallel["data"]
        parallel["schedule"] = "interleaved" if V > 1 else "1f1b"
        train = {"steps": 1, "sequence_length": LENGTH, "microbatch_sequences": 1, "global_batch_sequences": M * data}
        # Two turns of the head's loop.
        train["loss_chunk_tokens"] = LENGTH // parallel.get("context", 1) // 2
        model = {**MODEL, "num_layers": CHUNK * P * V, "tie_embeddings": "tied" in name}
        base = {"model": model, "train": train, "parallel": parallel, "data": {"mask_documents": False}}
        self.config = load_config(base, ["optimizer.warmup_tokens=0"]).resolve(8)
        compiled = compile_step(self.config, gpu_devices(hosts=1, gpus_per_host=8))
        self.P, self.V, self.t, self.c = P, V, self.config.parallel.tensor, self.config.parallel.context
        self.collectives = Module(compiled.as_text(), axis_sizes(self.config.parallel)).collectives()
        self.hidden = ("bf16", (1, LENGTH // (self.c * self.t), WIDTH))
        self.units = M * V + P - 1

    def over(self, axis, *kinds):
        return [c for c in self.collectives if axis in c.axes and (not kinds or c.kind in kinds)]

    def steady(self, collectives):
        """Those at the level of ticks, in the loop that does most of them."""
        ticks = [c for c in collectives if c.loops and not in_layers(c)]
        most = max(c.executed for c in ticks)
        return [c for c in ticks if c.executed == most]


def in_layers(collective):
    return collective.loops[-1:] in ((CHUNK,), (CHUNK - 1,))


@pytest.fixture(scope="module")
def step():
    made = {}

    def get(name):
        if name not in made:
            made[name] = Step(name)
        return made[name]

    return get


MARKS = {"1f1b": (), "interleaved, ZeRO 3": pytest.mark.nightly}
ALL = [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in STEPS]


def only(*names):
    return [parameter for parameter in ALL if parameter.values[0] in names]


@needs_gpu_compiler
@pytest.mark.parametrize("name", only("1f1b", "interleaved, tied", "ring", "ZeRO 0", "pipe 4"))
@pytest.mark.slow
def test_stage_transfers_lie_behind_a_loop_over_layers(step, name):
    """Both of the steady state. At ZeRO 2 and 3 only one of them is held to it."""
    transfers = step(name).steady(step(name).over("pipe", "collective-permute"))
    # Interleaved, a turn is a tick with the vocabulary's work and one without.
    assert len(transfers) == (4 if step(name).V > 1 else 2)
    assert all(c.asynchronous and c.spans_loop for c in transfers)


@needs_gpu_compiler
@pytest.mark.parametrize("name", ALL)
def test_messages_are_a_ranks_part_of_the_hidden_states(step, name):
    """B S D / (c t) elements, one forward and one backward a unit at most; nothing else is permuted over pipe."""
    sent = step(name).over("pipe", "collective-permute")
    assert {buffer for c in sent for buffer in c.buffers} == {step(name).hidden}
    messages = sum(len(c.buffers) * c.executed for c in sent)
    # What nobody takes any more XLA leaves out: the first and last of each way.
    assert 2 * (step(name).units - step(name).V) - 2 <= messages <= 2 * step(name).units


@needs_gpu_compiler
@pytest.mark.parametrize("name", ALL)
def test_nothing_crosses_stages_inside_a_loop_over_layers(step, name):
    inside = [c for c in step(name).collectives if in_layers(c)]
    assert inside or step(name).t == 1
    assert not [c for c in inside if "pipe" in c.axes]


@needs_gpu_compiler
@pytest.mark.parametrize("name", ALL)
def test_four_hidden_states_are_summed_over_stages_for_each_microbatch(step, name):
    """In the steady loop: look-up, output, and the gradients of both. Beside them what the loss takes: float32 of a token."""
    sums = [c for c in step(name).over("pipe", "all-reduce") if not in_layers(c)]
    hidden = [c for c in sums if {dtype for dtype, _ in c.buffers} == {"bf16"}]
    steady = step(name).steady(hidden)
    size = math.prod(step(name).hidden[1])
    assert sum(c.elements for c in steady) == 4 * size
    turns = steady[0].executed
    assert turns in (M, M - 1) or step(name).V > 1
    # All in all: a few more, of ticks that fill and drain the pipeline.
    all_in_all = sum(c.elements * c.executed for c in hidden) / size
    assert 4 * M <= all_in_all <= 4 * M + 2 * step(name).P * step(name).V
    others = [c for c in sums if c not in hidden and c.loops]
    assert max(c.elements for c in others) <= 2 * LENGTH // step(name).c


@needs_gpu_compiler
@pytest.mark.parametrize("name", ALL)
def test_the_vocabulary_is_never_gathered(step, name):
    """Each rank keeps V / (P t) rows: nothing gathers over pipe, no result of a gather has more of them, and no sum over pipe
    in a loop is as large as a slice of a matrix."""
    rows = VOCABULARY // (step(name).P * step(name).t)
    assert not step(name).over("pipe", "all-gather", "all-to-all")
    gathered = {shape for c in step(name).collectives if c.kind == "all-gather" for _, shape in c.buffers}
    assert gathered
    many = {size for shape in gathered for size in shape if size % rows == 0 and size > rows}
    assert not many
    assert max(c.elements for c in step(name).over("pipe") if c.loops) < rows * WIDTH


# ------------------------------------------------------------------------------------------------------ data, beside a pipeline


def elements_per_rank(config):
    """(layers, the rest): parameters that one rank of (pipe, tensor) reads."""
    sizes, rules = axis_sizes(config.parallel), weight_rules(config.model, config.parallel)

    def elements(parameter):
        spec = layout(parameter, rules, config.parallel).compute
        axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
        return parameter.size // math.prod(sizes[axis] for axis in axes)

    table = parameter_table(config)[1]
    layers = sum(elements(p) for p in jax.tree.leaves(table["layers"]))
    return layers, sum(elements(p) for name, tree in table.items() if name != "layers" for p in jax.tree.leaves(tree))


@needs_gpu_compiler
@pytest.mark.parametrize("name", only("1f1b", "interleaved, tied", "ring", "ZeRO 0", "tensor 1"))
def test_zero_0_and_1_reduce_each_gradient_once_a_step_in_float32(step, name):
    config = step(name).config
    over = [c for c in step(name).collectives if {"data", "context"} & set(c.axes)]
    reductions = [c for c in over if c.kind in ("all-reduce", "reduce-scatter")]
    assert all(c.loops == () for c in reductions)
    assert {dtype for c in reductions for dtype, _ in c.buffers if c.elements > 1} == {"f32"}  # one counts tokens
    share = {"all-reduce": 1, "reduce-scatter": 2}
    reduced = sum(c.elements * share[c.kind] for c in reductions)
    # Besides: loss, token count and norms.
    assert reduced == pytest.approx(sum(elements_per_rank(config)), rel=1e-4)
    # In the loops nothing crosses data, and over context the ring alone.
    assert {c.kind for c in over if c.loops} == ({"collective-permute"} if name == "ring" else set())


@needs_gpu_compiler
@pytest.mark.parametrize("name", only("1f1b", "interleaved, tied", "ZeRO 2", "tensor 1"))
def test_zero_1_and_2_gather_weights_once_a_step_in_the_compute_dtype(step, name):
    gathers = step(name).over("data", "all-gather")
    assert all(c.loops == () for c in gathers)
    assert {dtype for c in gathers for dtype, _ in c.buffers} == {"bf16"}
    assert sum(c.elements for c in gathers) == pytest.approx(sum(elements_per_rank(step(name).config)), rel=1e-4)


@needs_gpu_compiler
@pytest.mark.parametrize("name", only("ZeRO 2", "ZeRO 3", "interleaved, ZeRO 3"))
def test_zero_2_and_3_scatter_each_layer_in_float32_in_every_tick(step, name):
    layer = elements_per_rank(step(name).config)[0] // (CHUNK * step(name).V)
    scatters = [c for c in step(name).over("data", "reduce-scatter") if c.loops]
    assert {dtype for c in scatters for dtype, _ in c.buffers} == {"f32"}
    if name == "ZeRO 2":
        # XLA leaves bare attention's matrices, a fifth of the elements; of ZeRO 3, whose backward gathers as well, others.
        in_loop = [c for c in scatters if in_layers(c)]
        assert all(c.asynchronous for c in in_loop)
        wide = step(name).config.model.intermediate_size // step(name).t
        assert all(c.spans_matmul for c in in_loop if wide in c.buffers[0][1])
    # Of each chunk a turn more, where the loop begins with zeros.
    everything = step(name).over("data", "reduce-scatter")
    rest = elements_per_rank(step(name).config)[1]
    scattered = sum(2 * c.elements * c.executed for c in everything) - rest
    assert step(name).units * CHUNK * layer <= 1.001 * scattered
    assert scattered <= 1.001 * step(name).units * (CHUNK + 1) * layer


@needs_gpu_compiler
@pytest.mark.parametrize("name", only("ZeRO 3", "interleaved, ZeRO 3"))
def test_zero_3_gathers_each_layer_in_the_compute_dtype_in_every_tick(step, name):
    layer = elements_per_rank(step(name).config)[0] // (CHUNK * step(name).V)
    gathers = [c for c in step(name).over("data", "all-gather") if c.loops]
    assert {dtype for c in gathers for dtype, _ in c.buffers} == {"bf16"}
    gathered = sum(c.elements * c.executed for c in gathers)
    # Forward and backward, and for each chunk one ahead of its first layer.
    assert (step(name).units - 2) * 2 * CHUNK * layer <= 1.001 * gathered
    assert gathered <= 1.001 * step(name).units * 2 * (CHUNK + 1) * layer


@needs_gpu_compiler
@pytest.mark.parametrize("name", only("ring"))
def test_the_ring_turns_inside_the_stages(step, name):
    """Keys and values a hop forward and a hop backward, their gradients one, for each layer of each unit."""
    hops = [c for c in step(name).over("context", "collective-permute") if in_layers(c)]
    assert {c.axes for c in hops} == {("context",)}
    sent = {d: sum(c.executed for c in hops for dtype, _ in c.buffers if dtype == d) for d in ("bf16", "f32")}
    assert sent == {"bf16": 2 * step(name).units * CHUNK, "f32": step(name).units * CHUNK}
    assert all(c.asynchronous and c.spans_matmul for c in hops)
