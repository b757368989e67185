"""Speed of single kernels on each kind of GPU, by which the kernel account (compile/kernel_account.py) turns work into seconds.

    rates = kernel_rates(GPUS["h100-80gb"], config.model)

None of it was measured by this project. From Hopper on: what large bfloat16 matmuls and copies are reported to reach on an H100
SXM under its power limit (700 of 989 TFLOP/s, 2.7 of 3.35 TB/s), and causal attention by cuDNN as in Shah et al. 2024,
"FlashAttention-3" (560 and 460 TFLOP/s forward and backward with heads of 128; 420 and 330 with heads of 64). For an A100 as in
step_parts.py. The day a GPU gives rates, they replace the shares here.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import ModelConfig
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.step_parts import ATTENTION_SHARES, FITTED, MEMORY_SHARE

LARGE_HEAD = 128
"""Head size from which attention reaches the faster rates."""


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
    """The rates of a kind of GPU for a model's compute dtype and head size. That TF32 reaches the same share of its peak as
    bfloat16 is a guess."""
    peak, memory = gpu.dense_flops["bfloat16"], gpu.memory_bandwidth_bytes_per_s
    if gpu.chip.compute_capability < (9, 0):
        matmul, attention, bandwidth = FITTED.matmul_share, ATTENTION_SHARES, MEMORY_SHARE
    else:
        matmul, bandwidth = 700 / 989, 2.7 / 3.35
        attention = (560 / 989, 460 / 989) if model.head_dim >= LARGE_HEAD else (420 / 989, 330 / 989)
    return KernelRates(
        matmul_flops_per_s=matmul * gpu.peak_flops(model.compute_dtype),
        fp8_flops_per_s=matmul * (gpu.float8_flops or 0.0),
        attention_forward_flops_per_s=attention[0] * peak,
        attention_backward_flops_per_s=attention[1] * peak,
        memory_bytes_per_s=bandwidth * memory,
        launch_s=2e-6,
    )
