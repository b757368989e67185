"""The kernel account: bytes by hand-written HLO; FLOPs of compiled steps by part against closed forms.

Tests that compile are skipped without the extra `aot`.
"""

import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from tiny import SMALL_MODEL

from jaxllm.cli import app as cli
from jaxllm.compile import report as report_module
from jaxllm.compile.aot import can_compile_for_gpus
from jaxllm.compile.hlo import Module
from jaxllm.compile.kernels import PARTS, Kernel, kernel_account, kernel_seconds, kernels, part_of
from jaxllm.compile.overlap import by_kind, simulate_overlap
from jaxllm.compile.report import CompileReport, compile_report
from jaxllm.compile.text import render, render_kernels
from jaxllm.config import ConfigError, load_config
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.flops import attention_flops_per_token, layer_matmul_parameters, train_flops_per_token
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.kernel_rates import kernel_rates
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.untrusted import checked

H100 = GPUS["h100-80gb"]
needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")

# ------------------------------------------------------------------------------------------------- bytes and kinds, by hand

CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"]}}}, metadata={op_name="jit(f)/transpose(jvp())/rematted_computation/mlp/dot_general"}'
)
HLO = """HloModule by_hand

%slice_of_a_stack (stack: f32[4,8], number: s32[]) -> f32[8] {
  %stack = f32[4,8]{1,0} parameter(0)
  %number = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8]{1,0} dynamic-slice(%stack, %number, %zero), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%row)
}

%into_a_stack (stack.1: f32[4,8], row.1: f32[8], number.1: s32[]) -> f32[4,8] {
  %stack.1 = f32[4,8]{1,0} parameter(0)
  %row.1 = f32[8]{0} parameter(1)
  %number.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %update = f32[1,8]{1,0} bitcast(%row.1)
  ROOT %updated = f32[4,8]{1,0} dynamic-update-slice(%stack.1, %update, %number.1, %zero.1)
}

%added_to_a_stack (stack.2: f32[4,8], row.2: f32[8], number.2: s32[]) -> f32[4,8] {
  %stack.2 = f32[4,8]{1,0} parameter(0)
  %row.2 = f32[8]{0} parameter(1)
  %number.2 = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  %before = f32[1,8]{1,0} dynamic-slice(%stack.2, %number.2, %zero.2), dynamic_slice_sizes={1,8}
  %more = f32[1,8]{1,0} bitcast(%row.2)
  %sum = f32[1,8]{1,0} add(%before, %more)
  ROOT %updated.1 = f32[4,8]{1,0} dynamic-update-slice(%stack.2, %sum, %number.2, %zero.2)
}

%computed_into_a_stack (stack.4: f32[4,8], row.4: f32[8], number.4: s32[]) -> f32[4,8] {
  %stack.4 = f32[4,8]{1,0} parameter(0)
  %row.4 = f32[8]{0} parameter(1)
  %number.4 = s32[] parameter(2)
  %zero.4 = s32[] constant(0)
  %last = s32[] constant(3)
  %turned = s32[] subtract(%last, %number.4)
  %square = f32[8]{0} multiply(%row.4, %row.4), metadata={op_name="jit(f)/jvp()/norm/mul"}
  %update.4 = f32[1,8]{1,0} bitcast(%square)
  ROOT %updated.4 = f32[4,8]{1,0} dynamic-update-slice(%stack.4, %update.4, %turned, %zero.4)
}

%stack_to_stack (from: f32[4,8], to: f32[4,8], number.5: s32[]) -> f32[4,8] {
  %from = f32[4,8]{1,0} parameter(0)
  %to = f32[4,8]{1,0} parameter(1)
  %number.5 = s32[] parameter(2)
  %zero.5 = s32[] constant(0)
  %one = s32[] constant(1)
  %next.5 = s32[] add(%number.5, %one)
  %row.5 = f32[1,8]{1,0} dynamic-slice(%from, %number.5, %zero.5), dynamic_slice_sizes={1,8}
  ROOT %updated.5 = f32[4,8]{1,0} dynamic-update-slice(%to, %row.5, %next.5, %zero.5)
}

%into_zeros (row.6: f32[8], number.6: s32[]) -> f32[4,8] {
  %row.6 = f32[8]{0} parameter(0)
  %number.6 = s32[] parameter(1)
  %nothing = f32[] constant(0)
  %zero.6 = s32[] constant(0)
  %zeros.6 = f32[4,8]{1,0} broadcast(%nothing), dimensions={}
  %update.6 = f32[1,8]{1,0} bitcast(%row.6)
  ROOT %updated.6 = f32[4,8]{1,0} dynamic-update-slice(%zeros.6, %update.6, %number.6, %zero.6)
}

%filled () -> f32[4,8] {
  %zero.3 = f32[] constant(0)
  ROOT %zeros = f32[4,8]{1,0} broadcast(%zero.3), dimensions={}
}

%product (x: bf16[16,8], w: bf16[8,32]) -> bf16[16,32] {
  %x = bf16[16,8]{1,0} parameter(0)
  %w = bf16[8,32]{1,0} parameter(1)
  ROOT %xw = bf16[16,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (state: (s32[], f32[4,8])) -> pred[] {
  %state = (s32[], f32[4,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

%turn (state.1: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %state.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  %stack.3 = f32[4,8]{1,0} get-tuple-element(%state.1), index=1
  %read = f32[8]{0} fusion(%stack.3, %count.1), kind=kLoop, calls=%slice_of_a_stack
  %written = f32[4,8]{1,0} fusion(%stack.3, %read, %count.1), kind=kLoop, calls=%into_a_stack
  %summed = f32[4,8]{1,0} fusion(%written, %read, %count.1), kind=kLoop, calls=%added_to_a_stack
  %computed = f32[4,8]{1,0} fusion(%summed, %read, %count.1), kind=kLoop, calls=%computed_into_a_stack
  %moved = f32[4,8]{1,0} fusion(%stack.3, %computed, %count.1), kind=kLoop, calls=%stack_to_stack
  %fresh = f32[4,8]{1,0} fusion(%read, %count.1), kind=kLoop, calls=%into_zeros
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%count.1, %moved)
}

%product_of_a_slice (x.7: bf16[64,8], w.7: bf16[8,32], number.7: s32[]) -> (bf16[16,32], s8[4096]) {
  %x.7 = bf16[64,8]{1,0} parameter(0)
  %w.7 = bf16[8,32]{1,0} parameter(1)
  %number.7 = s32[] parameter(2)
  %zero.7 = s32[] constant(0)
  %chunk.7 = bf16[16,8]{1,0} dynamic-slice(%x.7, %number.7, %zero.7), dynamic_slice_sizes={16,8}, SLICE_NAME
  %call.7 = (bf16[16,32]{1,0}, s8[4096]{0}) custom-call(%chunk.7, %w.7), HEAD
  %xw.7 = bf16[16,32]{1,0} get-tuple-element(%call.7), index=0
  %workspace.7 = s8[4096]{0} get-tuple-element(%call.7), index=1
  ROOT %both.7 = (bf16[16,32]{1,0}, s8[4096]{0}) tuple(%xw.7, %workspace.7)
}

ENTRY %main (a: bf16[16,8], b: bf16[8,32], n: s32[], c: bf16[64,8]) -> f32[4,8] {
  %a = bf16[16,8]{1,0} parameter(0)
  %b = bf16[8,32]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %c = bf16[64,8]{1,0} parameter(3)
  %fill = f32[4,8]{1,0} fusion(), kind=kLoop, calls=%filled
  %gemm = bf16[16,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%product, metadata={op_name="jit(f)/jvp()/mlp/dot_general"}
  %call = (bf16[16,32]{1,0}, s8[4096]{0}) custom-call(%a, %b), CUBLAS
  %logits = (bf16[16,32]{1,0}, s8[4096]{0}) fusion(%c, %b, %n), kind=kCustom, calls=%product_of_a_slice, SLICE_NAME
  %start = (s32[], f32[4,8]{1,0}) tuple(%n, %fill)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%condition, body=%turn, backend_config=TRIPS
  %result = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %copied = f32[4,8]{1,0} copy(%result)
}
""".replace("CUBLAS", CUBLAS).replace("TRIPS", '{"known_trip_count":{"n":"3"}}')
HLO = HLO.replace("HEAD", CUBLAS.replace("rematted_computation/mlp", "head_backward"))
HLO = HLO.replace("SLICE_NAME", 'metadata={op_name="jit(f)/jvp()/while/body/jit(dynamic_index_in_dim)/dynamic_slice"}')


