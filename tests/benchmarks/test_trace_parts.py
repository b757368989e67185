"""benchmarks/trace_parts.py: kernels of a profile find their place in the program, and no time is lost."""

import pytest
import scripts

from jaxllm.compile.hlo import Module
from jaxllm.compile.kernels import Kernel

trace_parts = scripts.load("benchmarks/trace_parts.py")

NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_{}_wgmma_f16_knob_6_128x128x64_4x1x1_cga1x1x1_kernel0_0"
LOOP = 'while(%x), condition=%c, body=%{}, backend_config={{"known_trip_count":{{"n":"{}"}}}}'
PROGRAM = f"""HloModule step

%f (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %add.1 = f32[8]{{0}} add(%p, %p)
}}

%c (x: f32[8]) -> pred[] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %true = pred[] constant(true)
}}

%inner (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %loop_add_fusion.3 = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%f
}}

%outer (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %a = f32[8]{{0}} {LOOP.format("inner", 3)}
  %b = f32[8]{{0}} {LOOP.format("inner", 3)}
  ROOT %loop_add_fusion.2 = f32[8]{{0}} fusion(%b), kind=kLoop, calls=%f
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %loop_add_fusion.1 = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%f
  %twice = f32[8]{{0}} {LOOP.format("outer", 2)}
  ROOT %wrapped_add = f32[8]{{0}} fusion(%twice), kind=kLoop, calls=%f
}}
"""


def kernel(name, kind="fusion", path="", body=("add",)):
    return Kernel(name, kind, 1, 2**20, 2**20, 100 if kind == "matmul" else 0, False, (f"jit(step)/{path}/x",), body)


STEP = [
    kernel("loop_multiply_fusion.1", path="norm"),
    kernel("cublas-gemm.7", "matmul"),
    kernel("loop_multiply_fusion.2", path="mlp"),
    kernel("custom-call.3", "attention forward"),
    kernel("input_reduce_fusion", path="loss"),
    kernel("custom-call.4", "attention backward"),
    kernel("wrapped_add.2", path="optimizer"),
]
RAN = [
    ("loop_multiply_fusion_1", 1.0),
    (NVJET, 20.0),
    ("loop_multiply_fusion_2", 3.0),
    (CUDNN.format("fprop"), 40.0),
    ("input_reduce_fusion_12", 5.0),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", 0.5),
    (CUDNN.format("bprop"), 60.0),
    ("wrapped_add_2", 7.0),
]
PARTS = {"norms", "matmuls", "swiglu", "attention_forward", "loss", "attention_backward", "optimizer"}


def test_loops_are_written_out():
    names = [kernel.name.removeprefix("loop_add_fusion.") for kernel in trace_parts.written_out(Module(PROGRAM, {}))]
    assert names == ["1", *2 * [*6 * ["3"], "2"], "wrapped_add"]


@pytest.mark.parametrize(
    ("name", "token"),
    [
        (NVJET, "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", "matmul"),
        ("gemm_fusion_dot_12", "gemm_fusion_dot"),
        (CUDNN.format("fprop"), "attention forward"),
        (CUDNN.format("bprop"), "attention backward"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", trace_parts.HELPER),
        ("void cudnn::fusion::fmha_reduce_head<true>(void const*)", trace_parts.HELPER),
        ("Memset 0", trace_parts.MEMSET),
        ("memcpy32_post", "copy"),
        ("loop_add_fusion_49", "loop_add_fusion"),
        ("loop_add_fusion_49_remat_1", "loop_add_fusion"),
        ("wrapped_add", "add"),
        ("wrapped_add_2", "add"),
    ],
)
def test_token_of_a_kernel_that_ran(name, token):
    assert trace_parts.token_of(name) == token


def test_tokens_of_the_program_are_those_that_run():
    own = [name for name, _ in RAN if trace_parts.token_of(name) != trace_parts.HELPER]
    assert [trace_parts.token_in_program(kernel) for kernel in STEP] == [trace_parts.token_of(name) for name in own]


@pytest.mark.parametrize("changed", ["all ran", "one is missing", "one is unknown", "one is more", "nothing ran"])
def test_a_difference_does_not_shift_the_rest(changed):
    """Two steps, changed in the first: each kernel keeps its part, and all seconds are somewhere."""
    first = list(RAN)
    if changed == "one is missing":
        del first[1]
    elif changed == "one is unknown":
        first[2] = ("new_kernel", 3.0)
    elif changed == "one is more":
        first.insert(2, ("new_kernel", 11.0))
    ran = [] if changed == "nothing ran" else first + RAN
    found = trace_parts.sorted_into_parts(STEP, ran, steps=2)
    seconds = {part: 2e9 * row["s"] for part, row in found["parts"].items()}
    assert sum(seconds.values()) == pytest.approx(sum(ns for _, ns in ran))
    assert 2 * sum(row["runs"] for row in found["parts"].values()) == pytest.approx(len(ran))
    if not ran:
        assert found == {"matched": 0.0, "parts": {}}
        return
    unmatched = {"one is unknown": 3.0, "one is more": 11.0}.get(changed, 0.0)
    assert seconds.pop(trace_parts.UNMATCHED, 0.0) == pytest.approx(unmatched)
    assert found["matched"] == pytest.approx(1 - unmatched / sum(ns for _, ns in ran))
    assert seconds.keys() == PARTS
    assert seconds["attention_backward"] == pytest.approx(121)
    assert seconds["optimizer"] == pytest.approx(14)
    assert seconds["norms"] == pytest.approx(2)
    matmuls = found["parts"]["matmuls"]
    assert matmuls["flops_per_s"] * matmuls["s"] == pytest.approx(100 * matmuls["runs"])
