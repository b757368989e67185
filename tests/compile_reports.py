"""Compile reports made by hand: REPORT, and one that is worse."""

import dataclasses

from tiny import TINY

from jaxllm.compile.kernels import KernelAccount, KernelPart
from jaxllm.compile.overlap import CollectiveRow, Overlap
from jaxllm.compile.report import CompileReport
from jaxllm.config import load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.kernel_rates import kernel_rates

RECIPE = {**TINY, "data": {"source": "python_stdlib"}}
RATES = kernel_rates(GPUS["h100-80gb"], load_config(RECIPE).model)
GATHER = CollectiveRow("all-gather", ("data",), "bf16", True, True, True, 2, 64, 2**30, 2**30)
SCALAR = CollectiveRow("all-reduce", ("data", "tensor"), "f32", True, False, True, 1, 1, 4, 8)


def part(name, seconds, runs=10):
    return KernelPart(name, runs, 10**9, 0, seconds, 0.0, None)


def account(*parts):
    step_s = sum(one.seconds for one in parts)
    return KernelAccount(parts, step_s, {"forward": step_s / 3, "backward": step_s * 2 / 3}, 0.5, 0.4, RATES)


def exposed(kind, axes, seconds):
    return Overlap(kind, axes, 64, 2.0**30, 0.0, 0.0, 0.0, 0.5, seconds)


REPORT = CompileReport(
    gpu="h100-80gb",
    gpus=8,
    gpus_per_host=8,
    hosts_because="the largest divisor",
    mesh={"pipe": 1, "data": 8, "context": 1, "tensor": 1},
    attention="cudnn",
    argument_bytes=10 * 2**30,
    temp_bytes=20 * 2**30,
    output_bytes=10 * 2**30,
    alias_bytes=10 * 2**30,
    workspace_bytes=0,
    total_bytes=30 * 2**30,
    host_bytes=0,
    memory_bytes=80 * 2**30,
    capacity_bytes=72 * 2**30,
    fits=True,
    share_of_capacity=30 / 72,
    compile_s=10.0,
    trace_s=2.0,
    hlo_instructions=3000,
    hlo_bytes=10**6,
    executed_flops=10**15,
    attention_kernel_flops=0,
    compiled_flops=10**15,
    model_flops=9 * 10**14,
    near_rematerialisation=False,
    real_memory=None,
    collectives=(GATHER, SCALAR),
    largest_results=(),
    warnings=(),
    jax_version="0.10.2",
    overlap=(exposed("all-gather", ("data",), 0.01), exposed("all-reduce", ("data", "tensor"), 0.0)),
    exposed_transfers_s=0.01,
    kernels=account(part("matmuls", 0.9), part("norms", 0.05), part("transfers", 0.01)),
    packages=("jax-cuda13-plugin 0.10.2", "jaxllm 0.1.0 (code 0123456789)"),
)
WORSE = dataclasses.replace(
    REPORT,
    jax_version="0.12.0",
    temp_bytes=22 * 2**30,
    total_bytes=32 * 2**30,
    hlo_instructions=2900,
    compile_s=100.0,
    collectives=(dataclasses.replace(GATHER, behind_matmuls=False), dataclasses.replace(SCALAR, behind_matmuls=False)),
    overlap=(exposed("all-gather", ("data",), 0.04), exposed("all-reduce", ("data", "tensor"), 1e-6)),
    exposed_transfers_s=0.040001,
    kernels=account(part("matmuls", 0.9), part("norms", 0.04), part("copies", 0.02), part("transfers", 0.040001)),
    warnings=("Something is bare.",),
)