def by_name():
    return {kernel.name: kernel for kernel in kernels(Module(HLO, {}))}


def test_bytes_are_those_that_move():
    """A slice reads and writes a row of 32 bytes, an update too, a sum reads two; the stack itself does not move."""
    moved = {name: (k.runs, k.read_bytes, k.written_bytes) for name, k in by_name().items()}
    number = 4
    assert moved == {
        "fill": (1, 0, 128),
        "gemm": (1, 2 * (16 * 8 + 8 * 32), 2 * 16 * 32),
        "call": (1, 2 * (16 * 8 + 8 * 32), 2 * 16 * 32),
        "logits": (1, 2 * (16 * 8 + 8 * 32) + number, 2 * 16 * 32),
        "read": (3, 32 + number, 32),
        "written": (3, 32 + number, 32),
        "summed": (3, 64 + number, 32),
        "computed": (3, 32 + number, 32),
        "moved": (3, 32 + number, 32),
        "fresh": (3, 32 + number, 128),
        "copied": (1, 128, 128),
    }


JOINED = """HloModule joined

%piece (first: f32[4,8], second: f32[4,8], third: f32[4,8]) -> f32[4,8] {
  %first = f32[4,8]{1,0} parameter(0)
  %second = f32[4,8]{1,0} parameter(1)
  %third = f32[4,8]{1,0} parameter(2)
  %whole = f32[8,8]{1,0} concatenate(%first, %second), dimensions={0}
  %powers = f32[8,8]{1,0} exponential(%whole)
  %half = f32[4,8]{1,0} slice(%powers), slice={[0:4], [0:8]}
  ROOT %sum = f32[4,8]{1,0} add(%half, %third)
}

ENTRY %main (a: f32[4,8], b: f32[4,8], c: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  %c = f32[4,8]{1,0} parameter(2)
  ROOT %fusion = f32[4,8]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%piece
}
"""


