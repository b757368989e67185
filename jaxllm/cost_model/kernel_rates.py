"""Speed of single kernels on each kind of GPU, by which the kernel account (compile/kernel_account.py) turns work into seconds.

    rates = kernel_rates(GPUS["h100-80gb"], config.model)

From Hopper on: shares of the peaks that training steps reached on one H100 SXM (80 GB, 700 W, driver 580.159, JAX 0.11.2, CUDA
13, cuDNN 9.19; 2026-11-26), each a mean over all kernels of a kind in a profile, under a power cap that lowers the clock from
1,980 to between 1,450 and 1,750 MHz:

    bfloat16 matmuls    740 of 989 TFLOP/s: 763 for Llama 3.2 1B with microbatches of 32,768 tokens, 718 for layers of 8B, 8,192
    FP8 matmuls         1,394 of 1,979 TFLOP/s, layers of 8B
    causal attention    cuDNN, FLOPs of the half: 414 forward and 347 backward with heads of 64, 514 and 421 with heads of 128
    memory              3.0 of 3.35 TB/s, fusions above 50 MB; not in here: those that round to FP8 and transpose reach 1.8
    launch              1.0 us between two kernels of a CUDA graph, 0.5 in the step with FP8

Assumed: that every other kind from Hopper on reaches the H100's shares of its own peaks, and float32 (TF32) bfloat16's. Kinds
before Hopper have an A100's shares as in step_parts.py, and a launch that nobody measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import ModelConfig
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.step_parts import ATTENTION_SHARES, FITTED, LARGE_HEAD, MEMORY_SHARE


@dataclass(frozen=True)
class KernelRates:
    """What one GPU does per second in each kind of kernel."""

    matmul_flops_per_s: float
    fp8_flops_per_s: float
    """0 on a GPU without FP8."""
    attention_forward_flops_per_s: float
    """FLOPs of the causal half per second."""
    attention_backward_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    """Time between two kernels of one stream."""


def kernel_rates(gpu: Gpu, model: ModelConfig) -> KernelRates:
    """The rates of a kind of GPU for a model's compute dtype and head size."""
    peak, memory = gpu.dense_flops["bfloat16"], gpu.memory_bandwidth_bytes_per_s
    if gpu.chip.compute_capability < (9, 0):
        matmul = fp8 = FITTED.matmul_share
        attention, bandwidth, launch_s = ATTENTION_SHARES, MEMORY_SHARE, 2e-6
    else:
        matmul, fp8, bandwidth, launch_s = 740 / 989, 1394 / 1979, 3.0 / 3.35, 1e-6
        attention = (514 / 989, 421 / 989) if model.head_dim >= LARGE_HEAD else (414 / 989, 347 / 989)
    return KernelRates(
        matmul_flops_per_s=matmul * gpu.peak_flops(model.compute_dtype),
        fp8_flops_per_s=fp8 * (gpu.float8_flops or 0.0),
        attention_forward_flops_per_s=attention[0] * peak,
        attention_backward_flops_per_s=attention[1] * peak,
        memory_bytes_per_s=bandwidth * memory,
        launch_s=launch_s,
    )
