"""Speed of single kernels on each kind of GPU, by which the kernel account (compile/kernels.py) turns work into seconds.

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

from jaxllm.config import Config, ModelConfig
from jaxllm.cost_model.flops import attention_flops_per_token, moments_per_parameter
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.layer_compute import BLOCK_NORM_MOVES
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import FITTED, LARGE_HEAD, MEASURED, MEMORY_SHARE

# ------------------------------------------------------------------------------------------------------------- least time
# The least time that each part of a step can take: its model FLOPs once, and the bytes that no fusion can save.
#
# A tensor counts as often as kernels beside XLA's matmuls must read or write it. Per token and layer, with D, N, K, H, F as in
# flops.py, in elements of the compute dtype:
#
#     norms     18 D              forward each half reads the residual and the update and writes the sum and its norm; backward
#                                 each half reads three tensors and writes the gradient and the norm that the weights need;
#                                 with norms after the halves as much more as BLOCK_NORM_MOVES has
#     swiglu    9 F               3 forward; backward gate, up and the gradient in, two gradients and the product out
#     rotary    4 H (N + K)       queries and keys, in and out, in both directions
#
# Per logit 10 bytes: float32 is read twice (for its sum of exponentials, for its gradient), and the gradient is written. Per
# parameter 32 and an element of the compute dtype: AdamW's 28, the norm's 4, and the copy for the matmuls. Work that a step can
# do without has no entry.


def least_seconds(config: Config, gpu: Gpu, gpus_per_host: int, rates: KernelRates) -> dict[str, float]:
    """Part (compile/kernels.py) -> seconds of one step on one device of the busiest stage. Other parts could be 0."""
    sizes, model, M = StepModel(config, gpu, gpus_per_host, MEASURED), config.model, config.num_microbatches
    tokens, layers = M * sizes.rows, sizes.stage_layers
    matmul_rate = rates.fp8_flops_per_s if sizes.is_fp8 else rates.matmul_flops_per_s
    columns = -(-model.vocab_size // sizes.head_parts()[0])
    # Scores and weighted values.
    attention = tokens * layers * attention_flops_per_token(model, sizes.S, causal=True) / model.num_layers / sizes.t
    D, query, key, F = model.hidden_size / sizes.t, sizes.query_width, sizes.key_width, sizes.mlp_width
    parameters = sizes.shared_parameters()

    def moved(elements_per_token: float, times: float = layers, itemsize: int = sizes.itemsize) -> float:
        return tokens * times * elements_per_token * itemsize / rates.memory_bytes_per_s

    least = {
        # Of the two matmuls of the backward pass, one is for the gradient of what is trained.
        "matmuls": 2 * tokens * layers * (2 * sizes.used_parameters + sizes.used_trained_parameters) / matmul_rate,
        "head_matmuls": (6 if sizes.trains_head else 4) * tokens * columns * model.hidden_size / rates.matmul_flops_per_s,
        "attention_forward": attention / rates.attention_forward_flops_per_s,
        "attention_backward": 2.5 * attention / rates.attention_backward_flops_per_s,
        "norms": moved(18 * D * sum(BLOCK_NORM_MOVES[model.block_norms]) / sum(BLOCK_NORM_MOVES["before"])),
        "swiglu": moved(9 * F),
        "rotary": moved(4 * (query + key)),
        "loss": moved(columns, times=10, itemsize=1),
        # A row is read and written once forward; backward the gradient is read, and a float32 row is read and written.
        "embedding": moved(D, times=3 * sizes.itemsize + 8, itemsize=1),
        "optimizer": (16 + 8 * moments_per_parameter(config) + sizes.itemsize) * parameters / rates.memory_bytes_per_s,
    }
    if sizes.is_fp8:
        # XLA fuses most of them with the rounding of their results.
        least["fp8_rounding"] = sum(least.pop(part) for part in ("norms", "swiglu", "rotary"))
    return least


# --------------------------------------------------------------------------------------------------------- measured rates


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
        attention, bandwidth, launch_s = FITTED.attention_shares, MEMORY_SHARE, 2e-6
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