def test_of_joined_arrays_a_fusion_reads_what_its_result_needs():
    """Half of what is joined, 128 of 256 bytes, whichever array it is in; and all of the third."""
    (kernel,) = kernels(Module(JOINED, {}))
    assert (kernel.read_bytes, kernel.written_bytes) == (128 + 128, 128)


def test_parts_follow_from_operations_and_scopes():
    assert {name: part_of(kernel) for name, kernel in by_name().items()} == {
        "fill": "zero_fills",
        "gemm": "matmuls",
        "call": "matmuls_again",
        "logits": "head_matmuls",
        "read": "slices",
        "written": "stacks",
        "summed": "sums",
        "computed": "norms",
        "moved": "stacks",
        "fresh": "stacks",
        "copied": "copies",
    }
    assert [k.flops for k in by_name().values() if k.kind == "matmul"] == [2 * 16 * 8 * 32] * 3


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("jit(step)/while/body/jvp()/checkpoint/norm/mul", "norms"),
        ("jit(step)/while/body/transpose(jvp(residual))/add_any", "norms"),
        ("jit(step)/while/body/jvp()/attention/rotary/convert_element_type", "rotary"),
        ("jit(step)/while/body/jvp()/attention/attend/select_n", "attention_blocks"),
        ("jit(step)/while/body/jvp()/attention/concatenate", "rotary"),
        ("jit(step)/while/body/jvp()/mlp/mul", "swiglu"),
        ("jit(step)/while/body/jvp()/head_backward/mul", "loss"),
        ("jit(step)/transpose(jvp(embedding))/scatter-add", "embedding"),
        ("jit(step)/while/body/gradient_sums/add", "sums"),
        ("jit(step)/reduce_gradients/reduce_sum", "sums"),
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/compute_copy/convert_element_type", "optimizer"),
        ("state.params['layers']['mlp']['up']", "other"),
        ("jit(step)/while/body/add", "other"),
    ],
)
def test_a_scope_is_part_of_the_path(path, part):
    kernel = Kernel("k", "fusion", 1, 10_000, 10_000, 0, False, (path,), ("parameter", "multiply", "exponential"))
    assert part_of(kernel) == part
    # The operations inside tell it where XLA gave the fusion no name.
    named_inside = dataclasses.replace(kernel, op_names=("", path))
    assert part_of(named_inside) == (part if part != "optimizer" else "other")


