"""The least time that each part of a step can take: its model FLOPs once, and the bytes that no fusion can save.

A tensor counts as often as kernels beside XLA's matmuls must read or write it. Per token and layer, with D, N, K, H, F as in
flops.py, in elements of the compute dtype:

    norms     18 D              forward each half reads the residual and the update and writes the sum and its norm; backward
                                each half reads three tensors and writes the gradient and the norm that the weights need;
                                with norms after the halves as much more as BLOCK_NORM_MOVES has
    swiglu    9 F               3 forward; backward gate, up and the gradient in, two gradients and the product out
    rotary    4 H (N + K)       queries and keys, in and out, in both directions

Per logit 10 bytes: float32 is read twice (for its sum of exponentials, for its gradient), and the gradient is written. Per
parameter 32 and an element of the compute dtype: AdamW's 28, the norm's 4, and the copy for the matmuls. Work that a step can
do without has no entry.
"""

from __future__ import annotations

from jaxllm.config import Config
from jaxllm.cost_model.flops import attention_flops_per_token, moments_per_parameter
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.kernel_rates import KernelRates
from jaxllm.cost_model.layer_compute import BLOCK_NORM_MOVES
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import MEASURED


def least_seconds(config: Config, gpu: Gpu, gpus_per_host: int, rates: KernelRates) -> dict[str, float]:
    """Part (compile/kernel_account.py) -> seconds of one step on one device of the busiest stage. Other parts could be 0."""
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
        "matmuls": 2 * tokens * layers * (2 * sizes.layer_parameters + sizes.trained_parameters) / matmul_rate,
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