def test_a_kernel_takes_the_longer_of_its_flops_and_its_bytes():
    model = load_config({"model": {**SMALL_MODEL, "head_dim": 128}, "train": TRAIN}).model
    rates = kernel_rates(H100, model)
    kernel = Kernel("k", "matmul", 1, 10**9, 0, 10**12, False, (), ("dot",))
    assert kernel_seconds(kernel, rates) == pytest.approx(1e12 / rates.matmul_flops_per_s + rates.launch_s)
    assert kernel_seconds(dataclasses.replace(kernel, is_fp8=True), rates) == pytest.approx(
        1e12 / rates.fp8_flops_per_s + rates.launch_s
    )
    small = dataclasses.replace(kernel, flops=10**6)
    assert kernel_seconds(small, rates) == pytest.approx(1e9 / rates.memory_bytes_per_s + rates.launch_s)
    # Small heads are slower, and TF32 than bfloat16; an A100 has no FP8.
    narrow, single = model.model_copy(update={"head_dim": 64}), model.model_copy(update={"compute_dtype": "float32"})
    assert kernel_rates(H100, narrow).attention_forward_flops_per_s < rates.attention_forward_flops_per_s
    assert kernel_rates(H100, single).matmul_flops_per_s == pytest.approx(rates.matmul_flops_per_s * 494 / 989)
    assert kernel_rates(GPUS["a100-80gb"], model).fp8_flops_per_s == 0


# ---------------------------------------------------------------------------------------------------------- DiLoCo's rounds

BESIDE = """HloModule beside

%plus (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %xy = f32[] add(%x, %y)
}

%outer (a.1: f32[1024]) -> f32[1024] {
  %a.1 = f32[1024]{0} parameter(0)
  ROOT %half = f32[1024]{0} multiply(%a.1, %a.1), metadata={op_name="jit(take)/fragment/outer_step/mul"}
}

%both (a.2: f32[1024], b.2: f32[1024]) -> f32[1024] {
  %a.2 = f32[1024]{0} parameter(0)
  %b.2 = f32[1024]{0} parameter(1)
  %new = f32[1024]{0} multiply(%a.2, %a.2), metadata={op_name="jit(take)/vmap(optimizer)/mul"}
  ROOT %kept = f32[1024]{0} add(%new, %b.2), metadata={op_name="jit(take)/fragment/outer_step/add"}
}

ENTRY %main (a: f32[1024], b: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  %change = f32[1024]{0} fusion(%a), kind=kLoop, calls=%outer, metadata={op_name="jit(take)/fragment/outer_step/mul"}
  %sum = f32[1024]{0} all-reduce(%change), replica_groups={{0,2},{1,3}}, to_apply=%plus, metadata={op_name="jit(take)/psum"}
  %inner = f32[1024]{0} all-reduce(%b), replica_groups={{0,1},{2,3}}, to_apply=%plus, metadata={op_name="jit(take)/psum"}
  ROOT %moved = f32[1024]{0} fusion(%sum, %inner), kind=kLoop, calls=%both, metadata={op_name="jit(take)/outer_step/add"}
}
"""


def in_rounds(*more):
    base = {"model": SMALL_MODEL, "train": TRAIN | {"global_batch_sequences": 4, "steps": 20}}
    return load_config(base, ["parallel.replica=2", "parallel.replica_gbit_per_s=1", *more]).resolve(4)


def predicted(config):
    return estimate_step_time(config, H100, 2)


def beside(config, apart=None):
    module = Module(BESIDE, {"replica": 2, "data": 2})
    rows = by_kind(simulate_overlap(module, H100, 2, parallel=config.parallel), apart)
    account = kernel_account(module, config, H100, 2, rows)
    return account, {row.part: row for row in account.parts}, {row.axes: row.exposed_s for row in rows}


@pytest.mark.parametrize(
    ("rounds", "apart"),
    [
        (("train.diloco_steps=8", "train.diloco_overlap=true"), 8),
        (("train.diloco_steps=8", "train.diloco_fragments=2", "train.diloco_overlap=true"), 4),
        (("train.diloco_steps=1", "train.diloco_bits=4"), 1),
    ],
)
def test_of_an_outer_step_the_mean_step_has_a_share(rounds, apart):
    """The exchange as predicted, and a kernel of the outer step alone. One that the inner step shares is in each step."""
    config = in_rounds(*rounds)
    account, parts, exposed = beside(config, apart)
    rates = account.rates
    own_s, shared_s = (moved / rates.memory_bytes_per_s + rates.launch_s for moved in (2 * 4096, 3 * 4096))
    assert parts.keys() == {"outer_step", "optimizer", "transfers"}
    assert parts["transfers"].seconds == exposed["data",] > 0
    assert parts["outer_step"].runs == 2
    assert parts["outer_step"].seconds == pytest.approx(predicted(config).between_replicas_s + own_s / apart)
    assert parts["optimizer"].seconds == pytest.approx(shared_s)
    assert account.step_s == pytest.approx(sum(row.seconds for row in account.parts))


def test_of_replicas_without_rounds_the_schedule_has_the_exchange():
    _, parts, exposed = beside(in_rounds())
    assert parts["transfers"].seconds == pytest.approx(exposed["replica",] + exposed["data",])


@pytest.mark.parametrize("network", ["parallel.replica_gbit_per_s=2", "train.diloco_steps=16", "train.diloco_bits=8"])
def test_an_account_differs_by_what_the_step_time_model_says(network):
    """A step without the exchange beside it, which is then another program."""
    configs = [in_rounds("train.diloco_steps=8", *more) for more in ((), (network,))]
    one, other = (kernel_account(Module(HLO, {}), config, H100, 2).step_s for config in configs)
    assert one - other == pytest.approx(predicted(configs[0]).step_s - predicted(configs[1]).step_s) != 0
    assert one - kernel_account(Module(HLO, {}), in_rounds(), H100, 2).step_s == pytest.approx(
        predicted(configs[0]).between_replicas_s
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_an_exchange_beside_a_compiled_step_is_not_in_each_step(monkeypatch):
    """The report's account is the same for any schedule of the exchange, and halves with twice the steps between."""
    given = []
    monkeypatch.setattr(report_module, "kernel_account", lambda *args: given.append(args) or kernel_account(*args))
    rounds = ("train.diloco_fragments=2", "train.diloco_overlap=true", "model.compute_dtype=bfloat16")
    configs = [in_rounds(*rounds, f"train.diloco_steps={steps}") for steps in (8, 16)]
    report = compile_report(configs[0], H100, 4)
    ((module, _, _, per_host, rows),) = given
    assert {row.axes: row.every_steps for row in rows} == {("replica",): 4, ("data",): None}
    assert report.exposed_transfers_s == sum(row.exposed_s for row in rows if row.axes == ("data",))
    accounts = report.kernels, kernel_account(module, configs[1], H100, per_host, rows)
    shares = [next(row for row in one.parts if row.part == "outer_step") for one in accounts]
    assert shares[0].seconds == pytest.approx(2 * shares[1].seconds)
    assert shares[0].seconds == pytest.approx(predicted(configs[0]).between_replicas_s, rel=0.01)
    difference = predicted(configs[0]).step_s - predicted(configs[1]).step_s
    assert accounts[0].step_s - accounts[1].step_s == pytest.approx(difference, rel=0.01)
    assert "over replica: in one of 4 steps" in shown_as(render(report))


def shown_as(renderable):
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False)
    console.print(renderable)
    return console.file.getvalue()


# --------------------------------------------------------------------------------------------------------- compiled steps

TRAIN = {"steps": 2, "sequence_length": 512, "global_batch_sequences": 16, "microbatch_sequences": 1}
MESHES = {
    "full": (1, "full", ()),
    "selective": (1, "selective", ()),
    "zero 3": (8, "full", ("parallel.zero=3",)),
    "pipe": (2, "{mlp_gate: keep, mlp_up: keep}", ("parallel.pipe=2",)),
}
"""Name -> (GPUs, remat, overrides)."""


def compiled(name):
    gpus, remat, overrides = MESHES[name]
    base = {
        "model": {**SMALL_MODEL, "num_layers": 4, "attention": "cudnn"},
        "train": TRAIN,
        "data": {"mask_documents": False},
    }
    config = load_config(base, [f"parallel.remat={remat}", *overrides]).resolve(gpus)
    return config, compile_report(config, H100, gpus)


@needs_gpu_compiler
@pytest.mark.parametrize("name", MESHES)
def test_flops_of_each_part_are_those_of_the_closed_form(name):
    """They are of one device. A pipeline's stages also work in ticks that carry nothing (M + P - 1 for M)."""
    config, report = compiled(name)
    model, parallel, S = config.model, config.parallel, config.train.sequence_length
    account, M = report.kernels, config.num_microbatches
    ticks = (M + parallel.pipe - 1) / M
    tokens = config.step_tokens / report.gpus * ticks * parallel.pipe
    layers = model.num_layers / parallel.pipe
    D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
    columns = {"query": model.num_heads * H, "key": model.num_kv_heads * H, "value": model.num_kv_heads * H}
    columns |= {"attention_out": model.num_heads * H, "mlp_gate": F, "mlp_up": F}
    again = set(policy_of(parallel.remat, model).recompute)
    attention = attention_flops_per_token(model, S, causal=True) / model.num_layers
    expected = {
        "matmuls": 6 * layer_matmul_parameters(model) * layers * tokens,
        "matmuls_again": 2 * D * sum(n for name, n in columns.items() if name in again) * layers * tokens,
        "head_matmuls": 6 * model.vocab_size * D * config.step_tokens / report.gpus,
        "attention_forward": attention * layers * tokens,
        "attention_backward": 2.5 * attention * layers * tokens,
        "attention_again": attention * layers * tokens if "attention_output" in again else 0,
    }
    found = {row.part: row.flops for row in account.parts if row.flops}
    if name == "pipe":
        # XLA merges so small a matmul of the forward pass with another microbatch's, repeated, by the same weight.
        assert found["matmuls_again"] <= expected["matmuls_again"]
        for flops in (found, expected):
            flops["matmuls"] += flops.pop("matmuls_again")
    assert found == {part: flops for part, flops in expected.items() if flops}
    assert sum(found.values()) * report.gpus == report.compiled_flops
    for row in account.parts:
        assert row.part in PARTS
        if row.part in ("matmuls", "head_matmuls", "attention_forward", "attention_backward"):
            assert 0 < row.least_seconds <= row.seconds
    assert account.step_s == pytest.approx(sum(row.seconds for row in account.parts))
    flops = train_flops_per_token(model, S, causal=False) * config.step_tokens
    assert account.mfu_full_square == pytest.approx(flops / account.step_s / report.gpus / 989e12)
    assert checked(json.loads(json.dumps(report.to_json())), CompileReport) == report
    # What is left without a part moves next to nothing: 1.3% where JAX 0.12 selects the messages of a pipeline, and tokens
    # order its layers.
    assert sum(row.bytes for row in account.parts if row.part == "other") < 0.014 * sum(row.bytes for row in account.parts)


@needs_gpu_compiler
def test_two_configs_are_compared():
    (_, one), (_, other) = compiled("full"), compiled("selective")

    def text(*reports):
        return shown_as(render_kernels(*reports))

    alone, both = text(one), text(one, other)
    parts = {row.part for row in one.kernels.parts}
    for shown in (alone, both):
        assert parts <= {line.split()[0] for line in shown.splitlines() if line.strip()}
    assert "MFU" in alone
    assert f"{1e3 * (other.kernels.step_s - one.kernels.step_s):+,.1f}" in both
    with pytest.raises(ConfigError, match=r"--kernels needs the figures of the GPU, and cpu has none: name a kind with --gpu"):
        text(dataclasses.replace(one, gpu="cpu", kernels=None))


# ------------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("against", "expected"),
    [(["parallel.remat=none"], ("none", 8)), (["other.yaml", "train.seed=3"], ("full", 16)), (None, None)],
    ids=["keys", "another recipe", "alone"],
)
def test_the_other_config_is_another_recipe_or_this_one_with_other_keys(monkeypatch, tmp_path, capsys, against, expected):
    """Nothing is compiled: the configs that would be are looked at."""
    monkeypatch.chdir(tmp_path)
    for name, batch in (("one.yaml", 8), ("other.yaml", 16)):
        train = {**TRAIN, "global_batch_sequences": batch}
        (tmp_path / name).write_text(yaml.safe_dump({"model": SMALL_MODEL, "train": train, "parallel": {"remat": "full"}}))
    seen = []

    def compiled_of(config, *_, **__):
        seen.append((config.parallel.remat, config.train.global_batch_sequences))
        return SimpleNamespace(kernels=object(), to_json=lambda: {"number": len(seen)})

    monkeypatch.setattr(report_module, "compile_report", compiled_of)
    cli.compile_(["one.yaml"], gpu="h100-80gb", gpus=1, kernels=True, against=against, no_cache=True, as_json=True)
    assert seen == [("full", 8), *([expected] if expected else [])]
    assert ("against" in json.loads(capsys.readouterr().out)) is (expected is not None)
